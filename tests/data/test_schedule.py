"""Every token of an epoch is trained on exactly once, over all steps and ranks, whatever the keys;
streams continue.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import Numbered, pieces, steps_of
from torch.utils.data import DataLoader

from packmamba.config import ConfigError, DataConfig
from packmamba.data import schedule
from packmamba.data.packing import STRATEGIES
from packmamba.data.schedule import StepSchedule, arrange, arrange_as_trained, pieces_of
from packmamba.training.datamodule import StepSampler

# Documents of a window, in place of a million.
WINDOW = 17
LONG = [1, 2, 30, 7, 1, 55, 16, 3, 24, 12, 5, 1, 9, 40, 17, 33, 16, 4, 64, 8]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(schedule, "WINDOW_DOCUMENTS", WINDOW)


def count(lengths, ranks, epoch=0, **keys):
    """Count how often each token is trained on, and has a target, in an epoch over all ranks; check
    each step's numbers.
    """
    of_ranks = steps_of(lengths, ranks, **keys)
    planned = of_ranks[0].schedule
    windows = -(-len(lengths) // WINDOW)
    while len(planned._firsts) <= (epoch + 1) * windows:
        planned.step(planned._firsts[-1])
    trained, targets = np.zeros((2, sum(lengths)), int)
    for step in range(planned._firsts[epoch * windows], planned._firsts[(epoch + 1) * windows]):
        add(of_ranks, step, trained, targets)
    return trained, targets


def add(of_ranks, step, trained, targets):
    shares = [steps[step] for steps in of_ranks]
    batches = [batch for share in shares for batch in share.batches]
    real = [batch.layout.seq_idx.numpy() >= 0 for batch in batches]
    totals = [sum(int(part.sum()) for part in parts) for parts in ([batch.loss_mask for batch in batches], real)]
    behind = [tokens for batch in batches for tokens in behind_of(batch.layout)]
    totals += [sum(here.size for here in real), len(behind), sum(behind)]
    for share in shares:  # every rank divides by the targets of all, and has as many batches
        assert [*vars(share).values()][:-1] == totals and len(share.batches) * len(shares) == len(batches)
    for batch, here in zip(batches, real):
        tokens, wanted, mask = (part.numpy() for part in (batch.tokens, batch.targets, batch.loss_mask))
        assert not mask[~here].any() and not tokens[~here].any() and not wanted[~mask].any()
        assert (wanted[mask] == tokens[mask] + 1).all()
        np.add.at(trained, tokens[here], 1)
        np.add.at(targets, tokens[mask], 1)
    return shares


def behind_of(layout):
    rows = layout.rows.tolist()
    return [n for i, n in enumerate(layout.lengths.tolist()) if i and rows[i] == rows[i - 1]]


def expected(lengths, truncated=None, cut=None):
    """Count the same for one epoch: each token once, and a target after each but a document's last;
    tails beyond ``truncated`` tokens of a piece are dropped, and a truncated piece ends a document.
    """
    trained, targets = [], []
    for length in lengths:
        for first in range(0, length, cut or length):
            piece = min(length - first, cut or length)
            kept = min(piece, truncated or piece)
            ends = first + piece == length or kept < piece
            trained += [1] * kept + [0] * (piece - kept)
            targets += [1] * (kept - ends) + [0] * (piece - kept + ends)
    return np.array(trained), np.array(targets)


DRAWN = {
    "lengths": st.lists(st.integers(1, 70), min_size=1, max_size=40),
    "ranks": st.integers(1, 3),
    "strategy": st.sampled_from(sorted(STRATEGIES)),
    "tokens_per_step": st.integers(1, 300),
    "cut_documents": st.none() | st.integers(1, 40),
}


@settings(max_examples=60)
@given(
    **DRAWN,
    epoch=st.integers(0, 1),
    batching=st.sampled_from(["matched", "stream"]),
    overlong=st.sampled_from(["split", "truncate"]),
    max_tokens_per_batch=st.integers(1, 100),
    streams=st.integers(1, 5),
    stagger=st.booleans(),
    shuffle_steps=st.none() | st.integers(1, 3),
)
def test_any_keys(lengths, ranks, epoch, strategy, batching, overlong, cut_documents, streams, stagger, **keys):
    facts, streamed = STRATEGIES[strategy], batching == "stream"
    keys["shuffle_steps"] = keys["shuffle_steps"] if streamed and facts.pads else None
    keys |= {"streams": streams, "stagger": stagger and streamed} if facts.splits_documents else {}
    keys |= {"batching": batching, "strategy": strategy, "overlong": overlong, "cut_documents": cut_documents}
    truncated = 16 if overlong == "truncate" and not facts.splits_documents else None
    found = count(lengths, ranks, epoch, buffer=4, **keys)
    np.testing.assert_array_equal(found, expected(lengths, truncated, cut_documents))


@settings(max_examples=40)
@given(**DRAWN, overlong=st.sampled_from(["split", "truncate"]))
def test_steps_that_cut_hold_exactly_as_many_tokens_and_epochs_meet(lengths, ranks, tokens_per_step, **keys):
    """What truncate leaves out is in no step."""
    truncates = keys["overlong"] == "truncate" and not STRATEGIES[keys["strategy"]].splits_documents
    keys["cut_documents"] = None if truncates else keys["cut_documents"]
    of_ranks = steps_of(lengths, ranks, tokens_per_step=tokens_per_step, cut_at_steps=True, **keys)
    trained, targets = np.zeros((2, sum(lengths)), int)
    kept = expected(lengths, 16 if truncates else None)[0] > 0
    budget = min(tokens_per_step, kept.sum())
    steps = min(3 * -(-kept.sum() // budget), 60)
    for step in range(steps):
        assert {share.num_tokens for share in add(of_ranks, step, trained, targets)} == {budget}
    assert trained.sum() == steps * budget and not trained[~kept].any()
    assert of_ranks[0].schedule.passes(steps) == pytest.approx(trained.sum() / kept.sum())
    assert np.ptp(trained[kept]) <= 1 + (len(lengths) > WINDOW)


@pytest.mark.parametrize(
    "keys",
    [{"strategy": "single", "cut_at_steps": True}, {"strategy": "concat_split", "streams": 3, "carry": True}],
    ids=["cut", "carry"],
)
@pytest.mark.parametrize("mode", ["matched", "stream"])
def test_a_step_is_a_function_of_its_number(mode, keys):
    keys = {"batching": mode, "overlong": "split", **keys}
    (steps,), (fresh,), (other,) = (steps_of(LONG, seed=seed, **keys) for seed in (0, 0, 1))
    in_order = [pieces(steps[i]) for i in range(12)]
    assert [pieces(fresh[i]) for i in (11, 0, 7, 3)] == [in_order[i] for i in (11, 0, 7, 3)]
    assert pieces(other[0]) != in_order[0]
    loader = DataLoader(fresh, batch_size=None, sampler=StepSampler(lambda: 4, 8), num_workers=2)
    assert [pieces(step) for step in loader] == in_order[4:]


@pytest.mark.parametrize("strategy", ["best_fit_decreasing", "padded_sorted"])
def test_a_sorting_strategy_imposes_no_curriculum(strategy):
    lengths = np.random.default_rng(0).integers(1, 17, WINDOW * 1).tolist()
    steps = steps_of(lengths, batching="stream", strategy=strategy, tokens_per_step=16)[0]
    found = [steps[i].batches[0].layout.lengths for i in range(steps.schedule.epoch_steps())]
    longest = [int(one.max()) for one in found]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))
    alike = np.mean([int(one.max() - one.min()) for one in found])
    assert strategy != "padded_sorted" or alike < 2, "the lengths of a step are alike"


STREAM = {"strategy": "concat_split", "batching": "stream", "carry": True}
CARRYING = {
    "matched": {"strategy": "concat_split", "carry": True, "streams": 6},
    "stream": {**STREAM, "streams": 6, "tokens_per_step": 96},
    "stagger": {**STREAM, "streams": 6, "tokens_per_step": 96, "stagger": True},
    "turns": {**STREAM, "streams": 12, "max_tokens_per_batch": 16},
    "staggered turns": {**STREAM, "streams": 12, "max_tokens_per_batch": 16, "stagger": True},
}


@pytest.mark.parametrize("keys", CARRYING.values(), ids=CARRYING)
def test_streams_continue_from_batch_to_batch_on_every_rank(keys):
    lengths = [*LONG, *LONG[::-1]][:WINDOW]
    for ranks in (1, 3):
        of_ranks = steps_of(lengths, ranks, **keys)
        continued, documents = 0, Counter()
        for steps in of_ranks:
            stopped = {}
            for number in range(steps.schedule.epoch_steps()):
                stopped = {} if keys.get("batching") != "stream" else stopped
                step = steps[number]
                for batch, rows in zip(step.batches, pieces(step)):
                    for row, held in enumerate(rows):
                        for place, (tokens, offset, goes_on) in enumerate(held):
                            if offset:
                                continued += 1
                                before, length = stopped[batch.turn, row]
                                assert place == 0 and before + 1 == tokens[0] and length == offset
                            stopped[batch.turn, row] = (tokens[-1], offset + len(tokens)) if goes_on else (-1, 0)
                            documents.update(tokens)
        assert continued > 5 and set(documents.values()) == {1} and len(documents) == sum(lengths)


def test_streams_that_take_turns_visit_every_stream_in_a_round():
    steps = steps_of([40] * WINDOW, **CARRYING["turns"])[0]
    turns = [batch.turn for number in range(8) for batch in steps[number].batches]
    assert turns == [turn % 12 for turn in range(24)]
    seen = [{int(t) // 40 for b in steps[n].batches for t in b.tokens[b.layout.seq_idx >= 0]} for n in range(8)]
    assert all(not a & b for a, b in zip(seen, seen[1:])), "consecutive steps hold other documents"
    assert any(a & b for a, b in zip(seen, seen[4:])), "a round later they continue"


def test_stagger_begins_each_stream_inside_its_first_document():
    lengths = [40, 33, 28, 30, *LONG][:WINDOW]
    starts = {}
    for stagger in (False, True):
        step = steps_of(lengths, **STREAM, streams=4, tokens_per_step=64, stagger=stagger)[0][0]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        first = [row[0][0][0] for rows in pieces(step) for row in rows]
        starts[stagger] = [token - offsets[np.searchsorted(offsets, token, "right") - 1] for token in first]
    assert not any(starts[False]) and len({start % 16 for start in starts[True]}) > 2
    cut = pieces_of(Numbered([10, 20, 30]), np.arange(3)).stagger(2)
    found = list(zip(cut.document.tolist(), cut.start.tolist(), cut.length.tolist()))
    assert found == [(0, 6, 4), (1, 4, 16), (2, 0, 30), (0, 0, 6), (1, 0, 4)]


@pytest.mark.parametrize(("lengths", "streams"), [([400, *[10] * 20], 2), ([50, 50], 2), ([30] * 40, 3)])
def test_evaluation_as_trained_has_few_empty_rows(lengths, streams):
    data = DataConfig(strategy="concat_split", streams=3, row_length=8, max_tokens_per_batch=24)
    for order in (lengths, lengths[::-1]):
        plan = arrange_as_trained(Numbered(order), np.arange(len(order)), data, carry=True)
        assert {len(batch) for batch in plan.micro_batches} == {streams}
        assert plan.rows.num_slots < 2 * sum(lengths) + streams * 8
        assert sorted(itertools.chain(*plan.micro_batches)) == list(range(plan.rows.num_rows))


def test_errors_name_the_key():
    with pytest.raises(ConfigError, match="data.row_length"):
        StepSchedule(Numbered([30]), DataConfig(row_length=8), 0)
    with pytest.raises(ConfigError, match="data.row_length: .* got 30 in document 0"):
        arrange(pieces_of(Numbered([30]), np.arange(1)), DataConfig(row_length=8))


@pytest.mark.parametrize("strategy", ["greedy", "padded", "padded_sorted"])
def test_no_rank_is_idle_where_a_step_fits_a_micro_batch(strategy):
    keys = {"strategy": strategy, "row_length": 64, "tokens_per_step": 320, "max_tokens_per_batch": 320}
    shares, alone = ([steps[0] for steps in steps_of([64] * 40, ranks, **keys)] for ranks in (2, 1))
    assert [[batch.layout.num_tokens for batch in share.batches] for share in shares] == [[192], [128]]
    assert len(alone[0].batches) == 1
