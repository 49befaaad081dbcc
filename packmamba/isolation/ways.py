"""How a model, or a callable, is asked for the logits of packed documents. Shapes: L slots, S documents, V vocabulary."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM

ARGUMENTS = ("position_ids", "seq_idx", "cu_seq_lens_q", "attention_mask")
"""What a model may be told boundaries by; several are joined by ``+``, as in position_ids+seq_idx."""
PAD = 4  # slots by which the longest document is padded

Call = Callable[[Tensor, Sequence[int]], Tensor]
"""tokens (1, L) int64 and the documents' lengths -> logits (1, L, V)."""


@dataclass(frozen=True)
class Way:
    """One way to put documents into a model's rows.

    Attributes:
        name: packed, left or right (the side of the padding).
        call: tokens and logits as if they were packed, whatever the rows look like.
        place: which of the model's (R, W) slots are marked, given marks (L,) of packed slots.
    """

    name: str
    call: Call
    place: Callable[[Tensor, Sequence[int]], Tensor]


@dataclass(frozen=True)
class Subject:
    """What is checked.

    Attributes:
        ways: the ways that the verdict is about.
        padded: further ways, whose documents stand in rows of their own, beside padding.
        alone: logits of one document by itself.
        unmarked: a row's logits without the boundary argument; None where there is none to leave out.
        modules: roots of the modules that compute.
        vocab_size: V; 0: as wide as the logits.
        avoid: ids with a meaning of their own.
        boundaries: by what documents are told apart.
        longest: slots of the longest row that is asked for.
    """

    ways: list[Way]
    padded: list[Way]
    alone: Call
    unmarked: Call | None
    modules: list[nn.Module]
    vocab_size: int
    avoid: frozenset[int]
    boundaries: str
    longest: int
    device: torch.device


def subject_of(model: Any, boundaries: str, vocab_size: int | None) -> Subject:
    """Raises TypeError, ValueError: not a model, no such boundaries."""
    if not callable(model) or isinstance(model, type):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model_or_callable: expected a model or a callable, got {kind}")
    if not isinstance(boundaries, str):
        raise TypeError(f"boundaries: expected a name, got {type(boundaries).__name__}")
    if vocab_size is not None and (not isinstance(vocab_size, int) or vocab_size < 3):
        raise ValueError(f"vocab_size: expected an integer of at least 3, got {vocab_size!r}")
    if vocab_size is not None and vocab_size > 2**24:
        raise ValueError(f"vocab_size: expected at most {2**24}, got {vocab_size}")
    if isinstance(getattr(model, "_orig_mod", model), MambaLM):  # of a compiled model, what it was made of
        _check_unasked(boundaries, "layout", "a MambaLM has layouts")
        return _of_layouts(model, vocab_size)
    if isinstance(model, nn.Module) and "input_ids" in _parameters(model)[0]:
        return _of_model(model, boundaries, vocab_size)
    _check_unasked(boundaries, "lengths", "a callable is given lengths")
    _check_takes_lengths(model)
    modules = [model] if isinstance(model, nn.Module) else _modules_of(model)

    def call(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        return model(tokens, list(lengths))

    return Subject(
        [Way("packed", call, _row)], [], call, None, modules, vocab_size or 32, frozenset(), "lengths", 128,
        _device(modules),
    )  # fmt: skip


def _check_unasked(boundaries: Any, own: str, since: str) -> None:
    """``position_ids`` is what nobody asked for."""
    if boundaries not in ("position_ids", own):
        raise ValueError(f"boundaries: expected none, since {since}; got {boundaries!r}")


def _check_takes_lengths(function: Any) -> None:
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except ValueError:  # it shows none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(
            "model_or_callable: expected a model that takes input_ids, or a callable that takes tokens and lengths, got "
            f"{getattr(function, '__name__', type(function).__name__)}{signature}"
        ) from None


def _of_layouts(model: MambaLM, vocab_size: int | None) -> Subject:
    def call(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        layout = SequenceLayout.from_lengths([list(lengths)], row_length=tokens.shape[1])
        return model(tokens, layout=layout.to(tokens.device))

    def padded(rows: Tensor, own: Tensor) -> Tensor:
        layout = SequenceLayout.from_lengths([[n] for n in own.sum(1).tolist()], row_length=rows.shape[1])
        return model(rows, layout=layout.to(rows.device))

    vocab = vocab_size or model.lm_head.weight.shape[0]
    return Subject(
        [Way("packed", call, _row)], [_padded(padded, "right")], call, None, [model], vocab, frozenset(), "layout",
        2**31, _device([model]),
    )  # fmt: skip


def _of_model(model: nn.Module, boundaries: str, vocab_size: int | None) -> Subject:
    names = tuple(boundaries.split("+")) if isinstance(boundaries, str) else ()
    if not names or not set(names) <= set(ARGUMENTS) or ("attention_mask" in names and len(names) > 1):
        joined = "several but attention_mask joined by +"
        raise ValueError(f"boundaries: expected one of {', '.join(ARGUMENTS)} ({joined}), got {boundaries!r}")
    known, open_ended = _parameters(model)
    config = getattr(model, "config", None)
    quiet = {"use_cache": False} if "use_cache" in known or hasattr(config, "use_cache") else {}

    def logits(tokens: Tensor, **arguments: Any) -> Tensor:
        found = model(input_ids=tokens, **quiet, **arguments)
        for name in ("logits", "last_hidden_state"):
            if isinstance(getattr(found, name, None), Tensor):
                return getattr(found, name)
        return found[0] if isinstance(found, (tuple, list)) else found

    def packed(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        marks = {k: v for name in names for k, v in _marks(name, lengths, tokens.device).items()}
        # max_length_q and the like go along where they are taken.
        return logits(tokens, **{k: v for k, v in marks.items() if k in names or k in known or open_ended})

    def padded(rows: Tensor, own: Tensor) -> Tensor:
        return logits(rows, attention_mask=own.long())

    def alone(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        return logits(tokens)

    sides = [_padded(padded, side) for side in ("left", "right")] if "attention_mask" in known or open_ended else []
    masked = names == ("attention_mask",)
    text = getattr(config, "text_config", None) or config
    avoid = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "image", "audio", "video")}
    flat = {
        i for found in avoid for i in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(i, int)
    }
    known_ids = getattr(text, "vocab_size", None) or 0
    if vocab_size and 0 < known_ids < vocab_size:
        raise ValueError(f"vocab_size: expected at most the model's {known_ids}, got {vocab_size}")
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    return Subject(
        sides if masked else [Way("packed", packed, _row)],
        [] if masked else sides,
        alone,
        None if masked else alone,
        [model],
        vocab_size or known_ids,
        frozenset(flat),
        boundaries,
        min([limit for limit in limits if isinstance(limit, int) and limit > 0], default=2**31),
        _device([model]),
    )


def _marks(name: str, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """As transformers' DataCollatorWithFlattening makes them."""
    if name == "position_ids":
        return {name: torch.cat([torch.arange(n, device=device) for n in lengths])[None]}
    counts = torch.tensor(list(lengths), dtype=torch.int32, device=device)
    if name == "seq_idx":
        numbers = torch.arange(len(counts), dtype=torch.int32, device=device)
        return {name: torch.repeat_interleave(numbers, counts)[None]}
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    longest = max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _row(marks: Tensor, lengths: Sequence[int]) -> Tensor:
    return marks[None]


def _padded(call: Callable[[Tensor, Tensor], Tensor], side: str) -> Way:
    """A document a row, padded on one side with what stands there in the packed row: a look at padding is a look at it."""

    def rows(lengths: Sequence[int], device: Any = None) -> tuple[Tensor, Tensor]:
        """For each slot of the rows its packed slot, and whether it is the document's own."""
        width, total = max(lengths) + PAD, sum(lengths)
        ends = torch.tensor(list(lengths), device=device).cumsum(0)[:, None]
        counts = torch.tensor(list(lengths), device=device)[:, None]
        place = torch.arange(width, device=device)[None]
        begin = ends - width if side == "left" else ends - counts
        own = place >= width - counts if side == "left" else place < counts
        return (begin + place) % total, own

    def flat(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        slots, own = rows(lengths, tokens.device)
        return call(tokens[0][slots], own)[own][None]

    def place(marks: Tensor, lengths: Sequence[int]) -> Tensor:
        slots, own = rows(lengths, marks.device)
        return marks[slots] & own

    return Way(side, flat, place)


def _parameters(model: nn.Module) -> tuple[dict[str, Any], bool]:
    """The parameters of a model's forward, and whether it takes any other by name."""
    forward = getattr(model, "_orig_mod", model).forward  # a compiled model's own
    parameters = dict(inspect.signature(forward).parameters)
    return parameters, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _modules_of(function: Any) -> list[nn.Module]:
    """What a callable computes with, as far as it shows: bound, enclosed, or named in its code."""
    if isinstance(function, functools.partial):
        parts = [function.func, *function.args, *function.keywords.values()]
        return [m for part in parts for m in ([part] if isinstance(part, nn.Module) else _modules_of(part))]
    seen: list[Any] = (
        [getattr(function, "__self__", None), *vars(function).values()] if hasattr(function, "__dict__") else []
    )
    if inspect.isfunction(inner := getattr(function, "__func__", function)):
        found = inspect.getclosurevars(inner)
        seen += [*found.nonlocals.values(), *found.globals.values(), *(inner.__defaults__ or ())]
    inside = [m for owner in seen if hasattr(owner, "__dict__") and not isinstance(owner, (nn.Module, type))
              and not inspect.ismodule(owner) and not inspect.isroutine(owner) for m in vars(owner).values()]  # fmt: skip
    modules = [m for m in [*seen, *inside] if isinstance(m, nn.Module)]
    return list({id(m): m for m in modules}.values())


def _device(modules: Sequence[nn.Module]) -> torch.device:
    return next((p.device for m in modules for p in m.parameters()), torch.device("cpu"))
