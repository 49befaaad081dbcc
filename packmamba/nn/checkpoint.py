"""Published Mamba checkpoints <-> MambaLM: a folder with config.json and weights, state-spaces' or Hugging Face's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
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
        ValueError: a configuration that is not Mamba-1's, or weights that do not fit it, naming the first that differs.
    """
    folder = Path(directory)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"directory: expected a checkpoint's folder with config.json, got '{folder}'")
    published = _read_json(path)
    translate = _from_hugging_face if "hidden_size" in published else _from_state_spaces
    arguments = translate(published, path)
    weights = {_our_name(name): tensor for name, tensor in _read_weights(folder).items()}
    embedding = weights.get("backbone.embedding.weight")
    if embedding is None:
        raise ValueError(f"{folder}: the weights lack 'backbone.embedding.weight'")
    # state-spaces pad the embedding to a multiple that vocab_size does not tell.
    multiple = _integer(published, "pad_vocab_size_multiple", path, default=8)
    if embedding.shape[0] == math.ceil(arguments["vocab_size"] / multiple) * multiple:
        arguments["vocab_size"] = embedding.shape[0]
    if arguments["tie_embeddings"] and not torch.equal(weights.setdefault("lm_head.weight", embedding), embedding):
        raise ValueError(f"{folder}: 'lm_head.weight' differs from the embedding that config.json ties it to")
    model = cls(**(arguments | overrides))
    expected = model.state_dict()
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected:
            side = "lack" if name in expected else "hold an unknown"
            raise ValueError(f"{folder}: the weights {side} '{name}'")
        if weights[name].shape != expected[name].shape:
            wanted, got = tuple(expected[name].shape), tuple(weights[name].shape)
            raise ValueError(f"{folder}: '{name}': expected shape {wanted} from config.json, got {got}")
    model.load_state_dict(weights)
    return model


def save_pretrained(model: MambaLM, directory: str | Path) -> None:
    """Writes the folder as state-spaces' mamba-ssm reads it, unless the model has what only we know: a learned initial
    state, or an unusual norm_epsilon."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    mixer = {key: value for key, value in model.config.items() if key not in _OUTER | {"backend", "recompute"}}
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
    }
    if model.config["norm_epsilon"] != 1e-5:
        published["norm_epsilon"] = model.config["norm_epsilon"]
    (folder / "config.json").write_text(json.dumps(published, indent=2) + "\n", encoding="utf-8")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


_OUTER = {"d_model", "n_layer", "vocab_size", "tie_embeddings", "norm_epsilon"}
_SSM_KEYS = {"d_state", "d_conv", "expand", "dt_rank", "dt_min", "dt_max", "dt_init_floor", "bias", "conv_bias"}
_WITHOUT_EFFECT = {"dt_init", "dt_scale", "use_fast_path"}  # on a model whose weights are given


def _from_state_spaces(published: dict[str, Any], path: Path) -> dict[str, Any]:
    if not {"d_model", "n_layer"} <= published.keys():
        raise ValueError(f"{path}: expected d_model and n_layer, or Hugging Face's hidden_size, got neither")
    mixer = {key: value for key, value in (published.get("ssm_cfg") or {}).items() if key not in _WITHOUT_EFFECT}
    layer = mixer.pop("layer", "Mamba1")
    if layer != "Mamba1":
        raise ValueError(f"{path}: ssm_cfg.layer: expected 'Mamba1', got {layer!r}")
    for key in ("attn_layer_idx", "d_intermediate"):
        if published.get(key):
            raise ValueError(f"{path}: {key}: expected none (Mamba blocks only), got {published[key]!r}")
    if not published.get("rms_norm", True):
        raise ValueError(f"{path}: rms_norm: expected true, got false")
    unknown = mixer.keys() - _SSM_KEYS - {"learned_initial_state"}
    if unknown:
        raise ValueError(f"{path}: ssm_cfg: unknown keys {', '.join(sorted(unknown))}")
    return mixer | {
        "vocab_size": _integer(published, "vocab_size", path, default=50277),
        "d_model": _integer(published, "d_model", path),
        "n_layer": _integer(published, "n_layer", path),
        "tie_embeddings": published.get("tie_embeddings", True),
        "norm_epsilon": published.get("norm_epsilon", 1e-5),
    }


def _from_hugging_face(published: dict[str, Any], path: Path) -> dict[str, Any]:
    if published.get("model_type") != "mamba":
        raise ValueError(f"{path}: model_type: expected 'mamba', got {published.get('model_type')!r}")
    hidden_act = published.get("hidden_act", "silu")
    if hidden_act not in ("silu", "swish"):
        raise ValueError(f"{path}: hidden_act: expected 'silu', got {hidden_act!r}")
    return {
        "vocab_size": _integer(published, "vocab_size", path, default=50280),
        "d_model": _integer(published, "hidden_size", path),
        "n_layer": _integer(published, "num_hidden_layers", path, default=32),
        "d_state": _integer(published, "state_size", path, default=16),
        "d_conv": _integer(published, "conv_kernel", path, default=4),
        "expand": _integer(published, "expand", path, default=2),
        "dt_rank": published.get("time_step_rank", "auto"),
        "bias": published.get("use_bias", False),
        "conv_bias": published.get("use_conv_bias", True),
        "tie_embeddings": published.get("tie_word_embeddings", True),
        "norm_epsilon": published.get("layer_norm_epsilon", 1e-5),
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _integer(published: dict[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = published.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{path}: {key}: expected an integer of at least 1, got {value!r}")
    return value


def _our_name(name: str) -> str:
    return name.replace("backbone.embeddings.", "backbone.embedding.")


def _read_weights(folder: Path) -> dict[str, Tensor]:
    for name in WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return _read_file(folder / name)
        if index.is_file():
            shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
            missing = [shard for shard in shards if not (folder / shard).is_file()]
            if missing:
                raise FileNotFoundError(f"{index}: expected '{missing[0]}' beside it, got no such file")
            return {key: tensor for shard in shards for key, tensor in _read_file(folder / shard).items()}
    raise FileNotFoundError(
        f"directory: expected {' or '.join(WEIGHT_FILES)} (or its index) in '{folder}', got neither"
    )


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # Each format has errors of its own.
        raise ValueError(f"{path}: expected a file of weights, got one that is broken or something else") from error
