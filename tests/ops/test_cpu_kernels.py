"""Test the compiled CPU kernels beyond parity: the same bits for any threads, functions with stated
errors.
"""

import pytest
import torch

from operators import AWKWARD, LONG, random_case
from packmamba import SequenceLayout
from packmamba.ops import custom_op

BUSY = SequenceLayout.from_lengths([[300, 17, 900, 1, 64], [513], list(range(1, 40))], row_length=1300)


@pytest.mark.parametrize("operator", ["conv1d_pack", "ssm_pack"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [AWKWARD["chunk-edges"], LONG, BUSY], ids=["chunk-edges", "long", "busy"])
def test_the_same_bits_for_any_number_of_threads(operator, dtype, layout, request):
    request.addfinalizer(lambda: torch.set_num_threads(1))
    case = random_case(operator, layout, dtype, channels=150, d_state=3)
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        results.append(case.run("cpu"))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("operator", ["conv1d_pack", "ssm_pack"])
def test_auto_runs_the_compiled_kernels(operator, monkeypatch):
    called = []
    real = dict(custom_op.KERNELS["cpu"])
    counting = {name: lambda a, name=name: (called.append(name), real[name](a)) for name in real}
    monkeypatch.setitem(custom_op.KERNELS, "cpu", counting)
    random_case(operator, AWKWARD["splits"], torch.float32).run("auto")
    prefix = operator.removesuffix("_pack")
    assert called == [f"{prefix}_forward", f"{prefix}_backward"]


@pytest.mark.parametrize("operator", ["conv1d_pack", "ssm_pack"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_written_wherever_they_are_read(operator, dtype, monkeypatch):
    """Every output arrives full of NaN, and none is left."""
    real = dict(custom_op.KERNELS["cpu"])

    def poisoned(name):
        def run(arguments):
            for output in custom_op.kernel("cpu", name).outputs:
                if arguments[output] is not None:
                    arguments[output].fill_(torch.nan)
            real[name](arguments)

        return run

    case = random_case(operator, AWKWARD["chunk-edges"], dtype, channels=21)
    expected = case.run("cpu")
    monkeypatch.setitem(custom_op.KERNELS, "cpu", {name: poisoned(name) for name in real})
    torch.testing.assert_close(case.run("cpu"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("d_state", [1, 2, 7, 8, 16, 23, 64, 256])
def test_any_number_of_states(d_state):
    case = random_case("ssm_pack", AWKWARD["splits"], torch.float64, channels=9, d_state=d_state)
    torch.testing.assert_close(case.run("cpu"), case.run("reference"), rtol=1e-9, atol=1e-9)
