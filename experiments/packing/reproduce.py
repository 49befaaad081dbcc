"""List the steps that make the records, and the README's headline numbers."""

from packmamba.reproduce import Headline, Step

TAKES = "minutes on one core"
STEPS = [Step("packing.yaml", small=("num_documents=50000", "seeds=[0]", "rounds=2"))]

GREEDY = "greedy, buffer 4096"
HEADLINES = [
    Headline(
        "padding in rows of 2048, received order", "packing-padding", {"strategy": "next_fit"}, "row_length_2048", paper="19.1 %"
    ),
    Headline(
        "padding in rows of 2048, greedy within 4096 documents", "packing-padding", {"strategy": GREEDY}, "row_length_2048",
        paper="0.41 %",
    ),
    Headline("padding in rows of 2048, best fit", "packing-padding", {"strategy": "best_fit_decreasing"}, "row_length_2048"),
    Headline(
        "planning a million documents, greedy, rows of 2048 (s)", "packing-planning", {"strategy": GREEDY}, "row_length_2048"
    ),
    Headline(
        "planning a million documents, the slowest: first fit, rows of 1024 (s)", "packing-planning",
        {"strategy": "first_fit"}, "row_length_1024",
    ),
]  # fmt: skip
