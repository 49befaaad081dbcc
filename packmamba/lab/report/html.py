"""From folders of records to tables, figures and one self-contained HTML page.

Records of one corpus are a section: losses of different documents do not compare. A kind of records
has functions that make its tables and figures. ``KINDS`` has the library's; an experiment's report
brings others, or replaces these.
"""

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import jinja2

from packmamba.config.load import flatten
from packmamba.errors import COMMAND, need
from packmamba.files import write_whole
from packmamba.lab.report import tables as library
from packmamba.lab.report.aggregate import Record, Records, of_kind
from packmamba.lab.report.figures import DPI, Figure, house_style, throughput_figures, training_figures
from packmamba.lab.report.tables import Finding, Table, write_table


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
    "training": Kind(library.training_tables, training_figures),
    "throughput": Kind(library.throughput_tables, throughput_figures),
    "evaluation": Kind(library.evaluation_tables, label=library.evaluation_label),
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
    """Make tables and figures by corpus; ``kinds``: further kinds of records.

    Raises ConfigError for records of an unknown kind.
    """
    all_kinds = {**KINDS, **(kinds or {})}
    by_corpus: dict[str, list[Record]] = {}
    for record in records:
        need(record["kind"] in all_kinds, "kind", f"one of {', '.join(all_kinds)}", record["kind"])
        by_corpus.setdefault(record["corpus_hash"], []).append(record)
    sections = [Section(name, group, library.findings(group)) for name, group in sorted(by_corpus.items())]
    for name, kind in all_kinds.items():
        _add_kind(kind, [section for section in sections if of_kind(section.records, name)], figures)
    return sections


def _add_kind(kind: Kind, sections: list[Section], figures: bool) -> None:
    """Add a kind's tables and figures to sections; of several, names tell the corpus."""
    labels: list[str] = []
    for section in sections:
        suffix = ""
        notes = []
        if len(sections) > 1:  # file names tell the corpus only where there are several
            label = re.sub(r"[^\w.-]+", "-", kind.label(section.records))
            labels.append(label)
            again = labels.count(label)  # two corpora may have one label
            suffix = f"-{label}-{again}" if again > 1 else f"-{label}"
            notes = [f"Corpus {section.corpus}, one of {len(sections)}."]
        others = [other.records for other in sections if other is not section]
        more = {"others": others} if kind.over_corpora else {}
        for table in kind.tables(section.records, **more):
            # An experiment's table may have it already.
            name = table.name.removesuffix(suffix) + suffix
            section.tables.append(replace(table, name=name, notes=table.notes + notes))
        if figures:
            with house_style():
                for figure in kind.figures(section.records):
                    name = figure.name.removesuffix(suffix) + suffix
                    section.figures.append(figure._replace(name=name))


def format_table(records: Iterable[Record], kinds: Kinds = None) -> str:
    """Return ``format_sections`` of records."""
    return format_sections(build_sections(records, figures=False, kinds=kinds))


def format_sections(sections: Iterable[Section]) -> str:
    """Return the headline and verdicts of each corpus, and what was found, for a terminal."""
    parts = []
    for section in sections:
        verdicts = [table for table in section.tables[1:] if table.name.startswith("verdicts")]
        parts += [write_table(table, "txt") for table in section.tables[:1] + verdicts]
        parts.append("\n".join(f"- {finding}" for finding in section.findings))
    return "\n".join(filter(None, parts))


def tables_of(sections: Iterable[Section]) -> list[Table]:
    """Return the tables of all sections."""
    return [table for section in sections for table in section.tables]


def files_of_tables(tables: Iterable[Table]) -> dict[str, str]:
    """Return the text of each table's Markdown and CSV file by name."""
    return {f"{table.name}.{form}": write_table(table, form) for table in tables for form in ("md", "csv")}


def write_sections(folder: str | Path, sections: list[Section], opening: Table | None = None) -> Path:
    """Write tables/, figures/ and report.html; return its path.

    ``opening`` is a table above all others. Files of an earlier report are removed.
    """
    folder = Path(folder)
    texts = files_of_tables([*filter(None, [opening]), *tables_of(sections)])
    files = {f"tables/{name}": text.encode() for name, text in texts.items()}
    figures = [figure for section in sections for figure in section.figures]
    files |= {f"figures/{figure.name}.png": figure.png for figure in figures}
    files["report.html"] = _page(sections, opening).encode()
    for name, content in files.items():
        write_whole(folder / name, content)
    # A table that is no more would be read as one of these records.
    for path in [*folder.glob("tables/*"), *folder.glob("figures/*")]:
        if path.relative_to(folder).as_posix() not in files:
            path.unlink(missing_ok=True)
    return folder / "report.html"


def _page(sections: list[Section], opening: Table | None) -> str:
    """Fill page.html, whose figures are part of it: it can be sent and makes no requests."""
    records = [record for section in sections for record in section.records]
    keys: dict[str, list[object]] = {}
    for record in records:
        for key, value in flatten(record["config"]).items():
            keys.setdefault(key, []).append(value)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(command=COMMAND, base64=base64.b64encode, density=DPI / 96)
    template = environment.get_template("page.html")
    return template.render(sections=sections, opening=opening, records=records, keys=keys)
