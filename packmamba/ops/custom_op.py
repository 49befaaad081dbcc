"""Register an operator of compiled kernels with PyTorch: a functional custom operator, its fake and its autograd.

``torch.ops.packmamba.<name>`` takes layouts as tensors, so that a graph holds for all; absent outputs are empty there.
Eager calls bypass the dispatcher, which takes longer than a small model's kernels.
"""

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from packmamba.layout import SequenceLayout
from packmamba.ops.build import operator
from packmamba.ops.checks import is_tracing

Arguments = TypeVar("Arguments", bound=tuple)
SCHEMA = {
    Tensor: "Tensor {0}",
    Tensor | None: "Tensor? {0}",
    SequenceLayout: "Tensor {0}_starts, Tensor {0}_ends",
    str | None: "str? {0}",
    bool: "bool {0}",
    tuple[float, float] | None: "float[]? {0}",
}
PLAIN = {Tensor, torch.nn.Parameter, SequenceLayout, NoneType, str, bool, tuple, list}
"""Argument types without overloads."""
KERNELS: dict[str, dict[str, Callable[..., None]]] = {"cpu": {}, "cuda": {}}
"""Kernels by device type, as in kernels/cpu, outputs last."""

_library = torch.library.Library("packmamba", "FRAGMENT")


def declare(name: str, outputs: int, cuda: Callable[..., None]) -> None:
    """Declare a kernel: ``torch.ops.packmamba_cpu.<name>`` and the CUDA launch."""

    def run(*arguments: Any) -> None:
        written = [
            t if t is None or t.is_contiguous() else t.new_empty(t.shape) for t in arguments[-outputs:]
        ]
        operator("cpu", name)(*arguments[:-outputs], *written)
        for t, made in zip(arguments[-outputs:], written):
            if made is not t:
                t.copy_(made)

    KERNELS["cpu"][name] = run
    KERNELS["cuda"][name] = cuda


Documents = namedtuple("Documents", ("starts", "ends"))
"""A layout in a traced graph."""


def register(
    name: str,
    arguments: type[Arguments],
    forward: Callable[[Arguments, bool], tuple[Tensor | None, ...]],
    fake: Callable[[Arguments, bool], tuple[Tensor | None, ...]],
    backward: Callable[[Arguments, tuple, tuple], tuple[Tensor | None, ...]],
    outputs: int,
    saved: int,
    gradients: int,
) -> Callable[[Arguments], tuple]:
    """Define the operator and its backward; return the function that calls it.

    Args:
        arguments: a named tuple of tensors, then layouts, then options; its annotations make the schema.
        forward, fake: (arguments, whether a backward follows) -> outputs and what it needs; None where absent.
        backward: (arguments, what it needs, outputs' gradients, None: zero) -> gradients of the first tensors.
        outputs, saved, gradients: their numbers.
    """
    hints = get_type_hints(arguments)
    kinds = list(hints.values())
    tensors = sum(kind in (Tensor, Tensor | None) for kind in kinds)
    layouts = kinds.count(SequenceLayout)
    flat, values = tensors + 2 * layouts, len(kinds) + layouts
    schema = ", ".join(SCHEMA[kind].format(field) for field, kind in hints.items())
    make = functools.partial(tuple.__new__, arguments)  # without arguments' own __new__

    def places(others: tuple) -> list[Tensor]:
        return [place for layout in others[:layouts] for place in (layout.starts, layout.ends)]

    def gather(values: tuple) -> Arguments:
        documents = (Documents(*values[i : i + 2]) for i in range(tensors, flat, 2))
        return arguments(*values[:tensors], *documents, *values[flat:])

    def dispatched(compute: Callable) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *given: none_to_empty(compute(gather(given[:-1]), given[-1]), given[0])

    def run_backward(*given: Any) -> tuple[Tensor, ...]:
        of, saved = given[outputs : outputs + values], given[outputs + values :]
        return none_to_empty(backward(gather(of), saved, given[:outputs]), of[0])

    def fake_backward(*given: Any) -> tuple[Tensor, ...]:
        return none_to_empty(map(empty_grad_like, given[outputs : outputs + gradients]), given[outputs])

    grads = "".join(f"Tensor? grad_{i}, " for i in range(outputs))
    saved_schema = "".join(f", Tensor saved_{i}" for i in range(saved))
    _define(name, f"({schema}, bool keep)", outputs + saved, dispatched(forward), dispatched(fake))
    _define(f"{name}_backward", f"({grads}{schema}{saved_schema})", gradients, run_backward, fake_backward)
    operator = getattr(torch.ops.packmamba, name).default
    operator_backward = getattr(torch.ops.packmamba, f"{name}_backward").default

    def below_autograd(keys: Any, given: tuple) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *given)

    class Gradients(torch.autograd.Function):
        """Raise when gradients under create_graph are differentiated: they would count as constants."""

        @staticmethod
        def forward(ctx: Any, grads: tuple, *of: Tensor | None) -> tuple:
            return grads

        @staticmethod
        def backward(ctx: Any, *_: Tensor | None) -> tuple:
            raise RuntimeError(
                f"{name}: compiled kernels have no second derivatives; take backend='reference'"
            )

    class Differentiable(torch.autograd.Function):
        """Differentiate an eager call (no dispatch keys), or a dispatched one."""

        @staticmethod
        def forward(ctx: Any, call: tuple[Any, bool, tuple], *given: Any) -> Any:
            keys, keep, others = ctx.call = call
            ctx.set_materialize_grads(False)
            if keys is None:
                results = forward(make(given + others), keep)
            else:
                results = below_autograd(keys, (*given, *places(others), *others[layouts:], keep))
            ctx.save_for_backward(*given, *places(others), *results[outputs:])
            return results[:outputs] if keys is None else results

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple:
            keys, keep, others = ctx.call
            saved = ctx.saved_tensors
            if not keep:
                raise RuntimeError(
                    f"packmamba::{name}: called with keep=False, so it cannot be differentiated"
                )
            if keys is None and not torch.is_grad_enabled():
                result = backward(make(saved[:tensors] + others), saved[flat:], grads)
            else:
                given = (*grads[:outputs], *saved[:flat], *others[layouts:])
                with torch.no_grad():
                    result = operator_backward(*given, *none_to_empty(saved[flat:], saved[0]))
                result = tuple(None if t is None else grad for t, grad in zip(saved, result))
                if torch.is_grad_enabled():
                    result = Gradients.apply(result, *grads, *saved[:tensors])
            return None, *result, *(None,) * (tensors - gradients)

    def differentiated(keys: Any, *given: Any) -> Any:
        if not (torch.is_grad_enabled() and _any_requires_grad(given[:gradients])):
            return below_autograd(keys, given)
        return Differentiable.apply((keys, given[-1], gather(given[:-1])[tensors:]), *given[:tensors])

    _library.impl(name, differentiated, "Autograd", with_keyset=True)
    # Without Function's search for functorch's wrappers: ``is_tracing`` rules them out.
    apply = super(torch.autograd.Function, Differentiable).apply

    def call(a: Arguments) -> tuple:
        keep = torch.is_grad_enabled() and _any_requires_grad(a[:gradients])
        given = (t for t in a[:tensors] if t is not None)
        if forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(t).tangent is not None for t in given
        ):
            raise RuntimeError(
                f"{name}: compiled kernels have no forward-mode derivatives; take backend='reference'"
            )
        if is_tracing() or not PLAIN.issuperset(map(type, a)):
            return operator(*a[:tensors], *places(a[tensors:]), *a[tensors + layouts :], keep)[:outputs]
        if keep:
            return apply((None, True, a[tensors:]), *a[:tensors])
        return forward(a, False)[:outputs]

    return call


def _define(name: str, arguments: str, results: int, run: Callable, fake: Callable) -> None:
    _library.define(f"{name}{arguments} -> ({', '.join(['Tensor'] * results)})")
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"packmamba::{name}", fake, lib=_library)


def none_to_empty(values: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Replace None by empty tensors."""
    return tuple(like.new_empty(0) if value is None else value for value in values)


def _any_requires_grad(tensors: tuple[Tensor | None, ...]) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def empty_grad_like(tensor: Any) -> Any:
    """Allocate a contiguous gradient of a tensor; None for None."""
    return None if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def dense(tensor: Any) -> Any:
    return None if tensor is None else tensor.contiguous()


def unit_stride(tensor: Tensor) -> Tensor:
    """Make the channels of a gradient contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
