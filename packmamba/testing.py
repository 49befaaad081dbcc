"""leakcheck in tests and training: a fixture of pytest, and callbacks for transformers' Trainer and Lightning.

``pytest_plugins = ["packmamba.testing"]`` in a conftest.py gives tests the fixture ``leakcheck``. ``TrainerLeakCheck`` and
``LightningLeakCheck`` are made on import. Shapes: R rows, W slots, T tokens, V vocabulary.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from packmamba.errors import expect
from packmamba.isolation import LeakCheckResult, leakcheck
from packmamba.isolation.adapters import CheckedCallable, forward_parameters, logits_in
from packmamba.isolation.check import check_documents
from packmamba.isolation.probes import Documents, undisturbed

MARKS = {"position_ids": 1, "seq_idx": 0, "attention_mask": 0}
"""Arguments (R, W), and their step inside a document; attention_mask may number documents."""
OF_LOSSES = ("labels", "shift_labels", "num_items_in_batch", "fused_lm_head")
"""Arguments with which models compute losses, TRL's without logits."""
TRAINERS = {
    "TrainerLeakCheck": ("transformers", "TrainerCallback"),
    "LightningLeakCheck": ("lightning", "Callback"),
}


class LeakError(RuntimeError):
    """Documents leak into each other."""


def assert_isolated(
    model: Any, boundaries: str = "position_ids", **options: Any
) -> LeakCheckResult:
    """Return leakcheck's result if it is ``ok``; else raise LeakError. Arguments: leakcheck's."""
    result = leakcheck(model, boundaries, **options)
    if not result.ok:
        raise LeakError(str(result))
    return result


def check_batch(
    model: nn.Module, batch: Mapping[str, Any], marks: Mapping[str, Any] | None = None
) -> bool:
    """Check a batch's documents in a model that takes ``input_ids``, in its present mode. Raises LeakError.

    Change every other document, then those between: no bit of the others' logits may change, and a loss has no gradient outside
    its document. Weights, gradients and random states stay. ``marks``: boundary arguments that the model is not called with.
    Returns whether any row holds two documents, else nothing is checked.
    """
    arguments = {name: value for name, value in batch.items() if name not in OF_LOSSES}

    def logits(rows: Tensor) -> Any:
        return logits_in(model(**{**arguments, "input_ids": rows}))

    marks = {**(marks or {}), **arguments}
    given = [name for name in (*MARKS, "cu_seq_lens_q") if marks.get(name) is not None]
    return _Batch(model, logits, batch["input_ids"], _number(marks), ", ".join(given)).check()


def _number(batch: Mapping[str, Any]) -> Tensor:
    """Number the documents of a batch (R, W) by all its boundary arguments; -1 at padding."""
    tokens = batch["input_ids"]
    starts = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    starts[:, 0], own = True, torch.ones_like(starts)
    for name, step in MARKS.items():
        marks = batch.get(name)
        if isinstance(marks, Tensor) and marks.dim() == 2 and marks.shape[1] == tokens.shape[1]:
            starts[:, 1:] |= marks.long().diff() != step
            own &= marks > 0 if name == "attention_mask" else marks >= 0
    if isinstance(ends := batch.get("cu_seq_lens_q"), Tensor):
        starts.view(-1)[ends[ends < starts.numel()].long()] = True
    return torch.where(own, starts.view(-1).cumsum(0).view(tokens.shape), -1)


class _Batch(Documents):
    """Hold the documents of a batch: ``tokens`` and ``number`` (T,), in rows (R, W) where ``own`` marks them."""

    def __init__(
        self, model: nn.Module, logits: Callable, rows: Tensor, number: Tensor, boundaries: str
    ) -> None:
        self.model, self.own = CheckedCallable(logits, [model], boundaries, 0, 0), number >= 0
        self.slots = (self.own.flatten().cumsum(0) - 1).clamp(min=0).view(rows.shape)
        self.tokens = rows[self.own]
        _, self.number, counts = number[self.own].unique_consecutive(
            return_inverse=True, return_counts=True
        )
        self.way, self.lengths = "as trained", counts.tolist()
        ids, index = self.tokens.unique(return_inverse=True)
        self.others = ids[(index + max(1, len(ids) // 2)) % max(1, len(ids))]

    def probes(self) -> Iterator[tuple[Tensor, Tensor]]:
        for changed in (self.number % 2 == 0, self.number % 2 == 1):
            yield torch.where(changed, self.others, self.tokens), ~changed

    def call(self, tokens: Tensor) -> Tensor:
        return self.model.call(tokens[0][self.slots])[self.own][None]

    def alone(self) -> list[Tensor]:
        return []

    def check(self) -> bool:
        if len(self.lengths) <= int(self.own.any(1).sum()):
            return False
        result = LeakCheckResult(self.model.boundaries)
        with undisturbed(self.model.modules):
            check_documents(self, result, alone=False)
        if result.leaks:
            got = (
                f"logits that move by {result.largest:.2g}"
                if result.largest
                else "gradients across boundaries"
            )
            got += f" from {result.module} on; patch the model, or put one document in a row"
            raise LeakError(
                f"batch: expected isolated documents (by {result.boundaries}), got {got}"
            )
        return True


class _LeakCheck:
    """Check the first training batch with two documents in a row, on every rank.

    A leak raises LeakError, which names the module; with ``warn`` it warns. Lightning's module is a
    PackedLitModule, holds models that take ``input_ids``, or is called by ``call``, (module, tokens (1, L), lengths) -> logits
    (1, L, V), with leakcheck's ``options``.
    """

    def __init__(
        self, warn: bool = False, call: Callable[..., Tensor] | None = None, **options: Any
    ) -> None:
        self.warn, self.logits, self.options, self.done, self.seen = warn, call, options, False, 0
        self.handles: list[Any] = []
        self.batch: Mapping[str, Any] = {}

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        if not self.done:
            self.handles.append(
                model.register_forward_pre_hook(self.before_forward, with_kwargs=True)
            )

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        self.batch = batch if isinstance(batch, Mapping) and not self.done else {}
        if self.done or self.handles:
            return
        call: Any = self.logits
        with trainer.precision_plugin.forward_context():
            if call is not None:
                own = lambda tokens, lengths: call(module, tokens, lengths)
                self.check(module, lambda: assert_isolated(own, **self.options).ok)
            elif hasattr(batch, "batches") and hasattr(module, "boundary"):
                self.check(module, lambda: _check_packed(module, batch.batches[0]))
            elif models := list(_models(module)):
                for model in models:
                    self.on_train_begin(model=model)
            else:
                raise TypeError(
                    "call: expected (module, tokens, lengths) -> logits for this LightningModule, got None"
                )

    @torch.compiler.disable
    def before_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        batch = dict(zip(forward_parameters(model)[0], args)) | kwargs
        if model.training and isinstance(batch.get("input_ids"), Tensor):
            self.check(model, lambda: check_batch(model, batch, self.batch))

    def check(self, model: nn.Module, check: Callable[[], bool]) -> None:
        """Call ``check`` until it returns that there was something to check."""
        if self.done:
            return
        self.done, self.seen = True, self.seen + 1
        try:
            sharded = any(
                type(part).__name__.startswith(("FSDP", "FullySharded")) for part in model.modules()
            )
            if sharded or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
                raise ValueError("expected whole weights, got sharded ones; check before training")
            self.done = check()
            if self.done or self.seen == 8:
                self.on_train_end()
        except Exception as error:  # only a leak ends a training
            line, leaks = " ".join(str(error).split()), isinstance(error, LeakError)
            self.on_train_end()
            if leaks and not self.warn:
                raise LeakError(line) from None
            warnings.warn(
                f"leakcheck: {line if leaks else f'nothing was checked: {line}'}", stacklevel=2
            )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if not self.done:
            warnings.warn(
                "leakcheck: nothing was checked: no batch marks two documents in a row",
                stacklevel=2,
            )
        for handle in self.handles:
            handle.remove()
        self.done, self.handles = True, []


def _models(root: nn.Module) -> Iterator[nn.Module]:
    for child in root.children():
        yield from [child] if "input_ids" in forward_parameters(child)[0] else _models(child)


def _check_packed(module: Any, batch: Any) -> bool:
    boundary, model = module.boundary, module.model
    expect(not boundary.stateful, "boundary", "a scheme that carries no states", boundary.name)
    logits = lambda rows: model.lm_head(boundary.hidden(model, replace(batch, tokens=rows)))
    return _Batch(
        model, logits, batch.tokens, batch.layout.documents, f"layout, boundary={boundary.name}"
    ).check()


def __getattr__(name: str) -> Any:
    """Make a callback's class when it is imported: this module imports no trainer."""
    if name not in TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package, callback = TRAINERS[name]
    bases = (_LeakCheck, getattr(importlib.import_module(package), callback))
    made = type(name, bases, {"__module__": __name__, "__doc__": _LeakCheck.__doc__})
    return globals().setdefault(name, made)


if "pytest" in sys.modules:
    import pytest

    _fixture = pytest.fixture(name="leakcheck")(lambda: assert_isolated)
