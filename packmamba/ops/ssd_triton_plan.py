# mypy: ignore-errors
"""Cut documents for Mamba-2's scan on a GPU: segments and chunks, as Triton kernels read them.

Segments end at multiples of 2048 of a document's positions, offsets included; chunks of 128 tokens,
two blocks of 64 each, are counted from a segment's first token (one document, offset 70)::

    position    70                                  2048                       2200
    segment     |------------------------------------|--------------------------|
    chunk       |------|------|------| ... |------|--|------|--|

So a tile begins with a token and only its tail may be empty. A pass that is cut at a segment's end
has the bits of one pass, whatever stands beside the document.

The plan is made on the device, in three launches: the host never waits for lengths. Its tables have
room for what a batch of this shape may hold; absent pieces have no tokens.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from packmamba.ops import cuda

# Tokens of a block: rows of most tiles.
BLOCK = tl.constexpr(64)
# Tokens of a chunk, at whose start the backward has a state.
CHUNK = tl.constexpr(128)
# Documents are cut at multiples of this, and their segments walked at once.
SEGMENT = 2048
# A segment that no document fills.
NEVER = 1 << 30
# Entries that a program of the plan's kernels writes.
WIDTH = 256


class Plan(NamedTuple):
    """Hold a layout's chunks and segments: int32."""

    chunks: Tensor  # (K, 5): see ``load_chunk``
    segments: Tensor  # (M, 6): see ``load_segment``
    order: Tensor  # (M,), segments with the most tokens first
    totals: Tensor  # (3, S): chunks, segments, documents with tokens, up to each document
    padding: Tensor  # (slots,), 1 at padding
    boundaries: int  # maximum number of states between chunks
    cuts: int  # maximum number of states between segments


def plan(layout: Any, offsets: Tensor | None, rows: int, row_length: int) -> Plan:
    """Make the plan on the device; cached with the layout."""
    schedules = cuda.schedules_of(layout.starts)
    tensors = [layout.starts, layout.ends, *([] if offsets is None else [offsets])]
    stream = torch.cuda.current_stream(layout.starts.device).cuda_stream if layout.starts.is_cuda else 0
    made_of = (*(tensor.data_ptr() for tensor in tensors), *cuda.versions(*tensors))
    known = schedules.get(("ssd", rows, row_length, stream))
    if known is None or known[0] != made_of:
        made = _plan(layout, offsets, rows * row_length, schedules.get("longest"))
        known = schedules["ssd", rows, row_length, stream] = (made_of, made)
    return known[1]


def _plan(layout: Any, offsets: Tensor | None, slots: int, longest: int | None) -> Plan:
    documents = len(layout.starts)
    # ``longest`` includes offsets, so such a document crosses no multiple of SEGMENT.
    never_cut = longest is not None and longest <= SEGMENT
    segment = NEVER if never_cut else SEGMENT
    # A document that begins inside a segment and is cut has one boundary more than its tokens fill.
    more = 0 if never_cut or offsets is None else min(documents, slots // 2)
    # Room in the tables: a document has one piece more than boundaries.
    boundaries = slots // CHUNK.value + more
    cuts = 0 if never_cut else slots // SEGMENT + more
    empty = functools.partial(torch.empty, dtype=torch.int32, device=layout.starts.device)
    chunks, segments = empty(documents + boundaries, 5), empty(documents + cuts, 6)
    order, totals, padding = empty(len(segments)), empty(3, documents), empty(slots)
    layout_of = (layout.starts, layout.ends, offsets, totals, documents, segment)
    # Three launches: totals by document; chunks, segments and padding; the segments' order.
    count_pieces[(1,)](*layout_of, WIDTH=1024)
    tables = (chunks, len(chunks), segments, len(segments), padding, slots)
    write_pieces[(triton.cdiv(max(tables[1::2]), WIDTH), 3)](*layout_of, *tables, WIDTH=WIDTH)
    sort_segments[(triton.cdiv(len(segments), 64),)](segments, order, len(segments), WIDTH=64)
    return Plan(chunks, segments, order, totals, padding, boundaries, cuts)


@triton.jit
def load_chunk(chunks, k, before=2, after=3):
    """Return a chunk's first slot, tokens, and numbers of boundaries before and after it; -1: none.

    Boundaries lie between two chunks of a document. ``before``,
    ``after``: columns of ``Plan.chunks``; the last column has the chunk's
    own number, for states that are kept at documents' edges, too.
    """
    entry = chunks + 5 * k
    return tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + before), tl.load(entry + after)


@triton.jit
def load_segment(segments, i):
    """Return as ``load_chunk``, of boundaries between segments; then document and first chunk."""
    entry = segments + 6 * i
    begin, count = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    return begin, count, tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)


@triton.jit
def load_documents(starts, ends, offsets, document, inside, segment):
    """Return documents' first slots, tokens, first segments' tokens and chunks, chunks, segments."""
    start = tl.load(starts + document, inside, 0)
    length = tl.load(ends + document, inside, 0) - start
    position = tl.zeros_like(start)
    if offsets is not None:
        position = tl.load(offsets + document, inside, 0)
    # The first segment ends at the next multiple of ``segment`` positions.
    first = tl.minimum(length, segment - position % segment)
    first_chunks = tl.cdiv(first, CHUNK)
    chunks = first_chunks + tl.cdiv(length - first, CHUNK)
    segments = tl.where(length > 0, 1 + tl.cdiv(length - first, segment), 0)
    return start, length, first, first_chunks, chunks, segments


@triton.jit
def count_pieces(starts, ends, offsets, totals, documents, segment, WIDTH: tl.constexpr):
    """Write ``Plan.totals``, by one program: some microseconds for a thousand documents."""
    all_chunks, all_segments, all_present = 0, 0, 0
    for block in range(0, documents, WIDTH):
        document = block + tl.arange(0, WIDTH)
        inside = document < documents
        _, length, _, _, chunks, segments = load_documents(starts, ends, offsets, document, inside, segment)
        present = (length > 0).to(tl.int32)
        tl.store(totals + document, all_chunks + tl.cumsum(chunks, 0), inside)
        tl.store(totals + documents + document, all_segments + tl.cumsum(segments, 0), inside)
        tl.store(totals + 2 * documents + document, all_present + tl.cumsum(present, 0), inside)
        all_chunks += tl.sum(chunks, 0)
        all_segments += tl.sum(segments, 0)
        all_present += tl.sum(present, 0)


@triton.jit
def find(totals, number, value):
    """Return the place of the first total above a value, at most the last; by halves."""
    place = tl.zeros_like(value)
    size = number
    while size > 1:
        half = size // 2
        place += tl.where(tl.load(totals + place + half - 1) <= value, half, 0)
        size -= half
    return place


@triton.jit(do_not_specialize=["documents"])  # of one document Triton 3.6 compiles no search
def write_pieces(
    starts, ends, offsets, totals, documents, segment, chunks, chunks_bound, segments, segments_bound, padding, slots,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write WIDTH entries of ``Plan.chunks``, ``segments`` or ``padding`` by program_id(1)."""
    role = tl.program_id(1)
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    # Role 2: padding. A slot's document is the first that ends after it.
    if role == 2:
        at = find(ends, documents, i)
        hole = (i < tl.load(starts + at)) | (i >= tl.load(ends + at))
        tl.store(padding + i, hole.to(tl.int32), i < slots)
        return
    # Roles 0 and 1: entry i is a chunk (segment) of the first document whose total exceeds i.
    document = find(totals + role * documents, documents, i)
    start, length, first, first_chunks, of_chunks, of_segments = load_documents(
        starts, ends, offsets, document, i >= 0, segment
    )
    number = tl.where(role == 0, of_chunks, of_segments)
    last = tl.load(totals + role * documents + document)
    # Its place among its document's pieces, and the number of the boundary before it: of each
    # document up to this one the first piece has none.
    place = i - (last - number)
    boundary = i - tl.load(totals + 2 * documents + document)
    if role == 0:
        # Chunks are counted from a segment's start, so those of later segments begin at ``first``.
        later = place >= first_chunks
        begin = start + tl.where(later, first + (place - first_chunks) * CHUNK, place * CHUNK)
        count = tl.minimum(start + tl.where(later, length, first) - begin, CHUNK)
        entry = chunks + 5 * i
        write_piece(entry, i < chunks_bound, i < last, begin, count, place, number, boundary)
        tl.store(entry + 4, tl.where(i < last, i, -1), i < chunks_bound)
    else:
        begin = start + tl.where(place > 0, first + (place - 1) * segment, 0)
        count = tl.where(place > 0, tl.minimum(start + length - begin, segment), first)
        entry = segments + 6 * i
        write_piece(entry, i < segments_bound, i < last, begin, count, place, number, boundary)
        first_chunk = tl.load(totals + document) - of_chunks
        # Segments but the first have equally many chunks, except for the document's last.
        later_chunk = first_chunk + first_chunks + (place - 1) * (segment // CHUNK)
        tl.store(entry + 4, document, i < segments_bound)
        tl.store(entry + 5, tl.where(place > 0, later_chunk, first_chunk), i < segments_bound)


@triton.jit
def write_piece(entry, inside, present, begin, count, place, number, boundary):
    """Write first slots, tokens and boundaries of pieces at their place among documents' pieces."""
    tl.store(entry, tl.where(present, begin, 0), inside)
    tl.store(entry + 1, tl.where(present, count, 0), inside)
    tl.store(entry + 2, tl.where(present & (place > 0), boundary, -1), inside)
    tl.store(entry + 3, tl.where(present & (place < number - 1), boundary + 1, -1), inside)


@triton.jit
def sort_segments(segments, order, number, WIDTH: tl.constexpr):
    """Write the places of WIDTH segments in ``Plan.order``.

    By counting those with more tokens, or as many and before.
    """
    i, j = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, WIDTH)
    count = tl.load(segments + 6 * i + 1, i < number, 0)[:, None]
    place = tl.zeros((WIDTH,), tl.int32)
    for block in range(0, number, WIDTH):
        other = tl.load(segments + 6 * (block + j) + 1, block + j < number, -1)[None, :]
        before = (block + j)[None, :] < i[:, None]
        place += tl.sum(((other > count) | ((other == count) & before)).to(tl.int32), 1)
    tl.store(order + place, i, i < number)
