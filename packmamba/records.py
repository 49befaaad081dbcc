"""Records: one JSON line per run, the only source of tables and figures.

kind            which tables and figures it belongs to: ``training``, ``throughput``, ``evaluation``, a bench's own
experiment      the question, a folder's name under experiments/
arm, seed       what is compared, such as ``padded``, and which repetition of it
corpus_hash     of the documents (of their distribution, where the seed draws them); no table mixes two
config          the resolved configuration
metrics         name -> number or null (not finite); at least those of ``METRICS``
curves          name -> list of points, each a mapping name -> number or null
wall_seconds, time, commit, dirty, hardware, versions, schema    where the record comes from (``provenance``)
sweep           added by ``read_records`` from ``sweep.json``: the arm's baseline and seeds, and what was tuned
"""

from __future__ import annotations

import functools
import gzip
import importlib.metadata
import json
import math
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

SCHEMA = 1
SWEEPS = "sweep.json"
FILES = ("record.json", "records.jsonl.gz", "records.jsonl", "records/*.jsonl.gz", "records/*.jsonl")
KEYS = (
    "schema kind experiment arm seed corpus_hash config metrics curves wall_seconds time commit dirty hardware versions"
).split()

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

# Configurations in records leave these keys out at these values: the keys came after runs were named.
LATER_KEYS: dict[str, Any] = (
    dict.fromkeys("data.task data.unit data.cut_documents data.shuffle_steps data.subset".split())
    | dict.fromkeys("trainer.init_from trainer.evaluate_every optimizer.schedule_steps".split())
    | dict.fromkeys(
        "data.cut_at_steps data.stagger data.streaming trainer.cuda_graphs trainer.deterministic".split(), False
    )
    | dict.fromkeys("data.task_options model.mixer_options optimizer.options trainer.boundary_options".split(), {})
    | {"evaluation_options": {}, "evaluations": [], "plugins": [], "evaluation_examples": 200, "data.split": "train"}
    | {"trainer.average_snapshots": 1, "trainer.average_share": 0.1, "trainer.mean_over": "targets"}
    | {"model.mixer": "mamba1", "trainer.callbacks": [], "optimizer.name": "adamw"}
)
# Keys and values of old records: dotted key -> (its name in the same section now, {old value: value now}).
STRATEGIES = {"in_order": "next_fit", "best_fit": "best_fit_decreasing", "histogram": "spfhp", "split": "concat_split"}
BOUNDARIES = {"foreign": "state_passing", "noise": "fitted_noise", "foreign_heads": "state_passing_within_row"}
RENAMED: dict[str, tuple[str, dict[Any, Any]]] = {
    "data.mode": ("batching", {}),
    "data.slots_per_batch": ("max_tokens_per_batch", {}),
    "data.strategy": ("strategy", STRATEGIES),
    "data.overlong": ("overlong", {"pieces": "split"}),
    "trainer.boundary": ("boundary", BOUNDARIES),
    "strategy": ("strategy", STRATEGIES),
    "overlong": ("overlong", {"pieces": "split"}),
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
    record = {"schema": SCHEMA, "kind": kind, "experiment": experiment, "arm": arm, "seed": int(seed)}
    record |= {"corpus_hash": corpus_hash, "config": config, "metrics": metrics, "curves": curves or {}}
    time = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return _plain({**record, "wall_seconds": wall_seconds, "time": time, **provenance()})


def append_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Append a record to a file of JSON lines, under a lock; a last line that an interrupted append left is removed."""
    line = json.dumps(_plain({k: v for k, v in record.items() if k != "sweep"}), allow_nan=False, sort_keys=True)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"), open(path, "a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")


def read_records(folder: str | Path) -> list[dict[str, Any]]:
    """Read all records of a folder, in the order of ``FILES``, names and lines. Raises ValueError naming a wrong line."""
    records = []
    for path in [path for pattern in FILES for path in sorted(Path(folder).glob(pattern))]:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                    if missing := [key for key in KEYS if key not in record]:
                        raise ValueError(f"one that lacks {', '.join(missing)}")
                    records.append(_renamed(record))
                except (ValueError, TypeError, AttributeError) as error:
                    if line.strip() and line.endswith(b"\n"):  # else an append was interrupted
                        raise ValueError(f"{path}:{number}: expected a record, got {error}") from None
    if not records:
        raise ValueError(f"{folder}: expected a folder with {' or '.join(FILES)}, got no record")
    return _with_sweeps(records, Path(folder) / SWEEPS) if (Path(folder) / SWEEPS).is_file() else records


def has_records(folder: str | Path) -> bool:
    return any(True for pattern in FILES for _ in Path(folder).glob(pattern))


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    """Give the configuration of an old record the keys and values of today."""
    record.pop("checksum", None)
    if record["kind"] == "packing":  # whose arms are strategies
        record["arm"] = STRATEGIES.get(record["arm"], record["arm"])
    for name, (new, values) in RENAMED.items():
        section, _, key = name.rpartition(".")
        config = record["config"].get(section) if section else record["config"]
        if isinstance(config, dict) and key in config:
            value = config.pop(key)
            config[new] = values.get(value, value) if isinstance(value, (str, int, float, bool)) else value
    return record


def write_sweep(
    folder: str | Path, name: str, arms: Mapping[str, Iterable[int]], baseline: str | None = None, **more: Any
) -> None:
    """Write a sweep's entry of ``sweep.json``: its seeds by arm and its baseline; entries of other sweeps stay.

    Args:
        more: ``tuned`` (``keys``, the values ``tried`` of each, ``seeds`` that chose), ``steps`` (by arm, of the runs in its
            tables), ``table`` (``metrics``, ``columns``, ``paired``), ``apart`` (compared with the baseline in any case).
    """
    path = Path(folder) / SWEEPS
    entry = {"arms": {arm: sorted(seeds) for arm, seeds in arms.items()}, "baseline": baseline, "tuned": None}
    entry |= {key: value for key, value in more.items() if value}
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        entries = json.loads(path.read_text()) if path.is_file() else {}
        write_whole(path, (json.dumps(entries | {name: entry}, indent=1) + "\n").encode())


def _with_sweeps(records: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Add ``sweep`` to the training records of a sweep's arms: baseline, seeds, steps, arms without a record, what was tuned."""
    training = [record for record in records if record["kind"] == "training"]
    sweeps: dict[str, dict[str, Any]] = {}
    for entry in json.loads(path.read_text()).values():
        own = {key: entry[key] for key in ("baseline", "tuned", "table", "apart") if key in entry}
        own["absent"] = {arm: entry["arms"][arm] for arm in entry["arms"].keys() - {each["arm"] for each in training}}
        tried = [dict(zip(entry["tuned"]["keys"], entry["tuned"].get("tried", ())))] if entry["tuned"] else []
        for arm, seeds in entry["arms"].items():
            before = sweeps.get(arm, {"seeds": [], "steps": [], "tried": []})
            steps = [entry["steps"][arm]] if arm in entry.get("steps", {}) else []
            merged = {"seeds": sorted({*before["seeds"], *seeds}), "steps": sorted({*before["steps"], *steps})}
            sweeps[arm] = {**own, **merged, "tried": before["tried"] + tried}
    for record in training:
        record |= {"sweep": sweeps[record["arm"]]} if record["arm"] in sweeps else {}
    return records


def write_whole(path: Path, content: bytes) -> None:
    """Write a file through a temporary one, so that it is never seen in part."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def write_items(path: str | Path, items: Iterable[Mapping[str, Any]]) -> None:
    """Write an evaluation's results for each document or example, one JSON line each."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(path), "".join(json.dumps(item, default=str) + "\n" for item in items).encode())


def check_writable(folder: str | Path, key: str) -> None:
    """Raise ConfigError naming the key if the folder can be neither made nor written."""
    there = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ConfigError(f"{key}: expected a folder that can be written, got {folder}")


@functools.cache
def provenance() -> dict[str, Any]:
    """Return commit, dirty, hardware and versions of this process, as on the first call.

    ``PACKMAMBA_COMMIT`` names the commit where .git does not travel; a value ending in ``-dirty`` says so.
    """
    if named := os.environ.get("PACKMAMBA_COMMIT"):
        commit, dirty = named.removesuffix("-dirty"), named.endswith("-dirty")
    else:
        commit, dirty = _checkout()
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    cpu = next((line.partition(":")[2].strip() for line in cpuinfo.splitlines() if "model name" in line), "")
    gpus = (_output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "").splitlines()
    hardware = {
        "cpu": cpu or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [line.split(",")[0].strip() for line in gpus],
        "driver": gpus[0].split(",")[-1].strip() if gpus else None,
    }
    versions = {name: importlib.metadata.version(name) for name in ("torch", "lightning", "numpy")}
    versions = {"python": platform.python_version(), "packmamba": packmamba.__version__, **versions}
    return {"commit": commit, "dirty": dirty, "hardware": hardware, "versions": versions}


def _checkout() -> tuple[str | None, bool | None]:
    root = Path(__file__).resolve().parents[1]
    git = ("git", "--no-optional-locks", "-C", str(root))
    if Path(_output(*git, "rev-parse", "--show-toplevel") or "/") != root:
        return None, None  # an installed package may lie inside another repository
    written = ("record*", "records/**", "tables/**", "figures/**", "report.html", SWEEPS, "tuning/**")
    excluded = [f":(exclude,glob)experiments/*/{name}" for name in written]
    status = _output(*git, "status", "--porcelain", "--", ".", *excluded)
    return _output(*git, "rev-parse", "HEAD"), None if status is None else bool(status)


def _output(*command: str) -> str | None:
    """Return the stripped output of a command, None if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _plain(value: Any) -> Any:
    """Convert mappings, sequences, numpy scalars and paths to JSON's own types, numbers that are not finite to None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
