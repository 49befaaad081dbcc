"""What makes the experiment's records, and the numbers that its README rests on."""

from packmamba.experiments import Headline, Step

TINY = (
    "grid.seed=[0]", "trainer.max_steps=3", "trainer.validate_every=3", "data.num_documents=300", "evaluation_examples=20",
)  # fmt: skip
STEPS = [
    Step("tasks.yaml", small=TINY),
    Step("contradiction.yaml", small=TINY),
    Step("answers.yaml", small=("examples=10", "seeds=[0]")),
]


def _right(arm: str, length: int) -> Headline:
    return Headline(
        f"{arm}: right answers at length {length}", f"answers-{arm}", {"arm": arm, "value": length}, "accuracy"
    )


INTRUDING = {"evaluated": "as trained", "reads": "of keys that only the predecessor wrote"}
HEADLINES = [
    _right("induction", 256),
    _right("induction", 4096),
    _right("mqar", 64),
    _right("parity", 1024),
    Headline("contradiction: leak minus reset, intruding reads, points", "leak-contradiction", INTRUDING, "difference"),
    Headline(
        "contradiction, begin tokens: leak minus reset, intruding reads, points", "leak-contradiction-begin", INTRUDING,
        "difference",
    ),
    *(
        Headline(f"{task}: untrained", "untrained", {"task": task}, "accuracy")
        for task in ("mqar", "selective_copying", "induction", "fuzzy_recall", "noisy_recall", "passkey", "contradiction",
                     "parity", "next_line")
    ),
]  # fmt: skip
