"""Results of ``leakcheck`` and their sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModeResult:
    """Findings in evaluation mode, in training mode, or of a callable as it is.

    Attributes:
        isolated_forward: changing other documents' tokens changes no bit of a document's logits.
        isolated_backward: a document's loss has no gradient at other documents' tokens; None: there is no gradient to see.
        same_as_alone: packed logits equal those of each document alone within the tolerance; None: not compared.
        largest: largest change of another document's logits.
        after: tokens behind a document that its changed last token reaches; ``endless``: up to the end of the row.
        module: the first module whose output another document changes.
        difference: largest relative difference between a document packed and alone.
        rounding: other documents change logits by rounding alone: no gradient connects them.
        ignored: the boundary argument changes no bit; None: there is none.
        raises: the error of a model that refuses the boundary argument.
        notes: further sentences.
    """

    name: str
    isolated_forward: bool | None = None
    isolated_backward: bool | None = None
    same_as_alone: bool | None = None
    largest: float = 0.0
    after: int = 0
    endless: bool = False
    module: str | None = None
    difference: float | None = None
    rounding: bool = False
    ignored: bool | None = None
    raises: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def leaks(self) -> bool:
        return self.isolated_forward is False or self.isolated_backward is False

    def sentences(self, boundaries: str) -> Iterator[str]:
        if self.raises is not None:
            yield f"{self.name}: refuses {boundaries}: {self.raises}"
            return
        changed = "no bit of a document's logits"
        if not self.isolated_forward:
            reach = f", {self.after} tokens behind it" if self.after else ""
            changed = f"a document's logits, by up to {self.largest:.2g}{reach}"
        elif self.rounding:
            changed = f"a document's logits by rounding alone ({self.largest:.1g}), without a gradient"
        yield f"{self.name}: changing other documents changes {changed}."
        if self.isolated_backward is not None:
            yield f"  A document's loss has {'no' if self.isolated_backward else 'a'} gradient at another document's tokens."
        if self.module is not None:
            yield f"  The first module that leaks is {self.module}."
        if self.difference is not None:
            verb = "equal" if self.same_as_alone else "differ from"
            yield f"  Packed logits {verb} those of each document alone: relative difference {self.difference:.1g}."
        if self.ignored:
            yield f"  The model ignores {boundaries} silently: without it, every bit is the same."
        yield from (f"  {note}" for note in self.notes)


@dataclass
class LeakCheckResult:
    """The result of ``leakcheck``; ``str`` gives it in sentences.

    Attributes:
        boundaries: how documents were marked: the argument's name, layout (a MambaLM), lengths (a callable).
        modes: results by mode.
        padding: by side, whether padded documents equal themselves alone whatever the padding holds; for models that take an
            attention_mask, and a MambaLM. No part of ``leaks`` unless boundaries is attention_mask.
    """

    boundaries: str
    modes: dict[str, ModeResult]
    padding: dict[str, bool | None] = field(default_factory=dict)

    @property
    def leaks(self) -> bool:
        """Anything crosses a boundary, forward or backward, in any mode."""
        return any(mode.leaks for mode in self.modes.values())

    @property
    def isolated_forward(self) -> bool | None:
        return self._all("isolated_forward")

    @property
    def isolated_backward(self) -> bool | None:
        return self._all("isolated_backward")

    @property
    def same_as_alone(self) -> bool | None:
        return self._all("same_as_alone")

    @property
    def raises(self) -> str | None:
        """The error of a model that refuses the boundary argument."""
        return next(iter(self._known("raises")), None)

    @property
    def module(self) -> str | None:
        """The first module that leaks."""
        return next(iter(self._known("module")), None)

    @property
    def ignored(self) -> bool:
        """The boundary argument changes no bit of the logits."""
        return any(self._known("ignored"))

    @property
    def reach(self) -> int:
        """Tokens behind its document that a last token reaches in the logits."""
        return max(mode.after for mode in self.modes.values())

    @property
    def ok(self) -> bool:
        """Nothing leaks, nothing is refused, and documents are what they are alone."""
        return not self.leaks and self.raises is None and self.same_as_alone is not False

    def _known(self, name: str) -> list[Any]:
        return [value for mode in self.modes.values() if (value := getattr(mode, name)) is not None]

    def _all(self, name: str) -> bool | None:
        values = self._known(name)
        return all(values) if values else None

    def __str__(self) -> str:
        if self.leaks:
            head = f"Documents leak (boundaries: {self.boundaries})."
        elif self.raises is not None:
            head = f"Nothing was checked: the model refuses {self.boundaries}."
        elif self.same_as_alone is False:
            head = f"No document changes another (boundaries: {self.boundaries}), but packed they are not what they are alone."
        else:
            head = f"Nothing crosses a document boundary (boundaries: {self.boundaries})."
        lines = [head, *(line for mode in self.modes.values() for line in mode.sentences(self.boundaries))]
        outcomes = {
            None: "refused",
            True: "documents equal themselves alone",
            False: "documents differ from themselves alone",
        }
        lines += [f"Padding on the {side}: {outcomes[harmless]}." for side, harmless in self.padding.items()]
        return "\n".join(lines)
