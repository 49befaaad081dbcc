"""Mamba-2 against transformers, and in checkpoints; tests/models.py takes it where every mixer goes."""

import pytest
import torch

from models import gradients, slots
from packmamba import MambaLM, SequenceLayout

SMALL = {"vocab_size": 50, "d_model": 32, "n_layer": 2, "mixer": "mamba2", "d_state": 16, "headdim": 16, "ngroups": 2}
LAYOUT = SequenceLayout.from_lengths([[63, 1, 64, 65], [130, 7], [128]], row_length=200)


def model_of(**keys):
    torch.manual_seed(0)
    model = MambaLM(**SMALL | keys)
    for layer in model.backbone.layers:
        torch.nn.init.normal_(layer.mixer.norm.weight, 1.0, 0.2)
    return model


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
    for s in range(LAYOUT.num_documents):
        place = slots(LAYOUT, s)
        own, other = logits[place], theirs(input_ids=tokens.flatten()[place][None]).logits[0]
        assert (own - other).norm() <= 1e-5 * other.norm()
        loss, expected = loss + own.sin().sum(), expected + other.sin().sum()
    ours = gradients(loss, model)
    for name, gradient in gradients(expected, theirs).items():
        own = ours[name.replace("embeddings", "embedding")]
        assert (own - gradient).norm() <= 1e-3 * gradient.norm(), name
    again = MambaLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens, layout=LAYOUT), model(tokens, layout=LAYOUT))
    model.save_pretrained(tmp_path / "state_spaces")
    again = MambaLM.from_pretrained(tmp_path / "state_spaces")
    assert torch.equal(again(tokens, layout=LAYOUT), model(tokens, layout=LAYOUT))
