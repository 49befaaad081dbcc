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

    The first line says of which weights, device and software they are; items of others are thrown away, as is a last line
    that was cut short. An item's bits depend on nothing but its document, the weights and the slots of a pass, so what
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
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith("\n")] if lines[:1] == [first] else [first]
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(whole), encoding="utf-8")
        os.replace(temporary, path)
        for part, number, item in map(json.loads, whole[1:]):
            self.found.setdefault(part, {})[number] = item

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
                        file.writelines(json.dumps([name, *pair]) + "\n" for pair in zip(some, items))
                bar.update(sum(len(documents[number]) for number in some))
        return [found[number] for number in range(len(documents))]

    def forget(self) -> None:
        """Removes the file, once the items are elsewhere."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


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
