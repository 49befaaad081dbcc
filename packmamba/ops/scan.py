"""The selective scan over packed documents: checks, and the compiled operator.

The forward saves a state every ``SAVED_TOKENS`` tokens, with N = 16 in bfloat16 on a GPU half an
activation; the backward replays tokens from those instead of keeping a state a token, which would take N
activations. kernels/cuda/NOTES.md has figures.

Shapes: B rows, L slots, S documents, D channels, N states.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmamba.errors import KernelError, expect
from packmamba.layout import SequenceLayout, round_up
from packmamba.ops import checks, context_parallel
from packmamba.ops.cuda import launch, scans_by_tensor_cores
from packmamba.ops.custom_op import KERNELS, Outputs, PackedOperator, declare, dense, empty_grad_like, unit_stride

# Tokens between saved states (kernels/cuda/params.h, kernels/cpu/ssm.h).
SAVED_TOKENS = 32
# On a CPU the channels of saved states are a multiple of this.
SAVED_CHANNELS = 16
# Shared memory of a block of the scan's tensor-core backward.
BACKWARD_SHARED_BYTES = 113 << 10


def ssm_pack(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    layout: SequenceLayout | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
) -> Any:
    """Scan documents by Mamba's recurrence (``selective_scan_fn``).

    Each starts from its initial state, or zero.

    ``delta' = softplus(delta + delta_bias)``,
    ``h[t] = exp(delta'[t] A) h[t-1] + delta'[t] B[t] u[t]``,
    ``y[t] = (C[t] . h[t] + D u[t]) * silu(z[t])`` (Mamba, arXiv 2312.00752; packed: PackMamba,
    arXiv 2408.03865). Differentiable in every tensor, also through the final state.

    Args:
        u, delta, z: (B, L, D), of one dtype: bfloat16, float16, float32 or (not on a GPU) float64;
            any row stride, unit channel stride. z None: no gate.
        B, C: (B, L, N), like u.
        A: (D, N), negative, N at most 256; float32 (float64 beside float64 activations), as are D and delta_bias.
        D, delta_bias: (D,), the skip, and what is added to delta; None: zero.
        delta_softplus: apply softplus to delta after its bias.
        layout: where documents lie; None: each row is one.
        initial_state: (S, D, N) in A's dtype, the state each document starts from, whatever
            ``layout.continues`` says; None: zero.
        return_final_state: also return each document's last state, like initial_state.
        backend: a name in ``ops.BACKENDS``.

    Returns y (B, L, D) in u's dtype, zero at padding, which is never read; with
    ``return_final_state`` a pair. Raises TypeError or ValueError.
    """
    # u alone comes first: the other checks compare shapes, dtypes and devices with u's.
    checks.check_activations(u, "u")
    layout = checks.check_layout(layout, u, "u")
    rows, row_length, channels = u.shape
    states = checks.check_columns(A, "A", channels, 1, 256)
    by_token = (rows, row_length, states)
    # Activations have u's dtype, parameters and states that of sums.
    checks.check_tensors(u, "u", (u.dtype,), True, delta=(delta, u.shape), z=(z, u.shape))
    checks.check_tensors(u, "u", (u.dtype,), True, B=(B, by_token), C=(C, by_token))
    wide = (checks.accumulation_dtype(u.dtype),)
    state_shape = (layout.num_documents, channels, states)
    checks.check_tensors(u, "u", wide, A=(A, (channels, states)), initial_state=(initial_state, state_shape))
    checks.check_tensors(u, "u", wide, D=(D, (channels,)), delta_bias=(delta_bias, (channels,)))
    checks.check_flags(delta_softplus=delta_softplus, return_final_state=return_final_state)
    tensors = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    arguments = ScanArguments(*tensors, layout, delta_softplus, return_final_state)
    return context_parallel.run("ssm_pack", arguments, backend)


class ScanArguments(NamedTuple):
    """Arguments of every implementation, checked."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    initial_state: Tensor | None
    layout: SequenceLayout
    delta_softplus: bool
    return_final_state: bool


class ScanSaved(NamedTuple):
    """Saved for the backward, or None.

    States every ``SAVED_TOKENS`` tokens (``allocate_scan``), of Mamba-2 where segments start
    (``ssd_triton``).
    """

    states: Tensor | None


def allocate_scan(a: ScanArguments, needs_backward: bool) -> tuple[Outputs, ScanSaved]:
    """Allocate y (B, L, D), final states (S, D, N), and saved states.

    Final states are there if returned, saved ones if a backward follows.

    A GPU saves (B L // SAVED_TOKENS, D, N) in bfloat16, or half as many in float32: a document's
    state lies at its start // SAVED_TOKENS + its number in the document - 1, so that none overlap
    and no sums over documents are needed. A CPU saves (S + B L // SAVED_TOKENS, D rounded up, N) in
    A's dtype, a document's at its number + its start // SAVED_TOKENS.
    """
    channels, states = a.A.shape
    documents = a.layout.starts.shape[0]
    final_state = a.A.new_empty((documents, channels, states)) if a.return_final_state else None
    outputs = Outputs(y=empty_grad_like(a.u), final_state=final_state)
    if not needs_backward:
        return outputs, ScanSaved(states=None)
    intervals = a.u.shape[0] * a.u.shape[1] // SAVED_TOKENS
    if a.u.is_cuda:
        # The scan of other dtypes saves float32 states
        # every 64 tokens, which takes the same bytes.
        saved = a.A.new_empty((intervals, channels, states), dtype=torch.bfloat16)
    else:
        saved = a.A.new_empty((documents + intervals, round_up(channels, SAVED_CHANNELS), states))
    return outputs, ScanSaved(states=saved)


def _forward(a: ScanArguments, needs_backward: bool) -> tuple[Outputs, ScanSaved]:
    outputs, saved = allocate_scan(a, needs_backward)
    KERNELS[a.u.device.type]["ssm_forward"]({**_inputs(a), **outputs._asdict(), "saved": saved.states})
    return outputs, saved


def _backward(a: ScanArguments, saved: ScanSaved, grads: Outputs) -> dict[str, Tensor | None]:
    gradients = compiled.signature.allocate_gradients(a)
    # No gradient of y: only the final state was used.
    dy = a.u.new_zeros(a.u.shape) if grads.y is None else unit_stride(grads.y)
    backward_into(a, saved.states, dy, grads.final_state, **gradients)
    return gradients


def backward_into(
    a: ScanArguments, states: Tensor | None, dy: Tensor, dfinal: Tensor | None, **gradients: Tensor | None
) -> None:
    """Compute gradients into ``d<argument>``, and y where that is given.

    states: saved by the forward.
    """
    dfinal = dense(dfinal) if a.return_final_state else None
    arguments = {**_inputs(a), "saved": states, "dy": dy, "dfinal": dfinal, **gradients}
    KERNELS[a.u.device.type]["ssm_backward"](arguments)


def _inputs(a: ScanArguments) -> dict[str, Any]:
    """Name what both kernels read, as kernels/*/bindings do.

    Activations lie as they came; parameters and states are made dense.
    """
    return a._asdict() | {
        "A": dense(a.A),
        "D": dense(a.D),
        "delta_bias": dense(a.delta_bias),
        "initial_state": dense(a.initial_state),
        "starts": a.layout.starts,
        "ends": a.layout.ends,
    }


def _cuda_forward(arguments: dict[str, Any]) -> None:
    """Launch the forward; on tensor cores, refuse a GPU on which the backward would not fit."""
    u = arguments["u"]
    tensor_cores = _by_tensor_cores(arguments)
    # The backward of these kernels needs more shared
    # memory than the forward: refuse before it runs.
    if tensor_cores and arguments["saved"] is not None:
        _check_backward_fits(u.device)
    launch("ssm_forward", "forward", arguments, like=u, tensor_cores=tensor_cores)


def _cuda_backward(arguments: dict[str, Any]) -> None:
    """Launch the backward.

    With a gate it also writes the forward's output to ``y``, if that is there.
    """
    arguments.setdefault("y", None)
    tensor_cores = _by_tensor_cores(arguments)
    # Loads in pairs need what ``_by_tensor_cores`` asks of the activations; dy comes from autograd.
    if tensor_cores and not _is_even(arguments["dy"]):
        arguments["dy"] = arguments["dy"].contiguous()
    launch("ssm_backward", "backward", arguments, like=arguments["u"], tensor_cores=tensor_cores)


@functools.cache
def _check_backward_fits(device: torch.device) -> None:
    """Check the GPU's shared memory before the forward. Raises KernelError."""
    properties = torch.cuda.get_device_properties(device)
    available = getattr(properties, "shared_memory_per_block_optin", BACKWARD_SHARED_BYTES)
    expected = f"{BACKWARD_SHARED_BYTES >> 10} KiB of shared memory a block"
    got = f"{available >> 10}; take float16 or float32 activations instead of bfloat16"
    expect(available >= BACKWARD_SHARED_BYTES, "GPU", expected, got, KernelError)


def _is_even(tensor: Tensor) -> bool:
    """Return whether each token of 16-bit (B, L, D) begins at a multiple of 4 bytes.

    Then numbers may be read in pairs.
    """
    rows, tokens, _ = tensor.stride()
    # 16-bit numbers: strides << 1 are bytes, and the last two bits of all of them must be 0.
    return not ((tensor.data_ptr() | rows << 1 | tokens << 1) & 3)


def _by_tensor_cores(arguments: dict[str, Any]) -> bool:
    """Return whether the tensor-core kernels take these arguments."""
    activations = [arguments[name] for name in ("u", "delta", "B", "C", "z")]
    are_even = all(tensor is None or _is_even(tensor) for tensor in activations)
    return are_even and scans_by_tensor_cores(arguments["u"], arguments["A"].shape[1])


declare("ssm_forward", cuda=_cuda_forward)
declare("ssm_backward", cuda=_cuda_backward)
compiled: PackedOperator[ScanArguments] = PackedOperator(
    "ssm_pack", arguments=ScanArguments, saved=ScanSaved, forward=_forward, fake=allocate_scan, backward=_backward
)
