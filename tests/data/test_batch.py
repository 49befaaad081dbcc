"""Batches: tokens, targets and layouts of rows, and how rows are split into micro-batches."""

import numpy as np
import pytest
from numbered import Numbered

from packmamba.config import DataConfig
from packmamba.data.batch import StepBatch, count_step, make_batch
from packmamba.data.schedule import arrange, micro_batches, pieces_of


def rows_of(lengths, order=None, **keys):
    corpus = Numbered(lengths)
    pieces = pieces_of(corpus, np.arange(len(lengths)) if order is None else np.array(order))
    return corpus, arrange(pieces, DataConfig(**{"strategy": "next_fit"} | keys))


def test_a_batch_holds_tokens_targets_and_layout_of_its_rows():
    corpus, rows = rows_of([3, 5, 2], order=[2, 0, 1], row_length=6)  # tokens 0-2, 3-7, 8-9
    batch = make_batch(corpus, rows, np.array([0, 1]), turn=3)
    assert batch.tokens.tolist() == [[8, 9, 0, 1, 2, 0], [3, 4, 5, 6, 7, 0]]
    assert batch.targets.tolist() == [[9, 0, 1, 2, 0, 0], [4, 5, 6, 7, 0, 0]]
    assert batch.loss_mask.tolist() == [[True, False, True, True, False, False], [*[True] * 4, False, False]]
    assert batch.layout.seq_idx.tolist() == [[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, -1]]
    assert batch.turn == batch.to("cpu").turn == 3
    counts = count_step(corpus, rows, [np.array([0]), np.array([1])])
    assert counts == StepBatch(num_targets=7, num_tokens=10, num_slots=12, num_behind=1, tokens_behind=3)


@pytest.mark.parametrize(
    ("keys", "targets", "offsets"),
    [
        ({"overlong": "truncate"}, [[1, 2, 0]], [0]),
        ({"overlong": "split"}, [[1, 2, 3], [4, 0, 0]], [0, 3]),
        ({"strategy": "concat_split"}, [[1, 2, 3], [4, 0, 0]], [0, 3]),
    ],
)
def test_the_last_target_of_a_piece_is_the_next_token_unless_the_tail_is_dropped(keys, targets, offsets):
    corpus, rows = rows_of([5], row_length=3, **keys)
    batch = make_batch(corpus, rows, np.arange(len(rows)))
    assert batch.targets.tolist() == targets and batch.layout.offsets.tolist() == offsets


@pytest.mark.parametrize(
    ("keys", "shapes"),
    [
        ({"strategy": "padded"}, [(2, 16), (2, 16)]),
        ({"strategy": "padded", "row_length": None}, [(4, 9)]),
        ({"strategy": "padded_sorted", "row_length": None, "max_tokens_per_batch": 12}, [(2, 3), (1, 7), (1, 9)]),
        ({"strategy": "single"}, [(1, 3), (1, 9), (1, 1), (1, 7)]),
        ({"strategy": "greedy"}, [(2, 16)]),
    ],
)
def test_micro_batches_have_at_most_so_many_slots(keys, shapes):
    keys = {"row_length": 16, "max_tokens_per_batch": 40} | keys
    corpus, rows = rows_of([3, 9, 1, 7], **keys)
    batches = micro_batches(rows, np.arange(len(rows)), DataConfig(**keys))
    assert [tuple(make_batch(corpus, rows, numbers).tokens.shape) for numbers in batches] == shapes
