"""What a run sets for its whole process and gives back, so that no run depends on those before it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from packmamba.config import Config, ConfigError
from packmamba.training.strategy import leave_process_group

MOST_GRAPHS = 256
"""PyTorch gives up on compiled code of which it needs more; its own limit, 8, is reached by a few shapes of rows."""
RANKS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
"""What Lightning sets in the process that starts the other ranks, and takes, in the next run, for somebody else's start of it."""


@contextmanager
def surroundings(config: Config) -> Iterator[None]:
    """Raises ConfigError where PyTorch would go on without compiled code."""
    threads = torch.get_num_threads()
    ranks = {name: os.environ.get(name) for name in RANKS}
    try:
        with ExitStack() as stack:
            if (wanted := _threads(config)) is not None:
                torch.set_num_threads(wanted)
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
            if config.trainer.deterministic:
                stack.enter_context(_deterministic())
            if config.model.compile:
                stack.enter_context(_compiled(config))
            yield
    finally:
        torch.set_num_threads(threads)
        leave_process_group()
        if config.trainer.devices * config.trainer.num_nodes == 1:  # else the ranks that it has started go on, too
            os.environ.update({name: value for name, value in ranks.items() if value is not None})
            for name in [name for name, value in ranks.items() if value is None]:
                os.environ.pop(name, None)


def _threads(config: Config) -> int | None:
    """Threads split sums, so their number decides bits. A deterministic run on a CPU has one unless it says how many: not as
    many as this machine, or this job's share of it, has cores."""
    trainer = config.trainer
    on_cpu = trainer.accelerator == "cpu" or not torch.cuda.is_available()
    return 1 if trainer.threads is None and trainer.deterministic and on_cpu else trainer.threads


def prepare_environment(configs: list[Config]) -> None:
    """What has to be said before CUDA starts, in this process and those that it starts."""
    if any(config.trainer.deterministic for config in configs):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def _deterministic() -> Iterator[None]:
    settings: Any = torch.utils.deterministic
    filled, strict = settings.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    settings.fill_uninitialized_memory = False  # finds reads of what was not written, and costs bandwidth
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict)
        settings.fill_uninitialized_memory = filled


_compiled_for: list[str] = []
"""The last run's key, of code that is still there."""


@contextmanager
def _compiled(config: Config) -> Iterator[None]:
    """Code compiled for batches of another size may split sums in another way, and for another model be slow. That of earlier
    runs is used only for the same model on a GPU, whose runs are not to the same bits anyway; that of earlier processes, where
    no bits are promised.
    """
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    trainer = config.trainer
    inexact = not trainer.deterministic and trainer.accelerator != "cpu" and torch.cuda.is_available()
    key = repr((config.model, config.data.row_length, trainer.precision, trainer.strategy, config.ops.backend))
    if not inexact or _compiled_for != [key]:
        torch.compiler.reset()
    _compiled_for[:] = [key] if inexact else []
    with ExitStack() as stack:
        stack.enter_context(
            torch._dynamo.config.patch(
                recompile_limit=MOST_GRAPHS,
                accumulated_recompile_limit=4 * MOST_GRAPHS,
                fail_on_recompile_limit_hit=True,
            )
        )
        if trainer.deterministic:
            stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        try:
            yield
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            raise ConfigError(
                f"model.compile: expected at most {MOST_GRAPHS} shapes of a batch that are compiled apart, got more; "
                "train without it, or with fewer row lengths"
            ) from None
