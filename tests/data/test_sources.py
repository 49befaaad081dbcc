"""Sources: what they read, what they hold out, what they refuse."""

import json
import os
import sys
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources import open_source
from packmamba.data.sources.packages import functions_of
from packmamba.data.token_store import load_corpora
from written import TEXTS, ZSTD, of, read, refused, write_lines, write_megatron


@pytest.fixture
def expected(tmp_path):
    """Return the documents of plain JSON lines."""
    return read(of(write_lines(tmp_path / "expected.jsonl")))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.gz"])
def test_compressed_lines_are_the_lines(tmp_path, name, expected):
    assert read(of(write_lines(tmp_path / name))) == expected


BROKEN = (b'{"text": "a"', b'{"txt": "a"}', b'{"text": null}', b'["text"]', b'{"text": "\xff"}', b'{"text": "\\ud800"}')


@pytest.mark.parametrize("line", BROKEN, ids=["json", "missing", "null", "list", "utf8", "surrogate"])
def test_a_broken_line_is_named_by_file_and_line(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "good"}\n\n  \n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(ConfigError, match=r"^data\.path: .*a\.jsonl:4: "):
        read(of(path))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_compressed_files_that_are_damaged_are_refused_by_name(tmp_path, name):
    path = write_lines(tmp_path / name)
    whole = path.read_bytes()
    # Cut off where lines end: behind a whole member of whole lines.
    at_a_line = write_lines(tmp_path / f"first-{name}", TEXTS[:9]).read_bytes() + whole[:40]
    for damaged in (whole[:-20], at_a_line, whole[:-200] + bytes(100) + whole[-100:], b'{"text": "plain"}\n'):
        path.write_bytes(damaged)
        assert refused(of(path)).startswith(f"data.path: {path}")


def test_lines_that_name_their_split_keep_it_and_test_documents_stay_apart(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [("b", "validation", "y"), ("a", "train", "x"), ("c", "test", "z"), ("d", "train", "x")]
    path.write_text("\n".join(json.dumps(dict(zip(("text", "split", "group"), row))) for row in rows) + "\n\n")
    found = [(one.content, one.held_out, one.group) for one in read(DataConfig("splits", str(path)))]
    assert found == [("b", True, "y"), ("a", False, "x"), ("d", False, "x")]
    corpora = load_corpora(DataConfig("splits", str(path), cache_dir=str(tmp_path / "c")), progress=False)
    assert [corpus.group_names for corpus in corpora[:2]] == [["x"], ["y"]]
    path.write_text(path.read_text().replace('"test"', '"tset"'))
    assert refused(DataConfig("splits", str(path), cache_dir=str(tmp_path / "d"))).startswith(f"data.path: {path}:3:")
    with pytest.raises(ConfigError, match=r"^data\.validation_fraction: "):
        open_source(of(path, "splits"))


@pytest.mark.parametrize("fraction", [0.1, 0.0001])
def test_the_split_is_by_content_and_holds_out_at_least_one(tmp_path, fraction):
    texts = [f"document {i}" for i in range(1000)] * 2
    forward = read(of(write_lines(tmp_path / "a.jsonl", ["", *texts]), validation_fraction=fraction))
    backward = read(of(write_lines(tmp_path / "b.jsonl", texts[::-1]), validation_fraction=fraction))
    held_out, again = ({one.content for one in found if one.held_out} for found in (forward, backward))
    assert held_out == again and not held_out & {one.content for one in forward if not one.held_out and one.content}
    assert 70 < len(held_out) < 130 if fraction == 0.1 else len(held_out - {""}) == 1


def test_text_reads_every_visible_file_in_the_order_of_its_name_and_holds_out_by_it(tmp_path):
    texts = {"b.txt": "\ufeffzwei\r\n", "a/z.md": "eins", "c": "drei ☃", ".hidden": "no", ".git/x": "no", "d.rst": ""}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    found = read(of(tmp_path, "text"))
    assert [document.content for document in found] == ["eins", "zwei\r\n", "drei ☃", ""]
    (tmp_path / "b.txt").write_text("other")
    assert [one.held_out for one in read(of(tmp_path, "text"))] == [one.held_out for one in found]
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert "picture.png" in refused(of(tmp_path, "text"))


def test_folders_that_are_not_read_are_named(tmp_path, monkeypatch):
    folder, scandir = tmp_path / "texts", os.scandir
    for name in ("texts/closed", "others"):
        (tmp_path / name).mkdir(parents=True)
    write_lines(folder / "a.jsonl")
    (folder / "linked").symlink_to(tmp_path / "others")
    with pytest.warns(UserWarning, match="texts/linked"):
        open_source(of(folder))

    def without_permission(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", without_permission)
    with pytest.raises(ConfigError, match=r"^data\.path: .*texts/closed"):
        open_source(of(folder))


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The package, with a cache of the test's own."""
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    package.disable_progress_bars()
    return package


def test_parquet_has_the_documents_and_the_split_of_json_lines(tmp_path, datasets, expected):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "p" / "deep").mkdir(parents=True)
    pq.write_table(pa.table({"id": range(99), "text": TEXTS[:99]}), tmp_path / "p" / "a.parquet", row_group_size=7)
    pq.write_table(pa.table({"text": pa.array(TEXTS[99:], pa.large_string())}), tmp_path / "p" / "deep" / "b.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "p" / "c.parquet")
    pq.write_table(pa.table({"text": pa.array(TEXTS).dictionary_encode()}), tmp_path / "words.parquet")
    for path in ("p", "p/**/*.parquet", "words.parquet"):
        assert read(of(tmp_path / path, "parquet")) == expected


REMOTE = ["text a.txt", "jsonl a.jsonl", "jsonl a.jsonl.gz", "jsonl a.jsonl.zst", "parquet a.parquet"]


@pytest.fixture(params=REMOTE)
def uploaded(request, tmp_path):
    """Return a source, a file's name, and a function that copies the folder of its files to
    memory://.
    """
    source, name = request.param.split()
    for number, path in enumerate([tmp_path / name, tmp_path / "deep" / name, tmp_path / ".hidden" / name]):
        path.parent.mkdir(exist_ok=True)
        write_lines(path, TEXTS[number * 99 : number * 99 + 99])
        if source == "parquet":
            table = pytest.importorskip("pyarrow.json").read_json(path)
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
    return source, name, lambda: fsspec.filesystem("memory").put(f"{tmp_path}/", str(tmp_path), recursive=True)


def test_a_url_has_the_documents_and_the_split_of_a_path(tmp_path, uploaded):
    source, name, upload = uploaded
    upload()
    for end in ("", "/", f"/{name}", "/deep", "/*", "/**/a.*", "/d?ep/*"):
        assert read(of(f"memory:/{tmp_path}{end}", source)) == read(of(f"{tmp_path}{end}", source)), end


def test_the_fingerprint_of_a_url_changes_with_a_file(tmp_path, uploaded):
    source, name, upload = uploaded
    paths = [f"memory:/{tmp_path}", f"memory:/{tmp_path}/{name}", f"memory:/{tmp_path}/*"]
    upload()
    first, again = ([open_source(of(path, source)).fingerprint for path in paths] for _ in range(2))
    upload()
    changed = [open_source(of(path, source)).fingerprint for path in paths]
    assert first == again and not any(old == new for old, new in zip(first, changed))


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
@pytest.mark.parametrize("url", ["memory://none", "memory://none/*", "nowhere://a", "s3://a", "https://localhost:9/a"])
def test_a_url_that_fsspec_cannot_read_is_refused(monkeypatch, source, url):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    error = refused(of(url, source))
    assert error.startswith("data.path: expected ") and f"'{url}'" in error
    assert error.endswith("; pip install s3fs") == url.startswith("s3")


@pytest.mark.parametrize("kind", ["saved", "splits", "folder"])
def test_data_sets_have_the_documents_and_the_split_of_json_lines(tmp_path, datasets, expected, kind):
    made = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(300))})
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
        for part in range(3):
            made.select(range(part * 100, part * 100 + 100)).to_parquet(path / f"train-{part}.parquet")
    else:
        made = datasets.DatasetDict({"train": made, "test": made.select([1])}) if kind == "splits" else made
        made.save_to_disk(path)
    assert read(of(path, "huggingface")) == expected


def test_rows_and_columns_without_text_are_refused(tmp_path, datasets):
    made = datasets.Dataset.from_dict({"text": ["a", None, "b"], "id": [1, 2, 3]})
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    made.to_parquet(tmp_path / "folder" / "train.parquet")
    for name, source in (("saved", "huggingface"), ("folder", "huggingface"), ("folder", "parquet")):
        assert ":2: " in refused(of(tmp_path / name, source))
        for key in ("txt", "id"):
            assert key in refused(of(tmp_path / name, source, text_key=key))
    assert "data.split: expected one of train" in refused(of(tmp_path / "saved", "huggingface", split="tset"))
    made.save_to_disk(tmp_path / "one")
    assert "data.split: expected train" in refused(of(tmp_path / "one", "huggingface", split="train[:10%]"))
    assert "data.subset" in refused(of(tmp_path / "one", "huggingface", subset="any"))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.zst").write_bytes(b"a")
    monkeypatch.setitem(sys.modules, ZSTD, None)
    assert "pip install" in refused(of(tmp_path / "a.zst"))


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=9), min_size=8, max_size=30, unique_by=tuple),
    kind=st.sampled_from([(1, "<u1"), (8, "<u2"), (4, "<i4"), (5, "<i8")]),
    cut=st.sampled_from([1, 3]),
)
def test_megatron_s_documents_come_as_they_are(tmp_path_factory, documents, kind, cut):
    prefix = write_megatron(tmp_path_factory.mktemp("m") / "corpus", documents, *kind, cut=cut)
    corpora = load_corpora(of(prefix, "megatron", cache_dir=str(prefix.parent)), progress=False)
    both = [split.document(i).tolist() for split in (corpora.train, corpora.validation) for i in range(len(split))]
    assert sorted(both) == sorted(documents) and corpora.train.vocab_size == 1 + max(map(max, documents))


def test_megatron_s_files_that_do_not_fit_are_refused(tmp_path):
    prefix = write_megatron(tmp_path / "corpus", [[1, 2, 3], [4, 5], [6]])
    index = prefix.with_suffix(".idx")
    data = of(prefix, "megatron", cache_dir=str(tmp_path / "c"))
    whole = index.read_bytes()
    for content in (whole[:-8], b"MMIDIDY" + whole[7:]):
        index.write_bytes(content)
        assert str(index) in refused(data)
    write_megatron(prefix, [[1], [-1]], 4, "<i4")
    assert "-1" in refused(data)


def test_functions_are_cut_out_as_they_stand_in_their_file():
    code = (
        "def a():\n    def inner():\n        pass\n    return inner\n"
        "if True:\n    @dec(\n        1)\n    async def b(): pass\n"
        "\fclass C:\n    def c(self):\n        x = 1\n\n    class D:\n        def d(self): pass"
    )
    assert functions_of(code.encode()) == [
        "def a():\n    def inner():\n        pass\n    return inner\n",
        "    @dec(\n        1)\n    async def b(): pass\n",
        "    def c(self):\n        x = 1\n",
        "        def d(self): pass",
    ]
    latin = "def e(): return 'é'\n"
    assert functions_of(f"# -*- coding: latin-1 -*-\n{latin}".encode("latin-1")) == [latin]
    assert functions_of(b"def (") is None


TWO = {"source": "text", "path": "texts", "validation_fraction": 0.2}
SPLIT = {"source": "splits", "path": "texts", "validation_fraction": 0.05}


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"path": "corpus"}, "data.path"),
        ({"source": "jsonl", "path": "nowhere"}, "data.path"),
        ({"source": "jsonl", "path": "one"}, "data.path"),
        ({"source": "text", "path": "one"}, "data.validation_fraction"),
        ({"source": "synthetic", "num_documents": 1}, "data.validation_fraction"),
        ({"source": "task"}, "data.task"),
        ({"source": "task", "task": "mqar", "task_options": {"num_pair": 3}}, "data.task_options"),
        ({"source": "megatron"}, "data.path"),
        (TWO | {"test_path": "nowhere"}, "data.test_path"),
        (TWO | {"test_path": "empty"}, "data.test_path"),
        (TWO | {"test_path": "texts/"}, "data.test_path"),  # the documents trained on
        (TWO | {"test_path": "texts", "test_fraction": 0.1}, "data.test_fraction"),
        (TWO | {"test_fraction": 0.8}, "data.validation_fraction"),
        (SPLIT | {"test_fraction": 0.1}, "data.test_fraction"),
        (SPLIT | {"test_path": "texts"}, "data.test_path"),
        ({"source": "stdlib", "test_path": "texts"}, "data.test_path"),
    ],
    ids=str,
)
def test_a_wrong_key_is_refused_before_any_work(tmp_path, monkeypatch, keys, key):
    monkeypatch.chdir(tmp_path)
    for name, text in (("one/a", "a"), ("texts/a", "some"), ("texts/b", "other"), ("empty/a", "")):
        Path(name).parent.mkdir(exist_ok=True)
        Path(f"{name}.txt").write_text(text)
    with pytest.raises(ConfigError, match=f"^{key}: [^\n]*$"):
        open_source(DataConfig(**keys))
