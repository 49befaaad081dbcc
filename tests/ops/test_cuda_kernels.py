"""Test what only the CUDA kernels have: the tensor-core path (bfloat16, 16 states), cut documents,
the schedule. Needs a GPU.
"""

import itertools

import pytest
import torch

import operators
from operators import AWKWARD, LONG, PER_TOKEN, TOLERANCES
from packmamba import SequenceLayout, ops
from packmamba.ops import cuda

pytestmark = pytest.mark.gpu

LENGTHS = [1, 7, 8, 9, 127, 128, 129, 2047, 2048, 2049]
EDGES = SequenceLayout.from_lengths([LENGTHS, [31, 32, 33, 63, 64, 65, 300], [1] * 40, []], row_length=6700)
TUNED = AWKWARD | {"edges": EDGES}


def tuned_case(layout, channels=64, dtype=torch.bfloat16, **options):
    return operators.random_case("ssm_pack", layout, dtype, "cuda", channels=channels, d_state=16, **options)


def assert_parity(case, dtype):
    """Against the vectorised reference in float64, which the parity suite holds against the loops."""
    expected = case.in_float64("cuda").run("reference")
    operators.assert_results(case, "cuda", dtype, {name: value.cpu() for name, value in expected.items()})


@pytest.fixture
def cut_early(monkeypatch):
    monkeypatch.setattr(cuda, "SEGMENT", 64)
    monkeypatch.setattr(cuda, "FLOAT_SEGMENT", 64)
    monkeypatch.setattr(cuda, "CUT_SHARE", {"forward": 0.0, "backward": 0.0})


@pytest.mark.parametrize("states", [False, True], ids=["stateless", "states"])
@pytest.mark.parametrize("channels", [64, 66, 30, 128])
@pytest.mark.parametrize("layout", AWKWARD.values(), ids=AWKWARD.keys())
def test_tensor_cores(layout, channels, states):
    assert_parity(tuned_case(layout, channels, states=states), torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "d_state", "channels"),
    [(torch.bfloat16, 16, 64), *itertools.product((torch.float16, torch.float32), (16, 40), (70,))],
)
@pytest.mark.parametrize("states", [False, True], ids=["stateless", "states"])
@pytest.mark.parametrize("layout", [*TUNED.values(), LONG], ids=[*TUNED.keys(), "long"])
def test_cut_documents(layout, states, dtype, d_state, channels, cut_early):
    for direction in cuda.CUT_SHARE:
        plan = cuda.plan(layout.num_slots, layout.shape[1], 64, True, torch.device("cuda"), direction)
        assert plan.cut_length < layout.shape[1] or layout is not LONG
    case = operators.random_case("ssm_pack", layout, dtype, "cuda", channels=channels, d_state=d_state, states=states)
    assert_parity(case, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("d_state", [1, 8, 16, 24, 64, 100, 256])
@pytest.mark.parametrize("layout", [AWKWARD["chunk-edges"], EDGES], ids=["chunk-edges", "edges"])
def test_any_number_of_states(layout, d_state, dtype):
    assert_parity(operators.random_case("ssm_pack", layout, dtype, "cuda", channels=70, d_state=d_state), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("channels", [64, 300, 33])
def test_convolution_on_awkward_lengths(dtype, width, channels):
    case = operators.random_case("conv1d_pack", EDGES, dtype, "cuda", channels=channels, width=width)
    assert_parity(case, dtype)


def test_a_state_may_decay_at_once():
    """A is minus infinity, which a step of zero past a document's end must not meet."""
    case = operators.random_case("ssm_pack", EDGES, torch.float32, "cuda", channels=20, d_state=16)
    with torch.no_grad():
        case.tensors["A"][0, 0] = -torch.inf
    results = case.run("cuda")
    # By the chain rule, gradients of step sizes have zero times infinity.
    of_steps = ("grad delta", "grad delta_bias")
    assert all(value.isfinite().all() for name, value in results.items() if name not in of_steps)


@pytest.mark.parametrize("operator", ["conv1d_pack", "ssm_pack"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_poisoned_document_changes_no_bit_of_another(operator, poison, cut_early):
    layout = SequenceLayout.from_lengths([[3, 1, 9, 40, 130, 2], [70, 8, 33], [], [200]], row_length=210)
    case = operators.random_case(operator, layout, torch.bfloat16, "cuda", channels=64, d_state=16)
    operators.assert_poison_stays(case, "cuda", poison)


@pytest.mark.parametrize("operator", ["conv1d_pack", "ssm_pack"])
def test_padding_is_never_looked_at_in_bfloat16(operator):
    case = operators.random_case(operator, AWKWARD["splits"], torch.bfloat16, "cuda", channels=64, d_state=16)
    operators.assert_padding_is_unseen(case, "cuda", float("nan"))


@pytest.mark.parametrize("operator", ["conv1d_pack", "ssm_pack"])
def test_views_with_odd_offsets_and_rows_of_a_larger_batch(operator):
    layout = SequenceLayout.from_lengths([[5, 9], [14]], row_length=16)
    case = operators.random_case(operator, layout, torch.bfloat16, "cuda", channels=64, d_state=16)
    expected = case.run("cuda")
    for name in PER_TOKEN:
        if name in case.tensors:
            tensor = case.tensors[name]
            room = torch.full((2, 20, tensor.shape[2] + 3), float("nan"), dtype=tensor.dtype, device="cuda")
            room[:, :16, 1:-2] = tensor
            case.tensors[name] = room[:, :16, 1:-2]
    for name, value in case.run("cuda").items():
        assert operators.relative_error(value, expected[name].cpu().double()) <= TOLERANCES[torch.bfloat16][1], name


def test_every_kernel_once(cut_early):
    """Small: what compute-sanitizer runs."""
    layout = SequenceLayout.from_lengths([[3, 1, 40, 130], [70, 8, 33], [], [5]], row_length=180)
    cases = [tuned_case(layout, channels=66, optional=optional, states=optional) for optional in (True, False)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        cases.append(operators.random_case("ssm_pack", layout, dtype, "cuda", channels=20, d_state=24))
        for width, channels in ((2, 8), (3, 8), (4, 8), (4, 5)):
            cases.append(operators.random_case("conv1d_pack", layout, dtype, "cuda", channels=channels, width=width))
    for case in cases:
        assert all(value.isfinite().all() for value in case.run("cuda").values())


def test_the_peers_operators_on_one_document_a_row():
    pytest.importorskip("selective_scan_cuda")
    for lengths, row_length in (([[64], [40]], 64), ([[1]], 1)):
        layout = SequenceLayout.from_lengths(lengths, row_length=row_length)
        for operator in ("ssm_pack", "conv1d_pack"):
            case = operators.random_case(
                operator, layout, torch.bfloat16, "cuda", channels=64, d_state=16, states=False
            )
            theirs = case.run("mamba_ssm")
            for name, value in case.run("cuda").items():
                if value.count_nonzero():
                    assert operators.relative_error(theirs[name], value.cpu().double()) <= 1e-2, name
                else:  # nothing comes before a document's first token, so A does nothing; their sums round
                    assert theirs[name].abs().max() <= torch.finfo(torch.float32).eps, name
    packed = tuned_case(SequenceLayout.from_lengths([[3, 5]], row_length=8), states=False)
    with pytest.raises(ValueError, match="one document per row"):
        packed.run("mamba_ssm")


@pytest.mark.parametrize("operator", ["conv1d_pack", "ssm_pack", "ssd_pack"])
def test_the_host_never_waits(operator, request):
    case = operators.random_case(operator, EDGES, torch.bfloat16, "cuda", channels=64, d_state=16)
    case.run("cuda")
    case.layout = EDGES.to("cuda")
    torch.cuda.synchronize()
    request.addfinalizer(lambda: torch.cuda.set_sync_debug_mode("default"))
    torch.cuda.set_sync_debug_mode("error")
    case.run("cuda")


def spread_out(case, rows, tokens):
    """The same case on views whose strides are so many elements, all in one storage."""
    B, L = case.layout.shape
    room = torch.empty((B - 1) * rows + (L - 1) * tokens + 1024, dtype=torch.bfloat16, device="cuda")
    offset = 0
    for name in PER_TOKEN:
        if name in case.tensors:
            tensor = case.tensors[name]
            case.tensors[name] = room.as_strided(tensor.shape, (rows, tokens, 1), offset).copy_(tensor)
            offset += tensor.shape[2]
    return case


@pytest.mark.large
@pytest.mark.parametrize("operator", ["conv1d_pack", "ssm_pack"])
@pytest.mark.parametrize(
    ("lengths", "row_stride", "token_stride"),
    [([[40, 24], [64]], 2**32 + 2**20, 1024), ([[2, 4]], 0, 2**30 - 8)],
    ids=["rows", "tokens"],
)
def test_strides_that_32_bits_do_not_hold(operator, lengths, row_stride, token_stride):
    layout = SequenceLayout.from_lengths(lengths, row_length=sum(lengths[0]))
    case = operators.random_case(operator, layout, torch.bfloat16, "cuda", channels=64, d_state=16)
    expected = case.run("cuda")
    for name, value in spread_out(case, row_stride, token_stride).run("cuda").items():
        assert operators.relative_error(value, expected[name].cpu().double()) <= TOLERANCES[torch.bfloat16][1], name


@pytest.mark.large
@pytest.mark.parametrize("operator", ["conv1d_pack", "ssm_pack", "ssd_pack"])
def test_more_elements_than_32_bits_count(operator):
    """2**32 and some: the last document, alone and at the end of the row."""
    length, documents, channels = 1024, 1025, 4096
    layout = SequenceLayout.from_lengths([[length] * documents], row_length=length * documents).to("cuda")
    x = torch.empty(1, layout.num_slots, channels, dtype=torch.bfloat16, device="cuda").normal_()
    assert x.numel() > 2**32
    alone = SequenceLayout.from_lengths([[length]], row_length=length).to("cuda")
    if operator == "conv1d_pack":
        weight = torch.randn(channels, 4, device="cuda")

        def run(x, layout):
            return ops.conv1d_pack(x, weight, layout=layout)
    elif operator == "ssd_pack":
        A = -torch.arange(1, 65, device="cuda").float()
        B = torch.randn(1, layout.num_slots, 1, 16, device="cuda").bfloat16()

        def run(x, layout):
            here, heads = B[:, -layout.num_slots :], x.unflatten(2, (64, 64))
            delta = heads[..., 0].contiguous()
            return ops.ssd_pack(heads, delta, A, here, here, delta_softplus=True, layout=layout).flatten(2)
    else:
        A = -torch.arange(1, 17, device="cuda").float().repeat(channels, 1)
        B = torch.randn(1, layout.num_slots, 16, device="cuda").bfloat16()

        def run(x, layout):
            here = B[:, -layout.num_slots :]
            return ops.ssm_pack(x, x, A, here, here, delta_softplus=True, layout=layout)

    results = []
    for part, of in ((x, layout), (x[:, -length:].clone(), alone)):
        part.requires_grad_()
        y = run(part, of)
        (dx,) = torch.autograd.grad(y, part, y)
        results.append([t[:, -length:].double().cpu() for t in (y.detach(), dx)])
        del y, dx
    for found, expected, tolerance in zip(*results, TOLERANCES[torch.bfloat16]):
        assert found.isfinite().all() and operators.relative_error(found, expected) <= tolerance


def own_tensors(operator, lengths, row_length, channels=1536, states=False, dtype=torch.bfloat16):
    """Return for each document its outputs, final state and the gradients of its own tensors.

    lengths: rows of (tokens, seed): a document's tensors are drawn from its seed, from token 0 on,
    whatever stands beside it.
    """
    tokens = [[n for n, _ in row] for row in lengths]
    layout = SequenceLayout.from_lengths(tokens, row_length).to("cuda")
    spans = list(zip(layout.starts.tolist(), layout.ends.tolist(), layout.offsets.tolist(), strict=True))
    seeds = [seed for row in lengths for _, seed in row]

    def normal(seed, *shape):
        return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")

    def activations(number, *width):
        flat = torch.full((len(tokens) * row_length, *width), torch.nan, dtype=dtype, device="cuda")
        for (start, end, offset), seed in zip(spans, seeds, strict=True):
            flat[start:end] = normal(10 * seed + number, offset + end - start, *width)[offset:]
        return flat.view(len(tokens), row_length, *width)

    def states_of(number, *shape):
        return torch.stack([normal(10 * seed + number, *shape) for seed in seeds])

    if operator == "ssm_pack":
        own = {"u": channels, "delta": channels, "B": 16, "C": 16, "z": channels}
        A = -torch.arange(1, 17, device="cuda").float().repeat(channels, 1) * normal(1, channels, 1).exp()
        shared = {"A": A, "D": normal(2, channels), "delta_bias": normal(3, channels) - 3}
        options, shape = {"delta_softplus": True}, (channels, 16)
    elif operator == "ssd_pack":
        heads = channels = (channels // 512, 64)
        own = {"x": heads, "delta": heads[:1], "B": (1, 128), "C": (1, 128), "z": heads}
        shared = {"A": -normal(1, heads[0]).exp(), "D": normal(2, heads[0]), "delta_bias": normal(3, heads[0]) - 3}
        options, shape = {"delta_softplus": True}, (*heads, 128)
    else:
        own, shared = {"x": channels}, {"weight": normal(1, channels, 4), "bias": normal(2, channels)}
        options, shape = {"activation": "silu"}, (channels, 3)
    own = {name: width if isinstance(width, tuple) else (width,) for name, width in own.items()}
    channels = channels if isinstance(channels, tuple) else (channels,)
    tensors = {name: activations(i, *width).requires_grad_() for i, (name, width) in enumerate(own.items())}
    if states:
        tensors["initial_state"] = states_of(7, *shape).requires_grad_()
    y, final = getattr(ops, operator)(**tensors, **shared, **options, layout=layout, return_final_state=True)
    outputs, grads = [y], [activations(8, *channels)]
    if states:
        outputs, grads = [y, final], [*grads, states_of(9, *shape)]
    gradients = torch.autograd.grad(outputs, list(tensors.values()), grads)
    per_token = {"y": y.detach()} | {f"grad of {name}": g for name, g in zip(tensors, gradients) if name in own}
    per_document = {"final_state": final.detach()} | ({"grad of initial_state": gradients[-1]} if states else {})
    return [
        {name: value.flatten(0, 1)[start:end] for name, value in per_token.items()}
        | {name: value[i] for name, value in per_document.items()}
        for i, (start, end, _) in enumerate(spans)
    ]


NEIGHBOURS = {
    "first of short ones": lambda n: ([[n] + [600] * ((65536 - n) // 600)], 0),
    "last of short ones": lambda n: ([[600] * ((65536 - n) // 600) + [n]], (65536 - n) // 600),
    "among long ones": lambda n: ([[16000, n, 7001], [30000, 10001]], 1),
    "in a row of its own": lambda n: ([[3000, 3000], [n], [33000]], 2),
}


def assert_no_neighbour_moves_a_bit(operator, length, **options):
    alone = own_tensors(operator, [[(length, 7)]], length, **options)[0]
    for name, neighbours in NEIGHBOURS.items():
        lengths, at = neighbours(length)
        numbered = iter(range(100, 1000))
        flat = [(n, next(numbered)) for row in lengths for n in row]
        flat[at] = (length, 7)
        rows = [[flat.pop(0) for _ in row] for row in lengths]
        for key, value in own_tensors(operator, rows, 65536, **options)[at].items():
            assert torch.equal(value, alone[key]), (name, key)


@pytest.mark.parametrize("operator", ["ssm_pack", "ssd_pack", "conv1d_pack"])
@pytest.mark.parametrize("states", [False, True], ids=["stateless", "states"])
@pytest.mark.parametrize("channels", [1536, 4096])
@pytest.mark.parametrize("length", [1, 300, 512, 1024, 2048, 4096, 8192, 16384, 32768])
def test_a_documents_bits_whatever_stands_beside_it(length, channels, states, operator):
    """Hold that no cut of a long document depends on the rest of the batch."""
    assert_no_neighbour_moves_a_bit(operator, length, channels=channels, states=states)


@pytest.mark.parametrize("states", [False, True], ids=["stateless", "states"])
@pytest.mark.parametrize("length", [1, 511, 512, 513, 1025, 4096, 16384])
def test_a_documents_bits_in_float32(length, states):
    assert_no_neighbour_moves_a_bit("ssm_pack", length, channels=1536, states=states, dtype=torch.float32)


@pytest.mark.parametrize(
    ("operator", "channels", "begin", "at"),
    [
        *(("ssm_pack", channels, 0, at) for channels in (256, 4096) for at in (1024, 4096, 10240)),
        *(("ssd_pack", 256, 37, at) for at in (2048, 6144)),
    ],
)
def test_a_pass_split_where_states_are_combined_is_one_pass(operator, channels, begin, at):
    """Bits, gradients through the state among them; of ssd_pack the first pass begins inside a
    segment.
    """
    end, generator = at + 3000, torch.Generator("cuda").manual_seed(0)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    if operator == "ssm_pack":
        widths, shape = ((channels,), (channels,), (16,), (16,), (channels,)), (channels, 16)
        A, skip = -torch.arange(1, 17, device="cuda").float().repeat(channels, 1), channels
    else:
        skip = heads = channels // 64
        widths, shape = ((heads, 64), (heads,), (1, 128), (1, 128), (heads, 64)), (heads, 64, 128)
        A = -normal(heads, dtype=torch.float32).exp()
    wide = [normal(1, end, *width).requires_grad_() for width in widths]
    rest = {"D": normal(skip, dtype=torch.float32), "delta_softplus": True, "return_final_state": True}
    start = normal(1, *shape, dtype=torch.float32).requires_grad_()
    grads = [normal(1, end - begin, *widths[0]), normal(1, *shape, dtype=torch.float32)]

    def scan(first, last, state):
        layout = SequenceLayout.from_lengths([[last - first]], last - first, [[first]]).to("cuda")
        x, delta, B, C, z = (tensor[:, first:last] for tensor in wide)
        return getattr(ops, operator)(x, delta - 2, A, B, C, z=z, layout=layout, initial_state=state, **rest)

    y, final = scan(begin, end, start)
    one = [y, final, *torch.autograd.grad([y, final], [*wide, start], grads)]
    y, state = scan(begin, at, start)
    more, final = scan(at, end, state)
    y = torch.cat([y, more], 1)
    two = [y, final, *torch.autograd.grad([y, final], [*wide, start], grads)]
    torch.testing.assert_close(one, two, rtol=0, atol=0)
