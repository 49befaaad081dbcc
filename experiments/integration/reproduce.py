"""List the steps that make the records, and the README's headline numbers."""

from packmamba.reproduce import Headline, Step

TAKES = "13 minutes"
STEPS = [
    Step(
        "integration.yaml", small=("rounds=1", "steps=10", "arms=[padded,flattened,patched]"), gpus=1, gpu_gib=70,
        packages=("transformers", "accelerate", "mamba_ssm"),
    ),
    Step(
        "trainer.yaml", small=("rounds=1", "only=[mamba2,bamba]"), gpus=1, gpu_gib=70,
        packages=("transformers", "accelerate", "mamba_ssm"),
    ),
]  # fmt: skip
TABLE = "integration"

HEADLINES = [
    *(
        Headline(f"{arm}, real tokens/s", TABLE, {"arm": arm}, "real_tokens_per_second")
        for arm in ("padded", "grouped", "flattened", "patched", "slow-path")
    ),
    *(
        Headline(f"patched over {arm}", TABLE, {"arm": arm}, "patched_over")
        for arm in ("padded", "grouped", "flattened")
    ),
    *(
        Headline(f"{arm}: off from single documents", TABLE, {"arm": arm}, "difference")
        for arm in ("padded", "flattened", "patched")
    ),
    *(
        Headline(f"{model}: packed over {arm}", "trainer", {"model": model}, f"over_{arm}")
        for model in ("mamba", "falcon_mamba", "zamba", "mamba2", "bamba")
        for arm in ("padded", "grouped")
    ),
]
