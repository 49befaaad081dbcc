"""A tiny case of the whole-model benches that their tests share."""

import torch
from configured import configured

from experiments.speedup import whole_models as bench
from experiments.speedup.config import Config
from experiments.speedup.model import Model
from packmamba.records import read_records

BARE, BREAKDOWN, STEPS = "forward_backward", "breakdown", "steps"
ARMS = {
    "single": {"strategy": "single", "parts": [BARE, STEPS]},
    "padded-256": {"strategy": "padded", "row_length": 256, "parts": [BARE, BREAKDOWN, STEPS]},
    "padded-longest": {"strategy": "padded"},
    "padded-buckets": {"strategy": "padded", "sorted_by_length": True},
    "packed-512-in_order": {"strategy": "in_order", "row_length": 512},
    "packed-512-best_fit": {"strategy": "best_fit", "row_length": 512, "parts": [BARE, BREAKDOWN, STEPS]},
}
TINY = {
    "models": ["130m"],
    "overrides": ["model.n_layer=2", "model.d_model=16", "model.d_state=4", "model.vocab_size=60"],
    "arms": ARMS,
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
    "num_workers": 0,
}


def some(*names, parts=None, **others):
    """Some of the arms and others, all taking part in ``parts`` if these are given."""
    chosen = {name: ARMS[name] for name in names} | others
    return chosen if parts is None else {name: arm | {"parts": parts} for name, arm in chosen.items()}


def tiny_model(path, **changes):
    return Model(configured(Config, TINY, **changes), "130m", torch.device("cpu"), path, False)


def run(tmp_path, **changes):
    bench.run(configured(Config, TINY, **changes), tmp_path / "records" / "speedup.jsonl", progress=False)
    return read_records(tmp_path)
