"""A packing strategy of one's own: what it may not do to documents."""

import numpy as np
import pytest

from packmamba.data.packing import STRATEGIES, Strategy, plan_rows


def test_a_strategy_that_overfills_a_row_is_refused(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "all", Strategy(lambda lengths, row_length, buffer: np.zeros_like(lengths)))
    assert plan_rows([3, 5], 8, "all").num_rows == 1
    with pytest.raises(RuntimeError, match="strategy 'all' puts 9 tokens into a row of 8 slots"):
        plan_rows([3, 5, 1], 8, "all")


@pytest.mark.parametrize(
    ("assign", "came"),
    [
        (lambda lengths, *_: np.arange(len(lengths) - 1), r"int64 \[2\], the least 0"),
        (lambda lengths, *_: np.zeros(len(lengths)), r"float64 \[3\], the least 0\.0"),
        (lambda lengths, *_: np.arange(len(lengths)) - 1, r"int64 \[3\], the least -1"),
        (lambda lengths, *_: np.zeros((len(lengths), 1), np.int64), r"int64 \[3, 1\], the least 0"),
        (lambda lengths, *_: [0] * len(lengths), "list"),
        (lambda lengths, *_: None, "NoneType"),
    ],
)
def test_a_strategy_that_would_lose_documents_is_refused(monkeypatch, assign, came):
    monkeypatch.setitem(STRATEGIES, "mine", Strategy(assign))
    with pytest.raises(
        ValueError, match=f"^strategy 'mine': expected an array of row numbers .* 3 pieces, got {came}$"
    ):
        plan_rows([5, 7, 3], 16, "mine")


def test_a_strategy_cannot_change_the_lengths(monkeypatch):
    def shortens(lengths, row_length, buffer):
        lengths[:] = 1
        return np.zeros_like(lengths)

    monkeypatch.setitem(STRATEGIES, "mine", Strategy(shortens))
    with pytest.raises(ValueError, match="read-only"):
        plan_rows([5, 7, 3], 16, "mine")
