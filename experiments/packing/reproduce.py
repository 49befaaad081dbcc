"""List the steps that make the records, and the README's headline numbers."""

from experiments.reproduce import Headline, Step

TAKES = "minutes on one core"
STEPS = [Step("packing.yaml", small=("num_documents=50000", "seeds=[0]", "rounds=2"))]


def _number(name: str, table: str, strategy: str, row_length: int = 2048, paper: str = "") -> Headline:
    return Headline(name, f"packing-{table}", {"strategy": strategy}, f"row_length_{row_length}", paper=paper)


GREEDY, SLOWEST = "greedy, buffer 4096", "planning a million documents, the slowest: first fit, rows of 1024 (s)"
HEADLINES = [
    _number("padding in rows of 2048, received order", "padding", "next_fit", paper="19.1 %"),
    _number("padding in rows of 2048, greedy within 4096 documents", "padding", GREEDY, paper="0.41 %"),
    _number("padding in rows of 2048, best fit", "padding", "best_fit_decreasing"),
    _number("planning a million documents, greedy, rows of 2048 (s)", "planning", GREEDY),
    _number(SLOWEST, "planning", "first_fit", 1024),
]
