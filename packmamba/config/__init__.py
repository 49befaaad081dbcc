"""Configuration: one dataclass per section, YAML files and ``key=value`` overrides, validated once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packmamba.config.load import (
    CONFIGS,
    CONFIGURATION,
    import_plugins,
    load,
    load_config,
    options,
    parse_override,
    read_yaml,
    resolve,
    suggest,
    to_dict,
    validate,
)
from packmamba.config.schema import Config, DataConfig, ModelConfig, OpsConfig, OptimizerConfig, TrainerConfig, key
from packmamba.errors import ConfigError

# Old spellings of limits, until their last callers are rewritten: key(1, "Help.", at_least(1)) is key(1, "Help.", low=1).


def at_least(low: float) -> dict[str, Any]:
    return {"low": low}


def at_most(high: float) -> dict[str, Any]:
    return {"high": high}


def above(low: float) -> dict[str, Any]:
    return {"above": low}


def between(low: float, high: float) -> dict[str, Any]:
    return {"low": low, "high": high}


def one_of(*names: Any) -> dict[str, Any]:
    return {"choices": names}


def named(registry: str) -> dict[str, Any]:
    return {"choices": registry}


def each(rule: dict[str, Any]) -> dict[str, Any]:
    if "check" not in rule:
        return rule
    expected, holds = rule["check"]
    return {"check": (expected, lambda values: all(map(holds, values)))}


def some(what: str) -> dict[str, Any]:
    return {"check": (f"at least one {what}", bool)}


def Holds(expected: str, holds: Callable[[Any], bool]) -> dict[str, Any]:
    return {"check": (expected, holds)}


unique: dict[str, Any] = {}
