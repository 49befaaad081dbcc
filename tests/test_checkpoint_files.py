"""Checkpoint files: nothing in them runs, damage is found, what was written last and is whole is gone on from."""

import errno
import os
import random
import shutil
from dataclasses import replace

import pytest
import torch

import run
from packmamba.config import ConfigError
from packmamba.errors import UserError
from packmamba.nn import MambaLM
from packmamba.training import checkpoint_file
from packmamba.training.callbacks import Stopped, checkpoints
from packmamba.training.checkpoint_file import check_whole, read_checkpoint, write_checkpoint
from packmamba.training.fit import fit
from packmamba.training.run_id import run_folder
from processes import ROOT
from runs import losses_of, tiny_config, write_config

OLD = ROOT / "tests" / "data" / "carry.step=3.ckpt"
KEYS = ["data.strategy=greedy", "trainer.max_steps=6", "trainer.checkpoint_every=2", "trainer.threads=1"]


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped after step 4 of 6, and the record of one that was not."""
    folder = tmp_path_factory.mktemp("stopped")
    config = tiny_config(folder, *KEYS)
    expected = fit(replace(config, runs_dir=f"{folder}/whole"), progress=False)
    with pytest.raises(Stopped):
        fit(config, progress=False, stop=lambda history: history.totals["steps"] == 4)
    return config, expected


@pytest.fixture
def config(stopped, tmp_path):
    """Of a copy of the stopped run."""
    own = replace(stopped[0], runs_dir=f"{tmp_path}/runs")
    shutil.copytree(run_folder(stopped[0]), run_folder(own))
    return own


def of(config):
    return checkpoints(run_folder(config) / "checkpoints")


def flip(path, count, seed=0):
    generator = random.Random(seed)
    content = bytearray(path.read_bytes())
    for place in generator.sample(range(len(content)), count):
        content[place] ^= generator.randrange(1, 256)
    path.write_bytes(content)


DAMAGE = {
    "200 bytes": lambda path: flip(path, 200),
    "one byte": lambda path: flip(path, 1, seed=3),
    "its last byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "without its checksum": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "empty": lambda path: path.write_bytes(b""),
    "something else": lambda path: path.write_bytes(b"PK broken"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(tmp_path, damage):
    path = tmp_path / "step=1.ckpt"
    write_checkpoint(path, {"weights": torch.randn(500), "step": 1})
    check_whole(path)
    DAMAGE[damage](path)
    with pytest.raises(checkpoint_file.Damaged, match="step=1.ckpt"):
        read_checkpoint(path)


def test_any_changed_byte_is_found(tmp_path):
    path = tmp_path / "step=1.ckpt"
    write_checkpoint(path, {"step": 1})
    content = path.read_bytes()
    for place in [*range(0, len(content), 29), *range(len(content) - 50, len(content), 7)]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(checkpoint_file.Damaged):
            check_whole(path)


def test_the_previous_good_checkpoint_is_gone_on_from(stopped, config, capsys):
    before, newest = of(config)
    flip(newest, 200)
    record = fit(config, progress=False)
    said = capsys.readouterr().err
    assert f"warning: the checkpoint {newest} has other bytes than were written" in said and before.name in said
    assert losses_of(record) == losses_of(stopped[1])
    (last,) = of(config)
    assert last.name == "step=6.ckpt" and newest.with_name("step=4.ckpt.damaged").is_file()


def test_without_a_good_checkpoint_a_run_refuses_in_one_sentence(config):
    for path in of(config):
        DAMAGE["half"](path)
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is whole \(.*step=4.*; .*step=2.*\); remove them"):
        fit(config, progress=False)


def test_nothing_half_written_stays_behind(config, monkeypatch):
    """A disk that is full, before the bytes are there and when they shall be on it."""
    before = {path: path.read_bytes() for path in of(config)}

    def full(call):
        def of_checkpoints(*given):
            path = os.readlink(f"/proc/self/fd/{given[0]}") if isinstance(given[0], int) else str(given[-1])
            if ".ckpt" in path:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*given)

        return of_checkpoints

    for name in ("os.fsync", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(name, full(getattr(os, name.removeprefix("os."))))
            with pytest.raises(UserError, match="runs_dir: the checkpoint .*step=6.ckpt .*No space left on device"):
                fit(config, progress=False)
        folder = run_folder(config) / "checkpoints"
        assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_write_that_was_cut_short_is_cleared_away(stopped, config):
    cuts = of(config)[-1].with_name("step=5.ckpt.tmp"), run_folder(config) / "configuration.yaml.1-2.tmp"
    for cut in cuts:
        cut.write_bytes(b"half")
    assert losses_of(fit(config, progress=False)) == losses_of(stopped[1])
    assert not any(cut.exists() for cut in cuts)


def planted(tmp_path, content):
    """A file that writes another when it is unpickled, and that other."""
    harm, path = tmp_path / "harm", tmp_path / "step=5.ckpt"
    torch.save(content | {"more": Payload(harm)}, path)
    return path, harm


@pytest.mark.parametrize("way", ["a run goes on", "a run starts from it"])
def test_a_planted_checkpoint_runs_nothing(config, tmp_path, way, capsys):
    state = torch.load(of(config)[-1], weights_only=True)
    path, harm = planted(tmp_path, state)
    if way == "a run goes on":
        path = shutil.copy(path, run_folder(config) / "checkpoints" / path.name)
        arguments = []
    else:
        arguments = [f"trainer.init_from={path}"]
    assert run.main(["train", str(write_config(tmp_path / "run.yaml", config)), *arguments]) == 2
    said = capsys.readouterr().err
    assert "reading it runs what it says" in said and f"python run.py convert {path}" in said
    assert not harm.exists()


def test_planted_weights_run_nothing(config, tmp_path, capsys):
    fit(config, progress=False)
    folder = run_folder(config)
    path, harm = planted(tmp_path, torch.load(folder / "pytorch_model.bin", weights_only=True))
    shutil.copy(path, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin"):
        MambaLM.from_pretrained(folder)
    for command in (["eval", str(folder)], ["leakcheck", str(folder)], ["generate", str(folder), "text"]):
        assert run.main(command) == 2
        assert "pytorch_model.bin" in capsys.readouterr().err
    assert not harm.exists()


def test_convert_says_what_it_trusts_and_asks(tmp_path, monkeypatch, capsys):
    path, harm = planted(tmp_path, {"state_dict": {}})
    before = path.read_bytes()
    assert run.main(["convert", str(path)]) == 2
    said = capsys.readouterr().err
    assert "posix.mkdir" in said and "yes=true" in said
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer in ("n", ""):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert run.main(["convert", str(path)]) == 2
        assert "posix.mkdir" in capsys.readouterr().out
    assert path.read_bytes() == before and not harm.exists()
    shutil.copy(OLD, path)
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert run.main(["convert", str(path)]) == 0
    found, old = read_checkpoint(path), torch.load(OLD, weights_only=False)
    assert found["rng"]["numpy"][1] == old["rng"]["numpy"][1].tolist()
    assert found["optimizer_states"][0]["param_groups"] == old["optimizer_states"][0]["param_groups"]
    assert run.main(["convert", str(path)]) == 0
    assert "nothing to convert" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: [], "expected a mapping, got list"),
        (lambda state: {}, "it has no 'state_dict'"),
        (lambda state: state | {"loops": 3}, "it has no 'loops'"),
        (lambda state: state | {"state_dict": {"model.lm_head.weight": torch.zeros(2)}}, "is of another model: 'model.backbone"),
        (
            lambda state: state | {"state_dict": state["state_dict"] | {"model.lm_head.weight": torch.zeros(2)}},
            r"'model.lm_head.weight': expected shape \(256, 8\), got \(2,\)",
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_checkpoint_of_this_run_is_one_sentence(config, change, message):
    torch.save(change(torch.load(of(config)[-1], weights_only=True)), of(config)[-1])
    with pytest.raises(ConfigError, match=message):
        fit(config, progress=False)


def test_what_only_running_code_could_read_is_not_written(tmp_path):
    with pytest.raises(TypeError, match="posix.mkdir"):
        write_checkpoint(tmp_path / "step=1.ckpt", {"boundary": Payload(tmp_path / "harm")})
    assert list(tmp_path.iterdir()) == []
