"""Mamba-2: packed and alone, against transformers, in checkpoints, and everywhere a mixer goes."""

import pytest
import torch

from packmamba import MambaLM, SequenceLayout, leakcheck
from packmamba.config import load_config
from packmamba.evaluation import generate, score
from packmamba.lab.fit import fit

SMALL = {"vocab_size": 50, "d_model": 32, "n_layer": 2, "mixer": "mamba2", "d_state": 16, "headdim": 16, "ngroups": 2}
LENGTHS = [[63, 1, 64, 65], [130, 7], [128]]
LAYOUT = SequenceLayout.from_lengths(LENGTHS, row_length=200)


def model_of(dtype=torch.float32, **keys):
    torch.manual_seed(0)
    model = MambaLM(**SMALL | keys)
    for layer in model.backbone.layers:
        torch.nn.init.normal_(layer.mixer.norm.weight, 1.0, 0.2)
    return model.to(dtype)


def documents(tokens):
    return [tokens.flatten()[start:end] for start, end in zip(LAYOUT.starts, LAYOUT.ends)]


def gradients(model, loss):
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, [*model.parameters()])))


@pytest.mark.parametrize(
    "keys",
    [{}, {"dt_limit": (0, 0.05)}, {"ngroups": 1, "bias": True, "dt_limit": (0.002, 0.05), "tie_embeddings": False}],
)
def test_transformers_model_has_the_same_logits_and_gradients(tmp_path, keys):
    transformers = pytest.importorskip("transformers")
    model = model_of(**keys)
    model.save_pretrained(tmp_path, format="huggingface")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert type(theirs).__name__ == "Mamba2ForCausalLM"
    tokens = torch.randint(50, LAYOUT.shape)
    logits, loss, expected = model(tokens, layout=LAYOUT).flatten(0, 1), 0, 0
    for ids, start in zip(documents(tokens), LAYOUT.starts.tolist()):
        own, other = logits[start : start + len(ids)], theirs(input_ids=ids[None]).logits[0]
        assert (own - other).norm() <= 1e-5 * other.norm()
        loss, expected = loss + own.sin().sum(), expected + other.sin().sum()
    ours = gradients(model, loss)
    for name, gradient in gradients(theirs, expected).items():
        own = ours[name.replace("embeddings", "embedding")]
        assert (own - gradient).norm() <= 1e-3 * gradient.norm(), name
    again = MambaLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens, layout=LAYOUT), model(tokens, layout=LAYOUT))
    model.save_pretrained(tmp_path / "state_spaces")
    again = MambaLM.from_pretrained(tmp_path / "state_spaces")
    assert torch.equal(again(tokens, layout=LAYOUT), model(tokens, layout=LAYOUT))


def test_nothing_leaks_and_flow_does():
    model = model_of()
    result = leakcheck(model)
    assert result.ok, str(result)
    assert leakcheck(
        lambda tokens, lengths: model(tokens, layout=SequenceLayout.from_rows(*tokens.shape)), vocab_size=50
    ).leaks


def test_generation_and_scores_are_those_of_the_whole_text():
    model = model_of(torch.float64)
    prompts = [[1, 2, 3], [4] * 70]
    for prompt, new in zip(prompts, generate(model, prompts, max_new_tokens=5)):
        for i in range(5):
            assert new[i] == int(model(torch.tensor([prompt + new[:i]]))[0, -1].argmax())
        one = score(model, [(prompt, new)])[0]
        assert one.is_greedy and one.log_likelihood < 0


def test_boundary_schemes_train_what_they_say(tmp_path):
    """Reset is one document at a time; what crosses a boundary changes the loss, by each scheme in its own way."""

    def trained(boundary, *keys):
        keys = [
            *keys,
            "data.source=synthetic",
            "data.num_documents=100",
            "data.row_length=128",
            "data.tokens_per_step=512",
            "trainer.max_steps=4",
        ]
        keys += ["model.mixer=mamba2", "model.d_model=32", "model.n_layer=1", "model.mixer_options={headdim: 16}"]
        keys += ["data.validation_documents=4", "trainer.loggers=[]", f"runs_dir={tmp_path}", "optimizer.lr=0.02"]
        keys += ["optimizer.warmup_steps=1"]
        config = load_config(None, [*keys, f"data.cache_dir={tmp_path}/cache", f"trainer.boundary={boundary}"])
        return fit(config, progress=False)["metrics"]["val_loss"]

    packed, stream = ["data.strategy=greedy"], ["data.strategy=concat_split", "data.batching=stream", "data.streams=2"]
    whole = "data.overlong=split"
    reset = trained("reset", *packed, whole)
    assert reset == pytest.approx(trained("reset", "data.strategy=single", whole), abs=1e-5)
    leaks = [abs(trained(boundary, *packed, whole) - reset) for boundary in ("leak", "leak_conv")]
    assert min(leaks) > 1e-4, leaks
    losses = [trained(boundary, *stream) for boundary in ("reset", "carry", "state_passing", "fitted_noise")]
    assert min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 1e-5, losses


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"headdim": 24}, "headdim"),
        ({"ngroups": 3}, "headdim"),
        ({"d_conv": 5}, "d_conv"),
        ({"d_state": 300}, "d_state"),
    ],
)
def test_errors_name_the_argument(keys, expected):
    with pytest.raises(ValueError, match=f"^{expected}: expected"):
        model_of(**keys)
