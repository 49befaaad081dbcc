"""Several sweeps that one command names."""

from __future__ import annotations

from collections.abc import Sequence

from packmamba.config import Config, ConfigError
from packmamba.training.sweep import SweepConfig, load_sweep


def load_sweeps(first: str, words: Sequence[str], runs_here: bool) -> dict[str, tuple[SweepConfig, list[Config]]]:
    """Each sweep by its file, as ``load_sweep`` has it; ``words`` are further files, and overrides for all of them.

    Raises:
        ConfigError: of one; it names the file where there are several.
    """
    files = [first, *(word for word in words if word.endswith((".yaml", ".yml")) and "=" not in word)]
    overrides = [word for word in words if word not in files]
    found = {}
    for file in files:
        try:
            found[file] = load_sweep(file, overrides, runs_here)
        except ConfigError as error:
            if len(files) == 1 or file in str(error) or any(f"'{override}'" in str(error) for override in overrides):
                raise
            raise ConfigError(f"{file}: {error}") from None
    return found
