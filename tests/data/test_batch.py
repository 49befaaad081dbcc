"""Batches: tokens, targets and layouts of rows; how they move and what validation reads."""

import numpy as np
import pytest
from numbered import Numbered

from packmamba.config import DataConfig
from packmamba.data.schedule import Pieces, arrange, micro_batches


def test_a_batch_holds_tokens_targets_and_layout_of_its_rows():
    corpus = Numbered([3, 5, 2])  # tokens 0-2, 3-7, 8-9
    data = DataConfig(strategy="next_fit", row_length=6, overlong="error")
    rows = arrange(corpus, Pieces.of(corpus, np.array([2, 0, 1])), data)
    batch = rows.batch(np.array([0, 1]), turn=3)
    assert batch.tokens.tolist() == [[8, 9, 0, 1, 2, 0], [3, 4, 5, 6, 7, 0]]
    assert batch.targets.tolist() == [[9, 0, 1, 2, 0, 0], [4, 5, 6, 7, 0, 0]]
    assert batch.loss_mask.tolist() == [[True, False, True, True, False, False], [*[True] * 4, False, False]]
    assert batch.layout.seq_idx.tolist() == [[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, -1]]
    assert batch.turn == 3 and batch.to("cpu").turn == 3
    assert rows.count([np.array([0]), np.array([1])]) == (7, 10, 12, 1, 3)


@pytest.mark.parametrize(("overlong", "targets"), [("truncate", [[1, 2, 0]]), ("split", [[1, 2, 3], [4, 0, 0]])])
def test_the_last_target_of_a_piece_is_the_next_token_unless_the_tail_is_dropped(overlong, targets):
    corpus = Numbered([5])
    rows = arrange(
        corpus, Pieces.of(corpus, np.arange(1)), DataConfig(strategy="next_fit", row_length=3, overlong=overlong)
    )
    batch = rows.batch(np.arange(len(rows)))
    assert batch.targets.tolist() == targets


def test_pieces_that_continue_have_their_offset():
    corpus = Numbered([5, 2])
    rows = arrange(corpus, Pieces.of(corpus, np.arange(2)), DataConfig(strategy="concat_split", row_length=3))
    assert rows.batch(np.arange(3)).layout.offsets.tolist() == [0, 3, 0, 1]


def test_targets_of_a_task_count_where_they_are():
    corpus = Numbered([4, 3])
    corpus.targets = np.array([-1, 7, -1, 8, -1, -1, 9])
    rows = arrange(corpus, Pieces.of(corpus, np.arange(2)), DataConfig(strategy="next_fit", row_length=7))
    batch = rows.batch(np.arange(1))
    assert batch.targets[batch.loss_mask].tolist() == [7, 8, 9] and rows.count([np.arange(1)])[0] == 3
    assert batch.loss_mask[0].nonzero().flatten().tolist() == [1, 3, 6]


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
    data = DataConfig(**{"row_length": 16, "max_tokens_per_batch": 40} | keys)
    corpus = Numbered([3, 9, 1, 7])
    rows = arrange(corpus, Pieces.of(corpus, np.arange(4)), data)
    batches = micro_batches(rows, np.arange(len(rows)), data)
    assert [tuple(rows.batch(numbers).tokens.shape) for numbers in batches] == shapes
