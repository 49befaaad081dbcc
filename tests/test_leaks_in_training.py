"""The check of a run's own batches: it finds a scheme that is not what it says, and changes no bit of training."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from packmamba import MambaLM, SequenceLayout
from packmamba.config import ConfigError
from packmamba.data.batching import PackedBatch
from packmamba.training.boundary import BOUNDARIES, Boundary, Carry, Leak
from packmamba.training.carry import StateCarrier
from packmamba.training.fit import fit
from packmamba.training.leaks import LeakError, check_batch
from packmamba.training.run_id import run_folder
from runs import tiny_config

LAYOUT = SequenceLayout.from_lengths([[5, 1, 6], [9, 3], [4]], row_length=14)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MambaLM(23, 8, 2, d_state=4)


def batch(layout=LAYOUT):
    tokens = torch.randint(1, 23, layout.shape, generator=torch.Generator().manual_seed(0))
    return PackedBatch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), layout)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_every_scheme_does_what_it_says(name, model, recwarn):
    check_batch(model, BOUNDARIES[name](), batch())
    assert not recwarn.list


class Lying(Boundary):
    """Says that nothing crosses."""

    def hidden(self, model, batch):
        return Leak().hidden(model, batch)


class Gradients(Boundary):
    """Lets gradients cross, and nothing else."""

    def hidden(self, model, batch):
        leaked = Leak().hidden(model, batch)
        return super().hidden(model, batch) + (leaked - leaked.detach())


class Tight(Leak):
    """Says that it leaks."""

    def hidden(self, model, batch):
        return Boundary().hidden(model, batch)


def test_a_leak_ends_the_run(model):
    with pytest.raises(LeakError, match="another last token of document 0 of a batch moves document 1, under .*=Lying"):
        check_batch(model, Lying(), batch())
    with pytest.raises(LeakError, match="the gradient of document 1 of a batch reaches other documents"):
        check_batch(model, Gradients(), batch())
    check_batch(model, Gradients(), batch(), gradients=False)


def test_a_scheme_that_does_not_leak_or_carry_though_it_should(model, monkeypatch, recwarn):
    with pytest.warns(UserWarning, match="Tight: a document's last token moves nothing .* though it should"):
        check_batch(model, Tight(), batch())
    check_batch(model, Tight(), batch(SequenceLayout.from_lengths([[5], [3]], row_length=14)))  # has no neighbours
    check_batch(model, Tight(), batch(SequenceLayout.from_lengths([[], []], row_length=14)))
    monkeypatch.setattr(StateCarrier, "left", lambda *_: None)
    with pytest.warns(UserWarning, match="trainer.boundary=carry: .* does not start from what it left"):
        check_batch(model, Carry(), batch())

    def of_another_row(self, layout, turn):
        left = self.turns.get(turn)
        return left and replace(left, states=[tuple(part.flip(0) for part in state) for state in left.states])

    monkeypatch.setattr(StateCarrier, "left", of_another_row)
    with pytest.warns(UserWarning, match="or another does"):
        check_batch(model, Carry(), batch())


def plain(value):
    """A scheme's state with tensors as lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return (
        [plain(item) for item in value]
        if isinstance(value, (list, tuple))
        else getattr(value, "tolist", lambda: value)()
    )


@pytest.mark.parametrize("name", [name for name, scheme in BOUNDARIES.items() if scheme.keeps])
def test_a_batch_is_left_as_it_was(name, model, recwarn):
    """In the middle of carried states too."""
    boundary = BOUNDARIES[name]()
    boundary.hidden(model, batch())
    boundary.hidden(model, batch(SequenceLayout.from_lengths([[3], [2], [1]], 14, [[6], [3], [4]])))
    states = plain(boundary.state_dict())
    going_on = batch(SequenceLayout.from_lengths([[3, 2], [14], [2, 2]], 14, [[9, 0], [5], [5, 0]]))
    tokens = going_on.tokens.clone()
    rng = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    check_batch(model, boundary, going_on)
    assert plain(boundary.state_dict()) == states and torch.equal(tokens, going_on.tokens) and not recwarn.list
    assert torch.equal(torch.get_rng_state(), rng[0]) and random.getstate() == rng[1]
    assert (np.random.get_state()[1] == rng[2]).all()  # noqa: NPY002
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [(), ("trainer.boundary=carry", "data.strategy=split", "data.streams=2")])
def test_training_is_the_same_to_the_bit(tmp_path, scheme, monkeypatch):
    found = []
    for every in ("null", "2"):
        config = tiny_config(tmp_path, f"trainer.leakcheck_every={every}", f"runs_dir={tmp_path}/{every}", *scheme)
        record = fit(config, progress=False)
        weights = torch.load(run_folder(config) / "pytorch_model.bin", weights_only=True)
        found.append((weights, [point["loss"] for point in record["curves"]["train"]], record["config"]))
    assert found[0][1] == found[1][1]
    assert all(torch.equal(tensor, found[1][0][name]) for name, tensor in found[0][0].items())
    assert "leakcheck_every" not in found[0][2]["trainer"]


@pytest.mark.slow
def test_a_run_checks_its_first_batch(tmp_path, monkeypatch):
    monkeypatch.setitem(BOUNDARIES, "lying", Lying)
    with pytest.raises(LeakError, match="trainer.boundary=lying"):
        fit(tiny_config(tmp_path, "trainer.boundary=lying"), progress=False)
    fit(tiny_config(tmp_path, "trainer.boundary=lying", "trainer.leakcheck_every=null"), progress=False)
    with pytest.raises(ConfigError, match="leakcheck_every: expected at least 0 or null, got -1"):
        tiny_config(tmp_path, "trainer.leakcheck_every=-1")
