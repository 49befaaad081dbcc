"""Tables: cells for readers and numbers for programs, as data frames that pandas writes as Markdown, CSV, LaTeX and text."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd


class Cell(NamedTuple):
    """A cell's text, and its values in the CSV's columns."""

    text: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Column:
    """A column's title, and the names of its columns in the CSV."""

    title: str
    names: tuple[str, ...]
    numeric: bool = True


@dataclass
class Table:
    """A table; ``name`` is the stem of its files."""

    name: str
    title: str
    columns: list[Column]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def values(self) -> pd.DataFrame:
        """Return the unrounded numbers."""
        names = [name for column in self.columns for name in column.names]
        return pd.DataFrame(
            [[v for cell in row for v in cell.values] for row in self.rows], columns=names, dtype=object
        )

    def texts(self) -> pd.DataFrame:
        """Return the cells as readers see them."""
        titles = [column.title for column in self.columns]
        return pd.DataFrame([[cell.text for cell in row] for row in self.rows], columns=titles, dtype=object)

    def shown(self) -> Table:
        """Return the table without columns of dashes."""
        kept = [i for i in range(len(self.columns)) if not self.rows or any(row[i].text != "-" for row in self.rows)]
        rows = [[row[i] for i in kept] for row in self.rows]
        return Table(self.name, self.title, [self.columns[i] for i in kept], rows, self.notes)

    def text(self) -> str:
        """Return the table for a terminal."""
        shown = self.shown()
        columns, body = shown.columns, [[cell.text for cell in row] for row in shown.rows]
        cells = [[*column.title.split(), *(line[i] for line in body)] for i, column in enumerate(columns)]
        widths = [max(map(len, texts)) for texts in cells]
        titles = [textwrap.wrap(column.title, width) for column, width in zip(columns, widths)]
        height = max(map(len, titles))
        head = zip(*([""] * (height - len(lines)) + lines for lines in titles))
        lines = [
            "  ".join(c.rjust(w) if column.numeric else c.ljust(w) for c, w, column in zip(line, widths, columns))
            for line in (*head, ["-" * width for width in widths], *body)
        ]
        return "\n".join([self.title, "", *(line.rstrip() for line in lines), "", *self.notes]) + "\n"


def write_table(table: Table, form: str) -> str:
    """Return the table as Markdown (``md``), CSV (``csv``, unrounded numbers) or LaTeX (``tex``, for booktabs)."""
    if form == "csv":
        return table.values().map(_csv_value).to_csv(index=False, lineterminator="\n")
    table = table.shown()
    texts = table.texts()
    if form == "md":
        rules = ["---:" if column.numeric else "---" for column in table.columns]
        lines = [list(texts), rules, *texts.map(lambda text: text.replace("|", "\\|")).to_numpy().tolist()]
        rows = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([f"# {table.title}", "", *rows, *(f"\n{note}" for note in table.notes)]) + "\n"
    style = texts.set_axis(range(len(table.columns)), axis=1).map(_latex).style.hide(axis="index")
    latex = style.format_index(lambda i: _latex(table.columns[i].title), axis="columns").to_latex(
        column_format="".join("r" if column.numeric else "l" for column in table.columns),
        caption=_latex(table.title),
        label=f"tab:{table.name}",
        position_float="centering",
        hrules=True,
    )
    notes = "".join(f"\\par\\footnotesize {_latex(note)}\n" for note in table.notes)
    return "% needs \\usepackage{booktabs}\n" + latex.replace("\\end{table}", notes + "\\end{table}")


def word(text: str) -> Cell:
    return Cell(text, (text,))


def number(value: float | None, form: str, unit: str = "") -> Cell:
    """Return a number, a dash if it is missing."""
    return Cell("-" if pd.isna(value) else f"{value:{form}}{unit}", (value,))


def percent(fraction: float | None) -> Cell:
    """Return three significant digits of a share; the CSV has the fraction."""
    if fraction is None or pd.isna(fraction):
        return number(None, "")
    share = 100 * fraction
    text = f"{share:.0f}" if share in (0, 100) else "< 0.001" if 0 < share < 0.001 else f"{share:#.3g}".rstrip(".")
    return Cell(f"{text} %", (fraction,))


def gibibytes(count: float | None) -> Cell:
    return Cell("-" if count is None or pd.isna(count) else f"{count / 2**30:.2f} GiB", (count,))


def mean_sd(values: pd.Series, expected: int = 0) -> Cell:
    """Return mean and standard deviation of the values that are not NaN, and their number if fewer than expected.

    One value, or counts that are all the same, have no standard deviation.
    """
    mean, sd, count = values.mean(), values.std(), int(values.count())
    counts = mean >= 10 and bool((values.dropna() % 1 == 0).all())
    digits = ",.0f" if counts else ".4f"
    spread = "" if pd.isna(sd) or counts and not sd else f" ± {sd:{digits}}"
    text = "-" if pd.isna(mean) else f"{mean:{digits}}{spread}"
    return Cell(f"{text} (of {count})" if 0 < count < expected else text, (mean, sd))


def _csv_value(value: Any) -> str:
    # Eight digits: more than anything here is measured to, fewer than the last bits in which machines may differ.
    return "" if pd.isna(value) else f"{value:.8g}" if isinstance(value, float) else str(value)


_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\ensuremath{<}",
    ">": r"\ensuremath{>}",
    "±": r"\ensuremath{\pm}",
}


def _latex(text: str) -> str:
    """Escape a text; write numbers with true minus signs and powers of ten, speedups with a multiplication sign."""
    escaped = "".join(_LATEX.get(character, character) for character in text)
    powers = re.sub(
        r"(?<=\d)e([+-])0?(\d+)\b", lambda m: rf"\ensuremath{{\cdot10^{{{m[1].strip('+')}{m[2]}}}}}", escaped
    )
    signed = re.sub(r"(?<![\w.}{^])-(?=\d)", r"\\ensuremath{-}", powers)
    return re.sub(r"(?<=\d)x$", r"\\ensuremath{\\times}", signed)
