"""The leakcheck of a run: it waits for documents side by side, stops a leak, and says what it did
not check.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import leaky
import run
from models import build
from packmamba import SequenceLayout
from packmamba.data.batch import PackedBatch
from packmamba.errors import UserError
from packmamba.isolation.batch import check_packed, cut_rows
from packmamba.lab import cli
from packmamba.lab.callbacks import why_unchecked
from packmamba.lab.fit import fit
from packmamba.lab.records import read_records
from packmamba.lab.run_id import run_folder
from packmamba.nn.mixers import MIXERS
from packmamba.testing import Found, LightningLeakCheck
from packmamba.training.boundary import BOUNDARIES, Boundary, Leak, Reset
from packmamba.training.datamodule import PackedDataModule, StepDataset
from processes import fork_ranks, statuses
from runs import CARRY, assert_same_training, stop_at, tiny_config, write_config
from written import write_lines

LEAKY = ["model.mixer=leaky", "plugins=[leaky]"]
# document lengths, keys, and whether micro-batches of the first steps have documents side by side
ROWS = {
    "long documents, split at the row": ([72] * 20 + [36] * 12, ["seed=2"], ".. .. x"),
    "one document a row at first": ([24] * 40 + [12] * 8, ["seed=5"], ".. .. .x"),
    "only in the last of several micro-batches": ([24] * 40 + [12] * 8, ["seed=4", "data.max_tokens_per_batch=24"], "...x"),
}  # fmt: skip


def of_lengths(folder, lengths, *keys):
    """A tiny run on documents of these lengths, in rows of 24."""
    rng = np.random.default_rng(0)
    path = write_lines(folder / "lengths.jsonl", ["".join(rng.choice(list("abcdefgh"), n)) for n in lengths])
    return tiny_config(folder, f"data.path={path}", *keys)


def neighbours(config, steps, rank=0, ranks=1):
    """Mark a rank's micro-batches of the first steps by x where a row holds two documents."""
    data = PackedDataModule.from_config(config, progress=False)
    dataset = StepDataset(data.schedule(ranks), rank)
    return " ".join("".join(".x"[batch.layout.packed] for batch in dataset[step].batches) for step in range(steps))


@pytest.mark.parametrize("name", ROWS)
def test_a_leaking_mixer_ends_the_run_at_the_first_step_that_shows_it(tmp_path, capsys, name):
    lengths, keys, pattern = ROWS[name]
    config = of_lengths(tmp_path, lengths, *keys, *LEAKY)
    assert neighbours(config, steps=len(pattern.split())) == pattern
    assert cli.main(["train", str(write_config(tmp_path / "run.yaml", config))]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "leak" in last and "trainer.boundary=reset" in last and "backbone.layers.0 (Block)" in last
    assert f"step {len(pattern.split())}:" in last


@pytest.mark.slow
def test_a_leak_on_one_rank_ends_all_alike(tmp_path):
    lengths, keys, _ = ROWS["only in the last of several micro-batches"]
    config = of_lengths(tmp_path, lengths, *keys, *LEAKY, "trainer.devices=2", "trainer.strategy=ddp")
    assert [neighbours(config, 1, rank, ranks=2) for rank in (0, 1)] == ["..", ".x"]
    path, output = write_config(tmp_path / "run.yaml", config), tmp_path / "output.txt"
    ranks = fork_ranks(2, run.main, ["train", str(path)], output=output)
    assert statuses(*ranks, timeout=100) == [1, 1], output.read_text()
    # both may stand on one line
    errors = re.findall(r"error: (.*?isolated documents.*?in a row)", output.read_text())
    assert len(errors) == 2 and errors[0] == errors[1] and "rank 1" in errors[0]


def test_a_run_without_neighbours_ends_well_and_says_unchecked(tmp_path, capsys):
    config = of_lengths(tmp_path, [24] * 40, *LEAKY, "trainer.max_steps=2")
    assert cli.main(["train", str(write_config(tmp_path / "run.yaml", config))]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Leakcheck: unchecked")
    (record,) = read_records(run_folder(config))
    assert record["leakcheck"].startswith("unchecked")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (CARRY, "trainer.boundary=carry"),
        (["trainer.boundary=leak_conv"], "trainer.boundary=leak_conv"),
        (["trainer.leakcheck_every=null"], "trainer.leakcheck_every=null"),
    ],
)
def test_where_the_check_does_not_apply_the_record_says_why(tmp_path, keys, reason):
    assert why_unchecked(tiny_config(tmp_path, *keys).trainer).startswith(reason)


class Silent(leaky.Leaky):
    """Lets nothing through until the second step, as projections that begin at zero do."""

    def initialise_in_stack(self, n_layer):
        torch.nn.init.zeros_(self.projection.weight)


def test_a_mixer_that_mixes_nothing_yet_is_checked_later(tmp_path, monkeypatch):
    monkeypatch.setitem(MIXERS, "silent", Silent)
    with pytest.warns(UserWarning, match="no leak could show"), pytest.raises(UserError, match="step 2: .*leak"):
        fit(tiny_config(tmp_path, "model.mixer=silent"), progress=False)


@pytest.fixture
def checked(monkeypatch):
    """Steps at which a run's check is made, from 0; it fails at those of ``checked.failing``."""

    class Steps(list):
        failing = ()

    steps, check_step = Steps(), LightningLeakCheck.check_step

    def check(callback, *arguments):
        steps.append(callback.step)
        if callback.step in steps.failing:
            return Found.UNCHECKED, "torch.OutOfMemoryError: all is used"
        return check_step(callback, *arguments)

    monkeypatch.setattr(LightningLeakCheck, "check_step", check)
    return steps


@pytest.mark.parametrize(
    ("every", "failing", "expected", "result"),
    [
        ("0", [], [0], "checked at step 1"),
        ("3", [], [0, 3], "checked at step 4"),
        ("3", [3], [0, 3], "checked at step 1; unchecked at step 4: torch.OutOfMemoryError"),
        ("0", range(9), [0, 1, 2, 4], "unchecked: torch.OutOfMemoryError"),
    ],
)
@pytest.mark.filterwarnings("ignore:leakcheck")
def test_steps_that_are_checked(tmp_path, checked, every, failing, expected, result):
    """A check that failed is repeated after twice the steps."""
    checked.failing = failing
    record = fit(tiny_config(tmp_path, f"trainer.leakcheck_every={every}"), progress=False)
    assert checked == expected and record["leakcheck"].startswith(result)


def test_an_error_of_the_check_is_said_and_ends_no_training(tmp_path, monkeypatch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("all is used")

    monkeypatch.setattr("packmamba.testing.check_packed", out_of_memory)
    with pytest.warns(UserWarning, match="nothing was checked: OutOfMemoryError"):
        record = fit(tiny_config(tmp_path, "trainer.max_steps=1"), progress=False)
    assert record["leakcheck"] == "unchecked: OutOfMemoryError: all is used"


@pytest.mark.parametrize(("lengths", "expected"), [([9, 3] * 30, [0]), ([24] * 40 + [12] * 8, [2])])
def test_a_resumed_run_is_checked_if_it_was_not_before(tmp_path, checked, lengths, expected):
    config = of_lengths(tmp_path, lengths, "seed=5", "trainer.checkpoint_every=1")
    for steps in (1, 4):
        stop_at(config, steps)
    assert checked == expected
    assert fit(config, progress=False)["leakcheck"] == f"checked at step {expected[0] + 1}"
    assert checked == expected


@pytest.mark.parametrize("keys", [[], CARRY, ["model.recompute=block"]], ids=["reset", "carry", "recompute"])
def test_leakcheck_changes_no_bit_of_training(tmp_path, keys):
    plain = tiny_config(tmp_path, "trainer.leakcheck_every=null", *keys)
    with_check = tiny_config(tmp_path, "trainer.leakcheck_every=2", f"runs_dir={tmp_path}/checked", *keys)
    expected, record = (fit(config, progress=False) for config in (plain, with_check))
    assert_same_training(with_check, plain, record, expected)


class Lying(Boundary):
    """Leaks, and says that nothing crosses."""

    def hidden(self, model, batch):
        return Leak().hidden(model, batch)


class Gradients(Boundary):
    """Lets gradients cross, and nothing else."""

    def hidden(self, model, batch):
        leaked = Leak().hidden(model, batch)
        return super().hidden(model, batch) + (leaked - leaked.detach())


def batch_of(lengths, row_length=14):
    layout = SequenceLayout.from_lengths(lengths, row_length)
    tokens = torch.randint(23, layout.shape, generator=torch.Generator().manual_seed(0))
    return PackedBatch(tokens, tokens, tokens >= 0, layout)


@pytest.mark.parametrize(("scheme", "what"), [(Lying, "outputs that move"), (Gradients, "gradients across")])
def test_a_scheme_that_leaks_is_found(scheme, what):
    model = build(dtype=torch.float32)
    with pytest.raises(UserError, match=what):
        check_packed(model, scheme(), batch_of([[5, 1, 6], [9, 3], [4]]))
    assert not check_packed(model, scheme(), batch_of([[5], [3], []]))
    assert check_packed(model, Reset(), batch_of([[5, 1, 6], [9, 3], [4]]))


def test_a_leak_ends_the_run_and_a_tight_one_warns_of_nothing(tmp_path, monkeypatch, recwarn):
    assert fit(tiny_config(tmp_path), progress=False)["leakcheck"] == "checked at step 1"
    monkeypatch.setattr(BOUNDARIES["reset"], "hidden", Lying.hidden)
    with pytest.raises(UserError, match=r"trainer\.boundary=reset: .*expected isolated documents"):
        fit(tiny_config(tmp_path, "seed=1"), progress=False)
    fit(tiny_config(tmp_path, "seed=1", "trainer.leakcheck_every=null"), progress=False)
    assert not recwarn.list


def test_rows_are_cut_to_those_with_neighbours_around_a_boundary():
    batch = batch_of([[100], [40, 60], [30, 30, 40]], row_length=100)
    assert cut_rows(batch, 300) is batch
    two_rows = cut_rows(batch, 200)
    assert two_rows.layout == SequenceLayout.from_lengths([[40, 60], [30, 30, 40]], 100)
    assert torch.equal(two_rows.tokens, batch.tokens[1:])
    window = cut_rows(batch, 16)
    assert window.layout == SequenceLayout.from_lengths([[8, 8]], 16)
    assert torch.equal(window.tokens[0], batch.tokens[1, 32:48])
    with pytest.raises(UserError, match="outputs that move"):
        check_packed(build(dtype=torch.float32), Lying(), batch, max_slots=16)


@pytest.mark.filterwarnings("ignore:leakcheck")
def test_a_finished_run_of_a_plugin_s_mixer_is_checked_by_the_command(tmp_path, capsys):
    config = of_lengths(tmp_path, [24] * 40, *LEAKY, "trainer.max_steps=1")
    fit(config, progress=False)
    assert cli.main(["leakcheck", str(run_folder(config)), "plugins=[leaky]"]) == 1
    assert "Documents leak" in capsys.readouterr().out
    assert cli.main(["leakcheck", str(run_folder(config)), "plugins=[nowhere]"]) == 2
