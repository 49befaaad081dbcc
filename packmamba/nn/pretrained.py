"""Read and write published checkpoints: folders in state-spaces' or Hugging Face's format.

A folder holds config.json and weights, in one file or in shards. Names of weights are
state-spaces', to which Hugging Face's differ in one letter (``embeddings``); the configurations
differ in every key, so each format is translated to and from ``MambaLM``'s arguments here
(``STATE_SPACES``, ``HUGGING_FACE``) and by the mixer (``HUGGING_FACE``). What a format or a mixer
cannot hold is refused before anything is written, and a mixer's unknown keys before weights are
read: a checkpoint never loads as another model.
"""

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
from packmamba.nn.init import check_tied
from packmamba.nn.mixers import MIXERS

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
DEFAULT_LAYER = "Mamba1"  # ssm_cfg.layer where config.json has none
NORM_EPSILON = 1e-5
STATE_SPACES = {  # keys of config.json, which are MambaLM's arguments, and their defaults
    "vocab_size": 50277,
    "d_model": None,
    "n_layer": None,
    "tie_embeddings": True,
    "norm_epsilon": NORM_EPSILON,
    "d_intermediate": 0,
}
HUGGING_FACE = {  # by MambaLM's argument, the key of transformers' configuration and its default
    "vocab_size": ("vocab_size", 50280),
    "d_model": ("hidden_size", None),
    "n_layer": ("num_hidden_layers", 32),
    "tie_embeddings": ("tie_word_embeddings", True),
    "norm_epsilon": ("layer_norm_epsilon", NORM_EPSILON),
}
# MambaLM's arguments that state-spaces' ssm_cfg does not hold as they are.
NOT_PUBLISHED = ("mixer", "recompute", "backend")


def find_folder(directory: str | Path, revision: str | None = None) -> Path:
    """Return a checkpoint's folder.

    For a Hub's name, such as state-spaces/mamba-130m, the downloaded one.

    Raises FileNotFoundError.
    """
    folder = Path(directory)
    name = str(directory)
    expected = "directory: expected a checkpoint's folder with config.json"
    if (folder / "config.json").is_file():
        return folder
    # owner/name, of which no part is a path here: a path that is misspelt must not ask the Hub.
    if folder.exists() or folder.parent.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise FileNotFoundError(f"{expected}, got '{folder}'")
    try:
        return _download(name, revision)
    except ImportError:
        reason = "pip install huggingface_hub"
    except Exception as error:
        reason = " ".join(str(error).split())
    raise FileNotFoundError(f"{expected}, or a Hub's name, got '{name}' ({reason})")


def _download(name: str, revision: str | None) -> Path:
    """Download configuration and weights, of the first of ``WEIGHT_FILES`` that there is."""
    from huggingface_hub import snapshot_download

    for weights in WEIGHT_FILES:
        # model*.safetensors*, pytorch_model*.bin*: one file, or shards and their index.
        with_shards = weights.replace(".", "*.") + "*"
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=["config.json", with_shards]))
        if any(folder.glob(with_shards)):
            break
    return folder


def read_pretrained(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read MambaLM's arguments and weights, under its names.

    Raises FileNotFoundError or ValueError.
    """
    path = folder / "config.json"
    published = read_json(path)
    translate = _from_hugging_face if "hidden_size" in published else _from_state_spaces
    arguments = translate(published, path)
    weights = {name.replace(".embeddings.", ".embedding."): weight for name, weight in read_weights(folder).items()}
    embedding = weights.get("backbone.embedding.weight")
    if embedding is None:
        raise ValueError(f"{folder}: the weights lack 'backbone.embedding.weight'")
    arguments["vocab_size"] = embedding.shape[0]  # may be padded beyond the configuration's
    if arguments["tie_embeddings"]:
        # A tied head may be stored or left out; stored, it must be the embedding.
        head = weights.setdefault("lm_head.weight", embedding)
        expect(torch.equal(head, embedding), f"{folder}: 'lm_head.weight'", "the tied embedding", "another")
    return arguments, weights


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of keys and values. Raises FileNotFoundError; ValueError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=_read_float)
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None
    expect(isinstance(content, dict), str(path), "keys and values", type(content).__name__)
    return content


def _read_float(value: dict[str, Any]) -> Any:
    """Read transformers' infinity, {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], directory: str | Path, described: str = "config.json"
) -> None:
    """Load weights into a model that has the same names and shapes.

    Raises ValueError that names the first weight which does not fit; ``described``: what the model
    was made from.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            wanted = f"shape {expected[name]} from {described}" if name in expected else "no such weight"
            raise ValueError(f"{directory}: '{name}': expected {wanted}, got {shapes.get(name, 'none')}")
    model.load_state_dict(weights)


def write_pretrained(
    directory: str | Path, config: dict[str, Any], weights: dict[str, Tensor], format: str = "state_spaces"
) -> None:
    """Write a folder in one of ``FORMATS``.

    Args:
        config: ``MambaLM.config``.
        weights: ``MambaLM.state_dict()``.

    Raises ValueError for what the format cannot hold.
    """
    expect(format in FORMATS, "format", " or ".join(FORMATS), repr(format))
    published = FORMATS[format](config)
    if config["tie_embeddings"]:
        check_tied(weights)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if format == "state_spaces":
        with replacing(folder / "pytorch_model.bin") as temporary, open(temporary, "wb") as file:
            torch.save(weights, file)
        # Read first, they would hide what was written.
        for other in folder.glob("model*.safetensors*"):
            other.unlink()
    else:
        weights = {
            name.replace("backbone.embedding.", "backbone.embeddings."): tensor.contiguous()
            for name, tensor in weights.items()
        }
        # The dtype in which transformers loads the weights.
        published["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        if config["tie_embeddings"]:
            del weights["lm_head.weight"]  # one tensor under two names is no safetensors file
        with replacing(folder / "model.safetensors") as temporary:
            save_file(weights, temporary, metadata={"format": "pt"})
    write_whole(folder / "config.json", (json.dumps(published, indent=2) + "\n").encode())


def _to_hugging_face(config: dict[str, Any]) -> dict[str, Any]:
    """Translate MambaLM's arguments to transformers' configuration."""
    mixer = MIXERS[config["mixer"]]
    in_format = "hugging_face" in getattr(mixer, "PUBLISHED", {})
    expect(in_format, "mixer", "one that this format has", repr(config["mixer"]))
    expect("d_intermediate" not in config, "d_intermediate", "0 in this format", config.get("d_intermediate"))
    return {
        "model_type": mixer.PUBLISHED["hugging_face"],
        "architectures": [mixer.PUBLISHED["architecture"]],
        "intermediate_size": config.get("expand", 2) * config["d_model"],
        "residual_in_fp32": True,
        **{key: config[argument] for argument, (key, _) in HUGGING_FACE.items()},
        **mixer.to_hugging_face(config),
    }


def _to_state_spaces(config: dict[str, Any]) -> dict[str, Any]:
    """Translate MambaLM's arguments to state-spaces' configuration."""
    layer = _layer(config["mixer"])
    options = {} if layer == DEFAULT_LAYER else {"layer": layer}
    # mamba-ssm has neither key, and this value.
    unsaid = [("norm_epsilon", NORM_EPSILON), ("norm_eps", NORM_EPSILON)]
    config = {key: value for key, value in config.items() if (key, value) not in unsaid}
    options |= {key: value for key, value in config.items() if key not in {*STATE_SPACES, *NOT_PUBLISHED}}
    published = {key: config[key] for key in STATE_SPACES if key in config}
    return published | {
        "ssm_cfg": options,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
    }


FORMATS = {"state_spaces": _to_state_spaces, "huggingface": _to_hugging_face}


def _layer(mixer: str) -> str:
    """Return a mixer's name in state-spaces' ssm_cfg; a plugin's may be its own."""
    return getattr(MIXERS[mixer], "PUBLISHED", {}).get("state_spaces", mixer)


def _from_state_spaces(published: dict[str, Any], path: Path) -> dict[str, Any]:
    """Translate state-spaces' configuration to MambaLM's arguments. Raises ValueError."""
    expect({"d_model", "n_layer"} <= published.keys(), str(path), "d_model and n_layer, or hidden_size", "neither")
    attention = published.get("attn_layer_idx")
    expect(not attention, f"{path}: attn_layer_idx", "none (Mamba blocks only)", repr(attention))
    expect(published.get("rms_norm", True), f"{path}: rms_norm", "true", "false")
    options = dict(published.get("ssm_cfg") or {})
    layer = options.pop("layer", DEFAULT_LAYER)
    # ssm_cfg.layer names the mixer; its other keys are arguments of the mixer.
    mixers = {_layer(name): name for name in MIXERS}
    expect(layer in mixers, f"{path}: ssm_cfg.layer", " or ".join(map(repr, mixers)), repr(layer))
    mixer = mixers[layer]
    for key in getattr(MIXERS[mixer], "WITHOUT_EFFECT", ()):
        options.pop(key, None)
    # An unknown key might change what the model computes, so it is refused and not ignored.
    parameters = inspect.signature(MIXERS[mixer]).parameters.keys()
    unknown = options.keys() - (parameters - {"d_model", "recompute", "backend"})
    if unknown:
        raise ValueError(f"{path}: ssm_cfg: unknown keys {', '.join(sorted(unknown))}")
    arguments = {key: published.get(key, default) for key, default in STATE_SPACES.items()}
    return options | arguments | {"mixer": mixer}


def _from_hugging_face(published: dict[str, Any], path: Path) -> dict[str, Any]:
    """Translate transformers' configuration to MambaLM's arguments. Raises ValueError."""
    published_as = {name: getattr(mixer, "PUBLISHED", {}).get("hugging_face") for name, mixer in MIXERS.items()}
    mixers = {model_type: name for name, model_type in published_as.items() if model_type}
    model_type = published.get("model_type")
    expect(model_type in mixers, f"{path}: model_type", " or ".join(mixers), repr(model_type))
    mixer = mixers[model_type]
    arguments = {argument: published.get(key, default) for argument, (key, default) in HUGGING_FACE.items()}
    return MIXERS[mixer].from_hugging_face(published) | arguments | {"mixer": mixer}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the first of ``WEIGHT_FILES`` that the folder has, in one file or in an index's shards.

    Raises FileNotFoundError; ValueError that names a broken file.
    """
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return _read_file(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = set(read_json(index)["weight_map"].values())
            return {name: tensor for shard in sorted(shards) for name, tensor in _read_file(folder / shard).items()}
    raise FileNotFoundError(f"directory: expected {' or '.join(WEIGHT_FILES)} in '{folder}', got neither")


def _read_file(path: Path) -> dict[str, Tensor]:
    """Read weights by name onto the CPU.

    Raises FileNotFoundError; ValueError for a broken or another file.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, "cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path}: expected a file of weights, got another or a broken one") from error
