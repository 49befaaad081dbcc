"""List the steps that make the records, and the README's headline numbers."""

from experiments.reproduce import Headline, Step

TAKES = "minutes"
STEPS = [Step("scoring.yaml", small=("rounds=2", "prompts=[1,16]"), gpus=1, gpu_gib=70, packages=("transformers",))]


def _rate(workload: str, arm: str) -> Headline:
    return Headline(f"{workload}: {arm}, requests/s", f"scoring-{workload}", {"arm": arm}, "requests_per_second")


HEADLINES = [
    _rate(workload, arm)
    for workload in ("short-context", "long-context")
    for arm in ("packed", "padded-8", "padded-64", "hf-64")
]
