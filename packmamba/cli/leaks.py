"""The command leakcheck: does anything cross a document boundary in this checkpoint's model?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from packmamba.config import ConfigError, Holds, at_least, each, key, load, one_of

DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass
class LeakCheckConfig:
    """Keys of ``leakcheck``."""

    boundaries: Optional[str] = key(
        None,
        "How a Hugging Face model is told where documents start: position_ids (which null stands for), seq_idx, cu_seq_lens_q, "
        "several joined by +, or attention_mask. Our own models have layouts.",
    )
    patch: bool = key(False, "Patch a Hugging Face Mamba first, with packmamba.integrations.transformers.")
    lengths: Optional[list[int]] = key(
        None,
        "Lengths of the documents, at least two; null: awkward ones.",
        each(at_least(1)),
        Holds("at least two", lambda value: len(value) > 1),
    )
    device: str = key("cpu", "cpu, cuda, cuda:1, ...")
    dtype: Optional[str] = key(None, "dtype of the weights; null: as they are.", one_of(*DTYPES))


def check_folder(folder: str, overrides: Sequence[str]) -> Any:
    """The verdict on a folder's model. Raises ConfigError: it holds none, or cannot be checked as asked.

    Hugging Face's format is read by transformers. A run's model is read as it was trained, with its boundary scheme.
    """
    config = load(LeakCheckConfig, None, overrides)
    from packmamba.integrations.folders import load_with_transformers, of_transformers

    theirs = of_transformers(folder)
    if not theirs and (config.patch or config.boundaries not in (None, "layout")):
        name, given = ("patch", "true") if config.patch else ("boundaries", config.boundaries)
        raise ConfigError(
            f"{name}: expected none, since {folder} holds a model of ours, which has layouts; got {given}"
        )
    from packmamba.isolation import leakcheck

    try:
        if not theirs:
            return _ours(folder, config)
        model = load_with_transformers(folder, config.device, config.dtype)
        if config.patch:
            from packmamba.integrations.transformers import patch

            model = patch(model)
        return leakcheck(model, config.boundaries or "position_ids", lengths=config.lengths)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None


def _ours(folder: str, config: LeakCheckConfig) -> Any:
    import torch

    from packmamba.data.batching import PackedBatch
    from packmamba.evaluation.load import load_model
    from packmamba.isolation import leakcheck
    from packmamba.layout import SequenceLayout
    from packmamba.training.boundary import BOUNDARIES

    subject = load_model(folder, config.device, config.dtype)
    trainer = subject.config.trainer
    if not subject.trained or trainer.boundary == "reset":
        return leakcheck(subject.model, lengths=config.lengths)
    scheme = BOUNDARIES[trainer.boundary]

    def call(tokens: Any, lengths: Sequence[int]) -> Any:
        layout = SequenceLayout.from_lengths([list(lengths)], row_length=tokens.shape[1]).to(tokens.device)
        batch = PackedBatch(tokens, tokens, torch.ones_like(tokens).bool(), layout)
        return subject.model.lm_head(scheme(**trainer.boundary_options).hidden(subject.model, batch))

    result = leakcheck(call, vocab_size=subject.model.lm_head.weight.shape[0], lengths=config.lengths)
    result.boundaries = f"as the run was trained, trainer.boundary={trainer.boundary}"
    return result
