"""Models that answered the same questions, paired item by item, and over seeds where there are several."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packmamba.report.inference import Resampled, bootstrap, over_items
from packmamba.report.summary import Record

Item = Mapping[str, Any]
MEASURES: dict[str, Callable[[Item], tuple[float, float]]] = {
    "choice_accuracy": lambda item: (float(item["choice"] == item["answer"]), 1.0),
    "accuracy": lambda item: (item["right"], item["answers"]),
    "loss": lambda item: (item["nats"], item["targets"]),
}
"""Of an item its part of a number that is a mean, and how much it counts there."""


def with_items(folder: str | Path, records: Sequence[Record]) -> list[Record]:
    """Records of evaluations with ``items``, the file beside them that holds these. ValueError names one that has changed."""
    found = []
    for record in records:
        config = record["config"]
        path = Path(folder) / "items" / f"{(config.get('evaluation') or {}).get('name')}-{config.get('id')}.jsonl"
        if record["kind"] == "evaluation" and path.is_file():
            if config.get("items") not in (None, checksum_of(path)):
                raise ValueError(f"{path} is not what was written; remove it and its record, and evaluate again")
            record = {**record, "items": str(path)}
        found.append(record)
    return found


def checksum_of(path: Path) -> str:
    """Of a file of items, for the record of its evaluation (``config.items``; older ones have none)."""
    return f"{zlib.crc32(path.read_bytes()):08x}"


def minus(ours: Mapping[int, str], theirs: Mapping[int, str], metric: str) -> Resampled | None:
    """The difference of two models' ``metric``, each given as files of items by seed; None if they cannot be paired.

    Items of one group, such as a package, count as one. With two seeds that both have, the interval is over seeds and items;
    with one, over items; models with one seed each are paired whatever these are.
    """
    shared = sorted(ours.keys() & theirs.keys())
    pairs = [(ours[seed], theirs[seed]) for seed in shared]
    if not pairs and len(ours) == len(theirs) == 1:
        pairs = [(next(iter(ours.values())), next(iter(theirs.values())))]
    if not pairs or metric not in MEASURES:
        return None
    sums, weights = [], None
    for pair in pairs:
        one, other = (_by_group(path, MEASURES[metric]) for path in pair)
        counts = {group: weight for group, (_, weight) in one.items()}
        if (
            counts != {group: weight for group, (_, weight) in other.items()}
            or weights not in (None, counts)
            or not counts
        ):
            return None  # others were asked
        weights = counts
        sums.append([one[group][0] - other[group][0] for group in counts])
    found = list((weights or {}).values())
    return bootstrap(sums, found) if len(sums) > 1 else over_items(sums[0], found)


def _by_group(path: str, measure: Callable[[Item], tuple[float, float]]) -> dict[Any, tuple[float, float]]:
    found: dict[Any, np.ndarray] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines()):
        item = json.loads(line)
        group = item.get("group", item.get("document", item.get("index", number)))
        found[group] = found.get(group, np.zeros(2)) + measure(item)
    return {group: (float(value), float(weight)) for group, (value, weight) in found.items()}
