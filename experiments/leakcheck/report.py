"""Tables of the audit: a verdict for each model and boundary argument, and all that was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packmamba.lab.report import aggregate
from packmamba.lab.report.aggregate import Record
from packmamba.lab.report.html import Kind
from packmamba.lab.report.tables import Cell, Table, make_table


def latest(records: Sequence[Record]) -> dict[str, list[Record]]:
    """By device, of the newest version of transformers that was audited there, by arm and argument
    the latest; in their order.
    """
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


def _tables(device: str, records: Sequence[Record]) -> list[Table]:
    config = records[0]["config"]
    ending = "" if device == "cpu" else f"-{device}"
    kernels = [f"{name} {version}" for name, version in config["kernels"].items() if version]
    where = f"transformers {config['transformers']}, {device}, {', '.join(kernels) or 'no kernels installed'}"
    arguments = list(dict.fromkeys(r["config"]["boundaries"] for r in records))
    collators = {r["config"]["boundaries"]: f"TRL {of}" for r in records if (of := r["config"].get("trl"))}
    columns = " | ".join(f"!{collators.get(one, one.replace('+', ' + '))} = {one}" for one in arguments)
    rows: dict[str, dict[str, Any]] = {}
    for r in records:
        row = rows.setdefault(r["arm"], dict.fromkeys(arguments, "-"))
        row |= {"model": r["arm"], "family": r["config"]["family"], r["config"]["boundaries"]: verdict(r)}
    matrix = make_table(
        f"audit{ending}",
        f"Do packed documents leak? Tiny models with random weights; {where}",
        f"!model | !family | {columns}",
        rows.values(),
        "leaks: changing a document changes another's logits or gradients; ignores it: without the argument every bit is the "
        "same, and nothing warns. tight: no bit moves, no gradient crosses, and packed logits are those of each document "
        "alone. attention_mask: documents in rows of their own, padded on either side. refuses: an error that says so. "
        "TRL: all that its collator sends with packing or padding_free.",
    )
    amounts = []
    for argument in arguments:
        own = [r for r in records if r["config"]["boundaries"] == argument]
        patched = [verdict(r) for r in own if "patched" in r["arm"]]
        said = [verdict(r) for r in own if r["config"]["family"] != "attention" and "patched" not in r["arm"]]
        row = {"argument": argument, "models": len(said), "tight": sum(v.startswith("tight") for v in said)}
        row |= {"leaks": sum(v.startswith("leaks") for v in said), "refuses": said.count("refuses")}
        row |= {"leaks and ignores it": said.count("leaks, ignores it"), "patched": len(patched)}
        amounts.append(row | {"patched and tight": patched.count("tight")})
    counts = make_table(
        f"audit{ending}-counts",
        f"Verdicts by argument, without attention-only models, and those that are tight of patched ones; {where}",
        "!argument | models:d | tight:d | leaks:d | leaks and ignores it = leaks~and~ignores~it:d | refuses:d | patched:d | "
        "patched and tight = patched~and~tight:d",
        amounts,
    )
    full = make_table(
        f"audit{ending}-full",
        f"All findings of the audit; {where}",
        "!model | !argument | !isolated forward = isolated_forward | !isolated backward = isolated_backward | "
        "!same as alone = same_as_alone | !raises | !ignored silently = ignored | largest move = largest:.2g | "
        "tokens reached = reach | !padding left = padding_left | !padding right = padding_right | "
        "!first module that leaks = module",
        map(_findings, records),
        "padding: a document padded there, with an attention_mask, is what it is alone. tokens reached: by a document's "
        "last token in the logits behind it; (all): up to the end of the row.",
    )
    return [matrix, counts, full]


WORDS = {None: "-", 0: "no", 1: "yes"}
FLAGS = ("isolated_forward", "isolated_backward", "same_as_alone", "ignored", "padding_left", "padding_right")


def _findings(record: Record) -> dict[str, Any]:
    m, config = record["metrics"], record["config"]
    row: dict[str, Any] = {name: Cell(WORDS[m[name]], (m[name],)) for name in FLAGS}
    row |= {"model": record["arm"], "argument": config["boundaries"], "raises": config["error"] or "no"}
    reach = Cell(f"{m['reach']}{' (all)' if m['endless'] else ''}" if m["reach"] else "-", (m["reach"] or None,))
    return row | {"largest": m["largest"] or None, "reach": reach, "module": config["module"] or "-"}


KINDS = {"audit": Kind(lambda records: [table for one in latest(records).items() for table in _tables(*one)])}
