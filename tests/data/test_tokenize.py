"""Tokenising: the same bytes for any number of threads, bounded memory, whole or absent."""

import dataclasses
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from packmamba.config import DataConfig
from packmamba.data import token_store
from packmamba.data.token_store import load_corpora
from written import of, refused, write_lines

WORDS = "packed rows hold documents of many lengths and nothing leaks from one into the next ☃".split()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """A corpus of many chunks."""
    monkeypatch.setattr(token_store, "CHUNK_CHARACTERS", 4000)


def make_texts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.choice([0, 1, 5, 50, 400]))) for _ in range(count)]


@pytest.fixture
def data(tmp_path):
    """A tokenizer of words, which threads encode; small chunks."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate(["[unk]", *WORDS, "<s>", "</s>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[unk]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "words.json"))
    path = write_lines(tmp_path / "a.jsonl", make_texts(400))
    return of(path, tokenizer=str(tmp_path / "words.json"), cache_dir=str(tmp_path / "cache"), num_proc=1)


def files(data, name, **changes):
    """Every file of a corpus, its card without where the source lies."""
    folder = Path(data.cache_dir).with_name(name)
    corpora = load_corpora(dataclasses.replace(data, cache_dir=str(folder), **changes), progress=False)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [corpora.train.folder.name]
    found = {path.name: path.read_bytes() for path in corpora.train.folder.iterdir()}
    return found | {"meta.json": json.loads(found["meta.json"])}


def test_the_bytes_do_not_depend_on_threads_or_chunks(data, monkeypatch):
    whole = files(data, "whole")
    for threads in (1, 2, 3):
        assert files(data, str(threads), num_proc=threads) == whole
    monkeypatch.setattr(token_store, "CHUNK_DOCUMENTS", 3)
    assert files(data, "small") == whole
    monkeypatch.undo()
    assert files(data, "one") == whole


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"source": "jsonl", "path": "a.jsonl", "validation_fraction": 0.2}, "78333b86fe1c9c5d9043baaccab015c4"),
        ({"source": "text", "path": "texts", "validation_fraction": 0.2}, "a039dbf366ba07f76ecea67fee66b206"),
        ({"source": "synthetic", "num_documents": 500}, "2c7d9b5fb82a5bf7eddafe8e3d737b74"),
        ({"source": "task", "task": "mqar", "num_documents": 50}, "13639295601100829535cb5e0bc0354b"),
    ],
    ids=lambda value: value["source"] if isinstance(value, dict) else "",
)
def test_corpus_hashes_are_those_of_committed_records(tmp_path, monkeypatch, keys, expected):
    monkeypatch.chdir(tmp_path)
    texts = [f"document {i} ☃\n" * (1 + i * i % 17) for i in range(60)]
    Path("a.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    Path("texts").mkdir()
    for i, one in enumerate(texts):
        (Path("texts") / f"{i}.txt").write_text(one)
    assert load_corpora(DataConfig(**keys, cache_dir="cache"), progress=False).corpus_hash == expected


def test_memory_does_not_grow_with_the_corpus(data, monkeypatch):
    monkeypatch.setattr(token_store, "CHUNK_CHARACTERS", 1 << 18)
    with open(data.path, "w") as file:
        for i in range(4000):
            file.write(json.dumps({"text": f"{i} " + "x" * 8000}) + "\n")
    tracemalloc.start()
    try:
        corpora = load_corpora(dataclasses.replace(data, tokenizer="bytes"), progress=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert corpora.train.num_tokens + corpora.validation.num_tokens > 32e6 and peak < 24e6


def test_a_killed_tokenisation_starts_again(data, monkeypatch):
    whole = files(data, "whole")

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(token_store.os, "rename", dies)
        patched.setattr(token_store.shutil, "rmtree", lambda *_, **__: None)  # as if killed: nothing is cleared away
        with pytest.raises(KeyboardInterrupt):
            files(data, "killed")
    (left,) = [path for path in (Path(data.cache_dir).with_name("killed")).iterdir() if path.is_dir()]
    assert left.name.startswith(".")
    assert files(data, "killed") == whole


@pytest.mark.parametrize("texts", [[], [""], ["one"]])
def test_a_corpus_without_documents_to_train_on_is_refused(data, texts):
    write_lines(Path(data.path), texts)
    assert refused(data).startswith("data.validation_fraction" if texts == ["one"] else "data.path")
    assert not any(path.is_dir() for path in Path(data.cache_dir).iterdir())
