"""What an evaluation is given and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from packmamba.config import ConfigError, DataConfig, TrainerConfig, chosen
from packmamba.data.tokenization import Tokenizer
from packmamba.evaluation.kept import Kept
from packmamba.evaluation.perplexity import Read
from packmamba.nn import MambaLM


@dataclass
class Asked:
    """What an evaluation may use besides the model.

    Attributes:
        data: where documents come from, for evaluations on text; how rows are filled, for those as trained.
        tokenizer: of the model; None if its ids have no text.
        examples: how many of a task.
        seed: of a task's examples: those of training runs have others.
        max_slots: slots of a pass.
        options: of the evaluation itself, such as a task's parameters.
        key: of the configuration that holds the options, as errors name it.
        trainer: what the model was trained with; if its boundary scheme lets something cross, it answers as trained too.
        kept: items of this evaluation as they come.
        read: losses of the validation documents, which evaluations of one model on the same documents may share.
    """

    data: DataConfig
    tokenizer: Tokenizer | None
    examples: int = 200
    seed: int = 1_000_000
    max_slots: int = 16384
    options: dict[str, Any] = field(default_factory=dict)
    key: str = "options"
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    kept: Kept = field(default_factory=Kept)
    read: Read = field(default_factory=Read)

    def boundary(self) -> Any:
        """The scheme that the model was trained with, without memory."""
        return chosen(self.trainer, "boundary")(**self.trainer.boundary_options)

    def check_options(self, name: str, known: Iterable[str]) -> None:
        """Raises ConfigError naming the first of the evaluation's options that it does not have."""
        for option in self.options:
            if option not in known:
                raise ConfigError(f"{self.key}.{name}: unknown option '{option}'; known: {', '.join(known) or 'none'}")


@dataclass
class Result:
    """metrics: name -> number; ``<name>_as_trained`` where the model also read as it was trained. curves: name -> points.
    items: one mapping for each document or example."""

    metrics: dict[str, float]
    curves: dict[str, list[dict[str, float]]]
    items: list[dict[str, Any]]
    corpus_hash: str


@dataclass(frozen=True)
class Evaluation:
    """ask: answers. check: raises ConfigError for what ``ask`` would refuse, given the model's vocabulary; where that is None,
    not known yet, it looks at no document."""

    ask: Callable[[MambaLM, Asked], Result]
    check: Callable[[Asked, int | None], object]
