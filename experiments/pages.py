"""Fill the tables of pages from committed tables, and draw their intervals: ``python -m
experiments.pages``.

pages.yaml says for each page which tables stand between ``<!-- table: name -->`` and ``<!-- end
-->``. A table has ``head`` (titles), ``cells`` (what is read from a row) and ``rows``: labels, then
a mapping of ``from`` (a CSV file), ``cells`` if the table's do not fit, and values that choose the
row. ``*`` stands for each item of ``across``, of whose last one ``tail`` is read, and ``*2`` for
what stands behind its ``|``. A cell is ``column:format`` or ``column±spread:format``, with its
interval where there are columns ``_low`` and ``_high``; ``column:word`` is that column's text, and
a cell without a colon its own. Instead ``copy`` is a committed Markdown table as it is, and
``image`` (with ``alt``) a figure; without the file it is not run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.common import name_bars, row_of, with_interval
from packmamba.lab.report.tables import interval_text, number

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
OWN = ("from", "cells", "margin")


def source_row(folder: Path, source: dict[str, Any]) -> dict[str, str]:
    """Return the row that a source names, empty without it or its file."""
    path, where = folder / source["from"], {key: value for key, value in source.items() if key not in OWN}
    return row_of(path.read_text(encoding="utf-8"), where) if path.is_file() else {}


def numbers(folder: Path, source: dict[str, Any], column: str) -> list[float]:
    """Return a number of the row that a source names, with its interval if it has one; [] without
    such a row.
    """
    return with_interval(source_row(folder, source), column)


def cell(folder: Path, source: dict[str, Any], spec: str) -> str:
    """Return the text of a cell, empty without a number."""
    columns, colon, form = spec.partition(":")
    if not colon:
        return spec
    if form == "word":
        return source_row(folder, source).get(columns, "")
    column, *spread = columns.split("±")
    form, _, unit = form.partition(" ")
    values = [value * (100 if unit == "%" else 1) for value in numbers(folder, source, column)]
    if not values:
        return ""
    shown = number(values[0], "p").text if form == "p" else interval_text(values, form)
    shown += "".join(f" ± {value:{form}}" for name in spread for value in numbers(folder, source, name))
    return shown + (unit if unit == "x" else f" {unit}" * bool(unit))


def sources(table: dict[str, Any], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the source of each cell's row: one for all cells, or one for each item of ``across``."""
    source = {"from": table.get("from"), **row}
    items = [str(item).partition("|") for item in table.get("across", ["*"])]
    return [
        {k: v.replace("*2", second).replace("*", first) if isinstance(v, str) else v for k, v in source.items()}
        for first, _, second in items
    ]


def table_text(folder: Path, table: dict[str, Any]) -> str:
    """Return a table of pages.yaml as Markdown. Raises ValueError for a row without any number."""
    if path := table.get("copy", table.get("image")):
        if not (folder / path).is_file():
            return "Not run yet.\n"
        if "image" in table:
            return f"![{table['alt']}]({path})\n"
        lines = (folder / path).read_text(encoding="utf-8").splitlines()
        return "".join(f"{line}\n" for line in lines if line.startswith("|"))
    labels = len(table["rows"][0]) - 1
    lines = [table["head"], ["---"] * labels + ["---:"] * (len(table["head"]) - labels)]
    for *words, last in table["rows"]:
        found = sources(table, last)
        made = [cell(folder, source, spec) for source in found for spec in last.get("cells", table.get("cells"))]
        made += [cell(folder, found[-1], spec) for spec in table.get("tail", ())]
        if "" in made and ("across" not in table or not any(made)):
            raise ValueError(f"{' '.join(words)}: no such number in {last.get('from', table.get('from'))}")
        lines.append([*words, *made])
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def filled(page: str, tables: dict[str, Any]) -> str:
    """Return a page's text with its tables as the committed ones give them."""
    path = ROOT / page
    folder = path.parent if path.parent.parent == FOLDER else FOLDER
    return BLOCK.sub(lambda m: m[1] + table_text(folder, tables[m[2]]) + m[3], path.read_text(encoding="utf-8"))


def draw(name: str, spec: dict[str, Any]) -> None:
    """Draw intervals of rows as a forest: one line each, margins as bands, the number of seeds in
    the label.

    A row of a label alone is a heading. ``margin``: of all rows, or in a source of its own row.
    """
    from packmamba.lab.report.figures import MUTED, axes, finish, house_style

    rows = spec["rows"]
    with house_style():
        fig, (ax,) = axes(1, width=spec.get("width", 8.0), height=0.9 + 0.31 * len(rows))
        if "margin" in spec:
            ax.axvspan(-spec["margin"], spec["margin"], color=MUTED, alpha=0.12, linewidth=0)
        ax.axvline(0, color=MUTED, linewidth=1)
        headings = [y for y, row in enumerate(rows) if len(row) == 1]
        for y, row in enumerate(rows):
            if y in headings:
                continue
            _, kind, source = row
            mean, low, high = numbers(FOLDER, source, source["cells"])
            color = spec["colors"][kind]
            if margin := source.get("margin"):
                ax.barh(y, 2 * margin, left=-margin, height=0.9, color=MUTED, alpha=0.2, linewidth=0)
            ax.errorbar(mean, y, xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=3, linewidth=1.8)
        name_bars(ax, [label for label, *_ in rows])
        for y in headings:
            ax.get_yticklabels()[y].set_fontweight("bold")
        ax.set(xlabel=spec["xlabel"], title=spec["title"])
        if "symlog" in spec:
            ax.set_xscale("symlog", linthresh=spec["symlog"])
            ax.set_xticks(spec["ticks"], spec["ticks"])
        else:
            ax.locator_params(axis="x", nbins=6)
        (FOLDER / "figures" / f"{name}.png").write_bytes(finish(fig, name, "").png)


def specs() -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(FOLDER / "pages.yaml"))  # type: ignore[return-value]


def main() -> None:
    pages = specs()
    for name, spec in pages.pop("figures", {}).items():
        draw(name, spec)
    for page, tables in pages.items():
        (ROOT / page).write_text(filled(page, tables), encoding="utf-8")


if __name__ == "__main__":
    main()
