"""Global settings of a process that trains."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import torch

from packmamba.config import Config

MAX_COMPILED_SHAPES = 256
"""PyTorch's own limit, 8, is reached by a few shapes of rows."""
_compiled: list[str] = []
"""The configuration of the compiled code that this process holds."""


@contextlib.contextmanager
def configured_runtime(config: Config) -> Iterator[None]:
    """Set threads, determinism and the compiler's limits for one run; restore threads and determinism."""
    trainer, threads, strict = config.trainer, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    on_cpu = trainer.accelerator == "cpu" or not torch.cuda.is_available()
    with contextlib.suppress(
        AttributeError, OSError
    ):  # glibc: large tensors reuse pages instead of faulting them in again
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD
        libc.mallopt(-4, 0)  # M_MMAP_MAX
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    torch.set_num_threads(trainer.threads or (1 if trainer.deterministic and on_cpu else threads))  # they decide sums
    try:
        if trainer.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            settings: Any = torch.utils.deterministic  # type: ignore[attr-defined]
            settings.fill_uninitialized_memory = False  # it costs bandwidth
            torch.use_deterministic_algorithms(True)
        if config.model.compile:
            _configure_compiler(config, reuse=not trainer.deterministic and not on_cpu)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)


def _configure_compiler(config: Config, reuse: bool) -> None:
    """Discard code compiled for earlier runs: other shapes may split sums otherwise. ``reuse``: keep that of the same model."""
    key = repr((config.model, config.data.row_length, config.trainer.precision, config.trainer.strategy, config.ops))
    if not reuse or _compiled != [key]:
        torch.compiler.reset()
    _compiled[:] = [key] if reuse else []
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit, dynamo.accumulated_recompile_limit = MAX_COMPILED_SHAPES, 4 * MAX_COMPILED_SHAPES
    dynamo.fail_on_recompile_limit_hit = True  # else the rest runs uncompiled
    torch._inductor.config.fx_graph_cache = not config.trainer.deterministic
    torch._functorch.config.enable_autograd_cache = not config.trainer.deterministic
