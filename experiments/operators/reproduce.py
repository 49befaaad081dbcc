"""What makes the experiment's records, and the numbers that its README rests on."""

from packmamba.reproduce import Headline, Step

PEERS = ("mamba_ssm", "causal_conv1d")
STEPS = [
    Step(
        "operators.yaml",
        small=("tokens=1024", "channels=128", "conv_tokens=2048", "conv_channels=512", "rounds=11", "slow_rounds=2"),
        packages=("transformers",),
    ),
    Step("training_step.yaml", small=("throughput_rounds=3",)),
    Step("gpu_operators.yaml", small=("shapes=['16384,4096,documents-2k']",), gpus=1, gpu_gib=20, packages=PEERS),
]


def _cpu(name: str, operator: str, column: str, implementation: str = "compiled, public operator") -> Headline:
    return Headline(f"CPU: {name}", f"operators-{operator}", {"implementation": implementation}, column)


def _gpu(name: str, table: str, column: str, channels: int = 4096) -> Headline:
    row = {"tokens": 16384, "channels": channels, "documents": "documents-2k"}
    return Headline(f"GPU: {name}", table, row, column)


_STEP = {"arm": "packed-reset"}
HEADLINES = [
    _cpu("the scan (ms)", "ssm-pack", "ms_median"),
    _cpu("the scan over its arithmetic bound", "ssm-pack", "times_limit"),
    _cpu("the scan over its arithmetic bound, memory at hand", "ssm-pack", "times_limit", "compiled, memory at hand"),
    _cpu("transformers' slow path over the scan", "ssm-pack", "speedup"),
    _cpu("the convolution (ms)", "conv1d-pack", "ms_median"),
    _cpu("the convolution over its copy bound", "conv1d-pack", "times_limit"),
    _cpu(
        "the convolution over its copy bound, memory at hand", "conv1d-pack", "times_limit", "compiled, memory at hand"
    ),
    Headline("CPU: a training step, packed over single", "throughput", _STEP, "speedup"),
    Headline("CPU: a training step, packed over padded", "throughput", _STEP, "speedup", {"arm": "padded"}),
    _gpu("mamba-ssm, not packed, over our scan", "gpu-scan", "mamba_ssm_unpacked"),
    _gpu("mamba-ssm, document by document, over our scan", "gpu-scan", "mamba_ssm_by_document"),
    _gpu("mamba-ssm, padded to 2048, over our scan", "gpu-scan", "mamba_ssm_padded"),
    _gpu("Mamba-2's SSD over our scan", "gpu-scan", "mamba2_ssd"),
    _gpu("our scan over the hardware's limit", "gpu-scan", "times_limit"),
    _gpu("our scan with an index per token over the schedule", "gpu-scan", "scan_indices"),
    _gpu("our convolution forward, share of copy bandwidth", "gpu-conv", "forward_share"),
    _gpu("our convolution backward, share of copy bandwidth", "gpu-conv", "backward_share"),
    _gpu("a block with the peers' kernels: the scan (ms, share)", "gpu-bottleneck", "peer_scan_share"),
    _gpu("a block with ours: the scan (ms, share)", "gpu-bottleneck", "scan_share"),
]
