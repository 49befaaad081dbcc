"""The HTML page of a report: one file, no requests to anywhere."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from markupsafe import Markup

from packmamba.report import summary
from packmamba.report.figures import Figure
from packmamba.report.summary import Record, flatten
from packmamba.report.tables import Table


@dataclass
class Section:
    """All that is made of the records of one corpus. The first table is the headline."""

    corpus: str
    records: list[Record]
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    arms: dict[str, str] = field(default_factory=dict)
    """What each arm of the tables does."""

    @property
    def heading(self) -> str:
        """The corpus by its name, or by the start of a hash."""
        return f"Corpus {self.corpus[:12] if re.fullmatch('[0-9a-f]{16,}', self.corpus) else self.corpus}"


def render(readme: str, sections: Sequence[Section]) -> str:
    """The page. ``readme`` is the README.md beside the records, or empty: its title and question come first, what it says
    under a heading with "finding" before the tables, the rest behind them."""
    records = [record for section in sections for record in section.records]
    text = _read(readme)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "typeset": _typeset,
        "wide": _wide,
        "base64": lambda content: base64.b64encode(content).decode(),
    }
    arms = {arm: what for section in sections for arm, what in section.arms.items()}
    return environment.get_template("page.html").render(
        title=text.title or f"PackMamba: {Path(records[0]['experiment']).name}",
        question=text.question,
        findings=[part for part in text.parts if "finding" in part.heading.lower()],
        others=[part for part in text.parts if "finding" not in part.heading.lower()],
        facts=_facts(records),
        arms=arms,
        sections=sections,
        provenance=_provenance(records),
        configuration=_configuration(records),
        count=len(records),
    )


class _Part(NamedTuple):
    heading: str
    html: Markup


class _Readme(NamedTuple):
    title: Markup
    question: Markup
    parts: list[_Part]


def _read(readme: str) -> _Readme:
    """The README in parts, by its second-level headings. What is HTML there is shown as it is written; links keep their text
    and pictures go: a page asks nobody for them, and the figures are on it."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    for rule in ("link_open", "link_close", "image"):
        markdown.add_render_rule(rule, lambda *_: "")
    markdown.add_render_rule("softbreak", lambda *_: " ")

    def html(nodes: Iterable[SyntaxTreeNode]) -> Markup:
        tokens = [token for node in nodes for token in node.to_tokens()]
        return Markup(markdown.renderer.render(tokens, markdown.options, {}).strip())

    title, heading = Markup(""), ""
    parts: dict[str, list[SyntaxTreeNode]] = {}
    for block in SyntaxTreeNode(markdown.parse(readme)).children:
        if block.tag == "h1":
            title = title or html(block.children)
        elif block.tag == "h2":
            heading = block.children[0].content
        else:
            parts.setdefault(heading, []).append(block)
    asked = next((each for name, each in parts.items() if "question" in name.lower()), next(iter(parts.values()), []))
    first = next((i for i, block in enumerate(asked) if block.type == "paragraph"), len(asked))
    last = next((i for i in range(first + 1, len(asked)) if not asked[i].type.endswith("list")), len(asked))
    question = html(asked[first:last])
    del asked[first:last]
    return _Readme(title, question, [_Part(name, html(each)) for name, each in parts.items() if each])


def _facts(records: Sequence[Record]) -> dict[str, str]:
    facts = {"Arms": str(len({record["arm"] for record in records}))}
    facts["Seeds"] = str(len({record["seed"] for record in records}))
    training = summary.frame(records, "training")
    if not training.empty:
        for title, metric in (("Parameters", "parameters"), ("Real tokens per run", "real_tokens"), ("Steps", "steps")):
            counts = training[metric].dropna()
            ends = dict.fromkeys(f"{count:,.0f}" for count in ([counts.min(), counts.max()] if len(counts) else []))
            facts[title] = " to ".join(ends) or "-"
    return facts | {"Hardware": " / ".join(_unique(_hardware(record) for record in records))}


def _provenance(records: Sequence[Record]) -> dict[str, list[str]]:
    times = sorted(record["time"] for record in records)
    return {
        "Commit": _unique(_commit(record) for record in records),
        "Hardware": _unique(_hardware(record, full=True) for record in records),
        "Versions": _unique(
            ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items()) if version)
            for record in records
        ),
        "Corpus": _unique(record["corpus_hash"] for record in records),
        "Recorded": [times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"],
    }


def _configuration(records: Sequence[Record]) -> dict[str, list[str]]:
    """Each key with its values in all records."""
    configs = [flatten(record["config"]) for record in records]
    keys = sorted({key for config in configs for key in config})
    return {
        key: _unique("null" if config[key] is None else str(config[key]) for config in configs if key in config)
        for key in keys
    }


def _commit(record: Record) -> str:
    if record["commit"] is None:
        return "unknown"
    return record["commit"] + (" with uncommitted changes" if record["dirty"] else "")


def _hardware(record: Record, full: bool = False) -> str:
    hardware = record["hardware"]
    gpus = hardware.get("gpus") or []
    names = [f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)]
    if gpus and not full:
        return ", ".join(names)
    names.append(f"{hardware.get('cpu')}, {hardware.get('cores')} cores")
    if full:
        names.append(f"{(hardware.get('memory_bytes') or 0) / 2**30:.0f} GiB")
        names += [f"driver {hardware['driver']}"] if hardware.get("driver") else []
    return ", ".join(names)


def _wide(table: Table) -> bool:
    """Whether the table needs small print."""
    longest = [max([len(row[i].text) for row in table.rows], default=0) for i in range(len(table.columns))]
    return len(longest) > 9 or sum(longest) > 110


def _typeset(text: str) -> str:
    """With true minus signs, at which no line ends, and a multiplication sign for speedups."""
    return re.sub(r"(?<=\d)x$", "×", re.sub(r"(?:(?<![\w.])|(?<=\de))-(?=\d)", "−", text))


def _unique(values: Iterable[Any]) -> list[str]:
    return sorted(set(values))
