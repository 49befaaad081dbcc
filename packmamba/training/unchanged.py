"""Whether the documents of finished runs are still what they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from packmamba.config import Config, DataConfig
from packmamba.data.token_store import load_corpora
from packmamba.errors import ConfigError
from packmamba.training.run_id import find_record, id_of, record_path, run_id, training_records

_KEYS = [field.name for field in fields(DataConfig)]
DECISIVE = _KEYS[: _KEYS.index("mode")]
"""Keys of ``data`` that say what the documents and their tokens are; those behind them lay tokens out in rows and steps."""


def check_unchanged(configs: Sequence[Config], now: Sequence[Config], progress: bool) -> None:
    """Refuses to call runs done, or to train others beside them, whose documents have changed since.

    Args:
        configs: those of them that have a record and the same documents as one of ``now`` are looked at.
        now: the runs that this command is asked for.
        progress: say what is compared, and where documents cannot be read.

    Raises:
        ConfigError: the corpus of a record has another hash than the one that its configuration makes now.
    """
    wanted: list[list[Any]] = []
    for config in now:
        if (documents := _documents(config.data)) not in wanted:
            wanted.append(documents)
    done = [c for c in configs if _documents(c.data) in wanted and find_record(c) is not None]
    known = _hashes(done)
    changed: list[Config] = []
    if done and progress:
        print(f"comparing the documents with those of {len(done)} runs that are done", flush=True)
    for documents in wanted:
        alike = [c for c in done if _documents(c.data) == documents and (run_id(c), c.trainer.max_steps) in known]
        if not alike:
            continue
        try:
            found = load_corpora(alike[0].data, progress=progress).corpus_hash
        except ConfigError as error:
            if progress:
                print(f"whether they have changed is not known, since they cannot be read: {error}", flush=True)
            continue
        changed += [c for c in alike if known[run_id(c), c.trainer.max_steps] != found]
    if changed:
        first = changed[0]
        path = record_path(first)
        others = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ConfigError(
            f"the documents have changed since {first.name}, seed {first.seed}, was trained{others}; give another output, or "
            f"remove these runs' records in {path.parent} and folders in {first.runs_dir} to train them again"
        )


def _documents(data: DataConfig) -> list[Any]:
    return [getattr(data, name) for name in DECISIVE]


def _hashes(configs: Sequence[Config]) -> dict[tuple[str, int], str]:
    """By a run's name and steps, the hash in its record."""
    arms, folders = {c.name for c in configs}, {record_path(c).parent for c in configs}
    found = {}
    for record in (record for folder in sorted(folders) for record in training_records(folder)):
        if record["arm"] in arms:
            try:
                run = id_of(record["arm"], record["config"])
                found[run, record["config"]["trainer"]["max_steps"]] = record["corpus_hash"]
            except (KeyError, TypeError):  # of another program
                continue
    return found
