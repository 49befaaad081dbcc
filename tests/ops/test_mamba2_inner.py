"""Test Mamba-2's block between its projections on a GPU, beside the composition in float64 on the
CPU.
"""

import pytest
import torch

from operators import AWKWARD, relative_error
from packmamba import SequenceLayout
from packmamba.ops.mamba2_inner import Mamba2Arguments, mamba2_inner

HEADS, CHANNELS, STATES, GROUPS = 4, 16, 32, 2
WIDTH = HEADS * CHANNELS
CONVOLVED = WIDTH + 2 * GROUPS * STATES
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
SHORT = SequenceLayout.from_lengths([[40, 1, 300, 7], [], [348]], row_length=350)


def arguments(layout, states, by_channel=False):
    """Make tensors by name, of which those at padding are what ``in_proj`` makes of zeros."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    projected = random(*layout.shape, WIDTH + CONVOLVED + HEADS)
    documents = layout.num_documents
    tensors = {
        "projected": projected.masked_fill((layout.seq_idx < 0)[..., None], 0.5),
        "conv_weight": random(CONVOLVED, 4) / 2,
        "conv_bias": random(CONVOLVED) / 2,
        "A": -random(HEADS).exp(),
        "D": random(HEADS, CHANNELS) if by_channel else random(HEADS),
        "delta_bias": random(HEADS) - 2,
        "norm_weight": 1 + random(WIDTH) / 3,
    }
    if states:
        tensors["conv_state"] = random(documents, CONVOLVED, 3)
        tensors["ssm_state"] = random(documents, HEADS, CHANNELS, STATES)
    return tensors


def outputs_and_gradients(tensors, layout, states, device, dtype):
    """Compute outputs, final states and every gradient, as float64 on the CPU."""
    wide = torch.float32 if device == "cuda" else torch.float64
    leaves = {}
    for name, tensor in tensors.items():
        is_narrow = name in ("projected", "conv_weight", "conv_bias", "conv_state")
        rounded = tensor.to(dtype if is_narrow else torch.float32)
        to = dtype if is_narrow and device == "cuda" else wide
        leaves[name] = rounded.to(device, to).requires_grad_()
    here = layout.to(device)
    absent = {"conv_state": None, "ssm_state": None}
    options = {"groups": GROUPS, "epsilon": 1e-5, "delta_limit": (0.0, 0.3), "return_state": states}
    documents = {"offsets": here.offsets, "conv_layout": here, "ssm_layout": here}
    outputs = mamba2_inner(Mamba2Arguments(**absent | leaves | documents | options))
    results = [value for value in outputs if value is not None]
    weights = [torch.linspace(-1, 2, value.numel(), device=device).view(value.shape) for value in results]
    total = sum((value.double() * weight).sum() for value, weight in zip(results, weights))
    gradients = torch.autograd.grad(total, [*leaves.values()])
    named = dict(zip(("normed", "final conv state", "final ssm state"), results)) | dict(zip(leaves, gradients))
    return {name: value.detach().double().cpu() for name, value in named.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("states", [False, True], ids=["stateless", "states"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", [*AWKWARD.values(), SHORT], ids=[*AWKWARD, "long"])
def test_outputs_states_and_gradients_are_those_of_the_composition(layout, dtype, states):
    tensors = arguments(layout, states, by_channel=states)
    found = outputs_and_gradients(tensors, layout, states, "cuda", dtype)
    expected = outputs_and_gradients(tensors, layout, states, "cpu", dtype)
    errors = {name: relative_error(found[name], value) for name, value in expected.items()}
    assert max(errors.values()) <= TOLERANCE[dtype], errors
    padding = layout.seq_idx < 0
    assert not found["normed"][padding].any() and not found["projected"][padding].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_document_has_the_same_bits_alone(dtype):
    tensors = arguments(SHORT, states=True)
    packed = outputs_and_gradients(tensors, SHORT, False, "cuda", dtype)
    again = outputs_and_gradients(tensors, SHORT, False, "cuda", dtype)
    assert all(torch.equal(packed[name], again[name]) for name in packed)
    start, length = 41, 300  # the third document, alone in a row of another length
    alone = dict(tensors)
    alone["projected"] = tensors["projected"].flatten(0, 1)[None, start : start + length]
    alone |= {name: tensors[name][2:3] for name in ("conv_state", "ssm_state")}
    layout = SequenceLayout.from_lengths([[length]], row_length=length)
    single = outputs_and_gradients(alone, layout, False, "cuda", dtype)
    assert torch.equal(single["normed"][0], packed["normed"][0, start : start + length])
