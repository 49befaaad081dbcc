"""Tables, written as Markdown, CSV, LaTeX and plain text. The same records give the same text, always."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd


class Cell(NamedTuple):
    """What people read, and what the CSV's columns hold."""

    text: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Column:
    title: str
    names: tuple[str, ...]
    """The CSV's columns."""
    numeric: bool = True


@dataclass
class Table:
    name: str
    """Stem of the files it is written to."""
    title: str
    columns: list[Column]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """For a terminal, without columns that hold nothing."""
        kept = [i for i in range(len(self.columns)) if not self.rows or any(row[i].text != "-" for row in self.rows)]
        columns, body = [self.columns[i] for i in kept], [[row[i].text for i in kept] for row in self.rows]
        widths = [
            max(len(text) for text in [*column.title.split(), *(line[i] for line in body)])
            for i, column in enumerate(columns)
        ]
        titles = [textwrap.wrap(column.title, width) for column, width in zip(columns, widths)]
        height = max(map(len, titles))
        head = list(zip(*([""] * (height - len(lines)) + lines for lines in titles)))
        grid = [*head, ["-" * width for width in widths], *body]
        lines = [
            "  ".join(c.rjust(w) if column.numeric else c.ljust(w) for c, w, column in zip(line, widths, columns))
            for line in grid
        ]
        return "\n".join([self.title, "", *(line.rstrip() for line in lines), "", *self.notes]) + "\n"


FORMS = ("md", "csv", "tex")


def write_table(table: Table, form: str) -> str:
    """The table as Markdown (``md``), CSV (``csv``: every number unrounded, in its own column) or LaTeX (``tex``: booktabs)."""
    out = io.StringIO()
    if form == "csv":
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([name for column in table.columns for name in column.names])
        writer.writerows([_csv_value(value) for cell in row for value in cell.values] for row in table.rows)
        return out.getvalue()
    titles, body = [column.title for column in table.columns], [[cell.text for cell in row] for row in table.rows]
    if form == "md":
        rules = ["---:" if column.numeric else "---" for column in table.columns]
        escaped = [[text.replace("|", "\\|") for text in line] for line in body]
        lines = ["| " + " | ".join(line) + " |" for line in (titles, rules, *escaped)]
        return "\n".join([f"# {table.title}", "", *lines, *(f"\n{note}" for note in table.notes)]) + "\n"
    style = pd.DataFrame([[_latex(text) for text in line] for line in body], columns=range(len(titles))).style
    style = style.hide(axis="index").format_index(lambda i: _latex(titles[i]), axis="columns")
    made = style.to_latex(
        column_format="".join("r" if column.numeric else "l" for column in table.columns),
        caption=_latex(table.title),
        label=f"tab:{table.name}",
        position_float="centering",
        hrules=True,
    )
    notes = "".join(f"\\par\\footnotesize {_latex(note)}\n" for note in table.notes)
    return made.replace("\\end{table}", notes + "\\end{table}")


def word(text: str) -> Cell:
    return Cell(text, (text,))


def number(value: float | None, form: str, unit: str = "") -> Cell:
    """A missing number, None or NaN, is a dash."""
    return Cell("-" if pd.isna(value) else f"{value:{form}}{unit}", (value,))


def percent(fraction: float | None) -> Cell:
    """Three significant digits; the CSV keeps the fraction."""
    if fraction is None or pd.isna(fraction):
        return number(None, "")
    share = 100 * fraction
    text = f"{share:.0f}" if share in (0, 100) else "< 0.001" if 0 < share < 0.001 else f"{share:#.3g}".rstrip(".")
    return Cell(f"{text} %", (fraction,))


def gibibytes(count: float | None) -> Cell:
    return Cell("-" if count is None or pd.isna(count) else f"{count / 2**30:.2f} GiB", (count,))


def mean_sd(values: pd.Series, expected: int = 0) -> Cell:
    """Mean and standard deviation of the values that are not NaN; with one value, or counts that are all the same, no standard
    deviation. Fewer than expected are said."""
    mean, sd, count = values.mean(), values.std(), int(values.count())
    counts = mean >= 10 and bool((values.dropna() % 1 == 0).all())
    digits = ",.0f" if counts else ".4f"
    text = (
        "-" if pd.isna(mean) else f"{mean:{digits}}" + ("" if pd.isna(sd) or counts and not sd else f" ± {sd:{digits}}")
    )
    return Cell(f"{text} (of {count})" if 0 < count < expected else text, (mean, sd))


def _csv_value(value: Any) -> str:
    # Eight digits: more than anything here is measured to, fewer than the last bits in which machines may differ.
    return "" if pd.isna(value) else f"{value:.8g}" if isinstance(value, float) else str(value)


_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\ensuremath{<}", ">": r"\ensuremath{>}", "±": r"\ensuremath{\pm}",
}  # fmt: skip


def _latex(text: str) -> str:
    """Escaped, with a true minus sign before digits and a multiplication sign for speedups."""
    escaped = "".join(_LATEX.get(character, character) for character in text)
    signed = re.sub(r"(?<![\w.}])-(?=\d)", r"\\ensuremath{-}", escaped)
    return re.sub(r"(?<=\d)x$", r"\\ensuremath{\\times}", signed)
