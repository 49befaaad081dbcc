"""What is trained on, validated on and tested on: single documents, fractions, test documents of
another place.
"""

import itertools
import json
from contextlib import nullcontext

import numpy as np
import pytest

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources import builtin, open_source, splits
from packmamba.data.token_store import load_corpora
from written import of, read, refused, write_lines, write_megatron, write_texts

TEXT = "".join(f"Line {i}: ☃ and é.\n" for i in range(400))
IDS = [i * i % 97 for i in range(1000)]


def write_single(folder, kind):
    """Write one document for a source; return its path and its content."""
    path, content = folder / "one", IDS if kind == "megatron" else TEXT
    if kind == "megatron":
        return write_megatron(path, [IDS]), content
    path.mkdir()
    if kind == "text":
        (path / "input.txt").write_text(TEXT)
        (path / "empty.txt").touch()
    elif kind == "jsonl":
        write_lines(path / "a.jsonl", ["", TEXT])
    else:
        pyarrow = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").table({"text": [TEXT]})
        pyarrow.write_table(table, path / "a.parquet")
    return path, content


def contents(corpus):
    """Return the documents of a corpus without begin and end tokens, as text or ids."""
    documents = [corpus.document(i) for i in range(len(corpus))] if corpus else []
    if corpus and corpus.vocab_size != 258:
        return [document.tolist() for document in documents]
    return [document[1:-1].astype(np.uint8).tobytes().decode() for document in documents]


def load(data):
    """Return the contents of training, validation and test, and the corpus's hash."""
    corpora = load_corpora(data, progress=False)
    return *map(contents, (corpora.train, corpora.validation, corpora.test)), corpora.corpus_hash


@pytest.mark.parametrize("test_fraction", [0, 0.1])
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "huggingface", "megatron"])
def test_the_end_of_a_single_document_is_held_out(tmp_path, monkeypatch, kind, test_fraction):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    if kind == "huggingface":
        pytest.importorskip("datasets")
    path, content = write_single(tmp_path, kind)
    data = of(path, kind, test_fraction=test_fraction, cache_dir=str(tmp_path / "cache"))
    train, validation, test, _ = load(data)
    tested = round(test_fraction * len(content))
    assert [*map(len, (*validation, *test))] == [round(0.2 * len(content))] + [tested] * bool(tested)
    assert [*itertools.chain(*train, *validation, *test)] == [*content]


def test_a_long_held_out_end_is_several_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "MAX_HELD_OUT_PART", 500)
    path, _ = write_single(tmp_path, "text")
    train, *held_out = read(of(path, "text"))
    assert {len(one.content) for one in held_out[:-1]} == {500} and len(held_out[-1].content) < 500
    assert "".join(one.content for one in (train, *held_out)) == TEXT
    assert not train.held_out and all(one.held_out for one in held_out)


@pytest.mark.parametrize(
    ("files", "keys", "key", "named"),
    [
        ({"a.txt": b""}, {}, "data.path", "a.txt"),
        ({"a.txt": b"", "b.txt": b""}, {}, "data.path", "2 empty"),
        ({"a.bin": b"\x89PNG\xff"}, {}, "data.path", "a.bin"),
        ({"a.bin": b"valid UTF-8, \0 yet no text"}, {}, "data.path", "a.bin"),
        ({"a.txt": b"abc"}, {}, "data.validation_fraction", "3 in "),
        ({"a.txt": b"abcde"}, {"test_fraction": 0.1}, "data.validation_fraction", "5 in "),
        ({"a.txt": b"abc", "b.txt": b"abd"}, {"test_fraction": 0.1}, "data.validation_fraction", "2 documents"),
        ({"a.txt": b"abc", "b.txt": b"abd"}, {"validation_fraction": 0.9}, "data.validation_fraction", "2 documents"),
        ({"a.txt": b"abcdef" * 9}, {"validation_fraction": 0.99}, "data.validation_fraction", "has 54"),
    ],
)
def test_too_few_documents_are_counted_and_named(tmp_path, files, keys, key, named):
    (tmp_path / "texts").mkdir()
    for name, content in files.items():
        (tmp_path / "texts" / name).write_bytes(content)
    message = refused(of(tmp_path / "texts", "text", cache_dir=str(tmp_path / "cache"), **keys))
    assert message.startswith(f"{key}: ") and named in message


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_a_source_of_files_without_a_path_says_null(source):
    with pytest.raises(ConfigError, match=r"^data\.path: .* got null; set data\.path"):
        open_source(DataConfig(source))


def test_equal_documents_alone_cannot_be_split(tmp_path):
    data = of(write_lines(tmp_path / "a.jsonl", ["same"] * 3), cache_dir=str(tmp_path / "cache"))
    assert "got 0 and 3" in refused(data)


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_a_test_fraction_takes_documents_from_training_alone(tmp_path, source):
    texts = [f"document {i // 2}" for i in range(400)]
    path = write_texts(tmp_path / "texts", texts) if source == "text" else write_lines(tmp_path / "a.jsonl", texts)
    cache = str(tmp_path / "cache")
    whole, validation, none, _ = load(of(path, source, cache_dir=cache))
    train, same, test, _ = load(of(path, source, cache_dir=cache, test_fraction=0.1))
    assert not none and 20 < len(test) < 60
    assert not {*test} & {*train, *same} and same == validation
    assert {*test} <= {*whole} - {*train} <= {*test, *validation}


@pytest.mark.parametrize(
    "keys",
    [
        {"source": "stdlib"},
        {"source": "synthetic", "num_documents": 500},
        {"source": "task", "task": "mqar", "num_documents": 500},
    ],
    ids=lambda keys: keys["source"],
)
def test_sources_without_files_have_a_test_split(tmp_path, monkeypatch, keys):
    files = [name for name in builtin.library_files() if name.startswith("email")]
    monkeypatch.setattr(builtin, "library_files", lambda: files)
    data = DataConfig(**keys, test_fraction=0.1, cache_dir=str(tmp_path))
    corpora = load_corpora(data, progress=False)
    splits_of_data = (corpora.train, corpora.validation, corpora.test)
    train, validation, test = ({one.document(i).tobytes() for i in range(len(one))} for one in splits_of_data)
    assert test and validation and not test & (train | validation)
    assert 0.03 < len(corpora.test) / len(corpora.train) < 0.4


@pytest.mark.parametrize("single", [False, True])
def test_documents_of_a_test_path_are_neither_trained_nor_validated_on(tmp_path, single):
    texts = [f"document {i}" for i in range(50)]
    tested = ["another"] if single else [texts[7], "another"]
    path = write_texts(tmp_path / "texts", texts[:1] if single else texts)
    others = write_texts(tmp_path / "others", tested)
    data = of(path, "text", test_path=str(others), cache_dir=str(tmp_path / "cache"))
    with nullcontext() if single else pytest.warns(UserWarning, match="not trained or validated on: 1"):
        train, validation, test, _ = load(data)
    assert test == tested
    if single:
        assert "".join([*train, *validation]) == texts[0]
    else:
        assert sorted([*train, *validation]) == sorted({*texts} - {*tested})


def test_ids_of_a_test_path_are_in_the_vocabulary(tmp_path):
    path = write_megatron(tmp_path / "a", [[1, 2, 3], [4, 5], [6, 7]])
    others = write_megatron(tmp_path / "b", [[1, 90]])
    data = of(path, "megatron", test_path=str(others), cache_dir=str(tmp_path / "cache"))
    corpora = load_corpora(data, progress=False)
    assert corpora.train.vocab_size == corpora.test.vocab_size == 91


def test_named_test_documents_are_the_test_split_and_change_no_hash(tmp_path):
    rows = [("b", "validation", "y"), ("a", "train", "x"), ("c", "test", "z"), ("d", "train", "x"), ("a", "test", "z")]
    hashes = []
    for count in (4, 5, 2):
        path = tmp_path / f"{count}.jsonl"
        chosen = [row for row in rows if row[1] != "test"] if count == 2 else rows[:count]
        path.write_text("\n".join(json.dumps(dict(zip(("text", "split", "group"), row))) for row in chosen))
        found = load(DataConfig("splits", str(path), cache_dir=str(tmp_path / "cache")))
        assert found[:2] == (["a", "d"], ["b"])
        assert found[2] == {4: ["c"], 5: ["c", "a"], 2: []}[count]
        hashes.append(found[3])
    assert len({*hashes}) == 1


def test_a_broken_test_file_is_named_by_its_key(tmp_path):
    path = write_lines(tmp_path / "a.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "one"}\n{"text": 2}\n')
    error = refused(of(path, test_path=str(broken), cache_dir=str(tmp_path / "cache")))
    assert error.startswith(f"data.test_path: {broken}:2: expected text")
