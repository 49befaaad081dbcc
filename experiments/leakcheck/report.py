"""Tables of the audit: a verdict for each model and boundary argument, and all that was found."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.common import make_columns
from packmamba.report import aggregate
from packmamba.report.aggregate import Record
from packmamba.report.html import Kind
from packmamba.report.tables import Cell, Column, Table, number, word


def latest(records: Sequence[Record]) -> dict[str, list[Record]]:
    """By device, of the newest version of transformers that was audited there, by arm and argument the latest; in their order."""
    given = aggregate.of_kind(records, "audit")
    found: dict[str, list[Record]] = {}
    for device in sorted({r["config"]["device"].partition(":")[0] for r in given}):
        own = [r for r in given if r["config"]["device"].startswith(device)]
        newest = max((r["config"]["transformers"] for r in own), key=aggregate.natural)
        own = [r for r in own if r["config"]["transformers"] == newest]
        arms = list(dict.fromkeys(r["arm"] for r in own))
        last = {(r["arm"], r["config"]["boundaries"]): r for r in sorted(own, key=lambda record: record["time"])}
        found[device] = sorted(last.values(), key=lambda r: arms.index(r["arm"]))
    return found


def verdict(record: Record) -> str:
    """In one word or two."""
    m = record["metrics"]
    if m.get("fails"):
        return "does not run"
    if m["raises"]:
        return "refuses"
    if m["leaks"]:
        return "leaks, ignores it" if m["ignored"] else "leaks"
    return "tight" if m["same_as_alone"] else "tight, but not as alone"


def audit_tables(records: Sequence[Record]) -> list[Table]:
    """For each device a verdict for each model and argument, how many there are of each, and all findings."""
    return [table for device, own in latest(records).items() for table in _tables(device, own)]


def _tables(device: str, records: Sequence[Record]) -> list[Table]:
    config = records[0]["config"]
    ending = "" if device == "cpu" else f"-{device}"
    kernels = [f"{name} {version}" for name, version in config["kernels"].items() if version]
    where = f"transformers {config['transformers']}, {device}, {', '.join(kernels) or 'no kernels installed'}"
    arguments = list(dict.fromkeys(r["config"]["boundaries"] for r in records))
    arms = list(dict.fromkeys(r["arm"] for r in records))
    cells = {(r["arm"], r["config"]["boundaries"]): r for r in records}
    collators = {r["config"]["boundaries"]: f"TRL {of}" for r in records if (of := r["config"].get("trl"))}
    titles = [collators.get(argument, argument.replace("+", " + ")) for argument in arguments]
    matrix = Table(
        f"audit{ending}",
        f"Do packed documents leak? Tiny models with random weights; {where}",
        make_columns("!model | !family") + [Column(title, (of,), False) for title, of in zip(titles, arguments)],
        notes=[
            "leaks: changing a document changes another's logits or gradients; ignores it: without the argument every bit is the "
            "same, and nothing warns. tight: no bit moves, no gradient crosses, and packed logits are those of each document "
            "alone. attention_mask: documents in rows of their own, padded on either side. refuses: an error that says so. "
            "TRL: all that its collator sends with packing or padding_free."
        ],
    )
    for arm in arms:
        family = next(r["config"]["family"] for r in records if r["arm"] == arm)
        found = [cells.get((arm, argument)) for argument in arguments]
        matrix.rows.append([word(arm), word(family), *(word("-" if r is None else verdict(r)) for r in found)])
    counts = Table(
        f"audit{ending}-counts",
        f"Verdicts by argument, without attention-only models, and those that are tight of patched ones; {where}",
        [Column("argument", ("argument",), False)]
        + [Column(name, (name,)) for name in "models,tight,leaks,leaks and ignores it,refuses".split(",")]
        + [Column(name, (name,)) for name in ("patched", "patched and tight")],
    )
    for argument in arguments:
        own = [r for r in records if r["config"]["boundaries"] == argument]
        patched = [verdict(r) for r in own if "patched" in r["arm"]]
        own = [r for r in own if r["config"]["family"] != "attention" and "patched" not in r["arm"]]
        said = [verdict(r) for r in own]
        amounts = (
            len(own), sum(v.startswith("tight") for v in said), sum(v.startswith("leaks") for v in said),
            said.count("leaks, ignores it"), said.count("refuses"), len(patched), patched.count("tight"),
        )  # fmt: skip
        counts.rows.append([word(argument), *(number(amount, "d") for amount in amounts)])
    full = Table(
        f"audit{ending}-full",
        f"All findings of the audit; {where}",
        make_columns(
            "!model | !argument | !isolated forward = isolated_forward | !isolated backward = isolated_backward | "
            "!same as alone = same_as_alone | !raises | !ignored silently = ignored | largest move = largest | "
            "tokens reached = reach | !padding left = padding_left | !padding right = padding_right | "
            "!first module that leaks = module"
        ),
        notes=[
            "padding: a document padded there, with an attention_mask, is what it is alone. tokens reached: by a document's "
            "last token in the logits behind it; (all): up to the end of the row."
        ],
    )
    for r in records:
        m, config = r["metrics"], r["config"]
        reach = Cell(f"{m['reach']}{' (all)' if m['endless'] else ''}" if m["reach"] else "-", (m["reach"] or None,))
        full.rows.append([
            word(r["arm"]), word(config["boundaries"]), _flag(m["isolated_forward"]), _flag(m["isolated_backward"]),
            _flag(m["same_as_alone"]), word(config["error"] or "no"), _flag(m["ignored"]), number(m["largest"] or None, ".2g"),
            reach, _flag(m["padding_left"]), _flag(m["padding_right"]), word(config["module"] or "-"),
        ])  # fmt: skip
    return [matrix, counts, full]


def _flag(value: float | None) -> Cell:
    return Cell("-" if value is None else "yes" if value else "no", (value,))


KINDS = {"audit": Kind(audit_tables)}
