"""Mamba-2's scan (SSD) over packed documents.

Triton kernels compute it on a GPU (``ssd_triton``), Mamba-1's scan on a CPU.

Shapes: B rows, L slots, S documents, H heads, P channels of a head, G groups, N states.
"""

import copy
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from packmamba.errors import KernelError, expect
from packmamba.layout import SequenceLayout
from packmamba.ops import build, checks, context_parallel
from packmamba.ops.cuda import check_has_kernels
from packmamba.ops.custom_op import Outputs, PackedOperator, empty_grad_like, unit_stride
from packmamba.ops.scan import ScanArguments, ScanSaved
from packmamba.ops.scan import compiled as scan_of_mamba1

MOST_STATES = 256
# A multiple of the numbers that one iteration of a processor's vector loop takes.
VECTORS = 64
# Mamba-1's operator under this operator's name, which its errors give.
scan_as_ssd = copy.copy(scan_of_mamba1)
scan_as_ssd.name = "ssd_pack"


def ssd_pack(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    delta_limit: tuple[float, float] | None = None,
    layout: SequenceLayout | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
) -> Any:
    """Scan documents by Mamba-2's recurrence, each from zero or from its initial state.

    ``d = softplus(delta + delta_bias)``, clamped to delta_limit;
    ``h[t] = exp(d[t] A) h[t-1] + d[t] x[t] (outer) B[t]``;
    ``y[t] = (h[t] C[t] + D x[t]) * silu(z[t])`` (Mamba-2, arXiv 2405.21060). Head h reads B and C
    of group h // (H / G). Differentiable in every tensor, also through the final state.

    Args (others, dtypes and strides as of ``ssm_pack``):
        x, z: (B, L, H, P). delta: (B, L, H), in x's dtype or A's, as is its gradient.
        A, delta_bias: (H,). D: (H,) or (H, P).
        B, C: (B, L, G, N); H is a multiple of G, N at most 256.
        delta_limit: (low, high), to which delta is clamped last; None: no limit.
        initial_state: (S, H, P, N).

    On a GPU float32's outputs are within 1e-5 of float64 and its gradients within 5e-5. But where
    ``torch.set_float32_matmul_precision`` allows TF32, heads of at most 32 channels, and states of
    at most 32 or more than 128, are multiplied in TF32, with errors of about 1e-3.

    Returns y (B, L, H, P) in x's dtype, zero at padding, which is never read; with
    ``return_final_state`` a pair. Raises TypeError or ValueError.
    """
    checks.check_activations(x, "x", "(B, L, H, P)")
    layout = checks.check_layout(layout, x, "x")
    rows, row_length, heads, channels = shape = x.shape
    dtype = x.dtype
    wide = checks.accumulation_dtype(dtype)
    # G and N, which other shapes depend on, are read from B.
    checks.check_is_tensor(B, "B")
    if B.dim() != 4 or not 1 <= B.shape[3] <= MOST_STATES or not B.shape[2] or heads % B.shape[2]:
        expected = f"({rows}, {row_length}, G, N) with G dividing {heads} and N from 1 to {MOST_STATES}"
        raise ValueError(f"B: expected shape {expected}, got {tuple(B.shape)}")
    by_group = rows, row_length, *B.shape[2:]
    checks.check_tensors(x, "x", (dtype,), True, B=(B, by_group), C=(C, by_group), z=(z, shape))
    checks.check_tensors(x, "x", (dtype, wide), True, delta=(delta, shape[:3]))
    skip = (heads, channels) if isinstance(D, Tensor) and D.dim() == 2 else (heads,)
    state_shape = (layout.num_documents, heads, channels, B.shape[3])
    checks.check_tensors(x, "x", (wide,), A=(A, (heads,)), D=(D, skip), delta_bias=(delta_bias, (heads,)))
    checks.check_tensors(x, "x", (wide,), initial_state=(initial_state, state_shape))
    checks.check_flags(delta_softplus=delta_softplus, return_final_state=return_final_state)
    _check_limit(delta_limit)
    tensors = (x, delta, A, B, C, D, z, delta_bias, initial_state, layout.offsets)
    a = SsdArguments(*tensors, layout, delta_softplus, delta_limit, return_final_state)
    return context_parallel.run("ssd_pack", a, backend)


def _check_limit(limit: Any) -> None:
    """Raise ValueError unless a limit of step sizes is None or (low, high)."""
    is_pair = isinstance(limit, (tuple, list)) and len(limit) == 2
    are_numbers = is_pair and all(isinstance(bound, (int, float)) for bound in limit)
    is_limit = limit is None or (are_numbers and limit[0] <= limit[1])
    expect(is_limit, "delta_limit", "(low, high) with low at most high, or None", repr(limit))


class SsdArguments(NamedTuple):
    """Arguments of every implementation; offsets: the layout's, None: zeros."""

    x: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    initial_state: Tensor | None
    offsets: Tensor | None
    layout: SequenceLayout
    delta_softplus: bool
    delta_limit: tuple[float, float] | None
    return_final_state: bool

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of states (S, H, P, N)."""
        return self.layout.starts.shape[0], *self.x.shape[2:], self.B.shape[3]


def on_cpu(a: SsdArguments) -> tuple[Tensor, Tensor | None]:
    """Compute ``ops.ssd_pack`` by Mamba-1's kernels."""
    return by_channels(a, scan_as_ssd)


def by_channels(
    a: SsdArguments, scan: Callable[[ScanArguments], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """Compute ``ops.ssd_pack`` by Mamba-1's scan, a group at a time, which shares B and C.

    Each channel takes the step size, the rate and D of its head. Computed in the accumulation
    dtype: gradients of step sizes are summed over a head's channels, and are not to be rounded to
    16 bits before.
    """
    delta, delta_bias = a.delta.to(a.A.dtype), a.delta_bias
    if a.delta_limit is not None:
        # Mamba-1's scan has no limit: give it finished step sizes, without a bias.
        delta, delta_bias = _limited_steps(a, delta), None
    finished = a._replace(delta=delta, delta_bias=delta_bias)
    outputs, finals = zip(*(scan(_of_group(finished, group)) for group in range(a.B.shape[2])))
    # Channels of all groups side by side are heads by channels again.
    y = torch.cat(outputs, 2).view(a.x.shape).to(a.x.dtype)
    return y, torch.cat(finals, 1).view(a.state_shape) if a.return_final_state else None


def _of_group(a: SsdArguments, group: int) -> ScanArguments:
    """Return a group's arguments for Mamba-1's scan: u, delta and z are (B, L, (H / G) P)."""
    heads, channels = a.x.shape[2:]
    groups, states = a.B.shape[2:]
    shared = heads // groups

    def repeated(tensor: Tensor | None, axis: int) -> Any:
        """Take the group of (..., H, ...), repeat a head's number for its channels: (..., (H / G) P, ...)."""
        taken = None if tensor is None else tensor.narrow(axis, group * shared, shared)
        return None if taken is None else taken.repeat_interleave(channels, dim=axis)

    def flattened(tensor: Tensor | None, axis: int) -> Any:
        """Take the group of (..., H, P, ...), join heads and channels: (..., (H / G) P, ...)."""
        taken = None if tensor is None else tensor.narrow(axis, group * shared, shared).to(a.A.dtype)
        return None if taken is None else unit_stride(taken.flatten(axis, axis + 1))

    return ScanArguments(
        u=flattened(a.x, 2),
        delta=repeated(a.delta, 2),
        A=repeated(a.A, 0)[:, None].repeat(1, states),
        B=a.B[:, :, group].to(a.A.dtype),
        C=a.C[:, :, group].to(a.A.dtype),
        D=flattened(a.D, 0) if a.D is not None and a.D.dim() == 2 else repeated(a.D, 0),
        z=flattened(a.z, 2),
        delta_bias=repeated(a.delta_bias, 0),
        initial_state=flattened(a.initial_state, 1),
        layout=a.layout,
        delta_softplus=a.delta_softplus and a.delta_limit is None,
        return_final_state=a.return_final_state,
    )


def _limited_steps(a: SsdArguments, delta: Tensor) -> Tensor:
    """Compute step sizes that a scan of Mamba-1 takes as they are: (B, L, H)."""
    assert a.delta_limit is not None
    size = delta if a.delta_bias is None else delta + a.delta_bias
    # What padding holds reaches no gradient.
    size = torch.where(a.layout.seq_idx[..., None] < 0, 0, size)
    if a.delta_softplus:
        size = elementwise(F.softplus, size)
    return size.clamp(*a.delta_limit)


def elementwise(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """Apply a function to a tensor that is padded to whole vectors.

    On a CPU PyTorch computes what is left after the last whole vector by a scalar function, which
    rounds otherwise: an element's bits would depend on its place.
    """
    if value.is_cuda:
        return function(value)
    padded = F.pad(value.flatten(), (0, -value.numel() % VECTORS))
    return function(padded)[: value.numel()].view(value.shape)


def _forward(a: SsdArguments, needs_backward: bool) -> tuple[Outputs, ScanSaved]:
    try:
        y, final_state, starts = _kernels(a.x).forward(a)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        # No memory, for example, is no matter of a compiler.
        is_of_compiler = not isinstance(error, RuntimeError) or "C compiler" in str(error)
        if build.has_c_compiler() or not is_of_compiler:
            raise
        missing = "no C compiler, which Triton needs for Mamba-2's and Mamba-3's kernels"
        remedy = "install gcc or name one in CC, or set ops.backend=reference"
        raise KernelError(f"{missing}: {remedy}") from error
    return Outputs(y=y, final_state=final_state), ScanSaved(states=starts)


def _kernels(x: Tensor) -> Any:
    from packmamba.ops import ssd_triton  # which imports Triton

    check_has_kernels(x)
    return ssd_triton


def _fake(a: SsdArguments, needs_backward: bool) -> tuple[Outputs, ScanSaved]:
    final_state = a.A.new_empty(a.state_shape) if a.return_final_state else None
    return Outputs(y=empty_grad_like(a.x), final_state=final_state), ScanSaved(states=None)


def _backward(
    a: SsdArguments, saved: ScanSaved, grads: Outputs, into: tuple[Tensor, ...] | None = None
) -> dict[str, Tensor | None]:
    """Return gradients as ``d<argument>``.

    into: where some are written, see ``ssd_triton.backward``.
    """
    dfinal = grads.final_state if a.return_final_state else None
    # All padding: no kernel has work, and every gradient is zero.
    if a.layout.starts.numel() == 0:
        tensors: Any = a[: compiled.signature.num_gradients]
        gradients = tuple(None if t is None else torch.zeros_like(t) for t in tensors)
    else:
        starts = saved.states if saved.states is not None and saved.states.numel() else None
        gradients = _kernels(a.x).backward(a, starts, grads.y, dfinal, into)
    return dict(zip(compiled.signature.gradients, gradients))


compiled: PackedOperator[SsdArguments] = PackedOperator(
    "ssd_pack",
    arguments=SsdArguments,
    saved=ScanSaved,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    constants=("offsets",),
    saved_if_eager=("states",),
)
