"""The measurements of arXiv 2408.03865 on one device: speed by model size and dtype, padding, and
time against length.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.by_name import Bench
from experiments.speedup.bare_loop import BareLoop
from experiments.speedup.model import TOLERANCES, Arm, Documents, Model, PeerLM, by_family, feed
from experiments.speedup.model import Config as SpeedupConfig
from experiments.timing import free_memory, median
from packmamba.config import key
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.data.packing import plan_rows
from packmamba.lab.records import append_record, make_record, provenance

OPERATORS = ("conv", "scan", "matrix products")


@dataclass
class Config(SpeedupConfig):
    experiment: str = key("paper", "The question, which the records name.")
    dtypes: list[str] = key(["bfloat16", "float32"], "Of weights and activations, in turn.", choices=TOLERANCES)
    length_model: str = key("1.4b", "Size in configs/model whose block is timed against the length of a sequence.")
    lengths: list[int] = key(
        [57, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048], "Tokens of the one sequence of a batch."
    )
    calls: int = key(20, "Forward and backward passes that a time against length is a mean of.", low=1)
    packed_documents: int = key(200_000, "Documents whose padding is counted.", low=1)


class Size(Model):
    """A model size whose records are of kind ``paper``, breakdowns among them."""

    kind = "paper"


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Append records of kind ``paper``, by ``config.part``; RuntimeError if arms disagree on the
    losses of the same documents.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    provenance()  # of the code as it is now, not as it may be after minutes
    count_padding(c, records_path)
    for dtype in c.dtypes:
        time_lengths(replace(c, dtype=dtype), device, records_path, progress)
        for name in c.models:
            free_memory()
            try:
                loop = BareLoop(Size(replace(c, dtype=dtype), name, device, records_path, progress))
                loop.gate()
                loop.measure(loop.cases)
            except torch.OutOfMemoryError:
                print(f"left out, {name} in {dtype}: does not fit into memory", file=sys.stderr)


def count_padding(c: Config, records_path: Path) -> None:
    """Record the padding of rows of 2048 tokens, documents as received and packed greedily."""
    lengths = draw_lengths(c.distribution, c.packed_documents, c.seed)
    for strategy in ("next_fit", "greedy"):
        began = time.perf_counter()
        plan = plan_rows(lengths, row_length=2048, strategy=strategy)
        config = {"documents": c.packed_documents, "row_length": 2048, "strategy": strategy}
        _append(c, records_path, "padding", strategy, config, {"padding_fraction": plan.padding_fraction}, began)


def time_lengths(c: Config, device: torch.device, records_path: Path, progress: bool) -> None:
    """Record the seconds of convolution, scan and products of one block, forward and backward,
    against a sequence's length.
    """
    config = replace(c, overrides=["model.n_layer=1", "model.vocab_size=256"])
    model = Size(config, c.length_model, device, records_path, progress)
    module = model.build()
    losses: dict[str, Any] = {"packmamba": module.loss}
    try:
        losses["mamba-ssm"] = PeerLM(module.model).loss
    except (ImportError, ValueError) as error:
        print(f"left out, mamba-ssm: {error}", file=sys.stderr)
    for length in c.lengths:
        documents = Documents(np.array([length]), model.vocab_size, c.seed)
        batch = feed(documents, Arm("single"), c.slots).sample(1)[0].to(device)
        for layers, loss in losses.items():

            def passes(count: int = c.calls, loss: Any = loss, batch: Any = batch) -> None:
                for _ in range(count):
                    module.zero_grad()
                    loss(batch)[0].backward()

            began = time.perf_counter()
            passes(2)
            found = [by_family(passes, device).families for _ in range(c.rounds)]
            seconds = {family: median([one[family] for one in found]) / c.calls for family in OPERATORS}
            metrics = {f"{family.replace(' ', '_')}_seconds": value for family, value in seconds.items()}
            settings = {"layers": layers, "model": c.length_model, "tokens": length, "dtype": c.dtype, "calls": c.calls}
            _append(c, records_path, "length", layers, settings, metrics, began)
        if progress:
            print(f"{c.dtype}: one sequence of {length} tokens", flush=True)


def _append(
    c: Config, path: Path, part: str, arm: str, config: dict[str, Any], metrics: dict[str, float], began: float
) -> None:
    corpus, taken = f"{c.distribution} ({LENGTH_DISTRIBUTIONS[c.distribution]})", time.perf_counter() - began
    record = make_record("paper", c.experiment, arm, {"part": part, **config}, c.seed, corpus, metrics, taken)
    append_record(path, record)


BENCHES = {"paper": Bench(Config, run)}
