"""One suite for every backend: held against the loops over documents, never against another fast
path.
"""

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import operators
from operators import AWKWARD, BACKENDS, LONG, PER_TOKEN, TOLERANCES, every_backend, every_operator, layouts, on
from packmamba import SequenceLayout, ops

random_case = operators.random_case
# A multiple of the tokens that ssd_pack's states are carried over: a chunk's, and on a GPU a
# segment's.
CUTS = {"reference": 192, "cpu": 192, "cuda": 2048}
LAYOUTS = AWKWARD | {"long": LONG}
SMALL = SequenceLayout.from_lengths([[1, 3], [4], []], row_length=5, offsets=[[5, 0], [0], []])
backend_and_dtype = pytest.mark.parametrize(
    ("backend", "dtype"),
    [on(b, d, id=f"{b}-{str(d).removeprefix('torch.')}") for b in BACKENDS for d in operators.dtypes_of(b)],
)


@functools.lru_cache(maxsize=16)
def specified(operator, layout, dtype, **options):
    """By the loops, once for all backends: they take most of this file's time."""
    return random_case(operator, LAYOUTS[layout], dtype, **options).specification()


def assert_all_parity(operator, layout, dtype, backend, **options):
    case = random_case(operator, LAYOUTS[layout], dtype, operators.device_of(backend), **options)
    operators.assert_results(case, backend, dtype, specified(operator, layout, dtype, **options))


@every_operator
@backend_and_dtype
@pytest.mark.parametrize("layout", AWKWARD)
@pytest.mark.parametrize("states", [False, True], ids=["stateless", "states"])
def test_awkward_layouts(operator, backend, dtype, layout, states):
    assert_all_parity(operator, layout, dtype, backend, channels=7, states=states)


@every_operator
@every_backend
def test_rows_of_padding_only(operator, backend):
    empty = SequenceLayout.from_lengths([[], []], row_length=3)
    case = random_case(operator, empty, torch.float32, operators.device_of(backend))
    for name, value in case.run(backend).items():
        assert (value == 0).all(), name


@every_operator
@backend_and_dtype
def test_optional_arguments_absent(operator, backend, dtype):
    assert_all_parity(operator, "splits", dtype, backend, optional=False)


@pytest.mark.parametrize("number", [30, pytest.param(200, marks=pytest.mark.slow)])
@every_operator
@every_backend
def test_random_layouts(operator, backend, number):
    @given(data=st.data())
    @settings(max_examples=number)
    def check(data):
        layout = data.draw(layouts().filter(lambda layout: layout.num_documents))
        options = {"channels": st.integers(1, 40), "seed": st.integers(0, 99), "optional": st.booleans()}
        options |= {"states": st.booleans(), "d_state": st.sampled_from([1, 3, 16]), "width": st.integers(2, 4)}
        drawn = data.draw(st.fixed_dictionaries(options))
        case = random_case(operator, layout, dtype, operators.device_of(backend), **drawn)
        operators.assert_results(case, backend, dtype, case.specification())

    dtype = torch.float32 if backend == "cuda" else torch.float64
    check()


@pytest.mark.slow
@every_operator
@every_backend
def test_long_documents(operator, backend):
    assert_all_parity(operator, "long", torch.float32, backend, channels=2, d_state=2)


@backend_and_dtype
def test_float32_convolution_parameters_beside_any_activations(backend, dtype):
    layout, wide = AWKWARD["splits"], torch.float32
    case = random_case("conv1d_pack", layout, dtype, operators.device_of(backend), parameter_dtype=wide, width=3)
    assert case.run(backend)["final_state"].dtype == torch.float32
    operators.assert_results(case, backend, dtype, case.specification())


@every_operator
def test_gradcheck_of_every_input(operator):
    """Of the loops, whose gradients the backends are held to in float64."""
    case = random_case(operator, SMALL, torch.float64, channels=2, d_state=2, headdim=2)
    names = list(case.tensors)

    def function(*tensors):
        return case.loops(dict(zip(names, tensors)))

    assert torch.autograd.gradcheck(function, [case.tensors[name].detach().requires_grad_() for name in names])


# Poison has more ways through where no initial state is put in the place of what came before.
with_and_without_states = pytest.mark.parametrize("states", [False, True], ids=["stateless", "states"])


@every_operator
@every_backend
@with_and_without_states
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), pytest.param(float("-inf"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", AWKWARD.values(), ids=AWKWARD.keys())
def test_a_poisoned_document_changes_no_bit_of_another(operator, backend, states, poison, layout):
    case = random_case(operator, layout, torch.float32, operators.device_of(backend), states=states)
    operators.assert_poison_stays(case, backend, poison)


@every_operator
@every_backend
@with_and_without_states
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_padding_is_never_looked_at(operator, backend, states, poison):
    case = random_case(operator, AWKWARD["splits"], torch.float32, operators.device_of(backend), states=states)
    operators.assert_padding_is_unseen(case, backend, poison)


@every_operator
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        *(on(backend, LONG, id=f"{backend}-long") for backend in BACKENDS if backend != "reference"),
        pytest.param("reference", LONG, id="reference-long", marks=pytest.mark.slow),
        pytest.param("reference", AWKWARD["chunk-edges"], id="reference-chunk-edges"),
    ],
)
def test_the_same_bits_twice(operator, backend, layout):
    case = random_case(operator, layout, torch.float32, operators.device_of(backend), channels=3)
    torch.testing.assert_close(case.run(backend), case.run(backend), rtol=0, atol=0)


@every_operator
@every_backend
def test_a_document_cut_in_two_with_its_state_is_the_whole(operator, backend):
    whole = SequenceLayout.from_lengths([[2, 9], [7]], row_length=13)
    first = SequenceLayout.from_lengths([[2, 1], [5]], row_length=5)
    second = SequenceLayout.from_lengths([[8], [2]], row_length=8, offsets=[[1], [5]])
    case = random_case(operator, whole, torch.float32, operators.device_of(backend), states=False)
    case.options["return_final_state"] = True

    def call(layout, columns, **extra):
        tensors = dict(case.tensors)
        for name in tensors.keys() & set(PER_TOKEN):
            tensors[name] = torch.stack([row[c : c + layout.shape[1]] for row, c in zip(tensors[name], columns)])
        options = case.options | extra | {"layout": layout.to(operators.device_of(backend)), "backend": backend}
        return getattr(ops, operator)(**tensors, **options)

    y, final = call(whole, [0, 0])
    y1, state = call(first, [0, 0])
    y2, end = call(second, [3, 5], initial_state=state[1:].contiguous())
    forward = TOLERANCES[torch.float32][0]
    assert operators.relative_error(torch.cat([y1[0, :3], y2[0, :8]]), y[0, :11].cpu().double()) <= forward
    assert operators.relative_error(torch.cat([y1[1, :5], y2[1, :2]]), y[1, :7].cpu().double()) <= forward
    assert operators.relative_error(end, final[1:].cpu().double()) <= forward


@every_operator
@every_backend
def test_no_layout_means_each_row_is_a_document(operator, backend):
    layout = SequenceLayout.from_rows(3, 11)
    case = random_case(operator, layout, torch.float32, operators.device_of(backend), states=False)
    expected = case.run(backend)["y"]
    assert torch.equal(getattr(ops, operator)(**case.tensors, **case.options, backend=backend), expected)
    assert torch.equal(getattr(ops, operator)(**case.tensors, **case.options, layout=None, backend=backend), expected)


@every_operator
@pytest.mark.parametrize("backend", [on("cpu"), on("cuda")])
@pytest.mark.parametrize(
    ("lengths", "first"),
    [([[63, 1, 130], [65, 100]], 70), ([[1, 2, 16, 17, 5, 1, 1], [64, 1, 15, 33]], 127)],
    ids=["long", "short"],
)
@pytest.mark.parametrize(("channels", "d_state"), [(5, 4), (3, 7), (2, 64)])
def test_a_document_has_the_same_bits_alone(operator, backend, channels, d_state, lengths, first):
    """Whatever its neighbours' lengths and its place: also where products of matrices round by how
    these lie in memory.
    """
    device = operators.device_of(backend)
    offsets = [[first, *[0] * len(lengths[0][1:])], [0] * len(lengths[1])]
    layout = SequenceLayout.from_lengths(lengths, row_length=200, offsets=offsets)
    case = random_case(operator, layout, torch.float32, device, channels=channels, d_state=d_state, headdim=7)
    together = case.run(backend)
    for s, (start, end, offset) in enumerate(zip(layout.starts, layout.ends, layout.offsets)):
        alone = copy.copy(case)
        length = int(end - start)
        alone.layout = SequenceLayout.from_lengths([[length]], length, offsets=[[int(offset)]]).to(device)
        alone.tensors = case.tensors | {"initial_state": case.tensors["initial_state"][s : s + 1]}
        for name in alone.tensors.keys() & set(PER_TOKEN):
            alone.tensors[name] = case.tensors[name].flatten(0, 1)[start:end][None]
        alone.grad_y, alone.grad_final = case.grad_y.flatten(0, 1)[start:end][None], case.grad_final[s : s + 1]
        expected = dict(operators.documents_of(case, together, s))
        for name, value in operators.documents_of(alone, alone.run(backend), 0):
            assert torch.equal(value, expected[name]), (name, s)


@every_backend
@pytest.mark.parametrize("begin", [0, 37])
def test_a_pass_cut_between_chunks_has_the_bits_of_one_pass(backend, begin):
    """Chunks (segments on a GPU) end at multiples of a constant from a document's token 0, also in
    a pass that begins later.
    """
    device, cut = operators.device_of(backend), CUTS[backend]
    length = cut + 70
    layout = SequenceLayout.from_lengths([[length]], length)
    case = random_case("ssd_pack", layout, torch.float32, device, channels=4, d_state=16, states=False)
    case.options["return_final_state"] = True

    def call(a, b, state=None):
        tensors = {name: t[:, a:b] if name in PER_TOKEN else t for name, t in case.tensors.items()}
        place = SequenceLayout.from_lengths([[b - a]], b - a, offsets=[[a]]).to(device)
        return ops.ssd_pack(**tensors, **case.options, layout=place, initial_state=state, backend=backend)

    y, final = call(begin, length)
    first, state = call(begin, cut)
    second, end = call(cut, length, state)
    assert torch.equal(torch.cat([first, second], 1), y) and torch.equal(end, final)


@every_backend
@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_step_sizes_may_be_float32_beside_narrower_activations(backend, dtype, optional):
    """Of ssd_pack, as Mamba-3 calls it: a decay then keeps bits which the activations' dtype has
    not.
    """
    case = random_case("ssd_pack", AWKWARD["chunk-edges"], dtype, operators.device_of(backend), optional=optional)
    rounded = case.tensors["delta"]
    case.tensors["delta"] = rounded.float() * (1 + 1e-3 * torch.rand_like(rounded.float()))
    expected = case.specification()
    operators.assert_results(case, backend, dtype, expected)
    assert case.run(backend)["grad delta"].dtype == torch.float32
    case.tensors["delta"] = rounded
    assert operators.relative_error(case.run(backend)["final_state"], expected["final_state"]) > 1e-5


def test_heads_of_one_channel_may_lie_apart():
    """Of ssd_pack: joined with its head such a channel has another stride."""
    x = torch.randn(2, 6, 4, 2)[..., :1]
    rest = (torch.randn(2, 6, 4), -torch.rand(4), torch.randn(2, 6, 1, 3), torch.randn(2, 6, 1, 3))
    y = ops.ssd_pack(x, *rest, z=x, backend="cpu")
    assert torch.equal(y, ops.ssd_pack(x.contiguous(), *rest, z=x.contiguous(), backend="cpu"))
