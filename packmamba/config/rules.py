"""Keys and what they may hold: default, sentence and rules of a key stand side by side in a dataclass."""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from packmamba.errors import ConfigError


class Rule(Protocol):
    @property
    def imports(self) -> bool:
        """Checking it may import a module that takes seconds: such rules are checked last."""

    def problem(self, value: Any, null: str = "") -> str | None:
        """How the sentence that refuses the value goes on; None if it is right. ``null`` follows what was expected."""


def key(default: Any, sentence: str, *rules: Rule, old_name: str | None = None) -> Any:
    """A field of a configuration: its default (lists and mappings are copied), the sentence that explains it, its rules.

    A key that may be null says so by its type; rules are for its other values. Files may still call it by its old name.
    """
    metadata = {"sentence": sentence, "rules": rules, "old_name": old_name}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Holds:
    """Any rule: ``holds`` is true of the values that are right, and ``expected`` says which these are."""

    expected: str
    holds: Callable[[Any], bool]
    imports = False

    def problem(self, value: Any, null: str = "") -> str | None:
        try:
            right = self.holds(value)
        except TypeError:
            right = False
        return None if right else f"expected {self.expected}{null}, got {shown(value)}"


def at_least(least: float) -> Rule:
    return Holds(f"at least {least}", lambda value: least <= value < float("inf"))


def at_most(most: int) -> Rule:
    return Holds(f"at most {most}", lambda value: value <= most)


def above(low: float) -> Rule:
    return Holds(f"above {low} and finite", lambda value: low < value < float("inf"))


def between(low: float, high: float) -> Rule:
    return Holds(f"{low} to {high}", lambda value: low <= value <= high)


def one_of(*names: Any) -> Rule:
    return OneOf(names)


@dataclass(frozen=True)
class OneOf:
    """One of these names."""

    names: tuple[Any, ...]
    imports = False

    def problem(self, value: Any, null: str = "") -> str | None:
        return _not_among(self.names, value, null)


@dataclass(frozen=True)
class Named:
    """A name in the registry at ``module:REGISTRY``, which is imported when the key is checked."""

    place: str
    imports = True

    def registry(self) -> Mapping[str, Any]:
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(module), name)

    def problem(self, value: Any, null: str = "") -> str | None:
        return _not_among(self.registry(), value, null)


def chosen(section: Any, key: str) -> Any:
    """What the registry of a section's key holds under the section's value, such as ``chosen(config.data, "strategy")``.

    Raises:
        ConfigError: there is no such name.
    """
    rule, value = _named(section, key), getattr(section, key)
    if problem := rule.problem(value):
        raise ConfigError(f"{key}: {problem}")
    return rule.registry()[value]


def names(section: Any, key: str, some: Callable[[Any], bool]) -> list[str]:
    """What a section's key may name that ``some`` is true of."""
    return [name for name, one in _named(section, key).registry().items() if some(one)]


def _named(section: Any, key: str) -> Named:
    (rule,) = (rule for rule in section.__dataclass_fields__[key].metadata["rules"] if isinstance(rule, Named))
    return rule


def options(function: Callable[..., Any]) -> list[str]:
    """Its arguments with defaults."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is not parameter.empty]


def unknown_options(
    function: Callable[..., Any], key: str, given: Mapping[str, Any], but: Iterable[str] = ()
) -> Iterator[str]:
    """A sentence for each option in the mapping ``key`` that the function has not, or that is among ``but``."""
    known = [name for name in options(function) if name not in but]
    for name in given:
        if name not in known:
            yield f"unknown key '{key}.{name}'; known: {', '.join(known) or 'none'}"


WORDS = {str: "texts", int: "integers", float: "numbers"}


def problem_of_type(value: Any, of_list: Any = Any) -> str | None:
    """What no key takes: numbers that nothing counts to, texts that are no name of anything, elements of another type."""
    if of_list in WORDS and not isinstance(value, (int, float) if of_list is float else of_list):
        return f"expected {WORDS[of_list]}, got {shown(value)}"
    if isinstance(value, int) and not -(2**63) < value < 2**63:
        return (
            f"expected less than 2**63, got {value:.1e}" if abs(value) < 1e300 else "expected less than 2**63, got more"
        )
    if isinstance(value, str):
        if not value or "\0" in value:
            return f"expected text{' without a zero byte' if value else ''}, got {shown(value)}"
        if len(value) > 4096 or max(len(part.encode(errors="replace")) for part in value.split("/")) > 255:
            return f"expected at most 255 characters, or a path of such names, got {len(value)}: {shown(value)}"
    return None


def _not_among(names: Iterable[Any], value: Any, null: str) -> str | None:
    known = list(names)
    if value in known:
        return None
    close = difflib.get_close_matches(str(value), map(str, known), n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"expected one of {', '.join(map(str, known))}{null}, got {shown(value)}{hint}"


@dataclass(frozen=True)
class Each:
    """Every element of a list keeps the rule."""

    rule: Rule

    @property
    def imports(self) -> bool:
        return self.rule.imports

    def problem(self, value: Any, null: str = "") -> str | None:
        return next(filter(None, map(self.rule.problem, value)), None)


@dataclass(frozen=True)
class Unique:
    """No element of a list comes twice."""

    imports = False

    def problem(self, value: Any, null: str = "") -> str | None:
        return next((f"duplicate {shown(some)}" for i, some in enumerate(value) if some in value[:i]), None)


each, named, unique = Each, Named, Unique()


def some(what: str) -> Rule:
    """A list or mapping that is not empty."""
    return Holds(f"at least one {what}", bool)


def shown(value: Any) -> str:
    """A value as errors show it."""
    if value in ({}, [], ()):
        return "none"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 200 else f"{text[:80]}...{text[-20:]}"
