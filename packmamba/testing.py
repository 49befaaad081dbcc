"""leakcheck in tests and training: a fixture of pytest, and callbacks for trainers.

``pytest_plugins = ["packmamba.testing"]`` in a conftest.py gives tests the fixture ``leakcheck``.
``TrainerLeakCheck``, for transformers' Trainer, and ``LightningLeakCheck`` are made on import.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from packmamba.errors import expect
from packmamba.isolation import LeakCheckResult, leakcheck
from packmamba.isolation.adapters import forward_parameters
from packmamba.isolation.batch import LeakError, check_batch, check_packed

TRAINERS = {"TrainerLeakCheck": ("transformers", "TrainerCallback"), "LightningLeakCheck": ("lightning", "Callback")}
# Slots of a PackedLitModule's step that each rank checks, so that long steps take no minutes.
MAX_SLOTS = 16384
# Slots that are checked of a micro-batch, in steps of many.
MIN_SLOTS = 1024


def assert_isolated(model: Any, boundaries: str = "position_ids", **options: Any) -> LeakCheckResult:
    """Return leakcheck's result if it is ``ok``; else raise LeakError. Arguments: leakcheck's."""
    result = leakcheck(model, boundaries, **options)
    if not result.ok:
        raise LeakError(str(result))
    return result


class Found(IntEnum):
    """Say what a check found; of several batches or ranks the largest counts."""

    NO_NEIGHBOURS = 0
    ISOLATED = 1
    UNCHECKED = 2
    LEAK = 3


class Saved:
    """Save the attributes that ``SAVED`` names with each checkpoint, as a callback of Lightning."""

    SAVED: tuple[str, ...]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {name: getattr(self, name) for name in self.SAVED}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        vars(self).update(state_dict)


class _LeakCheck(Saved):
    """Check the first training step in which a row holds two documents, on every rank.

    All batches of the step are checked as the training computes them, forward and backward. A leak
    raises LeakError, which names the first module that leaks; PackedLitModule's ranks then all
    raise the same. A check that fails, out of memory say, warns, and is repeated after twice the
    steps. A training that ends unchecked warns, too. A resumed Lightning training goes on from
    the checkpoint.

    Args:
        warn: warn of a leak instead, and train on.
        call: for Lightning: (module, tokens (1, L), lengths) -> logits (1, L, V), checked with
            leakcheck's ``options``. None: the module is a PackedLitModule, or holds models that
            take ``input_ids``.
        every: steps between further checks; 0: none.

    Attributes:
        checked_at: the last step, from 0, that was checked; None: none was.
        tried_at: the last step that was checked, or that could not be.
        unchecked: why the last one could not.
        seen: batches and steps at which something was found.
    """

    SAVED = ("checked_at", "tried_at", "unchecked")

    def __init__(
        self, warn: bool = False, call: Callable[..., Tensor] | None = None, *, every: int = 0, **options: Any
    ) -> None:
        self.warn, self.call, self.every, self.options = warn, call, every, options
        self.step = self.seen = 0
        self.checked_at: int | None = None
        self.tried_at: int | None = None
        self.unchecked = "no batch marks two documents in a row"
        self.done = self.checking = False
        self.handles: list[Any] = []
        self.batch: Mapping[str, Any] = {}

    # transformers' events

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        if not self.done:
            self.handles.append(model.register_forward_pre_hook(self.before_forward, with_kwargs=True))

    def on_step_begin(self, arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        self.begin_step(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:  # Lightning's, too
        if self.tried_at is None and not self.done:
            warnings.warn(f"leakcheck: nothing was checked: {self.unchecked}", stacklevel=2)
        self.finish()

    # Lightning's event

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        self.begin_step(trainer.global_step)
        self.batch = batch if isinstance(batch, Mapping) else {}
        if self.done or self.handles:
            return
        packed = hasattr(batch, "batches") and hasattr(module, "boundary")
        if self.call is None and not packed:
            models = list(_models(module))
            expected = "(module, tokens, lengths) -> logits for this LightningModule"
            expect(models, "call", expected, None, TypeError)
            for model in models:
                self.on_train_begin(model=model)
        elif self.due() and (self.call or _has_neighbours(batch, trainer.world_size)):
            self.settle(*self.check_step(trainer, module, batch))

    def begin_step(self, step: int) -> None:
        self.step = step
        if self.checked_at is not None and step > self.checked_at and not self.every:
            self.finish()

    def finish(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.done, self.handles = True, []

    def due(self) -> bool:
        """Return whether this step is to be checked, if a row holds two documents."""
        if self.tried_at is None:
            return True
        waited = self.step - self.tried_at
        if self.checked_at is None:  # a check that fails again and again costs little so
            return waited >= max(1, self.tried_at)
        return self.every > 0 and waited >= self.every

    @torch.compiler.disable
    def before_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.checking or not (self.due() or self.step == self.checked_at):
            return
        batch = dict(zip(forward_parameters(model)[0], args)) | kwargs
        if model.training and isinstance(batch.get("input_ids"), Tensor):
            self.settle(*self.attempt(model, partial(check_batch, model, batch, self.batch)))

    def check_step(self, trainer: Any, module: Any, batch: Any) -> tuple[Found, str]:
        """Check a step by ``call`` or its micro-batches; return the worst of all ranks."""
        with trainer.precision_plugin.forward_context():
            if self.call is not None:
                call = partial(self.call, module)
                found = self.attempt(module, lambda: assert_isolated(call, **self.options).ok)
            else:
                max_slots = max(MIN_SLOTS, MAX_SLOTS // len(batch.batches))
                check = partial(check_packed, module.model, module.boundary, max_slots=max_slots)
                checks = [partial(check, part) for part in batch.batches if _is_packed(part)]
                results = [self.attempt(module, check) for check in checks]
                found = max(results, default=(Found.NO_NEIGHBOURS, ""))
        if trainer.world_size > 1:
            gathered = [found] * trainer.world_size
            by_rank = (found[0], f"rank {trainer.global_rank}: {found[1]}")
            torch.distributed.all_gather_object(gathered, by_rank)
            found = max(gathered)
        return found

    def attempt(self, model: nn.Module, check: Callable[[], bool]) -> tuple[Found, str]:
        """Call ``check``; return what it found, and a line of a leak or error."""
        self.checking = True
        try:
            sharded = any(type(part).__name__.startswith(("FSDP", "FullySharded")) for part in model.modules())
            sharded |= any(hasattr(parameter, "ds_id") for parameter in model.parameters())
            expect(not sharded, "model", "whole weights", "sharded ones; check it before or after the training")
            return Found.ISOLATED if check() else Found.NO_NEIGHBOURS, ""
        except Exception as error:  # only a leak ends a training
            line = " ".join(str(error).split())
            if isinstance(error, LeakError):
                return Found.LEAK, line
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return Found.UNCHECKED, f"{kind}{line:.300}"
        finally:
            self.checking = False

    def settle(self, found: Found, line: str) -> None:
        """Note what was found. Raises LeakError, unless ``warn``."""
        if found is Found.NO_NEIGHBOURS:
            return
        self.seen += 1
        self.tried_at = self.step
        if found is Found.LEAK and not self.warn:
            self.finish()
            raise LeakError(line)
        if found is Found.UNCHECKED:
            self.checked_at = None if self.checked_at == self.step else self.checked_at
            self.unchecked = line
            warnings.warn(f"leakcheck: nothing was checked: {line}", stacklevel=2)
            return
        self.checked_at = self.step
        if found is Found.LEAK:
            warnings.warn(f"leakcheck: {line}", stacklevel=2)


def _models(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules inside that take ``input_ids``."""
    for child in root.children():
        yield from [child] if "input_ids" in forward_parameters(child)[0] else _models(child)


def _is_packed(batch: Any) -> bool:
    return (batch.layout.origin or batch.layout).packed  # on the host, without waiting for a GPU


def _has_neighbours(step: Any, ranks: int) -> bool:
    """Return whether a row of a StepBatch holds two documents on any rank.

    Its counts are of all ranks.
    """
    return step.num_behind > 0 or (ranks == 1 and any(map(_is_packed, step.batches)))


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
