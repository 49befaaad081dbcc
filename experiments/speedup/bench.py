"""Whole models on one device, single against padded against packed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from experiments.by_name import Bench
from experiments.speedup import bare_loop, steps
from experiments.speedup.model import BARE, BREAKDOWN, STEPS, Config, Model
from experiments.timing import free_memory
from packmamba.lab.records import provenance


class Sorted(Model):
    """Name all records ``sorted``: arms that only this bench times share no table with arms of
    other runs.
    """

    kind = "sorted"


def run_sorted(c: Config, records_path: Path, progress: bool = True) -> None:
    """Append records of kind ``sorted``, as ``run`` does."""
    run(c, records_path, progress, Sorted)


def run(c: Config, records_path: Path, progress: bool = True, sizes: type[Model] = Model) -> None:
    """Append records of kinds speedup and breakdown; each one's config holds its arm's fields.

    All arms of a model share one set of weights and take turns. Every arm arranges the same
    documents; its time for all of them is estimated from some of its batches, evenly spread over
    their sizes.

    Raises:
        RuntimeError: arms disagree on the losses of the same documents; nothing of that model is
            recorded.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    provenance()  # of the code as it is now, not as it may be after minutes
    for name in c.models:
        free_memory()
        try:
            model = sizes(c, name, device, records_path, progress)
            if {BARE, BREAKDOWN} & set(c.parts):
                bare_loop.measure(model)
            if STEPS in c.parts:
                steps.measure(model)
        except torch.OutOfMemoryError:
            print(f"left out, {name}, what was not recorded before: does not fit into memory", file=sys.stderr)


BENCHES = {"speedup": Bench(Config, run), "sorted": Bench(Config, run_sorted)}
