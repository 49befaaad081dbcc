"""How fast a model scores requests and generates: packed passes against padded batches, and lm-evaluation-harness' own class."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.scoring.methods import Method, Request, Workload, harness, make_model, packed, padded
from packmamba import MambaLM
from packmamba.config import ConfigError, key, load_config
from packmamba.evaluation import Score
from packmamba.evaluation.generation import generate
from packmamba.records import append_record, make_record, provenance
from packmamba.reproduce import Bench
from packmamba.timing import PeakMemory, free_memory, median, seconds, spread, take_turns

MOST_DIFFERENCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1}
"""Nats per token by which an arm's mean may differ from packed scores before nothing is timed."""


@dataclass
class ScoringConfig:
    bench: str = "scoring"
    model: str = key("1.4b", "Published size of the model, whose weights are random.")
    overrides: list[str] = key([], "Further keys of the model, such as model.n_layer=2.")
    dtype: str = key("bfloat16", "dtype of the weights.", choices=("bfloat16", "float32", "float64"))
    workloads: dict[str, Any] = key(
        {}, "Name -> contexts, context, continuations, continuation: numbers and median lengths."
    )
    arms: dict[str, Any] = key({}, "Name -> method (packed, padded or hf), share or batch, slow.")
    max_slots: int = key(16384, "Slots of a packed pass.", low=1)
    prompts: list[int] = key([1, 16, 256], "How many prompts generate together.")
    prompt_length: int = key(512, "Tokens of a prompt, the median.", low=1)
    new_tokens: int = key(64, "Tokens that are generated for each.", low=2)
    rounds: int = key(5, "Timed rounds.", low=1)
    slow_rounds: int = key(1, "Timed rounds of transformers' slow path.", low=1)
    margin: float = key(1.0, "Factor on the difference that the gate allows.", above=0)
    seed: int = key(0, "Seed of weights and requests.", low=0)


def run(config: ScoringConfig, records_path: Path, progress: bool = True) -> None:
    """Append records of kinds scoring and generation; RuntimeError if an arm's scores differ from the first arm's."""
    workloads = {name: Workload(**fields) for name, fields in config.workloads.items()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    provenance()
    torch.manual_seed(config.seed)
    sizes = load_config(None, [f"model={config.model}", *config.overrides]).model
    model = make_model(sizes, device, getattr(torch, config.dtype))
    methods = _methods(config, model)
    for name, workload in workloads.items():
        requests = workload.draw(model.config["vocab_size"], config.seed)
        _measure_scores(config, name, workload, requests, methods, device, records_path, progress)
    for count in config.prompts:
        _measure_generation(config, model, count, device, records_path)


def _methods(config: ScoringConfig, model: MambaLM) -> dict[str, Method]:
    made: dict[str, Method] = {}
    for name, arm in config.arms.items():
        fields = {key: value for key, value in arm.items() if key != "method"}
        try:
            make = {"packed": partial(packed, model, config.max_slots), "padded": partial(padded, model)}
            made[name] = (make | {"hf": partial(harness, model)})[arm["method"]](**fields)
        except (ImportError, ValueError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    if not made:
        raise ConfigError("arms: expected at least one that runs here, got none")
    return made


def _measure_scores(
    config: ScoringConfig, name: str, workload: Workload, requests: Sequence[Request], methods: Mapping[str, Method],
    device: torch.device, records_path: Path, progress: bool,
) -> None:  # fmt: skip
    found: dict[str, list[Score]] = {}
    peaks: dict[str, int | None] = {}
    expected = next(iter(methods.values()))(requests)
    tokens = sum(len(continuation) for _, continuation in requests)

    def gate(arm: str) -> None:
        free_memory()
        peak = PeakMemory(device)
        found[arm] = methods[arm](requests)
        peaks[arm] = peak.bytes()
        difference = sum(abs(a.log_likelihood - b.log_likelihood) for a, b in zip(found[arm], expected)) / tokens
        if not difference <= config.margin * MOST_DIFFERENCE[config.dtype]:
            raise RuntimeError(f"{name}, {arm}: scores differ by {difference:.2g} nats a token from the first arm's")

    def arm_of(method: Method) -> Callable[[int], float]:
        return lambda turn: seconds(lambda: method(requests), device)

    slow = {arm: config.slow_rounds for arm in methods if config.arms[arm].get("slow")}
    begun = time.perf_counter()
    samples = take_turns(
        {arm: arm_of(method) for arm, method in methods.items()}, config.rounds, warm_up=0, gate=gate, at_most=slow,
        bar=f"scoring, {name}" if progress else None,
    )  # fmt: skip
    wall = time.perf_counter() - begun
    for arm, taken in samples.items():
        append_record(
            records_path,
            make_record(
                kind="scoring",
                experiment="scoring",
                arm=arm,
                config={
                    "workload": name, **vars(workload), **config.arms[arm], "model": config.model, "dtype": config.dtype,
                    "overrides": list(config.overrides), "max_slots": config.max_slots, "rounds": config.rounds,
                },
                seed=config.seed,
                corpus_hash=f"{name}: {workload}",
                metrics={
                    "seconds": median(taken),
                    "seconds_spread": spread(taken),
                    "requests": len(requests),
                    "requests_per_second": len(requests) / median(taken),
                    "peak_memory_bytes": peaks[arm],
                    **_agreement(found[arm], expected, requests, workload.continuations),
                },
                wall_seconds=wall,
            ),
        )  # fmt: skip


def _agreement(
    found: Sequence[Score], expected: Sequence[Score], requests: Sequence[Request], choices: int
) -> dict[str, float | None]:
    """With the first arm's scores: the largest difference a token, greedy verdicts and best choices that differ."""
    per_token = [
        abs(a.log_likelihood - b.log_likelihood) / len(continuation)
        for a, b, (_, continuation) in zip(found, expected, requests)
    ]
    best = [
        np.reshape([s.log_likelihood for s in scores], (-1, choices)).argmax(axis=1) for scores in (found, expected)
    ]
    return {
        "largest_difference": max(per_token),
        "mean_difference": statistics.fmean(per_token),
        "greedy_flips": sum(a.is_greedy != b.is_greedy for a, b in zip(found, expected)),
        "choice_flips": int((best[0] != best[1]).sum()) if choices > 1 else None,
    }


def _measure_generation(
    config: ScoringConfig, model: MambaLM, count: int, device: torch.device, records_path: Path
) -> None:
    workload = Workload(count, config.prompt_length, 1, 1)
    prompts = [context for context, _ in workload.draw(model.config["vocab_size"], config.seed)]

    def generation(tokens: int) -> float:
        texts = [tuple(prompt) for prompt in prompts]
        run = lambda: generate(model, texts, tokens, seed=config.seed, max_slots=config.max_slots)  # noqa: E731
        return seconds(run, device)

    free_memory()
    peak = PeakMemory(device)
    samples = take_turns(
        {"one": lambda turn: generation(1), "all": lambda turn: generation(config.new_tokens)}, config.rounds
    )
    steps = [(whole - first) / (config.new_tokens - 1) for first, whole in zip(samples["one"], samples["all"])]
    read = sum(map(len, prompts))
    append_record(
        records_path,
        make_record(
            kind="generation",
            experiment="scoring",
            arm=f"{count} prompts",
            config={
                "prompts": count, "prompt_length": config.prompt_length, "new_tokens": config.new_tokens,
                "model": config.model, "dtype": config.dtype, "overrides": list(config.overrides),
                "max_slots": config.max_slots, "rounds": config.rounds,
            },
            seed=config.seed,
            corpus_hash="prompts",
            metrics={
                "prompt_tokens": read,
                "prefill_seconds": median(samples["one"]),
                "prefill_spread": spread(samples["one"]),
                "prefill_tokens_per_second": read / median(samples["one"]),
                "step_seconds": median(steps),
                "step_spread": spread(steps),
                "tokens_per_second": count / median(steps),
                "peak_memory_bytes": peak.bytes(),
            },
            wall_seconds=sum(samples["one"]) + sum(samples["all"]),
        ),
    )  # fmt: skip


BENCHES = {"scoring": Bench(ScoringConfig, run)}
