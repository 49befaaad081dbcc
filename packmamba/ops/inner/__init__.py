"""What follows a Mamba block's first projection, packed: convolution, the projections to delta, B and C, scan, last projection.

Shapes: B rows, L slots, S documents, D channels, N states, W taps, R rank.
"""

from __future__ import annotations

from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops.backends import choose
from packmamba.ops.checks import check_activations, check_layout
from packmamba.ops.inner.arguments import InnerArguments


def inner_pack(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    x_weight: Tensor,
    dt_weight: Tensor,
    A: Tensor,
    D: Tensor,
    delta_bias: Tensor,
    out_weight: Tensor,
    *,
    conv_layout: SequenceLayout | None = None,
    ssm_layout: SequenceLayout | None = None,
    conv_state: Tensor | None = None,
    ssm_state: Tensor | None = None,
    return_state: bool = False,
    recompute: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """``x, z = xz; x = conv1d_pack(x); delta, B, C = x @ x_weight.T``, then
    ``ssm_pack(x, delta @ dt_weight.T, A, B, C, D, z) @ out_weight.T``.

    Args:
        xz: (B, L, 2 D), the convolution's input and the gate.
        conv_weight, conv_bias: (D, W) and (D,) or None, of the convolution, whose activation is SiLU.
        x_weight, dt_weight, out_weight: (R + 2 N, D), (D, R) and (d_model, D), used in xz's dtype; the compiled kernels sum
            gradients of wider ones without rounding them to xz's.
        A, D, delta_bias: (D, N), (D,), (D,), as ``ssm_pack`` takes them.
        conv_layout, ssm_layout: where documents lie for the convolution and for the scan; None: each row is one.
        conv_state, ssm_state: as the operators' initial_state, indexed by the documents of their layouts.
        return_state: also return (final convolution state, final scan state).
        recompute: the backward computes the convolution's output and delta again instead of keeping them (compiled kernels only),
            and on a GPU y: its kernel has it at hand, from states that are rounded at times, so its bits may differ.
        backend: see ``ops.BACKENDS``.

    Returns:
        (B, L, d_model) in xz's dtype, and the final states or None.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    check_activations(xz, "xz")
    conv_layout = check_layout(conv_layout, xz, "xz", "conv_layout")
    ssm_layout = check_layout(ssm_layout, xz, "xz", "ssm_layout")
    a = InnerArguments(
        xz, conv_weight, conv_bias, x_weight, dt_weight, out_weight, A, D, delta_bias, conv_state, ssm_state, None, None, None,
        conv_layout, ssm_layout, return_state, recompute,
    )  # fmt: skip
    a.check()
    mixed, *state = choose(backend, xz.device, "inner_pack")(a)
    return mixed, (state[0], state[1]) if return_state else None
