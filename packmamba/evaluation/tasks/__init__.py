"""Synthetic tasks with known answers; nothing is downloaded.

``TASKS`` maps a name to a class whose constructor's parameters all have defaults. A task has

- ``example(seed, index)``: an ``Example``, a pure function of the task's parameters, the seed and the index;
- ``vocab_size``: a bound of its ids; ``chance``: the accuracy of a guess among the answers that can occur;
- ``num_examples``: their number, None if unlimited;
- optionally ``of_bytes = True`` where ids are the bytes of a text: models with a tokenizer then get their own tokens;
- optionally ``annotate(examples, answers, rows)``: further metrics of the model's answers, given the rows of the training.
"""

from packmamba.evaluation.tasks.base import Example as Example
from packmamba.evaluation.tasks.recall import (
    FuzzyRecall,
    Induction,
    MultiQueryRecall,
    NoisyRecall,
    Parity,
    SelectiveCopying,
)
from packmamba.evaluation.tasks.text import NextLine, Passkey

TASKS: dict[str, type] = {
    "mqar": MultiQueryRecall,
    "selective_copying": SelectiveCopying,
    "induction": Induction,
    "fuzzy_recall": FuzzyRecall,
    "noisy_recall": NoisyRecall,
    "passkey": Passkey,
    "parity": Parity,
    "next_line": NextLine,
}
"""Tasks by name; plugins may add to it."""
