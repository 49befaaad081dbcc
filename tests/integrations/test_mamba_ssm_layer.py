"""The drop-in layer against mamba_ssm's slow path, which is written out here."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loops import conv1d_pack_loops, ssm_pack_loops
from operators import relative_error
from packmamba import MambaLM, PackedMamba, SequenceLayout, leakcheck
from packmamba.integrations.mamba_ssm import Mamba as Ours
from packmamba.integrations.mamba_ssm import replace
from packmamba.ops.conv import ConvArguments
from packmamba.ops.scan import ScanArguments

LENGTHS = [[5, 1, 6], [9, 3]]
LAYOUT = SequenceLayout.from_lengths(LENGTHS, row_length=12)
BOUNDARIES = {
    "seq_idx": LAYOUT.seq_idx,
    "cu_seqlens": LAYOUT.cu_seqlens,
    "position_indices": LAYOUT.position_indices.long(),
    "layout": LAYOUT,
}


class Mamba(nn.Module):
    """Theirs, as the reference: its parameters under their names, its slow path by loops over
    tokens.
    """

    def __init__(self, d_model, d_state=16, d_conv=4, expand=2, layer_idx=None, bias=False):
        super().__init__()
        self.d_model, self.d_state, self.d_conv, self.layer_idx = d_model, d_state, d_conv, layer_idx
        self.d_inner, self.dt_rank = expand * d_model, -(-d_model // 16)
        inner, rank = self.d_inner, self.dt_rank
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=bias)
        self.conv1d = nn.Conv1d(inner, inner, d_conv, groups=inner, padding=d_conv - 1)
        self.activation, self.act = "silu", nn.SiLU()
        self.x_proj = nn.Linear(inner, rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.randn(inner, d_state))
        self.D = nn.Parameter(torch.randn(inner))
        self.out_proj = nn.Linear(inner, d_model, bias=bias)

    def forward(self, hidden_states, inference_params=None):
        x, z = self.in_proj(hidden_states).chunk(2, -1)
        layout = SequenceLayout.from_rows(*x.shape[:2])
        convolution = ConvArguments(x, self.conv1d.weight[:, 0], self.conv1d.bias, None, layout, "silu", False)
        x, _ = conv1d_pack_loops(convolution)
        delta, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], -1)
        delta, A = self.dt_proj(delta), -self.A_log.exp()
        y, _ = ssm_pack_loops(ScanArguments(x, delta, A, B, C, self.D, z, None, None, layout, True, False))
        return self.out_proj(y)


Theirs = Mamba


def both(**options):
    torch.manual_seed(0)
    theirs = Theirs(8, **options).double()
    ours = Ours(8, **options).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def hidden(rows=2, slots=12):
    return torch.randn(rows, slots, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def alone(layer, x):
    """Each document by itself."""
    return torch.stack([torch.cat([layer(part[None])[0] for part in row.split(n)]) for row, n in zip(x, LENGTHS)])


@pytest.mark.parametrize("options", [{}, {"d_conv": 3, "d_state": 4, "expand": 1, "bias": True}])
def test_results_and_gradients_are_theirs(options):
    theirs, ours = both(**options)
    x = hidden()
    pairs = [(ours(x), theirs(x)), *((ours(x, **{n: v}), alone(theirs, x)) for n, v in BOUNDARIES.items())]
    named = [theirs.get_parameter(name) for name, _ in ours.named_parameters()]
    for packed, expected in pairs:
        assert relative_error(packed.detach(), expected.detach()) < 1e-13
        weights = torch.randn(packed.shape, dtype=packed.dtype)
        found = torch.autograd.grad((packed * weights).sum(), [x, *ours.parameters()])
        wanted = torch.autograd.grad((expected * weights).sum(), [x, *named])
        assert all(relative_error(a, b) < 1e-12 for a, b in zip(found, wanted))


def test_a_prompt_and_then_token_by_token():
    theirs, ours = both(layer_idx=3)
    x = hidden().detach()
    expected = theirs(x)
    for prompt in (12, 7, 2):  # shorter than the convolution, too
        cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
        found = [ours(x[:, :prompt], inference_params=cache)]
        conv_state = cache.key_value_memory_dict[3][0]
        raw = theirs.in_proj(x[:, :prompt])[..., :16].transpose(1, 2)
        assert relative_error(conv_state, F.pad(raw, (4 - prompt, 0)).detach()) < 1e-14
        for t in range(prompt, 12):
            cache.seqlen_offset = t
            found.append(ours(x[:, t : t + 1], inference_params=cache))
        assert relative_error(torch.cat(found, 1).detach(), expected.detach()) < 1e-13
        assert cache.key_value_memory_dict[3][0] is conv_state, "states change in place"
    states = ours.allocate_inference_cache(2, 12)
    assert [tuple(state.shape) for state in states] == [(2, 16, 4), (2, 16, 16)]
    steps = []
    for t in range(12):
        out, *after = ours.step(x[:, t : t + 1], *states)
        assert after[0] is states[0] and after[1] is states[1]
        steps.append(out)
    assert relative_error(torch.cat(steps, 1).detach(), expected.detach()) < 1e-13
    assert ours.allocate_inference_cache(1, 5, dtype=torch.bfloat16)[1].dtype == torch.bfloat16


def test_steps_may_be_differentiated():
    theirs, ours = both()
    x, states = hidden(), ours.allocate_inference_cache(2, 2, dtype=torch.float64)
    first, second = (ours.step(x[:, t : t + 1], *states)[0] for t in (0, 1))
    found = torch.autograd.grad(first.sum() + second.sum(), ours.in_proj.weight)[0]
    assert found.isfinite().all() and relative_error(second.detach(), theirs(x)[:, 1:2].detach()) < 1e-13


def test_the_constructor_is_theirs():
    names = "d_model d_state d_conv expand dt_rank dt_min dt_max dt_init dt_scale dt_init_floor".split()
    names += "conv_bias bias use_fast_path layer_idx device dtype".split()
    assert list(inspect.signature(Ours).parameters) == names
    layer = Ours(8, dtype=torch.bfloat16, dt_rank=4, device="cpu")
    assert layer.A_log.dtype == layer.D.dtype == torch.float32 and layer.in_proj.weight.dtype == torch.bfloat16
    assert layer.A_log._no_weight_decay and layer.dt_proj.bias._no_reinit
    for other in ({"dt_init": "constant"}, {"dt_scale": 3.0}):
        with pytest.raises(ValueError, match="^dt_init, dt_scale: expected 'random' and 1.0, got "):
            Ours(8, **other)
    assert Ours(8, device="meta").in_proj.weight.is_meta
    assert layer(torch.randn(1, 5, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert Ours(8).state_dict().keys() == PackedMamba(8).state_dict().keys()
    ours, x = both()[1], hidden()
    assert torch.equal(PackedMamba.forward(ours, x, cu_seqlens=LAYOUT.cu_seqlens), ours(x, layout=LAYOUT))


def test_boundaries_are_read_once_for_all_layers(tmp_path, monkeypatch):
    _, ours = both()
    calls, seq_idx = [], LAYOUT.seq_idx.clone()
    made = SequenceLayout.from_seq_idx
    monkeypatch.setattr(SequenceLayout, "from_seq_idx", lambda idx: calls.append(1) or made(idx))
    x = hidden()
    first = ours(x, seq_idx=seq_idx)
    assert torch.equal(ours(x, seq_idx=seq_idx), first) and len(calls) == 1
    torch.save(seq_idx, tmp_path / "seq_idx.pt")  # with no trace of the layout
    assert torch.equal(torch.load(tmp_path / "seq_idx.pt"), seq_idx)
    assert torch.equal(ours(x, seq_idx=LAYOUT.seq_idx, cu_seqlens=LAYOUT.cu_seqlens), first)
    with torch.inference_mode():
        assert torch.equal(ours(x, seq_idx=seq_idx), first)
    ours(x, seq_idx=seq_idx).sum().backward()
    seq_idx.numpy()[:] = 0  # which torch does not see
    assert torch.equal(ours(x, seq_idx=seq_idx), ours(x)) and not torch.equal(ours(x), first)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("seq_idx", {"seq_idx": LAYOUT.seq_idx[:1]}),
        ("seq_idx", {"seq_idx": [1]}),
        ("cu_seqlens", {"cu_seqlens": LAYOUT.cu_seqlens[:-1]}),
        ("position_indices", {"position_indices": torch.arange(3, 15).expand(2, 12)}),
        ("layout", {"seq_idx": LAYOUT.seq_idx, "layout": LAYOUT.flow()}),
        ("inference_params", {"seq_idx": LAYOUT.seq_idx, "inference_params": 1}),
        ("layer_idx", {"inference_params": SimpleNamespace(key_value_memory_dict={})}),
    ],
)
def test_arguments(name, arguments):
    with pytest.raises((TypeError, ValueError), match=f"^{name}"):
        both()[1](hidden(), **arguments)


class Block(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(8), mixer

    def forward(self, x, **mixer_kwargs):
        return x + self.mixer(self.norm(x), **mixer_kwargs)


class MambaLMHeadModel(nn.Module):
    """As mamba_ssm's hands what it does not know to its layers."""

    def __init__(self, mixers):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(30, 8), nn.ModuleList(Block(mixer) for mixer in mixers)
        self.lm_head = nn.Linear(8, 30, bias=False)

    def forward(self, input_ids, position_ids=None, inference_params=None, num_last_tokens=0, **mixer_kwargs):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, inference_params=inference_params, **mixer_kwargs)
        return SimpleNamespace(logits=self.lm_head(x))


@pytest.mark.slow
def test_a_model_s_layers_are_exchanged():
    torch.manual_seed(0)
    model = MambaLMHeadModel([Theirs(8, d_state=4, layer_idx=i) for i in range(2)]).eval()
    parameters = dict(model.named_parameters())
    tokens = torch.randint(30, (2, 12))
    before = model(tokens).logits
    assert leakcheck(model, "position_ids").leaks and leakcheck(model, "seq_idx").raises
    assert replace(model) is model
    assert all(isinstance(layer.mixer, Ours) and not layer.mixer.training for layer in model.layers)
    assert [layer.mixer.layer_idx for layer in model.layers] == [0, 1]
    shared = Theirs(8, d_state=4).requires_grad_(False)
    twice = replace(nn.ModuleList([shared, shared]))
    assert isinstance(twice[0], Ours) and twice[0] is twice[1] and not any(p.requires_grad for p in twice.parameters())
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert relative_error(model(tokens).logits.detach(), before.detach().double()) < 1e-6
    result = leakcheck(model, "seq_idx")
    assert result.ok, str(result)
    assert leakcheck(model, "position_ids").leaks  # which their model takes and does not read


def test_what_cannot_be_exchanged_is_refused_before_any_work():
    class Mamba2(Theirs):
        pass

    model = MambaLMHeadModel([Theirs(8), Mamba2(8)])
    with pytest.raises(ValueError, match="^model: .*Mamba2"):
        replace(model)
    assert type(model.layers[0].mixer) is Theirs
    with pytest.raises(ValueError, match="^model: .*MambaLM"):
        replace(MambaLM(23, 8, 1))
    with pytest.raises(ValueError, match="^d_conv"):
        replace(MambaLMHeadModel([Theirs(8, d_conv=5)]))
    hooked = MambaLMHeadModel([Theirs(8)])
    hooked.layers[0].mixer.in_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="^model: expected layers without hooks"):
        replace(hooked)
