"""The HTML page of a report: one file, no requests to anywhere."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packmamba.report import summary, tables
from packmamba.report.figures import Figure
from packmamba.report.summary import Record, flatten
from packmamba.report.tables import Table

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --muted: #59636e; --line: #d9dee3; --page: #ffffff; --card: #f6f8fa;
        --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --muted: #9aa4ae; --line: #343b43; --page: #14181d; --card: #1c2128; --accent: #6cb6e8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.55;
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 74rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; }
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -0.01em; margin: 0 0 0.6rem; text-wrap: balance; }
h2 { font-size: 1.25rem; margin: 3rem 0 0.4rem; padding-top: 1.2rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 2rem 0 0.4rem; }
p { max-width: 46rem; margin: 0.5rem 0; }
.lead { font-size: 1.1rem; color: var(--muted); }
.callout { max-width: 46rem; margin: 1.4rem 0; padding: 0.7rem 1rem; border-left: 4px solid var(--accent);
           background: var(--card); border-radius: 0 6px 6px 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 0.8rem; margin: 1.6rem 0 0; }
.facts div { background: var(--card); border-radius: 8px; padding: 0.7rem 0.9rem; }
.facts dt { font-size: 0.78rem; color: var(--muted); }
.facts dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.arms { max-width: 60rem; margin: 1.4rem 0 0; padding-left: 1.1rem; font-size: 0.95rem; }
.scroll { overflow-x: auto; margin: 0.8rem 0 0.4rem; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; min-width: 60%; }
th { font-weight: 600; color: var(--muted); font-size: 0.8rem; vertical-align: bottom; }
th, td { padding: 0.45rem 0 0.45rem 1rem; text-align: right; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th.text, td.text { text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
td.text:first-child { font-weight: 600; }
.note { color: var(--muted); font-size: 0.86rem; margin: 0.2rem 0; max-width: 60rem; }
figure { margin: 1.6rem 0 2.4rem; }
figure img { width: 100%; height: auto; padding: 0.8rem; background: #fff; border: 1px solid var(--line);
             border-radius: 8px; }
figcaption { color: var(--muted); font-size: 0.88rem; max-width: 60rem; margin-top: 0.4rem; }
code { font: 0.88em ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; }
.keys td { text-align: left; white-space: normal; vertical-align: top; }
.keys td:first-child { color: var(--muted); font-weight: 400; white-space: nowrap; }
footer { margin-top: 3rem; color: var(--muted); font-size: 0.86rem; }
@media print { main { padding: 0; } figure { break-inside: avoid; } }
"""

_ARMS = {
    "single": "one document at a time",
    "padded": "documents side by side, each filled up to the longest of its batch",
    "packed-reset": "documents one after another in rows, convolution and state starting afresh in each",
    "packed-leak": "the same rows as if each were one document: convolution and state run on from one into the next",
    "packed-leak-conv": "the same, leaking through the convolution alone",
    "packed-leak-scan": "the same, leaking through the state alone",
    "packed-carry": "rows filled to the end, cut documents going on from their own state in a later row",
}

Part = tuple[str, Sequence[Record], Sequence[Table], Sequence[Figure]]
"""A corpus, its records, their tables (the headline first) and figures."""


def render(readme: str, parts: Sequence[Part]) -> str:
    """The page. ``readme`` is the experiment's README.md, from which title and question are taken, or empty."""
    records = [record for _, group, _, _ in parts for record in group]
    title, question = _title_and_question(readme, records[0]["experiment"])
    statement = tables.seeds_statement(records)
    body = [f"<h1>{_inline(title)}</h1>"]
    body += [f'<p class="lead">{_inline(question)}</p>'] if question else []
    body.append(_facts(records))
    body.append(_arms(records))
    body += [f'<p class="callout">{html.escape(statement)}</p>'] if statement else []
    for corpus, _, made, figures in parts:
        heading = "Result" if len(parts) == 1 else f"Corpus {html.escape(corpus[:12])}"
        body.append(f"<h2>{heading}</h2>")
        body += [_table(made[0], statement)] if made else []
        body += [_figure(figure) for figure in figures]
        body += [_table(table, statement) for table in made[1:]]
    body += ["<h2>Where this comes from</h2>", _provenance(records), _configuration(records)]
    body.append(
        f"<footer>Generated from {len(records)} records in <code>records/</code> by <code>python run.py report</code>; "
        "every number here is also in <code>tables/</code>.</footer>"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _title_and_question(readme: str, experiment: str) -> tuple[str, str]:
    """The first heading, and the first paragraph under a heading that says question, else of the README."""
    title, heading, new = "", "", True
    paragraphs: list[tuple[str, str]] = []
    for line in map(str.strip, readme.splitlines()):
        if line.startswith("#"):
            heading = line.lstrip("# ")
            title = title or heading
        elif line and new:
            paragraphs.append((heading, line))
        elif line:
            paragraphs[-1] = (heading, f"{paragraphs[-1][1]} {line}")
        new = not line or line.startswith("#")
    asked = [text for under, text in paragraphs if "question" in under.lower()] or [text for _, text in paragraphs]
    return title or f"PackMamba: {Path(experiment).name}", asked[0] if asked else ""


def _inline(text: str) -> str:
    """Markdown's code, emphasis and links in one paragraph; links keep their text only."""
    text = html.escape(text, quote=False)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*([^*]*)\*\*", r"<strong>\1</strong>", text)


def _facts(records: Sequence[Record]) -> str:
    training = summary.of_kind(records, "training")
    facts: dict[str, Any] = {"Arms": len({record["arm"] for record in records})}
    facts["Seeds"] = len({record["seed"] for record in records})
    if training:
        facts["Parameters"] = _range(training, "parameters")
        facts["Real tokens per run"] = _range(training, "real_tokens")
        facts["Optimizer steps"] = _range(training, "steps")
    facts["Hardware"] = " / ".join(_unique(_hardware(record) for record in records))
    items = (f"<div><dt>{name}</dt><dd>{html.escape(str(value))}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{"".join(items)}</dl>'


def _arms(records: Sequence[Record]) -> str:
    """What the schemes among the arms do."""
    present = {record["arm"].partition(" ")[0] for record in records}
    lines = [f"<li><strong>{name}</strong>: {text}</li>" for name, text in _ARMS.items() if name in present]
    return f'<ul class="arms">{"".join(lines)}</ul>' if lines else ""


def _table(table: Table, shown: str | None) -> str:
    """``shown`` is a note that stands elsewhere on the page already."""
    kinds = ["" if column.numeric else ' class="text"' for column in table.columns]
    head = "".join(f"<th{kind}>{html.escape(column.title)}</th>" for kind, column in zip(kinds, table.columns))
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{_typeset(cell.text)}</td>" for kind, cell in zip(kinds, row)) + "</tr>\n"
        for row in table.rows
    )
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in table.notes if note != shown)
    return (
        f"<h3>{html.escape(table.title)}</h3>\n"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n{notes}'
    )


def _figure(figure: Figure) -> str:
    data = base64.b64encode(figure.png).decode()
    caption = html.escape(figure.caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )


def _provenance(records: Sequence[Record]) -> str:
    times = sorted(record["time"] for record in records)
    rows = {
        "Commit": _unique(_commit(record) for record in records),
        "Hardware": _unique(_hardware(record, full=True) for record in records),
        "Versions": _unique(
            ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items()) if version)
            for record in records
        ),
        "Corpus": _unique(record["corpus_hash"] for record in records),
        "Recorded": [times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"],
    }
    body = "".join(
        f"<tr><td>{name}</td><td>{'<br>'.join(f'<code>{html.escape(value)}</code>' for value in values)}</td></tr>\n"
        for name, values in rows.items()
    )
    return f'<div class="scroll"><table class="keys"><tbody>{body}</tbody></table></div>'


def _configuration(records: Sequence[Record]) -> str:
    """What all records share, and what each arm sets differently."""
    flat = [(record["kind"], record["arm"], flatten(record["config"])) for record in records]
    keys = sorted({key for _, _, config in flat for key in config})
    values = {key: _unique(_shown(config[key]) for _, _, config in flat if key in config) for key in keys}
    rows = "".join(
        f"<tr><td><code>{html.escape(key)}</code></td><td><code>{html.escape(', '.join(found))}</code></td></tr>\n"
        for key, found in values.items()
    )
    return (
        "<details><summary>Configuration (every key; several values where records differ)</summary>\n"
        f'<div class="scroll"><table class="keys"><tbody>{rows}</tbody></table></div></details>'
    )


def _range(records: Sequence[Record], metric: str) -> str:
    values = [record["metrics"][metric] for record in records if record["metrics"][metric] is not None]
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


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


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _typeset(text: str) -> str:
    """Escaped, with a true minus sign before digits and a multiplication sign for speedups."""
    return re.sub(r"(?<=\d)x$", "×", re.sub(r"(?<![\w.])-(?=\d)", "−", html.escape(text)))


def _unique(values: Iterable[str]) -> list[str]:
    return sorted(set(values))
