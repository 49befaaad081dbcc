"""Test construction, initialisation, optimizer groups and errors of MambaLM and its layers."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from models import LAYOUT, VOCAB, build, every_config, random_tokens
from packmamba import MambaLM, PackedMamba, PackedMamba2, PackedMamba3


def test_initialisation_is_mamba_s():
    torch.manual_seed(0)
    n_layer, d_model = 4, 64
    options = {"d_state": 5, "bias": True, "tie_embeddings": False}
    model = MambaLM(vocab_size=300, d_model=d_model, n_layer=n_layer, **options)
    mixers = [layer.mixer for layer in model.backbone.layers]
    for mixer in mixers:
        dt = F.softplus(mixer.dt_proj.bias)
        assert 0.001 * (1 - 1e-4) <= dt.min() < 0.0015 and 0.07 < dt.max() <= 0.1 * (1 + 1e-4)
        assert abs(dt.log().mean() - math.log(0.01)) < 0.5, "log-uniform"
        assert torch.allclose(mixer.A_log, torch.arange(1.0, 6.0).log().expand(128, 5))
        assert (mixer.D == 1).all()
        assert (mixer.in_proj.bias == 0).all() and (mixer.out_proj.bias == 0).all()
        bounds = {"in_proj": d_model**-0.5, "conv1d": 4**-0.5, "x_proj": 128**-0.5, "dt_proj": mixer.dt_rank**-0.5}
        for name, bound in (bounds | {"out_proj": (128 * n_layer) ** -0.5}).items():
            largest = getattr(mixer, name).weight.abs().max()
            assert 0.9 * bound < largest <= bound * (1 + 1e-6), "uniform within its bound"
    assert abs(model.backbone.embedding.weight.std() - 0.02) < 1e-3
    assert all((p == 1).all() for name, p in model.named_parameters() if "norm" in name)
    assert not torch.equal(mixers[0].dt_proj.bias, mixers[1].dt_proj.bias)
    for limits, dt in (((1e-6, 1e-5, 1e-4), 1e-4), ((0.5, 0.5, 1e-4), 0.5)):
        mixer = PackedMamba(d_model, **dict(zip(("dt_min", "dt_max", "dt_init_floor"), limits)))
        assert torch.allclose(F.softplus(mixer.dt_proj.bias), torch.tensor(dt))
    assert [PackedMamba(d_model).dt_rank for d_model in (1, 16, 17, 768)] == [1, 1, 2, 48]


def test_loading_keeps_the_head_tied():
    weights = build().state_dict()
    with torch.device("meta"):
        empty = build()
    empty.to_empty(device="cpu").load_state_dict(weights)
    assigned = build()
    assigned.load_state_dict(weights, assign=True)
    for model in (empty, assigned, copy.deepcopy(assigned)):
        assert model.lm_head.weight is model.backbone.embedding.weight
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    other = weights | {"lm_head.weight": weights["lm_head.weight"] + 1}
    for assign in (True, False):
        with pytest.raises(ValueError, match="^lm_head.weight: expected the embedding's"):
            build().load_state_dict(other, assign=assign)


@every_config
def test_weight_decay_groups_hold_each_parameter_once(config):
    model = copy.deepcopy(build(**config))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, exempt = (group["params"] for group in model.weight_decay_groups(0.1))
    assert [group["weight_decay"] for group in model.weight_decay_groups(0.1)] == [0.1, 0.0]
    assert sorted(map(id, decayed + exempt)) == sorted(names)
    mamba_exempts = ("A_log", "D", "bias", "norm.weight", "norm2.weight", "norm_f.weight")
    assert {names[id(p)] for p in exempt} == {name for name in names.values() if name.endswith(mamba_exempts)}


MODEL = build(dtype=torch.float32)
STATES = MODEL.start_states(LAYOUT.num_documents)
BAD_CALLS = [  # how the error begins, and the call
    ("vocab_size", lambda t: MambaLM(0, 8, 1)),
    ("d_model", lambda t: MambaLM(VOCAB, "8", 1)),
    ("d_state", lambda t: MambaLM(VOCAB, 8, 1, d_state=0)),
    ("d_conv", lambda t: MambaLM(VOCAB, 8, 1, d_conv=5)),
    ("dt_rank", lambda t: MambaLM(VOCAB, 8, 1, dt_rank="all")),
    ("dt_min, dt_max", lambda t: MambaLM(VOCAB, 8, 1, dt_max=0.0)),
    ("backend", lambda t: MambaLM(VOCAB, 8, 1, backend="triton")),
    ("d_intermediate", lambda t: MambaLM(VOCAB, 8, 1, d_intermediate=-1)),
    ("headdim", lambda t: PackedMamba2(32, headdim=24)),
    ("headdim", lambda t: PackedMamba2(32, headdim=16, ngroups=3)),
    ("d_conv", lambda t: PackedMamba2(32, headdim=16, d_conv=5)),
    ("dt_limit", lambda t: PackedMamba2(32, headdim=16, dt_limit=(0.1, 0.001))),
    ("A_init_range", lambda t: PackedMamba2(32, headdim=16, A_init_range=(-16, -1))),
    ("d_state", lambda t: PackedMamba2(32, headdim=16, d_state=300)),
    ("d_state", lambda t: PackedMamba3(8, headdim=4, is_mimo=True, d_state=5)),
    ("mimo_rank", lambda t: PackedMamba3(8, headdim=4, is_mimo=True, mimo_rank=0)),
    ("decay", lambda t: PackedMamba3(8, headdim=4, decay="exp")),
    ("headdim", lambda t: PackedMamba3(8, headdim=3)),
    ("rope_fraction", lambda t: PackedMamba3(8, headdim=4, rope_fraction=0.3)),
    ("backend", lambda t: PackedMamba3(8, headdim=4, backend="mamba_ssm")),
    ("tokens", lambda t: MODEL(t.float())),
    ("tokens", lambda t: MODEL(t + VOCAB)),
    ("tokens", lambda t: MODEL(t[0])),
    ("layout", lambda t: MODEL(t[:, 1:], layout=LAYOUT)),
    ("conv_layout", lambda t: MODEL(t[1:], conv_layout=LAYOUT)),
    ("ssm_layout", lambda t: MODEL(t, ssm_layout=[[14]] * 4)),
    ("states", lambda t: MODEL(t, layout=LAYOUT, states=STATES[:1])),
    ("conv_state", lambda t: MODEL(t, layout=LAYOUT, states=MODEL.start_states(1))),
    ("hidden", lambda t: MODEL.backbone.layers[0].mixer(t.float())),
    ("hidden", lambda t: MODEL.backbone.layers[0].mixer(t[..., None].expand(-1, -1, 8))),
]


@pytest.mark.parametrize(("name", "call"), BAD_CALLS)
def test_calls_are_refused_in_one_sentence(name, call):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected .*, got ") as caught:
        call(random_tokens())
    assert "\n" not in str(caught.value)
