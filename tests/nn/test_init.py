"""Models made on the device meta, emptied and initialised are fresh ones."""

import copy
import math
from functools import partial
from itertools import chain

import pytest
import torch
import torch.nn.functional as F

from packmamba import MambaLM, PackedMamba, PackedMamba2, PackedMamba3
from packmamba.integrations.mamba_ssm import Mamba
from processes import run_ranks

SIZES = {"vocab_size": 37, "d_model": 16, "n_layer": 3}
MAMBA2 = {"mixer": "mamba2", "headdim": 8}
MAMBA3 = {"mixer": "mamba3", "headdim": 8}
CONFIGS = {
    "mamba1": {},
    "mamba1-everything": {"tie_embeddings": False, "bias": True, "dt_rank": 3, "expand": 3},
    "mamba1-narrow": {"d_model": 48, "n_layer": 1, "d_state": 1, "conv_bias": False, "dt_min": 0.01, "dt_max": 0.01},
    "mamba2": MAMBA2,
    "mamba2-everything": MAMBA2 | {"tie_embeddings": False, "bias": True, "ngroups": 2},
    "mamba2-wide": MAMBA2 | {"d_model": 48, "D_has_hdim": True, "A_init_range": (2, 3), "d_state": 8},
    "mamba3": MAMBA3 | {"d_intermediate": 20},
    "mamba3-everything": MAMBA3 | {"tie_embeddings": False, "ngroups": 2, "is_outproj_norm": True, "d_state": 8},
}
LAYERS = {
    "mamba1": lambda: PackedMamba(16, bias=True),
    "mamba2": lambda: PackedMamba2(16, headdim=8, bias=True),
    "mamba3": lambda: PackedMamba3(16, headdim=8, is_outproj_norm=True),
    "mamba_ssm": lambda: Mamba(16, bias=True),
}


def emptied(make, to=lambda module: module):
    """Return the module, made on meta, with NaN in all its parameters."""
    with torch.device("meta"):
        module = to(make())
    fill_with_nan(module.to_empty(device="cpu"))
    return module


def fill_with_nan(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(math.nan)


def assert_same(module, fresh):
    """The same weights to the bit, marks and ties."""
    named, expected = (dict(of.named_parameters()) for of in (module, fresh))
    assert named.keys() == expected.keys()
    for name, parameter in expected.items():
        assert named[name].dtype == parameter.dtype and torch.equal(named[name], parameter), name
        assert vars(named[name]) == vars(parameter), name


def seeded(call, seed):
    """Return what the call returns, and what would be drawn next."""
    torch.manual_seed(seed)
    return call(), torch.rand(2, dtype=torch.float64)


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_an_initialised_model_is_a_fresh_one(config, seed):
    fresh, expected_next = seeded(lambda: MambaLM(**SIZES | config), seed)
    model = emptied(lambda: MambaLM(**SIZES | config))
    for _ in range(2):  # of an initialised model too
        _, drawn_next = seeded(model.init_weights, seed)
        assert_same(model, fresh)
        assert torch.equal(drawn_next, expected_next)
    assert (model.lm_head.weight is model.backbone.embedding.weight) == config.get("tie_embeddings", True)
    assert_same(copy.deepcopy(model), copy.deepcopy(fresh))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("config", [CONFIGS["mamba1-everything"], MAMBA2, MAMBA3], ids=["mamba1", "mamba2", "mamba3"])
def test_other_dtypes(config, dtype, request):
    fresh, _ = seeded(lambda: MambaLM(**SIZES | config).to(dtype), 0)
    model = emptied(lambda: MambaLM(**SIZES | config), lambda module: module.to(dtype))
    seeded(model.init_weights, 0)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    torch.testing.assert_close(dict(model.named_parameters()), dict(fresh.named_parameters()), rtol=0, atol=0)

    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(dtype)
    fresh, _ = seeded(lambda: MambaLM(**SIZES | config), 0)
    model = emptied(lambda: MambaLM(**SIZES | config))
    seeded(model.init_weights, 0)
    assert_same(model, fresh)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_layer_resets_itself_with_its_children(make):
    fresh, expected_next = seeded(make, 3)
    layer = emptied(make)
    _, drawn_next = seeded(layer.reset_parameters, 3)
    assert_same(layer, fresh)
    assert torch.equal(drawn_next, expected_next)


def reset_all(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def reset_as_lightning(model):
    """The loop of ModelParallelStrategy, which asks modules with parameters of their own."""
    for module in model.modules():
        if any(True for _ in chain(module.parameters(recurse=False), module.buffers(recurse=False))):
            module.reset_parameters()


TRAINERS = {
    "children first": lambda model: model.apply(reset_all),
    "parents first": lambda model: [reset_all(module) for module in model.modules()],
    "Lightning": reset_as_lightning,
}


@pytest.mark.parametrize("mixer", [{}, MAMBA2], ids=["mamba1", "mamba2"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("reset", TRAINERS.values(), ids=TRAINERS)
def test_trainers_that_reset_each_module_undo_nothing(reset, mixer, tied):
    sizes = {"vocab_size": 300, "d_model": 64, "n_layer": 4, "bias": True, "tie_embeddings": tied}
    model = emptied(lambda: MambaLM(**sizes, **mixer))
    reset(model)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert (model.lm_head.weight is model.backbone.embedding.weight) == tied
    for weight in (model.backbone.embedding.weight, model.lm_head.weight):
        assert weight.detach().std() == pytest.approx(0.02, rel=0.05)
    for mixer in (layer.mixer for layer in model.backbone.layers):
        dt = F.softplus(mixer.dt_bias if hasattr(mixer, "dt_bias") else mixer.dt_proj.bias)
        assert 0.001 * (1 - 1e-4) <= dt.min() and dt.max() <= 0.1 * (1 + 1e-4)
        assert not mixer.in_proj.bias.any() and not mixer.out_proj.bias.any()
        bound = (128 * 4) ** -0.5
        assert 0.9 * bound < mixer.out_proj.weight.abs().max() <= bound * (1 + 1e-6)


def initialise_shards():
    """Initialise sharded models on each of two ranks of other seeds; compare them whole with fresh
    ones of rank 0's.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in ("mamba1", "mamba1-everything", "mamba2", "mamba3"):
        config = CONFIGS[name]
        with torch.device("meta"):
            model = MambaLM(**SIZES | config)
        for part in (*model.backbone.layers, model):
            fully_shard(part)
        fill_with_nan(model.to_empty(device="cpu"))
        torch.manual_seed(rank)
        model.init_weights()
        torch.manual_seed(0)
        fresh = MambaLM(**SIZES | config)
        whole = {key: shard.full_tensor() for key, shard in model.state_dict().items()}
        assert all(torch.equal(whole[key], tensor) for key, tensor in fresh.state_dict().items()), name
        tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(rank))
        assert torch.equal(model(tokens), fresh(tokens)), name
        model(tokens).sum().backward()
        assert all(parameter.grad.to_local().isfinite().all() for parameter in model.parameters())
        fill_with_nan(model)
        reset_as_lightning(model)
        assert all(shard.full_tensor().isfinite().all() for shard in model.state_dict().values()), name


@pytest.mark.slow
def test_shards_of_two_processes_are_the_unsharded_model(tmp_path):
    run_ranks(2, initialise_shards, output=tmp_path / "output.txt")
