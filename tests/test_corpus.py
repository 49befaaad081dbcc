"""Tokens on disk: what is written comes back, one folder for each corpus, whole or not there."""

import dataclasses
import json
import logging
import os
import pickle
import shutil
import sysconfig
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from packmamba.config import ConfigError, DataConfig
from packmamba.data import corpus as corpus_module
from packmamba.data import shards
from packmamba.data.corpus import Corpus, load_corpora
from packmamba.data.lengths import draw_lengths
from packmamba.data.preparation import alone

TEXTS = [f"document {i} ☃\n" * (1 + i * i % 17) for i in range(60)]


def write_jsonl(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def data(tmp_path):
    path = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    return DataConfig(source="jsonl", path=str(path), cache_dir=str(tmp_path / "cache"), validation_fraction=0.2)


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory):
    """A few packages of the library: parsing all of it, which tests of documents do, takes seconds."""
    library = tmp_path_factory.mktemp("library")
    for package in ("asyncio", "collections", "email", "importlib", "json", "logging", "unittest"):
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / package, library / package)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sysconfig, "get_path", lambda _: str(library))
        return load_corpora(DataConfig(cache_dir=str(tmp_path_factory.mktemp("corpora"))), progress=False)


def contents(split):
    return [split.document(i).tolist() for i in range(split.num_documents)]


def texts(split):
    return [bytes(ids[1:-1]).decode() for ids in contents(split)]


def check_whole(corpora):
    for split in (corpora.train, corpora.validation):
        assert split.offsets[0] == 0 and split.offsets[-1] == split.num_tokens == len(split.tokens)
        np.testing.assert_array_equal(np.diff(split.offsets), split.lengths)
        assert len(split) == split.num_documents == len(split.lengths)
        assert split.lengths.min(initial=1) >= 1 and split.tokens.max(initial=0) < split.vocab_size
        assert (split.offsets.dtype, split.lengths.dtype) == (np.int64, np.int32)
        assert split.corpus_hash == corpora.corpus_hash


def folders(data):
    return sorted(path.name for path in Path(data.cache_dir).iterdir())


def test_every_document_comes_back_once_between_begin_and_end_tokens(data):
    corpora = load_corpora(data)
    check_whole(corpora)
    assert sorted(texts(corpora.train) + texts(corpora.validation)) == sorted(TEXTS)
    assert texts(corpora.train) == [text for text in TEXTS if text in set(texts(corpora.train))]
    assert corpora.validation.num_documents > 0 and set(texts(corpora.train)).isdisjoint(texts(corpora.validation))
    for ids in contents(corpora.train):
        assert ids[0] == corpora.train.begin_id == 256 and ids[-1] == corpora.train.end_id == 257
    assert isinstance(corpora.train.tokens, np.memmap) and isinstance(corpora.train.lengths, np.memmap)
    assert not corpora.train.document(0).flags.writeable
    assert corpora.skipped == {}


@pytest.mark.slow
def test_stdlib_corpus(stdlib):
    check_whole(stdlib)
    lengths = np.concatenate([stdlib.train.lengths, stdlib.validation.lengths])
    assert 1500 < len(lengths) < 5000 and 5e5 < lengths.sum() < 3e6
    assert lengths.max() > 20 * np.median(lengths)
    assert 0.01 < stdlib.validation.num_tokens / lengths.sum() < 0.15
    assert stdlib.train.vocab_size == 258 and stdlib.train.tokens.dtype == np.uint16
    assert "def " in texts(stdlib.train)[0]


def test_synthetic_lengths_are_the_distribution_to_the_bit(tmp_path):
    data = DataConfig(source="synthetic", num_documents=5000, vocab_size=70_000, cache_dir=str(tmp_path), corpus_seed=4)
    data.validation_fraction = 0
    drawn = draw_lengths("documents-2k", 5000, 4)
    corpora = load_corpora(data, progress=False)
    check_whole(corpora)
    np.testing.assert_array_equal(corpora.train.lengths, drawn)
    assert (corpora.train.vocab_size, corpora.train.begin_id, corpora.train.end_id) == (70_000, None, None)
    assert corpora.train.tokens.dtype == np.uint32 and corpora.train.tokens.max() > 2**16
    assert corpora.validation.num_documents == corpora.validation.num_tokens == 0
    data.validation_fraction = 0.1
    corpora = load_corpora(data, progress=False)
    both = np.concatenate([corpora.train.lengths, corpora.validation.lengths])
    assert corpora.validation.num_documents == 500
    np.testing.assert_array_equal(np.sort(both), np.sort(drawn))


def test_tokenizer_file_and_ids_above_16_bits(data, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[unk]": 0, "document": 70_000, "<e>": 1} | {str(i): i + 2 for i in range(60)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[unk]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "words.json"))
    data = dataclasses.replace(data, tokenizer=str(tmp_path / "words.json"), begin_token=None, end_token="<e>")
    corpora = load_corpora(data)
    check_whole(corpora)
    assert corpora.train.tokens.dtype == np.uint32
    expected = [[70_000, i + 2, 0] * (1 + i * i % 17) + [1] for i in range(60)]
    assert sorted(contents(corpora.train) + contents(corpora.validation)) == sorted(expected)


def test_small_and_large_batches_write_the_same(data, monkeypatch, tmp_path):
    first = load_corpora(data)
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(shards, "BATCH_DOCUMENTS", 3)
    second = load_corpora(dataclasses.replace(data, cache_dir=str(tmp_path / "other")))
    assert first.corpus_hash == second.corpus_hash and contents(first.train) == contents(second.train)


# --- what is left out


def test_a_wrong_key_is_not_hidden_by_skipping(data):
    data.text_key, data.bad_lines = "txt", "skip"
    with pytest.raises(
        ConfigError, match=f"bad_lines=skip leaves out all of its {len(TEXTS)} lines; data.bad_lines=error says"
    ):
        load_corpora(data)


def test_skipped_lines_and_empty_documents_are_counted_and_reported_each_time(data, caplog):
    with open(data.path, "a") as file:
        file.write('broken\n{"text": ""}\n\n{"text": ""}\n{"text": 3}\n{"no": ""}\n')
    with pytest.raises(ConfigError, match=rf"corpus\.jsonl:{len(TEXTS) + 1} is not valid JSON"):
        load_corpora(data)
    assert folders(data) == []
    data.bad_lines = "skip"
    for _ in range(2):
        caplog.clear()
        corpora = load_corpora(data)
        assert corpora.skipped == {"bad_lines": 3, "empty_documents": 2}
        assert "3 bad lines" in caplog.text and "2 empty documents" in caplog.text
    assert sorted(texts(corpora.train) + texts(corpora.validation)) == sorted(TEXTS)


@pytest.mark.parametrize(
    "lines, message",
    [
        ([], "has no document with a token"),
        ([""], "has no document"),
        (["one"], "data.validation_fraction=0.2 makes 0 tr"),
    ],
)
def test_a_corpus_without_documents_to_train_on_is_an_error(data, lines, message):
    write_jsonl(Path(data.path), lines)
    with pytest.raises(ConfigError) as caught:
        load_corpora(data)
    assert message in str(caught.value) and folders(data) == []


def test_a_cache_folder_that_cannot_be_made_is_an_error(data):
    data.cache_dir = data.path
    with pytest.raises(ConfigError, match=r"data\.cache_dir .* cannot be written"):
        load_corpora(data)


# --- the key


def test_nothing_is_written_for_a_corpus_that_is_there(data, monkeypatch):
    first = load_corpora(data)
    monkeypatch.setattr(corpus_module, "prepare", None)
    irrelevant = dataclasses.replace(
        data, strategy="split", row_length=7, num_workers=3, num_documents=5, vocab_size=9, distribution="short"
    )
    assert load_corpora(irrelevant).train.folder == first.train.folder


def test_every_relevant_key_and_file_gives_another_folder(data):
    first = load_corpora(data)
    changes = [
        {"text_key": "other"},
        {"bad_lines": "skip"},
        {"begin_token": None},
        {"end_token": None},
        {"validation_fraction": 0.3},
        {"corpus_seed": 1},
    ]
    with open(data.path, "w") as file:
        file.writelines(json.dumps({"text": text, "other": text[::-1]}) + "\n" for text in TEXTS)
    seen = [first, load_corpora(data)]
    assert seen[0].train.folder != seen[1].train.folder and seen[0].corpus_hash == seen[1].corpus_hash
    seen += [load_corpora(dataclasses.replace(data, **change)) for change in changes]
    assert len({corpora.train.folder for corpora in seen}) == len(folders(data)) == len(changes) + 2
    # The hash is of tokens: skip changed none, so two folders agree with the first.
    assert len({corpora.corpus_hash for corpora in seen}) == len(changes)


def test_the_same_size_with_other_content_is_another_corpus(data):
    first = load_corpora(data)
    content = Path(data.path).read_text()
    Path(data.path).write_text(content.replace("document 7 ", "document 8 "))
    os.utime(data.path, ns=(time.time_ns() + 1_000_000_000,) * 2)
    second = load_corpora(data)
    assert first.train.folder != second.train.folder and first.corpus_hash != second.corpus_hash


@pytest.mark.parametrize(
    "change", [{"num_documents": 101}, {"vocab_size": 300}, {"distribution": "heavy"}, {"corpus_seed": 1}], ids=str
)
def test_synthetic_keys_give_another_corpus(tmp_path, change):
    data = DataConfig(source="synthetic", num_documents=100, distribution="short", cache_dir=str(tmp_path))
    one, other = load_corpora(data, False), load_corpora(dataclasses.replace(data, **change), False)
    assert one.corpus_hash != other.corpus_hash and one.train.folder != other.train.folder


def test_the_corpus_hash_covers_both_splits(data):
    first = load_corpora(data)
    for split, other in ((first.train, first.validation), (first.validation, first.train)):
        write_jsonl(Path(data.path), [text for text in TEXTS if text != texts(split)[0]])
        changed = load_corpora(data)
        kept = changed.validation if split is first.train else changed.train
        assert contents(kept) == contents(other) and changed.corpus_hash != first.corpus_hash


def test_the_corpus_hash_is_of_the_documents_not_of_where_they_lie(data, tmp_path):
    first = load_corpora(data)
    moved = tmp_path / "elsewhere.jsonl"
    os.rename(data.path, moved)
    second = load_corpora(dataclasses.replace(data, path=str(moved), cache_dir=str(tmp_path / "other")))
    assert first.corpus_hash == second.corpus_hash


# --- damage, kills and races


@pytest.mark.parametrize("name", ["train.tokens", "train.lengths", "validation.offsets", "meta.json"])
@pytest.mark.parametrize("how", ["truncate", "remove"])
def test_a_damaged_corpus_is_noticed_and_prepared_again(data, caplog, name, how):
    first = load_corpora(data)
    path = first.train.folder / name
    expected, content = contents(first.train), path.read_bytes()
    path.unlink()
    if how == "truncate":
        path.write_bytes(content[:-5])
    with pytest.raises((ValueError, OSError), match=path.name):
        Corpus(first.train.folder, name.split(".")[0] if name != "meta.json" else "train")
    with caplog.at_level(logging.WARNING):
        second = load_corpora(data)
    assert "is damaged and will be prepared again" in caplog.text
    check_whole(second)
    assert contents(second.train) == expected and second.corpus_hash == first.corpus_hash
    assert folders(data) == [first.train.folder.name]


def test_an_open_corpus_outlives_its_replacement(data):
    first = load_corpora(data)
    expected = contents(first.train)
    (first.train.folder / "meta.json").unlink()
    load_corpora(data)
    assert contents(first.train) == expected


def test_corpora_pickle_as_paths(stdlib, monkeypatch, tmp_path):
    pickled = pickle.dumps(stdlib)
    assert len(pickled) < 1000
    monkeypatch.chdir(tmp_path)
    again = pickle.loads(pickled)
    assert again.corpus_hash == stdlib.corpus_hash and isinstance(again.train.tokens, np.memmap)
    np.testing.assert_array_equal(again.train.document(17), stdlib.train.document(17))


def test_documents_outside_the_corpus_are_index_errors(stdlib):
    for index in (-1, stdlib.train.num_documents):
        with pytest.raises(IndexError):
            stdlib.train.document(index)


def test_a_corpus_is_never_in_memory_whole(data):
    with open(data.path, "w") as file:
        for i in range(4000):
            file.write(json.dumps({"text": f"{i} " + "x" * 8000}) + "\n")
    tracemalloc.start()
    try:
        corpora = load_corpora(data, progress=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert corpora.train.num_tokens + corpora.validation.num_tokens > 32e6
    assert peak < 12e6


def test_what_a_process_left_that_was_killed_when_the_corpus_was_in_its_place_is_cleared_away(data):
    folder = load_corpora(data, progress=False).train.folder
    (left := folder.with_name(f".{folder.name}.work")).mkdir()
    (folder.with_name(f".{folder.name}.damaged") / "train").mkdir(parents=True)
    folder.with_name(f".{folder.name}.lock").touch()
    with alone(folder, data):  # of who is at it
        load_corpora(data, progress=False)
        assert left.exists()
    load_corpora(data, progress=False)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
