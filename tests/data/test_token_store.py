"""A corpus comes back as it was tokenised, whole or absent, under a key of everything that decides
it.
"""

import dataclasses
import json
import os
import pickle
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from packmamba.config import DataConfig
from packmamba.data import encoding, token_store
from packmamba.data.token_store import load_corpora
from written import TEXTS, of, refused, write_lines, write_texts

WORDS = "packed rows hold documents of many lengths and nothing leaks from one into the next ☃".split()


@pytest.fixture
def data(tmp_path):
    return of(write_lines(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "cache"))


def load(data, **changes):
    return load_corpora(dataclasses.replace(data, **changes), progress=False)


def texts(corpus):
    return [corpus.document(i)[1:-1].astype(np.uint8).tobytes().decode() for i in range(len(corpus))]


def files(data, name, **changes):
    """Return every file of a corpus, in a cache of its own."""
    folder = Path(data.cache_dir).with_name(name)
    corpora = load(data, cache_dir=str(folder), **changes)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [corpora.train.folder.name]
    return {path.name: path.read_bytes() for path in corpora.train.folder.iterdir()}


def test_every_document_comes_back_once_between_begin_and_end_tokens(data):
    corpora = load(data)
    train, held_out = texts(corpora.train), texts(corpora.validation)
    assert sorted(train + held_out) == sorted(TEXTS) and not set(train) & set(held_out)
    assert train == [text for text in TEXTS if text in set(train)]
    for corpus in (corpora.train, corpora.validation):
        assert corpus.bounds[0] == 0 and corpus.bounds[-1] == corpus.num_tokens == len(corpus.tokens)
        assert (np.diff(corpus.bounds) == corpus.lengths).all() and corpus.corpus_hash == corpora.corpus_hash
        assert all(corpus.document(i)[[0, -1]].tolist() == [256, 257] for i in range(len(corpus)))
        assert corpus.targets is corpus.groups is None
    assert isinstance(corpora.train.tokens.base, np.memmap) and not corpora.train.document(0).flags.writeable
    pickled = pickle.dumps(corpora)
    assert len(pickled) < 1000 and texts(pickle.loads(pickled).train) == train


def test_a_corpus_that_is_there_is_not_tokenised_again(data, monkeypatch):
    folder = load(data).train.folder
    monkeypatch.setattr(token_store, "_tokenize", None)
    changes = {"strategy": "concat_split", "row_length": 7, "num_workers": 3, "num_proc": 2, "vocab_size": 9}
    assert load(data, **changes).train.folder == folder


def test_every_relevant_key_and_file_gives_another_folder(data):
    found = [load(data)]
    assert found[0].train.folder.name.startswith("jsonl-")
    for change in ({"begin_token": None}, {"end_token": None}, {"validation_fraction": 0.3}):
        found.append(load(data, **change))
    content = Path(data.path).read_text()
    Path(data.path).write_text(content.replace("document 8 ", "document 9 "))  # of the same size
    os.utime(data.path, ns=(1, 1))
    found.append(load(data))
    assert len({corpora.train.folder for corpora in found}) == len({corpora.corpus_hash for corpora in found}) == 5


def test_the_corpus_hash_is_of_both_splits_and_not_of_where_they_lie(data, tmp_path):
    first = load(data)
    moved = write_lines(tmp_path / "moved.jsonl")
    assert load(data, path=str(moved)).corpus_hash == first.corpus_hash
    for split in (first.train, first.validation):
        write_lines(moved, [text for text in TEXTS if text != texts(split)[0]])
        assert load(data, path=str(moved)).corpus_hash != first.corpus_hash


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"source": "jsonl", "path": "a.jsonl", "validation_fraction": 0.2}, "78333b86fe1c9c5d9043baaccab015c4"),
        ({"source": "text", "path": "texts", "validation_fraction": 0.2}, "a039dbf366ba07f76ecea67fee66b206"),
        ({"source": "synthetic", "num_documents": 500}, "2c7d9b5fb82a5bf7eddafe8e3d737b74"),
        ({"source": "task", "task": "mqar", "num_documents": 50}, "13639295601100829535cb5e0bc0354b"),
    ],
    ids=["jsonl", "text", "synthetic", "task"],
)
def test_corpus_hashes_are_those_of_committed_records(tmp_path, monkeypatch, keys, expected):
    monkeypatch.chdir(tmp_path)
    texts = [f"document {i} ☃\n" * (1 + i * i % 17) for i in range(60)]
    Path("a.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    write_texts(Path("texts"), texts)
    assert load(DataConfig(**keys, cache_dir="cache")).corpus_hash == expected


def test_the_bytes_do_not_depend_on_threads_or_chunks_or_a_kill(tmp_path, monkeypatch):
    """Of a corpus of many chunks, with a tokenizer of words, which threads encode."""
    monkeypatch.setattr(encoding, "CHUNK_CHARACTERS", 4000)
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate(["[unk]", *WORDS, "<s>", "</s>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[unk]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "words.json"))
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, n)) for n in rng.choice([0, 1, 5, 50, 400], 400)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    chunks = of(path, tokenizer=str(tmp_path / "words.json"), cache_dir=str(tmp_path / "cache"), num_proc=1)
    whole = files(chunks, "whole")
    for threads in (2, 3):
        assert files(chunks, str(threads), num_proc=threads) == whole
    with monkeypatch.context() as patched:  # as if killed: nothing is cleared away
        patched.setattr(token_store.os, "rename", None)
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(TypeError):
            files(chunks, "killed")
    (left,) = [path for path in Path(chunks.cache_dir).with_name("killed").iterdir() if path.is_dir()]
    assert left.name.startswith(".") and files(chunks, "killed") == whole
    monkeypatch.setattr(encoding, "CHUNK_DOCUMENTS", 3)
    assert files(chunks, "small") == whole


def test_memory_does_not_grow_with_the_corpus(data, monkeypatch, request):
    monkeypatch.setattr(encoding, "CHUNK_CHARACTERS", 1 << 18)
    with open(data.path, "w") as file:
        for i in range(4000):
            file.write(json.dumps({"text": f"{i} " + "x" * 8000}) + "\n")
    request.addfinalizer(tracemalloc.stop)
    tracemalloc.start()
    corpora = load(data)
    peak = tracemalloc.get_traced_memory()[1]
    assert corpora.train.num_tokens + corpora.validation.num_tokens > 32e6 and peak < 24e6


@pytest.mark.parametrize("texts", [[], [""], ["one"]])
def test_a_corpus_without_documents_to_train_on_is_refused(data, texts):
    write_lines(Path(data.path), texts)
    assert refused(data).startswith("data.path: expected documents in training and validation, got 0 and ")
    assert not any(path.is_dir() for path in Path(data.cache_dir).iterdir())


@pytest.mark.parametrize("name", ["train.tokens", "validation.lengths", "meta.json"])
@pytest.mark.parametrize("how", ["cut", "removed"])
def test_a_damaged_corpus_is_refused_by_its_folder(data, name, how):
    folder = load(data).train.folder
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if how == "cut":
        (folder / name).write_bytes(content[:-5])
    message = refused(data)
    assert message.startswith("data.cache_dir") and str(folder) in message and "delete the folder" in message
    shutil.rmtree(folder)
    load(data)


def test_a_cache_folder_that_cannot_be_made_is_refused(data):
    assert refused(dataclasses.replace(data, cache_dir=data.path)).startswith("data.cache_dir")
