"""Items of an evaluation, kept as they come: one that was killed goes on with those that are missing."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from packmamba.nn import MambaLM

PASSES = 16
"""Items are answered and kept so many passes at a time."""


class Kept:
    """A file of items, or none: without a path nothing is kept.

    The first line says of which weights, device and software they are; items of others are thrown away, as is a line that was
    cut short or changed. An item's bits depend on nothing but its document, the weights and the slots of a pass, so what
    was interrupted ends as what was not.

    Args:
        path: of the file; its folder is made when there is something to keep.
        model: that answers.
    """

    def __init__(self, path: Path | None = None, model: MambaLM | None = None) -> None:
        self.path = path
        self.found: dict[str, dict[int, dict[str, Any]]] = {}
        if path is None or model is None:
            return
        first = json.dumps(_about(model)) + "\n"
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        kept = []
        for line in lines[1:] if lines[:1] == [first.encode()] else []:
            if (whole := _read(line)) is not None:
                part, number, item = whole
                self.found.setdefault(part, {})[number] = item
                kept.append(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{path.stem}.*tmp"):  # by a process that was killed as it wrote
            left.unlink(missing_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(first.encode() + b"".join(kept))
        os.replace(temporary, path)

    def answers(
        self,
        part: str,
        documents: Sequence[Any],
        max_slots: int,
        answer: Callable[[list[int]], list[dict[str, Any]]],
        together: bool = False,
    ) -> list[dict[str, Any]]:
        """An item for each document, in order: those that are kept, and answers to the others.

        Args:
            part: what is asked, for a file that holds several.
            documents: token ids; their contents are part of what is asked.
            answer: given some documents' numbers, their items: plain numbers and lists.
            together: whether the documents can only be answered all at once.
        """
        content = 0
        for document in documents:
            content = zlib.crc32(np.asarray(document, dtype=np.int64).tobytes(), content)
        name = f"{part} {len(documents)} {content:08x} {max_slots}"
        found = self.found.setdefault(name, {})
        missing = [number for number in range(len(documents)) if number not in found]
        if together and missing:
            missing = list(range(len(documents)))
        tokens = sum(len(documents[number]) for number in missing)
        with tqdm(total=tokens, desc=part, unit="token", unit_scale=True, disable=None, leave=False) as bar:
            while missing:
                room, some = PASSES * max_slots, []
                while missing and (together or room > 0):
                    some.append(missing.pop(0))
                    room -= len(documents[some[-1]])
                items = answer(some)
                found |= dict(zip(some, items))
                if self.path is not None:
                    with self.path.open("a", encoding="utf-8") as file:
                        file.writelines(_line(name, *pair) for pair in zip(some, items))
                bar.update(sum(len(documents[number]) for number in some))
        return [found[number] for number in range(len(documents))]

    def forget(self) -> None:
        """Removes the file, once the items are elsewhere."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _line(name: str, number: int, item: dict[str, Any]) -> str:
    """An item as the file has it; its checksum follows the name."""
    checksum = zlib.crc32(json.dumps([name, number, item]).encode())
    return json.dumps([f"{name} #{checksum:08x}", number, item]) + "\n"


def _read(line: bytes) -> tuple[str, int, dict[str, Any]] | None:
    """None for a line that is not what was written. Lines from before there were checksums have none."""
    try:
        name, number, item = json.loads(line)
        plain, mark, _ = name.rpartition(" #")
        if mark and _line(plain, number, item).encode() != line:
            return None
        return (plain if mark else name), number, item
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def weights_id(model: MambaLM) -> str:
    """Tells weights apart."""
    sums = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()]).tolist()
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


def _about(model: MambaLM) -> dict[str, Any]:
    """What an item's bits depend on besides its document."""
    weight = next(model.parameters())
    device = weight.device
    return {
        "weights": weights_id(model),
        "dtype": str(weight.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
