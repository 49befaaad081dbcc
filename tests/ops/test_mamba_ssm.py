"""The peers' operators under our signatures, with a stand-in for a kernel: the real ones need a
GPU.
"""

import torch

from packmamba.layout import SequenceLayout
from packmamba.ops import mamba_ssm
from packmamba.ops.conv import ConvArguments


class Picky(torch.autograd.Function):
    """Asks of the gradient's strides what causal-conv1d asks of channels that lie together."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dout):
        assert dout.stride(1) == 1 and dout.stride(0) % 8 == 0 and dout.stride(2) % 8 == 0, dout.stride()
        return 2 * dout


def test_the_convolution_of_one_token_gets_a_gradient_that_its_kernel_takes(monkeypatch):
    """A run of single with mamba-ssm's kernels died after hundreds of steps at a document of one
    token.
    """
    monkeypatch.setattr(mamba_ssm, "_peer", lambda *names: lambda x, weight, bias, activation: Picky.apply(x))
    for length in (1, 9):
        x = torch.randn(1, length, 16, requires_grad=True)
        layout = SequenceLayout.from_lengths([[length]], row_length=length)
        y, _ = mamba_ssm.conv1d_pack(ConvArguments(x, torch.ones(16, 4), None, None, layout, "silu", False))
        # where a dimension is 1, any stride will do
        strides = (1, 1, 1) if length == 1 else (length * 16, 16, 1)
        dy = torch.randn(length * 16).as_strided((1, length, 16), strides)
        y.backward(dy)
        assert torch.equal(x.grad, 2 * dy)
