"""List the steps that make the records, and the README's headline numbers."""

from experiments.reproduce import Headline, Step

PEERS = ("mamba_ssm", "causal_conv1d")
_SMALL = ("documents=1024", "rounds=2")
# As graphs, steps of these do not fit beside the others at 2.8B.
_STEPS_OF_2_8B = (
    "arms.single-graph.parts=[forward_backward,breakdown]",
    "arms.padded-2048-graph.parts=[forward_backward]",
)
STEPS = [
    Step("speedup.yaml", ("models=[130m]", "rounds=5"), _SMALL, gpus=1, gpu_gib=40, packages=PEERS),
    Step("speedup.yaml", ("models=[1.4b]",), _SMALL, gpus=1, gpu_gib=75, packages=PEERS),
    Step("speedup.yaml", ("models=[2.8b]", *_STEPS_OF_2_8B), _SMALL, gpus=1, gpu_gib=130, packages=PEERS),
    Step("sorted.yaml", (), ("models=[130m]", *_SMALL), gpus=1, gpu_gib=75, packages=PEERS),
]

PACKED, GRAPH = "packed-16384-best_fit_decreasing", "packed-16384-best_fit_decreasing-graph"
PAPER = {"130m": "", "1.4b": "3.06x", "2.8b": "2.62x"}


def _each(name: str, column: str, arm: str = PACKED, paper: bool = False) -> list[Headline]:
    """List a headline number for each model size."""
    return [
        Headline(f"{size.upper()}: {name}", "headline", {"model": size, "arm": arm}, column, paper=PAPER[size] * paper)
        for size in PAPER
    ]


_BATCH = {"model": "1.4b", "arm": PACKED, "part": "forward, backward"}
OUTSIDE = "1.4B: of a packed batch, outside matrix products, scan and convolution"
HEADLINES = [
    *_each("non-padding tokens/s", "real_tokens_per_second"),
    *_each("MFU, 6 N a token", "model_flops_utilisation"),
    *_each("over mamba-ssm, one document at a time", "over_mamba_ssm_single", paper=True),
    *_each("over the same, if the GPU never waited for its host", "over_mamba_ssm_single_kernels"),
    *_each("over mamba-ssm on the same rows, where it leaks", "over_mamba_ssm_packed"),
    *_each("over our own single, both as CUDA graphs", "over_single", GRAPH),
    *_each("over padded to 2048", "over_padded"),
    *_each("whole optimizer steps over forward and backward alone", "steps_over_bare"),
    Headline(OUTSIDE, "breakdown", _BATCH, "outside"),
    *(
        Headline(f"{size.upper()}: over mamba-ssm, sorted{name}", "sorted", {"model": size, "arm": arm}, "packed_over")
        for size in ("130m", "1.4b")
        for arm, name in (("mamba-ssm-padded-sorted-8", ", multiples of 8"), ("mamba-ssm-padded-sorted", ""))
    ),
]
