"""The operators as PyTorch sees them: schemas, fakes and autograd that agree, one graph for every layout."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from arrangements import AWKWARD
from operators import random_case
from packmamba import PackedMamba, SequenceLayout, ops
from packmamba.ops import build

OPERATORS = ["conv1d_pack", "ssm_pack"]
both = pytest.mark.parametrize("operator", OPERATORS)


@pytest.fixture(autouse=True, scope="module")
def loaded():
    build.load("cpu")


def arguments_of(case):
    """The custom operator's positional arguments."""
    t, layout, final = (
        {n: v.clone().requires_grad_() for n, v in case.tensors.items()},
        case.layout,
        case.options["return_final_state"],
    )
    if case.operator == "conv1d_pack":
        silu = case.options["activation"] == "silu"
        return (t["x"], t["weight"], t.get("bias"), layout.starts, layout.ends, t.get("initial_state"), silu, final)
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    softplus = case.options["delta_softplus"]
    return (*(t.get(n) for n in names), softplus, layout.starts, layout.ends, t.get("initial_state"), final, True)


@both
@pytest.mark.parametrize("optional", [False, True], ids=["plain", "optional"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(operator, optional, dtype):
    wide = torch.float32 if operator == "conv1d_pack" else None
    case = random_case(operator, AWKWARD["splits"], dtype, optional=optional, states=optional, parameter_dtype=wide)
    torch.library.opcheck(getattr(torch.ops.packmamba, operator).default, arguments_of(case))


def random_layouts(count, rows, row_length):
    rng = np.random.Generator(np.random.PCG64(0))
    for _ in range(count):
        lengths = []
        for _ in range(rows):
            cuts = np.unique(rng.integers(1, row_length, size=rng.integers(1, 9)))
            lengths.append(np.diff([0, *cuts]).tolist())
        yield SequenceLayout.from_lengths(lengths, row_length=row_length)


def test_one_graph_for_a_hundred_layouts():
    torch.manual_seed(0)
    layer = PackedMamba(d_model=16, d_state=4)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    fast = torch.compile(layer, backend=backend, fullgraph=True)
    parameters = list(layer.parameters())
    for layout in random_layouts(100, rows=2, row_length=48):
        x = torch.randn(2, 48, 16)
        expected, got = layer(x, layout=layout), fast(x, layout=layout)
        assert torch.equal(got, expected)
        for a, b in zip(torch.autograd.grad(got.sum(), parameters), torch.autograd.grad(expected.sum(), parameters)):
            assert torch.equal(a, b)
    assert len(graphs) <= 3, "the first compilation and at most two more"


@both
def test_compiled_through_autograd_equals_eager(operator):
    """aot_eager traces forward and backward with fakes alone."""
    torch._dynamo.reset()
    compiled = torch.compile(getattr(ops, operator), backend="aot_eager", fullgraph=True, dynamic=True)
    for layout in random_layouts(5, rows=2, row_length=48):
        case = random_case(operator, layout, torch.float32, channels=5)
        expected = case.run("cpu")
        got = case._differentiate(lambda t: compiled(**t, **case.options, layout=layout, backend="cpu"))  # noqa: B023
        for name, value in expected.items():
            assert torch.equal(got[name], value), name


def test_the_kernels_may_be_loaded_first_while_compiling(monkeypatch):
    monkeypatch.setattr(build, "_loaded", {})
    torch._dynamo.reset()
    case = random_case("conv1d_pack", AWKWARD["splits"], torch.float32, states=False)
    fast = torch.compile(ops.conv1d_pack, backend="eager", fullgraph=True)
    y = fast(case.tensors["x"], case.tensors["weight"], layout=case.layout)
    assert torch.equal(y, ops.conv1d_pack(case.tensors["x"], case.tensors["weight"], layout=case.layout))


@both
def test_autocast_leaves_the_operators_to_their_inputs(operator):
    case = random_case(operator, AWKWARD["splits"], torch.float32)
    expected = case.run("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = case.run("cpu")
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@both
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(operator, use_reentrant):
    case = random_case(operator, AWKWARD["splits"], torch.float32, states=False)
    names = list(case.tensors)

    def call(*tensors):
        return getattr(ops, operator)(**dict(zip(names, tensors)), **case.options, layout=case.layout, backend="cpu")

    expected = case.run("cpu")
    tensors = [case.tensors[name].detach().requires_grad_() for name in names]
    y = checkpoint(call, *tensors, use_reentrant=use_reentrant)
    y.backward(case.grad_y)
    for name, tensor in zip(names, tensors):
        assert torch.equal(tensor.grad, expected[f"grad {name}"]), name


@both
def test_gradients_of_the_final_state_alone_and_of_expanded_outputs(operator):
    case = random_case(operator, AWKWARD["splits"], torch.float32)
    tensors = {n: t.detach().requires_grad_() for n, t in case.tensors.items()}
    reference = {n: t.detach().requires_grad_() for n, t in case.tensors.items()}
    for backend, leaves in (("cpu", tensors), ("reference", reference)):
        y, final = getattr(ops, operator)(**leaves, **case.options, layout=case.layout, backend=backend)
        final.sum().backward(retain_graph=True)
        y.sum().backward()
    for name in tensors:
        torch.testing.assert_close(tensors[name].grad, reference[name].grad, rtol=1e-4, atol=1e-4)


@both
def test_no_states_are_kept_where_no_gradient_is_needed(operator):
    case = random_case(operator, AWKWARD["splits"], torch.float32)
    with torch.no_grad():
        y, _ = getattr(ops, operator)(**case.tensors, **case.options, layout=case.layout, backend="cpu")
    assert torch.equal(y, case.run("cpu")["y"])
