"""Whether transformers' modules are those that our mixer stands in for: what they hold, what they take, what they are set to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

KNOWN = "5.17 to 5.24"
MIXER = {"in_proj", "conv1d", "x_proj", "dt_proj", "out_proj"}
NORMS = {"dt_layernorm", "b_layernorm", "c_layernorm"}
MODEL_TAKES = {"input_ids", "inputs_embeds", "attention_mask", "use_cache", "kwargs"}


def cache_names(forward: Callable) -> tuple[str, ...]:
    """What a forward of transformers calls its cache: ``cache_params``, or ``cache``, and then it takes the old name too."""
    old = "cache_params"
    return (old,) if old in inspect.signature(forward).parameters else ("cache", old)


def check_looks(module: Any) -> None:
    """Of a model, backbone or mixer.

    Raises:
        ValueError: it is not what we know, or set to what we cannot compute; the message names it.
    """
    name = type(module).__name__
    if "forward" in vars(module):
        raise ValueError(
            f"{name}: expected its own forward, got one that something has wrapped; patch the model before that"
        )
    takes = list(inspect.signature(type(module).forward).parameters)
    cache = cache_names(type(module).forward)[0]
    if not name.endswith("Mixer"):
        if missing := (MODEL_TAKES | {cache}) - set(takes):
            raise _different(name, f"its forward takes no {sorted(missing)[0]}")
        return
    norms = NORMS if name.startswith("Falcon") else set()
    children = {child for child, _ in module.named_children()} - {"act"}
    parameters = {parameter for parameter, _ in module.named_parameters(recurse=False)}
    if takes != ["self", "hidden_states", cache, "attention_mask", "kwargs"]:
        raise _different(name, f"its forward takes {', '.join(takes)}")
    for has, known in ((children, MIXER | norms), (parameters, {"A_log", "D"})):
        if has != known:
            what = sorted(has ^ known)[0]
            raise _different(name, f"{what} {'is new' if what in has else 'is missing'}")
    if type(module.conv1d) is not nn.Conv1d:
        raise _different(name, f"conv1d is a {type(module.conv1d).__name__}")
    for key, value, fits, expected in (
        ("conv_kernel", module.conv_kernel_size, 2 <= module.conv_kernel_size <= 4, "2, 3 or 4"),
        ("hidden_act", module.activation, module.activation in ("silu", "swish"), "'silu'"),
        ("state_size", module.ssm_state_size, 1 <= module.ssm_state_size <= 256, "from 1 to 256"),
    ):
        if not fits:
            raise ValueError(f"config.{key}: expected {expected}, got {value!r}")


def _different(name: str, what: str) -> ValueError:
    import transformers

    return ValueError(
        f"transformers {transformers.__version__}: {name} looks different from the one that packing was written for "
        f"({KNOWN}): {what}"
    )
