"""A corpus comes back as it was tokenised, under a key of everything that decides it; corpora of old versions open."""

import dataclasses
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from packmamba.data import token_store
from packmamba.data.token_store import load_corpora
from written import TEXTS, of, refused, write_lines


@pytest.fixture
def data(tmp_path):
    return of(write_lines(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "cache"))


def load(data, **changes):
    return load_corpora(dataclasses.replace(data, **changes), progress=False)


def texts(corpus):
    return [corpus.document(i)[1:-1].astype(np.uint8).tobytes().decode() for i in range(len(corpus))]


def test_every_document_comes_back_once_between_begin_and_end_tokens(data):
    corpora = load(data)
    assert sorted(texts(corpora.train) + texts(corpora.validation)) == sorted(TEXTS)
    assert texts(corpora.train) == [text for text in TEXTS if text in set(texts(corpora.train))]
    assert not set(texts(corpora.train)) & set(texts(corpora.validation))
    for corpus in (corpora.train, corpora.validation):
        assert corpus.offsets[0] == 0 and corpus.offsets[-1] == corpus.num_tokens == len(corpus.tokens)
        assert (np.diff(corpus.offsets) == corpus.lengths).all() and corpus.corpus_hash == corpora.corpus_hash
        assert all(corpus.document(i)[[0, -1]].tolist() == [256, 257] for i in range(len(corpus)))
        assert corpus.targets is corpus.groups is None
    assert isinstance(corpora.train.tokens.base, np.memmap) and not corpora.train.document(0).flags.writeable


def test_corpora_pickle_as_paths(data, monkeypatch, tmp_path):
    corpora = load(data)
    pickled = pickle.dumps(corpora)
    monkeypatch.chdir(tmp_path)
    again = pickle.loads(pickled)
    assert len(pickled) < 1000 and texts(again.train) == texts(corpora.train)


def test_a_corpus_that_is_there_is_not_tokenised_again(data, monkeypatch):
    folder = load(data).train.folder
    monkeypatch.setattr(token_store, "_tokenize", None)
    assert (
        load(data, strategy="concat_split", row_length=7, num_workers=3, num_proc=2, vocab_size=9).train.folder
        == folder
    )


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


@pytest.mark.parametrize("name", ["train.tokens", "validation.lengths", "train.offsets", "meta.json"])
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
