"""One shape's arms on a GPU, checked and timed; in a second process those of the build with an index per token."""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from experiments.operators import gpu_arms
from experiments.operators.gpu_arms import PEERS_TOLERANCE, TOLERANCES, Arm, Inputs, relative_error
from packmamba import SequenceLayout
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS
from packmamba.ops.cuda.schedule import schedule

COPY_BYTES = 2**31
CHECKED_CHANNELS = 16
PAD_TO = 2048
"""Padded documents are at least as long as their distribution's longest, where that is at most this."""
SLOW_ARMS = ("mamba-ssm-by-document", "mamba-ssm-padded")
INDEXED = {"scan-indices": "scan", "conv1d-indices": "conv1d"}
"""Arms that run in the other process, and what they are called there."""

Errors = dict[str, tuple[float, float | None]]


class Turns:
    """Arms of one shape. RuntimeError if one of them is wrong.

    Args:
        tokens, channels, documents, seed: of the shape.
        rows: the documents' lengths of every layout.
        slow_tokens: longer rows are not run document by document or padded.
        others: whether there is more than our operators without states.
    """

    def __init__(
        self,
        tokens: int,
        channels: int,
        documents: str,
        rows: list[list[int]],
        seed: int,
        slow_tokens: int,
        *,
        others: bool,
    ) -> None:
        self.layouts = [SequenceLayout.from_lengths([row], row_length=tokens).to("cuda") for row in rows]
        some = torch.linspace(0, channels - 1, CHECKED_CHANNELS, device="cuda").long()
        inputs = Inputs.random(tokens, channels, seed, "cuda")
        self.arms = gpu_arms.ours(inputs)
        references = gpu_arms.references(inputs, some)
        if others:
            distribution = LENGTH_DISTRIBUTIONS.get(documents)
            pad_to = distribution.longest if distribution and distribution.longest <= PAD_TO else 0
            self.arms |= gpu_arms.projections(inputs)
            self.arms["schedule"] = Arm(
                lambda layout: schedule(layout.starts.clone(), layout.ends, 1, tokens, channels, True, "forward")
            )
            peers, more = gpu_arms.peers(inputs, some, pad_to)
            self.arms |= {name: arm for name, arm in peers.items() if name not in SLOW_ARMS or tokens <= slow_tokens}
            references |= more
        else:
            del self.arms["scan-states"]
        # What the allocator hands out next is this, so that an element that is not written fails the check.
        torch.full((8 * tokens * channels,), torch.nan, device="cuda")
        self.errors = check(self.arms, references, self.layouts[0], some)
        self._waits = {name: _host_cycles(arm, self.layouts[0]) for name, arm in self.arms.items()}

    def seconds(self, name: str) -> tuple[float, float]:
        """Forward and backward of an arm, a mean over the layouts; of one layout, five times."""
        layouts = self.layouts if len(self.layouts) > 1 else self.layouts * 5
        return _seconds(self.arms[name], layouts, self._waits[name])

    def memory(self, name: str) -> tuple[float, float]:
        """What an arm's forward keeps besides its outputs, and its backward's peak besides its results, in activations."""
        return _memory(self.arms[name], self.layouts[0])


class Elsewhere:
    """Turns of the operators built with an index per token: the library's names are the same, so in a process of their own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def start(self, *shape: Any) -> None:
        """Begins with another shape; ``errors`` waits for it."""
        self._connection.send(("start", *shape))

    def errors(self) -> Errors:
        return self._answer()

    def seconds(self, name: str) -> tuple[float, float]:
        self._connection.send(("seconds", INDEXED[name]))
        return self._answer()

    def _answer(self) -> Any:
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise RuntimeError(f"with an index per token: {answer}") from answer
        return answer


@contextmanager
def elsewhere() -> Iterator[Elsewhere]:
    """The other process, for as long as it is needed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Elsewhere(ours)
    finally:
        ours.close()
        process.join(10)
        process.terminate()


def _serve(connection: Connection) -> None:
    os.environ["PACKMAMBA_PER_TOKEN_INDICES"] = "1"
    turns: Turns | None = None
    while True:
        try:
            what, *arguments = connection.recv()
        except EOFError:
            return
        try:
            if what == "start":
                turns = None
                torch.cuda.empty_cache()
                turns = Turns(*arguments, others=False)
                names = {inner: outer for outer, inner in INDEXED.items()}
                connection.send({names[name]: errors for name, errors in turns.errors.items()})
            else:
                assert turns is not None
                connection.send(turns.seconds(*arguments))
        except Exception as error:  # told to the process that asked
            connection.send(error)


def check(arms: dict[str, Arm], references: dict[str, Callable], layout: SequenceLayout, some: torch.Tensor) -> Errors:
    """(output error, gradient error) of every arm that can be held against float64. RuntimeError if one is wrong."""
    expected: dict[str, torch.Tensor] = {}
    errors: Errors = {}
    for name, arm in arms.items():
        if arm.output is None:
            continue
        prepared = arm.prepare(layout)
        if arm.gradients:
            found = prepared.errors(some)
            gradients = {what: error for what, error in found.items() if what.startswith("grad")}
            outputs = {what: error for what, error in found.items() if what not in gradients}
            limits = TOLERANCES
        else:
            if arm.expects not in expected:
                expected[arm.expects] = references[arm.expects](layout)
            with torch.no_grad():
                y = arm.output(arm.forward(prepared), prepared).index_select(2, some)
            outputs, gradients, limits = {"output": relative_error(y, expected[arm.expects])}, {}, (PEERS_TOLERANCE, 0)
        for kind, limit in zip((outputs, gradients), limits):
            for what, error in kind.items():
                if not error <= limit:
                    raise RuntimeError(f"{name}: {what} is off by {error:.1e}; nothing is timed")
        errors[name] = max(outputs.values()), max(gradients.values(), default=None)
    return errors


def _seconds(arm: Arm, layouts: Sequence[Any], wait: int) -> tuple[float, float]:
    """Mean device time of forward and backward over the layouts, each queued behind a wait that covers its launches."""
    marks = []
    gc.collect()
    gc.disable()  # a collection between two launches would show
    try:
        for layout in layouts:
            prepared = arm.prepare(layout)
            begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda._sleep(wait)
            begin.record()
            outputs = arm.forward(prepared)
            middle.record()
            if arm.backward is not None:
                arm.backward(outputs, prepared)
            end.record()
            marks.append((begin, middle, end))
        torch.cuda.synchronize()
    finally:
        gc.enable()
    forward = statistics.mean(begin.elapsed_time(middle) for begin, middle, _ in marks) / 1e3
    backward = statistics.mean(middle.elapsed_time(end) for _, middle, end in marks) / 1e3
    return forward, backward if arm.backward is not None else 0.0


def copy_bytes_per_second() -> float:
    """Bytes read and written per second by copying 2 GiB."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(Arm(lambda _: target.copy_(source)), [None] * 3, int(2e-4 * clock_hz()))[0]


def _host_cycles(arm: Arm, layout: SequenceLayout) -> int:
    """Cycles of the device in which the host surely launches a forward and backward: twice the slowest of three."""
    slowest = 0.0
    for turn in range(4):
        prepared = arm.prepare(layout)
        torch.cuda.synchronize()
        began = time.perf_counter()
        outputs = arm.forward(prepared)
        if arm.backward is not None:
            arm.backward(outputs, prepared)
        slowest = max(slowest, time.perf_counter() - began) if turn else 0.0
        del outputs
    return int(min(2 * slowest + 3e-4, 0.05) * clock_hz())


def clock_hz() -> float:
    """The multiprocessors' highest clock."""
    if not _clock:
        command = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits", "--id=0"]
        _clock.append(1e6 * float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    return _clock[0]


_clock: list[float] = []


def _memory(arm: Arm, layout: SequenceLayout) -> tuple[float, float]:
    assert arm.backward is not None
    call = arm.prepare(layout)
    arm.forward(call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    outputs = arm.forward(call)
    kept = torch.cuda.memory_allocated() - before - _bytes(outputs)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = arm.backward(outputs, call)
    activation = _bytes(outputs[:1])
    workspace = torch.cuda.max_memory_allocated() - before - _bytes(gradients)
    return kept / activation, workspace / activation


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
