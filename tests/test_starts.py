"""The pool of streams, and what a continuing piece starts from: each scheme against pieces computed one by one, by hand."""

import functools
from collections import Counter

import lightning
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import run
from packmamba.config import ConfigError
from packmamba.data.datamodule import PackedDataModule, StepDataset, StepSampler
from packmamba.evaluation.language_modeling import token_losses
from packmamba.evaluation.training_layout import TrainingLayoutReader
from packmamba.training.boundary import BOUNDARIES, Carry, Reset
from packmamba.training.fit import fit
from packmamba.training.lit_module import PackedLitModule
from processes import fork_ranks, statuses
from runs import final_state, losses_of, tiny_config, write_config

ROWS, STREAMS, LENGTH = 3, 12, 8
POOL = [
    "data.strategy=split", f"data.streams={STREAMS}", "data.stagger=true", "data.mode=stream", f"data.row_length={LENGTH}",
    f"data.tokens_per_step={ROWS * LENGTH}", f"data.slots_per_batch={ROWS * LENGTH}",
]  # fmt: skip
STARTS = ["reset", "carry", "carry_scan", "foreign", "noise"]


def pool(folder, *overrides):
    data = PackedDataModule.from_config(tiny_config(folder, *POOL, *overrides), progress=False)
    data.setup()
    return data


def epoch(data):
    data.steps.schedule.step(10**3)
    return range(data.steps.schedule._first_steps[1])


def rows_of(step):
    """Each row's pieces, (tokens, offset, whether its last token has a target), of all batches."""
    found = []
    for batch in step.batches:
        layout = batch.layout
        rows = [[] for _ in range(layout.shape[0])]
        for s in range(layout.num_documents):
            here = slice(int(layout.starts[s]), int(layout.ends[s]))
            tokens, mask = batch.tokens.flatten()[here].tolist(), batch.loss_mask.flatten()[here].tolist()
            rows[int(layout.rows[s])].append((tokens, int(layout.offsets[s]), mask[-1]))
        found += rows
    return found


# --- the schedule


@pytest.mark.slow
def test_every_arm_has_the_same_tokens_in_the_same_steps(tmp_path):
    arms = {name: pool(tmp_path, f"trainer.boundary={name}") for name in STARTS}
    loader = DataLoader(arms["foreign"].steps, batch_size=None, sampler=StepSampler(lambda: 0, 16), num_workers=2)
    for step, of_workers in zip(range(16), loader, strict=True):
        expected = arms["reset"].steps[step]
        for other in (*(data.steps[step] for data in arms.values()), of_workers):
            (a,), (b,) = expected.batches, other.batches
            assert a.layout == b.layout
            assert all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("tokens", "targets", "loss_mask"))
            assert (expected.num_targets, expected.num_tokens) == (other.num_targets, other.num_tokens)
        assert of_workers.batches[0].turn == step % (STREAMS // ROWS)


def test_the_pool_s_streams_go_on_and_take_turns(tmp_path):
    data = pool(tmp_path)
    turns = STREAMS // ROWS
    streams, continuing, left = {}, 0, 0
    for step in epoch(data):
        for row, pieces in enumerate(rows_of(data.steps[step])):
            stream = step % turns * ROWS + row
            for place, (tokens, offset, goes_on) in enumerate(pieces):
                before = streams.setdefault(stream, [])
                if offset:
                    continuing += 1
                    assert place == 0 and before[-1][1] and len(before[-1][0]) == offset
                    before[-1] = (before[-1][0] + tokens, goes_on)
                else:
                    left += bool(before) and before[-1][1]
                    before.append((tokens, goes_on))
    corpus = data.corpora.train
    documents = Counter(tuple(corpus.document(i).tolist()) for i in range(corpus.num_documents))
    parts = [tuple(tokens) for stream in streams.values() for tokens, _ in stream]
    whole = Counter(part for part in parts if documents[part])
    rest = [part for part in parts if not documents[part]]
    cut = list((documents - whole).elements())
    assert left <= len(cut), "of what goes on, only a part whose document opened a stream is left"
    assert 2 * len(cut) == len(rest) and STREAMS // 2 < len(cut) <= STREAMS and continuing > 20
    for document in cut:
        ends = next(p for p in rest if document[-len(p) :] == p and document[: -len(p)] in rest)
        rest.remove(ends)
        rest.remove(document[: -len(ends)])
    assert not rest, "of each stream one document is in two parts; nothing else is missing, nothing twice"
    opening = [len(streams[stream][0][0]) for stream in range(STREAMS)]
    assert len({length % LENGTH for length in opening}) > 4


def test_a_round_passes_before_a_document_goes_on(tmp_path):
    data = pool(tmp_path)
    turns = STREAMS // ROWS
    held = [{id_ for _, id_ in documents_of(data, step)} for step in epoch(data)]
    for step, documents in enumerate(held):
        assert not documents & set().union(*held[max(0, step - turns + 1) : step])
    assert sum(bool(a & b) for a, b in zip(held, held[turns:])) > 10


def documents_of(data, step):
    arrangement, groups = data.steps.schedule.step(step)
    plan = arrangement.plan
    for row in groups[0]:
        for piece in range(plan.row_offsets[row], plan.row_offsets[row + 1]):
            # A part of a document, of which the other lies elsewhere.
            yield piece, int(plan.document[piece])


def test_shuffled_rows_are_the_pool_s(tmp_path):
    plain, shuffled = pool(tmp_path), pool(tmp_path, "data.shuffle_steps=12")
    steps = epoch(plain)
    assert len(steps) > 20 and len(steps) % 12
    for first in range(0, len(steps), 12):
        block = [
            [row for step in steps[first : first + 12] for row in rows_of(data.steps[step])]
            for data in (plain, shuffled)
        ]
        assert block[0] != block[1] and sorted(block[0]) == sorted(block[1])
    targets = [sum(data.steps[step].num_targets for step in steps) for data in (plain, shuffled)]
    assert targets[0] == targets[1]


def test_ranks_share_the_pool(tmp_path):
    keys = [f"data.tokens_per_step={2 * ROWS * LENGTH}", "trainer.boundary=carry"]
    data = pool(tmp_path, *keys)
    ranks = [StepDataset(data.schedule(2), rank) for rank in range(2)]
    assert STREAMS == 2 * 2 * ROWS
    for step in range(12):
        whole, shares = data.steps[step], [rank[step] for rank in ranks]
        assert [batch.turn for batch in whole.batches] == [2 * (step % 2), 2 * (step % 2) + 1]
        for i, share in enumerate(shares):
            (batch,) = share.batches
            assert torch.equal(batch.tokens, whole.batches[i].tokens) and batch.turn == step % 2


REFUSALS = {
    "data.streams=7": "data.streams: expected a multiple of the 3 rows of a step, got 7",
    "data.tokens_per_step=28": "data.tokens_per_step: expected a multiple of data.row_length=8.*, got 28",
    "data.slots_per_batch=16": "data.slots_per_batch: expected forward passes of equally many rows, 3 a step.* got room for 2",
    "data.slots_per_batch=8": "trainer.boundary=foreign needs batches of at least 2 rows, got 1",
    "data.shuffle_steps=4": "data.shuffle_steps: trainer.boundary=foreign needs rows in order, got 4",
    "trainer.boundary=reset data.mode=matched": "data.stagger: expected strategy split and mode stream, got 'split'",
    "trainer.boundary=reset data.stagger=false data.mode=matched data.shuffle_steps=2": "data.shuffle_steps: expected mode",
}


@pytest.mark.parametrize("overrides", REFUSALS)
def test_refuses_in_one_sentence(tmp_path, overrides):
    with pytest.raises(ConfigError, match=REFUSALS[overrides]):
        pool(tmp_path, "trainer.boundary=foreign", *overrides.split())


# --- what pieces start from


class ByHand:
    """A scheme's losses and left states, piece by piece: each its own call of the model, from a state that is looked up here."""

    def __init__(self, module, scheme):
        self.module, self.scheme = module, scheme
        self.left, self.stopped = {}, {}  # by (turn, row)
        self.first, self.second, self.weight = None, None, 0.0
        self.noise = torch.Generator().manual_seed(torch.initial_seed())
        self.before = []

    def losses(self, batch):
        layout, found, turn = batch.layout, torch.zeros(batch.tokens.shape, dtype=torch.float64), batch.turn
        fresh = self.module.model.start_states(1)
        offered = self.offered(turn, layout, fresh)
        left = {}
        for s in range(layout.num_documents):
            row, here = int(layout.rows[s]), slice(int(layout.starts[s]), int(layout.ends[s]))
            place = sum(int(other) == row for other in layout.rows[:s])
            start = offered[row] if layout.offsets[s] else fresh
            if self.scheme == "foreign_heads":
                start = (
                    self.before[(row + place) % layout.shape[0] % len(self.before)] if place and self.before else fresh
                )
            tokens, targets = (t.flatten()[here] for t in (batch.tokens, batch.targets))
            logits, left[row] = self.module.model(tokens[None], states=start, return_states=True)
            loss = torch.nn.functional.cross_entropy(logits[0], targets, reduction="none")
            found.view(-1)[here] = loss * batch.loss_mask.flatten()[here]
            self.stopped[turn, row] = int(layout.offsets[s] + layout.lengths[s])
        for row in range(layout.shape[0]):
            self.left.pop((turn, row), None)
        self.left |= {(turn, row): state for row, state in left.items()}
        self.before = [left[row] for row in sorted(left)]
        if left:
            self.add_moments([left[row] for row in sorted(left)])
        return found

    def offered(self, turn, layout, fresh):
        own = {row: self.left.get((turn, row), fresh) for row in range(layout.shape[0])}
        alive = [row for row in own if (turn, row) in self.left]
        continues = bool(layout.continues.any())
        if self.scheme == "reset":
            return dict.fromkeys(own, fresh)
        if self.scheme == "carry_scan":
            return {row: [(zero[0], state[1]) for zero, state in zip(fresh, own[row])] for row in own}
        if self.scheme == "foreign":
            if len(alive) < 2:
                return dict.fromkeys(own, fresh)
            sorted_rows = sorted(alive, key=lambda row: self.stopped[turn, row])
            ring = sorted_rows[::2] + sorted_rows[1::2][::-1]
            return {row: own[ring[ring.index(row) - 1]] if row in alive else fresh for row in own}
        if self.scheme == "noise" and continues:
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
        sums = (
            [[part.mean(0) for part in layer] for layer in layers],
            [[(part**2).mean(0) for part in layer] for layer in layers],
        )
        if self.first is None:
            self.first, self.second = ([[0 * part for part in layer] for layer in layers] for _ in range(2))
        for kept, new in zip((self.first, self.second), sums):
            for layer, other in zip(kept, new):
                layer[:] = [0.99 * a + 0.01 * b for a, b in zip(layer, other)]
        self.weight = 0.99 * self.weight + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [*STARTS, "foreign_heads"])
def test_losses_are_those_of_pieces_computed_by_hand(tmp_path, scheme):
    data = pool(tmp_path, f"trainer.boundary={scheme}", "model.learned_initial_state=true", "model.n_layer=1")
    lightning.seed_everything(3, verbose=False)
    module = PackedLitModule.from_config(data.config, data.corpora.train.vocab_size).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    lightning.seed_everything(5, verbose=False)
    by_hand, found, other = ByHand(module, scheme), BOUNDARIES[scheme](), 0
    with torch.no_grad():
        for step in epoch(data):
            (batch,) = data.steps[step].batches
            losses = module.losses(batch, found)
            assert torch.allclose(losses, by_hand.losses(batch), rtol=1e-9, atol=1e-12), step
            other += float((losses - module.losses(batch, Reset())).abs().sum())
    assert (other > 1) == (scheme != "reset")


def test_documents_are_read_as_trained_in_streams_of_a_batch(tmp_path):
    """By the run's evaluation and by others: as many streams as a batch has rows, each from a document's beginning."""
    data = pool(tmp_path, "trainer.boundary=carry")
    module = PackedLitModule.from_config(data.config, data.corpora.train.vocab_size).double()
    documents = [data.corpora.validation.document(i) for i in range(data.corpora.validation.num_documents)]
    rows = TrainingLayoutReader(documents, data.config.data, BOUNDARIES["carry"]())
    sums = np.zeros(2)
    module.on_validation_epoch_start()
    with torch.no_grad():
        for i in range(len(data.evaluations[1])):
            batch = data.evaluations[1][i]
            assert batch.layout.shape == (ROWS, LENGTH) and batch.turn == 0
            module.validation_step(batch, i, dataloader_idx=1)
            sums += batch.layout.num_tokens, int(batch.layout.continues.sum())
    assert sums[0] == sum(map(len, documents)) and sums[1] > 5
    losses = np.concatenate(token_losses(module.model, documents, reader=functools.partial(rows.read, module.model)))
    assert module.as_trained.compute()["loss"] == pytest.approx(losses.mean(), rel=1e-9)


@pytest.mark.parametrize(("lengths", "streams"), [([400, *[10] * 20], 2), ([50, 50], 2), ([30] * 40, ROWS)])
def test_a_long_document_is_not_read_as_trained_beside_empty_rows(tmp_path, lengths, streams):
    data = pool(tmp_path, "trainer.boundary=carry").config.data
    for order in (lengths, lengths[::-1]):
        rows = TrainingLayoutReader([np.ones(length, dtype=np.int64) for length in order], data, BOUNDARIES["carry"]())
        assert {len(batch) for batch in rows.batches} == {streams}
        assert sum(map(len, rows.batches)) * LENGTH < 2 * sum(lengths) + streams * LENGTH


def test_states_of_another_shape_are_refused(tmp_path):
    """PyTorch would give one document's state to all."""
    data = pool(tmp_path, "trainer.boundary=carry")
    module = PackedLitModule.from_config(data.config, data.corpora.train.vocab_size)

    class One(BOUNDARIES["carry"]):
        def of_continuing(self, own, fresh, layout):
            return [tuple(part[:1] for part in state) for state in own]

    scheme = One()
    with pytest.raises(ValueError, match=r"states of continuing documents: expected shapes .* got \[\[\(1,"):
        for step in range(8):
            module.losses(data.steps[step].batches[0], scheme)


def test_gradients_stop_where_states_come_from(tmp_path):
    data = pool(tmp_path, "trainer.boundary=foreign")
    module = PackedLitModule.from_config(data.config, data.corpora.train.vocab_size)
    for name in ("carry_scan", "foreign", "noise", "foreign_heads"):
        scheme = BOUNDARIES[name]()
        for step in range(8):
            module.losses(data.steps[step].batches[0], scheme)
            states = (
                scheme.left
                if name == "foreign_heads"
                else [s for left in scheme.carrier.turns.values() for s in left.states]
            )
            assert not any(part.requires_grad for state in states for part in state)


# --- runs


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "workers"), [("noise", 2), ("foreign_heads", 0)])
def test_a_stopped_run_ends_as_one_that_was_not(tmp_path, monkeypatch, scheme, workers):
    """Two batches a step; noise carries states as other schemes do, and has random numbers of its own."""
    take = PackedLitModule.take_step

    def stop(module, step, optimizer, number, *others):
        if number == 7:
            raise RuntimeError("stopped")
        return take(module, step, optimizer, number, *others)

    keys = [*POOL, f"trainer.boundary={scheme}", f"data.tokens_per_step={2 * ROWS * LENGTH}", f"data.num_workers={workers}",
            "trainer.max_steps=10", "trainer.checkpoint_every=1", "trainer.validate_every=5", "trainer.threads=1"]  # fmt: skip
    whole, stopped = (tiny_config(tmp_path, f"runs_dir={tmp_path}/{name}", *keys) for name in ("whole", "stopped"))
    expected = fit(whole, progress=False)
    monkeypatch.setattr(PackedLitModule, "take_step", stop)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(stopped, progress=False)
    monkeypatch.setattr(PackedLitModule, "take_step", take)
    assert losses_of(fit(stopped, progress=False)) == losses_of(expected)
    if scheme == "noise":
        assert expected["metrics"]["state_age_steps"] == 2
        assert expected["metrics"]["state_bytes"] == STREAMS * 2 * 16 * (4 + 3) * 4
    a, b = final_state(stopped)["carry"][0], final_state(whole)["carry"][0]
    name = "states" if scheme == "noise" else "left"
    for x, y in zip(a[name], b[name], strict=True):
        assert all(part.any() and torch.equal(part, other) for part, other in zip(x, y, strict=True))


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    keys = [*POOL, "trainer.boundary=foreign", f"data.tokens_per_step={2 * ROWS * LENGTH}", "trainer.precision=64-true",
            "trainer.max_steps=9"]  # fmt: skip
    alone = tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/alone")
    expected = fit(alone, progress=False)
    both = tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/both", "trainer.devices=2", "trainer.strategy=ddp")
    path, output = write_config(tmp_path / "both.yaml", both), tmp_path / "output.txt"
    assert statuses(*fork_ranks(2, run.main, ["train", str(path)], output=output)) == [0, 0], output.read_text()
    a, b = final_state(both), final_state(alone)
    for name, value in b["state_dict"].items():
        assert torch.allclose(a["state_dict"][name], value, rtol=1e-9, atol=1e-12), name
    assert expected["metrics"]["state_age_steps"] == 2 and len(a["carry"]) == 2
    halves = [rank["positions"].tolist() for rank in a["carry"]]
    together = [*halves[0][:ROWS], *halves[1][:ROWS], *halves[0][ROWS:], *halves[1][ROWS:]]
    assert together == b["carry"][0]["positions"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "heard"), [(2, True), (4, False)])
def test_a_run_too_short_for_a_stream_s_second_turn_says_that_nothing_was_carried(tmp_path, caplog, steps, heard):
    keys = ["trainer.boundary=carry", f"data.tokens_per_step={2 * ROWS * LENGTH}", f"trainer.max_steps={steps}"]
    record = fit(tiny_config(tmp_path, *POOL, *keys), progress=False)
    assert ("state_age_steps" not in record["metrics"]) == heard
    assert ("trainer.boundary=carry: no row went on from a state in these 2 steps" in caplog.text) == heard


def test_the_age_of_states_is_kept_with_them():
    """Else a run that is stopped in its last evaluation would say that nothing was carried."""
    one, other = Carry(), Carry()
    one.age = 3
    other.load_state_dict(one.state_dict(), torch.device("cpu"))
    assert other.age == 3 and "age" not in Carry().state_dict()
