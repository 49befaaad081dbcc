"""What makes the experiment's records, and the numbers that its README rests on."""

from packmamba.experiments import Headline, Step

PEERS = ("mamba_ssm", "causal_conv1d")
_STEPS_OF_2_8B = "step_arms=[single,padded-2048,packed-16384-best_fit,packed-16384-best_fit-graph]"
STEPS = [
    Step(
        "speedup.yaml", ("models=[130m]", "rounds=5"), ("documents=1024", "rounds=2", "single_batches=2"), 1, 40, PEERS
    ),
    Step("speedup.yaml", ("models=[1.4b]",), ("documents=1024", "rounds=2", "single_batches=2"), 1, 75, PEERS),
    Step(
        "speedup.yaml",
        ("models=[2.8b]", _STEPS_OF_2_8B),
        ("documents=1024", "rounds=2", "single_batches=2"),
        1,
        130,
        PEERS,
    ),
    Step("multi_gpu.yaml", (), ("documents=1024", "rounds=2"), 4, 75),
]

_PACKED, _GRAPH = "packed-16384-best_fit", "packed-16384-best_fit-graph"
_SIZES = {"130m": "", "1.4b": "3.06x", "2.8b": "2.62x"}


def _each(name: str, column: str, arm: str = _PACKED, papers: bool = False) -> list[Headline]:
    return [
        Headline(f"{size}: {name}", "headline", {"model": size, "arm": arm}, column, paper=paper if papers else "")
        for size, paper in _SIZES.items()
    ]


HEADLINES = [
    *_each("packed, real tokens/s", "real_tokens_per_second"),
    *_each("packed over mamba-ssm one document at a time", "over_mamba_ssm_single", papers=True),
    *_each("the same, if that never waited for the host", "over_mamba_ssm_single_kernels"),
    *_each("packed over mamba-ssm on the same rows, which leaks there", "over_mamba_ssm_packed"),
    *_each("packed over single, both as CUDA graphs", "over_single", _GRAPH),
    *_each("packed over padded to 2048", "over_padded"),
    *_each("optimizer steps over the bare loop", "steps_over_bare"),
    Headline(
        "1.4b: sorted into batches over packed", "arms-1.4b", {"arm": "padded-buckets"}, "real_tokens_per_second",
        {"arm": _PACKED},
    ),
    Headline("1.4b: a packed batch outside matrix products, scan and conv", "breakdown",
             {"model": "1.4b", "arm": _PACKED, "part": "forward, backward"}, "outside"),
    Headline("1.4b: DDP on two GPUs over one", "multi-gpu-1.4b", {"strategy": "ddp", "devices": 2}, "over_one"),
    Headline("1.4b: DDP on four GPUs over one", "multi-gpu-1.4b", {"strategy": "ddp", "devices": 4}, "over_one"),
    Headline("1.4b: FSDP2 on four GPUs over one", "multi-gpu-1.4b", {"strategy": "fsdp2", "devices": 4}, "over_one"),
    Headline("130m: rows of 131072 over rows of 16384", "growth-row-length", {"row_length": 131072}, "over_16384"),
]  # fmt: skip
