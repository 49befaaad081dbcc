"""How far the runs of a sweep are."""

from __future__ import annotations

from collections import Counter

from packmamba.config import Config
from packmamba.report.tables import Column, Table, number, word
from packmamba.training.attempt import state_of


def sweep_status(configs: list[Config]) -> Table:
    """A line for each run: its state, where it was tried last, its last step, why it failed."""
    names = ("run", "seed", "state", "where", "step", "of", "seconds", "why")
    table = Table(
        "status", "Runs of the sweep", [Column(name, (name,), name in ("step", "of", "seconds")) for name in names]
    )
    states = [state_of(config) for config in configs]
    for config, state in zip(configs, states):
        steps = config.trainer.max_steps
        step = steps if state["state"] == "done" else state["step"]
        table.rows.append(
            [
                *(word(str(text)) for text in (config.name, config.seed, state["state"], state.get("where", "-"))),
                *(number(value, ".0f") for value in (step, steps, state.get("seconds"))),
                word(state.get("why") or "-"),
            ]
        )
    counts = Counter(state["state"] for state in states)
    table.notes = [", ".join(f"{count} {state}" for state, count in counts.most_common()) + "."]
    return table
