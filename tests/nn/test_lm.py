"""Packing, cutting and leaking at the level of the model."""

import copy

import pytest
import torch
import torch.nn.functional as F

from loops import conv1d_pack_loops, ssm_pack_loops
from models import (
    CONFIGS,
    EXACT,
    LAYOUT,
    assert_close,
    build,
    error,
    every_config,
    every_layer,
    flat,
    gradients,
    random_states,
    random_tokens,
    slots,
    summed_loss,
)
from packmamba import SequenceLayout
from packmamba.ops.conv import ConvArguments
from packmamba.ops.scan import ScanArguments


@every_config
@pytest.mark.parametrize("given", [False, True], ids=["fresh", "states"])
@pytest.mark.parametrize("layout", [LAYOUT, LAYOUT.flow()], ids=["packed", "leak"])
def test_packed_equals_each_document_alone(config, given, layout):
    """With a leak each row is one document."""
    model, tokens = build(**config), random_tokens()
    states = random_states(model, layout.num_documents) if given else None
    logits, finals = model(tokens, layout=layout, states=states, return_states=True)
    loss = summed_loss(logits, tokens, layout)
    alone_loss = 0.0
    for s in range(layout.num_documents):
        document = tokens.flatten()[slots(layout, s)][None]
        start = [tuple(part[s : s + 1] for part in state) for state in states] if given else None
        alone, ends = model(document, states=start, return_states=True)
        assert error(logits.flatten(0, 1)[slots(layout, s)], alone[0]) <= EXACT
        for packed, end in zip(flat(finals), flat(ends)):
            assert error(packed[s : s + 1], end) <= EXACT
        alone_loss = alone_loss + F.cross_entropy(alone[0, :-1], document[0, 1:], reduction="sum")
    targets = layout.num_tokens - layout.num_documents
    assert error(loss / targets, alone_loss / targets) <= EXACT
    results = gradients(loss / targets, model, states or ())
    assert all(g.any() for g in results.values()), "zeros would prove nothing"
    assert_close(results, gradients(alone_loss / targets, model, states or ()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [False, True], ids=["fresh", "states"])
@pytest.mark.parametrize("config", [CONFIGS[name] for name in ("published", "mamba3")], ids=["mamba1", "mamba3"])
def test_a_poisoned_document_changes_no_bit_of_another(config, given, dtype):
    model, tokens = build(dtype=dtype, tie_embeddings=False, **config), random_tokens()
    states = random_states(model, LAYOUT.num_documents)

    def run(tokens, states, weight):
        logits, finals = model(tokens, layout=LAYOUT, states=states if given else None, return_states=True)
        loss = (logits.flatten(0, 1) * weight[:, None]).sum()
        grads = torch.autograd.grad(loss, flat(states)) if given else ()
        return logits.flatten(0, 1), flat(finals), grads

    weight = torch.randn(LAYOUT.num_slots, generator=torch.Generator().manual_seed(3))
    expected = run(tokens, states, weight)
    with torch.no_grad():
        model.backbone.embedding.weight[0] = float("nan")
    for victim in range(LAYOUT.num_documents):
        poisoned, bad_weight = tokens.clone(), weight.clone()
        poisoned.flatten()[slots(LAYOUT, victim)] = 0
        bad_weight[slots(LAYOUT, victim)] = float("inf")
        bad_states = copy.deepcopy(states)
        with torch.no_grad():
            for state in flat(bad_states):
                state[victim] = float("nan")
        logits, finals, grads = run(poisoned, bad_states, bad_weight)
        assert logits[slots(LAYOUT, victim)].isnan().all(), "the poison must reach its own document"
        for s in range(LAYOUT.num_documents):
            if s != victim:
                assert torch.equal(logits[slots(LAYOUT, s)], expected[0][slots(LAYOUT, s)])
                for results, before in ((finals, expected[1]), (grads, expected[2])):
                    assert all(torch.equal(result[s], value[s]) for result, value in zip(results, before))


@every_layer
def test_nan_in_padding_reaches_no_gradient_of_a_layer(make):
    layer, real = make(8), (LAYOUT.documents >= 0)[..., None]
    hidden, found = torch.randn(*LAYOUT.shape, 8), []
    for filler in (0.0, float("nan"), float("inf")):
        x = torch.where(real, hidden, filler).requires_grad_()
        y = layer(x, layout=LAYOUT)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for other in found[1:]:
        assert all(torch.equal(a, b) and b.isfinite().all() for a, b in zip(found[0], other))


def columns(layout, start, stop):
    return SequenceLayout.from_position_indices(layout.position_indices[:, start:stop].contiguous())


def carried(model, earlier, finals, later):
    """Return the initial states of ``later``'s documents: continuations where ``earlier`` left
    them, others afresh.
    """
    last_of_row = {row: s for s, row in enumerate(earlier.rows.tolist())}
    pieces = zip(later.rows.tolist(), later.continues.tolist())
    picks = torch.tensor([last_of_row[row] + 1 if goes_on else 0 for row, goes_on in pieces], dtype=torch.long)
    layers = zip(model.start_states(1), finals)
    return [tuple(torch.cat([fresh, end])[picks] for fresh, end in zip(*pairs)) for pairs in layers]


def run_whole_and_cut(model, tokens, begun, cut, detach=False):
    """(logits, final states) of LAYOUT in one call, and in two calls of the columns before and
    after ``cut``.
    """
    fresh = model.start_states(LAYOUT.num_documents)
    begins = (~LAYOUT.continues).nonzero().squeeze(1)
    states = [tuple(b.index_copy(0, begins, f[begins]) for b, f in zip(*pairs)) for pairs in zip(begun, fresh)]
    whole = model(tokens, layout=LAYOUT, states=states, return_states=True)
    first, second = columns(LAYOUT, 0, cut), columns(LAYOUT, cut, LAYOUT.shape[1])
    before, after = (d[d >= 0].unique().long() for d in (LAYOUT.documents[:, :cut], LAYOUT.documents[:, cut:]))
    states = [tuple(part[before] for part in state) for state in states]
    logits, finals = model(tokens[:, :cut], layout=first, states=states, return_states=True)
    passed = [tuple(state.detach() for state in pair) for pair in finals] if detach else finals
    states = carried(model, first, passed, second)
    rest, ends = model(tokens[:, cut:], layout=second, states=states, return_states=True)
    ends = [
        tuple(w.detach().index_copy(0, before, f).index_copy(0, after, e) for w, f, e in zip(*pairs))
        for pairs in zip(whole[1], finals, ends)
    ]
    return whole, (torch.cat([logits, rest], dim=1), ends)


@every_config
@pytest.mark.parametrize("cut", range(1, LAYOUT.shape[1]))
def test_documents_cut_anywhere_with_their_states_are_the_whole(config, cut):
    model, tokens = build(**config), random_tokens()
    begun = random_states(model, LAYOUT.num_documents)
    results = []
    for logits, finals in run_whole_and_cut(model, tokens, begun, cut):
        loss = summed_loss(logits, tokens, LAYOUT) + sum(state.square().sum() for state in flat(finals))
        outputs = {f"final {i}": state for i, state in enumerate(flat(finals))}
        outputs["logits"] = logits * (LAYOUT.documents >= 0)[..., None]
        results.append(outputs | gradients(loss, model, begun))
    whole, cut_up = results
    assert whole["states 0"].any()
    assert_close(cut_up, whole)


MIXERS = ("published", "mamba2", "mamba3")
FLOW = LAYOUT.flow()
VARIANTS = {
    "reset": (LAYOUT, LAYOUT),
    "leak": (FLOW, FLOW),
    "leak-in-convolution": (FLOW, LAYOUT),
    "leak-in-scan": (LAYOUT, FLOW),
}


@pytest.mark.parametrize("config", [CONFIGS[name] for name in MIXERS], ids=MIXERS)
def test_leaks_in_one_operator_in_both_and_in_none_all_differ(config):
    model, tokens = build(**config), random_tokens()
    outputs = [model(tokens, layout=LAYOUT, conv_layout=conv, ssm_layout=ssm) for conv, ssm in VARIANTS.values()]
    assert torch.equal(outputs[0], model(tokens, layout=LAYOUT))
    assert torch.equal(outputs[1], model(tokens, layout=FLOW))
    for s in range(LAYOUT.num_documents):
        views = [logits.flatten(0, 1)[slots(LAYOUT, s)] for logits in outputs]
        first_of_row = s in (0, 3, 5)
        for i, one in enumerate(views):
            for other in views[:i]:
                apart = error(one, other)
                assert apart <= EXACT if first_of_row else apart > 1e-5


@pytest.mark.parametrize("config", [config for config in CONFIGS.values() if "mixer" not in config])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_mixer_is_its_operators_each_with_its_own_layout(config, variant):
    """Against the loops; states are indexed by the documents of each operator's layout."""
    conv_layout, ssm_layout = VARIANTS[variant]
    mixer = build(**config).backbone.layers[0].mixer
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(*LAYOUT.shape, 8, generator=generator, dtype=torch.float64).requires_grad_()
    conv_state = torch.randn(conv_layout.num_documents, mixer.d_inner, mixer.d_conv - 1, generator=generator).double()
    ssm_state = torch.randn(ssm_layout.num_documents, mixer.d_inner, mixer.d_state, generator=generator).double()
    state = (conv_state.requires_grad_(), ssm_state.requires_grad_())
    layouts = {"conv_layout": conv_layout, "ssm_layout": ssm_layout}
    result, finals = mixer(hidden, layout=LAYOUT, **layouts, state=state, return_state=True)

    x, z = mixer.in_proj(hidden).chunk(2, dim=-1)
    weight, bias, rank, d_state = mixer.conv1d.weight[:, 0], mixer.conv1d.bias, mixer.dt_rank, mixer.d_state
    x, conv_end = conv1d_pack_loops(ConvArguments(x, weight, bias, conv_state, conv_layout, "silu", True))
    delta, *BC = mixer.x_proj(x).split([rank, d_state, d_state], dim=-1)
    delta, A, start = delta @ mixer.dt_proj.weight.T, -mixer.A_log.exp(), mixer.dt_proj.bias
    y, ssm_end = ssm_pack_loops(ScanArguments(x, delta, A, *BC, mixer.D, z, start, ssm_state, ssm_layout, True, True))
    expected = mixer.out_proj(y)
    inputs = [*mixer.parameters(), hidden, *state]
    results = []
    for outputs in ((result, *finals), (expected, conv_end, ssm_end)):
        grads = torch.autograd.grad(sum(o.square().sum() for o in outputs), inputs, retain_graph=True)
        results.append(dict(enumerate((*outputs, *grads))))
    assert_close(*results)


@pytest.mark.parametrize("how", ["autocast", "weights"])
@pytest.mark.parametrize("config", [CONFIGS[name] for name in ("published", "mamba3")], ids=["mamba1", "mamba3"])
def test_bfloat16(config, how):
    exact, tokens = build(dtype=torch.float32, **config), random_tokens()
    model = copy.deepcopy(exact)
    model = model if how == "autocast" else model.bfloat16()
    states = random_states(model, LAYOUT.num_documents)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        for given in (None, states):
            logits, finals = model(tokens, layout=LAYOUT, states=given, return_states=True)
            wide_states = given and [tuple(state.float() for state in pair) for pair in given]
            expected = exact(tokens, layout=LAYOUT, states=wide_states)
            assert logits.dtype == torch.bfloat16 and {state[-1].dtype for state in finals} == {torch.float32}
            real = LAYOUT.documents >= 0
            assert error(logits[real], expected[real]) < 0.03  # a few roundings of 2**-9 a layer
            model(tokens, layout=LAYOUT, states=finals)
        assert exact.double()(tokens).dtype == torch.float64  # which autocast leaves alone
    for name, gradient in gradients(summed_loss(logits.float(), tokens, LAYOUT), model, states).items():
        assert gradient.isfinite().all() and gradient.any(), name


def test_detaching_the_carried_states_changes_only_the_gradient():
    model, tokens = build(), random_tokens()
    begun = random_states(model, LAYOUT.num_documents)
    (whole, _), (cut_up, _) = run_whole_and_cut(model, tokens, begun, cut=4, detach=True)
    real = LAYOUT.documents >= 0
    assert error(cut_up[real], whole[real]) <= EXACT
    expected = gradients(summed_loss(whole, tokens, LAYOUT), model)["backbone.layers.0.mixer.A_log"]
    truncated = gradients(summed_loss(cut_up, tokens, LAYOUT), model)["backbone.layers.0.mixer.A_log"]
    assert error(truncated, expected) > 1e-4


@every_layer
def test_a_layer_refuses_states_of_other_shapes_and_dtypes(make):
    """Kernels trust the layer: a state of too few documents would be read past its end."""
    layer = make(16, d_state=8)
    hidden = torch.randn(1, 6, 16)
    layout = SequenceLayout.from_lengths([[2, 4]], row_length=6)
    states = layer.start_state(2)
    layer(hidden, layout, state=states)
    changes = {"shape": [lambda t: t[:1], lambda t: t[..., :-1]], "torch.float32": [torch.Tensor.double]}
    for i, name in enumerate(layer.state_shapes):
        for expected, ways in changes.items():
            for change in ways:
                wrong = (*states[:i], change(states[i]), *states[i + 1 :])
                with pytest.raises((ValueError, TypeError), match=f"^{name}: expected {expected}"):
                    layer(hidden, layout, state=wrong)
    with pytest.raises(TypeError, match="^state: expected a tuple"):
        layer(hidden, layout, state=(*states, states[0]))
