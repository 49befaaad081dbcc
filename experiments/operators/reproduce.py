"""List the steps that make the records, and the README's headline numbers."""

from experiments.reproduce import Headline, Step

SMALL_SHAPES = "shapes=['16384,4096,documents-2k']"
PEERS = ("mamba_ssm", "causal_conv1d")
STEPS = [
    Step(
        "operators.yaml",
        small=("tokens=1024", "channels=128", "conv_tokens=2048", "conv_channels=512", "rounds=11", "slow_rounds=2"),
        packages=("transformers",),
    ),
    Step("training_step.yaml", small=("throughput_rounds=3",)),
    Step("gpu_operators.yaml", small=(SMALL_SHAPES,), gpus=1, gpu_gib=20, packages=PEERS),
    Step("gpu_float32.yaml", small=(SMALL_SHAPES,), gpus=1, gpu_gib=20, packages=PEERS),
]


def _cpu(name: str, operator: str, column: str, implementation: str = "compiled, public operator") -> Headline:
    return Headline(f"CPU: {name}", f"operators-{operator}", {"implementation": implementation}, column)


def _gpu(name: str, table: str, column: str, channels: int = 4096) -> Headline:
    row = {"tokens": 16384, "channels": channels, "documents": "documents-2k"}
    return Headline(f"GPU: {name}", table, row, column)


HEADLINES = [
    _cpu("the scan (ms)", "ssm-pack", "ms_median"),
    _cpu("the scan over its arithmetic bound", "ssm-pack", "times_limit"),
    _cpu("transformers' slow path over the scan", "ssm-pack", "speedup"),
    _cpu("the convolution over its copy bound", "conv1d-pack", "times_limit"),
    Headline("CPU: a training step, packed over single", "throughput", {"arm": "packed-reset"}, "speedup"),
    _gpu("mamba-ssm, not packed, over our scan", "gpu-scan", "mamba_ssm_unpacked"),
    _gpu("mamba-ssm, padded to 2048, over our scan", "gpu-scan", "mamba_ssm_padded"),
    _gpu("our scan over the hardware's limit", "gpu-scan", "times_limit"),
    _gpu("our convolution forward, share of copy bandwidth", "gpu-conv", "forward_share"),
    _gpu("a block with ours: the scan (ms, share)", "gpu-bottleneck", "scan_share"),
]
