"""The operators as PyTorch sees them: schemas, fakes and autograd that agree, one graph for every
layout.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from models import LAYERS, one_mixer_slowly
from operators import AWKWARD, SPECIFICATIONS, every_operator, random_case
from packmamba import SequenceLayout, ops


def arguments_of(case):
    """The custom operator's positional arguments."""
    names = SPECIFICATIONS[case.operator][0]._fields
    tensors = {n: v.clone().requires_grad_() for n, v in case.tensors.items()}
    given = dict.fromkeys(names) | tensors | case.options
    places = {"layout": (case.layout.starts, case.layout.ends)}
    return (*(v for n in names for v in places.get(n, (given[n],))), True)


@pytest.mark.parametrize(
    ("operator", "device"),
    [("conv1d_pack", "cpu"), ("ssm_pack", "cpu"), pytest.param("ssd_pack", "cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("optional", [False, True], ids=["plain", "optional"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_opcheck(operator, device, optional, dtype):
    given = {"optional": optional, "states": optional, "parameter_dtype": torch.float32}
    case = random_case(operator, AWKWARD["splits"], dtype, device, **given)
    torch.library.opcheck(getattr(torch.ops.packmamba, operator).default, arguments_of(case))


@one_mixer_slowly
def test_one_graph_for_every_layout(mixer):
    torch.manual_seed(0)
    layer = LAYERS[mixer](d_model=16, d_state=4)
    graphs = CompileCounter()
    torch._dynamo.reset()
    fast = torch.compile(layer, backend=graphs, fullgraph=True)
    parameters = list(layer.parameters())
    for cut in range(1, 48):  # two documents to a row's 48, and padding
        layout = SequenceLayout.from_lengths([[1] * cut, [cut, 48 - cut]], row_length=48)
        x = torch.randn(2, 48, 16)
        got, expected = fast(x, layout=layout), layer(x, layout=layout)
        assert torch.equal(got, expected)
        for a, b in zip(torch.autograd.grad(got.sum(), parameters), torch.autograd.grad(expected.sum(), parameters)):
            assert torch.equal(a, b)
    assert graphs.frame_count <= 3, "the first compilation and at most two more"


@every_operator
def test_derivatives_that_kernels_lack_are_refused(operator):
    """Never a gradient that is silently zero."""
    case = random_case(operator, AWKWARD["splits"], torch.float64)
    first, *others = (tensor.requires_grad_() for tensor in case.tensors.values())
    names, function = list(case.tensors), getattr(ops, operator)

    def call(*tensors):
        return function(**dict(zip(names, tensors)), **case.options, layout=case.layout, backend="cpu")[0]

    (kept,) = torch.autograd.grad(call(first, *others).square().sum(), first, create_graph=True)
    (once,) = torch.autograd.grad(call(first, *others).square().sum(), first)
    assert torch.equal(kept, once) and kept.requires_grad
    with pytest.raises(RuntimeError, match=f"{operator}: compiled kernels have no second derivatives"):
        torch.autograd.grad(kept.square().sum() + first.sum(), first)
    with pytest.raises(RuntimeError, match=f"{operator}: compiled kernels have no forward-mode derivatives"):
        torch.func.jvp(lambda x: call(x, *(t.detach() for t in others)), (first.detach(),), (first.detach(),))


@every_operator
def test_a_layout_written_to_before_the_backward_is_refused(operator):
    case = random_case(operator, SequenceLayout.from_lengths([[3, 4]], row_length=7), torch.float32, states=False)
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in case.tensors.items()}
    y = getattr(ops, operator)(**tensors, **case.options, layout=case.layout)
    case.layout.starts.copy_(case.layout.starts.clone())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
