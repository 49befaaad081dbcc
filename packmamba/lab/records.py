"""Records, one JSON line per run, and ``sweep.json`` beside them.

A record holds all that a report needs: configuration, metrics, curves, and what the run ran on. It
is appended once, when the run has ended, under a lock and whole: a reader may come at any time.
Nothing changes a record afterwards.
"""

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
from packmamba.errors import ConfigError, need
from packmamba.files import space_for, write_whole

SCHEMA = 2  # raise it when the meaning of a field changes, and rewrite the committed records
SWEEPS = "sweep.json"
FILES = ("record.json", "records.jsonl.gz", "records.jsonl", "records/*.jsonl.gz", "records/*.jsonl")
KEYS = "schema kind experiment arm seed corpus_hash config metrics curves wall_seconds".split()

# Losses: nats per target, of documents alone; val_loss_start: of their first 32 tokens.
METRICS = """steps real_tokens targets train_seconds parameters peak_memory_bytes val_loss val_loss_start
    val_loss_as_trained real_tokens_per_second slots_per_second padding_fraction""".split()

# Keys that records leave out at their first values, as those do that are older than the key.
LATER_KEYS = """data.task data.unit data.cut_documents data.shuffle_steps data.subset data.stagger data.split
    data.task_options data.test_fraction data.test_path data.loss_on data.chat_template data.sources model.mixer
    model.mixer_options model.pretrained optimizer.name optimizer.options optimizer.schedule
    optimizer.decay_fraction optimizer.schedule_steps trainer.init_from trainer.evaluate_every
    trainer.cuda_graphs trainer.deterministic trainer.boundary_options trainer.callbacks trainer.mean_over
    trainer.context_parallel evaluations evaluation_options evaluation_examples plugins""".split()


def make_record(
    kind: str, experiment: str, arm: str, config: Mapping[str, Any], seed: int, corpus_hash: str,
    metrics: Mapping[str, Any], wall_seconds: float, curves: Mapping[str, list[dict[str, Any]]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Make a record of plain values.

    It has the time, the commit, the hardware and the versions of this process.
    """
    values = (SCHEMA, kind, experiment, arm, int(seed), corpus_hash, config, metrics, curves or {}, wall_seconds)
    time = {"time": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    return _plain(dict(zip(KEYS, values)) | time | provenance())


def append_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Append a record under a lock. Raises DiskFull."""
    # ``read_records`` added it.
    plain = _plain({key: value for key, value in record.items() if key != "sweep"})
    line = json.dumps(plain, allow_nan=False, sort_keys=True).encode() + b"\n"
    path = Path(path)
    with space_for(path), FileLock(f"{path}.lock"):
        # The file is replaced, so readers see it without the new line or with it.
        written = path.read_bytes() if path.exists() else b""
        if written and not written.endswith(b"\n"):
            written += b"\n"  # which an editor has left out
        write_whole(path, written + line)


def read_records(folder: str | Path) -> list[dict[str, Any]]:
    """Read a folder's records, with the entry of their sweep.

    Raises ConfigError that names a wrong line.
    """
    records = []
    for path in record_files(folder):
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                    # All of KEYS must be there (KeyError); further keys are kept.
                    records.append({key: record[key] for key in KEYS} | record)
                except (ValueError, TypeError, KeyError) as error:
                    if line.strip():
                        raise ConfigError(f"{path}:{number}: expected a record, got one without {error}") from None
    need(records, str(folder), f"a folder with {' or '.join(FILES)}", "no record")
    sweeps = Path(folder) / SWEEPS
    if sweeps.is_file():
        _add_sweeps(records, json.loads(sweeps.read_text()).values())
    return records


def record_files(folder: str | Path) -> list[Path]:
    """Return a folder's files of records, of which there may be several kinds."""
    return [path for pattern in FILES for path in sorted(Path(folder).glob(pattern))]


def of_kind(records: Iterable[Any], kind: str) -> list[Any]:
    """Select records of a kind: training, throughput, evaluation."""
    return [record for record in records if record["kind"] == kind]


def records_of(folder: str | Path, kind: str = "training") -> list[dict[str, Any]]:
    """Read a folder's records of a kind, if it has any."""
    return of_kind(read_records(folder), kind) if has_records(folder) else []


def has_records(folder: str | Path) -> bool:
    """Check if a folder has a record."""
    return any(path.stat().st_size for path in record_files(folder))


def write_sweep(folder: str | Path, name: str, arms: Mapping[str, Any], baseline: str | None, **more: Any) -> None:
    """Write a sweep's entry of ``sweep.json``, with the arms that it trains or has trained.

    The entry is ``late`` if its margin, primary contrasts, baseline or first metric were named or
    changed after runs of its arms were recorded: reports say so, since then they were not fixed
    beforehand. A seed of which some arm has a record stays planned for the arms that it was for.
    """
    path = Path(folder) / SWEEPS
    entry: Any = {"baseline": baseline} | {key: value for key, value in more.items() if value}
    with FileLock(f"{path}.lock"):
        entries = json.loads(path.read_text()) if path.is_file() else {}
        old = entries.pop(name, {})
        before = old.get("arms", {})
        found = [record for record in records_of(folder) if record["arm"] in {*before, *arms}]
        trained, begun = ({record[key] for record in found} for key in ("arm", "seed"))
        # Arms of earlier versions of the sweep stay listed, if they have records.
        kept = {arm: seeds for arm, seeds in before.items() if arm in trained}
        is_ruled = "margin" in entry or "primary" in entry
        # What verdicts rest on.
        metric = lambda each: (each.get("table", {}).get("metrics") or ["val_loss"])[0]
        rules = lambda each: (each.get("margin"), {*each.get("primary", ())}, each.get("baseline"), metric(each))
        if "late" in old or (is_ruled and rules(old) != rules(entry) and trained & {*kept, *arms}):
            entry["late"] = True
        planned = {arm: sorted({*seeds} | begun.intersection(before.get(arm, ()))) for arm, seeds in arms.items()}
        entries[name] = {"arms": kept | planned, **entry}
        write_whole(path, (json.dumps(entries, indent=1) + "\n").encode())


def _add_sweeps(records: list[dict[str, Any]], entries: Iterable[dict[str, Any]]) -> None:
    """Add to an arm's records their sweep: trained, timed and evaluated ones.

    It is its entry with seeds, and arms and seeds that were not trained.
    """
    trained = of_kind(records, "training")
    recorded = {record["arm"] for record in trained}
    runs = {(record["arm"], record["seed"]) for record in trained}
    sweeps: dict[str, dict[str, Any]] = {}
    for entry in entries:
        arms = entry.pop("arms")
        entry["absent"] = [arm for arm in arms if arm not in recorded]
        for arm, seeds in arms.items():
            # An arm may be in several sweeps of the folder: seeds add up.
            before = sweeps.get(arm, {"seeds": [], "plans": []})
            merged = {"seeds": sorted({*before["seeds"], *seeds})}
            merged["missing"] = [seed for seed in merged["seeds"] if (arm, seed) not in runs]
            sweeps[arm] = entry | merged | {"plans": [*before["plans"], seeds]}
    for record in records:
        if record["arm"] in sweeps:
            record["sweep"] = sweeps[record["arm"]]


def write_items(path: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """Write an evaluation's items, one JSON line each."""
    write_whole(path, "".join(json.dumps(item, default=str) + "\n" for item in items).encode())


def check_writable(folder: str | Path, key: str, new: bool = False) -> None:
    """Raise ConfigError, naming the key, where a folder can not be made or written.

    new: or where it has files.
    """
    in_use = new and any(Path(folder).glob("*"))
    need(not in_use, key, "a new or empty folder", f"'{folder}' in use; name another")
    # A folder that is not there yet is made in its nearest ancestor.
    nearest = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    need(nearest.is_dir() and os.access(nearest, os.W_OK), key, "a folder that can be written", folder)


@functools.cache
def provenance() -> dict[str, Any]:
    """Return commit (``PACKMAMBA_COMMIT`` goes first), hardware and versions."""
    root = Path(__file__).resolve().parents[2]
    git = ("git", "--no-optional-locks", "-C", str(root))
    commit = dirty = None
    # Where there is no repository, as on a cluster's nodes.
    if stated := os.environ.get("PACKMAMBA_COMMIT"):
        commit = stated.removesuffix("-dirty")
        dirty = stated.endswith("-dirty")
    # Another top level is that of a repository around an installed package.
    elif _output(*git, "rev-parse", "--show-toplevel") == str(root):
        commit = _output(*git, "rev-parse", "HEAD")
        # A change of other files makes no commit dirty.
        dirty = bool(_output(*git, "status", "--porcelain", "--", "*.py", "*.yaml", "kernels"))
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    cpus = _output("sed", "-n", "s/^model name.*: //p", "/proc/cpuinfo").splitlines()
    hardware = {
        "cpu": cpus[0] if cpus else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [line.split(",")[0].strip() for line in gpus],
        "driver": gpus[0].split(",")[-1].strip() if gpus else None,
    }
    versions = {name: importlib.metadata.version(name) for name in ("torch", "lightning", "numpy")}
    versions = {"python": platform.python_version(), "packmamba": packmamba.__version__, **versions}
    return {"commit": commit, "dirty": dirty, "hardware": hardware, "versions": versions}


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _plain(value: Any) -> Any:
    """Convert a value to what JSON gives back; numbers that are not finite to None."""
    text = json.dumps(value, default=lambda each: each.item() if hasattr(each, "item") else str(each))
    return json.loads(text, parse_constant=lambda _: None)
