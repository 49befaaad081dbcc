"""What one line buys in Hugging Face's Trainer: a Mamba as it comes, flattened as it comes, and patched, in turns."""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.integration.arms import Arm, Documents, Measured, Turn
from packmamba.config import DataConfig, key, load_config
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.data.sources.builtin import open_stdlib
from packmamba.records import append_record, make_record, provenance
from packmamba.reproduce import Bench
from packmamba.timing import median, spread, take_turns

GATE_DOCUMENTS, GATE_LENGTH = 6, 100
ROUNDING, TIMES = 1e-5, 10
"""A patched arm's logits in float32 may differ from single documents' by ``TIMES`` what transformers' own padded batch differs
on the same path, or ``ROUNDING`` if that is more, relative: rounding, which random weights amplify from layer to layer."""


@dataclass
class IntegrationConfig:
    bench: str = "integration"
    model: str = key("130m", "Published size of the model, whose weights are random.")
    overrides: list[str] = key([], "Further keys of the model, such as model.n_layer=2.")
    distribution: str = key("documents-2k", "Lengths of the documents.", choices=LENGTH_DISTRIBUTIONS)
    documents_per_step: int = key(16, "Documents of an optimizer step.", low=1)
    steps: int = key(30, "Timed optimizer steps of a turn.", low=1)
    warm_up_steps: int = key(3, "Optimizer steps before them in each turn.", low=0)
    rounds: int = key(3, "Turns of each arm.", low=1)
    arms: dict[str, Any] = key({}, "Name -> batches, kernels, patched, leaks; sizes of its own; see arms.py.")
    precision: str = key("bfloat16", "Of Trainer: bfloat16 (autocast) or float32.", choices=("bfloat16", "float32"))
    learning_rate: float = key(6e-4, "Of AdamW, constant.", above=0)
    margin: float = key(1.0, "Factor on the difference that the gate allows.", above=0)
    seed: int = key(0, "Seed of weights and lengths.", low=0)


def run(config: IntegrationConfig, records_path: Path, progress: bool = True) -> None:
    """Appends a record of kind ``integration`` for each arm.

    Raises:
            RuntimeError: a patched arm differs from single documents; nothing is recorded.
    """
    arms = {name: Arm(**fields) for name, fields in config.arms.items()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    provenance()
    sizes = load_config(None, [f"model={config.model}", *config.overrides]).model
    sizes.vocab_size = sizes.vocab_size or 50280
    peers = any(arm.kernels == "mamba_ssm" for arm in arms.values())
    measured = Measured(sizes, device, config.precision, config.learning_rate, config.seed, peers)
    documents = draw_documents(
        config.distribution, config.documents_per_step * (config.steps + config.warm_up_steps), config.seed
    )
    differences = _gate(measured, arms, documents, config.margin)
    mine = {name: _sizes(arm, config) for name, arm in arms.items()}

    def turns(name: str) -> Any:
        per_step, steps, warm_up = mine[name]
        some = arms[name].arranged(documents[: per_step * (steps + warm_up)], per_step, warm_up)
        return lambda turn: measured.train(arms[name], some, per_step, warm_up)

    begun = time.perf_counter()
    samples: dict[str, list[Turn]] = take_turns(
        {name: turns(name) for name in arms}, config.rounds, warm_up=0,
        at_most={name: arm.rounds for name, arm in arms.items() if arm.rounds is not None},
        left_out=lambda name: print(f"{name}: out of memory; it is left out", file=sys.stderr),
        bar="integration" if progress else None,
    )  # fmt: skip
    wall = time.perf_counter() - begun
    for name, taken in samples.items():
        per_step, steps, warm_up = mine[name]
        arranged = arms[name].arranged(documents[: per_step * (steps + warm_up)], per_step, warm_up)[
            warm_up * per_step :
        ]
        tokens, slots = _counts(arms[name], arranged, per_step)
        rates = [tokens / turn.seconds for turn in taken]
        append_record(
            records_path,
            make_record(
                kind="integration",
                experiment="integration",
                arm=name,
                config={
                    **{key: value for key, value in vars(config).items() if key not in ("arms", "bench")},
                    **vars(arms[name]), "overrides": list(config.overrides),
                    "documents_per_step": per_step, "steps": steps, "warm_up_steps": warm_up, "rounds": len(taken),
                    "transformers": importlib.metadata.version("transformers"),
                },
                seed=config.seed,
                corpus_hash=f"{config.distribution}: bytes of the standard library",
                metrics={
                    "real_tokens_per_second": median(rates),
                    "real_tokens_per_second_spread": spread(rates),
                    "seconds_per_step": median(turn.seconds / steps for turn in taken),
                    "slots_per_second": median(rates) * slots / tokens,
                    "padding_fraction": 1 - tokens / slots,
                    "tokens_per_step": tokens / steps,
                    "peak_memory_bytes": max((turn.peak for turn in taken if turn.peak is not None), default=None),
                    "first_loss": taken[0].losses[0],
                    "last_loss": float(np.mean(taken[0].losses[-min(10, steps) :])),
                    "difference": differences[name],
                },
                wall_seconds=wall,
                curves={
                    "loss": [{"step": step, "loss": loss} for step, loss in enumerate(taken[0].losses)],
                    "turns": [{"turn": turn, "real_tokens_per_second": rate} for turn, rate in enumerate(rates)],
                },
            ),
        )  # fmt: skip


def draw_documents(distribution: str, count: int, seed: int) -> Documents:
    """Pieces of the standard library's functions, one after the other as bytes, of drawn lengths."""
    lengths = draw_lengths(distribution, count, seed).tolist()
    source = open_stdlib(DataConfig(source="stdlib"))
    functions = source.read(lambda size: None, Counter())
    text = itertools.chain.from_iterable(document.content.encode() for document in functions)
    return [list(itertools.islice(text, length)) for length in lengths]


def _sizes(arm: Arm, config: IntegrationConfig) -> tuple[int, int, int]:
    """(documents of a step, timed steps, steps before them) of an arm."""
    own = (arm.documents_per_step, arm.steps, arm.warm_up_steps)
    of_all = (config.documents_per_step, config.steps, config.warm_up_steps)
    per_step, steps, warm_up = (b if a is None else a for a, b in zip(own, of_all))
    return per_step, steps, warm_up


def _counts(arm: Arm, documents: Documents, per_step: int) -> tuple[int, int]:
    """(tokens, slots) of all steps."""
    lengths = [len(document) for document in documents]
    if arm.batches == "flattened":
        return sum(lengths), sum(lengths)
    steps = [lengths[first : first + per_step] for first in range(0, len(lengths), per_step)]
    return sum(lengths), sum(max(step) * len(step) for step in steps)


def _gate(measured: Measured, arms: dict[str, Arm], documents: Documents, margin: float) -> dict[str, float]:
    """How far each arm's logits are from single documents', relative; in float32.

    Single documents are computed by transformers without kernels. Its own arms are reported as they are, ours must agree.
    """
    some = [list(document[:GATE_LENGTH]) for document in documents[:GATE_DOCUMENTS]]
    some[1] = some[1][:1]  # a document of one token too
    plain = Arm("padded", kernels="torch")
    with torch.backends.cudnn.flags(allow_tf32=False):  # which PyTorch allows its convolutions
        alone = measured.logits(plain, *([document] for document in some))

        def difference(arm: Arm) -> float:
            return float((measured.logits(arm, some) - alone).norm() / alone.norm())

        most = margin * TIMES * max(difference(plain), ROUNDING)
        differences = {name: difference(arm) for name, arm in arms.items()}
    for name, arm in arms.items():
        if arm.patched and not differences[name] <= most:
            raise RuntimeError(
                f"{name}: logits differ from single documents' by {differences[name]:.2g}, relative, more than {most:.2g}"
            )
    return differences


BENCHES = {"integration": Bench(IntegrationConfig, run)}
