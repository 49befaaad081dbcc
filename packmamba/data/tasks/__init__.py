"""Synthetic tasks with known answers.

A task is a class whose parameters all have defaults, with

- ``example(seed, index)``: an ``Example``, a pure function;
- ``vocab_size``: a bound of its ids; ``chance``: the accuracy of a guess;
- perhaps ``num_examples``; ``of_bytes = True`` where ids are a text's bytes, for a model's tokenizer;
- perhaps ``annotate(examples, answers, rows)``: further metrics.
"""

from packmamba.data.tasks import recall, text
from packmamba.data.tasks.base import Example as Example

# Tasks by name; plugins may add to it.
TASKS: dict[str, type] = {
    "mqar": recall.MultiQueryRecall,
    "selective_copying": recall.SelectiveCopying,
    "induction": recall.Induction,
    "parity": recall.Parity,
    "next_line": text.NextLine,
}
