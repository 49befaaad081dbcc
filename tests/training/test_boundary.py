"""Boundary schemes: each against pieces of documents computed one by one, from states that are
looked up by hand.
"""

import copy

import lightning
import numpy as np
import pytest
import torch

from models import losses_alone
from packmamba.evaluation.language_modeling import token_losses
from packmamba.evaluation.packed_forward import TrainingLayoutReader
from packmamba.training.boundary import BOUNDARIES, Carry, Reset, flatten_states
from packmamba.training.lit_module import PackedLitModule
from runs import data_of, tiny_config

ROWS, STREAMS, LENGTH = 3, 12, 8
POOL = [
    "data.strategy=concat_split", f"data.streams={STREAMS}", "data.stagger=true", "data.batching=stream",
    f"data.row_length={LENGTH}", f"data.tokens_per_step={ROWS * LENGTH}", f"data.max_tokens_per_batch={ROWS * LENGTH}",
]  # fmt: skip
HEADS = "model.mixer_options={headdim: 8}"
MIXERS = {"mamba1": [], "mamba2": ["model.mixer=mamba2", HEADS], "mamba3": ["model.mixer=mamba3", HEADS]}
every_mixer = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
PLAIN = ["data.strategy=concat_split", "data.streams=3", "data.batching=stream", "data.tokens_per_step=72"]


def made(folder, *keys):
    """A data module and a float64 module with random weights."""
    config = tiny_config(folder, "model.n_layer=1", *keys)
    data = data_of(config)
    lightning.seed_everything(3, verbose=False)
    module = PackedLitModule.from_config(config, data.vocab_size).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return data, module


def batches_of(data, steps):
    return [data.steps[number].batches[0] for number in range(steps)]


class ByHand:
    """Losses of a scheme, piece by piece: each its own call of the model."""

    def __init__(self, module, scheme):
        self.module, self.scheme = module, scheme
        self.final, self.stopped, self.before = {}, {}, []
        self.first, self.second, self.weight = None, None, 0.0
        self.noise = torch.Generator().manual_seed(torch.initial_seed())

    def losses(self, batch):
        layout, found, turn = batch.layout, torch.zeros(batch.tokens.shape, dtype=torch.float64), batch.turn
        fresh = self.module.model.start_states(1)
        incoming, final = self.incoming(turn, layout, fresh), {}
        for s in range(layout.num_documents):
            row, here = int(layout.rows[s]), slice(int(layout.starts[s]), int(layout.ends[s]))
            place = sum(int(other) == row for other in layout.rows[:s])
            start = incoming[row] if layout.offsets[s] else fresh
            if self.scheme == "state_passing_within_row":
                passed = self.before[(row + place) % layout.shape[0] % len(self.before)] if self.before else fresh
                start = passed if place else fresh
            if self.scheme == "leak":
                start = final.get(row, fresh)
            tokens, targets = (t.flatten()[here] for t in (batch.tokens, batch.targets))
            logits, final[row] = self.module.model(tokens[None], states=start, return_states=True)
            loss = torch.nn.functional.cross_entropy(logits[0], targets, reduction="none")
            found.view(-1)[here] = loss * batch.loss_mask.flatten()[here]
            self.stopped[turn, row] = int(layout.offsets[s] + layout.lengths[s])
        for row in range(layout.shape[0]):
            self.final.pop((turn, row), None)
        self.final |= {(turn, row): state for row, state in final.items()}
        self.before = [final[row] for row in sorted(final)]
        if final:
            self.add_moments(self.before)
        return found

    def incoming(self, turn, layout, fresh):
        own = {row: self.final.get((turn, row), fresh) for row in range(layout.shape[0])}
        alive = [row for row in own if (turn, row) in self.final]
        if self.scheme in ("reset", "leak"):
            return dict.fromkeys(own, fresh)
        if self.scheme == "carry_scan":
            return {row: [(*zero[:-1], state[-1]) for zero, state in zip(fresh, own[row])] for row in own}
        if self.scheme == "state_passing":
            if len(alive) < 2:
                return dict.fromkeys(own, fresh)
            sorted_rows = sorted(alive, key=lambda row: self.stopped[turn, row])
            ring = sorted_rows[::2] + sorted_rows[1::2][::-1]
            return {row: own[ring[ring.index(row) - 1]] if row in alive else fresh for row in own}
        if self.scheme == "fitted_noise" and layout.continues.any():
            rows = [[] for _ in own]
            for i, layer in enumerate(fresh):
                drawn = []
                for j, part in enumerate(layer):
                    noise = torch.randn(len(own), *part.shape[1:], dtype=torch.float64, generator=self.noise)
                    mean, square = self.first[i][j] / self.weight, self.second[i][j] / self.weight
                    drawn.append(mean + (square - mean**2).clamp(min=0) ** 0.5 * noise)
                for row, state in enumerate(rows):
                    state.append(tuple(part[row : row + 1] for part in drawn))
            return dict(enumerate(rows))
        return own

    def add_moments(self, states):
        """Each batch has the weight of one in a hundred."""
        layers = [[torch.cat(parts) for parts in zip(*layer)] for layer in zip(*states)]
        sums = [[[(part**power).mean(0) for part in layer] for layer in layers] for power in (1, 2)]
        if self.first is None:
            self.first, self.second = ([[0 * part for part in layer] for layer in layers] for _ in range(2))
        for kept, new in zip((self.first, self.second), sums):
            for layer, other in zip(kept, new):
                layer[:] = [0.99 * a + 0.01 * b for a, b in zip(layer, other)]
        self.weight = 0.99 * self.weight + 0.01


SCHEMES = ["reset", "carry", "carry_scan", "state_passing", "fitted_noise", "state_passing_within_row", "leak"]
PARTLY = {"leak_conv", "leak_scan"}  # test_lit_module has their gradients


def test_every_scheme_is_computed_by_hand():
    ours = {name for name, scheme in BOUNDARIES.items() if scheme.__module__.startswith("packmamba.")}
    assert {*SCHEMES} | PARTLY == ours


@pytest.mark.parametrize("scheme", SCHEMES)
@every_mixer
def test_losses_are_those_of_pieces_computed_by_hand(tmp_path, mixer, scheme):
    data, module = made(tmp_path, *POOL, *mixer, f"trainer.boundary={scheme}")
    lightning.seed_everything(5, verbose=False)
    by_hand, found, other = ByHand(module, scheme), BOUNDARIES[scheme](), 0
    with torch.no_grad():
        for batch in batches_of(data, 14):
            losses = module.loss(batch, found)[1]
            assert torch.allclose(losses, by_hand.losses(batch), rtol=1e-9, atol=1e-12)
            other += float((losses - module.loss(batch, Reset())[1]).abs().sum())
    assert (other > 0.1) == (scheme != "reset")


def test_carry_refuses_states_of_another_position(tmp_path):
    data, module = made(tmp_path, *PLAIN, "trainer.boundary=carry")
    batches = batches_of(data, 6)
    goes_on = next(i for i, batch in enumerate(batches) if batch.layout.continues.any())
    carry = Carry()
    for before in ([], batches[: goes_on + 1]):
        for batch in before:
            module.loss(batch, carry)
        with pytest.raises(ValueError, match="expected documents to continue at"):
            module.loss(batches[goes_on], carry)


@pytest.mark.parametrize("scheme", [name for name, made in BOUNDARIES.items() if made.stateful])
@every_mixer
def test_states_are_detached_and_resumed(tmp_path, mixer, scheme):
    data, module = made(tmp_path, *POOL, *mixer, f"trainer.boundary={scheme}")
    batches, boundary, fresh = batches_of(data, 14), module.boundary, BOUNDARIES[scheme]()
    for boundary.step, batch in enumerate(batches[:10]):
        module.loss(batch, boundary)[0].backward()
    stored = boundary.stored
    states = stored if isinstance(stored, list) else [s for row_states, *_ in stored.values() for s in row_states]
    assert states and not any(part.requires_grad for part in flatten_states(states))
    if boundary.continues:
        assert boundary.measures()["state_age_steps"] == STREAMS // ROWS
    fresh.load_state_dict(copy.deepcopy(boundary.state_dict()), torch.device("cpu"))
    assert fresh.measures() == boundary.measures()
    for batch in batches[10:]:
        assert torch.equal(module.loss(batch, fresh)[1], module.loss(batch, boundary)[1])
    boundary.reset()
    assert not boundary.stored


@pytest.mark.parametrize(
    "keys", [["data.strategy=greedy", "trainer.boundary=leak"], [*POOL, "trainer.boundary=carry"]], ids=str
)
def test_validation_as_trained_is_what_evaluations_read(tmp_path, keys):
    """By the run's validation and by others: carry reads whole documents, a leak something else."""
    data, module = made(tmp_path, *keys)
    corpus = data.corpora.validation
    documents = [corpus.document(i) for i in range(len(corpus))]
    passes = TrainingLayoutReader(documents, data.config, BOUNDARIES[module.boundary.name]()).read(module.model)
    module.on_validation_epoch_start()
    with torch.no_grad():
        for loader, batches in enumerate(data.val_dataloader()):
            for i, batch in enumerate(batches):
                module.validation_step(batch, i, dataloader_idx=loader)
    found, alone = module.as_trained.compute(), module.alone.compute()
    losses = np.concatenate(token_losses(module.model, documents, passes=passes))
    by_hand = np.concatenate([losses_alone(module.model, tokens) for tokens in documents])
    assert int(found["counts"].sum()) == int(alone["counts"].sum()) == len(losses) == len(by_hand)
    assert float(found["loss"]) == pytest.approx(losses.mean(), rel=1e-9)
    assert float(alone["loss"]) == pytest.approx(float(by_hand.mean()), rel=1e-9)
    assert (abs(float(found["loss"] - alone["loss"])) > 1e-6) == (module.boundary.name == "leak")
