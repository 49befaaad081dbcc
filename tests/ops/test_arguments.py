"""Test the operators' errors, dtypes, strides and graphs."""

import pytest
import torch

from operators import OPERATORS, PER_TOKEN, device_of, dtypes_of, every_backend, every_operator, random_case
from packmamba import SequenceLayout, ops
from packmamba.ops.checks import accumulation_dtype

# B 2, L 7, D 5, N 4, W 4, S 4.
LAYOUT = SequenceLayout.from_lengths([[3, 1, 2], [5]], row_length=7, offsets=[[4, 0, 0], [0]])
OTHER = SequenceLayout.from_lengths([[3, 1, 2], [5]], row_length=8)


def off_stride(tensor):
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


REFUSALS = [
    ("conv1d_pack", "x", torch.Tensor.tolist, TypeError),
    ("conv1d_pack", "x", lambda x: x[0], ValueError),
    ("conv1d_pack", "x", lambda x: x[:, :0], ValueError),
    ("conv1d_pack", "x", torch.Tensor.int, TypeError),
    ("conv1d_pack", "x", off_stride, ValueError),
    ("conv1d_pack", "weight", lambda w: None, TypeError),
    ("conv1d_pack", "weight", lambda w: w[:, :1], ValueError),
    ("conv1d_pack", "weight", lambda w: w[:3], ValueError),
    ("conv1d_pack", "weight", torch.Tensor.double, TypeError),
    ("conv1d_pack", "weight", lambda w: w.to("meta"), ValueError),
    ("conv1d_pack", "bias", lambda b: b[:1], ValueError),
    ("conv1d_pack", "initial_state", lambda s: s[1:], ValueError),
    ("conv1d_pack", "initial_state", torch.Tensor.half, TypeError),
    ("conv1d_pack", "activation", lambda a: "relu", ValueError),
    ("ssm_pack", "u", torch.Tensor.bool, TypeError),
    ("ssm_pack", "delta", lambda d: d[..., :1], ValueError),
    ("ssm_pack", "delta", off_stride, ValueError),
    ("ssm_pack", "A", lambda A: A[0], ValueError),
    ("ssm_pack", "A", lambda A: A[:, :1].repeat(1, 257), ValueError),
    ("ssm_pack", "A", torch.Tensor.bfloat16, TypeError),
    ("ssm_pack", "initial_state", torch.Tensor.double, TypeError),
    ("ssm_pack", "B", lambda B: B[:, 1:], ValueError),
    ("ssm_pack", "C", lambda C: C[:1], ValueError),
    ("ssm_pack", "D", lambda D: D[:, None], ValueError),
    ("ssm_pack", "z", off_stride, ValueError),
    ("ssm_pack", "delta_bias", lambda b: b[:2], ValueError),
    ("ssm_pack", "delta_softplus", lambda _: "yes", TypeError),
    ("ssm_pack", "initial_state", lambda h: h[0], ValueError),
    ("ssd_pack", "x", lambda x: x.flatten(2), ValueError),
    ("ssd_pack", "x", torch.Tensor.int, TypeError),
    ("ssd_pack", "delta", lambda d: d[..., :1], ValueError),
    ("ssd_pack", "delta", torch.Tensor.double, TypeError),
    ("ssd_pack", "A", lambda A: A[:, None], ValueError),
    ("ssd_pack", "A", torch.Tensor.bfloat16, TypeError),
    ("ssd_pack", "B", lambda B: B[..., 0], ValueError),
    ("ssd_pack", "B", lambda B: B.repeat(1, 1, 2, 1), ValueError),
    ("ssd_pack", "B", lambda B: B.repeat(1, 1, 1, 65), ValueError),
    ("ssd_pack", "C", lambda C: C[..., :1], ValueError),
    ("ssd_pack", "D", lambda D: D[:2], ValueError),
    ("ssd_pack", "D", lambda D: D.sum(), ValueError),
    ("ssd_pack", "z", lambda z: z.mT.contiguous().mT, ValueError),
    ("ssd_pack", "delta_bias", lambda b: b.double(), TypeError),
    ("ssd_pack", "delta_limit", lambda _: (1.0, 0.5), ValueError),
    ("ssd_pack", "delta_limit", lambda _: 0.1, ValueError),
    ("ssd_pack", "initial_state", lambda h: h.mT, ValueError),
    *(
        (operator, *refusal)
        for operator in OPERATORS
        for refusal in (
            ("layout", lambda _: LAYOUT.seq_idx, TypeError),
            ("layout", lambda _: OTHER, ValueError),
            ("layout", lambda _: LAYOUT.to("meta"), ValueError),
            ("backend", lambda _: "triton", ValueError),
            ("backend", lambda _: "cuda", ValueError),
        )
    ),
]


def arguments(operator, dtype=torch.float32, device="cpu"):
    case = random_case(operator, LAYOUT, dtype, device)
    return case.tensors | case.options | {"layout": case.layout}


@pytest.mark.parametrize(("operator", "name", "change", "error"), REFUSALS)
def test_errors_name_the_argument(operator, name, change, error):
    good = arguments(operator)
    with pytest.raises(error, match=f"^{name}: "):
        getattr(ops, operator)(**good | {name: change(good.get(name))})


@every_backend
def test_dtypes_and_shapes_of_what_comes_back(backend):
    for dtype in dtypes_of(backend):
        wide = accumulation_dtype(dtype)
        for operator, shape, state_shape, state_dtypes, without in (
            ("ssm_pack", (2, 7, 5), (4, 5, 4), [wide], wide),
            ("ssd_pack", (2, 7, 5, 3), (4, 5, 3, 4), [wide], wide),
            ("conv1d_pack", (2, 7, 5), (4, 5, 3), [dtype, torch.float32], dtype),
        ):
            given = arguments(operator, dtype, device_of(backend)) | {"backend": backend}
            for initial in (*map(given["initial_state"].to, state_dtypes), None):
                y, final = getattr(ops, operator)(**given | {"initial_state": initial})
                assert (y.dtype, y.shape, final.shape) == (dtype, shape, state_shape)
                assert final.dtype == (without if initial is None else initial.dtype)
    for operator in OPERATORS:
        given = arguments(operator, device=device_of(backend)) | {"return_final_state": False, "backend": backend}
        assert isinstance(getattr(ops, operator)(**given), torch.Tensor)


@every_operator
@every_backend
def test_neither_row_strides_nor_offsets_change_a_bit(operator, backend):
    case = random_case(operator, LAYOUT, torch.float32, device_of(backend))
    expected = case.run(backend)
    for name in case.tensors.keys() & set(PER_TOKEN):
        tensor = case.tensors[name]
        wider = torch.full((14, 2, 30), float("nan"), device=device_of(backend))
        view = wider.transpose(0, 1)[:, ::2, 3 : 3 + tensor[0, 0].numel()]
        case.tensors[name] = view.unflatten(2, tensor.shape[2:]).copy_(tensor)
    torch.testing.assert_close(case.run(backend), expected, rtol=0, atol=0)
    # Documents start from the state that is given, whatever ``continues`` says.
    lengths = [[3, 1, 2], [5]]
    case.layout = SequenceLayout.from_lengths(lengths, row_length=7, offsets=[[0, 9, 9], [9]]).to(device_of(backend))
    torch.testing.assert_close(case.run(backend), expected, rtol=0, atol=0)


@pytest.mark.parametrize("operator", ["ssm_pack", "ssd_pack"])
@every_backend
def test_autocast_rounds_nothing_inside(operator, backend):
    device = device_of(backend)
    case = random_case(operator, LAYOUT, torch.float32, device, optional=False)
    expected = case.run(backend)
    with torch.autocast(device, dtype=torch.bfloat16):
        results = case.run(backend)
    # Autograd's own products, which autocast rounds inside its region.
    if (operator, backend) == ("ssd_pack", "reference"):
        expected = {name: value for name, value in expected.items() if not name.startswith("grad")}
    assert all(torch.equal(results[name], value) for name, value in expected.items())


@every_operator
@every_backend
@pytest.mark.parametrize("used", ["y", "final_state"])
def test_gradients_through_one_output_alone(operator, backend, used):
    case = random_case(operator, LAYOUT, torch.float32, device_of(backend))
    (case.grad_final if used == "y" else case.grad_y).zero_()
    expected = case.run(backend)
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in case.tensors.items()}
    y, final = getattr(ops, operator)(**tensors, **case.options, layout=case.layout, backend=backend)
    output, grad = (y, case.grad_y) if used == "y" else (final, case.grad_final)
    for name, tensor in tensors.items():
        (gradient,) = torch.autograd.grad(output, tensor, grad, retain_graph=True, allow_unused=True)
        gradient = torch.zeros_like(tensor) if gradient is None else gradient
        assert torch.equal(gradient, expected[f"grad {name}"]), name
