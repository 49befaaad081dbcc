"""Packing strategies: properties that all hold, and each held to its definition, one document at a
time.
"""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packmamba.data.lengths import draw_lengths
from packmamba.data.packing import STRATEGIES, RowPlan, Strategy, plan_rows

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)

row_lengths = st.integers(1, 40)
any_lengths = st.lists(st.integers(1, 100), max_size=60)


@st.composite
def fitting(draw):
    """Draw mostly short documents and few distinct lengths: what makes packers reuse rows, and rows
    of equal room.
    """
    n = draw(row_lengths)
    length = st.integers(1, n) | st.integers(1, min(n, 4)) | st.just(max(n // 2, 1))
    return n, draw(st.lists(length, max_size=80))


def tokens_of(plan: RowPlan) -> list[tuple[int, int]]:
    """(document, place) of every token, row by row."""
    return [(p.document, p.start + i) for row in plan for p in row for i in range(p.length)]


@every_strategy
@settings(max_examples=60)
@given(any_lengths, row_lengths, st.integers(1, 70), st.sampled_from(["truncate", "split"]))
@example([], 8, 4, "split")
@example([1], 1, 1, "split")
def test_every_token_is_in_one_row_once(strategy, lengths, row_length, buffer, overlong):
    plan = plan_rows(lengths, row_length, strategy, overlong=overlong, buffer=buffer)
    cut = overlong == "truncate" and not STRATEGIES[strategy].splits_documents
    kept = [min(n, row_length) if cut else n for n in lengths]
    assert sorted(tokens_of(plan)) == [(d, i) for d, n in enumerate(kept) for i in range(n)]
    for row in plan:
        assert 0 < sum(piece.length for piece in row) <= row.slots <= row_length
        assert [piece[:2] for piece in row] == sorted(piece[:2] for piece in row)
    assert (plan.num_tokens, plan.num_slots) == (sum(kept), sum(row.slots for row in plan))
    assert plan.padding_fraction == pytest.approx(1 - sum(kept) / plan.num_slots if lengths else 0)
    assert len(plan) == plan.num_rows == len(list(plan)) == len(plan.slots) == len(plan.row_offsets) - 1


@every_strategy
def test_facts_show_on_an_example(strategy):
    lengths = draw_lengths("short", 500, seed=0)
    plan = plan_rows(lengths, 256, strategy, buffer=64)
    facts = STRATEGIES[strategy]
    assert facts.splits_documents == (len(plan.document) > len(lengths))
    assert facts.drops_tokens == (plan.num_tokens < lengths.sum())
    assert facts.pads == (plan.num_slots > plan.num_tokens)
    assert facts.keeps_order == bool((np.diff(plan.document) >= 0).all())


def test_overlong_documents_are_cut_where_the_row_ends():
    def pieces(strategy, overlong):
        return [list(map(tuple, row)) for row in plan_rows([3, 9, 4], 4, strategy, overlong=overlong)]

    assert pieces("next_fit", "truncate") == [[(0, 0, 3)], [(1, 0, 4)], [(2, 0, 4)]]
    assert pieces("next_fit", "split") == [[(0, 0, 3)], [(1, 0, 4)], [(1, 4, 4)], [(1, 8, 1)], [(2, 0, 4)]]
    assert pieces("best_fit_decreasing", "split") == [[(1, 0, 4)], [(1, 4, 4)], [(2, 0, 4)], [(0, 0, 3), (1, 8, 1)]]
    assert pieces("concat_split", "error") == [[(0, 0, 3), (1, 0, 1)], [(1, 1, 4)], [(1, 5, 4)], [(2, 0, 4)]]


@pytest.mark.parametrize("strategy", ["single", "padded", "padded_sorted"])
def test_no_row_length(strategy):
    plan = plan_rows([5, 100_000, 7], None, strategy)
    expected = [5, 7, 100_000] if strategy == "padded_sorted" else [5, 100_000, 7]
    assert plan.slots.tolist() == plan.length.tolist() == expected
    assert plan_rows([5, 7], 8, strategy).slots.tolist() == {"single": [5, 7]}.get(strategy, [8, 8])


def naive(lengths, row_length, choose, decreasing=True, first=0):
    """Put each document, longest first, into the row that ``choose`` takes of those with room, or
    into a new one.
    """
    rows = []  # room, last change, documents
    order = sorted(range(len(lengths)), key=lambda d: -lengths[d]) if decreasing else range(len(lengths))
    for step, document in enumerate(order):
        fits = [row for row in rows if row[0] >= lengths[document]]
        row = choose(fits, rows) if fits else None
        if row is None:
            row = [row_length, 0, []]
            rows.append(row)
        row[:2] = row[0] - lengths[document], step
        row[2].append(first + document)
    return [sorted(row[2]) for row in rows]


def fullest(fits, _):
    return min(fits, key=lambda row: (row[0], -row[1]))


NAIVE = {
    "next_fit": lambda n, length, _: naive(n, length, lambda fits, rows: rows[-1] if fits[-1] is rows[-1] else None, False),
    "first_fit": lambda n, length, _: naive(n, length, lambda fits, _: fits[0], False),
    "greedy": lambda n, length, window: [
        row for w in range(0, len(n), window) for row in naive(n[w : w + window], length, fullest, first=w)
    ],
    "best_fit_decreasing": lambda n, length, _: naive(n, length, fullest),
    "spfhp": lambda n, length, _: naive(n, length, lambda fits, _: max(fits, key=lambda row: row[:2])),
}  # fmt: skip


def test_every_strategy_that_chooses_rows_has_a_definition():
    ours = {name for name, strategy in STRATEGIES.items() if strategy.assign.__module__.startswith("packmamba.")}
    assert NAIVE.keys() | {"single", "padded", "padded_sorted", "concat_split"} == ours


@pytest.mark.parametrize("strategy", NAIVE)
@settings(max_examples=60)
@given(fitting(), st.integers(1, 90))
def test_assignment_is_the_definition_s(strategy, drawn, buffer):
    row_length, lengths = drawn
    plan = plan_rows(lengths, row_length, strategy, buffer=buffer)
    assert [[piece.document for piece in row] for row in plan] == NAIVE[strategy](lengths, row_length, buffer)


@settings(max_examples=60)
@given(any_lengths, row_lengths, st.integers(1, 5))
@example([4, 1, 1, 30], 4, 3)
def test_streams_go_on_from_row_to_row(lengths, row_length, streams):
    plan = plan_rows(lengths, row_length, "concat_split", streams=streams)
    rows = list(plan)
    assert len(rows) % streams == 0 and all(row.slots == row_length for row in rows)
    assert not rows or any(rows[-streams + b] for b in range(streams))
    totals, expected = [0] * streams, [[] for _ in range(streams)]
    for document, n in enumerate(lengths):
        b = totals.index(min(totals))
        totals[b] += n
        expected[b] += [(document, i) for i in range(n)]
    for b in range(streams):
        held = [[(p.document, p.start + i) for p in row for i in range(p.length)] for row in rows[b::streams]]
        assert [token for row in held for token in row] == expected[b]
        filled = [len(row) for row in held if row]
        assert filled[:-1] == [row_length] * len(filled[:-1])
        assert not any(held[len(filled) :])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"lengths": [3, 9, 70]}, ValueError, "lengths: .*got 9 in document 1.*2 of 3"),
        ({"strategy": "bestfit"}, ValueError, "strategy"),
        ({"lengths": [3, 0]}, ValueError, "lengths: .*got 0 for document 1"),
        ({"lengths": [1.0, 2.0]}, TypeError, "lengths"),
        ({"row_length": None}, ValueError, "row_length"),
        ({"row_length": 0}, ValueError, "row_length"),
        ({"streams": 2}, ValueError, "streams"),
    ],
    ids=str,
)
def test_errors_name_the_argument(changed, error, message):
    with pytest.raises(error, match=message):
        plan_rows(**{"lengths": [1, 2], "row_length": 8, "strategy": "greedy", **changed})


@pytest.mark.parametrize(
    "assign",
    [
        lambda lengths, *_: np.arange(len(lengths) - 1),
        lambda lengths, *_: np.arange(len(lengths)) - 1,
        lambda lengths, *_: 2 * np.arange(len(lengths)),
        lambda lengths, *_: np.zeros(len(lengths), np.int64),
    ],
    ids=["lost", "negative", "gaps", "overfull"],
)
def test_a_strategy_that_would_lose_or_overfill_is_refused(monkeypatch, assign):
    monkeypatch.setitem(STRATEGIES, "mine", Strategy(assign))
    with pytest.raises(ValueError, match="strategy 'mine'"):
        plan_rows([5, 7, 3], 8, "mine")


def test_a_strategy_may_change_the_lengths_that_it_is_given(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "mine", Strategy(lambda lengths, *_: lengths.sort() or np.arange(len(lengths))))
    assert plan_rows([5, 7, 3], 8, "mine").length.tolist() == [5, 7, 3]
