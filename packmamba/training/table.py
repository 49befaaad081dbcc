"""What a table of arms compares, as a sweep's file or ``compare`` says it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Optional

from packmamba.config import Config, ConfigError, key, suggest, to_dict
from packmamba.records import METRICS


@dataclass
class TableConfig:
    metrics: list[str] = key(
        [], "What arms are compared by, such as [val_loss, mqar.accuracy]; [] for losses and the first evaluation."
    )
    columns: Optional[list[str]] = key(
        None,
        "What else stands in the table: numbers of the records, and keys such as optimizer.lr; null for the usual ones.",
    )
    paired: bool = key(True, "Differences are taken seed by seed; false: between means over all seeds.")

    @property
    def said(self) -> dict[str, Any]:
        """For ``sweep.json``; empty where the table is the usual one."""
        usual = not self.metrics and self.columns is None and self.paired
        return {} if usual else {"metrics": self.metrics, "columns": self.columns, "paired": self.paired}


def check_table(table: TableConfig, configs: Sequence[Config]) -> None:
    """Raises ConfigError naming a metric or column that none of these runs will have."""
    metrics = _numbers(configs)
    for name in table.metrics:
        if not _among(name, metrics):
            raise ConfigError(f"table.metrics: expected some of {', '.join(metrics)}, got '{name}'")
    values = to_dict(configs[0]) if configs else {}
    for name in table.columns or ():
        if name != "speedup" and not _among(name, metrics) and not _is_key(name, values):
            hint = suggest(name, metrics)
            raise ConfigError(f"table.columns: expected numbers of the records and keys, got '{name}'{hint}")


def check_tuned(metric: str, configs: Sequence[Config]) -> None:
    """Raises ConfigError where none of these runs will have what chooses a value."""
    if not _among(metric, metrics := _numbers(configs)):
        raise ConfigError(f"tune.metric: expected one of {', '.join(metrics)}, got '{metric}'")


def _numbers(configs: Sequence[Config]) -> list[str]:
    """What runs' records will have; a name with a point at its end: an evaluation's."""
    evaluations = sorted({name for config in configs for name in config.evaluations})
    return [*METRICS["training"], "val_loss_last_weights", *(f"{name}." for name in evaluations)]


def _among(name: str, metrics: Iterable[str]) -> bool:
    return any(name == metric or (metric.endswith(".") and name.startswith(metric)) for metric in metrics)


def _is_key(name: str, values: dict[str, Any]) -> bool:
    try:
        reduce(lambda section, part: section[part], name.split("."), values)
    except (KeyError, TypeError):
        return False
    return True
