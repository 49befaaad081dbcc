"""A tiny case of the whole-model benches that their tests share."""

from experiments.speedup import whole_models as bench
from packmamba.records import read_records

ARMS = ["single", "padded-256", "padded-longest", "padded-buckets", "packed-512-in_order", "packed-512-best_fit"]
TINY = {
    "models": ["130m"],
    "overrides": ["model.n_layer=2", "model.d_model=16", "model.d_state=4", "model.vocab_size=60"],
    "arms": ARMS,
    "breakdown_arms": ["padded-256", "packed-512-best_fit"],
    "step_arms": ["single", "padded-256", "packed-512-best_fit"],
    "distribution": "short",
    "documents": 100,
    "slots": 512,
    "batches": 2,
    "single_batches": 3,
    "rounds": 2,
    "dtype": "float32",
    "precision": "32-true",
    "peak_flops_per_second": 1e11,
    "row_lengths": [256, 512],
    "mean_lengths": [16, 64],
}


def run(tmp_path, **changes):
    bench.run({**TINY, **changes}, tmp_path / "records" / "speedup.jsonl", progress=False)
    return read_records(tmp_path)
