"""From a folder of records to its tables, figures and one self-contained HTML page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from packmamba.records import read_records
from packmamba.report import summary
from packmamba.report.figures import Figure, house_style
from packmamba.report.items import with_items
from packmamba.report.kinds import KINDS, Kind
from packmamba.report.page import Section, render
from packmamba.report.summary import Record
from packmamba.report.tables import FORMS, write_table


def build_sections(
    records: Iterable[Record], figures: bool = True, kinds: Mapping[str, Kind] | None = None
) -> list[Section]:
    """Tables and figures of the records, by corpus: records of different corpora never meet in one.

    ``kinds`` are further kinds of records, or other tables and figures of those that the library knows. Raises ValueError
    if a record lacks a metric of its kind.
    """
    groups = summary.by_corpus(records)
    sections = [Section(corpus, group) for corpus, group in groups.items()]
    every = [record for group in groups.values() for record in group]
    known = {**KINDS, **(kinds or {})}
    if unknown := sorted({record["kind"] for record in every} - known.keys()):
        raise ValueError(f"record's kind '{unknown[0]}' is unknown; known: {', '.join(known)}")
    for name, kind in known.items():
        for record in summary.of_kind(every, name):
            if missing := [metric for metric in kind.metrics if metric not in record["metrics"]]:
                raise ValueError(f"metrics of the {name} record of {record['arm']} lack {', '.join(missing)}")
        having = [section for section in sections if summary.of_kind(section.records, name)]
        taken: Counter[str] = Counter()
        for section in having:
            # A hash that another program wrote may hold what no file's name can.
            label = "-" + re.sub(r"[^\w.-]+", "-", kind.label(section.records)) if len(having) > 1 else ""
            taken[label] += 1
            if taken[label] > 1:  # another corpus is called the same
                label += f"-{taken[label]}"
            note = f"Corpus {section.corpus}."
            if len(having) > 1:
                note += f" The other corpora of this folder ({len(having) - 1}) have tables of their own."
            section.arms |= kind.arms(section.records)
            for table in kind.tables(section.records):
                section.tables.append(
                    replace(table, name=table.name.removesuffix(label) + label, notes=[*table.notes, note])
                )
            drawn = _drawn(kind, section.records) if figures else []
            section.figures += [replace(figure, name=figure.name.removesuffix(label) + label) for figure in drawn]
    return sections


def format_table(records: Iterable[Record], kinds: Mapping[str, Kind] | None = None) -> str:
    """The headline table of every corpus, for a terminal."""
    return "\n".join(
        section.tables[0].text() for section in build_sections(records, figures=False, kinds=kinds) if section.tables
    )


def table_files(records: Iterable[Record], kinds: Mapping[str, Kind] | None = None) -> dict[str, str]:
    """The text of every file in tables/, by file name."""
    return _texts(build_sections(records, figures=False, kinds=kinds))


def write_report(folder: str | Path, kinds: Mapping[str, Kind] | None = None) -> Path:
    """Writes folder/tables, folder/figures and folder/report.html from folder/records, and returns the page's path.

    Files of an earlier report that are not made any more are removed. Raises ValueError if the folder or its records
    are missing or broken.
    """
    folder = Path(folder)
    sections = build_sections(with_items(folder, read_records(folder)), kinds=kinds)
    figures = [figure for section in sections for figure in section.figures]
    pictures = {f"{f.name}.png": f.png for f in figures} | {f"{f.name}.pdf": f.pdf for f in figures}
    texts = {name: text.encode() for name, text in _texts(sections).items()}
    _replace_files(folder / "tables", texts, tuple(f".{form}" for form in FORMS))
    _replace_files(folder / "figures", pictures, (".png", ".pdf"))
    readme = folder / "README.md"
    page = folder / "report.html"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    page.write_text(render(text, sections), encoding="utf-8")
    return page


def _drawn(kind: Kind, records: list[Record]) -> list[Figure]:
    with house_style():
        wide = kind.figures(records)
    with house_style(narrow=True):
        narrow = kind.figures(records)
    return [replace(figure, narrow=other.png) for figure, other in zip(wide, narrow)]


def _texts(sections: Iterable[Section]) -> dict[str, str]:
    tables = [table for section in sections for table in section.tables]
    return {f"{table.name}.{form}": write_table(table, form) for table in tables for form in FORMS}


def _replace_files(folder: Path, files: dict[str, bytes], suffixes: tuple[str, ...]) -> None:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.suffix in suffixes and path.name not in files:
            path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
