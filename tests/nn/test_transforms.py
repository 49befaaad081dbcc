"""torch.export with free lengths and numbers of documents, and torch.func."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.func import functional_call, grad, vmap

from models import every_layer, one_mixer_slowly
from packmamba import MambaLM, SequenceLayout, ops
from packmamba.nn.loss import linear_cross_entropy

FREE = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
DOCUMENTS = {"tokens": FREE, **dict.fromkeys(("starts", "ends", "offsets"), {0: Dim.DYNAMIC})}
MIXERS = {"mamba1": {}} | {name: {"mixer": name, "headdim": 8} for name in ("mamba2", "mamba3")}
# Rows of lengths and the length of a row: other shapes than the exported one; the last has padding
# and continuations.
BATCHES = [([[3, 1, 5]], 9), ([[9]], 9), ([[1, 64], [65]], 65), ([[2, 5], [7], [1]], 8)]

every_mixer = pytest.mark.parametrize("mixer", MIXERS)
every_mode = pytest.mark.parametrize(
    "strict", [pytest.param(False, id="non-strict"), pytest.param(True, id="strict", marks=pytest.mark.slow)]
)


def model_of(mixer, n_layer=2):
    torch.manual_seed(0)
    return MambaLM(vocab_size=20, d_model=16, n_layer=n_layer, **MIXERS[mixer])


@one_mixer_slowly
def test_a_program_takes_any_number_of_rows_of_any_length(mixer, tmp_path):
    model = model_of(mixer, n_layer=1)
    with torch.no_grad():
        program = export(model, (torch.randint(20, (2, 16)),), dynamic_shapes={"tokens": FREE})
        torch.export.save(program, tmp_path / "program.pt2")
        run = torch.export.load(tmp_path / "program.pt2").module()
        for shape in ((1, 1), (3, 9), (2, 100), (5, 64)):
            tokens = torch.randint(20, shape)
            assert torch.equal(run(tokens), model(tokens))


@every_mixer
def test_second_derivatives_are_those_of_finite_differences(mixer):
    model = model_of(mixer).double()
    for module in model.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    tokens = torch.randint(20, (1, 5))
    parameter = model.backbone.layers[0].mixer.D

    def gradient():
        return torch.autograd.grad(model(tokens).sin().sum(), parameter, create_graph=True)[0]

    direction = torch.randn_like(parameter)
    (found,) = torch.autograd.grad((gradient() * direction).sum(), parameter)
    step = 1e-6
    with torch.no_grad():
        parameter += step * direction
    after = gradient()
    with torch.no_grad():
        parameter -= 2 * step * direction
    torch.testing.assert_close(found, (after - gradient()).detach() / (2 * step), rtol=1e-5, atol=1e-8)
    # Forward mode, where gradients are not enabled.
    layer, (hidden, direction) = model.backbone.layers[0].mixer, torch.randn(2, 1, 5, 16).double()
    with torch.no_grad():
        _, found = torch.func.jvp(layer, (hidden,), (direction,))
        before, after = (layer(hidden + sign * step * direction) for sign in (-1, 1))
    torch.testing.assert_close(found, (after - before) / (2 * step), rtol=1e-5, atol=1e-8)


def test_the_loss_refuses_second_derivatives():
    hidden, head = torch.randn(1, 3, 4, requires_grad=True), torch.randn(5, 4)
    is_target = torch.ones(1, 3, dtype=torch.bool)
    total, _ = linear_cross_entropy(hidden, head, torch.zeros(1, 3, dtype=torch.int64), is_target)
    (gradient,) = torch.autograd.grad(total.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class Packed(nn.Module):
    """A model of tokens (B, L) or hidden states (B, L, d_model), and documents (S,)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, starts, ends, offsets):
        return self.model(tokens, layout=SequenceLayout(tokens.shape[:2], starts, ends, offsets))


@every_mode
@every_mixer
def test_a_program_takes_any_number_of_documents(mixer, strict):
    model = model_of(mixer)
    example = SequenceLayout.from_lengths([[5, 11], [16]], row_length=16)
    with torch.no_grad():
        arguments = (torch.randint(20, (2, 16)), example.starts, example.ends, example.offsets)
        run = export(Packed(model), arguments, dynamic_shapes=DOCUMENTS, strict=strict).module()
        for lengths, row_length in BATCHES:
            offsets = [[100, *[0] * (len(row) - 1)] for row in lengths]
            layout = SequenceLayout.from_lengths(lengths, row_length, offsets)
            tokens = torch.randint(20, layout.shape)
            result = run(tokens, layout.starts, layout.ends, layout.offsets)
            assert torch.equal(result, model(tokens, layout=layout))


@one_mixer_slowly
def test_a_model_that_recomputes_its_blocks_is_exported_with_gradients(mixer):
    model = MambaLM(vocab_size=20, d_model=16, n_layer=1, recompute="block", **MIXERS[mixer])
    tokens = torch.randint(20, (2, 16))
    run = export(model, (tokens,), strict=True).module()
    result = run(tokens)
    assert result.requires_grad and torch.equal(result, model(tokens))


@every_layer
def test_an_exported_layer_never_reads_padding(make):
    layer = make(16)
    layout = SequenceLayout.from_lengths([[5, 6], [16]], row_length=16)
    hidden = torch.randn(2, 16, 16)
    arguments = (hidden, layout.starts, layout.ends, layout.offsets)
    run = export(Packed(layer), arguments, dynamic_shapes=DOCUMENTS).module()
    hidden[0, 11:] = float("nan")
    result = run(*arguments)
    assert torch.equal(result, layer(hidden, layout=layout)) and result.isfinite().all()


def test_layouts_whose_number_of_documents_is_no_shape_are_refused():
    class BySeqIdx(nn.Module):
        def forward(self, seq_idx):
            return SequenceLayout.from_seq_idx(seq_idx).starts

    with pytest.raises(TypeError, match="^seq_idx: expected .*torch.export"):
        export(BySeqIdx(), (torch.zeros(2, 16, dtype=torch.int64),))


def losses_of(layer):
    layout = SequenceLayout.from_lengths([[4, 5], [9]], row_length=9)
    return lambda parameters, x: functional_call(layer, parameters, (x,), {"layout": layout}).square().sum()


@pytest.mark.parametrize("transform", ["vmap", "grad", "vmap of grad"])
@every_layer
def test_transforms_over_compiled_operators_are_refused_in_a_sentence(make, transform):
    layer = make(16)
    parameters, loss = dict(layer.named_parameters()), losses_of(layer)
    x = torch.randn(3, 2, 9, 16)
    call = {"vmap": lambda: vmap(layer)(x), "grad": lambda: grad(loss)(parameters, x[0])}
    call["vmap of grad"] = lambda: vmap(grad(loss), (None, 0))(parameters, x)
    message = "^(mamba_inner|conv1d_pack|ssm_pack): expected .*backend='reference'"
    with pytest.raises(RuntimeError, match=message) as caught:
        call[transform]()
    assert "\n" not in str(caught.value)


def test_every_operator_names_itself():
    x = torch.randn(3, 2, 9, 16)
    heads, bc = torch.randn(3, 2, 9, 2, 8), torch.randn(3, 2, 9, 1, 4)
    A = -torch.rand(16, 4)
    calls = {
        "conv1d_pack": lambda: vmap(lambda x: ops.conv1d_pack(x, torch.ones(16, 4)))(x),
        "ssm_pack": lambda: vmap(lambda x, b: ops.ssm_pack(x, x, A, b, b))(x, bc[..., 0, :]),
        "ssd_pack": lambda: vmap(lambda x, b: ops.ssd_pack(x, x.sum(-1), A[:2, 0], b, b))(heads, bc),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"^{name}: expected"):
            call()
    of_sample = lambda x: linear_cross_entropy(x, A.T, torch.zeros(2, 9, dtype=int), torch.ones(2, 9, dtype=bool))
    with pytest.raises(RuntimeError, match="functorch transforms"):  # PyTorch's own words
        vmap(of_sample)(x)


@every_mixer
@pytest.mark.parametrize("part", ["layer", "model"])
def test_the_reference_gives_gradients_by_sample(mixer, part):
    torch.manual_seed(0)
    model = MambaLM(vocab_size=20, d_model=16, n_layer=2, backend="reference", **MIXERS[mixer]).double()
    module, x = model, torch.randint(20, (3, 2, 9))
    if part == "layer":
        module, x = model.backbone.layers[0].mixer, torch.randn(3, 2, 9, 16, dtype=torch.float64)
    parameters, loss = dict(module.named_parameters()), losses_of(module)
    by_sample = vmap(grad(loss), (None, 0))(parameters, x)
    for i in range(3):
        expected = torch.autograd.grad(loss(parameters, x[i]), list(parameters.values()))
        for name, gradient in zip(parameters, expected):
            torch.testing.assert_close(by_sample[name][i], gradient, rtol=1e-10, atol=1e-12)
