"""From folders of records to tables, figures and one self-contained HTML page."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2

from packmamba.errors import ConfigError
from packmamba.records import read_records
from packmamba.report.aggregate import Record, flatten, of_kind, with_items
from packmamba.report.figures import DPI, Figure, house_style, throughput_figures, training_figures
from packmamba.report.tables import (
    Table,
    evaluation_label,
    evaluation_tables,
    sentence,
    throughput_tables,
    training_tables,
    write_table,
)

MakeTables = Callable[[Sequence[Record]], list[Table]]
MakeFigures = Callable[[Sequence[Record]], list[Figure]]


@dataclass(frozen=True)
class Kind:
    """Tables and figures of the records of one corpus, and their name in files."""

    tables: MakeTables = lambda records: []
    figures: MakeFigures = lambda records: []
    label: Callable[[Sequence[Record]], str] = lambda records: records[0]["corpus_hash"][:12]

    def extended(self, tables: MakeTables, figures: MakeFigures = lambda records: []) -> Kind:
        """Return this kind with further tables and figures after its own."""
        return replace(
            self,
            tables=lambda records: [*self.tables(records), *tables(records)],
            figures=lambda records: [*self.figures(records), *figures(records)],
        )


KINDS: dict[str, Kind] = {
    "training": Kind(training_tables, training_figures),
    "throughput": Kind(throughput_tables, throughput_figures),
    "evaluation": Kind(evaluation_tables, label=evaluation_label),
}
Kinds = Mapping[str, Kind] | None


@dataclass
class Section:
    """Tables and figures of the records of one corpus; the first table is the headline."""

    corpus: str
    records: list[Record]
    sentence: str = ""
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def build_sections(records: Iterable[Record], figures: bool = True, kinds: Kinds = None) -> list[Section]:
    """Make tables and figures by corpus; ``kinds`` adds kinds of records. Raises ConfigError for an unknown one."""
    known, sections = {**KINDS, **(kinds or {})}, {}  # type: ignore[var-annotated]
    for record in sorted(records, key=lambda record: record["corpus_hash"]):
        if record["kind"] not in known:
            raise ConfigError(f"kind: expected one of {', '.join(known)}, got {record['kind']}")
        corpus = record["corpus_hash"]
        sections.setdefault(corpus, Section(corpus, [])).records.append(record)
    for section in sections.values():
        section.sentence = sentence(section.records)
    for name, kind in known.items():
        having = [section for section in sections.values() if of_kind(section.records, name)]
        labels = [re.sub(r"[^\w.-]+", "-", kind.label(section.records)) for section in having]
        for i, section in enumerate(having):
            again = labels[: i + 1].count(labels[i])
            label = f"-{labels[i]}{f'-{again}' * (again > 1)}" * (len(having) > 1)
            note = [f"Corpus {section.corpus}, one of {len(having)}."] * (len(having) > 1)
            for table in kind.tables(section.records):
                stem = table.name.removesuffix(label) + label
                section.tables.append(replace(table, name=stem, notes=[*table.notes, *note]))
            for figure in _drawn(kind, section.records) if figures else ():
                section.figures.append(replace(figure, name=figure.name.removesuffix(label) + label))
    return [*sections.values()]


def _drawn(kind: Kind, records: list[Record]) -> list[Figure]:
    with house_style():
        wide = kind.figures(records)
    with house_style(narrow=True):
        narrow = kind.figures(records)
    return [replace(figure, narrow=other.png) for figure, other in zip(wide, narrow)]


def format_table(records: Iterable[Record], kinds: Kinds = None) -> str:
    """Return the headline tables, for a terminal."""
    sections = build_sections(records, figures=False, kinds=kinds)
    parts = []
    for section in sections:
        verdicts = [table for table in section.tables[1:] if table.name.startswith("verdicts")]
        parts += [*(write_table(table, "txt") for table in [*section.tables[:1], *verdicts]), section.sentence]
    return "\n".join(filter(None, parts))


def table_files(records: Iterable[Record], kinds: Kinds = None) -> dict[str, str]:
    """Return the text of every table, by file name."""
    tables = [table for section in build_sections(records, False, kinds) for table in section.tables]
    return {f"{table.name}.{form}": write_table(table, form) for table in tables for form in ("md", "csv")}


def write_report(
    folder: str | Path,
    kinds: Kinds = None,
    records: Sequence[Record] | None = None,
    latex: bool = False,
    compare: Callable[[], Table] | None = None,
) -> Path:
    """Write tables/, figures/ and report.html in place of an earlier report's; return the page's path.

    ``latex``: write tables as LaTeX and figures as PDF too. ``compare``: makes a table that opens the page from those in tables/.
    """
    folder, files = Path(folder), {}  # type: ignore[var-annotated]
    sections = build_sections(with_items(folder, read_records(folder)) if records is None else records, kinds=kinds)
    for section in sections:
        for form in ("md", "csv", *["tex"] * latex):
            files |= {f"tables/{table.name}.{form}": write_table(table, form).encode() for table in section.tables}
        for form in ("png", *["pdf"] * latex):
            files |= {f"figures/{figure.name}.{form}": getattr(figure, form) for figure in section.figures}
    for pattern in ("tables/*.md", "tables/*.csv", "tables/*.tex", "figures/*.png", "figures/*.pdf"):
        for path in folder.glob(pattern):
            path.unlink()
    for name in ("tables", "figures") if files else ():
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    opening = compare() if compare else None
    for table in [opening] if opening else []:
        for form in ("md", "csv"):
            (folder / "tables" / f"{table.name}.{form}").write_text(write_table(table, form), encoding="utf-8")
    (folder / "report.html").write_text(render(sections, opening), encoding="utf-8")
    return folder / "report.html"


def render(sections: Sequence[Section], opening: Table | None = None) -> str:
    """Return the page, which makes no requests; ``opening``: its first table."""
    records = [record for section in sections for record in section.records]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["image"] = lambda content: f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return environment.get_template("page.html").render(
        title=f"PackMamba: {Path(records[0]['experiment']).name}",
        sections=sections,
        opening=opening,
        density=DPI / 96,
        provenance=_values([_provenance(record) for record in records]),
        configuration=_values([flatten(record["config"]) for record in records]),
        count=len(records),
    )


def _values(records: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    keys = dict.fromkeys(key for record in records for key in record)
    texts = {key: {"null" if r[key] is None else str(r[key]) for r in records if key in r} for key in keys}
    return {key: sorted(values) for key, values in texts.items()}


def _provenance(record: Record) -> dict[str, Any]:
    hardware = record["hardware"]
    gpus = [f"{count} x {gpu}" for gpu, count in Counter(hardware.get("gpus") or []).items()]
    return {
        "Arm": record["arm"],
        "Seed": record["seed"],
        "Hardware": ", ".join([*gpus, f"{hardware.get('cpu')}, {hardware.get('cores')} cores"]),
        "Commit": f"{record['commit'] or 'unknown'}{' with uncommitted changes' * bool(record['dirty'])}",
        "Versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version),
        "Corpus": record["corpus_hash"],
        "Recorded": record["time"][:10],
    }
