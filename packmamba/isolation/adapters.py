"""Call a model, or a callable, for the logits of packed documents. Shapes: L slots, S documents, V vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM

ARGUMENTS = ("position_ids", "seq_idx", "cu_seq_lens_q", "attention_mask")
"""Boundary arguments of models; several are joined by ``+``, as in position_ids+seq_idx."""
PAD = 4  # slots of padding beside the longest document

Call = Callable[[Tensor, Sequence[int]], Tensor]
"""tokens (1, L) int64 and the documents' lengths -> logits (1, L, V)."""


@dataclass(frozen=True)
class DocumentInput:
    """One way to put documents into a model's rows.

    Attributes:
        name: packed, or the side of the padding: left, right.
        call: tokens and logits as if documents were packed, whatever the rows look like.
        place: the model's (R, W) marked slots, from marks (L,) of packed slots.
    """

    name: str
    call: Call
    place: Callable[[Tensor, Sequence[int]], Tensor] = lambda marks, lengths: marks[None]


@dataclass(frozen=True)
class CheckedModel:
    """A model as ``leakcheck`` calls it.

    Attributes:
        inputs: the inputs that the result is about.
        padded: further inputs: each document in a row of its own, beside padding.
        alone: logits of one document by itself.
        unmarked: a row's logits without the boundary argument; None where it cannot be left out.
        modules: roots of the modules that compute.
        vocab_size: V; 0: the logits' width.
        avoid: special token ids.
        boundaries: how documents are marked.
        longest: maximum slots of a row.
    """

    inputs: list[DocumentInput]
    padded: list[DocumentInput]
    alone: Call
    unmarked: Call | None
    modules: list[nn.Module]
    vocab_size: int
    boundaries: str
    avoid: frozenset[int] = frozenset()
    longest: int = 2**31

    @property
    def device(self) -> torch.device:
        return next((p.device for m in self.modules for p in m.parameters()), torch.device("cpu"))


def adapt(model: Any, boundaries: str, vocab_size: int | None) -> CheckedModel:
    """Adapt a transformers model, a MambaLM or a callable. Raises TypeError, ValueError: no model, no such boundaries."""
    if not callable(model) or isinstance(model, type):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model_or_callable: expected a model or a callable, got {kind}")
    if vocab_size is not None and (not isinstance(vocab_size, int) or not 3 <= vocab_size <= 2**24):
        raise ValueError(f"vocab_size: expected an integer from 3 to {2**24}, got {vocab_size!r}")
    ours = isinstance(getattr(model, "_orig_mod", model), MambaLM)  # also of a compiled model
    if not ours and isinstance(model, nn.Module) and "input_ids" in _parameters(model)[0]:
        return _adapt_model(model, boundaries, vocab_size)
    own = "layout" if ours else "lengths"
    if boundaries not in ("position_ids", own):  # position_ids is the default
        raise ValueError(f"boundaries: expected none, since the model is given a {own}; got {boundaries!r}")
    if ours:
        return _adapt_mamba_lm(model, vocab_size)
    modules = [model] if isinstance(model, nn.Module) else _modules_of(model)

    call: Call = lambda tokens, lengths: model(tokens, list(lengths))  # noqa: E731
    return CheckedModel([DocumentInput("packed", call)], [], call, None, modules, vocab_size or 32, own, longest=128)


def _adapt_mamba_lm(model: MambaLM, vocab_size: int | None) -> CheckedModel:
    def call(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        layout = SequenceLayout.from_lengths([list(lengths)], row_length=tokens.shape[1])
        return model(tokens, layout=layout.to(tokens.device))

    def padded(rows: Tensor, own: Tensor) -> Tensor:
        layout = SequenceLayout.from_lengths([[n] for n in own.sum(1).tolist()], row_length=rows.shape[1])
        return model(rows, layout=layout.to(rows.device))

    inputs, vocab = [DocumentInput("packed", call)], vocab_size or model.lm_head.weight.shape[0]
    return CheckedModel(inputs, [_padded(padded, "right")], call, None, [model], vocab, "layout")


def _adapt_model(model: nn.Module, boundaries: str, vocab_size: int | None) -> CheckedModel:
    names = tuple(boundaries.split("+")) if isinstance(boundaries, str) else ()
    if not names or not set(names) <= set(ARGUMENTS) or ("attention_mask" in names and len(names) > 1):
        raise ValueError(
            f"boundaries: expected {', '.join(ARGUMENTS)} (the first three joined by +), got {boundaries!r}"
        )
    known, open_ended = _parameters(model)
    config = getattr(model, "config", None)
    no_cache = {"use_cache": False} if "use_cache" in known or hasattr(config, "use_cache") else {}

    def logits(tokens: Tensor, **arguments: Any) -> Tensor:
        output = model(input_ids=tokens, **no_cache, **arguments)
        for name in ("logits", "last_hidden_state"):
            if isinstance(getattr(output, name, None), Tensor):
                return getattr(output, name)
        return output[0] if isinstance(output, (tuple, list)) else output

    def packed(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        marks = {k: v for name in names for k, v in _boundary_arguments(name, lengths, tokens.device).items()}
        # max_length_q and the like go along where they are taken.
        return logits(tokens, **{k: v for k, v in marks.items() if k in names or k in known or open_ended})

    def padded(rows: Tensor, own: Tensor) -> Tensor:
        return logits(rows, attention_mask=own.long())

    sides = [_padded(padded, side) for side in ("left", "right")] if "attention_mask" in known or open_ended else []
    masked = names == ("attention_mask",)
    text = getattr(config, "text_config", None) or config
    special = [getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "image", "audio", "video")]
    flat = [i for ids in special for i in (ids if isinstance(ids, (list, tuple)) else [ids])]
    known_ids = getattr(text, "vocab_size", None) or 0
    if vocab_size and 0 < known_ids < vocab_size:
        raise ValueError(f"vocab_size: expected at most the model's {known_ids}, got {vocab_size}")
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    return CheckedModel(
        sides if masked else [DocumentInput("packed", packed)],
        [] if masked else sides,
        lambda tokens, lengths: logits(tokens),
        None if masked else lambda tokens, lengths: logits(tokens),
        [model],
        vocab_size or known_ids,
        boundaries,
        frozenset(i for i in flat if isinstance(i, int)),
        min([limit for limit in limits if isinstance(limit, int) and limit > 0], default=2**31),
    )


def _boundary_arguments(name: str, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Make boundary arguments as transformers' DataCollatorWithFlattening does."""
    if name == "position_ids":
        return {name: torch.cat([torch.arange(n, device=device) for n in lengths])[None]}
    counts = torch.tensor(list(lengths), dtype=torch.int32, device=device)
    if name == "seq_idx":
        numbers = torch.arange(len(counts), dtype=torch.int32, device=device)
        return {name: torch.repeat_interleave(numbers, counts)[None]}
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    longest = max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _padded(call: Callable[[Tensor, Tensor], Tensor], side: str) -> DocumentInput:
    """Put each document into a row of its own, padded on one side with its neighbours' tokens in the packed row."""

    def rows(lengths: Sequence[int], device: Any = None) -> tuple[Tensor, Tensor]:
        """Return the packed slot of each slot of the rows, and whether it is the document's own."""
        width, total = max(lengths) + PAD, sum(lengths)
        counts = torch.tensor(list(lengths), device=device)[:, None]
        ends, place = counts.cumsum(0), torch.arange(width, device=device)[None]
        begin = ends - width if side == "left" else ends - counts
        own = place >= width - counts if side == "left" else place < counts
        return (begin + place) % total, own

    def flat(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        slots, own = rows(lengths, tokens.device)
        return call(tokens[0][slots], own)[own][None]

    def place(marks: Tensor, lengths: Sequence[int]) -> Tensor:
        slots, own = rows(lengths, marks.device)
        return marks[slots] & own

    return DocumentInput(side, flat, place)


def _parameters(model: nn.Module) -> tuple[dict[str, Any], bool]:
    """Return the parameters of a model's forward, and whether it takes any keyword."""
    forward = getattr(model, "_orig_mod", model).forward  # also of a compiled model
    parameters = dict(inspect.signature(forward).parameters)
    return parameters, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _modules_of(function: Any) -> list[nn.Module]:
    """List the modules that a callable computes with, as far as it shows: bound, enclosed, or named in its code."""
    seen: list[Any] = [getattr(function, "__self__", None), *getattr(function, "__dict__", {}).values()]
    if inspect.isfunction(inner := getattr(function, "__func__", function)):
        enclosed = inspect.getclosurevars(inner)
        seen += [*enclosed.nonlocals.values(), *enclosed.globals.values()]
    for owner in list(seen):
        plain = not isinstance(owner, (nn.Module, type)) and not inspect.ismodule(owner)
        if plain and not inspect.isroutine(owner) and hasattr(owner, "__dict__"):
            seen += vars(owner).values()
    return list({id(m): m for m in seen if isinstance(m, nn.Module)}.values())
