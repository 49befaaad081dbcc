"""The sweep and the bench that make this question's records, and its headline numbers."""

from experiments.reproduce import Headline, Step

SHORT = "{trainer.max_steps: 3, trainer.validate_every: 3, data.num_documents: 300}"
ARMS = ("induction", "mqar", "parity", "packed-reset", "packed-leak", "packed-reset-begin", "packed-leak-begin")
TINY = ("grid.seed=[0]", "evaluation_examples=20", f"arms={{{', '.join(f'{arm}: {SHORT}' for arm in ARMS)}}}")
TAKES = "an hour on two cores"
STEPS = [Step("tasks.yaml", small=TINY), Step("answers.yaml", small=("examples=10", "seeds=[0]"))]
MINUS = "leak minus reset, intruding reads, points"
INTRUDING = {"evaluated": "as trained", "reads": "of keys that only the predecessor wrote"}
HEADLINES = [
    *(
        Headline(f"{arm}: right answers at length {n}", f"answers-{arm}", {"arm": arm, "value": n}, "accuracy")
        for arm, n in (("induction", 256), ("induction", 4096), ("mqar", 64), ("parity", 1024))
    ),
    *(
        Headline(f"contradiction{of}: {MINUS}", f"leak-contradiction{name}", INTRUDING, "difference")
        for of, name in (("", ""), (", begin tokens", "-begin"))
    ),
    *(Headline(f"{t}: untrained", "untrained", {"task": t}, "accuracy") for t in ("mqar", "passkey", "parity")),
]
