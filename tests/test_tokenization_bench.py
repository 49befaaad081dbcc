"""The bench of tokenisation: what it records, and that it notices a wrong corpus and a full disk."""

import shutil
from collections import namedtuple

import pytest
from configured import configured

from experiments.tokenization import bench, generated, report
from packmamba.config import ConfigError
from packmamba.records import read_records
from packmamba.report.summary import Record


@pytest.mark.slow
def test_every_arm_makes_the_same_corpus_and_is_recorded(tmp_path):
    arms = {
        "generated": {"gigabytes": 0.002, "processes": 1},
        "jsonl": {"gigabytes": 0.002, "format": "jsonl.gz", "processes": 1},
    }
    config = configured(bench.Config, {"arms": arms, "folder": str(tmp_path)})
    bench.run(config, tmp_path / "records" / "tokenization.jsonl", progress=False)
    records: list[Record] = read_records(tmp_path)
    assert [record["arm"] for record in records] == ["generated", "jsonl"]
    assert records[0]["config"]["corpus_hash"] == records[1]["config"]["corpus_hash"]
    for record in records:
        metrics = record["metrics"]
        assert metrics["tokens"] == metrics["text_bytes"] + 2 * metrics["documents"]  # bytes, begin and end tokens
        assert 1.5e6 < metrics["text_bytes"] < 2.5e6 and metrics["processes"] == 1
        assert 2e7 < metrics["peak_memory_bytes"] < 1e9 and metrics["seconds"] > 0 < metrics["cpu_seconds"]
    (table,) = report.tables(records)
    assert len(table.rows) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tokenization-")]


def test_an_arm_with_another_corpus_is_not_recorded(tmp_path, monkeypatch):
    made = iter(["one", "two"])
    metrics = {"documents": 3, "seconds": 1.0}
    monkeypatch.setattr(bench, "measure", lambda *_: (metrics, next(made)))
    config = configured(bench.Config, {"arms": {"a": {}, "b": {"format": "jsonl"}}, "folder": str(tmp_path)})
    with pytest.raises(RuntimeError, match="'b' makes another corpus"):
        bench.run(config, tmp_path / "records" / "a.jsonl", progress=False)
    assert [record["arm"] for record in read_records(tmp_path)] == ["a"]


def test_a_disk_without_room_is_refused_before_any_work(tmp_path, monkeypatch):
    free = namedtuple("usage", "total used free")(0, 0, 29e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    config = configured(bench.Config, {"arms": {"a": {"gigabytes": 10}}, "folder": str(tmp_path)})
    with pytest.raises(ConfigError, match="needs room for 30 GB and has 29"):
        bench.run(config, tmp_path / "a.jsonl", progress=False)


def test_documents_have_the_lengths_that_were_drawn():
    lengths = generated.lengths_of(3, 50, "short", 7)
    found = list(generated.texts(3, 50, "short", 7, lambda _: None, {}))
    assert [len(text) for text in found] == lengths.tolist() and all(text.isascii() for text in found)
    assert found != list(generated.texts(4, 50, "short", 7, lambda _: None, {}))
