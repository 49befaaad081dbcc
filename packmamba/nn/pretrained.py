"""Read and write published checkpoints: folders in state-spaces' or Hugging Face's format."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from packmamba.errors import expect
from packmamba.files import replacing, write_whole
from packmamba.nn.mixers import MIXERS

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
FIRST_LAYER = "Mamba1"
"""ssm_cfg.layer where config.json has none."""
KEYS = {  # MambaLM's argument: state-spaces' key and default, Hugging Face's
    "vocab_size": ("vocab_size", 50277, "vocab_size", 50280),
    "d_model": ("d_model", None, "hidden_size", None),
    "n_layer": ("n_layer", None, "num_hidden_layers", 32),
    "tie_embeddings": ("tie_embeddings", True, "tie_word_embeddings", True),
    "norm_epsilon": ("norm_epsilon", 1e-5, "layer_norm_epsilon", 1e-5),
}


def find_folder(directory: str | Path, revision: str | None = None) -> Path:
    """Return a checkpoint's folder, for a Hub's name the downloaded one."""
    folder, name = Path(directory), str(directory)
    expected = "directory: expected a checkpoint's folder with config.json"
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or folder.parent.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise FileNotFoundError(f"{expected}, got '{folder}'")
    try:
        from huggingface_hub import snapshot_download

        for weights in WEIGHT_FILES:
            patterns = ["config.json", weights.replace(".", "*.") + "*"]
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
            if any(folder.glob(patterns[1])):
                break
    except Exception as error:
        why = (
            "pip install huggingface_hub"
            if isinstance(error, ImportError)
            else " ".join(str(error).split())
        )
        raise FileNotFoundError(f"{expected}, or a Hub's name, got '{name}' ({why})") from None
    return folder


def read_pretrained(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read MambaLM's arguments and weights from a folder."""
    path = folder / "config.json"
    try:
        # transformers writes infinity as {"__float__": "Infinity"}.
        number = lambda of: float(of["__float__"]) if of.keys() == {"__float__"} else of
        published = json.loads(path.read_text(encoding="utf-8"), object_hook=number)
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None
    arguments = (_from_hugging_face if "hidden_size" in published else _from_state_spaces)(published, path)
    weights = {
        name.replace(".embeddings.", ".embedding."): tensor
        for name, tensor in _read_weights(folder).items()
    }
    embedding = weights.get("backbone.embedding.weight")
    if embedding is None:
        raise ValueError(f"{folder}: the weights lack 'backbone.embedding.weight'")
    arguments["vocab_size"] = embedding.shape[0]
    tied = not arguments["tie_embeddings"] or torch.equal(
        weights.setdefault("lm_head.weight", embedding), embedding
    )
    expect(tied, f"{folder}: 'lm_head.weight'", "the tied embedding", "another")
    return arguments, weights


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], directory: str | Path, described: str = "config.json"
) -> None:
    """Load weights strictly."""
    expected, given = ({k: tuple(t.shape) for k, t in of.items()} for of in (model.state_dict(), weights))
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            wanted = f"shape {expected[name]} from {described}" if name in expected else "no such weight"
            raise ValueError(f"{directory}: '{name}': expected {wanted}, got {given.get(name, 'none')}")
    model.load_state_dict(weights)


def write_pretrained(
    directory: str | Path, config: dict[str, Any], weights: dict[str, Tensor], format: str = "state_spaces"
) -> None:
    """Write a folder in one of ``FORMATS``; ``config`` is ``MambaLM.config``."""
    expect(format in FORMATS, "format", " or ".join(FORMATS), repr(format))
    published = FORMATS[format](config)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if format == "state_spaces":
        path = folder / "pytorch_model.bin"
        with replacing(path) as temporary, open(temporary, "wb") as file:
            torch.save(weights, file)
    else:
        weights = {
            name.replace("backbone.embedding.", "backbone.embeddings."): t for name, t in weights.items()
        }
        published["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        if config["tie_embeddings"]:
            del weights["lm_head.weight"]  # one tensor under two names is no safetensors file
        weights = {name: tensor.contiguous() for name, tensor in weights.items()}
        with replacing(folder / "model.safetensors") as temporary:
            save_file(weights, temporary, metadata={"format": "pt"})
    write_whole(folder / "config.json", (json.dumps(published, indent=2) + "\n").encode())


def _to_hugging_face(config: dict[str, Any]) -> dict[str, Any]:
    mixer = MIXERS[config["mixer"]]
    expect(hasattr(mixer, "to_hugging_face"), "mixer", "one that this format has", repr(config["mixer"]))
    return {
        "model_type": mixer.PUBLISHED["hugging_face"],
        "architectures": [mixer.PUBLISHED["architecture"]],
        "intermediate_size": config.get("expand", 2) * config["d_model"],
        "residual_in_fp32": True,
        **{key: config[ours] for ours, (_, _, key, _) in KEYS.items()},
        **mixer.to_hugging_face(config),
    }


def _to_state_spaces(config: dict[str, Any]) -> dict[str, Any]:
    ours = {*KEYS, "mixer", "recompute", "backend"}
    layer = _layer(config["mixer"])
    options = {key: value for key, value in config.items() if key not in ours}
    published = {key: config[key] for key in KEYS} | {
        "ssm_cfg": options if layer == FIRST_LAYER else {"layer": layer} | options,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
    }
    if published["norm_epsilon"] == 1e-5:
        del published["norm_epsilon"]
    return published


FORMATS = {"state_spaces": _to_state_spaces, "huggingface": _to_hugging_face}


def _layer(mixer: str) -> str:
    return getattr(MIXERS[mixer], "PUBLISHED", {}).get("state_spaces", mixer)


def _from_state_spaces(published: dict[str, Any], path: Path) -> dict[str, Any]:
    expect(
        {"d_model", "n_layer"} <= published.keys(),
        str(path),
        "d_model and n_layer, or hidden_size",
        "neither",
    )
    options = dict(published.get("ssm_cfg") or {})
    layers, layer = {_layer(name): name for name in MIXERS}, options.pop("layer", FIRST_LAYER)
    expect(layer in layers, f"{path}: ssm_cfg.layer", " or ".join(map(repr, layers)), repr(layer))
    mixer = layers[layer]
    for key in getattr(MIXERS[mixer], "WITHOUT_EFFECT", ()):
        options.pop(key, None)
    for key in ("attn_layer_idx", "d_intermediate"):
        expect(
            not published.get(key), f"{path}: {key}", "none (Mamba blocks only)", repr(published.get(key))
        )
    expect(published.get("rms_norm", True), f"{path}: rms_norm", "true", "false")
    known = inspect.signature(MIXERS[mixer]).parameters.keys() - {"d_model", "recompute", "backend"}
    if unknown := options.keys() - known:
        raise ValueError(f"{path}: ssm_cfg: unknown keys {', '.join(sorted(unknown))}")
    outer = {ours: published.get(key, default) for ours, (key, default, _, _) in KEYS.items()}
    return options | outer | {"mixer": mixer}


def _from_hugging_face(published: dict[str, Any], path: Path) -> dict[str, Any]:
    types = {
        mixer.PUBLISHED["hugging_face"]: name
        for name, mixer in MIXERS.items()
        if hasattr(mixer, "PUBLISHED")
    }
    kind = published.get("model_type")
    expect(kind in types, f"{path}: model_type", " or ".join(types), repr(kind))
    mixer = types[kind]
    outer = {ours: published.get(key, default) for ours, (_, _, key, default) in KEYS.items()}
    return MIXERS[mixer].from_hugging_face(published) | outer | {"mixer": mixer}


def _read_weights(folder: Path) -> dict[str, Tensor]:
    for name in WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return _read_file(folder / name)
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            return {key: tensor for shard in shards for key, tensor in _read_file(folder / shard).items()}
    raise FileNotFoundError(f"directory: expected {' or '.join(WEIGHT_FILES)} in '{folder}', got neither")


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        return (
            load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        )
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path}: expected a file of weights, got another or a broken one") from error
