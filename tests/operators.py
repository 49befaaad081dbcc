"""Layouts, random arguments for the packed operators, and the loops over documents that every
backend is compared with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from loops import conv1d_pack_loops, ssd_pack_loops, ssm_pack_loops
from packmamba import SequenceLayout, ops
from packmamba.ops.checks import accumulation_dtype
from packmamba.ops.conv import ConvArguments
from packmamba.ops.scan import ScanArguments
from packmamba.ops.ssd import SsdArguments

SPECIFICATIONS = {
    "conv1d_pack": (ConvArguments, conv1d_pack_loops),
    "ssm_pack": (ScanArguments, ssm_pack_loops),
    "ssd_pack": (SsdArguments, ssd_pack_loops),
}
OPERATORS = list(SPECIFICATIONS)
PER_TOKEN = ("x", "u", "delta", "z", "B", "C")
# mamba_ssm is a baseline: it takes one document a row.
BACKENDS = [name for name in ops.BACKENDS if name not in ("auto", "mamba_ssm")]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Forward and gradients, relative to float64: rounding a bfloat16 output once is 1.66e-3; float16's
# is an eighth of it.
TOLERANCES = {
    torch.bfloat16: (2e-3, 5e-3),
    torch.float16: (5e-4, 2e-3),
    torch.float32: (1e-5, 5e-5),
    torch.float64: (1e-9, 1e-9),
}


def tolerance(operator: str, dtype: torch.dtype, gradient: bool) -> float:
    if operator == "ssd_pack" and dtype == torch.bfloat16 and not gradient:
        return 2.5e-3  # its masked scores are rounded too, by the GPU's kernels
    return TOLERANCES[dtype][gradient]


def _layout(*rows: list[int], row_length: int, first: tuple[int, ...] = ()) -> SequenceLayout:
    """Build a layout whose rows' first documents continue at these places."""
    offsets = [[place, *[0] * len(row[1:])][: len(row)] for row, place in zip(rows, first or [0] * len(rows))]
    return SequenceLayout.from_lengths(rows, row_length=row_length, offsets=offsets)


AWKWARD = {
    "splits": _layout([3, 1, 9], [7, 8], [], [16], row_length=16, first=(5, 0, 0, 64)),
    "shorter-than-the-convolution": _layout([1, 2, 1, 3], [2, 1], row_length=9, first=(1, 2)),
    "chunk-edges": _layout([63, 64, 1], [65, 2], [127], [128], [129], row_length=130, first=(0, 3, 0, 9, 0)),
    # Rounding one token's output once may cost more than a tolerance; of many tokens' outputs it
    # costs 1.66e-3 in bfloat16.
    "one-slot": _layout(*[[1]] * 24, [], row_length=1),
}
LONG = _layout([7, 2047, 1], [2049], [8, 2048], row_length=2060, first=(3, 0, 0))


@st.composite
def rows_of_lengths(draw, max_rows: int = 4, max_row_length: int = 40):
    """(lengths, offsets, row_length): any split of any rows; continuations only at row starts."""
    row_length = draw(st.integers(1, max_row_length))
    lengths: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_rows))):
        row: list[int] = []
        while sum(row) < row_length and draw(st.booleans() if row else st.integers(0, 4).map(bool)):
            row.append(draw(st.integers(1, row_length - sum(row))))
        lengths.append(row)
    offsets = [[draw(st.sampled_from([0, 0, 1, 77])), *[0] * len(row)][: len(row)] for row in lengths]
    return lengths, offsets, row_length


def layouts(**kwargs):
    """Draw layouts."""
    return rows_of_lengths(**kwargs).map(lambda drawn: SequenceLayout.from_lengths(drawn[0], drawn[2], drawn[1]))


def on(backend: str, *more: Any, **options: Any) -> Any:
    """``backend`` as a parameter of a test, which needs a GPU for some."""
    return pytest.param(backend, *more, marks=[pytest.mark.gpu] * (device_of(backend) == "cuda"), **options)


def slow_unless(quick: Collection[str], names: Iterable[str]) -> list[Any]:
    """``names`` as parameters of a test, of which the slow ones are those that are not quick."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in quick)) for name in names]


def dtypes_of(backend: str) -> list[torch.dtype]:
    return [torch.float64] * (backend != "cuda") + [torch.float32, torch.bfloat16, torch.float16]


def device_of(backend: str) -> str:
    return "cuda" if backend == "cuda" else "cpu"


every_operator = pytest.mark.parametrize("operator", OPERATORS)
every_backend = pytest.mark.parametrize("backend", [on(backend) for backend in BACKENDS])


@dataclass
class Case:
    """One call: tensors by argument name, other arguments, and the gradients that flow in from
    above.
    """

    operator: str
    layout: SequenceLayout
    tensors: dict[str, Tensor]
    options: dict
    grad_y: Tensor
    grad_final: Tensor | None

    def run(self, backend: str) -> dict[str, Tensor]:
        """Return output, final state and every gradient, through the public operator."""
        options = self.options | {"layout": self.layout, "backend": backend}
        return self._differentiate(lambda tensors: getattr(ops, self.operator)(**tensors, **options))

    def specification(self) -> dict[str, Tensor]:
        """Return the same from the loops, in float64 on the CPU."""
        wide = self.in_float64("cpu")
        return wide._differentiate(wide.loops)

    def in_float64(self, device: str) -> Case:
        tensors = {name: tensor.detach().to(device).double() for name, tensor in self.tensors.items()}
        grads = [None if grad is None else grad.to(device).double() for grad in (self.grad_y, self.grad_final)]
        return Case(self.operator, self.layout.to(device), tensors, self.options, *grads)

    def loops(self, tensors: dict[str, Tensor]):
        arguments, run = SPECIFICATIONS[self.operator]
        given = dict.fromkeys(arguments._fields) | tensors | self.options | {"layout": self.layout}
        y, final = run(arguments(**given))
        return (y, final) if self.options["return_final_state"] else y

    def _differentiate(self, function: Callable) -> dict[str, Tensor]:
        tensors = {name: tensor.detach().requires_grad_() for name, tensor in self.tensors.items()}
        out = function(tensors)
        outputs = dict(zip(("y", "final_state"), out if self.options["return_final_state"] else (out,)))
        grads = [grad.to(part.dtype) for grad, part in zip((self.grad_y, self.grad_final), outputs.values())]
        gradients = torch.autograd.grad(list(outputs.values()), list(tensors.values()), grads)
        results = {name: part.detach() for name, part in outputs.items()}
        return results | {f"grad {name}": gradient for name, gradient in zip(tensors, gradients)}


def random_case(
    operator: str,
    layout: SequenceLayout,
    dtype: torch.dtype,
    device: str = "cpu",
    channels: int = 5,
    seed: int = 0,
    optional: bool = True,
    states: bool = True,
    d_state: int = 4,
    width: int = 4,
    parameter_dtype: torch.dtype | None = None,
    headdim: int = 3,
) -> Case:
    """Arguments as a model gives them: x, u and z, B and C are slices of wider tensors, delta is
    around its usual size.

    Of ssd_pack ``channels`` are heads, in two groups if they are even.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    (rows, row_length), documents, wide = layout.shape, layout.num_documents, accumulation_dtype(dtype)
    grad_shape: tuple[int, ...] = (rows, row_length, channels)
    x, z = normal(rows, row_length, 2 * channels).split(channels, dim=-1)
    tensors: dict[str, Tensor]
    if operator == "conv1d_pack":
        parameters = parameter_dtype or dtype
        tensors = {"x": x, "weight": normal(channels, width, dtype=parameters)}
        if optional:
            tensors["bias"] = normal(channels, dtype=parameters)
        state_shape, state_dtype = (documents, channels, width - 1), parameters
        options: dict = {"activation": "silu" if optional else None}
    elif operator == "ssd_pack":
        groups, grad_shape = 2 - channels % 2, (rows, row_length, channels, headdim)
        parts = [channels * headdim] * 2 + [groups * d_state] * 2
        x, z, B, C = normal(rows, row_length, sum(parts)).split(parts, dim=-1)
        x, z = (t.unflatten(2, (channels, headdim)) for t in (x, z))
        B, C = (t.unflatten(2, (groups, d_state)) for t in (B, C))
        A = -normal(channels, dtype=wide).exp()
        tensors = {"x": x, "delta": normal(rows, row_length, channels), "A": A, "B": B, "C": C}
        options = {"delta_softplus": optional, "delta_limit": (0.02, 1.5) if optional else None}
        skip = (channels, headdim) if seed % 2 else (channels,)
        state_shape, state_dtype = (documents, channels, headdim, d_state), wide
    else:
        _, B, C = normal(rows, row_length, 3 + 2 * d_state).split([3, d_state, d_state], dim=-1)
        A = -torch.arange(1, d_state + 1, dtype=wide) * normal(channels, 1, dtype=wide).cpu().exp()
        tensors = {"u": x, "delta": normal(rows, row_length, channels), "A": A.to(device), "B": B, "C": C}
        skip = (channels,)
        state_shape, state_dtype = (documents, channels, d_state), wide
        options = {"delta_softplus": optional}
    if operator != "conv1d_pack" and optional:
        tensors |= {"D": normal(*skip, dtype=wide), "z": z, "delta_bias": normal(channels, dtype=wide) - 3}
    elif operator != "conv1d_pack":
        tensors["delta"] = (tensors["delta"].abs() / 8).contiguous()
    grad_final = None
    options["return_final_state"] = states
    if states:
        tensors["initial_state"] = normal(*state_shape, dtype=state_dtype)
        grad_final = normal(*state_shape, dtype=state_dtype)
    return Case(operator, layout.to(device), tensors, options, normal(*grad_shape), grad_final)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """||a - b|| / ||b||, in float64; where b is zero, 0 if a is zero too, else huge."""
    difference = (result.cpu().double() - expected).norm()
    return float(difference / expected.norm().clamp(min=torch.finfo(torch.float64).tiny))


def assert_results(case: Case, backend: str, dtype: torch.dtype, expected: dict[str, Tensor]) -> None:
    """Outputs, final states and gradients, within the tolerances of activations of ``dtype``."""
    results = case.run(backend)
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        rounded = torch.float32 if dtype == torch.float64 and results[name].dtype == torch.float32 else dtype
        error = relative_error(results[name], value)
        assert error <= tolerance(case.operator, rounded, name.startswith("grad")), (name, error)


def documents_of(case: Case, results: dict[str, Tensor], s: int) -> Any:
    """Yield document s of the results by name: its positions of per-token tensors, its row of
    states.
    """
    tokens = slice(int(case.layout.starts[s]), int(case.layout.ends[s]))
    for name, value in results.items():
        if name == "y" or name.removeprefix("grad ") in PER_TOKEN:
            yield name, value.flatten(0, 1)[tokens]
        elif name in ("final_state", "grad initial_state"):
            yield name, value[s]


def assert_poison_stays(clean: Case, backend: str, poison: float) -> None:
    """Each document in turn, and what flows into it, is poison: no bit of another changes."""
    expected, layout = clean.run(backend), clean.layout
    for victim in range(layout.num_documents):
        case = copy.deepcopy(clean)
        tokens = slice(int(layout.starts[victim]), int(layout.ends[victim]))
        for name, tensor in case.tensors.items():
            if name in PER_TOKEN:
                tensor.view(-1, *tensor.shape[2:])[tokens] = poison
        case.grad_y.flatten(0, 1)[tokens] = poison
        if case.grad_final is not None:
            case.tensors["initial_state"][victim] = poison
            case.grad_final[victim] = poison
        results = case.run(backend)
        assert not results["y"].flatten(0, 1)[tokens].isfinite().all(), "the poison must reach its own document"
        for s in set(range(layout.num_documents)) - {victim}:
            before = dict(documents_of(clean, expected, s))
            for name, value in documents_of(case, results, s):
                assert torch.equal(value, before[name]), (name, s)


def assert_padding_is_unseen(clean: Case, backend: str, poison: float) -> None:
    """Padding is poison: no bit changes, and outputs and gradients there are zero."""
    expected, case = clean.run(backend), copy.deepcopy(clean)
    padding = case.layout.seq_idx < 0
    for name, tensor in case.tensors.items():
        if name in PER_TOKEN:
            tensor[padding] = poison
    case.grad_y[padding] = poison
    results = case.run(backend)
    for name, value in expected.items():
        assert torch.equal(results[name], value), name
        if name == "y" or name.removeprefix("grad ") in PER_TOKEN:
            assert (results[name][padding] == 0).all(), name
