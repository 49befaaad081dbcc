"""List the steps that make the records, and the README's headline numbers."""

from typing import Any

from experiments.reproduce import Headline, Step

TAKES = "14 minutes"
NEEDS: dict[str, Any] = {"gpus": 1, "gpu_gib": 70, "packages": ("transformers", "accelerate", "mamba_ssm")}
STEPS = [
    Step("integration.yaml", small=("rounds=1", "steps=10", "arms=[padded,flattened,patched]"), **NEEDS),
    Step("trainer.yaml", small=("rounds=1", "only=[mamba2,bamba]"), **NEEDS),
]
OVER = ("padded", "grouped", "grouped-8", "flattened", "flattened-8")
ROWS = [
    *(("{}, non-padding tokens/s", arm, "real_tokens_per_second") for arm in (*OVER, "patched", "slow-path")),
    *(("patched over {}", arm, "patched_over") for arm in OVER),
    *(("{}: off from single documents", arm, "difference") for arm in ("padded", "flattened", "patched")),
]
HEADLINES = [
    *(Headline(name.format(arm), "integration", {"arm": arm}, column) for name, arm, column in ROWS),
    *(
        Headline(f"{model}: packed over {arm}", "trainer", {"model": model}, f"over_{arm}")
        for model in ("mamba", "falcon_mamba", "zamba", "mamba2", "bamba", "granitemoehybrid", "nemotron_h", "zamba2")
        for arm in ("padded", "grouped")
    ),
]
