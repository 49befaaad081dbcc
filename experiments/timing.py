"""Interleaved timing behind a correctness gate; medians and interquartile ranges.

Timings of arms that are run one after another differ by what else the machine did meanwhile, by
clocks and heat. In turns all arms meet the same; the median leaves out what met one call.
"""

import gc
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from scipy.stats import iqr as spread
from tqdm import tqdm

from packmamba.lab.benchmark import now, seconds

__all__ = ["free_memory", "median", "now", "seconds", "spread", "take_turns"]


def take_turns(
    arms: Mapping[str, Callable[[int], Any]],
    rounds: int,
    *,
    warm_up: int = 1,
    at_most: Mapping[str, int] | None = None,
    gate: Callable[[str], Any] = lambda name: None,
    left_out: Callable[[str], Any] | None = None,
    bar: str | None = None,
) -> dict[str, list[Any]]:
    """Call arms in turns (A B C A B C ...) with the round's number; return results of timed rounds.

    Args:
        arms: what is called, by name.
        rounds: timed rounds, after ``warm_up`` others, in which kernels are compiled and tuned.
        at_most: timed rounds of arms that take fewer, since they are slow.
        gate: called first with each arm's name; raises if the arm computes what is wrong.
        left_out: called with the name of an arm that runs out of GPU memory; None: raise.
        bar: a progress bar's title; None: none.
    """
    for name in arms:
        gate(name)
    samples: dict[str, list[Any]] = {name: [] for name in arms}
    for turn in tqdm(range(warm_up + rounds), desc=bar, unit="round", disable=bar is None):
        for name in [name for name in samples if turn < warm_up + (at_most or {}).get(name, rounds)]:
            try:
                samples[name].append(arms[name](turn))
            except torch.OutOfMemoryError:
                if left_out is None:
                    raise
                left_out(name)
                del samples[name]
            if name not in samples:  # not above, where the exception's frames hold memory
                free_memory()
            elif turn < warm_up:
                samples[name].clear()
    return samples


def free_memory() -> None:
    """Return what nothing refers to, also PyTorch's cache, to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
