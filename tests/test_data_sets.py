"""Hugging Face's data sets and Megatron's files: written by the package or by hand, read by us."""

import struct
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packmamba.data.corpus import load_corpora
from packmamba.data.sources import huggingface, megatron, open_source
from written import TEXTS, of, read, refused, write_lines, write_megatron


@pytest.fixture
def expected(tmp_path):
    """What plain JSON lines give."""
    return read(of(write_lines(tmp_path / "expected.jsonl")))[0]


# --- Hugging Face


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The package, with a cache of the test's own."""
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    huggingface._builder.cache_clear()
    huggingface._unreachable.cache_clear()
    package.disable_progress_bars()
    return package


@pytest.mark.slow
@pytest.mark.parametrize("kind, streaming", [("saved", False), ("splits", True), ("folder", False), ("folder", True)])
def test_data_sets_have_the_documents_and_the_split_of_json_lines(
    tmp_path, datasets, expected, kind, streaming, monkeypatch
):
    made = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(300))})
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
        for part in range(3):
            made.select(range(part * 100, part * 100 + 100)).to_parquet(path / f"train-{part}.parquet")
    else:
        (datasets.DatasetDict({"train": made, "test": made.select([1])}) if kind == "splits" else made).save_to_disk(
            path
        )
    monkeypatch.setattr(huggingface, "PART_BYTES", 3000)
    data = of(
        path,
        "huggingface",
        streaming=streaming,
        cache_dir=str(tmp_path / "c"),
        num_proc=1 + (kind == "folder" and streaming),
    )
    assert len(open_source(data).parts()) == (3 if streaming and kind == "folder" else 2)
    assert read(data)[0] == expected
    lines = of(tmp_path / "expected.jsonl", cache_dir=str(tmp_path / "c"))
    assert load_corpora(data, progress=False).corpus_hash == load_corpora(lines, progress=False).corpus_hash


def test_another_version_of_a_data_set_is_another_corpus(tmp_path, datasets):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    data = of(tmp_path / "saved", "huggingface")
    before = open_source(data).fingerprint
    datasets.Dataset.from_dict({"text": TEXTS[1:]}).save_to_disk(tmp_path / "saved")
    assert open_source(data).fingerprint != before


def test_data_sets_that_cannot_be_read_are_one_sentence(tmp_path, datasets):
    made = datasets.Dataset.from_dict({"text": ["a", None, "b"], "id": [1, 2, 3], "words": [["a"], ["b"], ["c"]]})
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "splits")
    made.save_to_disk(tmp_path / "saved")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder").mkdir()
    made.to_parquet(tmp_path / "folder" / "train.parquet")
    for path in ("splits", "saved", "folder"):
        data = of(tmp_path / path, "huggingface")
        assert "row 1 of data.path" in (said := refused(data)) and "has no text (null)" in said
        data.bad_lines = "skip"
        assert read(data)[1] == {"bad_rows": 1}
        data.text_key = "txt"
        assert "has no column 'txt' (data.text_key); its columns: text, id, words" in refused(data)
        for key, kind in (("id", "int64"), ("words", "list")):
            data.text_key = key
            assert f"holds {kind}, not text; its columns of text: text" in refused(data).lower()
        data.split = "tset"
        assert "tset" in refused(data) and "data.split" in refused(data)
    assert "cannot be loaded as a data set" in refused(of(tmp_path / "empty", "huggingface"))
    assert "data.subset: expected none, since data.path" in refused(of(tmp_path / "saved", "huggingface", subset="en"))
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:300])
    assert "cannot be loaded as a data set" in refused(of(tmp_path / "saved", "huggingface"))


def test_an_unknown_data_set_without_a_network_is_refused_at_once(datasets, monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(OSError(-2, "no network")))
    began = time.perf_counter()
    said = refused(of("nobody/has-this", "huggingface"))
    assert (
        "'nobody/has-this' is no folder here, no data set that was loaded before, and the Hub cannot be reached" in said
    )
    assert time.perf_counter() - began < 5 and datasets.config.HF_HUB_OFFLINE is False
    assert "is no folder here and no data set on the Hub" in refused(of("a/b/c/d", "huggingface"))


# --- Megatron


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=9), min_size=8, max_size=30, unique_by=tuple),
    kind=st.sampled_from([(1, "<u1"), (8, "<u2"), (4, "<i4"), (5, "<i8")]),
    cut=st.sampled_from([0, 3]),
    size=st.integers(1, 300),
)
def test_megatron_s_documents_come_as_they_are(tmp_path_factory, documents, kind, cut, size):
    prefix = write_megatron(tmp_path_factory.mktemp("m") / "corpus", documents, *kind, cut=cut)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(megatron, "PART_BYTES", size)
        found, _ = read(of(prefix, "megatron"))
    assert [one.content.tolist() for one in found] == documents
    corpora = load_corpora(of(prefix, "megatron", cache_dir=str(prefix.parent), num_proc=1), progress=False)
    assert (
        corpora.train.vocab_size == 1 + max(map(max, documents))
        and corpora.train.begin_id is corpora.train.end_id is None
    )
    both = [split.document(i).tolist() for split in (corpora.train, corpora.validation) for i in range(len(split))]
    assert sorted(both) == sorted(documents)


def test_megatron_s_ids_above_16_bits_and_parts_in_several_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron, "PART_BYTES", 2000)
    documents = [[i, 100_000 + i] * (i % 5) for i in range(1000)]
    prefix = write_megatron(tmp_path / "corpus", documents, 4, "<i4")
    corpora = load_corpora(of(prefix, "megatron", cache_dir=str(tmp_path), num_proc=2), progress=False)
    assert corpora.skipped == {"empty_documents": 200} and corpora.train.tokens.dtype == np.uint32
    assert corpora.train.vocab_size == 101_000
    assert corpora.train.num_tokens + corpora.validation.num_tokens == sum(map(len, documents))


def test_megatron_s_files_that_do_not_fit_are_one_sentence(tmp_path):
    documents = [[1, 2, 3], [4, 5], [6]]
    prefix = write_megatron(tmp_path / "corpus", documents)
    binary, idx = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    data = of(prefix, "megatron", cache_dir=str(tmp_path / "c"))
    binary.write_bytes(binary.read_bytes() + b"\0\0")
    assert f"{binary} of data.path does not match corpus.idx: the index describes 12 bytes, and it has 14" in refused(
        data
    )
    binary.write_bytes(binary.read_bytes()[:-4])
    assert "describes 12 bytes, and it has 10" in refused(data)
    whole = idx.read_bytes()
    idx.write_bytes(whole[:-8])
    assert "3 sequences and 4 document indices need" in refused(data)
    idx.write_bytes(b"MMIDIDY" + whole[7:])
    assert "it does not begin with MMIDIDX" in refused(data)
    write_megatron(prefix, documents, version=2)
    assert "has version 2" in refused(data)
    write_megatron(prefix, documents, code=7)
    assert "dtype code 7; expected integers" in refused(data)
    idx.write_bytes(whole[:-8] + struct.pack("<q", 2))
    assert "its documents are not its 3 sequences in order" in refused(data)
    write_megatron(prefix, [[1], [-1]], 4, "<i4")
    assert "holds -1 as id 1" in refused(data)
    idx.unlink()
    assert f"{idx} does not exist" in refused(data)
    assert "leave the suffix out" in refused(of(binary, "megatron"))
