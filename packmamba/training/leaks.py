"""leakcheck in training: does a real batch leak where its boundary scheme says it must not, and only there?

The check changes one token of the batch and looks at the others' activations, bit by bit, then at the gradients of one document.
It leaves random states, states that are carried, gradients and weights alone. It costs two forward passes and one forward and
backward pass of one batch, measured as 1.4 times the gradients of one batch, 2.4 times with carried states.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from packmamba.data.batching import PackedBatch, StepBatch
from packmamba.errors import UserError
from packmamba.isolation.adapters import DocumentInput
from packmamba.isolation.probes import crossing_gradients, eager, moved, reseed, undisturbed
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM
from packmamba.training.boundary import Boundary, Carry
from packmamba.training.callbacks import History


class LeakError(UserError, RuntimeError):
    """Documents leak in a run that must not leak."""


class LeakCheck(Callback):
    """Checks a batch when training begins or goes on, and every ``every`` steps (0: only then).

    A leak that the boundary scheme does not have ends the run. A scheme that leaks, or carries, and does not is a warning.
    ``history``'s clock leaves the check out.
    """

    def __init__(self, every: int, history: History) -> None:
        self.every, self.history = every, history
        self._begun = False

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._begun = False

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: StepBatch, batch_idx: int) -> None:
        if self._begun and (self.every == 0 or trainer.global_step % self.every):
            return
        self._begun = True
        self.history.settle()
        begun = time.perf_counter()
        # The batch in which most documents have neighbours; what is carried fits the first alone.
        batches = batch.batches[:1] if module.boundary.keeps else batch.batches
        packed = max(batches, key=lambda b: b.layout.num_documents - b.layout.shape[0], default=None)
        if packed is not None:
            with trainer.precision_plugin.forward_context():
                check_batch(module.model, module.boundary, packed, gradients=module.device_mesh is None)
        self.history.leave_out(time.perf_counter() - begun)


def check_batch(model: MambaLM, boundary: Boundary, batch: PackedBatch, gradients: bool = True) -> None:
    """Compares what crosses boundaries in a batch with what the scheme says.

    Args:
        gradients: whether gradients are looked at too, beside activations.

    Raises:
        LeakError: something crosses where nothing must. Warns where nothing crosses and something should.
    """
    layout = batch.layout
    if not layout.num_documents:
        return
    conv_layout, ssm_layout = boundary.layouts(layout)
    leaks = not (conv_layout == layout and ssm_layout == layout)
    followed = (layout.rows[1:] == layout.rows[:-1]).nonzero().flatten()
    first = int(followed[0]) if len(followed) else 0
    with undisturbed([model]), eager():
        with torch.no_grad():
            base = _hidden(model, boundary, batch)
            last = int(layout.ends[first]) - 1
            slots = moved(_hidden(model, boundary, _changed(batch, last, model)), base).any(-1).flatten()
            others = (layout.documents != first).flatten() & (layout.documents >= 0).flatten()
            crossing = (slots & others).nonzero().flatten()
            own = (
                getattr(type(boundary), "of_rows", None) is Carry.of_rows
            )  # states that are carried stay with their rows
            carried = _carried(model, boundary, batch) if own else None
        if leaks:
            if len(followed) and not len(crossing):
                _warn(boundary, "a document's last token moves nothing in the documents behind it, though it should")
            return
        if len(crossing):
            number = int(layout.documents.flatten()[crossing[0]])
            raise _leak(boundary, f"another last token of document {first} of a batch moves document {number}")
        if carried is not None and not carried:
            _warn(
                boundary, "a document that goes on in the next batch does not start from what it left, or another does"
            )
        if gradients and len(followed):
            behind = (int(layout.starts[first + 1]), int(layout.ends[first + 1]))
            way = DocumentInput("batch", _flat(model, boundary, batch), lambda marks, _: marks.view(layout.shape))
            if crossing_gradients(way, batch.tokens.flatten(), layout.lengths.tolist(), [behind])[0]:
                raise _leak(boundary, f"the gradient of document {first + 1} of a batch reaches other documents")


def as_trained(model: MambaLM, boundary: Callable[[], Boundary]) -> Callable[[Tensor, Sequence[int]], Tensor]:
    """(tokens (1, L), lengths) -> logits (1, L, V), read with a boundary scheme: what ``leakcheck`` takes."""

    def call(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        layout = SequenceLayout.from_lengths([list(lengths)], row_length=tokens.shape[1]).to(tokens.device)
        return model.lm_head(
            boundary().hidden(model, PackedBatch(tokens, tokens, torch.ones_like(tokens).bool(), layout))
        )

    return call


def _hidden(model: MambaLM, boundary: Boundary, batch: PackedBatch) -> Tensor:
    """As training reads the batch; what is carried stays as it is, and random starts are the same each time."""
    reseed()
    return copy.deepcopy(boundary).hidden(model, batch)


def _flat(model: MambaLM, boundary: Boundary, batch: PackedBatch) -> Callable[[Tensor, Sequence[int]], Tensor]:
    def call(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        return _hidden(model, boundary, replace(batch, tokens=tokens.view(batch.layout.shape))).flatten(0, 1)[None]

    return call


def _carried(model: MambaLM, boundary: Boundary, batch: PackedBatch) -> bool:
    """Whether in a next batch the document that continues the first row's moves with it, and no other does."""
    rows, tokens = batch.layout.shape
    numbers = torch.arange(rows, dtype=torch.int32, device=batch.tokens.device)
    last = torch.searchsorted(batch.layout.rows, numbers, right=True) - 1
    if len(set(last.tolist()) - {-1}) < rows or tokens < 2:
        return True  # a row without documents, or no room for two
    places = (batch.layout.offsets + batch.layout.lengths)[last].tolist()
    half = tokens // 2
    layout = SequenceLayout.from_lengths([[half, tokens - half]] * rows, tokens, [[place, 0] for place in places])
    following = replace(batch, layout=layout.to(batch.tokens.device))
    found = []
    for before in (batch, _changed(batch, int(batch.layout.ends[last[0]]) - 1, model)):
        reseed()
        kept = copy.deepcopy(boundary)
        kept.hidden(model, before)
        found.append(kept.hidden(model, following))
    slots = moved(*found).any(-1)
    return bool(slots[0, :half].any()) and not bool(slots[0, half:].any()) and not bool(slots[1:].any())


def _changed(batch: PackedBatch, slot: int, model: MambaLM) -> PackedBatch:
    """The batch with another token in this slot."""
    vocab = model.backbone.embedding.weight.shape[0]
    tokens = batch.tokens.clone()
    flat = tokens.view(-1)
    flat[slot] = (flat[slot] + max(1, vocab // 2)) % vocab
    return replace(batch, tokens=tokens)


def _leak(boundary: Boundary, how: str) -> LeakError:
    return LeakError(
        f"documents leak: {how}, under trainer.boundary={boundary.name}, which lets nothing cross; "
        "trainer.leakcheck_every=null trains all the same"
    )


def _warn(boundary: Boundary, what: str) -> None:
    warnings.warn(f"trainer.boundary={boundary.name}: {what}", stacklevel=2)
