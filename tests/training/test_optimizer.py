"""Muon steps the projections of layers, AdamW all else; a schedule and a checkpoint hold both."""

import copy

import pytest
import torch

from packmamba import MambaLM
from packmamba.config import OptimizerConfig
from packmamba.training.optimizer import make_optimizer

PROJECTIONS = ("in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight")


def model_and_optimizer(mixer, name="muon", **keys):
    torch.manual_seed(0)
    sizes = {} if mixer == "mamba1" else {"headdim": 8}
    model = MambaLM(vocab_size=30, d_model=16, n_layer=2, mixer=mixer, **sizes)
    return model, make_optimizer(model, OptimizerConfig(name=name, lr=0.01, grad_clip=None, **keys), fused=False)


def give_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("mixer", ["mamba1", "mamba2", "mamba3"])
def test_projections_get_orthogonal_updates_and_all_else_adamw_s(mixer):
    updates = {}
    for name in ("muon", "adamw"):
        model, optimizer = model_and_optimizer(mixer, name, weight_decay=0.0)
        before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        give_gradients(model, 1)
        optimizer.step()
        updates[name] = {key: parameter.detach() - before[key] for key, parameter in model.named_parameters()}
    for key, update in updates["muon"].items():
        if key.endswith(PROJECTIONS):
            values = torch.linalg.svdvals(update)
            assert values.max() < 2 * values.min(), "Newton and Schulz's steps make singular values nearly equal"
            sizes = [float(each[key].square().mean().sqrt()) for each in updates.values()]
            assert 0.1 < sizes[0] / sizes[1] < 1.0
        else:
            assert torch.equal(update, updates["adamw"][key])


def test_one_rate_sets_both_and_a_loaded_state_goes_on_with_the_same_bits():
    model, optimizer = model_and_optimizer("mamba1")
    for seed in range(3):
        give_gradients(model, seed)
        optimizer.step()
    other, resumed = model_and_optimizer("mamba1")
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, stepped in ((model, optimizer), (other, resumed)):
        for group in stepped.param_groups:
            group["lr"] = 0.5
        give_gradients(each, 3)
        stepped.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    still, stopped = model_and_optimizer("mamba1")
    for group in stopped.param_groups:
        group["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in still.parameters()]
    give_gradients(still, 0)
    stopped.step()
    assert all(torch.equal(a, b) for a, b in zip(before, still.parameters()))
