"""Synthetic tasks with known answers; nothing is downloaded.

``TASKS`` maps a name to a class whose constructor's parameters all have defaults. A task has

- ``example(seed, index)``: an ``Example``, a pure function of the task's parameters, the seed and the index;
- ``vocab_size``: a bound of its ids; ``chance``: the accuracy of a guess among the answers that can occur;
- optionally ``num_examples`` (None: unlimited), and ``of_bytes = True`` where ids are the bytes of a text: models with a
  tokenizer then get their own tokens;
- optionally ``annotate(examples, answers, rows)``: further metrics of the model's answers, given the rows of the training.
"""

from packmamba.evaluation.tasks import recall, text
from packmamba.evaluation.tasks.base import Example as Example

TASKS: dict[str, type] = {
    "mqar": recall.MultiQueryRecall,
    "selective_copying": recall.SelectiveCopying,
    "induction": recall.Induction,
    "fuzzy_recall": recall.FuzzyRecall,
    "noisy_recall": recall.NoisyRecall,
    "passkey": text.Passkey,
    "parity": recall.Parity,
    "next_line": text.NextLine,
}
"""Tasks by name; plugins may add to it."""
