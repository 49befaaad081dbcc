"""Records: one strict JSON line per run, the only source of every table and figure.

A record is a mapping with exactly these keys:

==============  =====================================================================================================
schema          1, the version of this list
kind            which tables and figures it belongs to: ``training``, ``throughput``, ``packing``, ... (``METRICS``)
experiment      the question, the folder's name under experiments/
arm             what is compared: ``single``, ``padded``, ``packed-reset``, a packing strategy, ...
seed            integer
corpus_hash     what the documents are; records that differ in it never meet in one table. Where the record's own seed
                draws the documents (packing), the hash names their distribution and number, not the draw
config          the resolved configuration, a mapping of plain values
metrics         name -> number or null; at least what ``METRICS`` or the experiment's report.py lists for the kind
curves          name -> list of points, each a mapping name -> number or null; empty if there are none
wall_seconds    duration of the whole run
time            when the record was made, UTC, ISO 8601
commit, dirty   of the checkout the code ran from, null if unknown
hardware        cpu, cores, memory_bytes, gpus (list of names), driver (null without a GPU); of a run the operators' backend
versions        python, packmamba, torch, lightning, numpy (null where not installed)
==============  =====================================================================================================

A value that is not finite becomes null: a run that diverged is a result too, and JSON has no NaN. A line on disk also has
``checksum``, of all the rest; older ones have none.

Beside the records a sweep leaves ``sweep.json``: which runs it has, and its baseline. ``read_records`` adds that to the training
records of its arms, under ``sweep``; no file has this key.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import packmamba
from packmamba.errors import ConfigError, UserError

SCHEMA = 1
SWEEPS = "sweep.json"
_KINDS = {"arms": dict, "baseline": str, "tuned": dict, "steps": dict, "table": dict, "apart": bool}

METRICS: dict[str, tuple[str, ...]] = {
    # Losses are nats per real target; validation runs one document at a time from zero state. val_loss_start is over
    # the first 32 tokens of a document; val_loss_as_trained is null unless the arm trains with leak or carry.
    "training": (
        "steps", "real_tokens", "targets", "val_loss", "val_loss_start", "val_loss_as_trained", "real_tokens_per_second",
        "slots_per_second", "padding_fraction", "train_seconds", "parameters", "peak_memory_bytes",
    ),
    # Interleaved timings of optimizer steps; only arms that share config["run"] were timed together. The spread is the
    # interquartile range; cores_of_others, where there is one, how many cores other programs kept busy meanwhile.
    "throughput": (
        "seconds_per_step_median", "seconds_per_step_spread", "real_tokens_per_second", "slots_per_second",
        "padding_fraction", "rounds",
    ),
}  # fmt: skip
LATER_KEYS: dict[str, Any] = {
    "data.task": None, "data.task_options": {}, "data.unit": None, "data.cut_documents": None, "data.cut_at_steps": False,
    "data.stagger": False, "data.shuffle_steps": None, "data.subset": None, "data.split": "train", "data.streaming": False,
    "trainer.cuda_graphs": False, "trainer.deterministic": False, "trainer.init_from": None, "trainer.evaluate_every": None,
    "trainer.average_snapshots": 1, "trainer.average_share": 0.1, "trainer.boundary_options": {},
    "trainer.mean_over": "targets", "model.mixer": "mamba1", "model.mixer_options": {}, "optimizer.name": "adamw",
    "optimizer.options": {}, "optimizer.schedule_steps": None, "plugins": [], "evaluations": [], "evaluation_options": {},
    "evaluation_examples": 200,
}  # fmt: skip
"""Keys that came after runs were named, and the value that stands for their absence: with it a run's name is what it was."""
"""The metrics that a record of the library's own kinds must have. Those of an experiment are in its report.py."""

_TYPES: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "kind": (str,),
    "experiment": (str,),
    "arm": (str,),
    "seed": (int,),
    "corpus_hash": (str,),
    "config": (dict,),
    "metrics": (dict,),
    "curves": (dict,),
    "wall_seconds": (int, float),
    "time": (str,),
    "commit": (str, type(None)),
    "dirty": (bool, type(None)),
    "hardware": (dict,),
    "versions": (dict,),
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
    """A valid record of one run, with where it came from added. Raises ValueError as ``validate_record`` does."""
    record = {
        "schema": SCHEMA,
        "kind": kind,
        "experiment": experiment,
        "arm": arm,
        "seed": int(seed),
        "corpus_hash": corpus_hash,
        "config": config,
        "metrics": metrics,
        "curves": curves or {},
        "wall_seconds": wall_seconds,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **provenance(),
    }
    record = _plain(record)
    validate_record(record)
    return record


def write_items(path: str | Path, items: Iterable[Mapping[str, Any]]) -> None:
    """What an evaluation says of each document or example, one JSON line each, so that differences can be paired over them."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(path), "".join(json.dumps(item, default=str) + "\n" for item in items).encode())


def validate_record(record: Any) -> None:
    """Raises ValueError, saying which key is wrong and how, unless ``record`` is as this module's docstring says."""
    if not isinstance(record, dict):
        raise ValueError(f"a record is a mapping, got {type(record).__name__}")
    if missing := sorted(_TYPES.keys() - record.keys()):
        raise ValueError(f"record lacks {', '.join(missing)}")
    if unknown := sorted(record.keys() - _TYPES.keys() - {"sweep", "checksum"}):
        raise ValueError(f"record has unknown keys {', '.join(unknown)}")
    for key, types in _TYPES.items():
        value = record[key]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise ValueError(f"record's {key} must be {expected}, got {value!r}")
    if record["schema"] != SCHEMA:
        raise ValueError(f"record's schema is {record['schema']}, this code reads {SCHEMA}")
    for key in ("kind", "experiment", "arm", "corpus_hash"):
        if not record[key]:
            raise ValueError(f"record's {key} is empty")
    metrics = record["metrics"]
    if missing := [name for name in METRICS.get(record["kind"], ()) if name not in metrics]:
        raise ValueError(f"metrics of a {record['kind']} record lack {', '.join(missing)}")
    _check_numbers(metrics, "metrics")
    for name, points in record["curves"].items():
        if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
            raise ValueError(f"curves.{name} must be a list of mappings")
        for i, point in enumerate(points):
            _check_numbers(point, f"curves.{name}[{i}]")
    try:
        json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"record is not strict JSON: {error}") from None


def check_writable(folder: str | Path, key: str) -> None:
    """Raises ConfigError naming the key if the folder cannot be made or written: before work, not after it. Leaves nothing."""
    try:
        # Of a relative one none above the current folder: these may be closed to this user.
        places = (Path(folder), *Path(folder).parents)
        there = next(path for path in places if path.exists() or path.is_symlink())
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ConfigError(f"{key}: {folder} cannot be written ({error.strerror})") from None


def append_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Adds one line to a .jsonl file, creating folders; on disk when it returns, and before it the file is as it was.

    Processes may append to one file. Raises UserError if the disk is full, say.
    """
    record = _plain({key: value for key, value in record.items() if key != "sweep"})
    validate_record(record)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({**record, "checksum": _checksum(record)}, allow_nan=False, sort_keys=True).encode() + b"\n"
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some shared file systems lock no folders
            fcntl.flock(folder, fcntl.LOCK_EX)
            for cut_short in path.parent.glob(f"{path.name}.*.tmp"):
                cut_short.unlink()
        before = path.read_bytes() if path.is_file() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"  # what cut the last line short must cost that record only
        write_whole(path, before + line)
        os.fsync(folder)
    except OSError as error:
        raise UserError(f"the record {path} could not be written ({error.strerror})") from None
    finally:
        os.close(folder)


def _checksum(record: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record, sort_keys=True).encode()):08x}"


def write_whole(path: Path, content: bytes) -> None:
    """A file with this content is there, on disk, or what was there before is. OSError as of writing."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_records(folder: str | Path) -> list[dict[str, Any]]:
    """All records of folder/records/*.jsonl, by file name, then line. ValueError names a wrong file and line."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    records = []
    for path in sorted((folder / "records").glob("*.jsonl")):
        if not path.is_file():  # opening a pipe would wait
            got = "a link to nowhere" if path.is_symlink() else "none"
            raise ValueError(f"{path}: expected a file of records, got {got}")
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode(), parse_constant=_refuse_constant)
                validate_record(record)
                if record.pop("checksum", None) not in (None, _checksum(record)):
                    raise ValueError("the record is not what was written")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            records.append(record)
    if not records:
        raise ValueError(f"{folder} has no records: expected {folder / 'records'}/*.jsonl")
    return _with_sweeps(records, folder / SWEEPS)


def write_sweep(
    folder: str | Path,
    name: str,
    arms: Mapping[str, Iterable[int]],
    baseline: str | None = None,
    tuned: Mapping[str, list] | None = None,
    steps: Mapping[str, int] | None = None,
    table: Mapping[str, Any] | None = None,
    apart: bool = False,
) -> None:
    """Says beside a folder's records which seeds of which arms a sweep has; what other sweeps say there stays.

    Args:
        baseline: the arm that others are compared with.
        tuned: ``keys`` of which each arm takes its best value, those ``tried`` of each, and ``seeds`` that chose it.
        steps: which of its runs' records an arm's tables take: those made after so many steps.
        table: ``metrics``, ``columns`` and ``paired`` of the table of arms, where they are chosen.
        apart: whether arms are compared with the baseline, which is a label then, whatever else differs between them.
    """
    path = Path(folder) / SWEEPS
    try:
        said = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not what a sweep wrote ({error}); remove it, and repeat the command") from None
    said[name] = {"baseline": baseline, "tuned": tuned, "arms": {arm: sorted(seeds) for arm, seeds in arms.items()}}
    said[name] |= {k: v for k, v in (("steps", steps), ("table", dict(table or {})), ("apart", apart)) if v}
    said[name]["checksum"] = _checksum({name: said[name]})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(said, indent=1) + "\n").encode())


def _with_sweeps(records: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The training records of a sweep's arms with ``sweep``: its baseline, the arm's seeds, steps, and arms without record."""
    if not path.is_file():
        return records
    trained = {record["arm"] for record in records if record["kind"] == "training"}
    try:
        said = _of_arms(path, trained)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not what a sweep wrote ({error!r}); remove it, its command writes it") from None
    return [
        record | {"sweep": said[record["arm"]]} if record["kind"] == "training" and record["arm"] in said else record
        for record in records
    ]


def _of_arms(path: Path, trained: set[str]) -> dict[str, dict[str, Any]]:
    said: dict[str, dict[str, Any]] = {}
    for name, sweep in json.loads(path.read_text(encoding="utf-8")).items():
        if sweep.pop("checksum", None) not in (None, _checksum({name: sweep})):
            raise ValueError(f"what it says of '{name}' has changed")
        if wrong := [k for k in _KINDS | sweep if not isinstance(sweep.get(k), (_KINDS.get(k, ()), type(None)))]:
            raise TypeError(f"{wrong[0]} is {sweep[wrong[0]]!r}")  # also 'chacksum', say, which guards nothing
        # Raises where it has no keys or seeds. Sweeps of one folder may try other values for arms of the same names.
        tried = [dict(zip(t["keys"], t.get("tried", ()))) for t in [sweep["tuned"]] if t and list(t["seeds"])]
        absent = {arm: seeds for arm, seeds in sweep["arms"].items() if arm not in trained}
        for arm, seeds in sweep["arms"].items():
            seeds = sorted({*seeds, *(own := said.get(arm, {})).get("seeds", [])})
            steps = {*own.get("steps", []), *([sweep["steps"][arm]] if arm in sweep.get("steps", {}) else [])}
            said[arm] = {"baseline": sweep["baseline"], "tuned": sweep["tuned"], "seeds": seeds, "absent": absent}
            said[arm] |= {k: v for k, v in (("steps", sorted(steps)), ("tried", own.get("tried", []) + tried)) if v}
            said[arm] |= {name: sweep[name] for name in ("table", "apart") if name in sweep}
    return said


@functools.cache
def provenance() -> dict[str, Any]:
    """commit, dirty, hardware and versions of this process; call it when a run starts, the first answer is kept.

    ``PACKMAMBA_COMMIT`` names the commit where .git does not travel; a value ending in ``-dirty`` says so.
    """
    commit, dirty = _commit()
    return {"commit": commit, "dirty": dirty, "hardware": _hardware(), "versions": _versions()}


def _commit() -> tuple[str | None, bool | None]:
    if named := os.environ.get("PACKMAMBA_COMMIT"):
        return named.removesuffix("-dirty"), named.endswith("-dirty")
    root = Path(__file__).resolve().parents[1]
    # An installed package may lie inside somebody else's repository.
    if Path(_output("git", "-C", str(root), "rev-parse", "--show-toplevel") or "/") != root:
        return None, None
    # What runs write (records, tables, figures) does not change what they compute.
    written = [
        f":(exclude,glob)experiments/*/{name}"
        for name in ("records/**", "tables/**", "figures/**", "report.html", SWEEPS, "tuning/**")
    ]
    status = _output("git", "--no-optional-locks", "-C", str(root), "status", "--porcelain", "--", ".", *written)
    return _output("git", "-C", str(root), "rev-parse", "HEAD"), None if status is None else bool(status)


def _hardware() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).is_file():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    affinity = getattr(os, "sched_getaffinity", None)
    gpus = (_output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "").splitlines()
    return {
        "cpu": cpu,
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [line.split(",")[0].strip() for line in gpus],
        "driver": gpus[0].split(",")[-1].strip() if gpus else None,
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "packmamba": packmamba.__version__}
    for name in ("torch", "lightning", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None if it is missing, fails or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _plain(value: Any) -> Any:
    """Mappings, sequences, numpy scalars and paths as JSON's own types; numbers that are not finite as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, (str, int, float)) and hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_numbers(values: dict[str, Any], where: str) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"{where}.{name} must be a number or null, got {value!r}")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
