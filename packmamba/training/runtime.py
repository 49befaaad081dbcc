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
    trainer, settings = config.trainer, torch.utils.deterministic  # type: ignore[attr-defined]
    before: Any = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        settings.fill_uninitialized_memory,
    )
    on_cpu = trainer.accelerator == "cpu" or not torch.cuda.is_available()
    threads = trainer.threads or (
        1 if trainer.deterministic and on_cpu else before[0]
    )  # threads decide the order of sums
    with contextlib.suppress(
        AttributeError, OSError
    ):  # glibc: large tensors reuse pages instead of faulting them in again
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD
        libc.mallopt(-4, 0)  # M_MMAP_MAX
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    try:
        torch.set_num_threads(threads)
        if trainer.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            settings.fill_uninitialized_memory = False  # it costs bandwidth
            torch.use_deterministic_algorithms(True)
        if config.model.compile:
            _configure_compiler(config, reuse=not trainer.deterministic and not on_cpu)
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        settings.fill_uninitialized_memory = before[2]


def _configure_compiler(config: Config, reuse: bool) -> None:
    """Discard code compiled for earlier runs: other shapes may split sums otherwise. ``reuse``: keep that of the same model."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    key = repr((config.model, config.data.row_length, config.trainer.precision, config.trainer.strategy, config.ops))
    if not reuse or _compiled != [key]:
        torch.compiler.reset()
    _compiled[:] = [key] if reuse else []
    torch._dynamo.config.recompile_limit = MAX_COMPILED_SHAPES
    torch._dynamo.config.accumulated_recompile_limit = 4 * MAX_COMPILED_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else the rest runs uncompiled
    torch._inductor.config.fx_graph_cache = not config.trainer.deterministic
    torch._functorch.config.enable_autograd_cache = not config.trainer.deterministic
