"""From a folder of records to its tables, figures and one self-contained HTML page."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packmamba.records import read_records
from packmamba.report import figures as plots
from packmamba.report import summary, tables
from packmamba.report.figures import Figure
from packmamba.report.page import render
from packmamba.report.summary import Record
from packmamba.report.tables import Table


@dataclass(frozen=True)
class Kind:
    """What is made of the records of one kind. Every function is given all records of one corpus."""

    tables: Callable[[Sequence[Record]], list[Table]]
    figures: Callable[[Sequence[Record]], list[Figure]]
    label: Callable[[Sequence[Record]], str] = lambda records: records[0]["corpus_hash"][:12]
    """Tells corpora apart in the names of files."""


KINDS: dict[str, Kind] = {
    "training": Kind(tables.training_tables, plots.training_figures),
    "throughput": Kind(tables.throughput_tables, plots.throughput_figures),
}
"""What the library knows; an experiment's own kinds are in its report.py. See ``records.METRICS`` too."""


@dataclass
class Section:
    """All that is made of the records of one corpus. The first table is the headline."""

    corpus: str
    records: list[Record]
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def build_sections(records: Iterable[Record], figures: bool = True) -> list[Section]:
    """Tables and figures of the records, by corpus: records of different corpora never meet in one."""
    groups = summary.by_corpus(records)
    sections = [Section(corpus, group) for corpus, group in groups.items()]
    for name, kind in _kinds(record for section in sections for record in section.records).items():
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


def _kinds(records: Iterable[Record]) -> dict[str, Kind]:
    """The library's kinds and those of every experiment that the records name."""
    kinds = dict(KINDS)
    for experiment in sorted({record["experiment"] for record in records if record["kind"] not in KINDS}):
        kinds |= importlib.import_module(f"experiments.{experiment}.report").KINDS
    return kinds


def format_table(records: Iterable[Record]) -> str:
    """The headline table of every corpus, for a terminal."""
    return "\n".join(section.tables[0].text() for section in build_sections(records, figures=False) if section.tables)


def table_files(records: Iterable[Record]) -> dict[str, str]:
    """The text of every file in tables/, by file name."""
    files: dict[str, str] = {}
    for section in build_sections(records, figures=False):
        for table in section.tables:
            files |= {f"{table.name}.md": table.markdown(), f"{table.name}.csv": table.csv()}
    return files


def write_report(folder: str | Path) -> Path:
    """Writes folder/tables, folder/figures and folder/report.html from folder/records, and returns the page's path.

    Files of an earlier report that are not made any more are removed. Raises ValueError if the folder or its records
    are missing or broken.
    """
    folder = Path(folder)
    records = read_records(folder)
    sections = build_sections(records)
    figures = {f"{figure.name}.png": figure.png for section in sections for figure in section.figures}
    texts = {name: text.encode() for name, text in table_files(records).items()}
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
