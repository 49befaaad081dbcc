"""The parts of a mixture: entries of ``data.sources``, each the configuration of a source with a weight."""

import dataclasses
from pathlib import Path

from packmamba.config import ConfigError, DataConfig, need, resolve, suggest

OF_SOURCES = ("source", "path", "unit", "text_key", "loss_on", "subset", "split", "test_path")
"""Keys of ``data`` that an entry of ``data.sources`` may have, beside ``weight`` and ``name``."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Hold an entry of ``data.sources``."""

    name: str
    weight: float
    data: DataConfig


def parts_of(data: DataConfig) -> list[Part]:
    """Read ``data.sources``: each entry's keys over those of ``data``. Raises ConfigError."""
    parts = []
    for number, entry in enumerate(data.sources):
        place = f"data.sources[{number}]"
        need(isinstance(entry, dict), place, "keys and values, such as {source: text, path: a, weight: 3}", entry)
        keys = {**entry}
        for key in keys:
            allowed = ("weight", "name", *OF_SOURCES)
            need(key in allowed, place, ", ".join(allowed), f"'{key}'{suggest(key, allowed)}")
        weight = keys.pop("weight", None)
        is_positive = type(weight) in (int, float) and 0 < weight < float("inf")
        need(is_positive, f"{place}.weight", "a number above 0", repr(weight))
        name = str(keys.pop("name", None) or Path(str(keys.get("path") or keys.get("source", number))).stem)
        common = dataclasses.replace(data, sources=[])
        try:
            parts.append(Part(name, float(weight), resolve(DataConfig, [(common, "data"), (keys, place)])))
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
    names = [part.name for part in parts]
    repeated = next((name for name in names if names.count(name) > 1), None)
    need(repeated is None, "data.sources", "a name of its own for each source; set name", f"'{repeated}' twice")
    return parts
