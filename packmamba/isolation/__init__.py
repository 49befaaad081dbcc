"""Does anything cross a document boundary? Asked of any causal language model, to the bit."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from packmamba.isolation.check import check, padding_is_harmless
from packmamba.isolation.kernels import own_code
from packmamba.isolation.probes import WithoutDropout, eager, logits_of, undisturbed
from packmamba.isolation.verdict import LeakCheck, Mode
from packmamba.isolation.ways import subject_of

__all__ = ["LeakCheck", "Mode", "leakcheck"]

ROWS = ((19, 1, 23, 2, 38), (64, 63, 1, 65))
"""Lengths of documents: awkward ones, and some that end where kernels cut their chunks. The sums are primes, which no other
axis of a model is as long as."""


def leakcheck(
    model_or_callable: Any,
    boundaries: str = "position_ids",
    vocab_size: int | None = None,
    lengths: Sequence[int] | None = None,
) -> LeakCheck:
    """Changes documents of a packed row and looks at the others, bit by bit, forward and backward, in both modes.

    Forward: a document's last token is changed, another's first token, and for each document everything but it. Backward: a
    document's loss is differentiated by what all tokens are embedded to. Then each document is computed alone. Random states,
    modes, buffers, gradients and weights are left as they were; each call draws the same random numbers. A model of
    transformers that does not run with the kernels that are installed is checked without them, and a note says so.

    Args:
        model_or_callable: a causal language model that takes ``input_ids`` and the boundary argument (called with
            ``use_cache=False``); or a MambaLM (by its layout); or a callable (tokens (1, L) int64, lengths) -> logits (1, L, V).
        boundaries: how the model is told where documents start: position_ids, seq_idx, cu_seq_lens_q (with the arguments that
            go with it), several joined by +; or attention_mask: documents in rows of their own, padded on either side. A
            MambaLM and a callable take none.
        vocab_size: ids are below it; None: the model's, of a callable 32.
        lengths: of the documents, at least two; None: awkward ones.

    Raises:
        TypeError, ValueError: what is checked is no such model, its logits are not finite, or no token moves them.
        Exception: the model's own, where it fails without boundaries too.
    """
    subject = subject_of(model_or_callable, boundaries, vocab_size)
    if lengths is not None:
        try:
            lengths = [operator.index(length) for length in lengths]
        except TypeError:
            raise TypeError(f"lengths: expected integers, such as [3, 5], got {lengths!r}") from None
        if len(lengths) < 2 or min(lengths) < 1:
            raise ValueError(f"lengths: expected at least two documents of at least one token, got {lengths}")
    rows = [tuple(lengths)] if lengths is not None else [row for row in ROWS if sum(row) <= subject.longest]
    if not rows:
        raise ValueError(f"lengths: the model takes {subject.longest} positions; name documents that fit")
    result = LeakCheck(subject.boundaries, {})

    def checked(name: str, rows: Sequence[Sequence[int]], alone: bool) -> Mode:
        mode = Mode(name)
        for row in rows:
            for way in subject.ways:
                check(subject, way, row, mode, alone)
        return mode

    def two_tokens() -> torch.Tensor:
        with torch.no_grad():
            return logits_of(subject.alone, torch.zeros(2, dtype=torch.int64, device=subject.device), [2])

    with ExitStack() as stack:
        stack.enter_context(undisturbed(subject.modules))
        for module in subject.modules:
            module.eval()
        own = stack.enter_context(own_code(subject.modules, two_tokens))
        if not subject.vocab_size:
            subject = replace(subject, vocab_size=two_tokens().shape[-1])
        first = checked("evaluation mode" if subject.modules else "as it is", rows, True)
        if own:
            first.notes.append(
                "Checked without the kernels that are installed: with them the model does not run on this device."
            )
        result.modes["evaluation" if subject.modules else "as it is"] = first
        if first.raises is not None or not subject.modules:
            return result
        result.padding = {way.name: padding_is_harmless(subject, way, rows[0]) for way in subject.padded}
        for module in subject.modules:
            module.train()
        mode = checked("training mode", rows[:1], False)
        if mode.leaks and not first.leaks:
            with WithoutDropout(), eager():
                other = checked("training mode", rows[:1], False)
            if not other.leaks:
                other.notes.append(
                    "Checked without dropout: with it, other documents decide which random numbers are drawn."
                )
                mode = other
        result.modes["training"] = mode
    return result
