"""House style of figures: one colour for each scheme; figures as PNG and PDF, and as PNG for a narrow page."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

INK, MUTED = "#24292f", "#5c6370"
# Okabe and Ito's colours, distinct for the colour-blind. Arms that coincide (under reset single, padded and packed
# must) stay visible as stripes: the later, the thinner.
_STYLES: dict[str, dict[str, Any]] = {
    "single": {"color": "#9aa0a8", "linewidth": 6.0},
    "padded": {"color": "#E69F00", "linewidth": 3.6},
    "packed-reset": {"color": "#0072B2", "linewidth": 1.6},
    "packed-leak": {"color": "#D55E00", "linewidth": 1.8, "linestyle": (0, (4, 1.5))},
    "packed-leak-conv": {"color": "#CC79A7", "linewidth": 1.8, "linestyle": (0, (4, 1.5))},
    "packed-leak-scan": {"color": "#7A4B9A", "linewidth": 1.8, "linestyle": (0, (4, 1.5))},
    "packed-carry": {"color": "#009E73", "linewidth": 1.8, "linestyle": (0, (7, 1.5, 1, 1.5))},
}
_OTHERS = ("#56B4E9", "#882255", "#8C6D1F", "#B2182B", "#1B7837", "#4D4D4D")
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",  # ships with matplotlib
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.edgecolor": "#b4b9c1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.markersize": 5,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Figure:
    """A drawn figure; ``name`` is the stem of its files, ``narrow`` the PNG for a page of a phone's width."""

    name: str
    caption: str
    png: bytes
    pdf: bytes
    narrow: bytes = b""

    @property
    def inches(self) -> float:
        """Return the PNG's width."""
        return int.from_bytes(self.png[16:20], "big") / DPI


DPI = 160
NARROW = 4.3
"""Width in inches."""
_narrow = False


@contextlib.contextmanager
def house_style(narrow: bool = False) -> Iterator[None]:
    """Draw with this module's fonts, colours and grid; ``narrow``: panels one below the other, for a phone."""
    global _narrow
    before, _narrow = _narrow, narrow
    try:
        with plt.rc_context(_SETTINGS):
            yield
    finally:
        _narrow = before


def has_style(name: str) -> bool:
    """Return True for a scheme with a colour and line of its own."""
    return name in _STYLES


def style_of(name: str, rank: int = 0) -> dict[str, Any]:
    """Return colour and line of a scheme; of others a colour by rank, dotted where colours repeat."""
    again = {"linestyle": (0, (1, 1.5))} if rank >= len(_OTHERS) else {}
    return _STYLES.get(name, {"color": _OTHERS[rank % len(_OTHERS)], "linewidth": 1.8} | again)


def axes(
    panels: int, width: float = 10.0, height: float = 4.2, columns: int | None = None
) -> tuple[Canvas, list[Axes]]:
    """A canvas with panels side by side, at most ``columns`` in a row, or one below the other where it is narrow.

    Args:
        width: of the canvas, in inches.
        height: of a row of panels, in inches.
    """
    across = 1 if _narrow else min(panels, columns or panels)
    rows = -(-panels // across)
    size = (NARROW if _narrow else width, rows * height)
    fig, grid = plt.subplots(rows, across, figsize=size, layout="constrained", squeeze=False)
    for spare in grid.flat[panels:]:
        spare.remove()
    return fig, list(grid.flat[:panels])


def finish(fig: Canvas, name: str, caption: str) -> Figure:
    """Return the canvas as a figure, as large as its content."""
    png, pdf = io.BytesIO(), io.BytesIO()
    for ax in fig.axes if _narrow else ():
        ax.set_title("\n".join(textwrap.fill(line, 34) for line in ax.get_title("left").splitlines()))
        ax.set_xlabel(textwrap.fill(ax.get_xlabel(), 40))
    fig.savefig(png, format="png", dpi=DPI, metadata={"Software": None}, bbox_inches="tight")
    if not _narrow:
        nobody = {"CreationDate": None, "Creator": None, "Producer": None}
        fig.savefig(pdf, format="pdf", metadata=nobody, bbox_inches="tight")
    plt.close(fig)
    return Figure(name, caption, png.getvalue(), pdf.getvalue())


def legend_below(fig: Canvas, columns: int = 5) -> None:
    """Draw one legend for all axes, each label once, in as many columns as fit."""
    found = [ax.get_legend_handles_labels() for ax in fig.axes]
    handles = {label: handle for each in found for handle, label in zip(*each)}
    for ncols in range(min(columns, max(1, len(handles))), 0, -1):
        legend = fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols)
        if ncols == 1 or legend.get_window_extent().width <= 0.98 * fig.bbox.width:
            return
        legend.remove()


def name_bars(ax: Axes, labels: Sequence[str], shown: bool = True) -> None:
    """Label horizontal bars from top to bottom; panels beside another may leave the labels to it."""
    ax.set_yticks(range(len(labels)), labels if shown or _narrow else [""] * len(labels))
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)


def engineering() -> matplotlib.ticker.EngFormatter:
    """Return a formatter of ticks as 20k and 10M."""
    return matplotlib.ticker.EngFormatter(sep="")
