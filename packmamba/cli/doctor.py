"""What is installed, what runs here, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from packmamba import ops
from packmamba.data.token_store import Corpus
from packmamba.data.tokenize import META, SPLITS
from packmamba.errors import ConfigError
from packmamba.ops import build
from packmamba.ops.backends import Backend

EXTRAS = {
    "mamba_ssm": "the peers' Mamba, for baselines (needs CUDA): pip install --no-build-isolation 'packmamba[peers]'",
    "causal_conv1d": "the peers' convolution, for baselines (needs CUDA): pip install --no-build-isolation 'packmamba[peers]'",
    "tokenizers": "tokenizer files (data.tokenizer): pip install tokenizers",
    "pyarrow": "parquet files (data.source=parquet): pip install 'packmamba[integrations]'",
    "datasets": "data sets (data.source=huggingface): pip install 'packmamba[integrations]'",
    "zstandard": "JSON lines in .zst files: pip install 'packmamba[integrations]'",
    "transformers": "Hugging Face's Mamba, packed: pip install 'packmamba[integrations]'",
    "lm_eval": "tasks of lm-evaluation-harness: pip install 'packmamba[eval]'",
    "submitit": "jobs of SLURM (launcher=slurm): pip install 'packmamba[slurm]'",
    "wandb": "a logger (trainer.loggers): pip install 'packmamba[loggers]'",
    "mlflow": "a logger (trainer.loggers): pip install 'packmamba[loggers]'",
}


def diagnose() -> Iterator[str]:
    """Lines for a person."""
    yield f"Python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs"
    for name in ("torch", "lightning", "torchmetrics", "omegaconf", "numpy"):
        yield f"  {name} {importlib.metadata.version(name)}"
    yield f"CPU threads of PyTorch: {torch.get_num_threads()}"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            capability = f"{properties.major}.{properties.minor}"
            yield f"GPU {i}: {properties.name}, {properties.total_memory >> 30} GiB, compute capability {capability}"
    else:
        yield "GPU: none that PyTorch can use; everything but GPU measurements runs on the CPU"
    yield "Operators' backends:"
    for name, backend in ops.BACKENDS.items():
        if name != "auto":
            yield f"  {name}: {_state(backend)}"
    yield "Optional packages:"
    for name, purpose in EXTRAS.items():
        found = importlib.util.find_spec(name) is not None
        yield f"  {name}: {'installed' if found else f'missing; {purpose}'}"


def examine(folders: Iterable[str]) -> Iterator[tuple[bool, str]]:
    """Whether each prepared corpus is, as long as what was written, and a line for a person. ConfigError: no folder."""
    folders = list(folders)
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"{folder} is not a folder; expected one of a prepared corpus, under data.cache_dir")
    for folder in folders:
        if not (Path(folder) / META).is_file():
            yield False, f"{folder}: no prepared corpus: it holds no {META}"
            continue
        try:
            splits = [Corpus(folder, split) for split in SPLITS]
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield (
                False,
                f"{folder}: damaged ({error}); delete this folder, and the next run that needs it makes it again",
            )
        else:
            documents, tokens = sum(map(len, splits)), sum(split.num_tokens for split in splits)
            yield True, f"{folder}: whole, {documents:,} documents of {tokens:,} tokens"


def _state(backend: Backend) -> str:
    if backend.packages and (backend.missing or not torch.cuda.is_available()):
        return f"missing: needs {' and '.join(backend.missing) or 'a GPU'}; for baselines"
    if backend.kernels is None:
        return "available"
    kernels = {row["kind"]: row for row in build.info()}[backend.kernels]
    if kernels["problem"]:
        fallback = "; auto runs the reference instead" if backend.kernels == "cpu" else ""
        return f"missing: {kernels['problem']}{fallback}"
    return f"{'built' if kernels['built'] else 'built on first use'} for {kernels['target']} by {kernels['compiler']}"
