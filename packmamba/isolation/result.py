"""Results of ``leakcheck`` and their sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModeResult:
    """Findings in evaluation mode, in training mode, or of a callable as it is. None: not seen.

    Attributes:
        isolated_forward: changing other documents changes no bit of a document's logits.
        isolated_backward: a document's loss has no gradient at other documents' tokens.
        same_as_alone: packed logits equal those of each document alone within the tolerance.
        largest: largest change of another document's logits; rounding alone if ``isolated_forward``.
        after: tokens behind a document that its last token reaches; ``endless``: up to the end of the row.
        module: the first module whose output another document changes.
        difference: largest relative difference between a document packed and alone.
        ignored: the boundary argument changes no bit.
        raises: the error of a model that refuses the boundary argument.
        notes: further sentences.
    """

    isolated_forward: bool | None = None
    isolated_backward: bool | None = None
    same_as_alone: bool | None = None
    largest: float = 0.0
    after: int = 0
    endless: bool = False
    module: str | None = None
    difference: float | None = None
    ignored: bool | None = None
    raises: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def leaks(self) -> bool:
        return self.isolated_forward is False or self.isolated_backward is False

    def add(self, name: str, holds: bool) -> None:
        """Record whether a property holds in one more row; it holds if it does in all."""
        setattr(self, name, getattr(self, name) is not False and holds)

    def sentences(self, name: str, boundaries: str) -> Iterator[str]:
        if self.raises is not None:
            yield f"{name}: refuses {boundaries}: {self.raises}"
            return
        changed = "no bit of a document's logits"
        if not self.isolated_forward:
            reach = f", {self.after} tokens behind it" if self.after else ""
            changed = f"a document's logits, by up to {self.largest:.2g}{reach}"
        elif self.largest:
            changed = f"a document's logits by rounding alone ({self.largest:.1g}), without a gradient"
        yield f"{name}: changing other documents changes {changed}."
        if self.isolated_backward is not None:
            yield f"  A document's loss has {'no' if self.isolated_backward else 'a'} gradient at another document's tokens."
        if self.module is not None:
            yield f"  The first module that leaks is {self.module}."
        if self.difference is not None:
            verb = "equal" if self.same_as_alone else "differ from"
            yield f"  Packed logits {verb} those of each document alone: relative difference {self.difference:.1g}."
        if self.ignored:
            yield f"  The model ignores {boundaries} silently: without it, every bit is the same."
        yield from (f"  {note}" for note in dict.fromkeys(self.notes))


def _of_modes(name: str, combine: Callable[[Iterator[Any]], Any]) -> Any:
    """Make a property that combines a finding of all modes; None where no mode has one."""

    def get(self: LeakCheckResult) -> Any:
        values = [value for mode in self.modes.values() if (value := getattr(mode, name)) is not None]
        return combine(iter(values)) if values else None

    return property(get)


@dataclass
class LeakCheckResult:
    """The result of ``leakcheck``; ``str`` gives it in sentences.

    Attributes:
        boundaries: how documents were marked: the argument's name, layout (a MambaLM), lengths (a callable).
        modes: findings by mode.
        padding: by side, whether padded documents equal themselves alone whatever the padding holds (None: refused); for
            models that take an attention_mask, and a MambaLM. No part of ``leaks``.
    """

    boundaries: str
    modes: dict[str, ModeResult]
    padding: dict[str, bool | None] = field(default_factory=dict)

    @property
    def leaks(self) -> bool:
        """Anything crosses a boundary, forward or backward, in any mode."""
        return any(mode.leaks for mode in self.modes.values())

    isolated_forward = _of_modes("isolated_forward", all)
    isolated_backward = _of_modes("isolated_backward", all)
    same_as_alone = _of_modes("same_as_alone", all)
    raises = _of_modes("raises", next)
    module = _of_modes("module", next)
    ignored = _of_modes("ignored", any)
    reach = _of_modes("after", max)

    @property
    def ok(self) -> bool:
        """Nothing leaks, nothing is refused, and documents are what they are alone."""
        return not self.leaks and self.raises is None and self.same_as_alone is not False

    def __str__(self) -> str:
        head = f"Nothing crosses a document boundary (boundaries: {self.boundaries})."
        if self.leaks:
            head = f"Documents leak (boundaries: {self.boundaries})."
        elif self.raises is not None:
            head = f"Nothing was checked: the model refuses {self.boundaries}."
        elif self.same_as_alone is False:
            head = f"No document changes another (boundaries: {self.boundaries}), but packed they are not what they are alone."
        lines = [head, *(s for name, mode in self.modes.items() for s in mode.sentences(name, self.boundaries))]
        verbs = {None: "are refused", True: "equal themselves alone", False: "differ from themselves alone"}
        return "\n".join(lines + [f"Padding on the {side}: documents {verbs[v]}." for side, v in self.padding.items()])
