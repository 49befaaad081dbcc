"""A configuration's values against the rules beside its keys."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from packmamba.config.plugins import import_plugins
from packmamba.config.rules import Rule, problem_of_type
from packmamba.errors import ConfigError

Checked = TypeVar("Checked")


def check(config: Checked, prefix: str = "") -> Checked:
    """The configuration, after its plugins are imported and all its rules hold; first of each key, then between keys.

    Rules between keys are a method ``problems`` of the dataclass, which yields a sentence for each that does not hold.
    ``prefix`` stands before keys in errors, such as ``data.`` for a section that is checked alone.

    Raises:
        ConfigError: naming the key.
    """
    for name, value, kind in _values(config, prefix):
        if problem := problem_of_type(value, kind):
            raise ConfigError(f"{name}: {problem}")
    import_plugins(getattr(config, "plugins", ()))
    keys = sorted(_rules(config, prefix), key=lambda entry: entry[2].imports)
    for name, value, rule, null in keys:
        if problem := rule.problem(value, null):
            raise ConfigError(f"{name}: {problem}")
    for problem in _problems(config):
        raise ConfigError(problem)
    return config


def describe(schema: type, prefix: str = "") -> Iterator[str]:
    """For each key its name, its default and its sentence."""
    default = schema()
    for key in fields(schema):
        value = getattr(default, key.name)
        if is_dataclass(value):
            yield from describe(type(value), f"{prefix}{key.name}.")
        else:
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            yield f"{prefix}{key.name}={shown}: {key.metadata['sentence']}"


def _values(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, its type where it is in a list) of every key that holds one value, or a list of values."""
    for key in fields(config):
        value = getattr(config, key.name)
        if is_dataclass(value):
            yield from _values(value, f"{prefix}{key.name}.")
        elif isinstance(value, list):
            kind = _hints(type(config))[key.name]  # type: ignore[arg-type]
            (of,) = get_args(next((k for k in get_args(kind) if get_origin(k) is list), kind)) or (Any,)
            yield from ((prefix + key.name, one, of) for one in value)
        else:
            yield prefix + key.name, value, Any


def _rules(config: Any, prefix: str) -> Iterator[tuple[str, Any, Rule, str]]:
    """(key, value, rule, what may be said of null) of every rule that applies."""
    hints = _hints(type(config))  # type: ignore[arg-type]
    for key in fields(config):
        value = getattr(config, key.name)
        if is_dataclass(value):
            yield from _rules(value, f"{prefix}{key.name}.")
            continue
        for name, section in _sections(value):
            yield from _rules(section, f"{prefix}{key.name}.{name}.")
        optional = NoneType in get_args(hints[key.name])
        for rule in key.metadata.get("rules", ()) if value is not None or not optional else ():
            yield prefix + key.name, value, rule, " or null" if optional else ""


@functools.cache
def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema)


def _problems(config: Any) -> Iterator[str]:
    for key in fields(config):
        if is_dataclass(value := getattr(config, key.name)):
            yield from _problems(value)
        for name, section in _sections(value):
            yield from (f"{key.name}.{name}.{problem}" for problem in _problems(section))
    if hasattr(config, "problems"):
        yield from config.problems()


def _sections(value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a mapping from names to sections, such as a bench's arms."""
    for name, section in value.items() if isinstance(value, dict) else ():
        if is_dataclass(section):
            yield name, section
