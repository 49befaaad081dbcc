"""Steps that make the records, and the numbers beside the paper's."""

from packmamba.reproduce import Headline, Step

_TINY = "overrides=[model.d_model=64,model.n_layer=2,model.vocab_size=256]"
_SMALL: tuple[str, ...] = ("models=[130m]", "dtypes=[float32]", _TINY, "length_model=130m", "lengths=[57,256]")
_SMALL += ("calls=2", "slots=2048", "documents=64", "arms.packed.row_length=2048")
_SMALL += ("packed_documents=20000", "rounds=2")
TAKES = "6 minutes"
STEPS = [
    Step("paper.yaml", small=_SMALL, gpus=1, gpu_gib=75, packages=("mamba_ssm", "causal_conv1d"), small_on_cpu=True),
]


def _speed(size: str, paper: str) -> Headline:
    row = {"what": "packed over one document at a time", "size": size, "dtype": "bfloat16"}
    return Headline(f"{size}: packed over one document at a time", "paper", row, "here", paper=paper)


HEADLINES = [
    _speed("130m", "up to 5.05x"),
    _speed("1.4b", "3.06x"),
    _speed("2.8b", "2.62x"),
    Headline(
        "1.4b: all kernels, packed over one at a time", "paper",
        {"what": "all kernels, the host never waited for", "size": "1.4b", "dtype": "bfloat16"}, "here", paper="3.91x",
    ),
    Headline("padding, received order", "paper", {"what": "padding, documents as received"}, "here", paper="19.1 %"),
    Headline("padding, greedy", "paper", {"what": "padding, greedy packing"}, "here", paper="0.41 %"),
]  # fmt: skip
