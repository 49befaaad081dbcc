"""Test what only the Triton kernels of ssd_pack have: tiles of any size, descriptors, segments,
plans. Needs a GPU.
"""

import functools

import pytest
import torch
import torch.utils.checkpoint

from operators import PER_TOKEN, assert_padding_is_unseen, assert_poison_stays, assert_results, random_case
from packmamba import SequenceLayout, ops
from packmamba.training.cuda_graphs import ABSENT

pytestmark = pytest.mark.gpu

# Documents of several segments and of one, chunks of one block and of two; continuations inside a
# segment and at its start.
LENGTHS = [[4200, 1, 64, 65], [300, 129, 128, 2049], [], [2100]]
LAYOUT = SequenceLayout.from_lengths(LENGTHS, 4400, [[130, 0, 0, 0], [70, 0, 0, 0], [], [2048]])
SHORT = SequenceLayout.from_lengths([[3, 1, 40, 130], [170, 8, 33], [], [200]], 220)
SIZES = [(3, 64, 128), (4, 64, 64), (36, 32, 16), (2, 128, 128)]
SIZES += [(4, 64, 256), (2, 128, 256), (2, 48, 100), (70, 16, 32)]
SIZES = [dict(zip(("channels", "headdim", "d_state"), size)) for size in SIZES]


# Those of float32 with many states and channels take minutes to compile.
TILES = [(size, dtype) for size in SIZES for dtype in (torch.bfloat16, torch.float16)]
TILES += [(size, torch.float32) for size in SIZES if size["d_state"] <= 128]
TILES += [(SIZES[4], torch.float32)]


def assert_parity(case, dtype):
    """Against the CPU's kernels in float64, which the parity suite holds against the loops."""
    assert_results(case, "cuda", dtype, case.in_float64("cpu").run("cpu"))


@pytest.mark.parametrize("optional", [False, True], ids=["plain", "optional"])
@pytest.mark.parametrize(
    ("size", "dtype"), TILES, ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None
)
def test_tiles(size, dtype, optional):
    given = {"optional": optional, "states": optional, "seed": int(optional)}
    assert_parity(random_case("ssd_pack", LAYOUT, dtype, "cuda", **given, **size), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("states", [False, True], ids=["stateless", "states"])
def test_poison(dtype, poison, states):
    case = random_case("ssd_pack", SHORT, dtype, "cuda", channels=2, headdim=64, d_state=64, states=states)
    assert_poison_stays(case, "cuda", poison)
    assert_padding_is_unseen(case, "cuda", poison)


def test_descriptors_and_pointers_have_the_same_bits():
    """Strides that are no multiples of 16 bytes take the other way to memory."""
    case = random_case("ssd_pack", SHORT, torch.bfloat16, "cuda", channels=2, headdim=64, d_state=64)
    expected = case.run("cuda")
    for name in PER_TOKEN:
        if name in case.tensors and name != "delta":
            tensor = case.tensors[name]
            rows, length, heads, width = tensor.shape
            room = torch.full((rows, length + 4, heads, width + 3), torch.nan, dtype=tensor.dtype, device="cuda")
            room[:, :length, :, 1:-2] = tensor
            case.tensors[name] = room[:, :length, :, 1:-2]
    torch.testing.assert_close(case.run("cuda"), expected, rtol=0, atol=0)


def test_a_graph_is_replayed_with_other_documents():
    """The plan is made in the graph: its documents' number is that of the capture, absent ones are
    empty.
    """
    row_length, documents = 3000, 9
    case = random_case("ssd_pack", LAYOUT, torch.bfloat16, "cuda", channels=2, headdim=64, d_state=64, states=False)
    per_token = {
        name: tensor[:2, :row_length].detach().requires_grad_()
        for name, tensor in case.tensors.items()
        if name in PER_TOKEN
    }
    rest = {name: tensor for name, tensor in case.tensors.items() if name not in PER_TOKEN}
    options = case.options | {"return_final_state": False}
    grad = case.grad_y[:2, :row_length].contiguous()
    starts, ends, offsets = (torch.zeros(documents, dtype=torch.int32, device="cuda") for _ in range(3))
    static = SequenceLayout((2, row_length), starts, ends, offsets, num_tokens=0, longest=row_length)

    def fill(layout):
        for tensor, values in ((starts, layout.starts), (ends, layout.ends)):
            tensor.fill_(ABSENT)
            tensor[: len(values)].copy_(values)

    def step(layout):
        y = ops.ssd_pack(**per_token, **rest, **options, layout=layout)
        return [y, *torch.autograd.grad(y, list(per_token.values()), grad)]

    lengths = ([[2500, 3], [64, 65, 1]], [[1] * 5, [2049, 7, 900]], [[3000], [3000]])
    layouts = [SequenceLayout.from_lengths(rows, row_length).to("cuda") for rows in lengths]
    fill(layouts[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(static)
    for layout in layouts:
        fill(layout)
        graph.replay()
        torch.testing.assert_close(outputs, step(layout), rtol=0, atol=0)


def test_compiled_and_checkpointed_calls_have_the_bits_of_eager_ones():
    case = random_case("ssd_pack", SHORT, torch.bfloat16, "cuda", channels=2, headdim=64, d_state=64)
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in case.tensors.items()}

    def call(*values):
        y, final = ops.ssd_pack(**dict(zip(tensors, values)), **case.options, layout=case.layout)
        return y, final

    def results(function):
        y, final = function(*tensors.values())
        gradients = torch.autograd.grad([y, final], list(tensors.values()), [case.grad_y, case.grad_final])
        # Sums over chunks (of A, D and the bias) have the order of a grid, which knows fewer bounds
        # when traced.
        return [y, final, *(g for name, g in zip(tensors, gradients) if name in PER_TOKEN)]

    expected = results(call)
    checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, call, use_reentrant=False)
    for function in (torch.compile(call, fullgraph=True), checkpointed):
        torch.testing.assert_close(results(function), expected, rtol=0, atol=0)
