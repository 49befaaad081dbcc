"""An interrupted run ends with the bits of an uninterrupted one; checkpoint files;
``trainer.deterministic``.
"""

import contextlib
import errno
import functools
import logging
import random
import shutil
import signal
import time

import pytest
import torch
from torch.utils._pytree import tree_leaves

import run
from packmamba.config import ConfigError
from packmamba.files import DiskFull
from packmamba.lab.callbacks import CheckpointFile, checkpoints, newest_checkpoint
from packmamba.lab.fit import fit
from packmamba.lab.records import read_records
from packmamba.lab.run_id import run_folder
from packmamba.training.lit_module import PackedLitModule
from processes import ROOT, files_of_at_most, fork, kill
from runs import CARRY, final_state, losses_of, stop_at, tiny_config, write_config

KEYS = ["trainer.max_steps=12", "trainer.validate_every=5", "trainer.checkpoint_every=3", "trainer.threads=1",
        "trainer.loggers=[]",
        "trainer.callbacks=[{class_path: lightning.pytorch.callbacks.EMAWeightAveraging, init_args: {decay: 0.8}}]"]  # fmt: skip
SCHEMES = {
    "packed": ["data.strategy=greedy", "data.num_workers=0"],
    "carry": [*CARRY, "data.batching=stream", "data.tokens_per_step=144", "data.num_workers=2"],
    "fitted_noise": [*CARRY, "data.batching=stream", "data.tokens_per_step=144", "trainer.boundary=fitted_noise"],
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Records and last states of uninterrupted runs, by scheme."""

    @functools.cache
    def of(scheme):
        config = tiny_config(tmp_path_factory.mktemp(scheme), *KEYS, *SCHEMES[scheme])
        return fit(config, progress=False), final_state(config)

    return of


@pytest.fixture(autouse=True)
def default_handlers():
    """A shell may have started this process with SIGINT ignored."""
    before = [signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)]
    yield
    now = [signal.signal(signal.SIGINT, before[0]), signal.signal(signal.SIGTERM, before[1])]
    assert now == [signal.default_int_handler, signal.SIG_DFL], "handlers are put back"


def assert_same(config, expected):
    """Finish the run; compare its record and last state with those of an uninterrupted one."""
    record = fit(config, progress=False)
    assert losses_of(record) == losses_of(expected[0])
    assert record["metrics"]["val_loss"] == expected[0]["metrics"]["val_loss"]
    state = final_state(config)
    for part in ("state_dict", "current_model_state", "averaging_state", "optimizer_states", "carry", "rng"):
        for x, y in zip(tree_leaves(state[part]), tree_leaves(expected[1][part]), strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, part
    assert read_records(run_folder(config)) == [record]
    assert fit(config, progress=False) == record, "a finished run is not repeated"


def signal_at(monkeypatch, name, step, *signals):
    """Send signals to this process in a call of the module, after so many steps."""
    call = getattr(PackedLitModule, name)

    def call_and_signal(module, *arguments):
        if module.global_step == step and signals:
            monkeypatch.setattr(PackedLitModule, name, call)
            for signum in signals:
                signal.raise_signal(signum)
        return call(module, *arguments)

    monkeypatch.setattr(PackedLitModule, name, call_and_signal)


@pytest.mark.slow
def test_a_run_killed_at_any_moment(tmp_path, whole):
    """SIGKILL after a checkpoint, at a random moment of the next steps; then a half-written
    checkpoint as the newest.
    """
    config = tiny_config(tmp_path, *KEYS, *SCHEMES["packed"])
    path, output = write_config(tmp_path / "killed.yaml", config), tmp_path / "output.txt"
    folder = run_folder(config) / "checkpoints"
    process = fork(run.main, ["train", str(path)], output=output)
    while process.is_alive() and not checkpoints(folder):
        time.sleep(0.005)
    time.sleep(random.Random(0).uniform(0, 0.05))
    kill(process)
    assert checkpoints(folder) and not (run_folder(config) / "record.json").exists(), output.read_text()
    newest = checkpoints(folder)[-1]
    half = newest.read_bytes()[: newest.stat().st_size // 2]
    (folder / "step=11.ckpt").write_bytes(half)
    (folder / "step=12.ckpt.tmp").write_bytes(half)
    assert_same(config, whole("packed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "where", "step", "signum"),
    [
        ("packed", "training_step", 7, signal.SIGTERM),
        ("carry", "training_step", 3, signal.SIGINT),
        ("fitted_noise", "validation_step", 5, signal.SIGTERM),
    ],
)
def test_a_run_stopped_by_a_signal(tmp_path, monkeypatch, capsys, whole, scheme, where, step, signum):
    config = tiny_config(tmp_path, *KEYS, *SCHEMES[scheme])
    path = write_config(tmp_path / "run.yaml", config)
    reached = step + (where == "training_step")
    signal_at(monkeypatch, where, step, signum)
    assert run.main(["train", str(path)]) == 128 + signum
    assert f"stopped after step {reached} of 12" in capsys.readouterr().err
    assert checkpoints(run_folder(config) / "checkpoints")[-1].name == f"step={reached}.ckpt"
    assert_same(config, whole(scheme))


def test_a_run_whose_disk_is_full_goes_on_from_its_last_checkpoint(tmp_path, whole):
    config, limits = tiny_config(tmp_path, *KEYS, *SCHEMES["packed"]), contextlib.ExitStack()

    def fill(metrics):
        return metrics.totals["steps"] == 4 and bool(limits.enter_context(files_of_at_most(9000)))

    with limits, pytest.raises(DiskFull, match="step=6.ckpt"):
        fit(config, progress=False, stop=fill)
    assert [path.name for path in (run_folder(config) / "checkpoints").iterdir()] == ["step=3.ckpt"]
    assert_same(config, whole("packed"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_under_tensorboard_is_one_sentence(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
    config = tiny_config(tmp_path, "trainer.loggers=[tensorboard]", "trainer.max_steps=1")
    assert run.main(["train", str(write_config(tmp_path / "run.yaml", config))]) == 1
    error = capsys.readouterr().err
    assert f"{run_folder(config)}: expected space" in error.splitlines()[-1]


def test_a_second_ctrl_c_interrupts_at_once(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, *KEYS, "trainer.checkpoint_every=12")
    signal_at(monkeypatch, "training_step", 3, signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(config, progress=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from here on
    assert not checkpoints(run_folder(config) / "checkpoints")


def test_a_run_does_not_go_on_with_other_documents(tmp_path):
    config = tiny_config(tmp_path)
    stop_at(config, step=2)
    with open(config.data.path, "a") as documents:
        documents.write('{"text": "abcd"}\n')
    with pytest.raises(ConfigError, match="^data: expected the documents that this run began with"):
        fit(config, progress=False)


def save(folder, *steps):
    for step in steps:
        CheckpointFile().save_checkpoint({"step": step, "weight": torch.arange(3000.0)}, folder / f"step={step}.ckpt")


def flip(content):
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]


@pytest.mark.parametrize("changed", [lambda content: content[:-100], flip, lambda _: b""], ids=["cut", "flip", "empty"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, caplog, changed):
    def damage(path):
        path.write_bytes(changed(path.read_bytes()))

    save(tmp_path, 1, 2)
    damage(tmp_path / "step=2.ckpt")
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == tmp_path / "step=1.ckpt"
    assert "step=2.ckpt" in caplog.text
    damage(tmp_path / "step=1.ckpt")
    with pytest.raises(ConfigError, match="runs_dir"):
        newest_checkpoint(tmp_path)


def test_a_pickle_of_an_old_version_is_refused_in_one_sentence(tmp_path):
    config = tiny_config(tmp_path)
    folder = run_folder(config) / "checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "data" / "carry.step=3.ckpt", folder / "step=3.ckpt")
    with pytest.raises(ConfigError, match="step=3.ckpt.*remove it") as refused:
        fit(config, progress=False)
    assert "\n" not in str(refused.value)


# Matrices of such sizes are multiplied in other parts by four threads than by one.
STRICT = ["data.source=synthetic", "data.path=null", "data.num_documents=60", "data.distribution=short", "data.row_length=256",
          "data.tokens_per_step=1024", "data.max_tokens_per_batch=512", "model.d_model=64", "model.n_layer=1", "model.d_state=16",
          "trainer.max_steps=2", "trainer.leakcheck_every=null", "trainer.deterministic=true"]  # fmt: skip


def test_cores_and_workers_change_no_bit(tmp_path):
    found, before = [], torch.get_num_threads()
    for count, workers in ((1, 0), (4, 0), (3, 2)):
        torch.set_num_threads(count)
        config = tiny_config(tmp_path, *STRICT, f"data.num_workers={workers}", f"runs_dir={tmp_path}/{count}")
        record = fit(config, progress=False)
        assert torch.get_num_threads() == count, "what PyTorch would take is left as it was"
        found.append((losses_of(record), final_state(config)["state_dict"]))
    torch.set_num_threads(before)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)
