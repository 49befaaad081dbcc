"""Are packed scores those of one request at a time, and the same bits in another order? Counted, with nothing timed."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from experiments.scoring.methods import padded
from experiments.scoring.models import make_model
from experiments.scoring.requests import Request, Workload
from packmamba import MambaLM
from packmamba.config import ConfigError, at_least, key, load_config, one_of, some, unique
from packmamba.evaluation import Score, generate, score
from packmamba.records import append_record, make_record, provenance

DTYPES = ("float64", "float32", "bfloat16")
PARTS = 3


@dataclass
class ExactnessConfig:
    bench: str = "exactness"
    model: str = key("1.4b", "Published size of the model, whose weights are random.")
    overrides: list[str] = key([], "Further keys of the model, such as model.n_layer=2.")
    dtypes: list[str] = key(["float32", "bfloat16"], "dtypes of the weights.", some("dtype"), unique)
    device: str = key("cuda", "cpu or cuda, whose kernels have no float64.", one_of("cpu", "cuda"))
    contexts: int = key(96, "Contexts, of about 64 tokens.", at_least(PARTS))
    continuations: int = key(
        4, "Of each context, of about 16 tokens; the first is what greedy decoding says.", at_least(2)
    )
    max_slots: int = key(4096, "Slots of a packed pass.", at_least(1))
    seed: int = key(0, "Seed of weights, requests and orders.", at_least(0))


def run(config: ExactnessConfig, records_path: Path, progress: bool = True) -> None:
    """Appends a record of kind ``exactness`` for each dtype.

    Raises:
        ConfigError: a value is refused; nothing has been computed.
    """
    for name in config.dtypes:
        if name not in DTYPES or (name == "float64" and config.device == "cuda"):
            known = DTYPES if config.device == "cpu" else DTYPES[1:]
            raise ConfigError(f"dtypes: expected of {', '.join(known)} with device={config.device}, got {name!r}")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' cannot be used here; expected cpu")
    provenance()
    sizes = load_config(None, [f"model={config.model}", *config.overrides]).model
    workload = Workload(config.contexts, 64, config.continuations, 16)
    for name in config.dtypes:
        torch.manual_seed(config.seed)
        model = make_model(sizes, torch.device(config.device), getattr(torch, name))
        begun = time.perf_counter()
        metrics = _compare(model, workload, config)
        append_record(
            records_path,
            make_record(
                kind="exactness",
                experiment="scoring",
                arm=name,
                config={
                    "model": config.model, "overrides": list(config.overrides), "dtype": name, "device": config.device,
                    **vars(workload), "max_slots": config.max_slots,
                },
                seed=config.seed,
                corpus_hash=f"random ids and what greedy decoding says: {workload}",
                metrics=metrics,
                wall_seconds=time.perf_counter() - begun,
            ),
        )  # fmt: skip
        del model


def _compare(model: MambaLM, workload: Workload, config: ExactnessConfig) -> dict[str, float]:
    requests = _requests(model, workload, config.seed, config.max_slots)
    packed = score(model, requests, config.max_slots, progress=False)
    alone = padded(model, batch=1)(requests)
    order = random.Random(config.seed).sample(range(len(requests)), len(requests))
    shuffled = score(model, [requests[i] for i in order], config.max_slots, progress=False)
    parts = [range(first, len(requests), PARTS) for first in range(PARTS)]
    split = [score(model, [requests[i] for i in part], config.max_slots, progress=False) for part in parts]
    unshared = score(model, requests, config.max_slots, progress=False, share_contexts=False)
    differences = [abs(a.log_likelihood - b.log_likelihood) for a, b in zip(packed, alone)]

    def best(scores: Sequence[Score]) -> np.ndarray:
        return np.reshape([s.log_likelihood for s in scores], (-1, workload.continuations)).argmax(axis=1)

    return {
        "requests": len(requests),
        "scored_tokens": sum(len(continuation) for _, continuation in requests),
        "largest_difference": max(differences),
        "largest_relative": max(d / abs(a.log_likelihood) for d, a in zip(differences, alone)),
        "largest_difference_a_token": max(d / len(r[1]) for d, r in zip(differences, requests)),
        "mean_difference": float(np.mean(differences)),
        "greedy": sum(s.is_greedy for s in alone),
        "greedy_flips": sum(a.is_greedy != b.is_greedy for a, b in zip(packed, alone)),
        "choice_flips": int((best(packed) != best(alone)).sum()),
        "shuffled_differ": sum(a != packed[i] for a, i in zip(shuffled, order)),
        "split_differ": sum(a != packed[i] for part, found in zip(parts, split) for a, i in zip(found, part)),
        "unshared_differ": sum(a != b for a, b in zip(unshared, packed)),
    }


def _requests(model: MambaLM, workload: Workload, seed: int, max_slots: int) -> list[Request]:
    """Random ids, but that each context's first continuation is what the model itself goes on with."""
    requests = workload.draw(model.config["vocab_size"], seed)
    contexts = [context for context, _ in requests[:: workload.continuations]]
    most = max(len(continuation) for _, continuation in requests[:: workload.continuations])
    said = generate(model, contexts, max_new_tokens=most, max_slots=max_slots)
    for number, tokens in enumerate(said):
        place = number * workload.continuations
        context, drawn = requests[place]
        requests[place] = (context, tokens[: len(drawn)])
    return requests
