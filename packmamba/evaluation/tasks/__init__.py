"""Tasks with a right answer, made here: nothing is downloaded.

``TASKS`` maps a name to a class. Its constructor takes documented parameters, each with a default. A task has

- ``example(seed, index)``: an ``Example``, a pure function of the task's parameters, the seed and the index;
- ``vocab_size``: its ids are below it;
- ``chance``: the accuracy of a guess among the answers that can occur; a perfect model has 1;
- ``num_examples``: how many there are, or None if there is no end;
- where ids are the bytes of a text, ``of_bytes = True``: models with a tokenizer are then asked in their own tokens.

Another task is one more file and one more line here; a plugin may add to ``TASKS`` instead.
"""

from packmamba.evaluation.tasks.contradiction import Contradiction
from packmamba.evaluation.tasks.example import Example as Example
from packmamba.evaluation.tasks.fuzzy_recall import FuzzyRecall
from packmamba.evaluation.tasks.induction import Induction
from packmamba.evaluation.tasks.mqar import MultiQueryRecall
from packmamba.evaluation.tasks.next_line import NextLine
from packmamba.evaluation.tasks.noisy_recall import NoisyRecall
from packmamba.evaluation.tasks.parity import Parity
from packmamba.evaluation.tasks.passkey import Passkey
from packmamba.evaluation.tasks.selective_copying import SelectiveCopying
from packmamba.registry import Registry

TASKS: Registry[type] = Registry(
    "task",
    {
        "mqar": MultiQueryRecall,
        "selective_copying": SelectiveCopying,
        "induction": Induction,
        "fuzzy_recall": FuzzyRecall,
        "noisy_recall": NoisyRecall,
        "passkey": Passkey,
        "contradiction": Contradiction,
        "parity": Parity,
        "next_line": NextLine,
    },
)
