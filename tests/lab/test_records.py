"""Records on disk and back."""

import gzip
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from made_records import training, write
from packmamba.lab import records as records_module
from packmamba.lab.records import append_record, provenance, read_records, write_sweep


def test_round_trip(tmp_path):
    numbers = {"val_loss_start": float("nan"), "steps": np.int64(7), "targets": np.float32(2)}
    record = training("padded", loss=np.float64(2.5), **numbers)
    assert [record["metrics"][name] for name in numbers] == [None, 7, 2]
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["hardware"]["cores"] >= 1 and record["hardware"]["memory_bytes"] > 2**28 and record["hardware"]["cpu"]
    write(tmp_path, [record, record | {"seed": 1}])
    assert read_records(tmp_path) == [record, record | {"seed": 1}]


@pytest.mark.parametrize(
    "name", ["record.json", "records.jsonl", "records.jsonl.gz", "records/a.jsonl", "records/a.jsonl.gz"]
)
def test_all_places_of_records_are_read(tmp_path, name):
    line = json.dumps(training("single")).encode() + b"\n"
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(line) if name.endswith("gz") else line)
    (record,) = read_records(tmp_path)
    assert record["arm"] == "single"


@pytest.mark.parametrize("line", ["{", "[]", '{"kind": "training"}'])
def test_a_broken_line_is_named(tmp_path, line):
    write(tmp_path, [training("single")])
    with (tmp_path / "records" / "runs.jsonl").open("a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(ValueError, match=r"runs\.jsonl:3: "):
        read_records(tmp_path)


def test_an_append_keeps_a_last_line_without_its_end(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(training("single")))
    append_record(path, training("padded"))
    assert [record["arm"] for record in read_records(tmp_path)] == ["single", "padded"]


def test_many_writers_share_a_file(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: append_record(tmp_path / "records.jsonl", training("single", seed)), range(64)))
    assert sorted(record["seed"] for record in read_records(tmp_path)) == list(range(64))


def test_records_hold_their_sweep(tmp_path):
    write(tmp_path, [training("padded"), training("single")])
    write_sweep(tmp_path, "one", {"padded": [1, 0], "lost": [0]}, "padded")
    write_sweep(tmp_path, "other", {"padded": [2]}, "padded", table={"metrics": ["val_loss"]})
    padded, single = read_records(tmp_path)
    assert "sweep" not in single
    expected = {"baseline": "padded", "absent": [], "missing": [1, 2], "plans": [[0, 1], [2]], "seeds": [0, 1, 2]}
    assert padded["sweep"] == expected | {"table": {"metrics": ["val_loss"]}}
    write_sweep(tmp_path, "other", {"padded": [2]}, "padded", margin=0.1)
    assert read_records(tmp_path)[0]["sweep"]["late"]
    write_sweep(tmp_path, "one", {"single": [0]}, "padded")
    write_sweep(tmp_path, "new", {"lost": [0]}, "padded", margin=0.1)
    entries = json.loads((tmp_path / "sweep.json").read_text())
    assert [*entries["one"]["arms"]] == ["padded", "single"] and "late" not in entries["one"], "arms left out stay"
    assert "late" not in entries["new"] and "late" in entries["other"]
    write_sweep(tmp_path, "new", {"padded": [0]}, "padded", margin=0.1, table={"metrics": ["val_loss_start"]})
    assert "late" in json.loads((tmp_path / "sweep.json").read_text())["new"], "judged by another metric"
    for seeds in ([0, 1], [1]):
        write_sweep(tmp_path, "mine", {"lost": seeds}, "padded")
    of_mine = json.loads((tmp_path / "sweep.json").read_text())["mine"]["arms"]
    assert of_mine == {"lost": [1]}, "seed 0 has begun in other sweeps alone"


def test_the_commit_is_of_the_own_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit():
        provenance.cache_clear()
        return provenance()["commit"], provenance()["dirty"]

    source = tmp_path / "packmamba" / "lab" / "records.py"
    source.parent.mkdir(parents=True)
    source.write_text("old")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.setattr(records_module, "__file__", str(source))
    (tmp_path / "records.jsonl").write_text("{}")
    assert commit() == (git("rev-parse", "HEAD"), False), "what runs write is no change of code"
    source.write_text("new")
    assert commit()[1] is True
    installed = tmp_path / "site-packages" / "packmamba" / "lab" / "records.py"
    monkeypatch.setattr(records_module, "__file__", str(installed))
    assert commit() == (None, None), "an installed package is not the repository it lies in"
    monkeypatch.setenv("PACKMAMBA_COMMIT", "0123abc-dirty")
    assert commit() == ("0123abc", True)
    provenance.cache_clear()
