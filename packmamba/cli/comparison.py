"""Runs that were trained apart, in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, cast

from omegaconf import DictConfig, OmegaConf

from packmamba.config import CONFIGURATION, Config, ConfigError, key, load, suggest, to_dict
from packmamba.records import append_record, check_writable, has_records, read_records, write_sweep
from packmamba.report import summary
from packmamba.report.chosen import keys_of, known
from packmamba.report.folder import build_sections, write_report
from packmamba.training.run_id import id_of
from packmamba.training.table import TableConfig

EVALUATION = ("data.validation_documents", "evaluations", "evaluation_options", "evaluation_examples")
"""Keys that decide what a run's numbers are of, beside its corpus."""
FILE = "compared.jsonl"


@dataclass
class CompareConfig(TableConfig):
    """Keys of ``compare``."""

    baseline: Optional[str] = key(
        None,
        "The arm that the others are compared with, or one of its runs; null: padded, single, packed with reset, the first.",
    )
    metrics: list[str] = key(
        ["val_loss"], "What is compared: numbers of the records, such as [val_loss, mqar.accuracy]."
    )
    output: Optional[str] = key(
        None, "Folder for these records, tables, figures and report.html; null: only print the table."
    )


def compare_runs(words: Sequence[str]) -> str:
    """The table of these runs, and where its report is.

    Args:
        words: folders of runs, or any that hold records/, and keys.

    Raises:
        ConfigError: runs differ in their documents or in what was asked, or a key is wrong.
    """
    folders = [word for word in words if Path(word).exists() or "=" not in word]
    config = load(CompareConfig, None, [word for word in words if word not in folders])
    found = {folder: _records(folder) for folder in folders}
    records = _once([record for of_folder in found.values() for record in of_folder])
    if len(records) < 2:
        raise ConfigError(f"compare: expected at least two runs, got {len(records)}")
    _check_alike(found)
    arms = summary.training_arms(records)
    baseline = _baseline(config.baseline, arms, found)
    _check_columns(config, arms)
    table = config.said
    seeds = {arm.name: sorted({record["seed"] for record in records if record["arm"] == arm.name}) for arm in arms}
    if config.output is not None:
        _write(Path(config.output), records, seeds, baseline, table)
        records, page = read_records(config.output), write_report(config.output)
    else:
        said = {"baseline": baseline, "tuned": None, "absent": {}, "table": table, "apart": True}
        records = [record | {"sweep": said | {"seeds": seeds[record["arm"]]}} for record in records]
    (section,) = build_sections(records, figures=False)
    shown = section.tables[0]
    commits = sorted({str(record["commit"])[:10] for record in records})
    if len(commits) > 1:
        shown.notes.append(f"These runs are of {len(commits)} commits: {', '.join(commits)}.")
    return shown.text() + (f"\nReport, with figures: {page}" if config.output is not None else "")


def _records(folder: str) -> list[dict[str, Any]]:
    """Of a run that has ended, the record after most steps; of another folder with records all of them."""
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"{folder} is not a folder; expected a run's, or one that holds records/")
    at = path
    if not has_records(path) and (path / CONFIGURATION).is_file():
        output = cast(DictConfig, OmegaConf.load(path / CONFIGURATION)).get("output")
        at = path if output is None else Path(output)
    try:
        records = [record for record in read_records(at) if record["kind"] == "training"]
    except ValueError as error:
        if has_records(at):
            raise ConfigError(str(error)) from None
        records = []
    if (path / CONFIGURATION).is_file():
        run = path.resolve().name
        own = [record for record in records if at == path or run == id_of(record["arm"], record["config"])]
        records = sorted(own, key=lambda record: record["metrics"]["steps"] or 0)[-1:]
    if not records:
        raise ConfigError(f"{folder} has no record of a run that has ended")
    return [{name: value for name, value in record.items() if name != "sweep"} for record in records]


def _check_columns(config: CompareConfig, arms: Sequence[summary.Arm]) -> None:
    has = known(arms)
    for column in config.metrics:
        if column not in has:
            raise ConfigError(f"metrics: expected some of {', '.join(has)}, got '{column}'")
    others = {"speedup", *has, *keys_of(arms)}
    for column in config.columns or ():
        if column not in others:
            raise ConfigError(
                f"columns: expected numbers of the records and keys, got '{column}'{suggest(column, others)}; the numbers are "
                f"{', '.join(has)}"
            )


def _once(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    unique: list[dict[str, Any]] = []
    for record in records:
        if record not in unique:
            unique.append(record)
    return unique


def _check_alike(found: Mapping[str, list[dict[str, Any]]]) -> None:
    every = [(folder, record) for folder, records in found.items() for record in records]
    (first, a), *others = every
    for folder, b in others:
        if a["corpus_hash"] != b["corpus_hash"]:
            raise ConfigError(
                f"{first} and {folder} are of different documents: their corpus hashes are {a['corpus_hash'][:12]} and "
                f"{b['corpus_hash'][:12]}"
            )
        for name in EVALUATION:
            if (one := _value(a, name)) != (other := _value(b, name)):
                raise ConfigError(f"{first} and {folder} were evaluated in different ways: {name} is {one} and {other}")


DEFAULTS = to_dict(Config())


def _value(record: Mapping[str, Any], name: str) -> Any:
    """Of a key; its default where records do not hold it."""
    value, default = record["config"], DEFAULTS
    for part in name.split("."):
        default = default[part]
        value = value.get(part, default) if isinstance(value, Mapping) else default
    return value


def _baseline(named: str | None, arms: Sequence[summary.Arm], found: Mapping[str, list[dict[str, Any]]]) -> str:
    """The label of the arm that is meant."""
    labels = [arm.label for arm in arms]
    if named is None:
        scheme = next((arm for scheme in summary.BASELINES for arm in arms if arm.scheme == scheme), arms[0])
        return scheme.label
    if named in labels:
        return named
    of_run = [
        (record["arm"], summary.flatten(record["config"]))
        for f in found
        if Path(f) == Path(named)
        for record in found[f]
    ]
    meant = [arm.label for arm in arms if arm.name == named] or [
        arm.label for arm in arms
        if any(name == arm.name and all(keys.get(key) == value for key, value in arm.variant) for name, keys in of_run)
    ]  # fmt: skip
    if len(meant) != 1:
        which = (
            f"which is {len(meant)} arms; name one by its label or one of its runs"
            if meant
            else "which is none of them"
        )
        raise ConfigError(f"baseline: expected one of {'; '.join(labels)}, got '{named}', {which}")
    return meant[0]


def _write(
    output: Path, records: list[dict[str, Any]], seeds: dict[str, list[int]], baseline: str, table: dict[str, Any]
) -> None:
    check_writable(output / "records", "output")
    if others := [path for path in (output / "records").glob("*.jsonl") if path.name != FILE]:
        raise ConfigError(f"output: {output} holds records of its own, such as {others[0].name}; name another folder")
    (output / "records" / FILE).unlink(missing_ok=True)
    for record in records:
        append_record(output / "records" / FILE, record)
    write_sweep(output, "compare", seeds, baseline, table=table, apart=True)
