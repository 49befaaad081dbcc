"""One process at a time in a folder, on one machine and on several, with locks that reach them all and without."""

import errno
import os
import time

import pytest

from packmamba.records import read_records
from packmamba.training import claims
from packmamba.training.callbacks import checkpoints
from packmamba.training.claims import Taken, alone, check_claim, taken
from packmamba.training.fit import fit
from packmamba.training.run_id import record_path, run_folder
from processes import fork, statuses
from runs import tiny_config


def elsewhere(monkeypatch, name="another machine", locks=True):
    """This process is now on another machine; its locks are its own, or it has none."""
    monkeypatch.setattr(claims, "_kernel", lambda: name)
    monkeypatch.setattr(claims, "_lock", lambda file, kind: True if locks else None)


def race(folder, name, start):
    """0 for the process that gets the folder, and keeps it until five others have not."""
    lost = folder.parent / "lost"
    lost.mkdir(exist_ok=True)
    claims._kernel, claims._lock = (lambda: name), (lambda file, kind: None)
    while not start.exists():
        time.sleep(0.001)
    try:
        with alone(folder):
            end = time.monotonic() + 20
            while len(os.listdir(lost)) < 5 and time.monotonic() < end:
                time.sleep(0.01)
            return 0
    except Taken:
        (lost / name).touch()
        return 1


@pytest.mark.slow
@pytest.mark.parametrize("before", ["nobody", "a process that is lost"])
def test_of_processes_on_several_machines_one_gets_a_folder(tmp_path, before):
    folder, start = tmp_path / "run", tmp_path / "start"
    if before != "nobody":
        claim_of_another_machine(folder, age=3600)
    several = [fork(race, folder, f"machine {n}", start, output=tmp_path / "output.txt") for n in range(6)]
    start.touch()
    assert sorted(statuses(*several)) == [0, 1, 1, 1, 1, 1]


def claim_of_another_machine(folder, age, number=1):
    folder.mkdir(exist_ok=True)
    path = folder / f"claim-{number}"
    path.write_text('{"kernel": "off", "host": "node7", "pid": 1}')
    (folder / "lock").touch()
    os.utime(path, (time.time() - age,) * 2)


@pytest.mark.parametrize(
    ("age", "lives"), [(0, True), (100, True), (130, False), (-100, True), (-5000, False)], ids=lambda value: str(value)
)
def test_a_claim_of_another_machine_is_lost_by_its_age(tmp_path, age, lives):
    """Ahead of the clock too, if that was set back: a process that lives renews it."""
    claim_of_another_machine(tmp_path / "run", age)
    assert taken(tmp_path / "run") == lives
    if lives:
        with pytest.raises(Taken, match="another process trains this run, in .*run; wait for it, or stop it"):
            with alone(tmp_path / "run"):
                pass
    else:
        with alone(tmp_path / "run"):
            assert taken(tmp_path / "run")
        assert not taken(tmp_path / "run")


@pytest.mark.parametrize("locks", [True, False])
def test_a_claim_reaches_other_machines_and_ends_there_too(tmp_path, monkeypatch, locks):
    folder = tmp_path / "run"
    with alone(folder):
        with monkeypatch.context() as there:
            elsewhere(there, locks=locks)
            there.setattr(claims, "_held", {})
            assert taken(folder)
            with pytest.raises(Taken):
                with alone(folder):
                    pass
    with monkeypatch.context() as there:
        elsewhere(there, locks=locks)
        assert not taken(folder)
        with alone(folder):
            pass


def test_a_process_that_was_killed_loses_its_claim_at_once_on_its_machine(tmp_path):
    folder = tmp_path / "run"
    assert statuses(fork(dies_with, folder, output=tmp_path / "output.txt")) == [5]
    assert (folder / "claim-1").stat().st_mtime > time.time() - 60, "not given up"
    assert not taken(folder)
    with alone(folder):
        pass


def test_a_process_that_was_killed_as_it_claims_keeps_nobody_out(tmp_path):
    folder = tmp_path / "run"
    assert statuses(fork(dies_in_claiming, folder, output=tmp_path / "output.txt")) == [5]
    with alone(folder):
        pass


def test_a_claim_that_is_damaged_is_told_by_its_age(tmp_path):
    with alone(tmp_path):
        pass
    claim = tmp_path / "claim-1"
    claim.write_bytes(b"\xff" * 100)
    assert taken(tmp_path)
    os.utime(claim, (0, 0))
    with alone(tmp_path):
        pass


def dies_in_claiming(folder):
    os.link = claims.json.dump = lambda *_: os._exit(5)
    with alone(folder):
        pass


def test_a_file_system_without_links_has_claims(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with alone(tmp_path):
        assert "pid" in (tmp_path / "claim-1").read_text()


def dies_with(folder):
    with alone(folder):
        os._exit(5)


def test_looking_or_asking_again_does_not_give_a_claim_up(tmp_path):
    folder = tmp_path / "run"
    with alone(folder):
        assert taken(folder)
        with alone(folder):
            pass
        assert statuses(fork(looks, folder, output=tmp_path / "output.txt")) == [1]
    assert statuses(fork(looks, folder, output=tmp_path / "output.txt")) == [0]


def looks(folder):
    return int(taken(folder))


def test_a_claim_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.01)
    with alone(tmp_path):
        claim = tmp_path / "claim-1"
        os.utime(claim, (1, 1))
        time.sleep(0.2)
        assert claim.stat().st_mtime > time.time() - 10


def test_a_run_that_was_taken_over_writes_nothing_more(tmp_path, monkeypatch):
    """Its process hung, and another machine has begun to train it."""
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.checkpoint_every=1")
    folder = run_folder(config)

    def hangs(history):
        if history.totals["steps"] == 2:
            monkeypatch.setattr(claims, "BEAT_SECONDS", -1.0)
            claim_of_another_machine(folder, 0, number=2)
        return False

    with pytest.raises(Taken, match="was taken over by another process"):
        fit(config, progress=False, stop=hangs)
    assert not record_path(config).exists()
    assert [path.name for path in checkpoints(folder / "checkpoints")] == ["step=1.ckpt", "step=2.ckpt"]
    os.utime(folder / "claim-2", (0, 0))
    fit(config, progress=False)
    assert len(read_records(folder)) == 1


def test_whoever_has_no_folder_has_lost_none(tmp_path):
    check_claim(tmp_path)
