"""Make operators of compiled kernels known to PyTorch.

Each gets a schema, a fake implementation, autograd, and a short way for eager calls.

An operator is three functions on a named tuple of its arguments (``forward``, ``fake``,
``backward``); ``PackedOperator`` makes ``torch.ops.packmamba.<name>`` and ``<name>_backward`` of
them:

- A schema holds each layout as its two tensors, so that one traced graph serves every layout.
  Absent outputs are empty tensors there, since a schema's outputs cannot be None.
- A call takes one of two ways. Under a compiler, a transform or a dispatch mode it goes through the
  dispatcher. An eager call runs the functions at once: ``torch.library.custom_op`` with
  ``register_autograd`` would add 0.5 ms forward and 0.2 ms backward (PyTorch 2.11), more than a
  small model's kernels.
- Derivatives that kernels do not have (second, forward-mode) raise, instead of being silently zero.

``KERNELS`` holds what such functions call: kernels by device and name, their arguments by name.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from packmamba.layout import SequenceLayout
from packmamba.ops import build
from packmamba.ops.checks import is_tracing, is_transforming, refuse_transforms

Arguments = TypeVar("Arguments", bound=tuple)
# Takes its arguments by name. A dictionary and no
# keywords, which each function on the way would copy.
Launch = Callable[[dict[str, Any]], None]
# Results of ``forward`` and ``fake``: outputs, and what is saved for the backward, both named
# tuples; None where absent.
Results = tuple[tuple, Any]

# An argument in a schema, by its annotation.
SCHEMA = {
    Tensor: "Tensor {0}",
    Tensor | None: "Tensor? {0}",
    SequenceLayout: "Tensor {0}_starts, Tensor {0}_ends",
    str | None: "str? {0}",
    bool: "bool {0}",
    int: "int {0}",
    float: "float {0}",
    tuple[float, float] | None: "float[]? {0}",
}
# Types of values that no tensor subclass intercepts: an eager call may take the short way.
PLAIN = {Tensor, torch.nn.Parameter, NoneType, str, bool, int, float, tuple, list}
# Kernels by device type and name. Arguments, outputs
# among them, are those of kernels/cpu/bindings.cpp.
KERNELS: dict[str, dict[str, Launch]] = {"cpu": {}, "cuda": {}}

_library = torch.library.Library("packmamba", "FRAGMENT")


class Kernel:
    """Hold ``torch.ops.packmamba_<kind>.<name>``, loaded, and call it with its arguments by name.

    Their order is in one place, the schema in kernels/<kind>/bindings.

    Attributes:
        outputs: names of the arguments that it writes to.
    """

    def __init__(self, kind: str, name: str) -> None:
        """Load the library. Raises KernelError."""
        build.load(kind)
        self._operator = getattr(getattr(torch.ops, f"packmamba_{kind}"), name).default
        schema = self._operator._schema.arguments
        self._in_order = itemgetter(*(argument.name for argument in schema))
        self.outputs = [argument.name for argument in schema if getattr(argument.alias_info, "is_write", False)]

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Call; KeyError names an argument that is missing.

        In order, because PyTorch's own search by name would take 3 us more.
        """
        return self._operator(*self._in_order(arguments))


# (kind, name) -> the kernel of a library, loaded, the same at each call. Raises KernelError.
kernel = functools.cache(Kernel)


def declare(name: str, cuda: Launch) -> None:
    """Declare a kernel by its name in both libraries.

    ``cuda`` launches the GPU's with its schedule.
    """
    KERNELS["cpu"][name] = functools.partial(_run_on_cpu, name)
    KERNELS["cuda"][name] = cuda


def _run_on_cpu(name: str, arguments: dict[str, Any]) -> None:
    """Run a kernel of the CPU, which writes contiguous tensors alone.

    Slices of wider tensors (dx, dz, dB and dC of ``mamba_inner``) are written elsewhere first, then
    copied.
    """
    of_cpu = kernel("cpu", name)
    slices = []
    for output in of_cpu.outputs:
        tensor = arguments[output]
        if tensor is not None and not tensor.is_contiguous():
            arguments[output] = tensor.new_empty(tensor.shape)
            slices.append((tensor, arguments[output]))
    of_cpu(arguments)
    for tensor, written in slices:
        tensor.copy_(written)


class Outputs(NamedTuple):
    """Hold what a packed operator returns; in a backward, the gradients of it.

    None: absent, or zero.
    """

    y: Tensor
    final_state: Tensor | None


class BlockOutputs(NamedTuple):
    """Hold a fused operator's output (B, L, ...) and the final states of its convolution and scan.

    In a backward, the gradients of these.
    """

    output: Tensor
    conv_state: Tensor | None
    ssm_state: Tensor | None


class Spans(NamedTuple):
    """Hold what remains of a layout behind the schema: the two tensors that kernels read, (S,) int32.

    Implementations get it in a layout's place under the dispatcher and in eager calls with
    gradients, so they may read ``starts`` and ``ends`` of a layout, and nothing else.
    """

    starts: Tensor
    ends: Tensor


class Signature(Generic[Arguments]):
    """Locate an operator's arguments in its schema: tensors, two tensors a layout, then options.

    Args:
        arguments: a named tuple of tensors, then layouts, then options; its annotations make the
            schema.
        constants: names of the last tensors, which have no gradient.

    Attributes:
        gradients: names of the tensors' gradients, ``d<argument>``, in order.
        num_tensors, num_layouts: of each there are among the arguments.
        num_schema_tensors: tensors of the schema: the arguments', then two a layout.
        num_schema_values: values of the schema: its tensors, then the options.
    """

    def __init__(self, arguments: type[Arguments], constants: tuple[str, ...]) -> None:
        kinds = get_type_hints(arguments)
        tensors = [name for name, kind in kinds.items() if kind in (Tensor, Tensor | None)]
        self.schema = ", ".join(SCHEMA[kind].format(name) for name, kind in kinds.items())
        self.num_tensors = len(tensors)
        self.num_layouts = list(kinds.values()).count(SequenceLayout)
        self.num_schema_tensors = self.num_tensors + 2 * self.num_layouts
        self.num_schema_values = len(kinds) + self.num_layouts
        self.num_gradients = len(tensors) - len(constants)
        self.gradients = tuple(f"d{name}" for name in tensors[: self.num_gradients])
        # Faster than the named tuple's own __new__, which takes each field as a parameter.
        self.make: Callable[[tuple], Arguments] = functools.partial(tuple.__new__, arguments)

    def flatten(self, arguments: Arguments) -> tuple:
        """Lay arguments out as the schema has them."""
        layouts_and_options = arguments[self.num_tensors :]
        layouts = layouts_and_options[: self.num_layouts]
        documents = [tensor for layout in layouts for tensor in (layout.starts, layout.ends)]
        return (*arguments[: self.num_tensors], *documents, *layouts_and_options[self.num_layouts :])

    def unflatten(self, values: tuple) -> Arguments:
        """Make arguments of the schema's values; layouts become ``Spans``."""
        starts_and_ends = values[self.num_tensors : self.num_schema_tensors]
        layouts = map(Spans, starts_and_ends[::2], starts_and_ends[1::2])
        return self.make((*values[: self.num_tensors], *layouts, *values[self.num_schema_tensors :]))

    def allocate_gradients(self, arguments: Arguments) -> dict[str, Any]:
        """Allocate contiguous gradients, as ``d<argument>``; None for None."""
        return dict(zip(self.gradients, map(empty_grad_like, arguments[: self.num_gradients])))


@dataclass(eq=False)
class PackedOperator(Generic[Arguments]):
    """An operator of compiled kernels. Calling it with its arguments returns its outputs, a tuple.

    Args:
        name: of ``torch.ops.packmamba.<name>``.
        arguments: the named tuple that it takes, see ``Signature``.
        saved, outputs: named tuples of what it saves for the backward, and of what it returns.
        forward, fake: (arguments, whether a backward follows) -> (outputs, saved); ``fake``
            allocates only.
        backward: (arguments, saved, gradients of the outputs, None: zero) -> gradients as
            ``d<argument>``; None where absent.
        constants: names of the last tensors among the arguments, which have no gradient.
        saved_if_eager: names of what a call through the dispatcher does not save, since its size
            depends on documents' lengths, and a traced graph knows sizes beforehand.
    """

    name: str
    arguments: type[Arguments]
    saved: type[tuple]
    forward: Callable[[Arguments, bool], Results]
    fake: Callable[[Arguments, bool], Results]
    backward: Callable[[Arguments, Any, Any], Mapping[str, Tensor | None]]
    outputs: type[tuple] = Outputs
    constants: tuple[str, ...] = ()
    saved_if_eager: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Define both operators in torch.ops.packmamba, and the autograd of the first."""
        self.signature = signature = Signature(self.arguments, self.constants)
        self.num_outputs = len(self.outputs._fields)  # type: ignore[attr-defined]
        saved = self.saved._fields  # type: ignore[attr-defined]
        grads = "".join(f"Tensor? grad_{i}, " for i in range(self.num_outputs))
        states = "".join(f", Tensor saved_{i}" for i in range(len(saved)))
        # keep: whether a backward follows, so that the forward saves for it.
        schema = f"{self.name}({signature.schema}, bool keep)"
        run, fake = (functools.partial(self._run, function) for function in (self.forward, self.fake))
        self._operator = _define(schema, self.num_outputs + len(saved), run=run, fake=fake)
        schema = f"{self.name}_backward({grads}{signature.schema}{states})"
        functions = {"run": self._run_backward, "fake": self._run_fake_backward}
        self._operator_backward = _define(schema, signature.num_gradients, **functions)
        name = f"packmamba::{self.name}"
        torch.library.register_autograd(name, self._backward_of_call, setup_context=self._save, lib=_library)

    def __call__(self, arguments: Arguments) -> tuple:
        """Compute the operator's outputs.

        Raises RuntimeError under forward-mode differentiation, vmap and torch.func.grad.
        """
        signature = self.signature
        values = signature.flatten(arguments)
        tensors = values[: signature.num_tensors]
        leaves = tensors[: signature.num_gradients]
        needs_backward = torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)
        # Inside forward-mode differentiation: an operator
        # without a rule would drop tangents silently.
        if forward_ad._current_level >= 0:
            self._refuse_tangents(tensors)
        # A tensor subclass (fake, distributed) sees
        # operators of the dispatcher, and not raw kernels.
        if is_tracing() or not PLAIN.issuperset(map(type, values)):
            if is_transforming():
                refuse_transforms(self.name, tensors)
            return self._operator(*values, needs_backward)[: self.num_outputs]
        if not needs_backward:
            outputs, _ = self.forward(arguments, False)
            return outputs
        return _apply_eager(self, values[signature.num_schema_tensors :], *values[: signature.num_schema_tensors])

    def differentiate(self, values: tuple, saved: tuple, grads: tuple) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the schema's values, in order.

        grads: of outputs, None: zero.
        """
        gradients = self.backward(self.signature.unflatten(values), self.saved(*saved), self.outputs(*grads))
        return tuple(map(gradients.__getitem__, self.signature.gradients))

    def differentiate_dispatched(self, values: tuple, saved: tuple, grads: tuple) -> tuple[Tensor | None, ...]:
        """Compute the same by ``torch.ops.packmamba.<name>_backward``.

        Differentiating its gradients is refused.
        """
        states = none_to_empty(saved, values[0])
        # The backward operator has no autograd: ``_FirstDerivatives`` below stands for it.
        with torch.no_grad():
            computed = self._operator_backward(*grads, *values, *states)
        # Operators return empty tensors for absent gradients; autograd expects None.
        gradients = tuple(None if tensor is None else gradient for tensor, gradient in zip(values, computed))
        if torch.is_grad_enabled():
            gradients = _FirstDerivatives.apply(self.name, gradients, *grads, *values[: self.signature.num_tensors])
        return gradients

    def _refuse_tangents(self, tensors: tuple[Tensor | None, ...]) -> None:
        for tensor in tensors:
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                reason = "compiled kernels have no forward-mode derivatives; take backend='reference'"
                raise RuntimeError(f"{self.name}: {reason}")

    def _run(self, function: Callable[[Arguments, bool], Results], *values: Any) -> tuple[Tensor, ...]:
        """Compute the results of the schema by ``forward`` or ``fake``."""
        outputs, saved = function(self.signature.unflatten(values[:-1]), values[-1])
        saved = saved._replace(**dict.fromkeys(self.saved_if_eager))
        return none_to_empty((*outputs, *saved), values[0])

    def _run_backward(self, *values: Any) -> tuple[Tensor, ...]:
        grads = values[: self.num_outputs]
        after_grads = values[self.num_outputs :]
        num_values = self.signature.num_schema_values
        gradients = self.differentiate(after_grads[:num_values], after_grads[num_values:], grads)
        return none_to_empty(gradients, after_grads[0])

    def _run_fake_backward(self, *values: Any) -> tuple[Tensor, ...]:
        tensors = values[self.num_outputs : self.num_outputs + self.signature.num_gradients]
        return none_to_empty(map(empty_grad_like, tensors), tensors[0])

    def _save(self, ctx: Any, inputs: tuple, output: tuple) -> None:
        """Save a dispatched call for its backward: all values, and what follows the outputs."""
        *values, ctx.keep = inputs
        num_tensors = self.signature.num_schema_tensors
        ctx.options = values[num_tensors:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*values[:num_tensors], *output[self.num_outputs :])

    def _backward_of_call(self, ctx: Any, *grads: Tensor | None) -> tuple:
        if not ctx.keep:
            raise RuntimeError(f"packmamba::{self.name}: called with keep=False, so it cannot be differentiated")
        num_tensors = self.signature.num_schema_tensors
        values = (*ctx.saved_tensors[:num_tensors], *ctx.options)
        states = ctx.saved_tensors[num_tensors:]
        gradients = self.differentiate_dispatched(values, states, grads[: self.num_outputs])
        # Layouts' tensors, options and ``keep`` have no gradients.
        return (*gradients, *(None,) * (len(values) + 1 - len(gradients)))


class _EagerCall(torch.autograd.Function):
    """Differentiate an eager call, whose outputs may be None."""

    @staticmethod
    def forward(ctx: Any, operator: PackedOperator, options: tuple, *tensors: Tensor | None) -> Any:
        ctx.operator = operator
        ctx.options = options
        ctx.set_materialize_grads(False)  # None for the gradient of an output that nothing used
        outputs, saved = operator.forward(operator.signature.unflatten(tensors + options), True)
        # With the layouts' tensors: autograd then refuses a layout that was written to meanwhile.
        ctx.save_for_backward(*tensors, *saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        operator: PackedOperator = ctx.operator
        num_tensors = operator.signature.num_schema_tensors
        saved = ctx.saved_tensors
        # With gradients enabled the result may be differentiated.
        differentiate = operator.differentiate_dispatched if torch.is_grad_enabled() else operator.differentiate
        gradients = differentiate(saved[:num_tensors] + ctx.options, saved[num_tensors:], grads)
        # The operator, its options and the layouts' tensors have no gradients.
        return None, None, *gradients, *(None,) * (num_tensors - len(gradients))


# Without Function's search for functorch's wrappers: ``is_tracing`` rules them out.
_apply_eager = super(torch.autograd.Function, _EagerCall).apply


class _FirstDerivatives(torch.autograd.Function):
    """Raise when gradients under create_graph are differentiated: they would count as constants."""

    @staticmethod
    def forward(ctx: Any, name: str, gradients: tuple, *sources: Tensor | None) -> tuple:
        ctx.name = name
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple:
        raise RuntimeError(f"{ctx.name}: compiled kernels have no second derivatives; take backend='reference'")


def _define(schema: str, num_results: int, run: Callable, fake: Callable) -> torch._ops.OpOverload:
    """Define an operator by its schema and results; return it."""
    name = schema.partition("(")[0]
    _library.define(f"{schema} -> ({', '.join(['Tensor'] * num_results)})")
    # One function for both: it looks the kernel up by its tensors' device.
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"packmamba::{name}", fake, lib=_library)
    return getattr(torch.ops.packmamba, name).default


def none_to_empty(values: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Replace None by empty tensors of like's dtype, on its device."""
    return tuple(like.new_empty(0) if value is None else value for value in values)


def empty_grad_like(tensor: Any) -> Any:
    """Allocate a contiguous gradient of a tensor; None for None."""
    return None if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def to_dtype(tensor: Any, dtype: torch.dtype) -> Any:
    """Convert a tensor; None for None."""
    return None if tensor is None else tensor.to(dtype)


def dense(tensor: Any) -> Any:
    """Make a tensor contiguous, as kernels read parameters and states; None for None."""
    return None if tensor is None else tensor.contiguous()


def unit_stride(tensor: Tensor) -> Tensor:
    """Make channels contiguous: a gradient may come expanded or transposed."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
