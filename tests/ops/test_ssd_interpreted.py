"""Triton's kernels of ssd_pack, of Mamba-3's angles and of the loss on a CPU, by Triton's
interpreter: what can be tested of them without a GPU.

Needs triton, which a PyTorch with CUDA brings along, and a NumPy that Triton 3.6's interpreter can
work with (before 2.4).
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
from unittest.mock import Mock

import numpy
import pytest
import torch

CAN_INTERPRET = importlib.util.find_spec("triton") and numpy.lib.NumpyVersion(numpy.__version__) < "2.4.0"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CAN_INTERPRET, reason="pip install triton 'numpy<2.4'")]

# Documents of one token, of a chunk, of several; padding. The long one has two segments.
LENGTHS = [[70, 1, 129], [], [128, 60]]


@pytest.mark.parametrize("case", ["float32", "float16", "groups", "long", "loss", "angles"])
def test_interpreted_kernels_equal_the_loops(case):
    # The interpreter is chosen when Triton is imported.
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, __file__, case], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def interpret_loss(_):
    """Hold losses and gradients against PyTorch's operators; some targets are masked, whose logits
    are NaN.
    """
    from packmamba.nn import loss, loss_triton

    generator = torch.Generator().manual_seed(0)
    for dtype, vocabulary in ((torch.float32, 37), (torch.float32, 9000), (torch.float16, 256)):
        logits = 4 * torch.randn(5, vocabulary, generator=generator)
        logits[2], logits[3, 1] = torch.nan, -torch.inf
        targets = torch.randint(2, vocabulary, (10,), generator=generator)[::2]
        mask, shares = torch.arange(5) != 2, torch.rand(5, generator=generator)
        for given in (None, shares):
            arguments = (targets, mask, given, True)
            expected = loss._chunk(logits.to(dtype), *arguments)
            found = loss_triton.chunk_losses_and_gradient(logits.to(dtype), *arguments)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 if dtype == torch.float32 else 1e-3)
    far = loss_triton.chunk_losses_and_gradient(logits.to(dtype), targets + vocabulary, mask, None, False)
    assert far[0].isnan().tolist() == mask.tolist(), "a target outside the vocabulary"


def interpret_angles(_):
    """Hold angles and their gradients against PyTorch's operators."""
    from models import error
    from packmamba import PackedMamba3, SequenceLayout
    from packmamba.ops.angles_triton import sum_angles

    layer, layout = PackedMamba3(8, d_state=12, headdim=4), SequenceLayout.from_lengths(LENGTHS, 200)
    generator = torch.Generator().manual_seed(0)
    rate, dt, weight = (torch.randn(3, 200, n, generator=generator).requires_grad_() for n in (3, 4, 12))
    results = []
    expected = layer._sum_turns(rate, dt, layout, layout.documents, layout.starts)
    for theta in (expected, sum_angles(rate, dt, layout.starts, layout.ends)):
        sines = theta[layout.documents >= 0].sin()
        total = (sines.flatten(1) * weight[layout.documents >= 0]).sum()
        results.append([sines, *torch.autograd.grad(total, [rate, dt])])
    assert max(map(error, results[1], results[0])) < 1e-5
    dt.data[0, 75] = torch.nan
    sick = sum_angles(rate, dt, layout.starts, layout.ends).isnan().flatten(2).any(2)
    assert sick.nonzero().tolist() == [[0, 75]], "a token whose turn is no number, and no other"


def interpret(name):
    """Hold one case against the loops in float64, on CPU tensors."""
    from operators import assert_results, random_case
    from packmamba import SequenceLayout
    from packmamba.ops import backends, ssd, ssd_triton

    # No GPU: one stream, no descriptors, and nothing is captured.
    torch._C._cuda_isCurrentStreamCapturing = lambda: False
    torch.cuda.current_stream = ssd_triton._second_stream = lambda device: Mock()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    ssd_triton.Problem.described = lambda self, *_, **__: self.tile
    ssd._kernels = lambda x: ssd_triton
    backends._implementations["cpu", "ssd_pack"] = ssd.compiled

    layout = SequenceLayout.from_lengths(*{"long": ([[2100]], 2110)}.get(name, (LENGTHS, 200)))
    # A head each: only ``groups`` has groups of several heads, which have several shares then.
    ssd_triton.SUMMED.update(state_parts=1, pair_parts=1)
    dtype = torch.float16 if name == "float16" else torch.float32
    sizes = {"channels": 4, "headdim": 20} if name == "groups" else {"channels": 2, "headdim": 16}
    case = random_case("ssd_pack", layout, dtype, **sizes, d_state=16, optional=name != "long")
    assert_results(case, "cpu", dtype, case.specification())


if __name__ == "__main__":
    {"loss": interpret_loss, "angles": interpret_angles}.get(sys.argv[1], interpret)(sys.argv[1])
