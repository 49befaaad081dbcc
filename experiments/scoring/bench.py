"""Time scoring and generation: packed passes, padded batches, and lm-evaluation-harness' own class."""

from __future__ import annotations

import functools
import inspect
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.by_name import Bench
from experiments.common import PeakMemory
from experiments.leakcheck.bench import find_kernels
from experiments.timing import free_memory, median, seconds, spread, take_turns
from packmamba import MambaLM, SequenceLayout
from packmamba.config import key, load_config, need
from packmamba.data.tokenizer import write_tokenizer
from packmamba.evaluation import Score, score
from packmamba.evaluation.generation import generate
from packmamba.evaluation.packed_forward import log_probabilities
from packmamba.lab.records import append_record, make_record, provenance
from packmamba.training.lit_module import make_model

Request = tuple[list[int], list[int]]
Method = Callable[[Sequence[Request]], list[Score]]


@dataclass(frozen=True)
class Workload:
    """Contexts with ``continuations`` continuations each, of random ids; lengths in tokens are
    log-normal.
    """

    contexts: int
    context: int
    continuations: int
    continuation: int
    sigma: float = 0.5

    def draw(self, vocab_size: int, seed: int) -> list[Request]:
        """Draw requests, those of one context next to each other, of a quarter to four times the
        median length.
        """
        rng = np.random.Generator(np.random.PCG64(seed))

        def ids(median: int) -> list[int]:
            length = np.clip(rng.lognormal(np.log(median), self.sigma), max(1, median / 4), 4 * median)
            return rng.integers(vocab_size, size=int(length)).tolist()

        contexts = [ids(self.context) for _ in range(self.contexts)]
        return [(context, ids(self.continuation)) for context in contexts for _ in range(self.continuations)]


def padded(model: MambaLM, batch: int) -> Method:
    """Batch as lm-evaluation-harness does: longest first, each padded to its longest; logits of
    continuations alone.
    """

    def run(requests: Sequence[Request]) -> list[Score]:
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][0]) - len(requests[i][1]))
        scores: dict[int, Score] = {}
        for first in range(0, len(order), batch):
            some = order[first : first + batch]
            for i, result in zip(some, _one_batch(model, [requests[i] for i in some])):
                scores[i] = result
        return [scores[i] for i in range(len(requests))]

    return run


def _one_batch(model: MambaLM, requests: list[Request]) -> list[Score]:
    device = next(model.parameters()).device
    rows = [context + continuation[:-1] for context, continuation in requests]
    longest = max(map(len, rows))
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
    layout = SequenceLayout.from_lengths([[len(ids)] for ids in rows], row_length=longest).to(device)
    with torch.inference_mode():
        hidden = model(tokens.to(device), layout=layout, return_hidden=True)
    asked = [hidden[row, len(context) - 1 : len(rows[row])] for row, (context, _) in enumerate(requests)]
    targets = torch.tensor([token for _, continuation in requests for token in continuation], device=device)
    values, greedy = [], []
    for part, log_p in log_probabilities(model, torch.cat(asked)):
        values.append(log_p.gather(1, targets[part, None]).squeeze(1))
        greedy.append(log_p.argmax(dim=1) == targets[part])
    lengths = [len(continuation) for _, continuation in requests]
    split_values = torch.cat(values).double().cpu().split(lengths)
    split_greedy = torch.cat(greedy).cpu().split(lengths)
    return [Score(float(v.sum()), bool(g.all())) for v, g in zip(split_values, split_greedy)]


def harness(model: MambaLM, batch: int, slow: bool) -> Method:
    """Call lm-evaluation-harness' class ``hf`` around transformers' Mamba; ``slow``: its path
    without kernels.
    """
    from lm_eval.models.huggingface import HFLM

    theirs, tokenizer = _transformers(model)
    if slow is takes_kernels(theirs):
        raise ValueError(f"transformers' Mamba takes its {'fast' if slow else 'slow'} path here")
    lm = HFLM(pretrained=theirs, tokenizer=tokenizer, batch_size=batch)

    def run(requests: Sequence[Request]) -> list[Score]:
        # Keys that differ: the class computes equal keys once.
        keyed = [((str(i), ""), *request) for i, request in enumerate(requests)]
        return [Score(*found) for found in lm._loglikelihood_tokens(keyed, disable_tqdm=True)]

    return run


@functools.cache
def _transformers(model: MambaLM) -> tuple[Any, Any]:
    find_kernels()  # before transformers' model is imported, which looks for them then
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, format="huggingface")
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        # requests are ids already, but the class wants one
        write_tokenizer(folder, "bytes", None, "</s>")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    moved: Any = theirs
    return moved.to(next(model.parameters()).device).eval(), tokenizer


def takes_kernels(theirs: Any) -> bool:
    """Return whether transformers' Mamba imported mamba-ssm's scan."""
    module = sys.modules[type(theirs).__module__]
    found = [getattr(module, name, None) for name in ("mamba_inner_fn", "mamba_selective_scan", "selective_scan_fn")]
    facts = [inspect.getclosurevars(function).nonlocals for function in found if function is not None]
    return any(fact.get("is_new_implementation") for fact in facts)


# Nats per token by which an arm's mean may differ from packed scores before nothing is timed.
MOST_DIFFERENCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1}


@dataclass
class ScoringConfig:
    bench: str = "scoring"
    model: str = key("1.4b", "Published size of the model, whose weights are random.")
    overrides: list[str] = key([], "Further keys of the model, such as model.n_layer=2.")
    dtype: str = key("bfloat16", "dtype of the weights.", choices=("bfloat16", "float32", "float64"))
    workloads: dict[str, Any] = key({}, "By name contexts, context, continuations, continuation (median lengths).")
    arms: dict[str, Any] = key({}, "Name -> method (packed, padded or hf), batch, slow.")
    max_slots: int = key(16384, "Slots of a packed pass.", low=1)
    prompts: list[int] = key([1, 16, 256], "How many prompts generate together.")
    prompt_length: int = key(512, "Tokens of a prompt, the median.", low=1)
    new_tokens: int = key(64, "Tokens that are generated for each.", low=2)
    rounds: int = key(5, "Timed rounds.", low=1)
    slow_rounds: int = key(1, "Timed rounds of transformers' slow path.", low=1)
    margin: float = key(1.0, "Factor on the difference that the gate allows.", above=0)
    seed: int = key(0, "Seed of weights and requests.", low=0)


def run(c: ScoringConfig, records_path: Path, progress: bool = True) -> None:
    """Append records of kinds scoring and generation; RuntimeError if an arm's scores differ from
    the first arm's.
    """
    workloads = {name: Workload(**fields) for name, fields in c.workloads.items()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    provenance()
    torch.manual_seed(c.seed)
    sizes = load_config(None, [f"model={c.model}", *c.overrides])
    with device:
        model = make_model(sizes, sizes.model.vocab_size or 50280).to(getattr(torch, c.dtype)).eval()
    methods = _methods(c, model)
    for name, workload in workloads.items():
        requests = workload.draw(model.config["vocab_size"], c.seed)
        _measure_scores(c, name, workload, requests, methods, device, records_path, progress)
    for count in c.prompts:
        _measure_generation(c, model, count, device, records_path)


def _methods(c: ScoringConfig, model: MambaLM) -> dict[str, Method]:
    made: dict[str, Method] = {}
    makers: dict[str, Any] = {"padded": partial(padded, model), "hf": partial(harness, model)}
    makers["packed"] = lambda: partial(score, model, max_slots=c.max_slots)
    for name, arm in c.arms.items():
        fields = {key: value for key, value in arm.items() if key != "method"}
        try:
            made[name] = makers[arm["method"]](**fields)
        except (ImportError, ValueError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    need(made, "arms", "at least one that runs here", "none")
    return made


def _measure_scores(
    c: ScoringConfig, name: str, workload: Workload, requests: Sequence[Request], methods: Mapping[str, Method],
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
        if not difference <= c.margin * MOST_DIFFERENCE[c.dtype]:
            raise RuntimeError(f"{name}, {arm}: scores differ by {difference:.2g} nats a token from the first arm's")

    turns = {
        arm: lambda _, method=method: seconds(partial(method, requests), device) for arm, method in methods.items()
    }
    slow = {arm: c.slow_rounds for arm in methods if c.arms[arm].get("slow")}
    begun = time.perf_counter()
    bar = f"scoring, {name}" if progress else None
    samples = take_turns(turns, c.rounds, warm_up=0, gate=gate, at_most=slow, bar=bar)
    wall = time.perf_counter() - begun
    for arm, taken in samples.items():
        config = {"workload": name, **vars(workload), **c.arms[arm], **_settings(c)}
        rate = {"requests": len(requests), "requests_per_second": len(requests) / median(taken)}
        metrics = {"seconds": median(taken), "seconds_spread": spread(taken), "peak_memory_bytes": peaks[arm], **rate}
        metrics |= _agreement(found[arm], expected, requests, workload.continuations)
        record = make_record("scoring", "scoring", arm, config, c.seed, f"{name}: {workload}", metrics, wall)
        append_record(records_path, record)


def _settings(c: ScoringConfig) -> dict[str, Any]:
    return {name: getattr(c, name) for name in ("model", "dtype", "overrides", "max_slots", "rounds")}


def _agreement(
    found: Sequence[Score], expected: Sequence[Score], requests: Sequence[Request], choices: int
) -> dict[str, float | None]:
    """With the first arm's scores: the largest difference a token, greedy verdicts and best choices
    that differ.
    """
    apart = [abs(a.log_likelihood - b.log_likelihood) for a, b in zip(found, expected)]
    per_token = [difference / len(continuation) for difference, (_, continuation) in zip(apart, requests)]
    sides = [[score.log_likelihood for score in scores] for scores in (found, expected)]
    best = [np.reshape(side, (-1, choices)).argmax(axis=1) for side in sides]
    return {
        "largest_difference": max(per_token),
        "mean_difference": statistics.fmean(per_token),
        "greedy_flips": sum(a.is_greedy != b.is_greedy for a, b in zip(found, expected)),
        "choice_flips": int((best[0] != best[1]).sum()) if choices > 1 else None,
    }


def _measure_generation(c: ScoringConfig, model: MambaLM, count: int, device: torch.device, records_path: Path) -> None:
    workload = Workload(count, c.prompt_length, 1, 1)
    prompts = [context for context, _ in workload.draw(model.config["vocab_size"], c.seed)]

    def generation(tokens: int) -> float:
        texts = [tuple(prompt) for prompt in prompts]
        run = lambda: generate(model, texts, tokens, seed=c.seed, max_slots=c.max_slots)
        return seconds(run, device)

    free_memory()
    peak = PeakMemory(device)
    turns = {"one": lambda turn: generation(1), "all": lambda turn: generation(c.new_tokens)}
    samples = take_turns(turns, c.rounds)
    steps = [(whole - first) / (c.new_tokens - 1) for first, whole in zip(samples["one"], samples["all"])]
    read = sum(map(len, prompts))
    metrics = {"prompt_tokens": read, "prefill_tokens_per_second": read / median(samples["one"])}
    metrics |= {"prefill_seconds": median(samples["one"]), "prefill_spread": spread(samples["one"])}
    metrics |= {"step_seconds": median(steps), "step_spread": spread(steps)}
    metrics |= {"tokens_per_second": count / median(steps), "peak_memory_bytes": peak.bytes()}
    config = {"prompts": count, "prompt_length": c.prompt_length, "new_tokens": c.new_tokens, **_settings(c)}
    wall = sum(samples["one"]) + sum(samples["all"])
    record = make_record("generation", "scoring", f"{count} prompts", config, c.seed, "prompts", metrics, wall)
    append_record(records_path, record)


BENCHES = {"scoring": Bench(ScoringConfig, run)}
