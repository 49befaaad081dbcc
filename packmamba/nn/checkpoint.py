"""Published Mamba checkpoints <-> MambaLM: a folder with config.json and weights, state-spaces' or Hugging Face's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from packmamba.nn.lm import MambaLM

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def load_pretrained(cls: type[MambaLM], directory: str | Path, **overrides: Any) -> MambaLM:
    """Builds ``cls`` from the folder's config.json and loads its weights, in one file or in shards.

    Args:
        overrides: arguments of ``MambaLM`` that the published configuration does not decide, such as ``backend``.

    Raises:
        FileNotFoundError: no such folder, configuration or weights.
        ValueError: a configuration that is not Mamba-1's, or weights that do not fit it, naming the first that differ.
    """
    folder = Path(directory)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"directory: expected a checkpoint's folder with config.json, got '{folder}'")
    try:
        published = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    arguments = _from_hugging_face(published, path) if "hidden_size" in published else _from_state_spaces(published, path)
    weights = {_our_name(name): tensor for name, tensor in _read_weights(folder).items()}
    embedding = weights.get("backbone.embedding.weight")
    if embedding is None:
        raise ValueError(f"{folder}: the weights hold no 'backbone.embedding.weight'")
    # Published embeddings are padded to a multiple; the weights know how far.
    arguments["vocab_size"] = embedding.shape[0]
    if arguments["tie_embeddings"]:
        weights.setdefault("lm_head.weight", embedding)
    model = cls(**(arguments | overrides))
    expected = model.state_dict()
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected:
            side = "lack" if name in expected else "hold an unknown"
            raise ValueError(f"{folder}: the weights {side} '{name}'")
        if weights[name].shape != expected[name].shape:
            raise ValueError(
                f"{folder}: '{name}' has shape {tuple(weights[name].shape)}, config.json wants {tuple(expected[name].shape)}"
            )
    model.load_state_dict(weights)
    return model


def save_pretrained(model: MambaLM, directory: str | Path) -> None:
    """Writes the folder as state-spaces' mamba-ssm reads it. A learned initial state is kept, as a key only we know."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    mixer = {key: value for key, value in model.config.items() if key not in _OUTER | {"backend"}}
    published = {
        "d_model": model.config["d_model"],
        "n_layer": model.config["n_layer"],
        "vocab_size": model.config["vocab_size"],
        "ssm_cfg": mixer,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": model.config["tie_embeddings"],
        "norm_epsilon": model.config["norm_epsilon"],
    }
    (folder / "config.json").write_text(json.dumps(published, indent=2) + "\n", encoding="utf-8")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


_OUTER = {"d_model", "n_layer", "vocab_size", "tie_embeddings", "norm_epsilon"}
_SSM_KEYS = {"d_state", "d_conv", "expand", "dt_rank", "dt_min", "dt_max", "dt_init_floor", "bias", "conv_bias"}


def _from_state_spaces(published: dict[str, Any], path: Path) -> dict[str, Any]:
    for key in ("d_model", "n_layer"):
        if key not in published:
            raise ValueError(f"{path}: expected state-spaces' or Hugging Face's Mamba configuration, got none of their keys")
    mixer = dict(published.get("ssm_cfg") or {})
    layer = mixer.pop("layer", "Mamba1")
    if layer != "Mamba1" or published.get("attn_layer_idx") or published.get("d_intermediate"):
        raise ValueError(f"{path}: only plain Mamba-1 stacks can be loaded, got layer {layer!r} with attention or MLP keys")
    if not published.get("rms_norm", True):
        raise ValueError(f"{path}: rms_norm: expected true, got false")
    unknown = mixer.keys() - _SSM_KEYS - {"learned_initial_state"}
    if unknown:
        raise ValueError(f"{path}: ssm_cfg: unknown keys {', '.join(sorted(unknown))}")
    return mixer | {
        "d_model": published["d_model"],
        "n_layer": published["n_layer"],
        "tie_embeddings": published.get("tie_embeddings", True),
        "norm_epsilon": published.get("norm_epsilon", 1e-5),
    }


def _from_hugging_face(published: dict[str, Any], path: Path) -> dict[str, Any]:
    if published.get("model_type") != "mamba":
        raise ValueError(f"{path}: model_type: expected 'mamba', got {published.get('model_type')!r}")
    hidden_act = published.get("hidden_act", "silu")
    if hidden_act not in ("silu", "swish"):
        raise ValueError(f"{path}: hidden_act: expected 'silu', got {hidden_act!r}")
    hidden_size = published["hidden_size"]
    expand, rest = divmod(published.get("intermediate_size") or published.get("expand", 2) * hidden_size, hidden_size)
    if rest:
        raise ValueError(f"{path}: intermediate_size: expected a multiple of hidden_size")
    return {
        "d_model": hidden_size,
        "n_layer": published.get("num_hidden_layers", 32),
        "d_state": published.get("state_size", 16),
        "d_conv": published.get("conv_kernel", 4),
        "expand": expand,
        "dt_rank": published.get("time_step_rank", "auto"),
        "bias": published.get("use_bias", False),
        "conv_bias": published.get("use_conv_bias", True),
        "tie_embeddings": published.get("tie_word_embeddings", True),
        "norm_epsilon": published.get("layer_norm_epsilon", 1e-5),
    }


def _our_name(name: str) -> str:
    return name.replace("backbone.embeddings.", "backbone.embedding.")


def _read_weights(folder: Path) -> dict[str, Tensor]:
    for name in WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return _read_file(folder / name)
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            missing = [shard for shard in shards if not (folder / shard).is_file()]
            if missing:
                raise FileNotFoundError(f"{index}: names '{missing[0]}', which is not there")
            return {key: tensor for shard in shards for key, tensor in _read_file(folder / shard).items()}
    raise FileNotFoundError(f"directory: expected {' or '.join(WEIGHT_FILES)} (or its index) in '{folder}', got neither")


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)
