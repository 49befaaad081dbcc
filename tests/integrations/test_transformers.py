"""Hugging Face's Mamba models, patched: packed and padded they are what the original is, document
by document.
"""

import copy
import functools
import pickle
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

import hugging_face as hf  # noqa: E402
from hugging_face import every_family, every_family_slowly, plain_torch, wide  # noqa: E402, F401
from packmamba import SequenceLayout, leakcheck, ops  # noqa: E402
from packmamba.integrations.transformers import disable, enable, mixer, models, patch  # noqa: E402
from packmamba.integrations.transformers.boundaries import Packing  # noqa: E402

MASK, POSITION, IDX = hf.arguments(hf.ROWS)
OTHERS = ("seq_idx", "cu_seq_lens_q", "position_ids+seq_idx")
slowly = functools.partial(pytest.param, marks=pytest.mark.slow)


@every_family
@pytest.mark.parametrize("config", hf.CONFIGS.values(), ids=hf.CONFIGS.keys())
def test_packed_is_the_original_document_by_document(family, config):
    model, packed = hf.both(family, **config)
    tokens = hf.random_tokens()
    logits = packed(tokens, attention_mask=MASK, position_ids=POSITION).logits
    hf.check_same(packed, model, logits, tokens, hf.ROWS, 1e-5)


@every_family_slowly
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_a_document_s_first_token_is_no_target(family, name):
    """Labels of every token give the loss of the documents alone, of which transformers never asks
    the first.
    """
    model, packed = hf.both(family)
    tokens = hf.random_tokens()[2:3]
    parts = [part for part in tokens.split([5, 1, 8], 1) if part.shape[1] > 1]
    alone = [model(part, labels=part, num_items_in_batch=1).loss for part in parts]
    given = {"labels": tokens, "position_ids": torch.cat([torch.arange(n) for n in (5, 1, 8)])[None]}
    if name == "shift_labels":
        given["shift_labels"] = tokens.roll(-1, dims=1)
    loss = packed(tokens, num_items_in_batch=1, **given).loss
    assert torch.allclose(loss, sum(alone), rtol=1e-5)
    assert (given["labels"] == tokens).all()  # the caller's stay
    whole = packed(tokens, labels=tokens, num_items_in_batch=1).loss
    assert torch.allclose(whole, model(tokens, labels=tokens, num_items_in_batch=1).loss, rtol=1e-5)


@every_family
def test_packed_is_the_original_in_float64(family, wide):  # noqa: F811
    model, packed = hf.both(family, dtype=torch.float64, use_bias=True, num_experts=1)
    tokens = hf.random_tokens()
    logits = packed(tokens, attention_mask=MASK, seq_idx=IDX).logits
    assert logits.dtype == torch.float64
    hf.check_same(packed, model, logits, tokens, hf.ROWS, 1e-12)


def test_a_granite_of_attention_alone():
    """Some published ones have no state-space layer; their attention leaks all the same."""
    model, packed = hf.both("GraniteMoeHybrid", layer_types=["full_attention"] * 2)
    tokens = hf.random_tokens()
    assert not leakcheck(model, lengths=[5, 1, 8]).ok and leakcheck(packed, "seq_idx", lengths=[5, 1, 8]).ok
    hf.check_same(packed, model, packed(tokens, attention_mask=MASK, seq_idx=IDX).logits, tokens, hf.ROWS, 1e-5)
    asked = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    found, expected = (m.eval().generate(tokens[:2], **asked) for m in (packed, model))
    assert torch.equal(found, expected)


@every_family_slowly
@pytest.mark.parametrize("training", [True, False])
def test_padding_on_either_side(family, training):
    model, packed = (m.train(training) for m in hf.both(family, use_bias=training))
    rows = [([14], 0, 0), ([4], 10, 0), ([9], 0, 5), ([6], 3, 5), ([1], 13, 0)]
    mask, tokens = hf.arguments(rows)[0], hf.random_tokens(rows)
    logits = packed(tokens, attention_mask=mask).logits
    hf.check_same(packed, model, logits, tokens, rows, 1e-5)
    for kind in (torch.bool, torch.float32):
        assert torch.equal(packed(tokens, attention_mask=mask.to(kind)).logits, logits)
    # With a bias the original's padding reaches the tokens behind it; Kimi's gate lets it out
    # behind a row's tokens.
    if not training and family != "KimiLinear":
        original = model(tokens, attention_mask=mask).logits
        assert hf.error(logits, original) < 1e-5, "at padding too"


@every_family
def test_one_document_is_the_original_s(family):
    """With all that a model can return beside its logits."""
    tokens = hf.random_tokens()[2:3]
    given = {"output_hidden_states": True, "output_router_logits": True, "labels": tokens}
    expected, found = (m(tokens, **given) for m in hf.both(family))
    assert list(found) == list(expected)
    assert hf.error(found.logits, expected.logits) < 1e-6 and abs(found.loss - expected.loss) < 1e-5
    for name in {"hidden_states", "router_logits"} & {*expected}:
        for ours, theirs in zip(found[name], expected[name], strict=True):
            assert hf.error(ours, theirs) < 1e-6, name


def collated(lengths, **options):
    collator = transformers.DataCollatorWithFlattening(**options)
    tokens = hf.random_tokens()[0].tolist()
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return collator([{"input_ids": tokens[end - n : end]} for n, end in zip(lengths, ends)])


@every_family_slowly
def test_every_way_to_say_where_documents_start(family):
    _, packed = hf.both(family)
    everything = {"return_seq_idx": True, "return_flash_attn_kwargs": True}
    batch = collated([5, 1, 8], **everything)
    expected = packed(**batch)
    assert {"position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q"} < set(batch)
    for name in ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"):
        logits = packed(batch["input_ids"], **{name: batch[name]}).logits
        assert torch.equal(logits, expected.logits), name
        hidden = packed.base_model(batch["input_ids"], **{name: batch[name]}, use_cache=False)[0]
        assert torch.equal(packed.lm_head(hidden), logits), f"{name}, given to the backbone as TRL does"
    # as DataCollatorWithFlattening(position_ids_start=2) makes them
    for name in ("seq_idx", "cu_seq_lens_q"):
        shifted = {"position_ids": batch["position_ids"] + 2, name: batch[name]}
        assert torch.equal(packed(batch["input_ids"], **shifted).logits, expected.logits)
    embedded = packed.get_input_embeddings()(batch["input_ids"])
    assert torch.equal(packed(inputs_embeds=embedded, seq_idx=batch["seq_idx"]).logits, expected.logits)
    cu = torch.tensor([0, 5, 6, 14, 28])  # over both rows
    both_rows = torch.cat([batch["input_ids"]] * 2)
    idx = torch.cat([batch["seq_idx"], torch.zeros_like(batch["seq_idx"])])
    assert torch.equal(packed(both_rows, cu_seq_lens_q=cu).logits, packed(both_rows, seq_idx=idx).logits)
    assert abs(expected.loss - packed(**{k: v for k, v in batch.items() if k != "seq_idx"}).loss) == 0


def varlen_attention(query, key, value, mask, position_ids=None, cu_seq_lens_q=None, max_length_q=None, **rest):
    """Stand in for transformers' call of flash attention, which takes one packed row by either
    argument.
    """
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if cu_seq_lens_q is None or max_length_q is None:
        starts = torch.arange(key.shape[2])[None] == 0 if position_ids is None else position_ids == 0
    else:
        starts = torch.isin(torch.arange(key.shape[2]), cu_seq_lens_q[:-1])[None]
    of = starts.cumsum(1)
    mask = (of[:, None, :, None] == of[:, None, None]).tril()
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=rest["softmax_scale"]).transpose(1, 2)


@pytest.mark.parametrize("family", [*hf.HYBRIDS2, "Jamba", "Zamba", "Qwen3_5", "KimiLinear"])
def test_flash_attention_of_one_packed_row(family, monkeypatch):
    """Zamba's and Granite's attention is given no positions: without cumulative lengths it leaks by
    up to 0.49.
    """
    monkeypatch.setattr("transformers.integrations.flash_attention._flash_attention_forward", varlen_attention)
    flash = transformers.integrations.flash_attention.flash_attention_forward
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_varlen", flash)
    masks = transformers.masking_utils
    monkeypatch.setitem(masks.AttentionMaskInterface._global_mapping, "flash_varlen", masks.flash_attention_mask)
    model, packed = hf.both(family)
    for module in packed.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_varlen"
    for row, tokens in ((hf.ROWS[0], hf.random_tokens()[:1]), (hf.ROWS[1], hf.random_tokens()[1:2])):
        mask, position, idx = hf.arguments([row])
        for given in ({"position_ids": position}, {"seq_idx": idx}):
            logits = packed(tokens, attention_mask=mask, **given).logits
            hf.check_same(packed, model, logits, tokens, [row], 1e-5)


@pytest.mark.parametrize("family", ["Qwen3Next", "OlmoHybrid", "KimiLinear"])
def test_fla_s_operators_of_one_row(family, monkeypatch):
    """They need a GPU; a stand-in has their arguments: one row without padding, and cumulative
    lengths.
    """
    rule = next(rule for name in mixer.RULES if (rule := getattr(hf.modeling(family), name, None)))

    def by_cu_seqlens(q, k, v, *, g, beta, cu_seqlens, **options):
        assert len(q) == 1 and cu_seqlens[-1] == q.shape[1] and cu_seqlens.dtype == torch.int64
        documents = zip(*(tensor.split(cu_seqlens.diff().tolist(), 1) for tensor in (q, k, v, g, beta)))
        return torch.cat([rule(q, k, v, g=g, beta=beta, **options)[0] for q, k, v, g, beta in documents], 1), None

    layout = SequenceLayout.from_lengths([[5, 1, 70], [60, 3], []], 80)
    make = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, 80, 4, size, generator=make) for size in (6, 6, 8))
    decay = torch.rand(3, 80, 4, *[6] * (family == "KimiLinear"), generator=make).neg()
    given = {"g": decay, "beta": torch.rand(3, 80, 4, generator=make), "use_qk_l2norm_in_kernel": True}
    expected, _ = mixer._recur(rule, query, key, value, layout=layout, **given)
    monkeypatch.setattr(mixer, "_takes_cu_seqlens", lambda query: True)
    found, _ = mixer._recur(by_cu_seqlens, query, key, value, layout=layout, **given)
    assert hf.error(found, expected) < 1e-5 and not found[layout.documents < 0].any()


def test_a_convolution_that_takes_seq_idx():
    """As LFM2's up to transformers 5.21, whose forward has no other argument for it."""

    class Convolution(torch.nn.Module):
        def forward(self, hidden, past_key_values=None, attention_mask=None, seq_idx=None):
            return causal_conv1d_fn(hidden.mT, self.weight, seq_idx=seq_idx).mT  # noqa: F821

    layer, layout = Convolution(), SequenceLayout.from_lengths([[3, 5], [2]], 8)
    layer.weight, hidden = torch.randn(4, 3), torch.randn(2, 8, 4)
    found = mixer.mix_by_documents(Convolution)(layer, hidden, Packing(layout, None, None, True), None)
    assert torch.equal(found, ops.conv1d_pack(hidden, layer.weight, layout=layout))


def attend_by_ends(query, key, value, ends, _, longest, *most, scale, window_size):
    """Stand in for FlashAttention's call for all documents, which needs a GPU; (-1, 0) is causal."""
    assert most == (longest,) and ends.diff().max() == longest and window_size == (-1, 0)
    assert query.dtype == key.dtype == value.dtype and not query.shape[-1] % 8
    documents = zip(*(x.transpose(0, 1)[None].split(ends.diff().tolist(), 2) for x in (query, key, value)))
    y = [F.scaled_dot_product_attention(*one, is_causal=True, scale=scale) for one in documents]
    return torch.cat(y, 2)[0].transpose(0, 1)


@pytest.mark.parametrize(
    "kind, short", [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("family", [*hf.HYBRIDS2, "Jamba", "Zamba", *hf.DELTA])
def test_attention_reads_each_document_alone(family, kind, short, monkeypatch):
    """Under a mask a neighbour's NaN has weight 0, and 0 x NaN is NaN.

    Eager attention still takes the mask.
    """
    served = mock.Mock(side_effect=models.varlen_attn if kind == "cuda" else attend_by_ends)
    monkeypatch.setattr(models, "varlen_attn", served)
    if kind == "cpu":
        monkeypatch.setattr(models, "can_use_flash_attention", lambda _: short)
    packed = hf.both(family)[1].to(kind)
    embedded = packed.get_input_embeddings()(hf.random_tokens(hf.ROWS[:2]).to(kind)).detach()
    marks = hf.arguments([([5, 1, 8], 0, 0), ([6, 5, 3], 0, 0)])[1].to(kind)
    logits = []
    for kernel, spoilt in (("eager", 0.0), ("sdpa", 0.0), ("sdpa", torch.nan)):
        packed.set_attn_implementation(kernel)
        embedded[:, 4] += spoilt
        with torch.autocast(kind, torch.bfloat16, enabled=short):  # as Trainer's bf16=True
            logits.append(packed(inputs_embeds=embedded, position_ids=marks).logits[:, 6:])
    # Of logits up to 4.
    torch.testing.assert_close(logits[1:], logits[:1] * 2, rtol=0, atol=5e-2 if short else 1e-5)
    # Jamba's and Kimi's heads have other widths.
    assert served.called is (short and family not in ("Jamba", "KimiLinear"))


@every_family
def test_no_bit_crosses_a_boundary(family):
    """Unpatched, all that follows moves; patched, no bit, forward and backward, with the default
    cache and any mask of ones.
    """
    batch = collated([5, 1, 8], return_seq_idx=True, return_flash_attn_kwargs=True)
    tokens = batch["input_ids"]
    other = tokens.clone()
    other[0, 4] = (other[0, 4] + 1) % hf.VOCAB
    model, packed = hf.both(family)
    ones = {"attention_mask": torch.ones_like(tokens)}
    marks = [{name: batch[name]} for name in ("position_ids", "seq_idx", "cu_seq_lens_q")]
    cases = [(model, True, marks[0]), *((packed, False, mark | mask) for mark in marks for mask in ({}, ones))]
    for changed, crosses, given in cases:
        first, second = (changed(ids, **given).logits[0, 5:] for ids in (tokens, other))
        assert torch.equal(first, second) is not crosses, given
        embedded = changed.get_input_embeddings()(tokens).detach().requires_grad_()
        changed(inputs_embeds=embedded, **given).logits[0, 5:].sum().backward()
        assert bool(embedded.grad[0, :5].any()) is crosses, given


@every_family_slowly
@pytest.mark.parametrize("boundaries", ["position_ids", "attention_mask", *map(slowly, OTHERS)])
def test_leakcheck_passes_it_alone(family, boundaries):
    """With a bias the original's padding on the left reaches what follows it."""
    model, packed = hf.both(family, use_bias=True)
    # of Mamba the command's test takes all lengths
    takes_all = boundaries == "position_ids" and family != "Mamba"
    lengths = {} if takes_all else {"lengths": [5, 1, 8]}
    if boundaries == "position_ids" or (boundaries == "attention_mask" and family not in hf.DELTA):
        assert not leakcheck(model, boundaries=boundaries, lengths=[5, 1, 8]).ok
    found = leakcheck(packed, boundaries=boundaries, **lengths)
    assert found.ok, str(found)


@every_family_slowly
def test_weights_and_names_stay(family, tmp_path):
    model, packed = hf.both(family)
    assert list(packed.state_dict()) == list(model.state_dict())
    assert patch(packed) is packed and type(packed).__name__ == type(model).__name__
    assert isinstance(packed, type(model))
    packed.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model), "a folder says nothing of the patch"
    tokens = hf.random_tokens()
    made = type(packed).from_pretrained(tmp_path)
    expected = packed(tokens, attention_mask=MASK, position_ids=POSITION).logits
    for again in (patch(loaded), made, copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert torch.equal(again(tokens, attention_mask=MASK, position_ids=POSITION).logits, expected)


def test_enabled_classes_make_patched_models(tmp_path):
    """As AutoModelForCausalLM and trainers make them; a saved folder says nothing of the patch,
    which a warning says.
    """
    tokens, models = hf.random_tokens(), {}
    for family in hf.FAMILIES:
        models[family] = hf.both(family)[1]
        with pytest.warns(UserWarning, match="^save_pretrained: "):
            models[family].save_pretrained(tmp_path / family)
    enable()
    try:
        loaded = {f: transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f).train() for f in hf.FAMILIES}
        with pytest.raises(TypeError, match="^model: expected JambaForCausalLM of transformers, got Own"):
            type("Own", (transformers.JambaForCausalLM,), {})(models["Jamba"].config)
    finally:
        disable()
    for family, packed in models.items():
        expected = packed(tokens, attention_mask=MASK, position_ids=POSITION).logits
        assert torch.equal(loaded[family](tokens, attention_mask=MASK, position_ids=POSITION).logits, expected)
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family)
        assert type(plain).__module__.startswith("transformers.")


@every_family_slowly
def test_required_boundaries(family):
    """Without them an error names them; what a cache asks for goes on."""
    packed, tokens = patch(hf.build(family), require_boundaries=True), hf.random_tokens()[:1]
    ones = torch.ones_like(tokens)
    for nothing in ({}, {"attention_mask": ones}, {"attention_mask": MASK[1:2]}, {"use_cache": False}):
        with pytest.raises(ValueError, match="^position_ids: expected .*seq_idx or cu_seq_lens_q"):
            packed(tokens, **nothing)
    packed(tokens, position_ids=torch.arange(14)[None])
    packed(tokens, position_ids=POSITION[1:2], attention_mask=MASK[1:2])
    assert leakcheck(packed, lengths=[5, 1, 8]).ok
    packed.eval().generate(tokens, max_new_tokens=2, pad_token_id=0)
    packed = patch(packed)
    packed(tokens)


@pytest.mark.parametrize("family", ["Mamba", "Mamba2", slowly("Jamba"), slowly("FalconH1")])
def test_half_precision_and_autocast(family):
    model, packed = hf.both(family)
    tokens = hf.random_tokens()
    reference = hf.alone(model, tokens, hf.ROWS)
    half = copy.deepcopy(packed).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = packed(tokens, attention_mask=MASK, position_ids=POSITION).logits
    for logits in (mixed, half(tokens, attention_mask=MASK, position_ids=POSITION).logits):
        assert max(hf.error(logits[b, a:e], single[0]) for single, (b, a, e) in reference) < 0.03
    # As accelerate wraps a model for bf16=True: weights and logits are float32, what is between
    # them is not.
    forward = packed.forward

    @functools.wraps(forward)
    def in_bfloat16(*args, **given):
        result = torch.autocast("cpu", torch.bfloat16)(forward)(*args, **given)
        return type(result)(logits=result.logits.float())

    packed.forward = in_bfloat16
    assert leakcheck(packed, lengths=[19, 1, 23]).ok


ROW = [0, 1, 2, 0, 1, 2]
LEFT = [[0, 0, 1, 1, 1, 1]] * 2
REFUSALS = [  # how the error begins, and the arguments
    ("position_ids: ", {"position_ids": torch.tensor([ROW])}),
    ("position_ids[1, 0]: ", {"position_ids": torch.tensor([ROW, range(3, 9)])}),
    ("position_ids[0, 4]: ", {"position_ids": torch.tensor([[0, 1, 2, 0, 2, 3], ROW])}),
    ("position_ids[0, 2]: ", {"position_ids": torch.arange(6).expand(2, 6), "attention_mask": torch.tensor(LEFT)}),
    ("seq_idx[0]: ", {"seq_idx": torch.tensor([[4, 4, 1, 1, 4, 4], [0] * 6])}),
    ("seq_idx[1, 5]: ", {"seq_idx": torch.tensor([[0] * 6, [0] * 5 + [-1]])}),
    ("cu_seq_lens_q: ", {"cu_seq_lens_q": torch.tensor([0, 6])}),
    ("cu_seq_lens_q: ", {"cu_seq_lens_q": torch.tensor([0, 12])}),
    ("cu_seq_lens_q: ", {"cu_seq_lens_q": torch.tensor([0, 6, 9])}),
    ("cu_seq_lens_q: ", {"cu_seq_lens_q": torch.tensor([0, 6, 6, 12])}),
    ("cu_seq_lens_q: ", {"cu_seq_lens_q": torch.tensor([0, 6, 12]), "attention_mask": torch.tensor(LEFT)}),
    ("cu_seq_lens_q: ", {"position_ids": torch.tensor([ROW, ROW]), "cu_seq_lens_q": torch.tensor([0, 6, 12])}),
    ("attention_mask[0, 3]: ", {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1], [1] * 6])}),
    ("attention_mask[0, 3]: ", {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 0], [1] * 6])}),
    ("use_cache: ", {"position_ids": torch.tensor([ROW, ROW]), "use_cache": True}),
    ("input_ids: ", {"input_ids": torch.ones(2, 0, dtype=torch.int64)}),
    ("cu_seqlens: ", {"cu_seqlens": torch.tensor([0, 6, 12])}),
    ("cu_seqlens_q: ", {"cu_seqlens_q": torch.tensor([0, 6, 12])}),
    ("document_id: ", {"document_id": torch.zeros(1, 12, dtype=torch.long)}),
]


@pytest.mark.parametrize(("begins", "arguments"), REFUSALS)
def test_refuses_what_it_cannot_honour(begins, arguments):
    assert hf.refused(patch(hf.build("Mamba", num_hidden_layers=1)), **arguments).startswith(f"{begins}expected ")


def test_a_replica_of_data_parallel_refuses_cumulative_lengths_alone():
    """DataParallel cuts every argument along its first axis: rows stay whole, cumulative lengths do
    not.
    """
    replica = patch(hf.build("Mamba", num_hidden_layers=1))._replicate_for_data_parallel()
    assert "expected DistributedDataParallel" in hf.refused(replica, cu_seq_lens_q=torch.tensor([0, 6, 12]))


def patch_refuses(model):
    with pytest.raises((TypeError, ValueError)) as caught:
        patch(model)
    return str(caught.value)


def test_patch_refuses_other_models_by_name():
    config = hf.build("Mamba", num_hidden_layers=1).config
    for other in (torch.nn.Linear(2, 2), "my/model", transformers.MambaModel(config)):
        assert patch_refuses(other).endswith(f"got {type(other).__name__}")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("conv_kernel_size", {"conv_kernel": 5}),
        ("activation", {"hidden_act": "gelu"}),
        ("ssm_state_size", {"state_size": 257}),
        ("rope_parameters", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)
def test_patch_refuses_what_its_kernels_do_not_compute(name, config):
    assert patch_refuses(hf.build("Mamba", num_hidden_layers=1, **config)).startswith(f"{name}: ")


@every_family
def test_patch_refuses_a_mixer_that_looks_different(family, monkeypatch):
    """By name, and then nothing is patched."""
    model = hf.build(family)
    mixer = next(module for module in model.modules() if hasattr(module, "conv_kernel_size"))
    mixer.gate_norm = torch.nn.Linear(1, 1)
    assert patch_refuses(model).endswith("gate_norm is new") and type(model).__module__.startswith("transformers.")
    monkeypatch.setattr(type(mixer), "forward", lambda self, hidden_states, cache, attention_mask: None)
    assert patch_refuses(hf.build(family)).endswith("its forward takes self, hidden_states, cache, attention_mask")


def test_the_block_of_mamba_2_is_one_operator_unless_its_norm_has_a_hook(monkeypatch):
    model, calls = patch(hf.build("Mamba2")), []
    block = ops.mamba2_inner
    monkeypatch.setattr(ops, "mamba2_inner", lambda *arguments: calls.append("block") or block(*arguments))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        for module in model.modules():
            if type(module).__name__ == "MambaRMSNormGated":
                module.register_forward_hook(lambda *_: calls.append("norm"))
        found = model(tokens).logits
    assert calls == ["block", "block", "norm", "norm"]
    assert hf.error(found, expected) < 1e-6
