import pickle

import numpy as np
import pytest
import torch
from hypothesis import given

from operators import layouts, rows_of_lengths
from packmamba import SequenceLayout
from packmamba.layout import ceil_div, round_up


@given(rows_of_lengths())
def test_every_view_says_what_the_lengths_say(drawn):
    lengths, offsets, row_length = drawn
    layout = SequenceLayout.from_lengths(lengths, row_length=row_length, offsets=offsets)
    seq_idx = torch.full((len(lengths), row_length), -1)
    position_indices = seq_idx.clone()
    starts, ends = [], []
    for b, row in enumerate(lengths):
        t = 0
        for s, n in enumerate(row):
            seq_idx[b, t : t + n] = s
            position_indices[b, t : t + n] = torch.arange(n) + offsets[b][s]
            starts.append(b * row_length + t)
            ends.append(b * row_length + t + n)
            t += n
    counts = layout.shape, layout.num_documents, layout.num_tokens
    assert counts == ((len(lengths), row_length), len(starts), sum(map(sum, lengths)))
    assert layout.starts.tolist() == starts and layout.ends.tolist() == ends
    assert layout.lengths.tolist() == [n for row in lengths for n in row]
    assert layout.offsets.tolist() == [n for row in offsets for n in row]
    assert layout.continues.tolist() == [n > 0 for row in offsets for n in row]
    assert torch.equal(layout.seq_idx.long(), seq_idx)
    assert torch.equal(layout.position_indices.long(), position_indices)
    int32 = (layout.starts, layout.ends, layout.lengths, layout.offsets, layout.seq_idx, layout.position_indices)
    assert {tensor.dtype for tensor in int32} == {torch.int32} and layout.continues.dtype == torch.bool
    documents = layout.documents.flatten().tolist()
    for s, (start, end) in enumerate(zip(starts, ends)):
        assert documents[start:end] == [s] * (end - start)
    assert documents.count(-1) == layout.shape[0] * layout.shape[1] - layout.num_tokens


@given(layouts())
def test_round_trips(layout):
    assert SequenceLayout.from_position_indices(layout.position_indices) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout.to("cpu") == layout
    again = SequenceLayout.from_seq_idx(layout.seq_idx)
    assert torch.equal(again.starts, layout.starts) and torch.equal(again.ends, layout.ends)
    assert not again.continues.any()
    if layout.num_tokens == layout.num_slots:
        assert SequenceLayout.from_cu_seqlens(layout.cu_seqlens, *layout.shape) == again
    else:
        with pytest.raises(ValueError, match="cu_seqlens: .* padded slots"):
            layout.cu_seqlens


@given(layouts())
def test_flow_merges_each_row(layout):
    flow = layout.flow()
    rows = [b for b in range(layout.shape[0]) if (layout.seq_idx[b] >= 0).any()]
    assert flow.num_documents == len(rows) and flow.num_tokens == layout.num_tokens
    assert flow.rows.tolist() == rows
    assert torch.equal(flow.seq_idx >= 0, layout.seq_idx >= 0)
    assert flow.offsets.tolist() == [int(layout.position_indices[b, 0]) for b in rows]
    assert flow.flow() == flow


def test_ids_of_any_value_and_order_and_width_and_stride():
    assert SequenceLayout.from_rows(3, 5) == SequenceLayout.from_lengths([[5]] * 3, row_length=5)
    layout = SequenceLayout.from_seq_idx(torch.tensor([[7, 7, 3, -1], [0, 9, 9, 2]], dtype=torch.int16))
    assert layout.seq_idx.tolist() == [[0, 0, 1, -1], [0, 1, 1, 2]]
    columns = torch.tensor([[0, 0], [1, 1], [2, 0]], dtype=torch.int32).T
    assert SequenceLayout.from_position_indices(columns).lengths.tolist() == [3, 2, 1]


from_lengths, from_seq_idx = SequenceLayout.from_lengths, SequenceLayout.from_seq_idx
from_position_indices, from_cu_seqlens = SequenceLayout.from_position_indices, SequenceLayout.from_cu_seqlens
INTS = torch.tensor
REFUSALS = {
    "zero length": (from_lengths, ([[3, 0]], 4), ValueError, r"lengths\[0\]\[1\].*1.*0"),
    "overfull row": (from_lengths, ([[2], [3, 2]], 4), ValueError, r"lengths\[1\].*row_length=4.*got 5"),
    "flat lengths": (from_lengths, ([3, 2], 4), TypeError, r"lengths\[0\].*int"),
    "float length": (from_lengths, ([[1.5]], 4), TypeError, r"lengths\[0\]\[0\].*1\.5"),
    "too many slots": (from_lengths, ([[1]] * 3, 2**30), ValueError, r"2\*\*31"),
    "offsets of another shape": (from_lengths, ([[3], [1]], 4, [[0, 0], []]), ValueError, "offsets"),
    "float indices": (from_position_indices, (torch.zeros(1, 2),), TypeError, "position_indices.*float"),
    "a list": (from_seq_idx, ([[0, 0]],), TypeError, "seq_idx: expected an integer tensor.*list"),
    "jump": (from_position_indices, (INTS([[0, 2]]),), ValueError, r"position_indices\[0, 1\].*got 2"),
    "continuation inside a row": (from_position_indices, (INTS([[0, 1, 7]]),), ValueError, r"indices\[0, 2\].*got 7"),
    "padding inside a row": (from_position_indices, (INTS([[0, 1], [-1, 0]]),), ValueError, r"\[1, 1\].*tail"),
    "below -1": (from_seq_idx, (INTS([[0, -2]]),), ValueError, r"seq_idx\[0, 1\].*-2"),
    "id returns": (from_seq_idx, (INTS([[0, 0, 0], [4, 5, 4]]),), ValueError, r"seq_idx\[1\].*id 4"),
    "cu starts above 0": (from_cu_seqlens, (INTS([1, 4]), 1, 4), ValueError, "from 0"),
    "cu stops short": (from_cu_seqlens, (INTS([0, 3]), 1, 4), ValueError, "4.*0 to 3; "),
    "cu stands still": (from_cu_seqlens, (INTS([0, 2, 2, 4]), 1, 4), ValueError, r"strictly.*\[2, 2\]"),
    "cu of no rows": (from_cu_seqlens, (INTS([0, 3]), 0), ValueError, "rows"),
    "cu crosses rows": (from_cu_seqlens, (INTS([0, 3, 8]), 2, 4), ValueError, "none at 4"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses_in_one_sentence(name):
    build, arguments, error, message = REFUSALS[name]
    with pytest.raises(error, match=message) as caught:
        build(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("number", "step", "quotient", "rounded"),
    [(0, 4, 0, 0), (1, 4, 1, 4), (4, 4, 1, 4), (5, 4, 2, 8), (2**40 + 1, 2**20, 2**20 + 1, 2**40 + 2**20)],
)
def test_quotients_and_multiples_are_rounded_up(number, step, quotient, rounded):
    assert (ceil_div(number, step), round_up(number, step)) == (quotient, rounded)
    array = np.array([number, number])
    assert (ceil_div(array, step) == quotient).all() and (round_up(array, step) == rounded).all()
