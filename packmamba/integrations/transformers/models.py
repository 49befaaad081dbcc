"""Packing subclasses of transformers' Mamba models, which ``patch`` puts in place of the originals, under the same names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.models.falcon_mamba import modeling_falcon_mamba
from transformers.models.mamba import modeling_mamba

from packmamba.integrations.transformers.boundaries import BOUNDARIES, KNOWN, Packing, find
from packmamba.integrations.transformers.mixer import mix

MIXER_PARTS = {"in_proj", "conv1d", "x_proj", "dt_proj", "out_proj"}
NORMS = {"dt_layernorm", "b_layernorm", "c_layernorm"}
MODEL_TAKES = {"input_ids", "inputs_embeds", "attention_mask", "use_cache", "kwargs"}
OTHER_NAMES = ("cu_seqlens", "cu_seq_lens", "position_indices", "segment_ids", "position_id")
"""Other libraries' names of boundary arguments, which transformers would ignore silently."""
ASKS = ("attention_mask", *BOUNDARIES, *OTHER_NAMES)


def cache_names(forward: Callable) -> tuple[str, ...]:
    """Name the cache argument of a forward of transformers: ``cache_params``, or ``cache`` beside the old name."""
    old = "cache_params"
    return (old,) if old in inspect.signature(forward).parameters else ("cache", old)


def check_supported(module: Any) -> None:
    """Check that a model, backbone or mixer is as known and computable by our kernels; raise ValueError naming the difference."""
    name = type(module).__name__
    if "forward" in vars(module):
        raise ValueError(f"{name}: expected its own forward, got one that something has wrapped; patch before that")
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
    for has, known in ((children, MIXER_PARTS | norms), (parameters, {"A_log", "D"})):
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
    return ValueError(f"transformers {transformers.__version__}: {name} is not that of {KNOWN}: {what}")


def _cache(kwargs: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the cache argument; given under both names, transformers takes the first."""
    return kwargs.get(names[0], kwargs.get(names[-1]))


@torch.compiler.disable  # what it makes depends on values
def _arrange(kwargs: dict[str, Any], caches: tuple[str, ...]) -> dict[str, Any]:
    """Replace the attention mask among a model's arguments by a Packing wherever our layers compute.

    What follows cached states, and what is padded behind its tokens and asks for a cache, stays transformers' own.
    ``caches`` are the names of ``cache_names``.
    """
    for name, value in kwargs.items():
        if value is not None and name in OTHER_NAMES:
            raise TypeError(f"{name}: expected boundaries as position_ids, seq_idx or cu_seq_lens_q, got {name}")
    kwargs = dict(kwargs)
    given = {name: value for name in BOUNDARIES if (value := kwargs.pop(name, None)) is not None}
    tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    if not isinstance(tokens, Tensor):
        return kwargs  # transformers says what is wrong
    cache, use_cache, mask = _cache(kwargs, caches), kwargs.get("use_cache"), kwargs.get("attention_mask")
    if cache is not None and cache.has_previous_state(0):
        _check_continues(given)
        return kwargs
    packing = find((tokens.shape[0], tokens.shape[1]), tokens.device, mask, given)
    if packing is not None and packing.packed:
        kwargs |= _own_labels(kwargs, packing)
    kwargs["attention_mask"] = packing
    if packing is None or packing.last is not None:
        return kwargs
    if packing.packed and (use_cache or cache is not None):
        what = "use_cache: expected False" if use_cache else f"{caches[0]}: expected None"
        raise ValueError(f"{what} beside rows of several documents, whose states one cache cannot hold")
    if use_cache or cache is not None:
        kwargs["attention_mask"] = mask
    else:
        kwargs["use_cache"] = False
    return kwargs


def _own_labels(kwargs: dict[str, Any], packing: Packing) -> dict[str, Tensor]:
    """Mask labels at a document's first token, which has no loss alone."""
    starts = packing.layout.position_indices == 0
    found = {}
    for name, targets in (("labels", starts), ("shift_labels", starts.roll(-1, dims=1))):
        labels = kwargs.get(name)
        if isinstance(labels, Tensor) and labels.shape == starts.shape:
            found[name] = labels.masked_fill(targets.to(labels.device), -100)
    return found


def _check_continues(given: dict[str, Tensor]) -> None:
    position = given.pop("position_ids", None)
    if given:
        raise ValueError(f"{next(iter(given))}: expected none beside a cache that holds states")
    if position is not None and ((position == 0).any() or (position.diff(dim=-1) != 1).any()):
        raise ValueError("position_ids: expected to rise by one, from above 0, beside a cache that holds states")


def _packs(original: Any) -> Callable:
    """Wrap a model's forward to take boundary arguments."""
    signature = inspect.signature(original.forward)
    *named, others = signature.parameters.values()
    names, caches = [parameter.name for parameter in named[1:]], cache_names(original.forward)

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(names, args))
        for name, axes in (("input_ids", 2), ("inputs_embeds", 3)):
            tokens = kwargs.get(name)
            if isinstance(tokens, Tensor) and (tokens.dim() != axes or 0 in tokens.shape):
                raise ValueError(f"{name}: expected {axes} axes and at least one slot, got {tuple(tokens.shape)}")
        arranged = isinstance(kwargs.get("attention_mask"), Packing)  # by the model around this one
        if not arranged and any(value is not None and name in ASKS for name, value in kwargs.items()):
            kwargs = _arrange(kwargs, caches)
        return original.forward(self, **kwargs)

    # What Trainer reads to know which columns of a data set the model takes.
    extra = ("position_ids", "seq_idx", "cu_seq_lens_q")
    boundaries = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in extra]
    forward.__signature__ = signature.replace(parameters=[*named, *boundaries, others])  # type: ignore[attr-defined]
    return forward


def _generates(original: Any) -> Callable:
    """Wrap ``prepare_inputs_for_generation``: positions are boundaries in the prompt alone."""

    @functools.wraps(original.prepare_inputs_for_generation)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = original.prepare_inputs_for_generation(self, *args, **kwargs)
        if not kwargs.get("is_first_iteration"):
            inputs.pop("position_ids", None)
        return inputs

    return prepare


def _mixes(original: Any) -> Callable:
    names, caches = list(inspect.signature(original.forward).parameters)[2:-1], cache_names(original.forward)

    @force_accelerate_hooks(["conv1d"])
    @functools.wraps(original.forward)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.update(zip(names, args))
        cache, mask = _cache(kwargs, caches), kwargs.get("attention_mask")
        continues = cache is not None and cache.has_previous_state(self.layer_idx)
        if continues or isinstance(mask, Tensor):
            return original.forward(self, hidden_states, **kwargs)
        return mix(self, hidden_states, mask, cache)

    return forward


def _made(original: Any) -> Callable:
    @functools.wraps(original.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *args, **kwargs)
        exchange(self)

    return init


CLASSES: dict[type, type] = {}
"""Our subclass of each of transformers' classes; attributes of this module under their names, as pickle wants them."""
MIXERS = (modeling_mamba.MambaMixer, modeling_falcon_mamba.FalconMambaMixer)


def _subclass(original: type, **methods: Callable) -> None:
    ours = type(original.__name__, (original,), {"__module__": __name__, **methods})
    CLASSES[original] = globals()[original.__name__] = ours


for module, family in ((modeling_mamba, "Mamba"), (modeling_falcon_mamba, "FalconMamba")):
    mixer, backbone, whole = (getattr(module, f"{family}{part}") for part in ("Mixer", "Model", "ForCausalLM"))
    _subclass(mixer, forward=_mixes(mixer))
    _subclass(backbone, forward=_packs(backbone))
    _subclass(whole, __init__=_made(whole), forward=_packs(whole), prepare_inputs_for_generation=_generates(whole))


def exchange(model: torch.nn.Module) -> None:
    """Change the classes of the modules inside to ours; they keep their state.

    Raises:
        ValueError: one of them looks different from what we know; then none is changed.
    """
    for module in model.modules():
        if isinstance(module, MIXERS) and type(module) not in (*CLASSES, *CLASSES.values()):
            raise ValueError(f"model: expected mixers of transformers' own class, got {type(module).__name__}")
    theirs = [module for module in model.modules() if type(module) in CLASSES]
    for module in theirs:
        check_supported(module)
    for module in theirs:
        module.__class__ = CLASSES[type(module)]
