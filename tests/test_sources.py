"""Compressed JSON lines, patterns, parquet: written by other libraries, read by us."""

import gzip
import io
import json
import os
import struct
import sys
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packmamba.config import ConfigError, DataConfig
from packmamba.data.corpus import load_corpora
from packmamba.data.sources import jsonl, open_source, parquet
from written import TEXTS, of, read, refused, write_lines


@pytest.fixture
def expected(tmp_path):
    """What plain JSON lines give."""
    return read(of(write_lines(tmp_path / "expected.jsonl")))[0]


# --- compressed JSON lines, patterns, parts


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.gz"])
def test_compressed_lines_are_the_lines(tmp_path, name, expected, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK", 777)
    assert read(of(write_lines(tmp_path / name)))[0] == expected


@settings(max_examples=100, deadline=None)
@example(lines=['{"text": "a"}'] * 3, newline=True, size=14)  # lines begin where parts do
@given(
    lines=st.lists(st.sampled_from(["", "  ", '{"text": "a"}', '{"text": "☃ and more of it"}']), max_size=12),
    newline=st.booleans(),
    size=st.integers(1, 40),
)
def test_ranges_of_a_file_give_each_line_once(tmp_path_factory, lines, newline, size):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    content = "\n".join(lines) + "\n" * newline
    path.write_text(content)
    total = path.stat().st_size
    found, advanced = [], []
    for start in range(0, total, size):
        found += jsonl._range(path, start, min(start + size, total), "text", "error", advanced.append, Counter())
    assert found == [json.loads(line)["text"] for line in lines if line.strip()] and sum(advanced) == total


def test_a_broken_line_of_a_later_part_has_its_number(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    lines[200] = "broken\n"
    path.write_text("".join(lines))
    for size in (50, 1000, 1 << 20):
        monkeypatch.setattr(jsonl, "PART_BYTES", size)
        with pytest.raises(ConfigError, match=r"a\.jsonl:201 is not valid JSON"):
            read(of(path))
    monkeypatch.setattr(jsonl, "PART_BYTES", 100)
    assert read(of(path, bad_lines="skip"))[1] == {"bad_lines": 1}


def test_a_folder_and_a_pattern_take_compressed_and_plain_files(tmp_path, expected):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    write_lines(folder / "a.jsonl", TEXTS[:100])
    write_lines(folder / "b.jsonl.gz", TEXTS[100:200])
    write_lines(folder / "deep" / "c.jsonl.zst", TEXTS[200:])
    (folder / "notes.txt").write_text("not JSON")
    for path in (folder, folder / "**" / "*.jsonl*", tmp_path / "fold*"):
        assert read(of(path))[0] == expected
    assert [d.content for d in read(of(folder / "*.gz"))[0]] == TEXTS[100:200]
    assert "is there compressed too, as a.jsonl.gz" in refused(of(write_lines(folder / "a.jsonl.gz").parent))
    assert "'nothing*' has no .jsonl file" in refused(of("nothing*"))


def test_broken_compressed_files_are_one_sentence(tmp_path):
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        path = write_lines(tmp_path / name)
        whole = path.read_bytes()
        path.write_bytes(whole[:-20])
        assert f"{path} in data.path is cut short" in refused(of(path))
        path.write_bytes(whole[:-200] + bytes(100) + whole[-100:])
        assert f"{path} in data.path is damaged" in refused(of(path))
        path.write_bytes(b"")
        assert "has no document with a token" in refused(of(path))
        path.write_text('{"text": "plain"}\n')
        assert f"{path} in data.path is damaged: it is not" in refused(of(path))


def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path):
    for source, name in (("text", "a.txt"), ("jsonl", "a.jsonl"), ("parquet", "a.parquet")):
        folder = tmp_path / source
        folder.mkdir()
        (folder / f"b{name}").write_text('{"text": "a"}')
        os.mkfifo(folder / name)
        assert f"{folder / name} in data.path is a pipe" in refused(of(folder, source))
        assert "is a pipe" in refused(of(folder / name, source))
        (folder / name).unlink()
        (folder / name).symlink_to("nowhere")
        assert f"{folder / name} in data.path is a link to nowhere" in refused(of(folder, source))
        assert "is a link to 'nowhere', which does not exist" in refused(of(folder / name, source))


# --- parquet


def write_parquet(path, texts=TEXTS, **options):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = (
        texts
        if isinstance(texts, pa.Table)
        else pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())})
    )
    pyarrow.parquet.write_table(table, path, **options)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_parquet_has_the_documents_and_the_split_of_json_lines(tmp_path, expected, kind, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    types = {"dictionary": pa.dictionary(pa.int32(), pa.string())}
    column = pa.array(TEXTS).cast(types[kind] if kind in types else getattr(pa, kind)())
    path = write_parquet(tmp_path / "a.parquet", pa.table({"id": range(300), "text": column}), row_group_size=70)
    monkeypatch.setattr(parquet, "PART_BYTES", 3000)
    assert len(open_source(of(path, "parquet")).parts()) > 2
    assert read(of(path, "parquet"))[0] == expected
    one, other = (
        load_corpora(of(path, "parquet", cache_dir=str(tmp_path / "c"), num_proc=1 + (kind == "string")), False),
        load_corpora(of(tmp_path / "expected.jsonl", cache_dir=str(tmp_path / "c")), False),
    )
    assert one.corpus_hash == other.corpus_hash


def test_folders_and_patterns_of_parquet(tmp_path, expected):
    (tmp_path / "p" / "deep").mkdir(parents=True)
    write_parquet(tmp_path / "p" / "a.parquet", TEXTS[:99])
    write_parquet(tmp_path / "p" / "deep" / "b.parquet", TEXTS[99:])
    write_parquet(tmp_path / "p" / "deep" / "c.parquet", [])
    (tmp_path / "p" / "_SUCCESS").touch()
    assert (
        read(of(tmp_path / "p", "parquet"))[0]
        == read(of(tmp_path / "p" / "**" / "*.parquet", "parquet"))[0]
        == expected
    )


def test_parquet_files_that_cannot_be_read_are_one_sentence(tmp_path):
    pa = pytest.importorskip("pyarrow")
    path = write_parquet(tmp_path / "a.parquet")
    whole = path.read_bytes()
    for content in (whole[:-30], whole[:100], b"", b"PAR1"):
        path.write_bytes(content)
        assert f"{path} in data.path is no whole parquet file" in refused(of(path, "parquet"))
    import pyarrow.parquet

    path.write_bytes(whole)
    place = pyarrow.parquet.read_metadata(path).row_group(0).column(1).data_page_offset
    path.write_bytes(whole[:place] + bytes(200) + whole[place + 200 :])
    assert f"{path} in data.path is damaged" in refused(of(path, "parquet"))
    path.write_bytes(whole)
    missing = refused(of(path, "parquet", text_key="txt"))
    assert "has no column 'txt' (data.text_key); its columns: id, text" in missing
    assert "holds int64, not text; its columns of text: text" in refused(of(path, "parquet", text_key="id"))
    nested = pa.table({"text": [{"body": "a"}], "list": [["a"]], "bytes": [b"a"], "none": pa.nulls(1), "other": ["a"]})
    write_parquet(path, nested)
    for key, kind in (("text", "struct<body: string>"), ("list", "list<"), ("bytes", "binary"), ("none", "null")):
        said = refused(of(path, "parquet", text_key=key))
        assert f"the column '{key}' (data.text_key) of {path} holds {kind}" in said and said.endswith("of text: other")
    write_parquet(path, pa.table([["a"], ["b"]], names=["text", "text"]))
    assert "has 2 columns 'text'" in refused(of(path, "parquet"))
    write_parquet(tmp_path / "b.parquet", pa.table({"body": ["a"]}))
    write_parquet(path)
    assert "b.parquet in data.path has no column 'text'" in refused(of(tmp_path, "parquet"))  # before any is read


def test_a_row_group_is_not_in_memory_whole(tmp_path):
    pa = pytest.importorskip("pyarrow")
    path = write_parquet(tmp_path / "a.parquet", [f"{i} " + "x" * 1000 for i in range(30_000)], compression="none")
    (part,) = open_source(of(path, "parquet")).parts()
    held = pa.total_allocated_bytes()
    most = max(pa.total_allocated_bytes() - held for _ in part(lambda _: None, Counter()))
    assert path.stat().st_size > 30e6 and most < 5e6


def test_rows_without_text_are_errors_or_counted(tmp_path):
    pa = pytest.importorskip("pyarrow")
    texts = [*TEXTS[:10], None, *TEXTS[10:20]]
    path = write_parquet(tmp_path / "a.parquet", texts, row_group_size=4)
    assert f"row 10 of {path} has no text (null) in 'text'" in refused(of(path, "parquet"))
    found, skipped = read(of(path, "parquet", bad_lines="skip"))
    assert [d.content for d in found] == TEXTS[:20] and skipped == {"bad_rows": 1}
    wrong = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(struct.pack("<3i", 0, 1, 3)), pa.py_buffer(b"a\xff\xfe")]
    )
    write_parquet(path, pa.table({"text": wrong}))
    assert "row 1 of" in (said := refused(of(path, "parquet"))) and "is not UTF-8" in said


# --- missing packages


@pytest.mark.parametrize(
    "source, package, name",
    [("parquet", "pyarrow", "a.parquet"), ("huggingface", "datasets", "a"), ("jsonl", "zstandard", "a.zst")],
)
def test_a_missing_package_names_the_command_that_installs_it(tmp_path, source, package, name, monkeypatch):
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.parquet", None)
    said = refused(of(tmp_path / name, source))
    assert f"needs the package {package}: pip install 'packmamba[integrations]'" in said


def test_gzip_s_own_reader_agrees(tmp_path):
    path = write_lines(tmp_path / "a.jsonl.gz")
    with gzip.open(path) as file:
        content = io.BytesIO(file.read())
    with open(path, "rb") as file:
        assert list(jsonl._lines(path, file)) == content.readlines()


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "megatron"])
def test_a_folder_on_the_way_that_is_closed_is_one_sentence(tmp_path, monkeypatch, source):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.stat", refuse)  # the tests may run as one whom no folder is closed to
    with pytest.raises(ConfigError, match=r"^data.path '/closed/folder.*' cannot be read \(permission denied\)$"):
        open_source(DataConfig(source=source, path="/closed/folder/a"))
