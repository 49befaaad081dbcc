"""A run is named by what decides its result: what leaves its name alone, how it is raised, names that it had before."""

import copy
import logging
import shutil

import pytest
import torch

from packmamba.config import ConfigError
from packmamba.records import append_record, read_records, write_sweep
from packmamba.report.summary import _BOOKKEEPING
from packmamba.report.training import training_tables
from packmamba.training.callbacks import Stopped
from packmamba.training.fit import fit
from packmamba.training.runs import NEUTRAL, decisive, names, record_path, records_of, run_folder, run_id
from packmamba.training.start import weights_path
from packmamba.training.sweep import load_sweep, run_sweep
from runs import final_state, losses_of, tiny_config, write_documents

KEYS = ["data.strategy=greedy", "evaluations=[parity]", "evaluation_examples=2", "trainer.evaluate_every=2"]
OTHER = ["data.num_workers=1", "trainer.checkpoint_every=3", "trainer.threads=1"]
"""What a run may be told when it goes on."""


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """A run of 8 steps at once, and one of the same schedule that ended after 4 and was raised; the folder of both."""
    folder = tmp_path_factory.mktemp("raised")
    whole = tiny_config(folder, *KEYS, f"runs_dir={folder}/whole", "trainer.max_steps=8")
    short = tiny_config(folder, *KEYS, "trainer.max_steps=4", "optimizer.schedule_steps=8")
    long = tiny_config(folder, *KEYS, *OTHER, "trainer.max_steps=8")
    return {
        name: (config, fit(config, progress=False))
        for name, config in zip("whole short long".split(), (whole, short, long))
    }


def having(config, **changes):
    """The configuration with other values of keys, section__key."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        section, key = name.split("__")
        setattr(getattr(config, section), key, value)
    return config


def test_a_name_holds_what_may_change_the_result_and_nothing_else(tmp_path):
    config = tiny_config(tmp_path)
    for changes in ({"data__num_workers": 3}, {"trainer__log_every": 7}, {"trainer__checkpoint_every": 9},
                    {"trainer__threads": 2}):  # fmt: skip
        assert run_folder(having(config, **changes)) == run_folder(config), changes
    for changes in ({"ops__backend": "reference"}, {"data__slots_per_batch": 48}, {"trainer__precision": "64-true"},
                    {"trainer__validate_every": 2},
                    {"optimizer__final_lr_fraction": 0.5}, {"trainer__max_steps": 7}):  # fmt: skip
        assert run_id(having(config, **changes)) != run_id(config), changes
    exact = having(config, trainer__deterministic=True, trainer__threads=1)
    assert run_id(exact) != run_id(having(exact, trainer__threads=2)), "bits are promised for as many threads"


def test_tables_do_not_tell_runs_apart_by_what_leaves_their_names_alone():
    assert set(NEUTRAL) <= set(_BOOKKEEPING)


def test_a_run_is_named_as_one_that_ends_with_its_schedule(tmp_path):
    config = tiny_config(tmp_path)
    whole, short = having(config, trainer__max_steps=8), having(config, optimizer__schedule_steps=8)
    assert run_folder(whole) == run_folder(short) and record_path(whole) != record_path(short)
    assert record_path(whole).stem == run_id(whole) and record_path(short).stem == f"{run_id(whole)}-6"
    steady = [having(config, optimizer__final_lr_fraction=1, trainer__max_steps=n) for n in (6, 8)]
    assert len({run_id(config) for config in steady}) == 1 and len({record_path(config) for config in steady}) == 2
    means = [having(config, trainer__average_snapshots=2) for config in (whole, short, *steady)]
    assert len({run_id(config) for config in means}) == 4, "the mean is of the weights before the last step"


@pytest.mark.slow
def test_a_raised_run_ends_as_one_that_was_as_long_from_the_start(raised):
    (whole, expected), (short, first), (long, second) = raised.values()
    assert run_folder(short) == run_folder(long) and record_path(short) != record_path(long)
    assert first["metrics"]["steps"] == 4 and second["metrics"]["steps"] == 8
    assert losses_of(second) == losses_of(expected)
    a, b = final_state(long)["state_dict"], final_state(whole)["state_dict"]
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert records_of(long) == {4: first, 8: second} == records_of(short)
    assert fit(short, progress=False) == first, "what it was asked before is not asked again"


def test_steps_that_a_run_has_gone_past_are_refused(raised):
    config = having(raised["short"][0], trainer__max_steps=6)
    with pytest.raises(
        ConfigError, match=r"^trainer.max_steps: expected at least 8, the steps that .* got 6; give another"
    ):
        fit(config, progress=False)


def test_another_schedule_is_another_run_and_says_so(raised, caplog):
    config = having(raised["whole"][0], trainer__max_steps=9)
    with caplog.at_level(logging.WARNING), pytest.raises(Stopped):
        fit(config, False, lambda history: history.totals["steps"] == 1)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == (
        f"This run begins at step 0: the learning rate of {run_folder(raised['whole'][0])} follows 8 steps. To go on from "
        "there, at its last learning rate, give optimizer.schedule_steps=8."
    )
    assert run_folder(config) != run_folder(raised["whole"][0])


def test_tables_take_the_steps_that_a_sweep_asks_for(raised, tmp_path):
    records = [raised["short"][1], raised["long"][1]]
    for record in records:
        append_record(tmp_path / "records" / "all.jsonl", record)
    (table,) = training_tables(read_records(tmp_path))
    assert len(table.rows) == 2 and "left out" not in " ".join(table.notes)
    write_sweep(tmp_path, "sweep", {"tiny": [0]}, steps={"tiny": 8})
    (table,) = training_tables(read_records(tmp_path))
    assert [row[0].text for row in table.rows] == ["tiny"]
    assert "Records after 4 steps are left out: the sweep asks for others." in table.notes


def under_its_old_name(config):
    """Moves what is there of a run to where it was when all keys were part of its name."""
    new, old = names(config.name, decisive(config))
    folder = run_folder(config).rename(run_folder(config).with_name(old.run))
    for path in (folder / "records").glob("*"):
        path.rename(path.with_name(f"{old.record}.jsonl"))
    return folder


def test_a_run_is_found_under_its_old_name(tmp_path):
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.max_steps=2", "trainer.checkpoint_every=1")
    with pytest.raises(Stopped):
        fit(config, progress=False, stop=lambda history: history.totals["steps"] == 1)
    folder = under_its_old_name(config)
    record = fit(config, progress=False)
    assert (
        run_folder(config) == folder == record_path(config).parents[1]
        and not (tmp_path / "runs" / run_id(config)).exists()
    )
    assert fit(config, progress=False) == record
    later = tiny_config(tmp_path, f"trainer.init_from={tmp_path}:tiny")
    (tmp_path / "records").mkdir()
    shutil.copy(record_path(config), tmp_path / "records")
    assert weights_path(later) == folder
    raised = having(config, trainer__max_steps=3, optimizer__schedule_steps=2)
    assert (
        run_folder(raised) == folder and fit(raised, progress=False)["curves"]["train"][:2] == record["curves"]["train"]
    )


@pytest.mark.slow
def test_a_sweep_may_be_raised_and_run_with_other_loaders(tmp_path):
    path = tmp_path / "sweep.yaml"
    keys = vars(tiny_config(tmp_path, f"data.path={write_documents(tmp_path)}").data)
    common = {f"data.{name}": keys[name] for name in ("source", "path", "cache_dir", "row_length", "overlong")}
    common |= {"model.d_model": 8, "model.n_layer": 1, "trainer.accelerator": "cpu", "trainer.max_steps": 2}
    path.write_text(f"{{output: {tmp_path}/out, common: {common}, arms: {{a: {{}}, b: {{data.strategy: padded}}}}}}")
    folder = run_sweep(*load_sweep(path), progress=False)
    before = {file.name: file.read_bytes() for file in (folder / "records").iterdir()}
    run_sweep(*load_sweep(path, ["trainer.log_every=1"]), progress=False)
    assert {file.name: file.read_bytes() for file in (folder / "records").iterdir()} == before
    run_sweep(*load_sweep(path, ["trainer.max_steps=3", "optimizer.schedule_steps=2"]), progress=False)
    records = read_records(folder)
    assert len(records) == 4 and {record["metrics"]["steps"] for record in records} == {2, 3}
    (table, *_) = training_tables(records)
    assert sorted(row[0].text for row in table.rows) == ["a", "b"]
