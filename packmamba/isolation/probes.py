"""Detect what changes when other documents change, forward and backward. Shapes: L slots, R x W a model's own slots."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from packmamba.isolation.adapters import DocumentInput

SEED = 0


@contextmanager
def undisturbed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore random states, modes and buffers on leaving."""
    saved = [
        (module, module.training, {n: (b, None if b is None else b.clone()) for n, b in module._buffers.items()})
        for root in modules
        for module in root.modules()
    ]
    states = random.getstate(), np.random.get_state()  # noqa: NPY002, what a model's code may draw from
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices), torch.inference_mode(False):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        for module, training, buffers in saved:
            module.training = training
            for name, (buffer, value) in buffers.items():
                module._buffers[name] = buffer
                if (
                    buffer is not None
                    and value is not None
                    and (buffer.shape != value.shape or moved(buffer, value).any())
                ):
                    with torch.no_grad():
                        buffer.copy_(value)


def eager() -> AbstractContextManager[Any]:
    """Run compiled code eagerly, so that hooks see into it; without importing the compiler."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def reseed() -> None:
    """Seed every generator: dropout then drops the same in each call."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002


def logits_of(call: Callable[..., Tensor], tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return logits (L, V), after seeding. Raises TypeError, ValueError: no logits for each token."""
    reseed()
    logits = call(tokens[None], lengths)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"logits: expected floating-point numbers, got {getattr(logits, 'dtype', type(logits))}")
    if logits.dim() != 3 or logits.shape[:2] != (1, len(tokens)):
        raise ValueError(f"logits: expected shape (1, {len(tokens)}, vocabulary), got {tuple(logits.shape)}")
    return logits[0]


def moved(one: Tensor, other: Tensor) -> Tensor:
    """Mark values that differ by any bit; NaN equals NaN."""
    return (one != other) & ~(one.isnan() & other.isnan()) if one.is_floating_point() else one != other


def by_slot(values: Tensor, rows: int, width: int) -> Tensor | None:
    """Reduce marks of a module's tensor to slots (R, W); None if it has no such axis. A convolution's may be longer."""
    if values.dim() and values.shape[0] == rows * width:
        return values.reshape(rows, width, -1).any(-1)
    if values.dim() < 2 or values.shape[0] != rows:
        return None
    axis = next((i for i in range(1, values.dim()) if values.shape[i] == width), None)
    if axis is None:
        if not width < values.shape[-1] <= width + 8:
            return None
        axis, values = values.dim() - 1, values.narrow(-1, 0, width)
    return values.movedim(axis, 1).reshape(rows, width, -1).any(-1)


class Entries(TorchFunctionMode):
    """Capture embeddings of tokens, wherever ids become floating-point numbers, as leaves to differentiate by."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        self._whole = {id(tokens): tokens}  # what is computed from tokens and is no floating-point number yet

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or not any(id(leaf) in self._whole for leaf in tree_leaves((args, kwargs))):
            return result
        if not result.is_floating_point():
            self._whole[id(result)] = result
            return result
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            return result  # in place: what it returns is not looked at
        if not result.requires_grad:
            result = result.detach().requires_grad_()
        self.found.append(result)
        return result.clone()  # may be written to


class Routing(TorchDispatchMode):
    """Detect routing, as in mixtures of experts, where some tokens decide the shapes of products of others."""

    NAMES = ("topk", "sort", "argsort", "argmax", "bincount", "histc", "_grouped_mm")

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or func.overloadpacket.__name__ in self.NAMES
        return func(*args, **(kwargs or {}))


def routes(way: DocumentInput, tokens: Tensor, lengths: Sequence[int]) -> bool:
    """Return whether the model routes tokens by content."""
    with torch.no_grad(), eager(), Routing() as routing:
        logits_of(way.call, tokens, lengths)
    return routing.found


def crossing_gradients(
    way: DocumentInput, tokens: Tensor, lengths: Sequence[int], documents: Sequence[Tensor]
) -> bool | None:
    """Return whether the loss of any of ``documents`` (marks of slots) has a gradient outside it; None: there is no gradient.

    The loss is a random linear form of the document's logits. A NaN gradient counts as one.
    """
    caught: list[Entries] = []

    def call(rows: Tensor, own: Sequence[int]) -> Tensor:
        with Entries(rows) as entries:
            caught.append(entries)
            return way.call(rows, own)

    with torch.enable_grad(), eager():
        logits = logits_of(call, tokens, lengths)
        entries = caught[0].found
        if not logits.requires_grad or not entries:
            return None
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(SEED)).to(logits)
        crossed, reached = False, False
        for inside in documents:
            part = logits[inside]
            loss = torch.where(part.isfinite(), part * weights[inside], 0.0).sum()
            own = way.place(inside, lengths)
            try:
                gradients = torch.autograd.grad(loss, entries, retain_graph=True, allow_unused=True)
            except RuntimeError as error:  # reentrant checkpointing takes backward() alone
                if "heckpoint" not in str(error):
                    raise
                return None
            for gradient in gradients:
                marks = None if gradient is None else by_slot(gradient != 0, *own.shape)
                if marks is not None:
                    crossed = crossed or bool((marks & ~own).any())
                    reached = reached or bool((marks & own).any())
    return crossed if crossed or reached else None


def first_module(
    way: DocumentInput, modules: Sequence[nn.Module], pair: Sequence[Tensor], lengths: Sequence[int], watched: Tensor
) -> str | None:
    """Name the first module whose output differs between two rows of tokens at watched slots while its input does not.

    Where a module's input changes first, code of the module that calls it changed it.
    """
    marks = way.place(watched, lengths)
    with torch.no_grad(), eager():
        before, after = [_events(modules, functools.partial(logits_of, way.call, tokens, lengths)) for tokens in pair]
    for key, (caller, tensors) in after.items():
        for one, other in zip(before[key][1] if key in before else [], tensors):
            if one.shape == other.shape and (slots := by_slot(moved(one, other), *marks.shape)) is not None:
                if (slots & marks).any():
                    return caller
    return None


def _events(modules: Sequence[nn.Module], run: Callable[[], Any]) -> dict[Any, tuple[str, list[Tensor]]]:
    """Record (computing module, tensors) of the inputs and outputs of every module, in the order of computation."""
    named = {id(m): (name, m) for root in modules for name, m in root.named_modules()}
    titles = {i: f"{name} ({type(m).__name__})" if name else type(m).__name__ for i, (name, m) in named.items()}
    stack: list[str] = []
    counts: dict[Any, int] = {}
    events: dict[Any, tuple[str, list[Tensor]]] = {}

    def event(kind: str, module: nn.Module, caller: str, values: Any) -> None:
        nth = counts[kind, id(module)] = counts.get((kind, id(module)), 0) + 1
        tensors = [v.clone() for v in tree_leaves(values) if isinstance(v, Tensor)]
        events[kind, id(module), nth] = caller, tensors

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if stack:  # tokens themselves are meant to change
            event("in", module, stack[-1], (args, kwargs))
        stack.append(titles[id(module)])

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        event("out", module, stack.pop(), dict(result) if hasattr(result, "keys") else result)

    handles = [m.register_forward_pre_hook(enter, with_kwargs=True, prepend=True) for _, m in named.values()]
    handles += [m.register_forward_hook(leave) for _, m in named.values()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return events
