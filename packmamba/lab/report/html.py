"""From folders of records to tables, figures and one self-contained HTML page."""

import base64
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

import jinja2

from packmamba.errors import COMMAND, ConfigError
from packmamba.files import write_whole
from packmamba.lab.records import read_records
from packmamba.lab.report.aggregate import Record, Records, flatten, of_kind, with_items
from packmamba.lab.report.figures import DPI, Figure, house_style, throughput_figures, training_figures
from packmamba.lab.report.tables import (
    Finding,
    Table,
    evaluation_label,
    evaluation_tables,
    findings,
    throughput_tables,
    training_tables,
    write_table,
)


@dataclass(frozen=True)
class Kind:
    """Make tables, figures and a label for files of one corpus.

    ``over_corpora``: ``tables`` also takes a list of the other corpora's records, ``others``, for
    families of contrasts that have one on each corpus.
    """

    tables: Callable[..., list[Table]] = lambda records: []
    figures: Callable[[Records], list[Figure]] = lambda records: []
    label: Callable[[Records], str] = lambda records: records[0]["corpus_hash"][:12]
    over_corpora: bool = False


KINDS: dict[str, Kind] = {
    "training": Kind(training_tables, training_figures),
    "throughput": Kind(throughput_tables, throughput_figures),
    "evaluation": Kind(evaluation_tables, label=evaluation_label),
}
Kinds = Mapping[str, Kind] | None


@dataclass
class Section:
    """Hold what was found in records of one corpus; the first table is the headline."""

    corpus: str
    records: list[Record]
    findings: list[Finding]
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def build_sections(records: Iterable[Record], figures: bool = True, kinds: Kinds = None) -> list[Section]:
    """Make tables and figures by corpus; ``kinds``: further kinds of records."""
    known, corpus = {**KINDS, **(kinds or {})}, itemgetter("corpus_hash")
    groups = [[*group] for _, group in itertools.groupby(sorted(records, key=corpus), corpus)]
    if unknown := [record["kind"] for group in groups for record in group if record["kind"] not in known]:
        raise ConfigError(f"kind: expected one of {', '.join(known)}, got {unknown[0]}")
    sections = [Section(corpus(group[0]), group, findings(group)) for group in groups]
    for name, kind in known.items():
        having = [section for section in sections if of_kind(section.records, name)]
        labels = [re.sub(r"[^\w.-]+", "-", kind.label(section.records)) for section in having]
        for i, section in enumerate(having):
            again = labels[: i + 1].count(labels[i])
            label = f"-{labels[i]}{f'-{again}' * (again > 1)}" * (len(having) > 1)
            note = [f"Corpus {section.corpus}, one of {len(having)}."] * (len(having) > 1)
            others = [other.records for other in having if other is not section]
            more = {"others": others} if kind.over_corpora else {}
            for table in kind.tables(section.records, **more):
                stem = table.name.removesuffix(label) + label
                section.tables.append(replace(table, name=stem, notes=[*table.notes, *note]))
            with house_style():
                drawn = kind.figures(section.records) if figures else []
            section.figures += [one._replace(name=one.name.removesuffix(label) + label) for one in drawn]
    return sections


def format_table(records: Iterable[Record], kinds: Kinds = None) -> str:
    parts = []
    for section in build_sections(records, figures=False, kinds=kinds):
        headlines = [
            table for i, table in enumerate(section.tables) if not i or table.name.startswith("verdicts")
        ]
        parts += [write_table(table, "txt") for table in headlines]
        parts.append("\n".join(f"- {finding}" for finding in section.findings))
    return "\n".join(filter(None, parts))


def table_files(records: Iterable[Record], kinds: Kinds = None) -> dict[str, str]:
    tables = [table for section in build_sections(records, False, kinds) for table in section.tables]
    return {f"{table.name}.{form}": write_table(table, form) for table in tables for form in ("md", "csv")}


def write_report(
    folder: str | Path,
    kinds: Kinds = None,
    records: Records | None = None,
    latex: bool = False,
    opening: Table | None = None,
) -> Path:
    """Write tables/, figures/ and report.html; return its path."""
    folder = Path(folder)
    sections = build_sections(
        with_items(folder, read_records(folder)) if records is None else records, kinds=kinds
    )
    tables = [*([opening] if opening else []), *(table for section in sections for table in section.tables)]
    files: dict[str, bytes] = {}
    for table in tables:
        forms = ("md", "csv", *["tex"] * latex)
        files |= {f"tables/{table.name}.{form}": write_table(table, form).encode() for form in forms}
    for figure in (figure for section in sections for figure in section.figures):
        files |= {
            f"figures/{figure.name}.{form}": getattr(figure, form) for form in ("png", *["pdf"] * latex)
        }
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    rows = [record for section in sections for record in section.records]
    configs = [flatten(record["config"]) for record in rows]
    page = environment.get_template("page.html").render(
        sections=sections,
        opening=opening,
        command=COMMAND,
        base64=base64.b64encode,
        density=DPI / 96,
        records=rows,
        keys={
            key: [one[key] for one in configs if key in one]
            for key in dict.fromkeys(itertools.chain(*configs))
        },
    )
    files["report.html"] = page.encode()
    for name in ("tables", "figures"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_whole(folder / name, content)
    for path in [*folder.glob("tables/*"), *folder.glob("figures/*")]:
        if path.relative_to(folder).as_posix() not in files:
            path.unlink(missing_ok=True)
    return folder / "report.html"
