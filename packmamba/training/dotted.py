"""Keys of layers of a configuration by their dotted names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

SECTIONS = ("data", "model", "optimizer", "trainer", "ops")


def keys_of(layer: DictConfig, prefix: str = "") -> Iterator[str]:
    """The dotted names of the values in a layer."""
    for name, value in ((str(name), value) for name, value in layer.items()):
        yield from keys_of(value, f"{prefix}{name}.") if isinstance(value, DictConfig) and value else [prefix + name]


def meet(one: str, other: str) -> bool:
    """Whether setting one key changes the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def by_dotted_names(keys: dict[str, Any]) -> dict[str, Any]:
    """With the keys of each section by their dotted names, so that an arm's replace those of all runs one by one."""
    found: dict[str, Any] = {}
    for name, value in keys.items():
        inside = isinstance(value, dict) and name in SECTIONS
        found |= {f"{name}.{key}": each for key, each in value.items()} if inside else {name: value}
    return found
