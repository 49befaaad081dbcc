"""What stands in for training where a job is tested, not what it trains: steps that sleep, and a checkpoint that is a number."""

from __future__ import annotations

import time

from packmamba.data.token_store import load_corpora
from packmamba.records import METRICS, append_record, make_record
from packmamba.training.claims import Taken, alone
from packmamba.training.note import Note, Outcome
from packmamba.training.run_id import record_path, recorded_config, run_folder

STEPS = 20
FAILS = 39
"""The seed of a run that fails."""


def pretend(config, where, stop):
    """Trains nothing, as ``attempt`` trains: a claim, a note, a checkpoint, a record."""
    try:
        with alone(run_folder(config)):
            if record_path(config).is_file():
                return Outcome("done")
            note, checkpoint, begun = Note(config, where), run_folder(config) / "stand-in", time.monotonic()
            step = int(checkpoint.read_text()) if checkpoint.exists() else 0
            while step < STEPS:
                step += 1
                time.sleep(0.05)
                note.step(step, 100 * step)
                if stop():
                    checkpoint.write_text(str(step))
                    note.say(step=step, state="stopped")
                    return Outcome("stopped", time.monotonic() - begun, step=step)
                if config.seed == FAILS and step == 3:
                    note.say(state="failed", why="made to fail")
                    return Outcome("failed", 1.0, why="made to fail")
            documents = load_corpora(config.data, progress=False).corpus_hash
            metrics = dict.fromkeys(METRICS["training"]) | {"val_loss": 2.0 + config.seed / 100, "steps": STEPS}
            made = make_record(
                "training", "test", config.name, recorded_config(config), config.seed, documents, metrics, 1.0
            )
            append_record(record_path(config), made)
            note.say(state="done", step=step)
            return Outcome("done", time.monotonic() - begun, 2.0)
    except Taken:
        return Outcome("taken")


def few_are_real(config, where, stop):
    """Every tenth run is trained."""
    if config.seed % 10:
        return pretend(config, where, stop)
    from packmamba.training.job import attempt_in_job

    return attempt_in_job(config, where, stop)
