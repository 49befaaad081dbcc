"""Sources and tokenizers: what they yield, what they hold out, what they refuse."""

import json
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from packmamba.config import ConfigError, DataConfig
from packmamba.data.lengths import draw_lengths
from packmamba.data.sources import open_source
from packmamba.data.tokenization import ByteTokenizer, TokenIds, load_tokenizer, token_dtype


def read(data):
    """(held out, content) of every document, and the counts of what was skipped; checks the progress on the way."""
    source = open_source(data)
    skipped, advanced = Counter(), []
    found = list(source.read(advanced.append, skipped))
    assert sum(advanced) == source.total > 0
    return found, dict(skipped)


def write_jsonl(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# --- stdlib


@pytest.fixture(scope="session")
def stdlib_files():
    """The documents of the standard library in one list for each file: the source advances where a file ends."""
    files = [[]]
    for document in open_source(DataConfig()).read(lambda _: files.append([]), Counter()):
        files[-1].append(document)
    return [file for file in files if file]


@pytest.fixture
def stdlib(stdlib_files):
    return [document for file in stdlib_files for document in file]


@pytest.mark.slow
def test_stdlib_has_thousands_of_documents_with_a_heavy_tail(stdlib):
    sizes = np.array([len(document.content.encode()) for document in stdlib])
    assert 10_000 < len(sizes) < 25_000
    assert 5e6 < sizes.sum() < 12e6
    assert sizes.max() > 20 * np.median(sizes)


@pytest.mark.slow
def test_stdlib_documents_are_whole_functions_as_they_stand_in_the_file(stdlib):
    assert sum(document.content.lstrip().startswith("@") for document in stdlib) > 500
    for document in stdlib:
        assert document.content.lstrip().startswith(("def ", "async def", "@"))
    source = Path(json.__file__).read_text()
    dumps = next(document.content for document in stdlib if document.content.startswith("def dumps(obj, *, skipkeys"))
    assert dumps in source and dumps.endswith("\n") and "return _default_encoder.encode(obj)" in dumps


def tiny_stdlib(monkeypatch, root: Path, files: dict) -> None:
    for name, code in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(code if isinstance(code, bytes) else code.encode())
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(root))


def test_stdlib_cuts_top_level_functions_and_methods_and_leaves_nested_ones_inside(monkeypatch, tmp_path):
    code = (
        "def a():\n    def inner():\n        pass\n    return inner\n"
        "if True:\n    @dec(\n        1)\n    async def b(): pass\n"
        "\fclass C:\n    def c(self):\n        x = 1\n\n    class D:\n        def d(self): pass"
    )
    latin = "# -*- coding: latin-1 -*-\ndef e(): return 'é'\n".encode("latin-1")
    files = {"m.py": code, "n.py": latin, "broken.py": "def (", "test/t.py": "def no(): pass\n", "x.txt": "def no(): 1"}
    tiny_stdlib(monkeypatch, tmp_path, files)
    found, skipped = read(DataConfig(validation_fraction=0))
    assert [document.content for document in found] == [
        "def a():\n    def inner():\n        pass\n    return inner\n",
        "    @dec(\n        1)\n    async def b(): pass\n",
        "    def c(self):\n        x = 1\n",
        "        def d(self): pass",
        "def e(): return 'é'\n",
    ]
    assert skipped == {"unparsable_files": 1}


def test_stdlib_splits_share_no_source_file(stdlib_files):
    sides = [{document.held_out for document in file} for file in stdlib_files]
    assert len(sides) > 300 and all(len(side) == 1 for side in sides)
    assert 0.01 < sum(True in side for side in sides) / len(sides) < 0.1


def test_stdlib_holds_out_the_share_of_files_that_was_asked_for(monkeypatch, tmp_path):
    files = {f"m{i}.py": f"def a(): return {i}\ndef b(): return {i}\n" for i in range(40)}
    tiny_stdlib(monkeypatch, tmp_path, files)
    sides = {}
    for held_out, content, _ in read(DataConfig(validation_fraction=0.25))[0]:
        sides.setdefault(content.split()[-1], set()).add(held_out)
    assert all(len(side) == 1 for side in sides.values())
    assert sum(True in side for side in sides.values()) == 10


# --- text


def write_texts(root: Path, texts: dict) -> DataConfig:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return DataConfig(source="text", path=str(root), validation_fraction=0.25)


def test_text_reads_every_visible_file_in_the_order_of_its_name(tmp_path):
    data = write_texts(
        tmp_path,
        {"b.txt": "\ufeffzwei\r\n", "a/z.md": "eins", "c": "drei ☃", ".hidden": "no", ".git/x": "no", "d.txt": ""},
    )
    found, skipped = read(data)
    assert [document.content for document in found] == ["eins", "zwei\r\n", "drei ☃", ""]
    assert not skipped  # empty documents are counted where they have become tokens


def test_text_split_depends_on_names_and_seed_only(tmp_path):
    def held_out(names, seed):
        data = write_texts(tmp_path / f"{seed}-{len(names)}-{names[0]}", {name: name for name in names})
        data.corpus_seed = seed
        return {document.content for document in read(data)[0] if document.held_out}

    names = [f"{i}.txt" for i in range(40)]
    first = held_out(names, 0)
    assert len(first) == 10
    assert held_out(names[::-1], 0) == first != held_out(names, 1)
    assert len(held_out(names[:39], 0) ^ first) <= 2  # a file more or less moves one other file at most


def test_two_files_are_one_for_each_split(tmp_path):
    data = write_texts(tmp_path, {"a": "a", "b": "b"})
    data.validation_fraction = 0.01
    assert sorted(document.held_out for document in read(data)[0]) == [False, True]


@pytest.mark.parametrize("fraction", [0.05, 0.9])
def test_a_split_that_leaves_nothing_to_train_on_is_an_error(tmp_path, fraction):
    data = write_texts(tmp_path, {"a": "a"})
    data.validation_fraction = fraction
    with pytest.raises(ConfigError, match=r"data\.validation_fraction.* 1 of 1 files"):
        open_source(data)


def test_text_that_is_not_utf8_names_the_file(tmp_path):
    data = write_texts(tmp_path, {"a": "a", "b": "b"})
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"picture\.png in data\.path is not UTF-8 text \(byte 0\)"):
        read(data)


# --- jsonl


def test_jsonl_file_and_folder_hold_the_same_documents(tmp_path):
    records = [{"text": f"document {i} ☃\u2028"} for i in range(30)]
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    write_jsonl(tmp_path / "all.jsonl", records)
    write_jsonl(tmp_path / "folder" / "b.jsonl", records[20:])
    write_jsonl(tmp_path / "folder" / "a.jsonl", records[:20])
    (tmp_path / "folder" / "deep" / "notes.txt").write_text("not JSON")
    one = read(DataConfig(source="jsonl", path=str(tmp_path / "all.jsonl"), validation_fraction=0.3))[0]
    many = read(DataConfig(source="jsonl", path=str(tmp_path / "folder"), validation_fraction=0.3))[0]
    assert one == many
    assert [document.content for document in one] == [record["text"] for record in records]


def test_jsonl_split_ignores_order_and_keeps_equal_documents_together(tmp_path):
    texts = [f"document {i}" for i in range(1000)] * 2

    def held_out(name, texts, seed=0):
        path = write_jsonl(tmp_path / name, ({"text": text} for text in texts))
        found, _ = read(DataConfig(source="jsonl", path=str(path), validation_fraction=0.1, corpus_seed=seed))
        held = {document.content for document in found if document.held_out}
        assert held.isdisjoint(document.content for document in found if not document.held_out)
        return held

    forward = held_out("a.jsonl", texts)
    assert 70 < len(forward) < 130
    assert held_out("b.jsonl", texts[::-1]) == forward != held_out("c.jsonl", texts, seed=1)


@pytest.mark.parametrize("seed", range(8))
def test_a_small_jsonl_holds_out_at_least_one_document(tmp_path, seed):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": ""}, *({"text": str(i)} for i in range(5))])
    found, _ = read(DataConfig(source="jsonl", path=str(path), validation_fraction=0.001, corpus_seed=seed))
    assert len([document for document in found if document.held_out and document.content]) == 1


BROKEN_LINES = {
    "json": (b'{"text": "a"', "is not valid JSON"),
    "missing": (b'{"txt": "a", "id": 3}', r"has no field 'text' \(data\.text_key\); its fields: txt, id"),
    "number": (b'{"text": 3}', "that is not a string"),
    "null": (b'{"text": null}', "that is not a string"),
    "list": (b'["text"]', "is not a JSON object"),
    "utf8": (b'{"text": "\xff"}', r"is not UTF-8 \(byte 10\)"),
    "surrogate": (b'{"text": "\\ud800"}', "half a surrogate pair"),
    "deep": (b"[" * 200_000, "is not JSON that can be read"),
}


@pytest.mark.parametrize("line, reason", BROKEN_LINES.values(), ids=BROKEN_LINES)
def test_a_broken_json_line_is_named_by_file_and_line_or_skipped_and_counted(tmp_path, line, reason):
    good = b'{"text": "good"}\n'
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n  \n" + line + b"\n" + good + line)
    data = DataConfig(source="jsonl", path=str(path), validation_fraction=0)
    with pytest.raises(ConfigError, match=rf"corpus\.jsonl:4 .*{reason}.*data\.bad_lines=skip") as caught:
        read(data)
    assert "\n" not in str(caught.value)
    data.bad_lines = "skip"
    found, skipped = read(data)
    assert [document.content for document in found] == ["good", "good"] and skipped == {"bad_lines": 2}


# --- synthetic


@pytest.mark.parametrize("name", ["documents-2k", "short", "heavy"])
def test_synthetic_lengths_are_the_distribution_to_the_bit(name):
    data = DataConfig(source="synthetic", distribution=name, num_documents=2500, vocab_size=300, corpus_seed=3)
    found, _ = read(data)
    assert [len(document.content) for document in found] == draw_lengths(name, 2500, 3).tolist()
    assert sum(document.held_out for document in found) == 125
    tokens = np.concatenate([document.content for document in found])
    assert tokens.min() == 0 and tokens.max() == 299
    counts = np.bincount(tokens, minlength=300) / len(tokens) * 300
    assert np.abs(counts - 1).max() < 6 / np.sqrt(len(tokens) / 300)
    data.corpus_seed = 4
    other = np.concatenate([document.content for document in read(data)[0]])
    assert (tokens[:1000] != other[:1000]).mean() > 0.9


# --- keys


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"source": "txet"},
            "data.source: expected one of stdlib, text, jsonl, packages, synthetic, task, parquet, huggingface, megatron",
        ),
        ({"validation_fraction": 1.0}, "data.validation_fraction: expected at least 0 and below 1, got "),
        ({"validation_fraction": -0.1}, "data.validation_fraction: expected at least 0 and below 1, got "),
        ({"validation_fraction": float("nan")}, "data.validation_fraction: expected at least 0 and below 1, got "),
        ({"corpus_seed": -1}, "data.corpus_seed: expected at least 0, got -1"),
        ({"bad_lines": "ignore"}, "data.bad_lines: expected one of error, skip, got 'ignore'"),
        ({"path": "corpus"}, "data.source=stdlib reads no path"),
        ({"source": "text"}, "data.source=text needs data.path"),
        ({"source": "jsonl"}, "data.source=jsonl needs data.path"),
        ({"source": "text", "path": "nowhere"}, "data.path 'nowhere' does not exist"),
        ({"source": "jsonl", "path": "nowhere"}, "data.path 'nowhere' does not exist"),
        ({"source": "text", "path": "a.txt"}, "data.path 'a.txt' is not a folder"),
        ({"source": "text", "path": "empty"}, "data.path 'empty' holds no text"),
        ({"source": "jsonl", "path": "empty"}, "data.path 'empty' has no .jsonl file"),
        (
            {"source": "synthetic", "distribution": "long"},
            "data.distribution: expected one of documents-2k, short, heavy, got",
        ),
        ({"source": "synthetic", "num_documents": 0}, "data.num_documents: expected at least 1"),
        ({"source": "synthetic", "num_documents": 1}, "data.validation_fraction=0.05 holds out 1 of 1 documents"),
        ({"source": "synthetic", "vocab_size": 0}, "data.vocab_size: expected 1 to 2**32"),
    ],
    ids=str,
)
def test_a_bad_key_is_one_sentence_before_any_work(tmp_path, monkeypatch, keys, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("a.txt").write_text("a")
    with pytest.raises(ConfigError) as caught:
        open_source(DataConfig(**keys))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_documents_and_splits_are_the_same_in_another_process(tmp_path):
    texts = write_texts(tmp_path / "texts", {f"{i}.txt": f"text {i}" for i in range(20)})
    lines = write_jsonl(tmp_path / "a.jsonl", ({"text": f"line {i}"} for i in range(50)))
    configs = [
        texts,
        DataConfig(source="jsonl", path=str(lines)),
        DataConfig(source="synthetic", distribution="short", num_documents=50),
    ]
    code = (
        "import sys; from collections import Counter; from packmamba.config import DataConfig\n"
        "from packmamba.data.sources import open_source\n"
        f"for data in {configs!r}:\n"
        "    for held_out, content, _ in open_source(data).read(lambda _: None, Counter()):\n"
        "        print(held_out, content if isinstance(content, str) else content.tolist())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1 and len(outputs.pop().splitlines()) == 120


# --- tokenizers


@pytest.mark.parametrize(
    "begin, end, ids, size",
    [
        ("<s>", "</s>", (256, 257), 258),
        (None, "</s>", (None, 256), 257),
        ("|", "|", (256, 256), 257),
        (None, None, (None,) * 2, 256),
    ],
)
def test_bytes_round_trip_and_begin_and_end_tokens_get_new_ids(begin, end, ids, size):
    tokenizer = load_tokenizer(DataConfig(begin_token=begin, end_token=end))
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.vocab_size) == (*ids, size)
    for text in ("", "a", "Grüße ☃\0\r\n<s>" * 100):
        encoded = tokenizer.encode(text)
        assert encoded.dtype == token_dtype(size) == np.uint16
        assert bytes(encoded.astype(np.uint8)).decode() == text


def test_token_dtype_is_the_smallest_that_holds_every_id():
    assert [token_dtype(n) for n in (256, 2**16, 2**16 + 1)] == [np.uint16, np.uint16, np.uint32]


@pytest.fixture
def tokenizer_file(tmp_path):
    """Words a, b, c and special tokens; a gap in the ids; truncation, padding and a template that must not apply."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[unk]": 0, "a": 1, "b": 2, "c": 9, "<|end|>": 4}, unk_token="[unk]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|end|>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 4)])
    made.enable_truncation(4)
    made.enable_padding(length=4)
    made.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def test_tokenizer_file_encodes_text_alone(tokenizer_file):
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(tokenizer_file), begin_token=None, end_token="<|end|>"))
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.vocab_size) == (None, 4, 10)
    assert tokenizer.encode("a b c x a b c").tolist() == [1, 2, 9, 0, 1, 2, 9]
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a", "", "b a"])] == [[1], [], [2, 1]]


def test_tokenizer_file_errors_are_one_sentence(tokenizer_file, tmp_path, monkeypatch):
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": "1.0"}')

    def error(**keys):
        with pytest.raises(ConfigError) as caught:
            load_tokenizer(DataConfig(**keys))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "data.tokenizer" in error(tokenizer="bites") and "'bites' is no file" in error(tokenizer="bites")
    assert "is not a tokenizers JSON file" in error(tokenizer=str(broken))
    assert "its special tokens: <|end|>" in error(tokenizer=str(tokenizer_file))
    assert "data.begin_token '<s>' is not a token of" in error(tokenizer=str(tokenizer_file))
    assert "data.end_token '</s>' is not a token of" in error(tokenizer=str(tokenizer_file), begin_token=None)
    assert "data.begin_token: expected text, got ''" in error(begin_token="")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "needs the package tokenizers" in error(tokenizer=str(tokenizer_file))


def test_synthetic_documents_get_no_begin_and_end_tokens():
    tokenizer = TokenIds(open_source(DataConfig(source="synthetic", vocab_size=70_000)).vocab_size)
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.vocab_size) == (None, None, 70_000)
    assert tokenizer.encode([1, 2]).dtype == np.uint32


def test_fingerprints_differ_where_ids_may(tokenizer_file):
    def of(**keys):
        return load_tokenizer(DataConfig(**keys)).fingerprint

    end = {"begin_token": None, "end_token": "<|end|>"}
    seen = [of(), of(begin_token=None), of(end_token=None), of(tokenizer=str(tokenizer_file), **end)]
    tokenizer_file.write_text(tokenizer_file.read_text().replace('"c": 9', '"c": 8'))
    seen.append(of(tokenizer=str(tokenizer_file), **end))
    assert len(set(seen)) == 5 and of() == ByteTokenizer("<s>", "</s>").fingerprint
