"""Draws schemes.png, schemes.svg and packing.png: python docs/figures/make_schemes.py [folder]."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

INK, MUTED, LEAK, PADDING = "#24292f", "#5c6370", "#B2182B", "#f3f4f6"
# Okabe and Ito's colours, distinct for the colour-blind.
DOCUMENTS = {"A": (5, "#56B4E9"), "B": (3, "#E69F00"), "C": (6, "#009E73"), "D": (2, "#CC79A7"), "E": (3, "#F0E442")}
ROW = 10  # slots of a packed row
SLOT, HEIGHT = 0.232, 0.25  # inches
Piece = tuple[str, int, int]  # a document's name, the first of its tokens that is here, how many are
PACKED: list[list[Piece]] = [[("A", 0, 5), ("B", 0, 3), ("D", 0, 2)], [("C", 0, 6), ("E", 0, 3)]]
SPLIT: list[list[Piece]] = [[("A", 0, 5), ("B", 0, 3), ("C", 0, 2)], [("C", 2, 4), ("D", 0, 2), ("E", 0, 3)]]


def rectangle(axes: Axes, x: float, y: float, slots: int, colour: str, padding: bool = False) -> None:
    """A stretch of a row, one cell a slot."""
    style = {"edgecolor": "#b4b9c1", "hatch": "/////", "linewidth": 0.5} if padding else {"edgecolor": "white"}
    for slot in range(slots):
        axes.add_patch(Rectangle((x + slot * SLOT, y), SLOT, HEIGHT, facecolor=colour, **style))


def row(axes: Axes, x: float, y: float, pieces: list[Piece], slots: int) -> list[tuple[float, float]]:
    """One row of pieces; the rest is padding. Returns where each piece begins and ends."""
    places, begin = [], 0
    for name, start, length in pieces:
        left = x + begin * SLOT
        rectangle(axes, left, y, length, DOCUMENTS[name][1])
        for token in range(length):
            place = left + (token + 0.5) * SLOT, y + HEIGHT / 2 - 0.005
            axes.text(*place, f"{name}{start + token + 1}", ha="center", va="center", size=7.5)
        places.append((left, left + length * SLOT))
        begin += length
    rectangle(axes, x + begin * SLOT, y, slots - begin, PADDING, padding=True)
    axes.add_patch(Rectangle((x, y), slots * SLOT, HEIGHT, fill=False, edgecolor=INK, linewidth=1.0))
    return places


def arrow(axes: Axes, begin: float, end: float, y: float, colour: str = INK, width: float = 1.1) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 5 + 2 * width, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch((begin, y), (end, y), color=colour, lw=width, **style))


def state(axes: Axes, begin: float, end: float, y: float, zero: bool) -> None:
    """The state's way through a document below its row, from zero or from what came before."""
    if zero:
        axes.add_patch(Circle((begin + 0.07, y), 0.06, facecolor="white", edgecolor=INK, linewidth=0.9, zorder=3))
        axes.text(begin + 0.07, y - 0.003, "0", ha="center", va="center", size=6.5, zorder=4)
        begin += 0.13
    arrow(axes, begin, end - 0.02, y)


def arrangements(axes: Axes, top: float) -> None:
    """The five documents as single, padded and packed batches."""
    longest = max(length for length, _ in DOCUMENTS.values())
    tokens = sum(length for length, _ in DOCUMENTS.values())
    columns = (
        (0.12, "single", f"one document at a time\n{tokens} slots in five passes"),
        (
            2.1,
            "padded",
            f"each row as long as the longest\n{5 * longest} slots, {5 * longest - tokens} of them padding",
        ),
        (
            4.53,
            "packed",
            f"rows of {ROW}, filled with documents\n{2 * ROW} slots, {2 * ROW - tokens} of them padding",
        ),
    )
    for x, name, words in columns:
        axes.text(x, top, name, size=11, weight="bold", va="top")
        axes.text(x, top - 0.22, words, size=8.5, color=MUTED, va="top", linespacing=1.25)
    first = top - 0.84
    for line, (name, (length, _)) in enumerate(DOCUMENTS.items()):
        y = first - line * (HEIGHT + 0.06)
        row(axes, 0.12, y, [(name, 0, length)], length)
        row(axes, 2.1, y, [(name, 0, length)], longest)
    for line, pieces in enumerate(PACKED):
        row(axes, 4.53, first - line * (HEIGHT + 0.06), pieces, ROW)
    legend = first - 4 * (HEIGHT + 0.06)
    axes.text(4.53, legend + HEIGHT / 2, "A1: first token of document A", size=8.5, color=MUTED, va="center")
    legend += HEIGHT + 0.04
    row(axes, 4.53, legend, [], 1)
    axes.text(4.53 + SLOT + 0.08, legend + HEIGHT / 2, "padding", size=8.5, color=MUTED, va="center")


def row_with_states(axes: Axes, x: float, y: float, pieces: list[Piece], leaks: bool) -> None:
    """A packed row, and the state's way below it: through its documents, or from zero in each."""
    below = y - 0.12
    places = row(axes, x, y, pieces, ROW)
    if leaks:
        state(axes, places[0][0], places[-1][1], below, zero=True)
        for begin, _ in places[1:]:
            arrow(axes, begin - 0.17, begin + 0.17, below, LEAK, 2.6)
        return
    for (begin, end), (_, start, _) in zip(places, pieces, strict=True):
        state(axes, begin, end, below, zero=start == 0)
        if begin > x:
            axes.plot([begin, begin], [y - 0.21, y + HEIGHT], color=INK, lw=2.2, solid_capstyle="butt")


def packing(axes: Axes, top: float) -> None:
    """The five documents padded, packed with a leak and packed with reset: README's figure."""
    longest = max(length for length, _ in DOCUMENTS.values())
    columns = (
        (0.12, "padded", "11 of 30 slots are padding", INK),
        (1.95, "packed, leaking", "a document sees those before it", LEAK),
        (4.53, "packed with reset", "each document as if it were alone", INK),
    )
    for x, name, words, colour in columns:
        axes.text(x, top, name, size=11, weight="bold", va="top", color=colour)
        axes.text(x, top - 0.22, words, size=8.5, color=MUTED, va="top")
    first = top - 0.7
    for line, (name, (length, _)) in enumerate(DOCUMENTS.items()):
        row(axes, 0.12, first - line * (HEIGHT + 0.04), [(name, 0, length)], longest)
    for line, pieces in enumerate(PACKED):
        y = first - 0.06 - line * 0.72
        row_with_states(axes, 1.95, y, pieces, leaks=True)
        row_with_states(axes, 4.53, y, pieces, leaks=False)


def boundaries(axes: Axes, top: float) -> None:
    """Two packed rows under each scheme, with the state's way below them."""
    axes.text(0.12, top, "What crosses from one document into the next", size=11, weight="bold", va="top")
    words = "An arrow is the state that Mamba hands from token to token. 0: it starts from zero."
    axes.text(0.12, top - 0.22, words, size=8.5, color=MUTED, va="top")
    schemes = (
        ("reset", "nothing: each document\nas if it were alone", PACKED),
        ("leak", "the state: a document sees\nthose before it in its row", PACKED),
        ("carry", "nothing; a document that a\nrow cuts keeps its own state", SPLIT),
    )
    lefts = (2.1, 4.53)
    for line, (name, words, rows) in enumerate(schemes):
        y = top - 0.92 - line * 0.77
        below = y - 0.12
        axes.text(
            0.12, y + HEIGHT + 0.09, name, size=10, weight="bold", va="top", color=LEAK if name == "leak" else INK
        )
        axes.text(0.12, y + HEIGHT - 0.1, words, size=8.5, color=MUTED, va="top", linespacing=1.2)
        captions = ("a row", "the same row of the next batch" if name == "carry" else "another row")
        for x, caption, pieces in zip(lefts, captions, rows, strict=True):
            axes.text(x, y + HEIGHT + 0.04, caption, size=7.5, color=MUTED, va="bottom")
            row_with_states(axes, x, y, pieces, leaks=name == "leak")
        if name == "carry":
            arrow(axes, lefts[0] + ROW * SLOT - 0.1, lefts[1] + 0.16, below, DOCUMENTS["C"][1], 2.6)


def draw(folder: Path) -> None:
    settings = {
        "font.family": "DejaVu Sans",
        "text.color": INK,
        "hatch.linewidth": 0.5,
        "hatch.color": "#c6cad0",
        "svg.hashsalt": "schemes",
    }
    with plt.rc_context(settings):
        figure = plt.figure(figsize=(7.0, 5.25))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, 7.0), ylim=(0, 5.25), aspect="equal")
        axes.axis("off")
        arrangements(axes, 5.18)
        boundaries(axes, 2.8)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / "schemes.png", dpi=200, facecolor="white")
        figure.savefig(folder / "schemes.svg", facecolor="white", metadata={"Date": None})
        plt.close(figure)

        figure = plt.figure(figsize=(7.0, 2.0))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, 7.0), ylim=(0, 2.0), aspect="equal")
        axes.axis("off")
        packing(axes, 1.95)
        figure.savefig(folder / "packing.png", dpi=200, facecolor="white")
        plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
