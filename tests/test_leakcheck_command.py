"""leakcheck of folders: what it says, and its exit status."""

import functools
import json

import pytest
import torch

from packmamba import MambaLM, leakcheck
from packmamba.cli import main
from packmamba.isolation.probes import without_hub_kernels
from packmamba.training.fit import fit
from packmamba.training.run_id import run_folder
from runs import tiny_config


def test_folders_of_ours(tmp_path, capsys):
    torch.manual_seed(0)
    MambaLM(23, 8, 2).save_pretrained(tmp_path / "ours")
    assert main(["leakcheck", str(tmp_path / "ours")]) == 0
    assert capsys.readouterr().out.startswith("Nothing crosses a document boundary (boundaries: layout).")
    assert main(["leakcheck", str(tmp_path / "ours"), "lengths=[3,4]", "dtype=float64"]) == 0


@pytest.mark.slow
def test_a_run_is_read_as_it_was_trained(tmp_path, capsys):
    for scheme, status in (("leak_conv", 1), ("reset", 0)):
        config = tiny_config(tmp_path, f"trainer.boundary={scheme}", "trainer.max_steps=2")
        fit(config, progress=False)
        assert main(["leakcheck", str(run_folder(config))]) == status
        assert ("trainer.boundary=leak_conv" in capsys.readouterr().out) == bool(status)


@pytest.mark.slow
def test_a_model_that_fails_by_itself_is_as_it_was(monkeypatch):
    """What wraps its functions is there while it is checked, so that it fails as it does."""
    from transformers import MambaConfig, MambaForCausalLM
    from transformers.models.mamba import modeling_mamba

    model = MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1))
    own = modeling_mamba.causal_conv1d_fn

    def fails():
        raise RuntimeError

    with without_hub_kernels([model], fails) as helps:
        assert not helps and modeling_mamba.causal_conv1d_fn is own


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [False, True])
def test_folders_of_hugging_face(tmp_path, capsys, monkeypatch, kernels):
    """Also where kernels are installed, which transformers hands the tensors of a CPU."""
    if kernels:
        from transformers.models.mamba import modeling_mamba

        own = modeling_mamba.causal_conv1d_fn

        @functools.wraps(own)
        def of_a_gpu(*_, **__):
            raise RuntimeError("Expected x.is_cuda() to be true, but got false.")

        monkeypatch.setattr(modeling_mamba, "causal_conv1d_fn", of_a_gpu)
    torch.manual_seed(0)
    folder = tmp_path / "theirs"
    MambaLM(100, 16, 2).save_pretrained(folder, format="huggingface")
    assert main(["leakcheck", str(folder)]) == 1
    said = capsys.readouterr().out
    assert (
        "backbone.layers.0.mixer (MambaMixer): 3 tokens, which is a convolution" in said
        and "ignores position_ids" in said
    )
    assert ("Checked without the kernels" in said) is kernels
    if kernels:
        assert "Checked without the kernels that are installed" in said
        assert modeling_mamba.causal_conv1d_fn is of_a_gpu, "as it was"
    assert main(["leakcheck", str(folder), "boundaries=attention_mask"]) == 0
    assert main(["leakcheck", str(folder), "boundaries=seq_idx", "patch=true"]) == 0


@pytest.mark.parametrize(
    "content, overrides, message",
    [
        (None, [], "holds no model: expected config.json and weights"),
        ("{", [], "config.json: expected JSON"),
        ({"d_model": 4, "n_layer": 1}, ["boundaries=seq_idx"], "boundaries: expected none, since"),
        ({"d_model": 4, "n_layer": 1}, ["patch=true"], "patch: expected none, since"),
        ({"d_model": 4, "n_layer": 1}, [], "expected model.safetensors or pytorch_model.bin"),
        ({"d_model": 4, "n_layer": 1}, ["lengths=[3]"], "lengths: expected at least two or null, got [3]"),
        ({"d_model": 4, "n_layer": 1}, ["dtype=int8"], "dtype: expected one of float64"),
        pytest.param({"model_type": "no such"}, [], "cannot be read by transformers", marks=pytest.mark.slow),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, content, overrides, message):
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
    assert main(["leakcheck", str(tmp_path), *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("made", [lambda: MambaLM(20, 16, 1), lambda: lambda tokens, lengths: None])
def test_boundaries_that_do_not_apply_are_refused(made):
    with pytest.raises(
        ValueError, match=r"boundaries: expected none, since a (MambaLM has|callable is).*; got 'seq_idx'"
    ):
        leakcheck(made(), boundaries="seq_idx")
