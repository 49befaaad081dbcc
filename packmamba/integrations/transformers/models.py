"""Packing subclasses of transformers' models, under the same names."""

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.masking_utils import create_causal_mask
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from packmamba.errors import expect
from packmamba.integrations.transformers.boundaries import BOUNDARIES, KNOWN, WHOLE_ROWS, Packing, find
from packmamba.integrations.transformers.mixer import mix, mix_by_documents

PARTS = {"in_proj", "conv1d", "out_proj", "A_log", "D"}
PROJECTIONS = {"x_proj", "dt_proj"}
NORMS = {"dt_layernorm", "b_layernorm", "c_layernorm"}
HEADS = {"x_proj_weight", "dt_proj_weight", "dt_proj_bias"}
PARTS2 = PARTS | {"dt_bias", "norm"}
PROJECTIONS35 = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
QKV = {"q_proj", "k_proj", "v_proj", "b_proj", "conv1d", "o_norm", "o_proj"}
DELTA = {"conv1d", "out_proj", "A_log", "dt_bias", "norm"}
# Folders, names, what a mixer holds, how its model hands it the packing: alone, or beside
# attention's mask.
FAMILIES = (
    ("mamba", "Mamba", "Mixer", PARTS | PROJECTIONS, "mask"),
    ("falcon_mamba", "FalconMamba", "Mixer", PARTS | PROJECTIONS | NORMS, "mask"),
    ("jamba", "Jamba", "MambaMixer", PARTS | PROJECTIONS | NORMS, "masks"),
    ("zamba", "Zamba", "MambaMixer", PARTS | HEADS, "masks"),
    ("mamba2", "Mamba2", "Mixer", PARTS2, "keyword"),
    ("bamba", "Bamba", "Mixer", PARTS2, "masks"),
    ("granitemoehybrid", "GraniteMoeHybrid", "MambaLayer", PARTS2, "masks"),
    ("falcon_h1", "FalconH1", "Mixer", PARTS2, "masks"),
    ("nemotron_h", "NemotronH", "Mamba2Mixer", PARTS2, "masks"),
    ("zamba2", "Zamba2", "MambaMixer", PARTS2, "masks"),
    ("qwen3_next", "Qwen3Next", "GatedDeltaNet", DELTA | {"in_proj_qkvz", "in_proj_ba"}, "masks"),
    ("qwen3_5", "Qwen3_5", "GatedDeltaNet", DELTA | PROJECTIONS35, "masks"),
    ("qwen3_5_moe", "Qwen3_5Moe", "GatedDeltaNet", DELTA | PROJECTIONS35, "masks"),
    ("olmo_hybrid", "OlmoHybrid", "GatedDeltaNet", QKV | {"A_log", "dt_bias", "a_proj", "g_proj"}, "masks"),
    ("kimi_linear", "KimiLinear", "DeltaAttention", QKV | {"forget_gate", "g_a_proj", "g_b_proj"}, "masks"),
    ("lfm2", "Lfm2", "ShortConv", {"in_proj", "conv", "out_proj"}, "masks"),
    ("lfm2_moe", "Lfm2Moe", "ShortConv", {"in_proj", "conv", "out_proj"}, "masks"),
)
# Mixers that keep their own forward: no kernels of ours compute them whole.
BY_DOCUMENTS = {"GatedDeltaNet", "DeltaAttention", "ShortConv"}
MODEL_TAKES = {"input_ids", "inputs_embeds", "attention_mask", "kwargs"}
INPUTS = ("input_ids", "inputs_embeds")
MIXER_TAKES = ["self", "hidden_states", "attention_mask"]
# What follows; of LFM2's convolution up to transformers 5.21 it is seq_idx alone.
LAST_ARGUMENTS = (["kwargs"], ["seq_idx"])
# Names of the cache argument.
CACHES = ("cache", "cache_params", "past_key_values")
# Names of mixers among a hybrid's kinds of layers.
LINEAR = ("linear_attention", "conv")
# Boundary arguments elsewhere.
OTHER_NAMES = """cu_seqlen cu_seqlens cu_seqlens_q cu_seqlens_k cu_seq_len cu_seq_len_q cu_seq_lens seqidx seq_ids sequence_ids
    segment_id segment_ids segments document_id document_ids doc_ids position_id position_indices positions""".split()
ASKS = ("attention_mask", *BOUNDARIES, *OTHER_NAMES)


def check_supported(module: Any) -> None:
    """Raise ValueError if a model or mixer is not as known, or our kernels do not compute it."""
    name, takes = type(module).__name__, list(inspect.signature(type(module).forward).parameters)
    expect("forward" not in vars(module), name, "its own forward", "a wrapped one; patch before that")
    holds = next((HOLDS[kind] for kind in type(module).__mro__ if kind in HOLDS), None)
    if holds is None:
        # A whole model: its arguments. A mixer: arguments, and below what it holds.
        known = MODEL_TAKES <= {*takes} and not {*CACHES}.isdisjoint(takes)
    else:
        known = [*takes[:2], *takes[3:4]] == MIXER_TAKES and takes[2] in CACHES and takes[4:] in LAST_ARGUMENTS
    expected, release = f"that of transformers {KNOWN}", f"transformers {transformers.__version__}"
    expect(known, name, expected, f"{release}: its forward takes {', '.join(takes)}")
    if holds is None:
        return
    # An activation function may be a module named act.
    has = {child for child, _ in module.named_children()} | {p for p, _ in module.named_parameters(recurse=False)}
    differs = [f"{part} {'is new' if part in has else 'is missing'}" for part in sorted((has - {"act"}) ^ holds)]
    expect(not differs, name, expected, f"{release}: {', '.join(differs)}")
    conv = getattr(module, _convolution(holds))
    expect(type(conv) is nn.Conv1d, "conv1d", f"a plain Conv1d in {name}", type(conv).__name__)
    # Its inputs at left padding, which a cache would keep, are the biases of in_proj.
    expect(_convolution(holds) == "conv1d" or not module.bias, "conv_bias", f"False in {name}", "True")
    for key, values, expected in (
        ("conv_kernel_size", range(2, 5), "2, 3 or 4"),
        ("activation", ("silu", "swish"), "'silu'"),
        ("ssm_state_size", range(1, 257), "from 1 to 256"),
    ):
        value = getattr(module, key, None)  # not every layer has each
        expect(value is None or value in values, key, f"{expected} in {name}", repr(value))


def _convolution(holds: set[str]) -> str:
    """Return the name of a mixer's convolution."""
    return "conv1d" if "conv1d" in holds else "conv"


def _first(kwargs: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((kwargs[name] for name in names if kwargs.get(name) is not None), None)


@torch.compiler.disable  # what it makes depends on values
def _arrange(model: Any, kwargs: dict[str, Any], required: bool) -> dict[str, Any]:
    """Replace the boundaries among a model's arguments by ``packing``.

    What follows cached states, or is padded behind beside a cache, stays transformers' own.
    """
    for name in OTHER_NAMES:
        expect(kwargs.get(name) is None, name, "position_ids, seq_idx or cu_seq_lens_q", name, TypeError)
    kwargs = dict(kwargs)
    given = {name: value for name in BOUNDARIES if (value := kwargs.pop(name, None)) is not None}
    # A replica of DataParallel gets a part of every tensor: whole rows, but lengths of other rows.
    cut = [name for name in given if name.startswith("cu_") and getattr(model, "_is_replica", False)]
    got = "DataParallel, which cuts them; start a process for each GPU, with torchrun, or give position_ids"
    expect(not cut, " and ".join(cut), "DistributedDataParallel", got)
    tokens, cache, mask = (_first(kwargs, INPUTS), _first(kwargs, CACHES), kwargs.get("attention_mask"))
    cached = cache is not None or bool(kwargs.get("use_cache"))
    # A dictionary (kind of layer -> mask) was prepared by transformers.
    beside_cache = cache is not None and given.keys() == {"position_ids"}
    prepared = isinstance(mask, dict) and (not given or beside_cache)
    if not isinstance(tokens, Tensor) or prepared:
        return kwargs
    # States are there already: a step of generation goes on, with one document a row.
    if cache is not None and _continues(model, cache):
        position = given.pop("position_ids", None)
        expect(not given, " and ".join(given), "none beside a cache that holds states", "some")
        # Beside padding, a row's first token may be in a later part of a prompt, with jumps before it.
        padded = isinstance(mask, Tensor) and not mask.all()
        if position is not None and not padded and ((position == 0).any() or (position.diff(dim=-1) != 1).any()):
            raise ValueError("position_ids: expected to rise by one, from above 0, beside a cache that holds states")
        return kwargs
    expect(given or cached or not required, "position_ids", "position_ids, seq_idx or cu_seq_lens_q", "none")
    packing = find((tokens.shape[0], tokens.shape[1]), tokens.device, mask, given)
    # The last token of a document must not predict the first one of the next.
    if packing.packed:
        _mask_labels(kwargs, packing)
    if packing.last is not None:
        return kwargs | {"packing": packing}
    expect(not (packing.packed and cached), "use_cache", "False and no cache for several documents a row", "one")
    return kwargs if cached else kwargs | {"packing": packing, "use_cache": False}


def _continues(model: Any, cache: Any) -> bool:
    """Return whether a cache holds states (keys, of attention alone)."""
    mixer: Any = next((module for module in model.modules() if isinstance(module, tuple(HOLDS))), None)
    return bool(cache.get_seq_length() if mixer is None else cache.has_previous_state(mixer.layer_idx))


def _mask_labels(kwargs: dict[str, Any], packing: Packing) -> None:
    """Mask first tokens' labels, in copies."""
    starts = packing.layout.position_indices == 0
    # shift_labels are labels moved by one already.
    for name, targets in (("labels", starts), ("shift_labels", starts.roll(-1, dims=1))):
        labels = kwargs.get(name)
        if isinstance(labels, Tensor) and labels.shape == starts.shape:
            kwargs[name] = labels.masked_fill(targets.to(labels.device), -100)


def _masks(model: Any, kwargs: dict[str, Any], packing: Packing) -> dict[str, Any]:
    """Return masks of a hybrid's two kinds of layers."""
    shape = _first(kwargs, INPUTS).shape[:2]
    arguments = {"config": model.config, "inputs_embeds": model.get_input_embeddings().weight.new_empty(*shape, 0)}
    cache = next(name for name in CACHES if name in inspect.signature(create_causal_mask).parameters)
    arguments |= {"attention_mask": kwargs.get("attention_mask"), cache: _first(kwargs, CACHES)}
    if packing.packed:
        documents, kernel = packing.layout.documents, model.config._attn_implementation
        # FlashAttention takes a packed batch as one row with cumulative lengths.
        fits = "flash" not in kernel or shape[0] == 1
        expect(fits, "attn_implementation", "sdpa or eager for several packed rows", repr(kernel))
        kwargs["position_ids"] = position = packing.layout.position_indices.clamp(min=0).long()
        if "flash" in kernel:  # attention of Zamba and Granite is given no positions
            ends = torch.cat([(position[0] == 0).nonzero()[:, 0], position.new_tensor([shape[1]])]).int()
            kwargs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends)
            kwargs |= dict.fromkeys(("max_length_q", "max_length_k"), int(ends.diff().max()))
        arguments["attention_mask"] = None
        # And-ed with the causal mask: a token attends to tokens of its own document.
        arguments["and_mask_function"] = lambda row, _, query, key: documents[row, query] == documents[row, key]
        if kernel == "sdpa" and not torch.compiler.is_compiling():
            return {"full_attention": DocumentMask(documents, arguments)} | dict.fromkeys(LINEAR, packing)
    return {"full_attention": create_causal_mask(**arguments)} | dict.fromkeys(LINEAR, packing)


class DocumentMask:
    """Stand for a mask.

    ``scaled_dot_product_attention`` reads each document alone, all else the mask.
    """

    def __init__(self, documents: Tensor, arguments: dict[str, Any]) -> None:
        # Of all rows, one after the other; padding is a document too.
        rows = [row.unique_consecutive(return_counts=True)[1] for row in documents.cpu()]
        self.lengths = torch.cat(rows).tolist()
        self.ends = torch.tensor([0, *self.lengths]).cumsum(0).to(documents.device, torch.int32)
        self.dense = functools.partial(create_causal_mask, **arguments)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Any function but scaled_dot_product_attention wants the mask itself.
        if (mask := kwargs.pop("attn_mask", None)) is None:
            return function(*(x.dense() if isinstance(x, cls) else x for x in args), **kwargs)
        if torch.compiler.is_compiling():
            return function(*args, attn_mask=mask.dense(), **kwargs)
        # Neither a mask in memory nor work across documents: one call for all where FlashAttention
        # serves (16 bits, no dropout), else SDPA's causal kernel for each. Under autocast rotary
        # embeddings leave queries and keys in float32, which SDPA would cast. Slots of all rows by
        # heads by channels:
        args = [x.to(args[2].dtype) for x in args]
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in args)
        served = can_use_flash_attention(SDPAParams(*args, None, 0.0, True, False))  # type: ignore[call-arg]
        if served and not kwargs.get("dropout_p") and query.shape[-1] % 8 == 0:
            ends = mask.ends.to(query.device)
            options: Any = {"scale": kwargs.get("scale"), "window_size": (-1, 0)}
            y: Any = varlen_attn(query, key, value, ends, ends, max(mask.lengths), max(mask.lengths), **options)
        else:
            documents = zip(*(x.transpose(0, 1)[None].split(mask.lengths, 2) for x in (query, key, value)))
            y = torch.cat([function(*one, **kwargs | {"is_causal": True}) for one in documents], 2)[0].transpose(0, 1)
        return y.unflatten(0, (len(args[0]), -1)).transpose(1, 2)

    def to(self, *_: Any, **__: Any) -> Any:
        """Return itself: it holds lengths, which every device reads."""
        return self


def _packs(original: Any, way: str, whole: bool) -> Callable:
    hybrid = way == "masks"
    signature = inspect.signature(original.forward)
    *named, others = signature.parameters.values()
    names = [parameter.name for parameter in named[1:]]

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(names, args))
        for name, axes in zip(INPUTS, (2, 3)):
            tokens = kwargs.get(name)
            if isinstance(tokens, Tensor) and (tokens.dim() != axes or 0 in tokens.shape):
                raise ValueError(f"{name}: expected {axes} axes and no empty one, got {tuple(tokens.shape)}")
        # The model around this one may have arranged the batch already.
        arranged = "packing" in kwargs or isinstance(kwargs.get("attention_mask"), Packing)
        needed = self.require_boundaries or any(kwargs.get(name) is not None for name in ASKS)
        if needed and not arranged:
            position = kwargs.get("position_ids")
            kwargs = _arrange(self, kwargs, self.require_boundaries)
            if "position_ids" in names and not getattr(kwargs.get("packing"), "packed", False):
                # Rotary embeddings of rows that a cache continues.
                kwargs["position_ids"] = position
        packing = None if hybrid and whole else kwargs.pop("packing", None)
        if packing is not None:
            kwargs["attention_mask"] = _masks(self, kwargs, packing) if hybrid else packing
        # Mamba-2's backbone makes a mask of its own, but hands keywords on to its mixers.
        if way == "keyword" and not whole and isinstance(kwargs.get("attention_mask"), Packing):
            kwargs["packing"] = kwargs.pop("attention_mask")
        return original.forward(self, **kwargs)

    # Trainer keeps columns that the signature names.
    extra = [name for name in BOUNDARIES[:3] if name not in names]
    boundaries = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in extra]
    forward.__signature__ = signature.replace(parameters=[*named, *boundaries, others])  # type: ignore[attr-defined]
    return forward


def _generates(original: Any) -> Callable:
    """Wrap ``prepare_inputs_for_generation``.

    What follows a cache has no boundaries, so no positions.
    """
    rotates = "position_ids" in inspect.signature(original.forward).parameters

    @functools.wraps(original.prepare_inputs_for_generation)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = original.prepare_inputs_for_generation(self, *args, **kwargs)
        cache = _first(inputs, CACHES)
        if not rotates and cache is not None and _continues(self, cache):
            inputs.pop("position_ids", None)
        return inputs

    return prepare


@functools.wraps(transformers.PreTrainedModel.save_pretrained)
def _saves(self: Any, *args: Any, **kwargs: Any) -> Any:
    warnings.warn("save_pretrained: the folder loads unpatched, and leaks; call enable() or patch()", stacklevel=2)
    return transformers.PreTrainedModel.save_pretrained(self, *args, **kwargs)


def _mixes(original: Any, mix: Callable[..., Tensor]) -> Callable:
    # Arguments after self and hidden_states, but for **kwargs.
    names = list(inspect.signature(original.forward).parameters)[2:-1]

    @force_accelerate_hooks([_convolution(HOLDS[original])])
    @functools.wraps(original.forward)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.update(zip(names, args))
        packing = kwargs.pop("packing", None)
        cache, mask = (_first(kwargs, CACHES), kwargs.get("attention_mask") if packing is None else packing)
        # Steps of generation, and rows that a padding mask describes, stay transformers' own.
        if isinstance(mask, Tensor) or (cache is not None and cache.has_previous_state(self.layer_idx)):
            return original.forward(self, hidden_states, **kwargs)
        return mix(self, hidden_states, mask or WHOLE_ROWS, cache)

    return forward


def _made(original: type, init: Callable, require_boundaries: bool = False) -> Callable:
    """Wrap a whole model's ``__init__`` to patch what it makes."""

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        ours = type(self) in (original, CLASSES[original])
        expect(ours, "model", f"{original.__name__} of transformers", type(self).__name__, TypeError)
        exchange(self, require_boundaries)

    return made


# Our subclasses by transformers' classes; attributes of this module, for pickle.
CLASSES: dict[type, type] = {}
# Parameters and modules of each mixer.
HOLDS: dict[type, set[str]] = {}
# Models with a head, and their own ``__init__``.
WHOLE: dict[type, Callable] = {}


def _subclass(original: type, **attributes: Any) -> None:
    # Loading initialises no custom code's buffers; unregistered, a class records no hidden states.
    attributes |= {"__module__": __name__, "require_boundaries": False, "is_custom_code": staticmethod(lambda: False)}
    CLASSES[original] = globals()[original.__name__] = ours = type(original.__name__, (original,), attributes)
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(ours), getattr(original, "_can_record_outputs", None))


for folder, family, suffix, holds, way in FAMILIES:
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    # Qwen3.5's Model is of text and images; its CausalLM holds the TextModel.
    body = "TextModel" if hasattr(module, f"{family}TextModel") else "Model"
    mixer, backbone, whole = (getattr(module, f"{family}{part}") for part in (suffix, body, "ForCausalLM"))
    mixes = mix_by_documents(mixer) if suffix in BY_DOCUMENTS else mix
    HOLDS[mixer], WHOLE[whole] = holds, whole.__init__
    _subclass(mixer, forward=_mixes(mixer, mixes))
    _subclass(backbone, forward=_packs(backbone, way, whole=False))
    _subclass(
        whole, __init__=_made(whole, whole.__init__), forward=_packs(whole, way, whole=True),
        prepare_inputs_for_generation=_generates(whole), save_pretrained=_saves,
    )  # fmt: skip


def exchange(model: nn.Module, require_boundaries: bool = False) -> None:
    """Change the classes of the modules inside to ours.

    Raise ValueError, before any change, if one is not as known.
    """
    # Check all before the first change, so that a refusal leaves the model as it was.
    for module in model.modules():
        known = not isinstance(module, tuple(HOLDS)) or type(module) in (*CLASSES, *CLASSES.values())
        expect(known, "model", "mixers of transformers' own class", type(module).__name__)
    # These types of rotary embeddings choose their factors by the batch's longest document.
    rope = str(getattr(getattr(model, "config", None), "rope_parameters", None))
    expect("longrope" not in rope and "dynamic" not in rope, "rope_parameters", "another rope_type", rope)
    theirs = [module for module in model.modules() if type(module) in CLASSES]
    for module in theirs:
        check_supported(module)
    for module in theirs:
        module.__class__ = CLASSES[type(module)]
    for module in model.modules():
        if type(module) in CLASSES.values():
            module.require_boundaries = require_boundaries  # type: ignore[assignment]
