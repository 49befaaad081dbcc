"""From a folder of records to its tables, figures and one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from packmamba.records import read_records
from packmamba.report import figures as plots
from packmamba.report import summary
from packmamba.report.figures import Figure
from packmamba.report.kinds import KINDS, Kind
from packmamba.report.page import render
from packmamba.report.summary import Record
from packmamba.report.tables import Table


@dataclass
class Section:
    """All that is made of the records of one corpus. The first table is the headline."""

    corpus: str
    records: list[Record]
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


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
        for section in having:
            label = f"-{kind.label(section.records)}" if len(having) > 1 else ""
            note = f"Corpus {section.corpus}."
            if len(having) > 1:
                note += f" The other corpora of this folder ({len(having) - 1}) have tables of their own."
            for table in kind.tables(section.records):
                section.tables.append(replace(table, name=table.name + label, notes=[*table.notes, note]))
            with plots.house_style():
                drawn = kind.figures(section.records) if figures else []
            section.figures += [replace(figure, name=figure.name + label) for figure in drawn]
    return sections


def format_table(records: Iterable[Record], kinds: Mapping[str, Kind] | None = None) -> str:
    """The headline table of every corpus, for a terminal."""
    return "\n".join(
        section.tables[0].text() for section in build_sections(records, figures=False, kinds=kinds) if section.tables
    )


def table_files(records: Iterable[Record], kinds: Mapping[str, Kind] | None = None) -> dict[str, str]:
    """The text of every file in tables/, by file name."""
    files: dict[str, str] = {}
    for section in build_sections(records, figures=False, kinds=kinds):
        for table in section.tables:
            files |= {f"{table.name}.md": table.markdown(), f"{table.name}.csv": table.csv()}
    return files


def write_report(folder: str | Path, kinds: Mapping[str, Kind] | None = None) -> Path:
    """Writes folder/tables, folder/figures and folder/report.html from folder/records, and returns the page's path.

    Files of an earlier report that are not made any more are removed. Raises ValueError if the folder or its records
    are missing or broken.
    """
    folder = Path(folder)
    records = read_records(folder)
    sections = build_sections(records, kinds=kinds)
    figures = {f"{figure.name}.png": figure.png for section in sections for figure in section.figures}
    texts = {name: text.encode() for name, text in table_files(records, kinds).items()}
    _replace_files(folder / "tables", texts, (".md", ".csv"))
    _replace_files(folder / "figures", figures, (".png",))
    readme = folder / "README.md"
    page = folder / "report.html"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    page.write_text(render(text, [(s.corpus, s.records, s.tables, s.figures) for s in sections]), encoding="utf-8")
    return page


def _replace_files(folder: Path, files: dict[str, bytes], suffixes: tuple[str, ...]) -> None:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.suffix in suffixes and path.name not in files:
            path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
