"""Read and write published checkpoints: a folder with config.json and weights, state-spaces' or Hugging Face's format."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from packmamba.nn.mixers import MIXERS

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
FIRST_LAYER = "Mamba1"
"""ssm_cfg.layer where config.json has none."""


def read_pretrained(directory: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read MambaLM's arguments and its weights, by our names, from a folder. Raises as ``MambaLM.from_pretrained``."""
    folder = Path(directory)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"directory: expected a checkpoint's folder with config.json, got '{folder}'")
    published = _read_json(path)
    arguments = (_from_hugging_face if "hidden_size" in published else _from_state_spaces)(published, path)
    weights = {name.replace(".embeddings.", ".embedding."): tensor for name, tensor in _read_weights(folder).items()}
    embedding = weights.get("backbone.embedding.weight")
    if embedding is None:
        raise ValueError(f"{folder}: the weights lack 'backbone.embedding.weight'")
    # state-spaces pad the embedding to a multiple that vocab_size does not tell.
    multiple = published.get("pad_vocab_size_multiple", 8)
    if embedding.shape[0] == math.ceil(arguments["vocab_size"] / multiple) * multiple:
        arguments["vocab_size"] = embedding.shape[0]
    if arguments["tie_embeddings"] and not torch.equal(weights.setdefault("lm_head.weight", embedding), embedding):
        raise ValueError(f"{folder}: 'lm_head.weight' differs from the embedding that config.json ties it to")
    return arguments, weights


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], directory: str | Path, described: str = "config.json"
) -> None:
    """Load weights strictly. Raises ValueError naming the first missing, unknown or misshapen one."""
    expected = model.state_dict()
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected:
            side = "lack" if name in expected else "hold an unknown"
            raise ValueError(f"{directory}: the weights {side} '{name}'")
        if weights[name].shape != expected[name].shape:
            wanted, got = tuple(expected[name].shape), tuple(weights[name].shape)
            raise ValueError(f"{directory}: '{name}': expected shape {wanted} from {described}, got {got}")
    model.load_state_dict(weights)


def write_pretrained(
    directory: str | Path, config: dict[str, Any], weights: dict[str, Tensor], format: str = "state_spaces"
) -> None:
    """Write a folder in one of ``FORMATS``; ``config`` is ``MambaLM.config``. Raises ValueError for what it cannot hold."""
    if format not in FORMATS:
        raise ValueError(f"format: expected {' or '.join(FORMATS)}, got {format!r}")
    FORMATS[format](Path(directory), config, weights)


def _write_hugging_face(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    mixer = MIXERS[config["mixer"]]
    if not hasattr(mixer, "to_hugging_face"):
        raise ValueError(f"mixer: Hugging Face's format has no model of mixer {config['mixer']!r}")
    tied = config["tie_embeddings"]
    dtype = next(iter(weights.values())).dtype
    published = {
        "model_type": mixer.PUBLISHED["hugging_face"],
        "architectures": ["MambaForCausalLM"],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["d_model"],
        "intermediate_size": config.get("expand", 2) * config["d_model"],
        "num_hidden_layers": config["n_layer"],
        "layer_norm_epsilon": config["norm_epsilon"],
        "tie_word_embeddings": tied,
        "residual_in_fp32": True,
        "dtype": str(dtype).removeprefix("torch."),
        **mixer.to_hugging_face(config),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published, indent=2) + "\n", encoding="utf-8")
    named = {name.replace("backbone.embedding.", "backbone.embeddings."): t.contiguous() for name, t in weights.items()}
    if tied:
        del named["lm_head.weight"]  # one tensor under two names is no safetensors file
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def _write_state_spaces(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    outer = ("d_model", "n_layer", "vocab_size", "tie_embeddings")
    ours = {*outer, "norm_epsilon", "mixer", "recompute", "backend"}
    layer = _layer(config["mixer"])
    published = {key: config[key] for key in outer} | {
        "ssm_cfg": ({} if layer == FIRST_LAYER else {"layer": layer})
        | {k: v for k, v in config.items() if k not in ours},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
    }
    if config["norm_epsilon"] != 1e-5:
        published["norm_epsilon"] = config["norm_epsilon"]
    (folder / "config.json").write_text(json.dumps(published, indent=2) + "\n", encoding="utf-8")
    torch.save(weights, folder / "pytorch_model.bin")


FORMATS = {"state_spaces": _write_state_spaces, "huggingface": _write_hugging_face}


def _layer(mixer: str) -> str:
    """Name a mixer as ssm_cfg.layer does."""
    return getattr(MIXERS[mixer], "PUBLISHED", {}).get("state_spaces", mixer)


def _from_state_spaces(published: dict[str, Any], path: Path) -> dict[str, Any]:
    if not {"d_model", "n_layer"} <= published.keys():
        raise ValueError(f"{path}: expected d_model and n_layer, or Hugging Face's hidden_size, got neither")
    options = dict(published.get("ssm_cfg") or {})
    layers, layer = {_layer(name): name for name in MIXERS}, options.pop("layer", FIRST_LAYER)
    if layer not in layers:
        raise ValueError(f"{path}: ssm_cfg.layer: expected {' or '.join(map(repr, layers))}, got {layer!r}")
    mixer = layers[layer]
    for key in getattr(MIXERS[mixer], "WITHOUT_EFFECT", ()):
        options.pop(key, None)
    for key in ("attn_layer_idx", "d_intermediate"):
        if published.get(key):
            raise ValueError(f"{path}: {key}: expected none (Mamba blocks only), got {published[key]!r}")
    if not published.get("rms_norm", True):
        raise ValueError(f"{path}: rms_norm: expected true, got false")
    known = inspect.signature(MIXERS[mixer]).parameters.keys() - {"d_model", "recompute", "backend"}
    if unknown := options.keys() - known:
        raise ValueError(f"{path}: ssm_cfg: unknown keys {', '.join(sorted(unknown))}")
    return options | {
        "mixer": mixer,
        "vocab_size": published.get("vocab_size", 50277),
        "d_model": published["d_model"],
        "n_layer": published["n_layer"],
        "tie_embeddings": published.get("tie_embeddings", True),
        "norm_epsilon": published.get("norm_epsilon", 1e-5),
    }


def _from_hugging_face(published: dict[str, Any], path: Path) -> dict[str, Any]:
    types = {mixer.PUBLISHED["hugging_face"]: name for name, mixer in MIXERS.items() if hasattr(mixer, "PUBLISHED")}
    if published.get("model_type") not in types:
        raise ValueError(f"{path}: model_type: expected {' or '.join(types)}, got {published.get('model_type')!r}")
    mixer = types[published["model_type"]]
    return MIXERS[mixer].from_hugging_face(published) | {
        "mixer": mixer,
        "vocab_size": published.get("vocab_size", 50280),
        "d_model": published["hidden_size"],
        "n_layer": published.get("num_hidden_layers", 32),
        "tie_embeddings": published.get("tie_word_embeddings", True),
        "norm_epsilon": published.get("layer_norm_epsilon", 1e-5),
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None


def _read_weights(folder: Path) -> dict[str, Tensor]:
    for name in WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return _read_file(folder / name)
        if index.is_file():
            shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
            return {key: tensor for shard in shards for key, tensor in _read_file(folder / shard).items()}
    raise FileNotFoundError(f"directory: expected {' or '.join(WEIGHT_FILES)} in '{folder}', got neither")


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # each format has errors of its own
        raise ValueError(f"{path}: expected a file of weights, got one that is broken or something else") from error
