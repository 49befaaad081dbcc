"""List the steps that make the records, and the page's headline numbers."""

from experiments.reproduce import Headline, Step

TAKES = "an hour on one core"
STEPS = [Step("verdicts.yaml", small=("trials=100", "group_trials=20", "factor=1", "seeds=[3,8]"))]
HEADLINES = [
    Headline("four contrasts, 8 seeds: families with a false different", "rates", {"family": "4"}, "different_8"),
    Headline("four contrasts, 8 seeds: families with a false equivalent", "rates", {"family": "4"}, "equivalent_8"),
]
