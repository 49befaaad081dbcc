"""Mamba-3: against its equations, alone and among neighbours, in checkpoints, and everywhere a
mixer goes.
"""

import copy
import json

import pytest
import torch

from loops import mamba3_loops
from models import CONFIGS, LAYOUT, VOCAB, assert_close, build, error, random_tokens, slots, summed_loss
from operators import AWKWARD
from packmamba import MambaLM, PackedMamba3, SequenceLayout, leakcheck
from packmamba.evaluation import generate, score

SIZES = {"d_state": 8, "headdim": 4}
PUBLISHED_SIZES = {"d_model": 64, "d_state": 128, "headdim": 64}
FORMS = {
    "official": {},
    "softplus": {"decay": "softplus", "ngroups": 2, "rope_fraction": 1.0},
    "normed": {"is_outproj_norm": True, "ngroups": 2, "A_floor": 0.5},
    "recomputed": {"recompute": True},
    "mimo": {"is_mimo": True, "mimo_rank": 3, "ngroups": 2},
    "mimo-normed": {"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True, "rope_fraction": 1.0},
}
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
narrow_and_wide = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def layer_of(dtype=torch.float64, **keys):
    torch.manual_seed(0)
    layer = PackedMamba3(**{"d_model": 8} | SIZES | keys)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer.to(dtype)


def arguments(layer, layout):
    """Hidden states, and initial ones of all documents."""
    generator = torch.Generator().manual_seed(4)
    like = layer.start_state(layout.num_documents)
    states = tuple(torch.randn(part.shape, generator=generator, dtype=part.dtype).requires_grad_() for part in like)
    hidden = torch.randn(*layout.shape, layer.d_model, generator=generator).to(layer.D.dtype)
    return hidden.requires_grad_(), states


def results_of(mixed, finals, inputs, layout):
    """Of real tokens; the gradients of a weighted sum of outputs and final states."""
    real = mixed[layout.documents >= 0]
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in (real, *finals)]
    outputs = [part.double() for part in (real, *finals)]
    grads = torch.autograd.grad(outputs, inputs, [weight.to(real.device) for weight in weights])
    assert all(gradient.any() for gradient in grads), "zeros would prove nothing"
    return dict(enumerate(part.detach().cpu() for part in (real, *finals, *grads)))


def assert_is_its_equations(layer, layout, device="cpu"):
    """Of the layer's own weights, in float64."""
    hidden, states = arguments(layer, layout)
    wide = copy.deepcopy(layer).double()
    leaves = [part.detach().double().requires_grad_() for part in (hidden, *states)]
    expected = mamba3_loops(wide, leaves[0], layout, leaves[1:])
    expected = results_of(*expected, [*wide.parameters(), *leaves], layout)
    layer, layout = layer.to(device), layout.to(device)
    leaves = [part.detach().to(device).requires_grad_() for part in (hidden, *states)]
    found = layer(leaves[0], layout=layout, state=tuple(leaves[1:]), return_state=True)
    found = results_of(*found, [*layer.parameters(), *leaves], layout)
    assert_close(found, expected, TOLERANCES[hidden.dtype])


@every_form
@pytest.mark.parametrize("layout", [LAYOUT, AWKWARD["splits"]], ids=["packed", "splits"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_the_layer_is_its_equations(form, layout, dtype):
    assert_is_its_equations(layer_of(dtype, **form), layout)


@pytest.mark.gpu
@narrow_and_wide
@pytest.mark.parametrize("form", ["official", "normed", "mimo"])
def test_a_gpu_computes_the_equations(form, dtype):
    assert_is_its_equations(layer_of(dtype, **PUBLISHED_SIZES | FORMS[form]), AWKWARD["chunk-edges"], "cuda")


def scanned(layer, projected, layout, states):
    """Outputs, gradients of projections, final states, gradients of initial ones; all between the
    projections.
    """
    inputs = [part.detach().requires_grad_() for part in (projected, *states)]
    y, finals = layer._scan(inputs[0], layout, layout, tuple(inputs[1:]) or None, True)
    real = y.flatten(0, 1)[layout.documents.flatten() >= 0]
    grads = torch.autograd.grad(real.sin().sum() + sum(state.sum() for state in finals), inputs)
    return y, grads[0], *finals, *grads[1:]


def of_document(results, layout, s):
    tokens = [part.flatten(0, 1)[slots(layout, s)][None] for part in results[:2]]
    return [*tokens, *(state[s : s + 1] for state in results[2:])]


def projected_and_states(layer, layout, given):
    """What in_proj may give, NaN at padding, and initial states or none."""
    generator = torch.Generator().manual_seed(6)
    projected = torch.randn(*layout.shape, sum(layer.parts), generator=generator).to(layer.D)
    projected[layout.documents < 0] = float("nan")
    return projected, [state.detach() for state in arguments(layer.cpu(), layout)[1]] if given else []


def assert_same_bits(results, others):
    for i, (one, other) in enumerate(zip(results, others, strict=True)):
        assert one.isfinite().all() and torch.equal(one, other), i


@every_form
@pytest.mark.parametrize("given", [False, True], ids=["fresh", "states"])
def test_a_document_has_the_bits_that_it_has_alone(form, given):
    layer, layout = layer_of(torch.float32, **form), AWKWARD["chunk-edges"]
    projected, states = projected_and_states(layer, layout, given)
    packed = scanned(layer, projected, layout, states)
    for s in range(layout.num_documents):
        place = slots(layout, s)
        rows = SequenceLayout.from_rows(1, place.stop - place.start)
        alone = scanned(layer, projected.flatten(0, 1)[place][None], rows, [state[s : s + 1] for state in states])
        assert_same_bits(alone, of_document(packed, layout, s))


@pytest.mark.gpu
@narrow_and_wide
def test_a_gpu_gives_a_document_the_same_bits_beside_nan(dtype):
    """In rows of as many slots: sums of PyTorch depend on their number there."""
    layer, layout = layer_of(dtype, **PUBLISHED_SIZES), AWKWARD["chunk-edges"]
    projected, states = projected_and_states(layer, layout, given=True)
    layer, layout, projected = layer.cuda(), layout.to("cuda"), projected.cuda()
    states = [state.cuda() for state in states]
    packed = scanned(layer, projected, layout, states)
    for s in range(layout.num_documents):
        beside = torch.where((layout.documents == s)[..., None], projected, torch.nan)
        others = [other for other in range(layout.num_documents) if other != s]
        poisoned = [state.index_fill(0, torch.tensor(others, device="cuda"), torch.nan) for state in states]
        alone = of_document(scanned(layer, beside, layout, poisoned), layout, s)
        assert_same_bits(alone, of_document(packed, layout, s))


@pytest.mark.gpu
@pytest.mark.parametrize("prepare", [id, MambaLM.compile_blocks], ids=["eager", "compiled"])
def test_a_gpu_trains_a_model(prepare):
    """In bfloat16, its first logits those of a CPU in float32."""
    layout = SequenceLayout.from_lengths([[100, 28], [1, 63, 65]], 130)
    model = model_of(n_layer=2, d_intermediate=128, **PUBLISHED_SIZES)
    tokens = random_tokens(layout)
    expected = model(tokens, layout=layout)
    model, tokens, on_gpu = model.cuda(), tokens.cuda(), layout.to("cuda")
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(8):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens, layout=on_gpu)
        if step == 0:
            real = layout.documents >= 0
            assert logits.dtype == torch.bfloat16 and error(logits.cpu()[real], expected[real]) < 0.05
        loss = summed_loss(logits.float(), tokens, on_gpu)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        optimizer.step()
    assert losses[-1] < losses[0] / 1.2


def test_angles_of_a_long_document_are_those_of_float64():
    layer, layout = layer_of(torch.float32), SequenceLayout.from_lengths([[40000]], 40000)
    rate = torch.rand(1, 40000, 2, generator=torch.Generator().manual_seed(7)) * 0.05
    theta = layer._sum_turns(rate, torch.ones(1, 40000, 4), layout, layout.documents, layout.starts)
    expected = rate.double().cumsum(1)[:, :, None] * 2 * torch.pi
    assert (theta - expected).sin().abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_steps_of_nothing_stay_finite(dtype):
    """A step size that underflows, beside one that does not."""
    layer = layer_of(dtype)
    with torch.no_grad():
        layer.dt_bias[0] = -1000.0
        layer.dt_bias[1] = -45.0  # whose square is none of float32's numbers
    hidden, states = arguments(layer, LAYOUT)
    y, finals = layer(hidden, layout=LAYOUT, state=states, return_state=True)
    loss = y.sum() + sum(state.sum() for state in finals)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, [*layer.parameters(), hidden]))
    expected, _ = mamba3_loops(layer.double(), hidden.double(), LAYOUT, states)
    real = LAYOUT.documents >= 0
    assert error(y[real], expected[real]) < {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]


def model_of(dtype=torch.float32, **keys):
    return build(dtype=dtype, mixer="mamba3", **{"d_model": 16} | SIZES | keys)


@pytest.mark.parametrize("config", [CONFIGS["mamba2"], CONFIGS["mamba3"]], ids=["mamba2", "mamba3"])
def test_nothing_leaks_and_flow_does(config):
    model = build(dtype=torch.float32, **config)
    result = leakcheck(model)
    assert result.ok, str(result)
    flow = lambda tokens, lengths: model(tokens, layout=SequenceLayout.from_rows(*tokens.shape))
    assert leakcheck(flow, vocab_size=VOCAB).leaks


@pytest.mark.parametrize("config", [CONFIGS["mamba2"], CONFIGS["mamba3"]], ids=["mamba2", "mamba3"])
def test_generation_and_scores_are_those_of_the_whole_text(config):
    model = build(**config)
    prompts = [[1, 2, 3], [4] * 70]
    for prompt, new in zip(prompts, generate(model, prompts, max_new_tokens=5, max_slots=64)):
        for i in range(5):
            assert new[i] == int(model(torch.tensor([prompt + new[:i]]))[0, -1].argmax())
        assert score(model, [(prompt, new)])[0].is_greedy


def official(folder, is_mimo=False, **ssm_cfg):
    """Write a folder as state-spaces/mamba3-siso-1.5b has it, small: a gated MLP, bfloat16, a
    padded vocabulary.
    """
    generator = torch.Generator().manual_seed(8)
    rank = 2 if is_mimo else 1
    mixer = {"in_proj.weight": (2 * 32 + 2 * 16 * rank + 3 * 4 + 4, 16), "out_proj.weight": (16, 32)}
    mixer |= {"dt_bias": (4,), "D": (4,)}
    mixer |= {f"{name}_bias": (4, rank, 16) for name in "BC"} | {f"{name}_norm.weight": (16,) for name in "BC"}
    mixer |= {f"mimo_{name}": (4, rank, 8) for name in "xzo"} if is_mimo else {}
    layer = {f"mixer.{name}": shape for name, shape in mixer.items()}
    layer |= {"norm.weight": (16,), "norm2.weight": (16,)}
    layer |= {"mlp.fc1.weight": (256, 16), "mlp.fc2.weight": (16, 128)}
    shapes = {f"backbone.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"backbone.embedding.weight": (64, 16), "backbone.norm_f.weight": (16,)}
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    config = {"d_model": 16, "d_intermediate": 100, "n_layer": 2, "vocab_size": 50, "pad_vocab_size_multiple": 16}
    cfg = {"layer": "Mamba3", "d_state": 16, "expand": 2, "headdim": 8, "ngroups": 1}
    cfg |= {"chunk_size": 64, "is_mimo": is_mimo, "mimo_rank": 2}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"ssm_cfg": cfg | ssm_cfg, "tie_embeddings": True}))
    torch.save(weights, folder / "pytorch_model.bin")
    return weights


@pytest.mark.parametrize("is_mimo", [False, True], ids=["siso", "mimo"])
def test_the_official_format_comes_in_and_goes_out(tmp_path, is_mimo):
    weights = official(tmp_path / "in", is_mimo)
    with pytest.raises(ValueError, match="^decay: expected"):
        MambaLM.from_pretrained(tmp_path / "in")
    model = MambaLM.from_pretrained(tmp_path / "in", decay="softplus")
    other = MambaLM.from_pretrained(tmp_path / "in", decay="heavy_tail")
    tokens = random_tokens()
    assert not torch.equal(model(tokens), other(tokens))
    model.bfloat16().save_pretrained(tmp_path / "out")
    written = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert written.keys() == weights.keys() and all(torch.equal(written[name], weights[name]) for name in weights)
    published = json.loads((tmp_path / "out" / "config.json").read_text())
    assert published["ssm_cfg"]["layer"] == "Mamba3" and published["ssm_cfg"]["decay"] == "softplus"
    assert published["d_intermediate"] == 100 and "norm_epsilon" not in published
    again = MambaLM.from_pretrained(tmp_path / "out")
    assert again.config == model.config and torch.equal(again(tokens), model.float()(tokens))


def test_an_mlp_is_one_by_hand():
    model, tokens = model_of(torch.float64, d_intermediate=32, n_layer=1), random_tokens()
    with torch.no_grad():
        norm = lambda x, weight: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)
        block, embedded = model.backbone.layers[0], model.backbone.embedding(tokens)
        stream = embedded + block.mixer(norm(embedded, block.norm.weight), layout=LAYOUT)
        x, gate = (norm(stream, block.norm2.weight) @ block.mlp.fc1.weight.T).chunk(2, -1)
        stream = stream + (x * gate * gate.sigmoid()) @ block.mlp.fc2.weight.T
        expected = norm(stream, model.backbone.norm_f.weight) @ model.lm_head.weight.T
        real = LAYOUT.documents >= 0
        assert error(model(tokens, layout=LAYOUT)[real], expected[real]) < 1e-12


def test_the_last_projections_are_scaled_by_the_additions_to_the_stream():
    """As state-spaces' _init_weights does: with an MLP a block adds twice."""
    for d_intermediate, additions in ((0, 3), (64, 6)):
        torch.manual_seed(0)
        model = MambaLM(37, 64, 3, mixer="mamba3", headdim=8, d_intermediate=d_intermediate)
        for fresh in (False, True):
            if fresh:
                model.init_weights()
            for layer in model.backbone.layers:
                parts = [layer.mixer.out_proj] + ([layer.mlp.fc2] if d_intermediate else [])
                for part in parts:
                    # Kaiming's uniform, whose standard deviation is 1 / sqrt(3 fan_in).
                    expected = (3 * part.weight.shape[1] * additions) ** -0.5
                    assert part.weight.std().item() == pytest.approx(expected, rel=0.03)


def bytes_kept(model):
    """Count what a forward pass keeps for the backward, parameters aside."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    storages = {}

    def keep(tensor):
        if tensor.data_ptr() not in parameters:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros(1, 512, dtype=torch.int64))
    return sum(storages.values())


@pytest.mark.parametrize(("recompute", "most"), [("block", 0.3), ("inner", 0.5)])
def test_recomputing_keeps_less_for_the_backward(recompute, most):
    sizes = {"mixer": "mamba3", "headdim": 8, "d_state": 8}
    less, all_kept = (bytes_kept(MambaLM(37, 16, 4, recompute=way, **sizes)) for way in (recompute, "none"))
    assert less < most * all_kept


def test_states_with_two_layouts_are_refused():
    layer, layout = layer_of(), LAYOUT
    with pytest.raises(ValueError, match="^state: expected None"):
        layer(arguments(layer, layout)[0], layout=layout, conv_layout=layout.flow(), state=arguments(layer, layout)[1])
