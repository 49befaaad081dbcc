"""Records, one JSON line per run: kind of record, experiment, arm, seed, corpus, configuration, metrics, curves, provenance.

``read_records`` adds ``sweep`` from ``sweep.json``: the arm's baseline and seeds, and what was tuned.
"""

from __future__ import annotations

import functools
import gzip
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock

import packmamba
from packmamba.errors import ConfigError

SWEEPS = "sweep.json"
SOURCES = ("*.py", "*.yaml", "kernels")  # a change of others makes no commit dirty
FILES = ("record.json", "records.jsonl.gz", "records.jsonl", "records/*.jsonl.gz", "records/*.jsonl")
KEYS = ["schema", "kind", "experiment", "arm", "seed", "corpus_hash", "config", "metrics", "curves", "wall_seconds"]

# Losses are nats per target; validation runs documents one at a time from zero state. val_loss_start is over a document's
# first 32 tokens. Arms with one config["run"] were timed in turns; the spread is the interquartile range.
METRICS = {
    "training": tuple(
        "steps real_tokens targets val_loss val_loss_start val_loss_as_trained real_tokens_per_second slots_per_second "
        "padding_fraction train_seconds parameters peak_memory_bytes".split()
    ),
    "throughput": tuple(
        "seconds_per_step_median seconds_per_step_spread real_tokens_per_second slots_per_second padding_fraction rounds".split()
    ),
}

# Configurations in records lack these keys at these values: the keys came after runs were named.
LATER_KEYS: dict[str, Any] = {
    key: value
    for value, keys in (
        (None, "data.task data.unit data.cut_documents data.shuffle_steps data.subset optimizer.schedule_steps"),
        (None, "trainer.init_from trainer.evaluate_every"),
        (False, "data.cut_at_steps data.stagger trainer.cuda_graphs trainer.deterministic"),
        ({}, "data.task_options model.mixer_options optimizer.options trainer.boundary_options evaluation_options"),
        ([], "evaluations plugins trainer.callbacks"),
        *(
            (200, "evaluation_examples"),
            ("train", "data.split"),
            ("mamba1", "model.mixer"),
            ("adamw", "optimizer.name"),
        ),
        *((1, "trainer.average_snapshots"), (0.1, "trainer.average_share"), ("targets", "trainer.mean_over")),
    )
    for key in keys.split()
}
# Old names of keys of a configuration and of keys' values: the names today.
RENAMED: dict[str, dict[str, str]] = {
    "data": {"mode": "batching", "slots_per_batch": "max_tokens_per_batch"},
    "strategy": {
        "in_order": "next_fit",
        "best_fit": "best_fit_decreasing",
        "histogram": "spfhp",
        "split": "concat_split",
    },
    "overlong": {"pieces": "split"},
    "boundary": {"foreign": "state_passing", "noise": "fitted_noise", "foreign_heads": "state_passing_within_row"},
}


def make_record(
    kind: str,
    experiment: str,
    arm: str,
    config: Mapping[str, Any],
    seed: int,
    corpus_hash: str,
    metrics: Mapping[str, Any],
    wall_seconds: float,
    curves: Mapping[str, list[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Make a run's record, with its provenance. Raises ValueError where a metric of ``METRICS`` is missing."""
    if missing := set(METRICS.get(kind, ())) - metrics.keys():
        raise ValueError(f"metrics of a {kind} record lack {', '.join(sorted(missing))}")
    values = (1, kind, experiment, arm, int(seed), corpus_hash, config, metrics, curves or {}, wall_seconds)
    time = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return _plain({**dict(zip(KEYS, values)), "time": time, **provenance()})


def append_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Append a record to a file of JSON lines, under a lock; a last line that an interrupted append left is removed."""
    line = json.dumps(_plain({k: v for k, v in record.items() if k != "sweep"}), allow_nan=False, sort_keys=True)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"), open(path, "a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")


def read_records(folder: str | Path) -> list[dict[str, Any]]:
    """Read all records of a folder, in the order of ``FILES``, names and lines. Raises ConfigError naming a wrong line."""
    records = []
    for path in [path for pattern in FILES for path in sorted(Path(folder).glob(pattern))]:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                    records.append(_renamed({key: record[key] for key in KEYS} | record))
                except (ValueError, TypeError, KeyError) as error:
                    if line.strip() and line.endswith(b"\n"):  # else an append was interrupted
                        raise ConfigError(f"{path}:{number}: expected a record, got one without {error}") from None
    if not records:
        raise ConfigError(f"{folder}: expected a folder with {' or '.join(FILES)}, got no record")
    return _with_sweeps(records, Path(folder) / SWEEPS) if (Path(folder) / SWEEPS).is_file() else records


def has_records(folder: str | Path) -> bool:
    return any(True for pattern in FILES for _ in Path(folder).glob(pattern))


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    """Give an old record's configuration the names of today."""
    record.pop("checksum", None)
    if record["kind"] == "packing":  # whose arms are strategies
        record["arm"] = RENAMED["strategy"].get(record["arm"], record["arm"])
    config = record["config"]
    for name in {"data", "trainer"} & config.keys():
        config[name] = {RENAMED.get(name, {}).get(key, key): value for key, value in config[name].items()}
    for section in (config, config.get("data", {}), config.get("trainer", {})):
        for key in section.keys() & RENAMED.keys():
            section[key] = RENAMED[key].get(str(section[key]), section[key])
    return record


def write_sweep(folder: str | Path, name: str, arms: Mapping[str, Any], baseline: str | None, **more: Any) -> None:
    """Write a sweep's entry of ``sweep.json``, its seeds by arm and its baseline; entries of other sweeps stay.

    ``more``: ``tuned`` (``keys``, the values ``tried`` of each, ``seeds`` that chose), ``steps`` (by arm, of the runs in its
    tables), ``table`` (``metrics``, ``columns``), ``apart`` (compared with the baseline in any case).
    """
    path = Path(folder) / SWEEPS
    entry = {"arms": {arm: sorted(seeds) for arm, seeds in arms.items()}, "baseline": baseline, "tuned": None}
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        entries = json.loads(path.read_text()) if path.is_file() else {}
        entries[name] = entry | {key: value for key, value in more.items() if value}
        write_whole(path, (json.dumps(entries, indent=1) + "\n").encode())


def _with_sweeps(records: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Add ``sweep`` to the training records of a sweep's arms: baseline, seeds, steps, arms without a record, what was tuned."""
    made = {record["arm"] for record in records if record["kind"] == "training"}
    sweeps: dict[str, dict[str, Any]] = {}
    for entry in json.loads(path.read_text()).values():
        own = {key: entry[key] for key in ("baseline", "tuned", "table", "apart") if key in entry}
        own["absent"] = {arm: seeds for arm, seeds in entry["arms"].items() if arm not in made}
        tried = [dict(zip(entry["tuned"]["keys"], entry["tuned"].get("tried", ())))] if entry["tuned"] else []
        for arm, seeds in entry["arms"].items():
            before = sweeps.get(arm, {"seeds": [], "steps": [], "tried": []})
            steps = {*before["steps"], *([entry["steps"][arm]] if arm in entry.get("steps", {}) else [])}
            merged = {"seeds": sorted({*before["seeds"], *seeds}), "steps": sorted(steps)}
            sweeps[arm] = {**own, **merged, "tried": before["tried"] + tried}
    for record in records:
        if record["kind"] == "training" and record["arm"] in sweeps:
            record["sweep"] = sweeps[record["arm"]]
    return records


def write_whole(path: Path, content: bytes) -> None:
    """Write a file through a temporary one, so that it is never seen in part."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def write_items(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """Write an evaluation's results for each document or example, one JSON line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(item, default=str) + "\n" for item in items).encode())


def check_writable(folder: str | Path, key: str) -> None:
    """Raise ConfigError naming the key if the folder can be neither made nor written."""
    there = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ConfigError(f"{key}: expected a folder that can be written, got {folder}")


@functools.cache
def provenance() -> dict[str, Any]:
    """Return commit (``PACKMAMBA_COMMIT`` where .git does not travel, with ``-dirty``), hardware and versions, once."""
    root = Path(__file__).resolve().parents[1]
    git = ("git", "--no-optional-locks", "-C", str(root))
    commit, dirty = os.environ.get("PACKMAMBA_COMMIT"), None
    if commit:
        commit, dirty = commit.removesuffix("-dirty"), commit.endswith("-dirty")
    elif _output(*git, "rev-parse", "--show-toplevel") == str(root):  # not of a repository around an installed package
        commit, dirty = _output(*git, "rev-parse", "HEAD"), bool(_output(*git, "status", "--porcelain", "--", *SOURCES))
    cpus = _output("sed", "-n", "s/^model name.*: //p", "/proc/cpuinfo") or platform.processor() or platform.machine()
    gpus = (_output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "").splitlines()
    hardware = {
        "cpu": cpus.splitlines()[0],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [line.split(",")[0].strip() for line in gpus],
        "driver": gpus[0].split(",")[-1].strip() if gpus else None,
    }
    versions = {name: importlib.metadata.version(name) for name in ("torch", "lightning", "numpy")}
    versions = {"python": platform.python_version(), "packmamba": packmamba.__version__, **versions}
    return {"commit": commit, "dirty": dirty, "hardware": hardware, "versions": versions}


def _output(*command: str) -> str | None:
    """Return the stripped output of a command, None if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _plain(value: Any) -> Any:
    """Convert a value to what JSON gives back, with None for numbers that are not finite."""
    text = json.dumps(value, default=lambda one: one.item() if hasattr(one, "item") else str(one))
    return json.loads(text, parse_constant=lambda _: None)
