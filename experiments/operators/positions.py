"""Bytes of position data that the CUDA kernels read, counted from a layout's schedule.

A load of which all lanes of a warp ask for the same address counts once; loads of different warps count each, though caches
answer most of them. The numbers of kernels/cuda stand here again: channels of a warp, slots of a group, sizes of entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.operators.arms import GpuArm
from packmamba import SequenceLayout
from packmamba.ops.cuda import CUT_SHARE, schedule

INDEX = 4
# scan16: per warp of 16 channels and item its two ends, per segment its entry (16) and its document's start; tiles of 8 tokens.
SCAN_WARP_CHANNELS, SCAN_TILE = 16, 8
ITEM, SEGMENT = 8, 16 + INDEX
# conv1d: blocks of 4 warps of 128 channels over spans of slots; resident blocks a multiprocessor, forward and backward.
CONV_WARP_CHANNELS, CONV_WARPS, CONV_RESIDENT = 128, 4, (6, 4)
MIN_SPAN, MAX_SPAN, GROUP, LOOK = 32, 256, 8, 16
SPAN, NEXT_DOCUMENT = 5 * INDEX, 2 * INDEX


@dataclass(frozen=True)
class Scheduled:
    """What a layout's schedule holds, and how many rows its kernels' grids have."""

    items: int
    pieces: int
    """Of documents that are cut; both kernels that give them their starts read them too."""
    lengths: tuple[int, ...]
    """Tokens of every segment."""
    grid_items: int
    grid_pieces: int

    @classmethod
    def of(cls, layout: SequenceLayout, channels: int, direction: str) -> Scheduled:
        """Of a layout of one row on a GPU; direction: forward or backward."""
        slots = layout.num_slots
        memory, above, length, window = schedule(layout.starts, layout.ends, 1, slots, channels, True, direction)
        items, segments, pieces, _ = memory[:4].tolist()
        entries = memory[4 : 4 + 4 * segments].view(-1, 4)
        grid_pieces = slots // length + slots // above if slots > above else 0
        rows = min(layout.num_documents + grid_pieces, 2 * -(-slots // window))
        return cls(items, pieces, tuple((entries[:, 1] - entries[:, 0]).tolist()), rows, grid_pieces)


def scan_bytes(scheduled: Scheduled, channels: int, indices: bool) -> int:
    """One pass of ssm_pack, forward or backward."""
    per_warp = INDEX * (scheduled.grid_items + scheduled.grid_pieces)  # how many there are, asked by every warp
    per_warp += ITEM * scheduled.items + SEGMENT * len(scheduled.lengths) + (INDEX + SEGMENT) * scheduled.pieces
    if indices:
        per_warp += INDEX * SCAN_TILE * sum(-(-length // SCAN_TILE) for length in scheduled.lengths)
    return -(-channels // SCAN_WARP_CHANNELS) * per_warp


def conv_bytes(slots: int, documents: int, channels: int, multiprocessors: int, resident: int, indices: bool) -> int:
    """One pass of conv1d_pack over one row."""
    blocks = -(-channels // (CONV_WARP_CHANNELS * CONV_WARPS))
    wave = multiprocessors * resident
    waves = -(-blocks * slots // (wave * MAX_SPAN))
    length = max(-(-slots // max(waves * wave // blocks, 1)), MIN_SPAN)
    length = -(-length // GROUP) * GROUP
    spans = -(-slots // length)
    if indices:  # once a span, once a group, and at every slot of a group in which a document begins
        per_warp = INDEX * LOOK * (spans + -(-slots // GROUP) + GROUP * min(documents, slots // GROUP))
    else:
        per_warp = SPAN * spans + NEXT_DOCUMENT * documents
    return -(-channels // CONV_WARP_CHANNELS) * per_warp


def position_bytes(
    arm: GpuArm, layout: SequenceLayout, channels: int, multiprocessors: int
) -> tuple[int | None, int | None]:
    """Forward and backward, of our operators; (None, None) for other arms."""
    if arm.implementation != "packmamba" or arm.operator not in ("scan", "conv") or arm.with_states:
        return None, None
    indices = arm.boundaries == "indices"
    if arm.operator == "scan":
        forward, backward = (
            scan_bytes(Scheduled.of(layout, channels, direction), channels, indices) for direction in CUT_SHARE
        )
        return forward, backward
    forward, backward = (
        conv_bytes(layout.num_slots, layout.num_documents, channels, multiprocessors, resident, indices)
        for resident in CONV_RESIDENT
    )
    return forward, backward
