"""A streamed corpus: shards in the source's order, steps by number alone, a writer that dies, fails
or is taken over.
"""

import dataclasses
import os
import pickle
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from packmamba.config import ConfigError, import_plugins
from packmamba.data import streaming
from packmamba.data.encoding import open_documents
from packmamba.data.schedule import StepSchedule
from packmamba.data.token_store import load_corpora
from packmamba.lab.fit import fit
from runs import tiny_config
from written import TEXTS, of, refused, write_lines, write_small_shards


@pytest.fixture
def data(tmp_path):
    streaming.IMPORTED_PLUGINS.clear()  # of other tests, whose files are gone
    path = write_lines(tmp_path / "a.jsonl")
    return of(path, streaming=True, cache_dir=str(tmp_path / "cache"), row_length=64, overlong="split")


def documents_of(corpus):
    return [corpus.document(number).tobytes() for number in range(len(corpus))]


def write_shards(data, folder):
    """Write shards in this process to a folder of one's own; return the bytes of every file."""
    folder.mkdir(exist_ok=True)
    streaming.write_shards(folder, data, open_documents(data, shards=[]))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_shards_hold_every_training_document_once_in_order(data, monkeypatch):
    write_small_shards(monkeypatch, tokens=300)
    corpora = load_corpora(data, progress=False)
    corpora.train.wait()
    whole = load_corpora(dataclasses.replace(data, streaming=False), progress=False)
    assert documents_of(corpora.train) == documents_of(whole.train)
    held_out = documents_of(corpora.validation)
    assert held_out and held_out == documents_of(whole.validation)[: len(held_out)]
    tokens = [part.num_tokens for part in corpora.train.parts]
    assert len(tokens) > 3 and 2 * tokens[0] < tokens[2], "later shards are larger"


def test_given_steps_do_not_wait_for_the_last_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming.StreamedCorpus, "wait", lambda corpus: pytest.fail("waits"))
    assert fit(tiny_config(tmp_path, "data.streaming=true"), progress=False)["metrics"]["steps"] == 6


@pytest.mark.parametrize("batching", ["matched", "stream"])
def test_a_step_is_a_function_of_its_number(data, monkeypatch, batching):
    """While shards are written, from a pickled corpus and when all are there; each epoch has every
    document.
    """
    write_small_shards(monkeypatch, tokens=300)
    data = dataclasses.replace(data, batching=batching, tokens_per_step=256)

    def steps(corpus, numbers):
        schedule = StepSchedule(corpus, data, seed=1)
        rows = [vars(schedule.step(number).rows).values() for number in numbers]
        return [tuple(array.tolist() for array in each if isinstance(array, np.ndarray)) for each in rows]

    while_written = load_corpora(data, progress=False).train
    expected = steps(while_written, range(20))
    whole = pickle.loads(pickle.dumps(while_written))
    assert steps(whole, reversed(range(20))) == expected[::-1]
    epoch = StepSchedule(whole, data, seed=1).epoch_steps()
    shards = len(whole.parts)
    for first in (0, shards):
        drawn = np.concatenate([whole.window(1, number, 0) for number in range(first, first + shards)])
        assert sorted(drawn) == list(range(len(whole)))
    assert epoch > shards and whole.window(1, shards, 0)[0] != whole.window(2, shards, 0)[0]


def test_a_killed_writer_goes_on_after_its_shards(data, tmp_path, monkeypatch):
    write_small_shards(monkeypatch, tokens=300)
    expected = write_shards(data, tmp_path / "whole")
    rename = streaming.os.rename

    def rename_two(work, shard):
        if shard.name == "shard-00002":
            raise KeyboardInterrupt
        rename(work, shard)

    with monkeypatch.context() as patched:  # as if killed while it writes the third shard
        patched.setattr(streaming.os, "rename", rename_two)
        with pytest.raises(KeyboardInterrupt):
            write_shards(data, tmp_path / "killed")
    assert not (tmp_path / "killed" / streaming.COMPLETE).exists()
    assert write_shards(data, tmp_path / "killed") == expected


def test_the_writer_is_a_process_that_ends_with_its_parent(data):
    corpora = load_corpora(data, progress=False)
    (writer,) = [writer for folder, writer in streaming._writers.items() if folder == corpora.train.folder]
    corpora.train.wait()
    assert writer.wait(timeout=60) == 0 and (corpora.train.folder / streaming.COMPLETE).exists()
    waiting = streaming._start_writer(data, corpora.train.folder)
    waiting.stdin.close()
    assert waiting.wait(timeout=60) == 0


def test_a_writer_that_fails_is_a_line_where_its_shard_is_missing(data, tmp_path):
    with open(data.path, "a") as file:
        file.write("not JSON\n")
    message = f"data.path: {data.path}:{len(TEXTS) + 1}: "
    for _ in range(2):  # a second call starts another writer
        assert refused(data).startswith(message)
    traceback = f"Caught ConfigError in DataLoader worker process 0.\n  packmamba.errors.ConfigError: {message}"
    assert str(ConfigError(traceback)) == message.strip()


def test_the_writer_has_the_modules_of_its_parent(data, tmp_path, monkeypatch):
    """Plugins, whatever module made their source, and no file of the current folder by a library's
    name.
    """
    (tmp_path / "maker.py").write_text("from packmamba.data.sources.files import open_jsonl as make")
    plugin = "from packmamba.data.sources import SOURCES\nfrom maker import make\nSOURCES['made'] = make"
    (tmp_path / "maker_plugin.py").write_text(plugin)
    (tmp_path / "tokenize.py").write_text("raise SystemExit('a script of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.path", [*sys.path[1:], sys.path[0]])
    import_plugins(["maker_plugin"])
    assert len(load_corpora(dataclasses.replace(data, source="made"), progress=False).train)


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_a_damaged_shard_is_named(data, monkeypatch, damage):
    write_small_shards(monkeypatch, tokens=300)
    train = load_corpora(data, progress=False).train
    train.wait()
    while not (train.folder / streaming.COMPLETE).exists():
        time.sleep(0.01)
    if damage == "removed":
        train.parts[1].folder.rename(train.folder / "elsewhere")
    else:
        os.truncate(train.parts[1].folder / "train.tokens", 10)
    with pytest.raises(ConfigError, match="^data.cache_dir: .*shard-00001.* delete (its|the) folder$"):
        pickle.loads(pickle.dumps(train)).wait()


def test_a_writer_that_died_is_said(data, monkeypatch):
    monkeypatch.setattr(streaming, "_start_writer", lambda data, folder: SimpleNamespace(poll=lambda: None))
    monkeypatch.setattr(streaming, "STARTING", 0.5)
    started = time.monotonic()
    assert "data.streaming: expected a process that tokenizes" in refused(data)
    assert time.monotonic() - started < 30


def test_a_test_split_of_a_stream_is_refused(data):
    assert "data.streaming" in refused(dataclasses.replace(data, test_fraction=0.1))
