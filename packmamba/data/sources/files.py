"""Sources of files: text, JSON lines, parquet, data sets of Hugging Face and of Megatron."""

import functools
import gzip
import io
import itertools
import json
import struct
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from packmamba.config import DataConfig, extra, need, refusing
from packmamba.data.sources.records import PROMPT_KEYS, find_chat_template, of_one_kind, read_documents
from packmamba.data.sources.source import Document, File, Source, find_files, hash_facts, hash_files, list_files
from packmamba.data.sources.splits import least_length, refuse_splits, split_by_content, split_by_name

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
ROWS = 256  # of parquet and data sets, in memory at a time
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_text(data: DataConfig) -> Source:
    """Open every visible file of ``data.path``, a document each, held out by name."""
    root, files = find_files(data, ("",))
    filled = [name for name, file in files.items() if file.size != 0]
    got = f"{len(files)} empty in '{data.path}', the first {next(iter(files.values())).place}; name files with text"
    need(filled, "data.path", "a file with text", got)
    if len(filled) == 1:
        place, size, *_ = files[filled[0]]
        least = least_length(data)
        expected = f"several files, or one of at least {least} bytes to cut"
        need(size is None or size >= least, "data.validation_fraction", expected, f"{size} in {place}; add files")

    def texts(name: str) -> Iterator[str]:
        place = files[name].place
        prefix = f"data.path: expected UTF-8, got {place} ("
        with refusing(UnicodeDecodeError, prefix=prefix, suffix="); move it"), files[name].open() as file:
            text = file.read().decode("utf-8-sig")
        null = text.find("\0")  # git and grep call such a file binary
        need(null < 0, "data.path", "text", f"{place} (a NUL character at {null}); move it")
        yield text

    return split_by_name([root, hash_facts(files)], files, filled, texts, data)


def open_jsonl(data: DataConfig) -> Source:
    """Open a document in each line that is not blank: text, prompt and completion, or messages."""
    return _records(data, lambda file: _lines(file, data.text_key), JSON_LINES)


def open_splits(data: DataConfig) -> Source:
    """Open JSON lines with the fields ``split`` and ``group`` of a document.

    A split is train, validation or test.
    """
    refuse_splits(data)
    root, files = find_files(data, JSON_LINES)

    def documents(splits: Collection[str]) -> Iterator[Document]:
        for file in files.values():
            records, fields = itertools.tee(_lines(file, data.text_key))
            for number, (document, record) in enumerate(zip(read_documents(file.place, data, records), fields), 1):
                split = record.get("split")
                is_known = not document.content or split in ("train", "validation", "test")
                need(is_known, f"data.path: {file.place}:{number}", "a split train, validation or test", repr(split))
                if document.content and split in splits:
                    yield document._replace(held_out=split != "train", group=str(record.get("group")))

    fingerprint = [root, data.text_key, hash_facts(files), "test", *_kind(data)]
    read = lambda: of_one_kind(documents(("train", "validation")))
    read_test = lambda: of_one_kind(documents(("test",)))
    return Source(fingerprint, read, read_test=read_test, names_splits=True)


def open_parquet(data: DataConfig) -> Source:
    """Open a document in each row of parquet files.

    A row has the column ``data.text_key``, prompt and completion, or messages.
    """
    return _records(data, lambda file: _rows(file, data), (".parquet",))


def _records(data: DataConfig, records: Callable[[File], Iterator[Any]], suffixes: tuple[str, ...]) -> Source:
    root, files = find_files(data, suffixes)

    def documents() -> Iterator[Document]:
        for file in files.values():
            yield from read_documents(file.place, data, records(file))

    read = split_by_content(lambda: of_one_kind(documents()), data.validation_fraction)
    return Source([root, data.text_key, "error", hash_facts(files), *_kind(data)], read)


def _kind(data: DataConfig) -> list[Any]:
    """Return what else decides documents of records, where it is not as by default."""
    chosen: list[Any] = [data.loss_on] if data.loss_on != DataConfig.loss_on else []
    template, tokens = find_chat_template(data.tokenizer, data.chat_template)
    return chosen if template is None else [*chosen, template, tokens]


def _lines(file: File, text_key: str) -> Iterator[Any]:
    """Yield the record of each line; of a blank one an empty text."""
    with file.open() as packed:
        for line in _unpacked(packed, Path(file.place).suffix):
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            yield json.loads(line) if line else {text_key: ""}


def _unpacked(packed: io.BufferedReader, suffix: str) -> Any:
    if suffix != ".zst":
        return gzip.open(packed) if suffix == ".gz" else packed
    zstd = extra("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    return zstd.open(packed, options={zstd.DecompressionParameter.window_log_max: 31})


def _rows(file: File, data: DataConfig) -> Iterator[Any]:
    with file.open() as opened:
        table = extra("pyarrow.parquet").ParquetFile(opened)
        for batch in table.iter_batches(ROWS, columns=_columns(table.schema_arrow.names, data)):
            yield from batch.to_pylist()


def _columns(names: list[str], data: DataConfig) -> list[str]:
    """Return the columns that hold documents. Raises ValueError without one."""
    columns = [name for name in (data.text_key, *PROMPT_KEYS) if name in names]
    if not columns:
        wanted = f"{data.text_key} (data.text_key), messages, or prompt and completion"
        raise ValueError(f"expected a column {wanted}, got {', '.join(names)}")
    return columns


def open_megatron(data: DataConfig) -> Source:
    """Open ``data.path``.bin and .idx, ids as they are.

    Source: Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.
    """
    need(data.path, "data.path", "the name of .bin and .idx without suffix with data.source=megatron", "null")
    binary, index = Path(f"{data.path}.bin"), Path(f"{data.path}.idx")
    fingerprint = hash_files(binary.parent, [binary.name, index.name])
    prefix = f"data.path: expected a whole Megatron index of version 1, got {index} ("
    with refusing(struct.error, LookupError, ValueError, prefix=prefix, suffix=")"):
        with open(index, "rb") as file:
            magic, version, code, sequences, count = MEGATRON_HEADER.unpack(file.read(MEGATRON_HEADER.size))
            lengths = np.frombuffer(file.read(4 * sequences), "<i4")
            file.seek(8 * sequences, 1)  # places: sequences follow each other
            firsts = np.frombuffer(file.read(8 * count), "<i8")
        tokens = np.memmap(binary, MEGATRON_DTYPES[code], "r")
        bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[firsts]
        if (magic, version, len(firsts), bounds[-1]) != (b"MMIDIDX\0\0", 1, count, len(tokens)):
            raise ValueError(f"other contents than {binary} of {len(tokens)} tokens")

    def vocabulary() -> int:
        need(tokens.min() >= 0, "data.path", "ids of at least 0", f"{tokens.min()} in {binary}")
        return int(tokens.max()) + 1

    documents = lambda: (Document(False, tokens[a:b]) for a, b in zip(bounds, bounds[1:]))
    read = split_by_content(documents, data.validation_fraction)
    return Source([str(Path(str(data.path)).resolve()), fingerprint], read, vocabulary)


def open_huggingface(data: DataConfig) -> Source:
    """Open the rows of a data set as ``open_parquet`` does.

    It is on the Hub, perhaps as ``name@revision``, or on disk.
    """
    need(data.path, "data.path", "a data set's name or folder with data.source=huggingface", "null")
    name = str(data.path)
    path = Path(name)
    if any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
        has_splits = (path / "dataset_dict.json").is_file()
        need(has_splits or data.split == "train", "data.split", "train, since it has no splits", f"'{data.split}'")
        need(data.subset is None, "data.subset", "null for a data set on disk", f"'{data.subset}'")
        version = hash_files(path, list_files(path, ("",)))
        load: Any = functools.partial(extra("datasets").load_from_disk, name)
    else:
        builder, revision = _builder(name, data.subset)
        version = builder.hash
        # Streamed, rows are read from the Hub as they are needed.
        options = {"split": data.split, "revision": revision, "streaming": data.streaming}
        load = functools.partial(extra("datasets").load_dataset, builder.repo_id or name, data.subset, **options)

    def rows() -> Iterator[Any]:
        table = load()
        if isinstance(table, dict):
            need(data.split in table, "data.split", f"one of {', '.join(table)}", f"'{data.split}'")
            table = table[data.split]
        columns = _columns(table.column_names or [*next(iter(table))], data)
        for batch in table.select_columns(columns).with_format("arrow").iter(ROWS):
            yield from batch.to_pylist()

    read = split_by_content(lambda: of_one_kind(read_documents(name, data, rows())), data.validation_fraction)
    place = str(path.resolve()) if path.exists() else name
    return Source([place, data.subset, data.split, data.text_key, "error", version, *_kind(data)], read)


@functools.lru_cache
def _builder(path: str, subset: str | None) -> tuple[Any, str | None]:
    """Return builder and revision; once a process, since the Hub may be gone later."""
    name, _, revision = (path, "", "") if Path(path).exists() else path.partition("@")
    datasets = extra("datasets")
    with refusing(Exception, prefix=f"data.path: cannot load '{path}' as a data set (", suffix=")"):
        return datasets.load_dataset_builder(name, subset, revision=revision or None), revision or None
