"""Layouts that tests share: awkward ones with readable names, and random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from packmamba import SequenceLayout

# Every one has what packing gets wrong: rows with different splits, padding, one-token documents, continuations.
AWKWARD = {
    "splits": SequenceLayout.from_lengths(
        [[3, 1, 9], [7, 8], [], [16]], row_length=16, offsets=[[5, 0, 0], [0, 0], [], [64]]
    ),
    "shorter-than-the-convolution": SequenceLayout.from_lengths(
        [[1, 2, 1, 3], [2, 1]], row_length=9, offsets=[[1, 0, 0, 0], [2, 0]]
    ),
    "chunk-edges": SequenceLayout.from_lengths(
        [[63, 64, 1], [65, 2], [127], [128], [129]], row_length=130, offsets=[[0, 0, 0], [3, 0], [0], [9], [0]]
    ),
    "one-slot": SequenceLayout.from_lengths([[1], []], row_length=1),
}
LONG = SequenceLayout.from_lengths([[7, 2047, 1], [2049], [8, 2048]], row_length=2060, offsets=[[3, 0, 0], [0], [0, 0]])


@st.composite
def rows_of_lengths(draw, max_rows: int = 4, max_row_length: int = 40):
    """(lengths, offsets, row_length): any split of any rows; continuations only at row starts."""
    row_length = draw(st.integers(1, max_row_length))
    lengths: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_rows))):
        row: list[int] = []
        while sum(row) < row_length and draw(st.booleans() if row else st.integers(0, 4).map(bool)):
            row.append(draw(st.integers(1, row_length - sum(row))))
        lengths.append(row)
    offsets = [[0] * len(row) for row in lengths]
    for row in offsets:
        if row:
            row[0] = draw(st.sampled_from([0, 0, 1, 77]))
    return lengths, offsets, row_length


def layouts(**kwargs):
    """Random layouts."""
    return rows_of_lengths(**kwargs).map(
        lambda drawn: SequenceLayout.from_lengths(drawn[0], row_length=drawn[2], offsets=drawn[1])
    )
