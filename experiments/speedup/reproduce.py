"""What makes the experiment's records, and the numbers that its README rests on."""

from packmamba.experiments import Headline, Step

PEERS = ("mamba_ssm", "causal_conv1d")
_SMALL = ("documents=1024", "rounds=2")
# As graphs, steps of these do not fit beside the others at 2.8B.
_STEPS_OF_2_8B = (
    "arms.single-graph.parts=[forward_backward,breakdown]", "arms.padded-2048-graph.parts=[forward_backward]",
)  # fmt: skip
STEPS = [
    Step("speedup.yaml", ("models=[130m]", "rounds=5"), _SMALL, gpus=1, gpu_gib=40, packages=PEERS),
    Step("speedup.yaml", ("models=[1.4b]",), _SMALL, gpus=1, gpu_gib=75, packages=PEERS),
    Step("speedup.yaml", ("models=[2.8b]", *_STEPS_OF_2_8B), _SMALL, gpus=1, gpu_gib=130, packages=PEERS),
    Step("multi_gpu.yaml", (), _SMALL, gpus=4, gpu_gib=75),
]

PACKED, GRAPH = "packed-16384-best_fit", "packed-16384-best_fit-graph"
PAPER = {"130m": "", "1.4b": "3.06x", "2.8b": "2.62x"}


def _each(name: str, column: str, arm: str = PACKED, paper: bool = False) -> list[Headline]:
    """Of the headline table, for each model size."""
    return [
        Headline(f"{size.upper()}: {name}", "headline", {"model": size, "arm": arm}, column, paper=PAPER[size] * paper)
        for size in PAPER
    ]


def _time(name: str, layers: str, arm: str) -> list[Headline]:
    return [Headline(f"{size.upper()}: {name}", f"arms-{size}", {"layers": layers, "arm": arm}, "ms") for size in PAPER]


def _several(name: str, strategy: str, devices: int) -> Headline:
    return Headline(f"1.4B: {name}", "multi-gpu-1.4b", {"strategy": strategy, "devices": devices}, "over_one")


_BATCH = {"model": "1.4b", "arm": PACKED, "part": "forward, backward"}
_STEP = {"model": "1.4b", "arm": PACKED, "part": "optimizer step"}
HEADLINES = [
    *_each("real tokens/s", "real_tokens_per_second"),
    *_each("share of the rate of large matrix products", "model_flops_utilisation"),
    *_each("over mamba-ssm, one document at a time", "over_mamba_ssm_single", paper=True),
    *_each("over the same, if the GPU never waited for its host", "over_mamba_ssm_single_kernels"),
    *_each("over mamba-ssm on the same rows, where it leaks", "over_mamba_ssm_packed"),
    *_each("over our own single", "over_single"),
    *_each("over our own single, both as CUDA graphs", "over_single", GRAPH),
    *_each("over padded to 2048", "over_padded"),
    *_each("whole optimizer steps over forward and backward alone", "steps_over_bare"),
    *_time("a packed batch, forward and backward (ms)", "ours, equal terms", PACKED),
    *_time("a document, mamba-ssm (ms)", "mamba-ssm, today", "single"),
    Headline("1.4B: sorted into batches, over packed", "arms-1.4b", {"arm": "padded-buckets"}, "real_tokens_per_second",
             {"layers": "ours, equal terms", "arm": PACKED}),
    Headline("1.4B: of a packed batch, outside matrix products, scan and convolution", "breakdown", _BATCH, "outside"),
    Headline("1.4B: of an optimizer step, outside matrix products, scan and convolution", "breakdown", _STEP, "outside"),
    _several("two GPUs over one, DDP", "ddp", 2),
    _several("four GPUs over one, DDP", "ddp", 4),
    _several("four GPUs over one, FSDP2", "fsdp2", 4),
    Headline("130M: rows of 131072 over rows of 16384", "growth-row-length", {"row_length": 131072}, "over_16384"),
]  # fmt: skip
