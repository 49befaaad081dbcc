"""Records: what one holds, on disk and back."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from made_records import training, write
from packmamba import records as records_module
from packmamba.errors import UserError
from packmamba.records import METRICS, append_record, provenance, read_records, validate_record


def test_a_record_says_where_it_comes_from_and_survives_the_disk(tmp_path):
    record = training("padded", loss=np.float64(2.5), val_loss_start=float("nan"), steps=np.int64(7))
    assert record["metrics"]["val_loss_start"] is None and record["metrics"]["steps"] == 7
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["versions"]["numpy"] == np.__version__
    assert record["hardware"]["cores"] >= 1 and record["hardware"]["memory_bytes"] > 2**28
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["time"])
    write(tmp_path, [record, record | {"seed": 1}])
    assert read_records(tmp_path) == [record, record | {"seed": 1}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "0"}, "seed must be int"),
        ({"seed": True}, "seed must be int"),
        ({"kind": ""}, "kind is empty"),
        ({"corpus_hash": ""}, "corpus_hash is empty"),
        ({"metrics": {"val_loss": 1.0}}, "lack steps, real_tokens"),
        ({"metrics": dict.fromkeys(METRICS["training"], "2.0")}, "metrics.steps must be a number or null"),
        ({"curves": {"train": [{"loss": "low"}]}}, r"curves.train\[0\].loss must be a number or null"),
        ({"config": {"lr": float("inf")}}, "not strict JSON"),
        ({"extra": 1}, "unknown keys extra"),
        ({"schema": 2}, "schema is 2"),
    ],
)
def test_a_wrong_record_is_refused_by_key(change, message):
    with pytest.raises(ValueError, match=message):
        validate_record(training("single") | change)


def test_a_record_that_lacks_a_key_is_refused():
    record = training("single")
    del record["commit"], record["seed"]
    with pytest.raises(ValueError, match="lacks commit, seed"):
        validate_record(record)


@pytest.mark.parametrize("line", ["{", '{"kind": NaN}', "[]", '{"kind": "training"}'])
def test_a_broken_line_is_named(tmp_path, line):
    write(tmp_path, [training("single")])
    path = tmp_path / "records" / "runs.jsonl"
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"runs\.jsonl:3: "):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("was", "now"), [(b'"val_loss": 2.5', b'"val_loss": 1.5'), (b'"seed": 0', b'"seed": 1'), (b"cpu", b"c\xffu")]
)
def test_a_changed_record_is_named(tmp_path, was, now):
    write(tmp_path, [training("single", loss=2.5)])
    path = tmp_path / "records" / "runs.jsonl"
    content = path.read_bytes()
    assert was in content
    path.write_bytes(content.replace(was, now, 1))
    with pytest.raises(ValueError, match=r"runs\.jsonl:1: (the record is not what was written|.*can't decode)"):
        read_records(tmp_path)
    line = json.loads(content)
    del line["checksum"]  # as records were before
    path.write_text(json.dumps(line))
    assert read_records(tmp_path) == [line]


def test_an_append_cut_short_costs_only_itself(tmp_path):
    write(tmp_path, [training("single")])
    path = tmp_path / "records" / "runs.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    append_record(path, training("padded"))
    first, second = path.read_text().splitlines()
    assert json.loads(second)["arm"] == "padded"
    with pytest.raises(ValueError, match=r"runs\.jsonl:1: "):
        read_records(tmp_path)


@pytest.mark.parametrize("call", ["os.fsync", "os.replace"])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch, call):
    path = tmp_path / "records" / "runs.jsonl"

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for expected in ([], ["single"]):
        with monkeypatch.context() as patch:
            patch.setattr(call, full)
            with pytest.raises(UserError, match=r"the record .*runs.jsonl could not be written \(No space left"):
                append_record(path, training("padded"))
        assert [file.name for file in path.parent.iterdir()] == ["runs.jsonl"] * len(expected)
        append_record(path, training("single"))
    assert [record["arm"] for record in read_records(tmp_path)] == ["single", "single"]


def test_many_writers_share_a_file(tmp_path):
    path = tmp_path / "records" / "runs.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: append_record(path, training("single", seed)), range(64)))
    assert sorted(record["seed"] for record in read_records(tmp_path)) == list(range(64))


def test_commit_and_dirty_are_of_our_own_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    source = tmp_path / "packmamba" / "records.py"
    source.parent.mkdir(parents=True)
    source.write_text("old")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.delenv("PACKMAMBA_COMMIT", raising=False)
    monkeypatch.setattr(records_module, "__file__", str(source))
    assert records_module._commit() == (git("rev-parse", "HEAD"), False)
    for name in ("records/a.jsonl", "sweep.json", "tuning/records/a.jsonl"):
        written = tmp_path / "experiments" / "q" / name
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text("{}")
    index = tmp_path / ".git" / "index"
    os.utime(source, (1, 1))
    before = index.read_bytes()
    assert records_module._commit()[1] is False, "what runs write is no change of code"
    assert index.read_bytes() == before, (
        "a process that is killed as it writes it leaves a lock that stops the user's git"
    )
    source.write_text("new")
    assert records_module._commit()[1] is True
    inside = tmp_path / "somebody" / "site-packages" / "packmamba" / "results" / "record.py"
    inside.parent.mkdir(parents=True)
    monkeypatch.setattr(records_module, "__file__", str(inside))
    assert records_module._commit() == (None, None), "an installed package is not the repository it lies in"


def test_a_commit_can_be_named(monkeypatch):
    provenance.cache_clear()
    monkeypatch.setenv("PACKMAMBA_COMMIT", "0123abc-dirty")
    assert (provenance()["commit"], provenance()["dirty"]) == ("0123abc", True)
    provenance.cache_clear()


def test_a_relative_folder_is_writable_below_one_that_is_closed(tmp_path, monkeypatch):
    """By its absolute name nothing is found there: the user came in before it was closed, or was put there."""
    here = tmp_path / "closed" / "here"
    here.mkdir(parents=True)
    here.chmod(0o777)
    monkeypatch.chdir(here)
    was = os.geteuid()
    try:
        here.parent.chmod(0)
        if was == 0:
            os.seteuid(65534)
        with pytest.raises(PermissionError):
            (here / "runs").stat()
        records_module.check_writable("runs/mine", "runs_dir")
    finally:
        os.seteuid(was)
        here.parent.chmod(0o755)
