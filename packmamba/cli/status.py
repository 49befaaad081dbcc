"""How far the runs of a sweep are."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from packmamba.config import Config
from packmamba.report.tables import Cell, Column, Table, number, word
from packmamba.training.note import state_of

ORDER = ("done", "running", "submitted", "waiting", "stopped", "interrupted", "diverged", "failed")


def sweep_status(configs: list[Config]) -> Table:
    """A line for each run: its state, where it was tried last, its last step, how fast it is, how long it still needs, why it
    failed; and how many runs are in each state."""
    numeric = ("step", "of", "tokens/s", "left", "seconds")
    names = ("run", "seed", "state", "where", *numeric, "why")
    table = Table("status", "Runs of the sweep", [Column(name, (name,), name in numeric) for name in names])
    states = [state_of(config) for config in configs]
    for config, state in zip(configs, states):
        steps, runs = config.trainer.max_steps, state["state"] == "running"
        step = steps if state["state"] == "done" else state["step"]
        table.rows.append(
            [
                *(word(str(text)) for text in (config.name, config.seed, state["state"], state.get("where", "-"))),
                *(number(value, ".0f") for value in (step, steps)),
                number(state.get("tokens_per_second") if runs else None, ",.0f"),
                duration(state.get("seconds_left") if runs else None),
                number(state.get("seconds"), ".0f"),
                word(state.get("why") or "-"),
            ]
        )
    counts = Counter(state["state"] for state in states)
    said = [f"{counts[state]} {state}" for state in ORDER if counts[state]]
    table.notes = [f"{', '.join(said)}."]
    return table


def duration(seconds: float | None) -> Cell:
    """Such as 1:02:03."""
    return Cell("-" if seconds is None else str(timedelta(seconds=round(seconds))), (seconds,))
