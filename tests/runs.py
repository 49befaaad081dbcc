"""A tiny corpus and tiny runs that training tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from packmamba.config import Config, resolve, to_dict
from packmamba.lab.callbacks import Stopped, checkpoints
from packmamba.lab.fit import fit
from packmamba.lab.run_id import run_folder
from packmamba.training.datamodule import PackedDataModule, StepDataset

# One-token documents, documents longer than a row (pieces, or continuations), and everything
# between.
LENGTHS = [1, 2, 30, 7, 1, 55, 16, 3, 24, 12, 5, 1, 9, 40, 17]


def write_documents(folder: Path) -> Path:
    """A JSON-lines file of 60 documents of these lengths in bytes."""
    rng = np.random.default_rng(0)
    path = folder / "documents.jsonl"
    if not path.is_file():
        texts = ["".join(rng.choice(list("abcdefgh"), n)) for n in LENGTHS * 4]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


TINY = """name=tiny data.source=jsonl data.begin_token=null data.end_token=null data.validation_fraction=0.2
    data.row_length=24 data.overlong=split data.tokens_per_step=96 data.cut_at_steps=false data.max_tokens_per_batch=72
    model.d_model=8 model.n_layer=2 model.d_state=4 optimizer.warmup_steps=2 trainer.max_steps=6 trainer.validate_every=3
    trainer.checkpoint_every=2 trainer.log_every=1 trainer.accelerator=cpu trainer.loggers=[]""".split()


def tiny_config(folder: Path, *overrides: str) -> Config:
    """Rows of 24 slots, steps of about 96 tokens, forward passes of at most 72 slots: several
    batches a step.
    """
    places = [f"runs_dir={folder}/runs", f"data.path={write_documents(folder)}", f"data.cache_dir={folder}/cache"]
    keys = OmegaConf.from_dotlist([*TINY, *places, *overrides])
    # ``load_config`` makes a layer of each key, which takes 0.1 s
    return resolve(Config, [(keys, "tiny")])


def data_of(config: Config) -> PackedDataModule:
    """Return a run's data module, set up without a Trainer."""
    data = PackedDataModule.from_config(config, progress=False)
    data.setup()
    return data


def gradients_of_ranks(module, data, ranks: int, step: int) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """Sum the gradients of ranks, as all-reduce does; return the loss and the number of targets,
    too.
    """
    module.zero_grad()
    shares = [StepDataset(data.schedule(ranks), rank)[step] for rank in range(ranks)]
    loss = sum(module.accumulate(share, torch.Tensor.backward) for share in shares)
    (targets,) = {share.num_targets for share in shares}
    return [parameter.grad.clone() for parameter in module.parameters()], loss, targets


SCHEMES = {
    "single": ["data.strategy=single"],
    "padded": ["data.strategy=padded"],
    "padded to the longest": ["data.strategy=padded", "data.max_tokens_per_batch=1000"],
    "packed": ["data.strategy=greedy"],
    "packed in order": ["data.strategy=next_fit"],
}
CARRY = ["data.strategy=concat_split", "data.streams=3", "trainer.boundary=carry"]


def write_config(path: Path, config: Config) -> Path:
    path.write_text(yaml.safe_dump(to_dict(config)))
    return path


def final_state(config: Config) -> dict[str, Any]:
    """The run's newest checkpoint."""
    *_, last = checkpoints(run_folder(config) / "checkpoints")
    return torch.load(last, weights_only=True)


def stop_at(config: Config, step: int) -> None:
    """Train, and stop after so many steps."""
    with pytest.raises(Stopped):
        fit(config, progress=False, stop=lambda metrics: metrics.totals["steps"] == step)


def assert_same_training(config: Config, other: Config, record: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights, random generators and the expected record's curves: to the bit."""
    a, b = final_state(config), final_state(other)
    torch.testing.assert_close(a["state_dict"], b["state_dict"], rtol=0, atol=0)
    assert torch.equal(a["rng"]["torch"], b["rng"]["torch"])
    assert (a["rng"]["python"], a["rng"]["numpy"]) == (b["rng"]["python"], b["rng"]["numpy"])
    curves = {name: points for name, points in losses_of(record).items() if name in expected["curves"]}
    assert curves == losses_of(expected)


def losses_of(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The record's curves without times."""
    curves = record["curves"].items()
    return {name: [{k: v for k, v in point.items() if k != "seconds"} for point in points] for name, points in curves}
