"""What makes the experiment's records, and the numbers that its README rests on."""

from packmamba.experiments import Headline, Step

PEERS = ("mamba_ssm", "causal_conv1d")
STEPS = [
    Step(
        "operators.yaml",
        small=("tokens=1024", "channels=128", "conv_tokens=2048", "conv_channels=512", "rounds=11", "slow_rounds=1"),
        packages=("transformers",),
    ),
    Step("training_step.yaml", small=("throughput_rounds=3",)),
    Step("gpu_operators.yaml", small=("shapes=['16384,4096,documents-2k']",), gpus=1, gpu_gib=20, packages=PEERS),
]

_PUBLIC = {"implementation": "compiled, public operator"}
_SHAPE = {"tokens": 16384, "channels": 4096, "documents": "documents-2k"}
HEADLINES = [
    Headline("CPU: scan's time over its arithmetic bound", "operators-ssm-pack", _PUBLIC, "times_limit"),
    Headline("CPU: transformers' slow path's time over the scan's", "operators-ssm-pack", _PUBLIC, "speedup"),
    Headline("CPU: convolution's time over its copy bound", "operators-conv1d-pack", _PUBLIC, "times_limit"),
    Headline("CPU: a training step, packed over single", "throughput", {"arm": "packed-reset"}, "speedup"),
    Headline(
        "CPU: a training step, packed over padded", "throughput", {"arm": "packed-reset"}, "speedup", {"arm": "padded"}
    ),
    Headline("GPU: mamba-ssm's scan, not packed, over ours", "gpu-scan", _SHAPE, "mamba_ssm_unpacked"),
    Headline("GPU: mamba-ssm's scan, document by document, over ours", "gpu-scan", _SHAPE, "mamba_ssm_by_document"),
    Headline("GPU: Mamba-2's SSD over our scan", "gpu-scan", _SHAPE, "mamba2_ssd"),
    Headline("GPU: scan with an index per token over the schedule", "gpu-scan", _SHAPE, "scan_indices"),
    Headline("GPU: scan's time over the hardware's limit", "gpu-scan", _SHAPE, "times_limit"),
    Headline("GPU: convolution forward, share of copy bandwidth", "gpu-conv", _SHAPE, "forward_share"),
    Headline("GPU: convolution backward, share of copy bandwidth", "gpu-conv", _SHAPE, "backward_share"),
]
