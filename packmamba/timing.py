"""The one clock: arms take turns, the gate comes first, medians and interquartile ranges come out.

``seconds`` is the host's time from an idle device to an idle device: of whole steps, in which the host may be what limits.
``device_seconds`` is the device's time of a call's phases (forward, backward), whose launches a wait hides.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from tqdm import tqdm

Sample = TypeVar("Sample")
Phases = Iterator[Any]
"""A generator: what comes before its first ``yield`` is not timed, and each further ``yield`` ends a phase."""

median = statistics.median


def spread(values: Iterable[float]) -> float:
    """The interquartile range, quartiles interpolated linearly; 0 for one value."""
    low, high = np.percentile(list(values), [25, 75])
    return float(high - low)


def take_turns(
    arms: Mapping[str, Callable[[int], Sample]],
    rounds: int,
    *,
    warm_up: int = 1,
    at_most: Mapping[str, int] | None = None,
    gate: Callable[[str], Any] | None = None,
    left_out: Callable[[str], Any] | None = None,
    bar: str | None = None,
) -> dict[str, list[Sample]]:
    """Calls the arms in turns (A B C A B C ...); returns what each gave in its timed rounds.

    Args:
        arms: name -> call, which gets the round's number (warm-up rounds come first, from 0) and returns what it measured.
        rounds: timed rounds, after ``warm_up`` that are not kept.
        at_most: arms that take fewer timed rounds, the first ones.
        gate: called with each arm's name before the first round; it raises if an arm is wrong, and then nothing is timed.
        left_out: called with the name of an arm that does not fit into a GPU's memory; the result lacks it. Without it the
            torch.OutOfMemoryError is the caller's.
        bar: what a bar of progress is called; none is shown without it.
    """
    for name in arms if gate is not None else ():
        gate(name)  # type: ignore[misc]
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    for turn in tqdm(range(warm_up + rounds), desc=bar, unit="round", disable=bar is None):
        for name in list(samples):
            if turn >= warm_up + (at_most or {}).get(name, rounds):
                continue
            fits = True
            try:
                sample = arms[name](turn)
            except torch.OutOfMemoryError:
                if left_out is None:
                    raise
                fits = False  # the exception's frames hold memory as long as it is handled here
            if fits and turn >= warm_up:
                samples[name].append(sample)
            elif not fits and left_out is not None:
                left_out(name)
                del samples[name]
                free_memory()
    return samples


def now(device: torch.device | str) -> float:
    """The host's clock in seconds, once the device is idle."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(call: Callable[[], Any], device: torch.device | str = "cpu") -> float:
    """Host time of a call, from an idle device to an idle device."""
    begun = now(device)
    call()
    return now(device) - begun


def device_seconds(runs: Iterable[Phases], wait: int) -> list[float]:
    """Seconds of each phase on the GPU, a mean over the runs; runs on several inputs, together larger than its L2 cache, read
    memory.

    Args:
        runs: of the same phases.
        wait: cycles that the GPU waits before each run, so that the host has launched it all (``launch_cycles``).
    """
    marks = []
    gc.collect()
    gc.disable()  # a collection between two launches would show
    try:
        for run in runs:
            next(run)
            torch.cuda._sleep(wait)
            events = [_event()]
            events += [_event() for _ in run]
            marks.append(events)
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
    """Cycles of the GPU in which the host surely launches all phases: twice the slowest of three, after one to warm up."""
    slowest = 0.0
    for turn in range(4):
        run = phases()
        next(run)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in run:
            pass
        slowest = max(slowest, time.perf_counter() - begun) if turn else 0.0
    return int(min(2 * slowest + 3e-4, 0.05) * clock_hz())


@cache
def clock_hz() -> float:
    """The multiprocessors' highest clock."""
    command = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits", "--id=0"]
    return 1e6 * float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


class OtherPrograms:
    """What else runs on this machine, from when this is made until ``cores`` is called."""

    def __init__(self) -> None:
        self._begun = _busy_seconds()

    def cores(self) -> float | None:
        """How many cores other programs keep busy, a mean; None where /proc/stat is missing."""
        ended = _busy_seconds()
        if self._begun is None or ended is None:
            return None
        wall, everything, own = (b - a for a, b in zip(self._begun, ended))
        return max(0.0, (everything - own) / wall) if wall else 0.0


def _busy_seconds() -> tuple[float, float, float] | None:
    """The clock, the processor time of all programs (that of the host's other guests included), and of this one."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return None
    everything = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), everything, sum(os.times()[:4])


def crowding(cores: float | None) -> str | None:
    """A sentence where other programs, on so many cores, leave fewer than the threads that PyTorch runs here."""
    here = os.cpu_count() or 1
    if cores is None or here - cores >= torch.get_num_threads() - 0.5:
        return None
    return f"other programs keep {cores:.1f} of this machine's {here} cores busy"


class PeakMemory:
    """The most of a GPU's memory that is in use since this was made; None on a CPU."""

    def __init__(self, device: torch.device | str) -> None:
        self._held: int | None = None
        if torch.device(device).type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()

    def bytes(self) -> int | None:
        return None if self._held is None else torch.cuda.max_memory_allocated()

    def more(self) -> int | None:
        """Than was in use when this was made."""
        return None if self._held is None else torch.cuda.max_memory_allocated() - self._held


def free_memory() -> None:
    """Gives back a GPU's memory that nothing refers to any more, cycles included."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
