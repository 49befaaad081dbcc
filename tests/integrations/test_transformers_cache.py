"""Caches of patched Hugging Face models, under each name that they have there, and generation; the
oracle is the original.
"""

import inspect
import warnings
from contextlib import contextmanager

import pytest
import torch

transformers = pytest.importorskip("transformers")

import hugging_face as hf  # noqa: E402
from hugging_face import every_family, every_family_slowly, plain_torch  # noqa: E402, F401
from packmamba.integrations.transformers import patch  # noqa: E402

# The name of a cache that is given or comes out, and then the old name, if models take it too.
TAKES = inspect.signature(transformers.MambaForCausalLM.forward).parameters
CACHE, *OLD = ["cache", "cache_params"] if "cache" in TAKES else ["cache_params"]
every_name = pytest.mark.parametrize("name", [CACHE, *OLD])
ROW = [0, 1, 2, 0, 1, 2]


@contextmanager
def warned_of(name):
    """Expect one warning of an old name, none of the one that this transformers has."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(warning.message) for warning in caught if "cache" in str(warning.message)]
    assert len(said) == (name in OLD) and all(f"`{name}` is deprecated" in message for message in said), said


WITHOUT_ATTENTION = ["Mamba", "Mamba2", "FalconMamba"]
GENERATES = [{}, {"use_cache": False}, {"num_beams": 2}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}]


@every_family_slowly
@pytest.mark.parametrize("options", GENERATES, ids=str)
def test_generate_is_unchanged(family, options):
    if "prefill_chunk_size" in options and family in WITHOUT_ATTENTION:
        pytest.skip("transformers' own raises")
    model, packed = (m.eval() for m in hf.both(family))
    rows = [([14], 0, 0), ([4], 10, 0), ([2], 12, 0)]
    tokens, mask = hf.random_tokens(rows), hf.arguments(rows)[0]
    asked = options | {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    asked |= {"output_scores": True, "return_dict_in_generate": True}
    expected = model.generate(tokens, attention_mask=mask, **asked)
    with warned_of(CACHE):
        found = packed.generate(tokens, attention_mask=mask, **asked)
    assert torch.equal(found.sequences, expected.sequences)
    assert hf.error(torch.stack(found.scores), torch.stack(expected.scores)) < 1e-5
    prompt = packed.generate(tokens[:1, :1], **asked).sequences
    assert torch.equal(prompt, model.generate(tokens[:1, :1], **asked).sequences)


@pytest.mark.parametrize("family", WITHOUT_ATTENTION)
def test_a_second_turn_goes_on_from_the_cache_of_the_first(family):
    asked = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    turns = []
    for model in (m.eval() for m in hf.both(family)):
        first = model.generate(hf.random_tokens()[:1], **asked)
        prompt = torch.cat([first.sequences, torch.tensor([[7, 8]])], dim=1)
        turns.append(model.generate(prompt, **asked, **{CACHE: first[CACHE]}).sequences)
    assert torch.equal(*turns)


@every_family_slowly
def test_a_packed_prompt_without_a_cache_goes_on_from_its_last_document(family):
    packed, tokens = hf.both(family)[1].eval(), hf.random_tokens()[:1]
    asked = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "use_cache": False}
    asked |= {"output_scores": True, "return_dict_in_generate": True}
    expected = packed.generate(tokens[:, 6:], **asked).scores
    found = packed.generate(tokens, position_ids=hf.arguments([([5, 1, 8], 0, 0)])[1], **asked).scores
    assert hf.error(torch.stack(found), torch.stack(expected)) < 1e-5


@every_family
def test_a_cache_holds_what_the_original_s_holds(family):
    model, packed = (m.eval() for m in hf.both(family))
    rows = [([14], 0, 0), ([2], 12, 0)]
    for mask in (None, hf.arguments(rows)[0], hf.arguments([([9], 0, 5), ([14], 0, 0)])[0]):
        tokens = hf.random_tokens(rows)
        caches = [getattr(m(tokens, attention_mask=mask, use_cache=True), CACHE) for m in (model, packed)]
        for theirs, ours in zip(*(cache.layers for cache in caches)):
            for kind in ("conv_states", "recurrent_states") if hasattr(theirs, "conv_states") else ():
                expected, found = getattr(theirs, kind)[0], getattr(ours, kind)[0]
                if expected is None:  # a short convolution has no recurrence
                    assert found is None
                    continue
                assert found.dtype == expected.dtype and hf.error(found, expected) < 1e-5, kind
        steps = [m(tokens[:, :1], **{CACHE: cache}).logits for m, cache in zip((model, packed), caches)]
        assert hf.error(steps[1], steps[0]) < 1e-5


@every_name
def test_rows_that_go_on_from_a_cache_have_no_boundaries(name):
    packed = patch(hf.build("Mamba", num_hidden_layers=1)).eval()
    step = torch.ones(2, 6, dtype=torch.int64)
    cache = getattr(packed(step), CACHE)
    for boundaries, value in (
        ("seq_idx", torch.zeros(2, 6, dtype=torch.int64)),
        ("position_ids", torch.tensor([ROW, ROW])),
        ("position_ids", torch.arange(6).expand(2, 6)),
    ):
        for part in (packed, packed.backbone):
            assert hf.refused(part, **{name: cache, boundaries: value}).startswith(f"{boundaries}: ")
    with warned_of(name):
        packed(step, position_ids=torch.arange(6, 12).expand(2, 6), **{name: cache})


@pytest.mark.parametrize("family", hf.FAMILIES[:2])
@every_name
@pytest.mark.parametrize("part", ["", "backbone", "backbone.layers.0.mixer"], ids=["model", "backbone", "mixer"])
def test_a_cache_is_seen_under_either_name(family, name, part):
    if part.endswith("mixer"):
        given, options = torch.randn(2, 14, 16, generator=torch.Generator().manual_seed(2)), {}
    else:
        given, options = hf.random_tokens()[:2], {"attention_mask": hf.arguments([([14], 0, 0), ([2], 12, 0)])[0]}
    steps = []
    for whole in hf.both(family):
        module = whole.eval().get_submodule(part)
        cache = transformers.DynamicCache(config=whole.config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module(given, **options, **{name: cache})
        with warned_of(name):
            step = module(given[:, :1], **{name: cache})
        steps.append(step if part.endswith("mixer") else step[0])
    assert hf.error(steps[1], steps[0]) < 1e-5
