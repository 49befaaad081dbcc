"""A program beside a long run that always does the same: how fast the machine is at the moment."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

TOKENS, DOCUMENT = 2048, 128
STEPS = 30


class Yardstick:
    """A process of its own; a call waits for ``STEPS`` training steps of a small model there and gives one's seconds.

    What slows a long run's process slows this one no more than any other; what slows the machine slows both.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_measure, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self()  # what is first done once

    def __call__(self) -> float:
        self.pipe.send(STEPS)
        return float(self.pipe.recv())

    def __enter__(self) -> Yardstick:
        return self

    def __exit__(self, *_: Any) -> None:
        self.pipe.close()
        self.process.join(10)


def _measure(pipe: Connection) -> None:
    import torch

    from packmamba import MambaLM, SequenceLayout

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MambaLM(vocab_size=256, d_model=64, n_layer=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    tokens = torch.randint(0, 256, (1, TOKENS))
    layout = SequenceLayout.from_lengths([TOKENS // DOCUMENT * [DOCUMENT]], row_length=TOKENS)
    with suppress(EOFError, KeyboardInterrupt):
        while steps := pipe.recv():
            begun = time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad()
                model(tokens, layout=layout).logsumexp(-1).mean().backward()
                optimizer.step()
            pipe.send((time.perf_counter() - begun) / steps)
