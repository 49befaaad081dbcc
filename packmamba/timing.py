"""Interleaved timing: arms take turns behind a correctness gate; medians and interquartile ranges come out.

``seconds`` is the host's time from an idle device to an idle device, ``device_seconds`` the device's time of a call's phases.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

Phases = Iterator[Any]  # a generator: what precedes its first yield is not timed, each further yield ends a phase
median = statistics.median


def spread(values: Iterable[float]) -> float:
    """Return the interquartile range, quartiles interpolated linearly; 0 for one value."""
    low, high = np.percentile(list(values), [25, 75])
    return float(high - low)


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
    """Call the arms in turns (A B C A B C ...) with the round's number; return the results of each arm's timed rounds.

    ``at_most``: timed rounds of arms that take fewer. ``gate``: called with each arm's name first; raises if the arm is wrong.
    ``left_out``: called with the name of an arm that runs out of GPU memory, which the result lacks; None: raise.
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


def now(device: torch.device | str) -> float:
    """Return the host's clock in seconds, once the device is idle."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(call: Callable[[], Any], device: torch.device | str = "cpu") -> float:
    """Time a call on the host, from an idle device to an idle device."""
    begun = now(device)
    call()
    return now(device) - begun


def device_seconds(runs: Iterable[Phases], wait: int) -> list[float]:
    """Time each phase on the GPU, a mean over runs of the same phases (inputs larger than L2 together read memory).

    The GPU waits ``wait`` cycles (``launch_cycles``) before each run, so that the host has launched all of it.
    """
    marks = []
    gc.collect()
    gc.disable()  # a collection between two launches would show
    try:
        for run in runs:
            next(run)
            torch.cuda._sleep(wait)
            marks.append([_event(), *(_event() for _ in run)])
        torch.cuda.synchronize()
    finally:
        gc.enable()
    phases = zip(*([a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])] for events in marks))
    return [statistics.fmean(taken) for taken in phases]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def launch_cycles(phases: Callable[[], Phases]) -> int:
    """Return GPU cycles in which the host surely launches all phases: twice the slowest of three runs, after a warm-up."""
    taken = []
    for _ in range(4):
        run = phases()
        next(run)
        torch.cuda.synchronize()
        taken.append(seconds(lambda: list(run)))  # noqa: B023
    return int(min(2 * max(taken[1:]) + 3e-4, 0.05) * clock_hz())


@cache
def clock_hz() -> float:
    """Return the highest clock of the GPU's multiprocessors."""
    command = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits", "--id=0"]
    return 1e6 * float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


class OtherPrograms:
    """Processor time of other programs on this machine since construction; None without /proc/stat."""

    def __init__(self) -> None:
        self._begun = self._read()

    def cores(self) -> float | None:
        """Return the mean number of cores that other programs keep busy."""
        wall, others = (b - a for a, b in zip(self._begun, self._read()))
        return max(0.0, others / wall) if self._begun[1] else None

    @staticmethod
    def _read() -> tuple[float, float]:
        if not (stat := Path("/proc/stat")).is_file():
            return time.perf_counter(), 0.0
        ticks = sum(int(n) for i, n in enumerate(stat.read_text().split()[1:9]) if i not in (3, 4))  # 3 and 4: idle
        return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


class PeakMemory:
    """Peak GPU memory in use since construction; None on a CPU."""

    def __init__(self, device: torch.device | str) -> None:
        self._held: int | None = None
        if torch.device(device).type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()

    def bytes(self) -> int | None:
        return None if self._held is None else torch.cuda.max_memory_allocated()

    def more(self) -> int | None:
        """Return the peak minus the memory in use at construction."""
        return None if self._held is None else torch.cuda.max_memory_allocated() - self._held


def free_memory() -> None:
    """Free GPU memory that nothing refers to, reference cycles included."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
