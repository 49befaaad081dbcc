"""What a run's configuration asks its model; apart from the answering, which imports Lightning."""

from __future__ import annotations

from packmamba.config import Config
from packmamba.evaluation.registry import EVALUATIONS, EvalContext


def check_evaluations(config: Config, vocab_size: int | None = None) -> None:
    """Refuses before training what an evaluation would refuse after it. Raises ConfigError naming the key.

    Args:
        vocab_size: the model's; None: not known yet, and the documents are not looked at.
    """
    for name in config.evaluations:
        EVALUATIONS[name].check(asked_of(config, name), vocab_size)


def asked_of(config: Config, name: str) -> EvalContext:
    return EvalContext(
        config.data,
        tokenizer=None,
        examples=config.evaluation_examples,
        options=config.evaluation_options.get(name, {}),
        key="evaluation_options",
        trainer=config.trainer,
    )
