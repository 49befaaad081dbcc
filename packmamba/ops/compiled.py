"""The compiled operators as PyTorch sees them: functional operators, their fakes and their autograd.

``packmamba::conv1d_pack`` and ``packmamba::ssm_pack`` take the layout as its two tensors, so that a traced graph holds
for every layout, and hand each call to ``KERNELS`` of its tensors' device. They allocate what the kernels write; absent
outputs are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops import build, cuda
from packmamba.ops.checks import accumulation_dtype

# As in the kernels: tokens between states that the scan keeps for its backward, and what channels are padded to.
KEPT_TOKENS = 32
KEPT_CHANNELS = 16


def _cpu(name: str) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        build.load("cpu")
        first = len(arguments) - OUTPUTS[name]
        outputs = [None if t is None or t.is_contiguous() else t.new_empty(t.shape) for t in arguments[first:]]
        written = [t if made is None else made for t, made in zip(arguments[first:], outputs)]
        getattr(torch.ops.packmamba_cpu, name)(*arguments[:first], *written)
        for t, made in zip(arguments[first:], outputs):
            if made is not None:
                t.copy_(made)

    return run


OUTPUTS = {"conv1d_forward": 2, "conv1d_backward": 4, "ssm_forward": 3, "ssm_backward": 9}
"""How many outputs end a kernel's arguments. dx, dz, dB and dC may be slices, which the CPU's kernels write elsewhere first."""
KERNELS: dict[str, Mapping[str, Callable[..., None]]] = {
    "cpu": {name: _cpu(name) for name in OUTPUTS},
    "cuda": cuda.KERNELS,
}
"""By device type: what runs, with the schemas of kernels/cpu/bindings.cpp, outputs last."""


_library = torch.library.Library("packmamba", "FRAGMENT")


def define(name: str, run: Callable, fake: Callable, schema: str | None = None) -> None:
    """``torch.ops.packmamba.<name>``; its schema is that of run's annotations.

    By hand rather than by torch.library.custom_op: what that adds to each call (0.5 ms with PyTorch 2.11) is longer than the
    kernels of a small model.
    """
    _library.define(name + (schema or torch.library.infer_schema(run, mutates_args=())))
    for device in KERNELS:
        _library.impl(name, run, device.upper())
    torch.library.register_fake(f"packmamba::{name}", fake, lib=_library)


def differentiate(name: str, gradients: Callable, setup: Callable) -> None:
    """Registers the operator's autograd formula; arguments as of torch.library.register_autograd.

    By hand too: that reads the schema again at each call, 0.2 ms for the many arguments of ``inner_pack``.
    """
    operator = getattr(torch.ops.packmamba, name).default

    def forward(keys: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keys: Any, *inputs: Any) -> Any:
            output = forward(keys, *inputs)
            setup(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple:
            return None, *gradients(ctx, *grads)

    def run(keys: Any, *inputs: Any) -> Any:
        wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return Differentiable.apply(keys, *inputs) if wanted else forward(keys, *inputs)

    _library.impl(name, run, "Autograd", with_keyset=True)


def conv1d_pack(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: SequenceLayout,
    activation: str | None,
    initial_state: Tensor | None,
    return_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """The convolution by compiled kernels; arguments as ``ops.conv1d_pack``."""
    cuda.note(layout)
    wide = accumulation_dtype(x.dtype)
    state_dtype = x.dtype if initial_state is None else initial_state.dtype
    y, final = torch.ops.packmamba.conv1d_pack(
        x,
        weight.to(wide),
        None if bias is None else bias.to(wide),
        layout.starts,
        layout.ends,
        None if initial_state is None else initial_state.to(wide),
        activation == "silu",
        return_final_state,
    )
    return y, final.to(state_dtype) if return_final_state else None


def ssm_pack(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    layout: SequenceLayout,
    initial_state: Tensor | None,
    return_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """The scan by compiled kernels; arguments as ``ops.ssm_pack``."""
    cuda.note(layout)
    tensors = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    keep = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    y, final, _ = torch.ops.packmamba.ssm_pack(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, layout.starts, layout.ends, initial_state,
        return_final_state, keep,
    )  # fmt: skip
    return y, final if return_final_state else None


# The schemas below are read from the annotations, hence Optional and no postponed ones.
def _conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    starts: Tensor,
    ends: Tensor,
    initial_state: Optional[Tensor],
    silu: bool,
    return_final_state: bool,
) -> tuple[Tensor, Tensor]:
    y, final = _conv1d_outputs(x, weight, bias, starts, ends, initial_state, silu, return_final_state)
    KERNELS[x.device.type]["conv1d_forward"](
        x, *dense(weight, bias), starts, ends, *dense(initial_state), silu, y, final if return_final_state else None
    )
    return y, final


def _conv1d_outputs(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    starts: Tensor,
    ends: Tensor,
    initial_state: Optional[Tensor],
    silu: bool,
    return_final_state: bool,
) -> tuple[Tensor, Tensor]:
    channels, width = weight.shape
    final = (starts.shape[0], channels, width - 1) if return_final_state else (0,)
    return x.new_empty(x.shape), weight.new_empty(final)


def _conv1d_backward(
    dy: Tensor,
    dfinal: Optional[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    starts: Tensor,
    ends: Tensor,
    initial_state: Optional[Tensor],
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = _conv1d_backward_outputs(dy, dfinal, x, weight, bias, starts, ends, initial_state, silu)
    KERNELS[x.device.type]["conv1d_backward"](
        unit_stride(dy), *dense(dfinal), x, *dense(weight, bias), starts, ends, *dense(initial_state), silu,
        *present(outputs, (x, weight, bias, initial_state)),
    )  # fmt: skip
    return outputs


def _conv1d_backward_outputs(
    dy: Tensor,
    dfinal: Optional[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    starts: Tensor,
    ends: Tensor,
    initial_state: Optional[Tensor],
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return like(x, x), like(weight, x), like(bias, x), like(initial_state, x)


def _conv1d_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.silu, ctx.has_final = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _conv1d_gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple:
    x, weight, bias, starts, ends, initial_state = ctx.saved_tensors
    dy = x.new_zeros(x.shape) if dy is None else dy
    dfinal = dfinal if ctx.has_final else None
    gradients = torch.ops.packmamba.conv1d_pack_backward(
        dy, dfinal, x, weight, bias, starts, ends, initial_state, ctx.silu
    )
    dx, dweight, dbias, dinitial = present(gradients, (x, weight, bias, initial_state))
    return dx, dweight, dbias, None, None, dinitial, None, None


def _ssm(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    z: Optional[Tensor],
    delta_bias: Optional[Tensor],
    delta_softplus: bool,
    starts: Tensor,
    ends: Tensor,
    initial_state: Optional[Tensor],
    return_final_state: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    y, final, kept = _ssm_outputs(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, starts, ends, initial_state, return_final_state, keep
    )
    KERNELS[u.device.type]["ssm_forward"](
        u, delta, *dense(A), B, C, *dense(D), z, *dense(delta_bias), delta_softplus, starts, ends,
        *dense(initial_state), y, final if return_final_state else None, kept if keep else None,
    )  # fmt: skip
    return y, final, kept


def _ssm_outputs(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    z: Optional[Tensor],
    delta_bias: Optional[Tensor],
    delta_softplus: bool,
    starts: Tensor,
    ends: Tensor,
    initial_state: Optional[Tensor],
    return_final_state: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return scan_outputs(u, A, starts, return_final_state, keep)


def scan_outputs(
    u: Tensor, A: Tensor, starts: Tensor, return_final_state: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the scan's y, final states and what it keeps for its backward; absent ones are empty."""
    channels, states = A.shape
    final = (starts.shape[0], channels, states) if return_final_state else (0,)
    intervals = u.shape[0] * u.shape[1] // KEPT_TOKENS
    if u.device.type == "cuda":
        # Room for 16 bits a number, which is also 32 bits at half as many tokens.
        kept = torch.empty((intervals, channels, states) if keep else (0,), dtype=torch.bfloat16, device=u.device)
        return u.new_empty(u.shape), A.new_empty(final), kept
    # A document's kept states begin at its number + its start // KEPT_TOKENS: none overlap, without sums over lengths.
    room = (starts.shape[0] + intervals, -(-channels // KEPT_CHANNELS) * KEPT_CHANNELS, states)
    return u.new_empty(u.shape), A.new_empty(final), A.new_empty(room if keep else (0,))


def _ssm_backward(
    dy: Tensor,
    dfinal: Optional[Tensor],
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    z: Optional[Tensor],
    delta_bias: Optional[Tensor],
    delta_softplus: bool,
    starts: Tensor,
    ends: Tensor,
    initial_state: Optional[Tensor],
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = _ssm_backward_outputs(
        dy, dfinal, u, delta, A, B, C, D, z, delta_bias, delta_softplus, starts, ends, initial_state, kept
    )
    inputs = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    KERNELS[u.device.type]["ssm_backward"](
        unit_stride(dy), *dense(dfinal), u, delta, *dense(A), B, C, *dense(D), z, *dense(delta_bias),
        delta_softplus, starts, ends, *dense(initial_state), kept, *present(outputs, inputs),
    )  # fmt: skip
    return outputs


def _ssm_backward_outputs(
    dy: Tensor,
    dfinal: Optional[Tensor],
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    z: Optional[Tensor],
    delta_bias: Optional[Tensor],
    delta_softplus: bool,
    starts: Tensor,
    ends: Tensor,
    initial_state: Optional[Tensor],
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        like(u, u), like(delta, u), like(A, u), like(B, u), like(C, u), like(D, u), like(z, u),
        like(delta_bias, u), like(initial_state, u),
    )  # fmt: skip


def _ssm_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    u, delta, A, B, C, D, z, delta_bias, ctx.softplus, starts, ends, initial_state, ctx.has_final, ctx.kept = inputs
    ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, starts, ends, initial_state, output[2])
    ctx.set_materialize_grads(False)


def _ssm_gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, _: Tensor | None) -> tuple:
    u, delta, A, B, C, D, z, delta_bias, starts, ends, initial_state, kept = ctx.saved_tensors
    if not ctx.kept:
        raise RuntimeError("packmamba::ssm_pack: called with keep=False, so it cannot be differentiated")
    dy = u.new_zeros(u.shape) if dy is None else dy
    dfinal = dfinal if ctx.has_final else None
    gradients = torch.ops.packmamba.ssm_pack_backward(
        dy, dfinal, u, delta, A, B, C, D, z, delta_bias, ctx.softplus, starts, ends, initial_state, kept
    )
    inputs = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    *per_input, dinitial = present(gradients, inputs)
    return (*per_input, None, None, None, dinitial, None, None)


define("conv1d_pack", _conv1d, _conv1d_outputs)
define("conv1d_pack_backward", _conv1d_backward, _conv1d_backward_outputs)
define("ssm_pack", _ssm, _ssm_outputs)
define("ssm_pack_backward", _ssm_backward, _ssm_backward_outputs)
differentiate("conv1d_pack", _conv1d_gradients, _conv1d_setup)
differentiate("ssm_pack", _ssm_gradients, _ssm_setup)


def like(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Contiguous room for a tensor's gradient."""
    return other.new_empty(0) if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def present(values: tuple[Tensor, ...], inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Values that belong to inputs that are there; None for the others."""
    return tuple(None if tensor is None else value for value, tensor in zip(values, inputs))


def dense(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def unit_stride(tensor: Tensor) -> Tensor:
    """A gradient may come expanded or transposed; the kernels read rows."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
