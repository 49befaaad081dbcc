"""Call a model or a callable for documents' logits. Shapes: L slots, V vocabulary, R x W a model's rows."""

import inspect
from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from packmamba.errors import expect
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM

ARGUMENTS = ("position_ids", "seq_idx", "cu_seq_lens_q", "attention_mask")
"""Boundary arguments of models."""


class CheckedCallable:
    """Call a function of tokens (1, L) and lengths.

    Attributes:
        inputs: packed, or sides of padding beside a document in a row of its own; ``padding``: more of these.
        boundaries: how documents are marked; ``optional``: by an argument that may be left out.
        vocab_size: V; 0: the logits' width. ``avoid``: special ids. ``longest``: maximum slots of a row.
    """

    inputs: tuple[str, ...] = ("packed",)
    padding: tuple[str, ...] = ()
    optional = False
    avoid: Set[int] = frozenset()

    def __init__(
        self,
        call: Callable[..., Any],
        modules: list[nn.Module],
        boundaries: str,
        vocab_size: int,
        longest: int,
    ) -> None:
        self.call, self.modules = call, modules
        self.boundaries, self.vocab_size, self.longest = boundaries, vocab_size, longest

    @property
    def device(self) -> torch.device:
        return next((p.device for m in self.modules for p in m.parameters()), torch.device("cpu"))

    def packed(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """Return the logits (1, L, V) of packed documents."""
        return self.call(tokens, lengths)

    def padded(self, rows: Tensor, own: Tensor) -> Tensor:
        """Return logits (R, W, V) of documents in rows of their own, in the slots ``own``."""
        raise NotImplementedError

    def alone(self, tokens: Tensor) -> Tensor:
        """Return the logits (1, L, V) of one document, without a boundary argument."""
        return self.packed(tokens, [tokens.shape[1]])


class CheckedModel(CheckedCallable):
    """Call a model that takes ``input_ids`` and boundary arguments."""

    optional = True

    def __init__(self, model: nn.Module, boundaries: str, vocab_size: int | None) -> None:
        self.names = tuple(boundaries.split("+")) if isinstance(boundaries, str) else ()
        masked = self.names == ("attention_mask",)
        known = masked or (self.names and set(self.names) <= set(ARGUMENTS[:3]))
        expect(
            known,
            "boundaries",
            f"{', '.join(ARGUMENTS)} (the first three joined by +)",
            repr(boundaries),
        )
        self.known, self.open_ended = forward_parameters(model)
        if masked:
            self.inputs = ("left", "right")
        elif "attention_mask" in self.known or self.open_ended:
            self.padding = ("left", "right")
        config = getattr(model, "config", None)
        self.no_cache = (
            {"use_cache": False}
            if "use_cache" in self.known or hasattr(config, "use_cache")
            else {}
        )
        text = getattr(config, "text_config", None) or config
        known_ids = getattr(text, "vocab_size", None) or 0
        expect(
            not 0 < known_ids < (vocab_size or 0), "vocab_size", f"at most {known_ids}", vocab_size
        )
        longest = getattr(text, "max_position_embeddings", None) or 2**31
        super().__init__(model, [model], boundaries, vocab_size or known_ids, longest)
        special = [
            ids
            for name, ids in getattr(config, "__dict__", {}).items()
            if name.endswith("_token_id")
        ]
        self.avoid = {
            i
            for ids in special
            for i in (ids if isinstance(ids, list) else [ids])
            if isinstance(i, int)
        }

    def packed(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        layout, longest = (
            SequenceLayout.from_lengths([lengths], tokens.shape[1]).to(tokens.device),
            max(lengths),
        )
        marks: dict[str, Any] = {
            "position_ids": layout.position_indices.long(),
            "seq_idx": layout.seq_idx,
        }
        marks |= {"cu_seq_lens_q": layout.cu_seqlens, "cu_seq_lens_k": layout.cu_seqlens}
        marks |= {"max_length_q": longest, "max_length_k": longest}
        names = set(self.names)
        if "cu_seq_lens_q" in names:  # as transformers' DataCollatorWithFlattening
            names |= {name for name in [*marks][3:] if self.open_ended or name in self.known}
        return self._logits(
            tokens, **{name: value for name, value in marks.items() if name in names}
        )

    def padded(self, rows: Tensor, own: Tensor) -> Tensor:
        return self._logits(rows, attention_mask=own.long())

    def alone(self, tokens: Tensor) -> Tensor:
        if getattr(self.call, "require_boundaries", False):  # a patched model
            return self._logits(
                tokens, position_ids=torch.arange(tokens.shape[1], device=tokens.device)[None]
            )
        return self._logits(tokens)

    def _logits(self, tokens: Tensor, **arguments: Any) -> Tensor:
        return logits_in(self.call(input_ids=tokens, **self.no_cache, **arguments))


def logits_in(output: Any) -> Any:
    output = getattr(output, "logits", output)
    return output if isinstance(output, Tensor) else output[0]


def adapt(model: Any, boundaries: str, vocab_size: int | None) -> CheckedCallable:
    """Adapt a transformers model, a MambaLM or a callable. Raises TypeError or ValueError."""
    if isinstance(model, CheckedCallable):
        return model
    callable_ = callable(model) and not isinstance(model, type)
    expect(callable_, "model_or_callable", "a model or a callable", f"{model!r:.60}", TypeError)
    size = 3 if vocab_size is None else vocab_size
    fits = isinstance(size, int) and 3 <= size <= 2**24
    expect(fits, "vocab_size", f"an integer from 3 to {2**24}", repr(vocab_size))
    ours = isinstance(getattr(model, "_orig_mod", model), MambaLM)  # also of a compiled model
    if not ours and isinstance(model, nn.Module) and "input_ids" in forward_parameters(model)[0]:
        return CheckedModel(model, boundaries, vocab_size)
    given = "layout" if ours else "lengths"
    expect(
        boundaries in ("position_ids", given),
        "boundaries",
        f"none beside {given}",
        repr(boundaries),
    )
    if not ours:
        modules = [model] if isinstance(model, nn.Module) else _modules_of(model)
        return CheckedCallable(model, modules, given, vocab_size or 32, 128)

    def call(tokens: Tensor, lengths: list[int]) -> Tensor:
        return model(
            tokens, layout=SequenceLayout.from_lengths([lengths], sum(lengths)).to(tokens.device)
        )

    return CheckedCallable(call, [model], given, vocab_size or len(model.lm_head.weight), 2**31)


def forward_parameters(model: nn.Module) -> tuple[dict[str, Any], bool]:
    """Return the parameters of a model's forward, and whether it takes any keyword."""
    forward = getattr(model, "_orig_mod", model).forward
    parameters = dict(inspect.signature(forward).parameters)
    return parameters, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _modules_of(function: Any) -> list[nn.Module]:
    """List the modules that a callable binds, encloses or names in its code."""
    seen: list[Any] = []
    if isinstance(function, partial):
        seen += [*function.args, *function.keywords.values()]
        function = function.func
    seen += [getattr(function, "__self__", None), *getattr(function, "__dict__", {}).values()]
    if inspect.isfunction(inner := getattr(function, "__func__", function)):
        enclosed = inspect.getclosurevars(inner)
        seen += [*enclosed.nonlocals.values(), *enclosed.globals.values()]
    for owner in list(seen):
        plain = not isinstance(owner, (nn.Module, type)) and not inspect.ismodule(owner)
        if plain and not inspect.isroutine(owner) and hasattr(owner, "__dict__"):
            seen += vars(owner).values()
    return list({id(m): m for m in seen if isinstance(m, nn.Module)}.values())
