"""An interrupted run ends with the bits of an uninterrupted one: weights, optimizer, carried states, random numbers, record."""

import random
import signal
import time

import pytest
import torch
from torch.utils._pytree import tree_leaves

import run
from packmamba.config import ConfigError
from packmamba.records import read_records
from packmamba.training.callbacks import Stopped, checkpoints
from packmamba.training.fit import fit
from packmamba.training.lit_module import PackedLitModule
from packmamba.training.run_id import run_folder
from processes import fork, kill
from runs import CARRY, final_state, losses_of, tiny_config, write_config

KEYS = ["trainer.max_steps=12", "trainer.validate_every=5", "trainer.checkpoint_every=3", "trainer.threads=1",
        "trainer.loggers=[]", "trainer.average_snapshots=3", "trainer.average_share=0.7"]  # fmt: skip
SCHEMES = {
    "packed": ["data.strategy=greedy", "data.num_workers=0"],
    "carry": [*CARRY, "data.batching=stream", "data.tokens_per_step=144", "data.num_workers=2",
              "model.learned_initial_state=true"],
    "fitted_noise": [*CARRY, "data.batching=stream", "data.tokens_per_step=144", "trainer.boundary=fitted_noise"],
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Records and last states of uninterrupted runs, by scheme."""
    runs = {}

    def of(scheme):
        if scheme not in runs:
            config = tiny_config(tmp_path_factory.mktemp(scheme), *KEYS, *SCHEMES[scheme])
            runs[scheme] = fit(config, progress=False), final_state(config)
        return runs[scheme]

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
    for part in ("state_dict", "optimizer_states", "carry", "rng"):
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


@pytest.mark.parametrize("scheme", ["packed", "carry"])
def test_a_run_killed_at_any_moment(tmp_path, whole, scheme):
    """SIGKILL after a checkpoint, at a random moment of the next steps; then a half-written checkpoint as the newest."""
    config = tiny_config(tmp_path, *KEYS, *SCHEMES[scheme])
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
    assert_same(config, whole(scheme))


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


def test_a_second_ctrl_c_interrupts_at_once(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, *KEYS, "trainer.checkpoint_every=12")
    signal_at(monkeypatch, "training_step", 3, signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(config, progress=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from here on
    assert not checkpoints(run_folder(config) / "checkpoints")


def test_a_run_does_not_go_on_with_other_documents(tmp_path):
    config = tiny_config(tmp_path)
    with pytest.raises(Stopped):
        fit(config, progress=False, stop=lambda metrics: metrics.totals["steps"] == 2)
    with open(config.data.path, "a") as documents:
        documents.write('{"text": "abcd"}\n')
    with pytest.raises(ConfigError, match="^data: "):
        fit(config, progress=False)
