"""Steps that make the records, and the numbers beside the paper's."""

from experiments.reproduce import Headline, Step

_TINY = "overrides=[model.d_model=64,model.n_layer=2,model.vocab_size=256]"
_SMALL: tuple[str, ...] = ("models=[130m]", "dtypes=[float32]", _TINY, "length_model=130m", "lengths=[57,256]")
_SMALL += ("calls=2", "slots=2048", "documents=64", "arms.packed.row_length=2048")
_SMALL += ("packed_documents=20000", "rounds=2")
TAKES = "10 minutes"
STEPS = [
    Step("paper.yaml", small=_SMALL, gpus=1, gpu_gib=75, packages=("mamba_ssm", "causal_conv1d"), small_on_cpu=True)
]


def _number(name: str, what: str, paper: str, **row: str) -> Headline:
    return Headline(name, "paper", {"what": what, **row}, "here", paper=paper)


SPEEDS = {"130m": "up to 5.05x", "1.4b": "3.06x", "2.8b": "2.62x"}
ONE, KERNELS = "packed over one document at a time", "all kernels, the host never waited for"
HEADLINES = [
    *(_number(f"{size}: {ONE}", ONE, paper, size=size, dtype="bfloat16") for size, paper in SPEEDS.items()),
    _number("1.4b: all kernels, packed over one at a time", KERNELS, "3.91x", size="1.4b", dtype="bfloat16"),
    _number(f"1.4b, float32: {ONE}", ONE, "3.06x", size="1.4b", dtype="float32"),
    _number("1.4b, float32: all kernels, packed over one at a time", KERNELS, "3.91x", size="1.4b", dtype="float32"),
    _number("padding, received order", "padding, documents as received", "19.1 %"),
    _number("padding, greedy", "padding, greedy packing", "0.41 %"),
]
