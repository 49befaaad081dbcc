"""One shape's arms on a GPU, checked and timed; in a second process those of the build with an index per token."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from experiments.operators.arms import GpuArm
from experiments.operators.gpu_implementations import Implementation, build
from experiments.operators.gpu_inputs import Inputs, Reference, relative_error
from packmamba import SequenceLayout
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS
from packmamba.timing import Phases, clock_hz, device_seconds, launch_cycles

COPY_BYTES = 2**31
CHECKED_CHANNELS = 16
PAD_TO = 2048
"""Padded documents are at least as long as their distribution's longest, where that is at most this."""
# ||a - b|| / ||b|| against float64: ours, outputs and gradients; the peers', which round more often, outputs.
TOLERANCES, PEERS_TOLERANCE = (2e-3, 5e-3), 1e-2

Errors = dict[str, tuple[float, float | None]]


class Prepared:
    """Arms of one shape, made and checked. RuntimeError if one of them is wrong.

    Args:
        tokens, channels, documents, seed: of the shape.
        rows: the documents' lengths of every layout.
        arms: those of them that are here, by name; peers that are not installed are left out.
    """

    def __init__(
        self, tokens: int, channels: int, documents: str, rows: list[list[int]], seed: int, arms: Mapping[str, GpuArm]
    ) -> None:
        self.layouts = [SequenceLayout.from_lengths([row], row_length=tokens).to("cuda") for row in rows]
        some = torch.linspace(0, channels - 1, CHECKED_CHANNELS, device="cuda").long()
        inputs = Inputs.random(tokens, channels, seed, "cuda")
        distribution = LENGTH_DISTRIBUTIONS.get(documents)
        pad_to = distribution.longest if distribution and distribution.longest <= PAD_TO else 0
        self.arms, references = build(arms, inputs, some, pad_to)
        # What the allocator hands out next is this, so that an element that is not written fails the check.
        torch.full((8 * tokens * channels,), torch.nan, device="cuda")
        self.errors = check(self.arms, references, self.layouts[0], some)
        self._waits = {name: launch_cycles(lambda: arm.phases(self.layouts[0])) for name, arm in self.arms.items()}  # noqa: B023

    def seconds(self, name: str) -> list[float]:
        """Forward and, where there is one, backward of an arm, a mean over the layouts; of one layout, five times."""
        layouts = self.layouts if len(self.layouts) > 1 else self.layouts * 5
        return device_seconds((self.arms[name].phases(layout) for layout in layouts), self._waits[name])

    def memory(self, name: str) -> tuple[float, float]:
        """What an arm's forward keeps besides its outputs, and its backward's peak besides its results, in activations."""
        return _memory(self.arms[name], self.layouts[0])


class Elsewhere:
    """Arms of the operators built with an index per token: the library's names are the same, so in a process of their own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def start(self, *shape: Any) -> None:
        """Begins with another shape; ``errors`` waits for it."""
        self._connection.send(("start", *shape))

    def errors(self) -> Errors:
        return self._answer()

    def seconds(self, name: str) -> list[float]:
        self._connection.send(("seconds", name))
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
    shape: Prepared | None = None
    while True:
        try:
            what, *arguments = connection.recv()
        except EOFError:
            return
        try:
            if what == "start":
                shape = None
                torch.cuda.empty_cache()
                shape = Prepared(*arguments)
                connection.send(shape.errors)
            else:
                assert shape is not None
                connection.send(shape.seconds(*arguments))
        except Exception as error:  # told to the process that asked
            connection.send(error)


def check(
    arms: Mapping[str, Implementation], references: dict[str, Reference], layout: SequenceLayout, some: torch.Tensor
) -> Errors:
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


def copy_bytes_per_second() -> float:
    """Bytes read and written per second by copying 2 GiB."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)

    def copy() -> Phases:
        yield
        target.copy_(source)
        yield

    return 2 * COPY_BYTES / device_seconds((copy() for _ in range(3)), int(2e-4 * clock_hz()))[0]


def _memory(arm: Implementation, layout: SequenceLayout) -> tuple[float, float]:
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
