"""Test that optimisations change no result: the fused operator, recomputation, compiled blocks."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from models import LAYOUT, assert_close, build, every_config, flat, gradients, random_states, random_tokens, summed_loss
from operators import AWKWARD, relative_error
from packmamba import SequenceLayout
from packmamba.nn import lm
from packmamba.nn.loss import linear_cross_entropy
from packmamba.ops.inner import InnerArguments, mamba_inner


def results(model, tokens, states=None, layouts=None, autocast=False):
    """Logits, final states and every gradient, of logits and states both."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits, finals = model(tokens, **(layouts or {"layout": LAYOUT}), states=states, return_states=True)
        total = summed_loss(logits.float() if autocast else logits, tokens, LAYOUT)
    total = total + sum(state.square().sum() for state in flat(finals))
    outputs = {"logits": logits, **{f"final {i}": state for i, state in enumerate(flat(finals))}}
    return outputs | gradients(total, model, states or ())


def arguments(channels=6, d_state=3, rank=2, width=3, seed=0, layout=LAYOUT, states=True):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    x_weight, dt_weight = random(rank + 2 * d_state, channels), random(channels, rank)
    with torch.no_grad():
        x_weight /= channels**0.5
        dt_weight /= rank**0.5
    tensors = {
        "xz": random(*layout.shape, 2 * channels),
        "conv_weight": random(channels, width),
        "conv_bias": random(channels),
        "x_weight": x_weight,
        "dt_weight": dt_weight,
        "A": (-random(channels, d_state).detach().exp()).requires_grad_(),
        "D": random(channels),
        "delta_bias": random(channels),
        "out_weight": random(5, channels),
    }
    if states:
        tensors["conv_state"] = random(layout.num_documents, channels, width - 1)
        tensors["ssm_state"] = random(layout.num_documents, channels, d_state)
    return tensors


def inner(tensors, conv_layout, ssm_layout, recompute=False, backend=None):
    """Compute the operator of ``arguments``' tensors."""
    absent = dict.fromkeys(("conv_state", "ssm_state", "x_used", "dt_used", "out_used"))
    options = {"return_state": True, "recompute": recompute}
    a = InnerArguments(**absent | tensors, conv_layout=conv_layout, ssm_layout=ssm_layout, **options)
    return mamba_inner(a, backend)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("states", [False, True], ids=["stateless", "states"])
@pytest.mark.parametrize("layout", AWKWARD.values(), ids=AWKWARD.keys())
def test_the_fused_operator_is_the_composition_of_the_references(layout, states, recompute):
    tensors, outputs = arguments(layout=layout, states=states), []
    of_rows = {"ssm_state": tensors["ssm_state"][: layout.flow().num_documents]} if states else {}
    for backend in ("reference", "cpu"):
        block = inner(tensors | of_rows, layout, layout.flow(), recompute, backend)
        total = sum((v * torch.linspace(1, 2, v.numel()).view(v.shape)).sum() for v in block)
        found = torch.autograd.grad(total, [*tensors.values()], retain_graph=True, materialize_grads=True)
        outputs.append({f"output {i}": v for i, v in enumerate((*block, *found))})
    assert_close(outputs[1], outputs[0], 1e-12)


@every_config
@pytest.mark.parametrize("given", [False, True], ids=["fresh", "states"])
@pytest.mark.parametrize("recompute", ["inner", "block"])
@pytest.mark.parametrize("how", ["float64", "bfloat16", "autocast"])
def test_recomputing_changes_no_bit(config, recompute, given, how):
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16, "autocast": torch.float32}[how]
    tokens, found = random_tokens(), []
    for choice in ("none", recompute):
        model = build(dtype=dtype, recompute=choice, **config)
        states = random_states(model, LAYOUT.num_documents) if given else None
        found.append(results(model, tokens, states, autocast=how == "autocast"))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", lm.RECOMPUTE)
@pytest.mark.parametrize("given", [False, True], ids=["fresh", "states"])
def test_compiled_blocks_are_eager_ones(recompute, given, fresh_compiler):
    tokens = random_tokens()
    model, fast = build(n_layer=3), build(n_layer=3, recompute=recompute)
    fast.compile_blocks(backend="aot_eager", fullgraph=True)
    for layout in (LAYOUT, LAYOUT.flow()):
        states = random_states(model, layout.num_documents) if given else None
        expected = results(model, tokens, states, {"layout": layout})
        assert_close(results(fast, tokens, states, {"layout": layout}), expected)


def test_one_compilation_serves_all_blocks_and_layouts(fresh_compiler):
    graphs = CompileCounter()
    model, fast = build(n_layer=5, dtype=torch.float32), build(n_layer=5, dtype=torch.float32)
    fast.compile_blocks(backend=graphs, fullgraph=True)
    lengths = [[5, 1, 6], [14], [2, 2], [1, 2, 3, 4], [7, 7], [13, 1]]
    for i in range(len(lengths)):
        layout = SequenceLayout.from_lengths([lengths[i], lengths[i - 1]], row_length=14)
        tokens = random_tokens(layout, seed=i)
        assert torch.equal(fast(tokens, layout=layout), model(tokens, layout=layout))
    assert graphs.frame_count <= 4


@pytest.mark.slow
def test_inductor(fresh_compiler):
    """The compiler itself, once: block, loss and both backwards."""
    tokens, targets, mask = random_tokens(), random_tokens(seed=4), LAYOUT.documents >= 0
    found = []
    for compiled in (False, True):
        model = build(dtype=torch.float32, recompute="inner")
        if compiled:
            model.compile_blocks()
        hidden = model(tokens, layout=LAYOUT, return_hidden=True)
        total, losses = linear_cross_entropy(hidden, model.lm_head.weight, targets, mask, LAYOUT.token_slots, compiled)
        found.append(gradients(total, model) | {"losses": losses})
    assert_close(found[1], found[0], 1e-5)


def test_a_block_s_norm_is_rms_norm():
    generator = torch.Generator().manual_seed(0)
    residual, mixed = torch.randn(2, 2, 5, 8, generator=generator, dtype=torch.float64).requires_grad_()
    ours = lm.add_norm(residual, mixed, 1e-5)
    theirs = (residual + mixed, F.rms_norm(residual + mixed, (8,), eps=1e-5))
    outputs = []
    for both in (ours, theirs):
        total = sum((value * torch.linspace(1, 2, 80).view(2, 5, 8)).sum() for value in both)
        outputs.append(dict(enumerate((*both, *torch.autograd.grad(total, (residual, mixed))))))
    assert_close(*outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("d_state", [16, 8])
def test_on_a_gpu(d_state, recompute):
    """Kernels write the gradients of halves and parts in place; against float64."""
    layout = AWKWARD["splits"]
    tensors, outputs = arguments(channels=64, d_state=d_state, rank=8, width=4, layout=layout), []
    for backend, device in (("reference", "cpu"), ("cuda", "cuda")):
        dtypes = dict.fromkeys(tensors, torch.bfloat16) | dict.fromkeys(
            ("A", "D", "delta_bias", "ssm_state"), torch.float32
        )
        dtypes = dtypes if backend == "cuda" else dict.fromkeys(tensors, torch.float64)
        leaves = {n: t.detach().bfloat16().to(device, dtypes[n]).requires_grad_() for n, t in tensors.items()}
        here = layout.to(device)
        block = inner(leaves, here, here, recompute, backend)
        total = sum((v.float() * torch.linspace(1, 2, v.numel()).view(v.shape).to(device)).sum() for v in block)
        found = torch.autograd.grad(total, [*leaves.values()])
        outputs.append([v.detach().cpu() for v in (*block, *found)])
    errors = [relative_error(result, expected.double()) for result, expected in zip(*reversed(outputs))]
    assert max(errors) <= 2e-2, errors  # a chain of bfloat16 operators


@pytest.mark.gpu
def test_gradients_of_wider_weights_are_not_rounded_to_the_activations_dtype():
    tensors = arguments(channels=64, d_state=16, rank=8, width=4, states=False)
    projections = ("x_weight", "dt_weight", "out_weight")

    def gradients_of(dtype):
        dtypes = dict.fromkeys(tensors, torch.float32) | dict.fromkeys(projections, dtype) | {"xz": torch.bfloat16}
        leaves = {n: t.detach().bfloat16().to("cuda", dtypes[n]).requires_grad_() for n, t in tensors.items()}
        y, *_ = inner(leaves, LAYOUT.to("cuda"), LAYOUT.to("cuda"))
        return torch.autograd.grad(y.float().square().sum(), [leaves[name] for name in projections])

    for wide, narrow in zip(gradients_of(torch.float32), gradients_of(torch.bfloat16)):
        assert wide.dtype == torch.float32 and not torch.equal(wide, wide.bfloat16().float())
        assert torch.allclose(wide, narrow.float(), rtol=2**-7, atol=2**-7 * float(wide.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recompute", lm.RECOMPUTE)
@pytest.mark.parametrize("keys", [{}, {"mixer": "mamba2", "headdim": 16, "ngroups": 2}], ids=["mamba1", "mamba2"])
def test_a_whole_model_on_a_gpu(keys, recompute, compiled, fresh_compiler):
    """bfloat16 weights and the chunked loss, with padding, against float32 on the CPU."""
    lengths = [[300, 1, 57, 100], [129, 64], [500]]
    layout = SequenceLayout.from_lengths(lengths, row_length=512)
    tokens, targets = random_tokens(layout), random_tokens(layout, seed=4)
    mask, slots = layout.documents >= 0, layout.token_slots
    exact = build(dtype=torch.bfloat16, d_model=64, d_state=16, **keys).float()
    fast = build(dtype=torch.bfloat16, d_model=64, d_state=16, recompute=recompute, **keys).cuda()
    if compiled:
        fast.compile_blocks()
    found = []
    for model, device in ((exact, "cpu"), (fast, "cuda")):
        here = [t.to(device) for t in (tokens, layout, targets, mask, slots)]
        hidden = model(here[0], layout=here[1], return_hidden=True)
        total, _ = linear_cross_entropy(hidden, model.lm_head.weight, *here[2:], compiled and device == "cuda")
        found.append({"loss": total, **gradients(total, model)})
    for name, value in found[0].items():
        assert relative_error(found[1][name].detach().cpu(), value.detach().double()) <= 4e-2, name
