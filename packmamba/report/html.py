"""From folders of records to tables, figures and one self-contained HTML page."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
from markdown_it import MarkdownIt
from markupsafe import Markup

from packmamba.records import read_records
from packmamba.report.aggregate import (
    Record,
    by_corpus,
    difference,
    flatten,
    of_kind,
    speeds_of,
    timed_arms,
    training_arms,
    versus,
    with_items,
)
from packmamba.report.arm_tables import difference_cell
from packmamba.report.figures import Figure, house_style
from packmamba.report.kinds import KINDS, Kind
from packmamba.report.tables import Table, write_table


@dataclass
class Section:
    """Tables and figures of the records of one corpus; the first table is the headline."""

    corpus: str
    records: list[Record]
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    arms: dict[str, str] = field(default_factory=dict)

    @property
    def heading(self) -> str:
        return f"Corpus {self.corpus[:12] if re.fullmatch('[0-9a-f]{16,}', self.corpus) else self.corpus}"


def build_sections(
    records: Iterable[Record], figures: bool = True, kinds: Mapping[str, Kind] | None = None
) -> list[Section]:
    """Make tables and figures by corpus: records of different corpora are not compared.

    ``kinds``: further kinds of records, or other tables and figures of the library's. Raises ValueError for an unknown kind or a
    record that lacks a metric of its kind.
    """
    sections = [Section(corpus, group) for corpus, group in by_corpus(records).items()]
    every = [record for section in sections for record in section.records]
    known = {**KINDS, **(kinds or {})}
    for record in every:
        if record["kind"] not in known:
            raise ValueError(f"kind: expected one of {', '.join(known)}, got {record['kind']}")
        if missing := [metric for metric in known[record["kind"]].metrics if metric not in record["metrics"]]:
            raise ValueError(f"metrics of the {record['kind']} record of {record['arm']} lack {', '.join(missing)}")
    for name, kind in known.items():
        having = [section for section in sections if of_kind(section.records, name)]
        taken: Counter[str] = Counter()
        for section in having:
            label, notes = "", []
            if len(having) > 1:
                label = "-" + re.sub(r"[^\w.-]+", "-", kind.label(section.records))
                taken[label] += 1
                label += f"-{taken[label]}" if taken[label] > 1 else ""
                notes = [f"Corpus {section.corpus}, one of {len(having)}."]
            section.arms |= kind.arms(section.records)
            for table in kind.tables(section.records):
                stem = table.name.removesuffix(label) + label
                section.tables.append(replace(table, name=stem, notes=[*table.notes, *notes]))
            drawn = _drawn(kind, section.records) if figures else []
            section.figures += [replace(figure, name=figure.name.removesuffix(label) + label) for figure in drawn]
    return sections


def _drawn(kind: Kind, records: list[Record]) -> list[Figure]:
    with house_style():
        wide = kind.figures(records)
    with house_style(narrow=True):
        narrow = kind.figures(records)
    return [replace(figure, narrow=other.png) for figure, other in zip(wide, narrow)]


def format_table(records: Iterable[Record], kinds: Mapping[str, Kind] | None = None) -> str:
    """Return the headline table of every corpus, for a terminal."""
    sections = build_sections(records, figures=False, kinds=kinds)
    return "\n".join(section.tables[0].text() for section in sections if section.tables)


def table_files(
    records: Iterable[Record], kinds: Mapping[str, Kind] | None = None, forms: Sequence[str] = ("md", "csv")
) -> dict[str, str]:
    """Return the text of every table, by file name."""
    return _texts(build_sections(records, figures=False, kinds=kinds), forms)


def _texts(sections: Iterable[Section], forms: Sequence[str]) -> dict[str, str]:
    tables = [table for section in sections for table in section.tables]
    return {f"{table.name}.{form}": write_table(table, form) for table in tables for form in forms}


def write_report(
    folder: str | Path,
    kinds: Mapping[str, Kind] | None = None,
    records: Sequence[Record] | None = None,
    latex: bool = False,
) -> Path:
    """Write tables/, figures/ and report.html into a folder; return the page's path.

    Files of an earlier report that are not made any more are removed.

    Args:
        kinds: as ``build_sections``.
        records: None: the folder's.
        latex: write tables as LaTeX and figures as PDF too.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sections = build_sections(with_items(folder, read_records(folder)) if records is None else records, kinds=kinds)
    texts = _texts(sections, ("md", "csv", "tex") if latex else ("md", "csv"))
    figures = [figure for section in sections for figure in section.figures]
    pictures = {f"{f.name}.png": f.png for f in figures} | ({f"{f.name}.pdf": f.pdf for f in figures} if latex else {})
    _replace_files(folder / "tables", {name: text.encode() for name, text in texts.items()}, (".md", ".csv", ".tex"))
    _replace_files(folder / "figures", pictures, (".png", ".pdf"))
    readme = folder / "README.md"
    page = folder / "report.html"
    page.write_text(render(readme.read_text(encoding="utf-8") if readme.is_file() else "", sections), encoding="utf-8")
    return page


def _replace_files(folder: Path, files: dict[str, bytes], suffixes: tuple[str, ...]) -> None:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.suffix in suffixes and path.name not in files:
            path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def render(readme: str, sections: Sequence[Section]) -> str:
    """Return the page. ``readme``: Markdown whose title heads the page and whose text follows the results."""
    records = [record for section in sections for record in section.records]
    heading, _, text = readme.partition("\n") if readme.startswith("# ") else ("", "", readme)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"typeset": _typeset, "base64": lambda content: base64.b64encode(content).decode()}
    return environment.get_template("page.html").render(
        title=heading.removeprefix("# ") or f"PackMamba: {Path(records[0]['experiment']).name}",
        readme=_markdown(text),
        messages=[message for section in sections for message in _messages(section.records)],
        arms={arm: what for section in sections for arm, what in section.arms.items()},
        sections=sections,
        provenance=_provenance(records),
        configuration=_configuration(records),
        count=len(records),
    )


def _markdown(text: str) -> Markup:
    """Return Markdown as HTML without links and pictures: the page makes no requests."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    for rule in ("link_open", "link_close", "image"):
        markdown.add_render_rule(rule, lambda *_: "")
    return Markup(markdown.render(text))


def _messages(records: Sequence[Record]) -> list[str]:
    """Return each arm's loss and speed against the baseline, as sentences."""
    arms, timed = training_arms(records), timed_arms(records)
    messages = []
    for arm, speed in zip(arms, speeds_of(arms, timed)):
        if (found := difference(arm, arms, "val_loss")) and len(arms) <= 12:
            faster = f", {speed.speedup:.2f}x its real tokens/s" if speed.speedup == speed.speedup else ""
            loss = f"validation loss minus that of {versus(arms)} {difference_cell(found).text}"
            messages.append(f"{arm.label}: {loss}{faster}.")
    return messages


def _provenance(records: Sequence[Record]) -> dict[str, list[str]]:
    def unique(values: Iterable[Any]) -> list[str]:
        return sorted({str(value) for value in values})

    facts = {"Arms": [str(len({record["arm"] for record in records}))]}
    facts["Seeds"] = [", ".join(unique(record["seed"] for record in records))]
    for title, metric in (("Parameters", "parameters"), ("Real tokens per run", "real_tokens"), ("Steps", "steps")):
        counts = [record["metrics"].get(metric) for record in of_kind(records, "training")]
        ends = [f"{end(c for c in counts if c is not None):,.0f}" for end in (min, max) if any(counts)]
        facts |= {title: [" to ".join(dict.fromkeys(ends))]} if ends else {}
    dirty = {True: " with uncommitted changes"}
    times = sorted(record["time"] for record in records)
    return facts | {
        "Hardware": unique(_hardware(record["hardware"]) for record in records),
        "Commit": unique(f"{record['commit'] or 'unknown'}{dirty.get(record['dirty'], '')}" for record in records),
        "Versions": unique(", ".join(f"{n} {v}" for n, v in sorted(r["versions"].items()) if v) for r in records),
        "Corpus": unique(record["corpus_hash"] for record in records),
        "Recorded": [" to ".join(dict.fromkeys((times[0], times[-1])))],
    }


def _hardware(hardware: Mapping[str, Any]) -> str:
    gpus = Counter(hardware.get("gpus") or [])
    names = [f"{count} x {gpu}" for gpu, count in gpus.items()]
    names += [f"{hardware.get('cpu')}, {hardware.get('cores')} cores"]
    names += [f"{(hardware.get('memory_bytes') or 0) / 2**30:.0f} GiB"]
    return ", ".join(names + ([f"driver {hardware['driver']}"] if hardware.get("driver") else []))


def _configuration(records: Sequence[Record]) -> dict[str, list[str]]:
    """Return each key with its values in all records."""
    found: dict[str, set[str]] = {}
    for record in records:
        for key, value in flatten(record["config"]).items():
            found.setdefault(key, set()).add("null" if value is None else str(value))
    return {key: sorted(found[key]) for key in sorted(found)}


def _typeset(text: str) -> str:
    """Write true minus signs, at which no line ends, and a multiplication sign for speedups."""
    return re.sub(r"(?<=\d)x$", "×", re.sub(r"(?:(?<![\w.])|(?<=\de))-(?=\d)", "−", text))
