"""Values of 2e9bfb9 that are the same on every machine: plans, documents of steps, synthetic
corpora, float64 losses.

In a checkout, ``PYTHONPATH=. python tests/test_golden.py`` records them. tests/golden.py compares
more.
"""

import json
import tempfile
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf

from golden import CONFIGURATIONS, arguments, command, digest, plans, record_of, run_folder
from operators import slow_unless
from packmamba import MambaLM
from packmamba.config import Config, resolve
from packmamba.training.datamodule import PackedDataModule

DATA = Path(__file__).parent / "data" / "golden.json"
GOLDEN = json.loads(DATA.read_text()) if DATA.is_file() else {}
SMALL = (
    "data.source=synthetic data.distribution=short data.num_documents=200 data.vocab_size=60 data.row_length=48 "
    "data.tokens_per_step=192 data.max_tokens_per_batch=96 model.d_model=8 trainer.max_steps=4 trainer.validate_every=2 "
    "trainer.precision=64-true ops.backend=reference data.validation_documents=5"
)
NOT_HERE = ("workers", "bfloat16", "reference", "deterministic", "inner", "block", "evaluated", "start")
RUNS = {name: f"{SMALL} {keys}" for name, keys in CONFIGURATIONS["runs"].items() if name not in NOT_HERE}
STEPS_ALONE = "next_fit first_fit best_fit_decreasing spfhp stream truncate longest cut".split()
LOSSES = [name for name in RUNS if name not in STEPS_ALONE and ", " not in name]


def steps(folder, name):
    """Hashes of the tokens, targets and layouts of each of a run's first steps."""
    # one layer: one a key takes 0.1 s
    keys = OmegaConf.from_dotlist(arguments(folder, name, RUNS[name])[1:])
    data = PackedDataModule.from_config(resolve(Config, [(keys, name)]))
    data.setup()
    results = [data.corpora.corpus_hash]
    for number in reversed(range(4)):
        layouts = [(b, b.layout) for b in data.steps[number].batches]
        parts = ((b.tokens, b.targets * b.loss_mask, of.position_indices, of.seq_idx) for b, of in layouts)
        results.insert(0, digest(*chain(*parts)))
    return results


def losses(folder, name):
    """Training and validation losses in float64 of the reference backend, from weights that are the
    same on every machine.
    """
    make = MambaLM.__init__

    def make_exactly(model, *arguments, **keys):
        make(model, *arguments, **keys)
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.data = 2 * torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) - 1

    with mock.patch.object(MambaLM, "__init__", make_exactly):
        assert not command(*arguments(folder, name, RUNS[name]))
    curves = record_of(run_folder(folder, name))["curves"]
    return [point["loss"] for part in ("train", "validation") for point in curves[part]]


def test_plans_are_as_recorded(tmp_path):
    assert plans(tmp_path) == GOLDEN["plans"]


@pytest.mark.parametrize("name", RUNS)
def test_documents_of_steps_are_as_recorded(name, tmp_path):
    assert steps(tmp_path, name) == GOLDEN["steps"][name]


@pytest.mark.parametrize("name", slow_unless(("greedy", "leak", "carry"), LOSSES))
def test_losses_are_as_recorded(name, tmp_path):
    assert losses(tmp_path, name) == pytest.approx(GOLDEN["losses"][name], rel=1e-12, abs=0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        found = {"plans": plans(folder), "steps": {name: steps(folder, name) for name in RUNS}}
        found["losses"] = {name: losses(folder, name) for name in LOSSES}
    DATA.write_text(json.dumps(found, indent=1) + "\n")
