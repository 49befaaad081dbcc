"""Names that a configuration may choose, and what each stands for."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import TypeVar

from packmamba.errors import ConfigError

Entry = TypeVar("Entry")


class Registry(UserDict[str, Entry]):
    """Ours, to which plugins add: a record that says ``greedy`` means our greedy, so that what is here stays.

    Args:
        what: what an entry is, for the refusal.
    """

    def __init__(self, what: str, own: Mapping[str, Entry]) -> None:
        self._what, self._own = what, frozenset[str]()
        super().__init__(own)
        self._own = frozenset(own)

    def __setitem__(self, name: str, entry: Entry) -> None:
        """Raises ConfigError for a name of ours."""
        if name in self._own and self.data[name] is not entry:
            raise ConfigError(
                f"plugins: the {self._what} '{name}' is PackMamba's own; expected another name for a plugin's"
            )
        super().__setitem__(name, entry)
