"""Sources of files: text, JSON lines, parquet, data sets of Hugging Face and of Megatron."""

import functools
import gzip
import importlib
import io
import itertools
import json
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from packmamba.config import ConfigError, DataConfig, need
from packmamba.data.sources.source import Document, Source, find_files, hash_files, list_files
from packmamba.data.sources.splits import least_length, refuse_splits, split_by_content, split_names

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
ROWS = 256  # of parquet and data sets, in memory at a time
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_text(data: DataConfig) -> Source:
    """Open every visible file of ``data.path``, a document each, held out by name."""
    root, files = find_files(data, ("",))
    filled = [name for name in files if (root / name).stat().st_size]
    if not filled:
        raise ConfigError(
            f"data.path: expected a file with text, got {len(files)} empty in '{data.path}', "
            f"the first {root / files[0]}; name files with text"
        )
    validation, test = frozenset[str](), frozenset[str]()
    if len(filled) > 1:
        validation, test = split_names(filled, data)
    else:
        size = (root / filled[0]).stat().st_size
        need(
            size >= least_length(data),
            "data.validation_fraction",
            f"several files, or one of at least {least_length(data)} bytes to cut",
            f"{size} in {root / filled[0]}; add files",
        )

    def documents(names: Iterable[str]) -> Iterator[Document]:
        for name in names:
            file = root / name
            try:
                text = file.read_bytes().decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ConfigError(f"data.path: expected UTF-8, got {file} ({error}); move it") from None
            place = text.find("\0")  # git and grep call such a file binary
            need(place < 0, "data.path", "text", f"{file} (a NUL character at {place}); move it")
            yield Document(name in validation, text)

    return Source(
        [str(root.resolve()), hash_files(root, files)],
        read=lambda: documents(name for name in files if name not in test),
        read_test=(lambda: documents(sorted(test))) if data.test_fraction else None,
    )


def open_jsonl(data: DataConfig) -> Source:
    """Open the field ``data.text_key`` of each line that is not blank."""
    return _records(data, lambda path, key: (text for (text,) in _lines(path, key)), JSON_LINES)


def open_splits(data: DataConfig) -> Source:
    """Open JSON lines whose fields ``split`` (train, validation, test) and ``group`` say a document's."""
    refuse_splits(data)
    root, files = find_files(data, JSON_LINES)

    def documents(splits: Collection[str]) -> Iterator[Document]:
        for name in files:
            texts, fields = itertools.tee(_lines(root / name, data.text_key, "split", "group"))
            contents = texts_of(str(root / name), data.text_key, (one[0] for one in texts))
            for text, (_, split, group) in zip(contents, fields):
                if text and split not in ("train", "validation", "test"):
                    raise ConfigError(
                        f"data.path: {root / name}: expected a split train, validation or test, got {split!r}"
                    )
                if text and split in splits:
                    yield Document(split != "train", text, group=str(group))

    return Source(
        [str(root.resolve()), data.text_key, hash_files(root, files), "test"],
        read=lambda: documents(("train", "validation")),
        read_test=lambda: documents(("test",)),
        names_splits=True,
    )


def open_parquet(data: DataConfig) -> Source:
    """Open the column ``data.text_key``, each row a document."""
    return _records(data, _rows, (".parquet",))


def _records(
    data: DataConfig, values: Callable[[Path, str], Iterator[Any]], suffixes: tuple[str, ...]
) -> Source:
    root, files = find_files(data, suffixes)

    def contents() -> Iterator[str]:
        for name in files:
            yield from texts_of(str(root / name), data.text_key, values(root / name, data.text_key))

    read = split_by_content(contents, data.validation_fraction)
    return Source([str(root.resolve()), data.text_key, "error", hash_files(root, files)], read)


def texts_of(place: str, key: str, values: Iterator[Any]) -> Iterator[str]:
    """Yield texts. Raises ConfigError naming place and number of a value that is none."""
    number = 1
    try:
        for text in values:
            if not isinstance(text, str):
                raise ValueError(f"expected text in the field '{key}' (data.text_key), got {text!r:.60}")
            text.encode()  # half a surrogate pair is no text
            yield text
            number += 1
    except Exception as error:  # packages that read files raise all kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"data.path: {place}:{number}: {reason}") from None


def _lines(path: Path, *keys: str) -> Iterator[tuple[Any, ...]]:
    """Yield the fields of each line, None where there is none; the first is empty in a blank line."""
    with _open(path) as lines:
        for line in lines:
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            record = json.loads(line) if line else {keys[0]: ""}
            yield tuple(record.get(key) if isinstance(record, dict) else None for key in keys)


def _open(path: Path) -> Any:
    if path.suffix != ".zst":
        return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")
    unpacked = extra("zstandard").ZstdDecompressor(max_window_size=1 << 31)
    return io.BufferedReader(unpacked.stream_reader(open(path, "rb"), read_across_frames=True))


def _rows(path: Path, key: str) -> Iterator[Any]:
    for batch in extra("pyarrow.parquet").ParquetFile(path).iter_batches(ROWS, columns=[key]):
        yield from batch.column(key).to_pylist()


def extra(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(f"data.source: needs {package}; pip install 'packmamba[integrations]'") from None


def open_megatron(data: DataConfig) -> Source:
    """Open ``data.path``.bin and .idx, ids as they are. Source: Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``."""
    if not data.path:
        raise ConfigError(
            "data.path: data.source=megatron expected the name of .bin and .idx without suffix, got null"
        )
    binary, index = Path(f"{data.path}.bin"), Path(f"{data.path}.idx")
    fingerprint = hash_files(binary.parent, [binary.name, index.name])
    try:
        with open(index, "rb") as file:
            magic, version, code, sequences, documents = MEGATRON_HEADER.unpack(
                file.read(MEGATRON_HEADER.size)
            )
            lengths = np.frombuffer(file.read(4 * sequences), "<i4")
            file.seek(8 * sequences, 1)  # places: sequences follow each other
            firsts = np.frombuffer(file.read(8 * documents), "<i8")
        tokens = np.memmap(binary, MEGATRON_DTYPES[code], "r")
        bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[firsts]
        if (magic, version, len(firsts), bounds[-1]) != (b"MMIDIDX\0\0", 1, documents, len(tokens)):
            raise ValueError(f"other contents than {binary} of {len(tokens)} tokens")
    except (struct.error, LookupError, ValueError) as error:
        raise ConfigError(
            f"data.path: expected a whole Megatron index of version 1, got {index} ({error})"
        ) from None

    def vocabulary() -> int:
        if tokens.min() < 0:
            raise ConfigError(f"data.path: expected ids of at least 0, got {tokens.min()} in {binary}")
        return int(tokens.max()) + 1

    read = split_by_content(
        lambda: (tokens[a:b] for a, b in zip(bounds, bounds[1:])), data.validation_fraction
    )
    return Source([str(Path(data.path).resolve()), fingerprint], read, vocabulary)


def open_huggingface(data: DataConfig) -> Source:
    """Open the column ``data.text_key`` of a data set, on the Hub (perhaps ``name@revision``) or on disk."""
    if not data.path:
        raise ConfigError("data.path: data.source=huggingface expected a data set's name or folder, got null")
    name, path = data.path, Path(data.path)
    if any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
        version = hash_files(path, list_files(path, ("",)))
        load: Any = functools.partial(extra("datasets").load_from_disk, name)
    else:
        builder, revision = _builder(name, data.subset)
        version = builder.hash
        options = {"split": data.split, "revision": revision}
        load = functools.partial(
            extra("datasets").load_dataset, builder.repo_id or name, data.subset, **options
        )

    def rows() -> Iterator[Any]:
        loaded = load()
        table = loaded[data.split] if isinstance(loaded, dict) else loaded
        for batch in table.select_columns([data.text_key]).with_format("arrow").iter(ROWS):
            yield from batch.column(0).to_pylist()

    read = split_by_content(lambda: texts_of(name, data.text_key, rows()), data.validation_fraction)
    place = str(path.resolve()) if path.exists() else name
    return Source([place, data.subset, data.split, data.text_key, "error", version], read)


@functools.lru_cache
def _builder(path: str, subset: str | None) -> tuple[Any, str | None]:
    """Return builder and revision; once a process, since the Hub may be gone later."""
    name, _, revision = (path, "", "") if Path(path).exists() else path.partition("@")
    try:
        return extra("datasets").load_dataset_builder(
            name, subset, revision=revision or None
        ), revision or None
    except Exception as error:
        raise ConfigError(f"data.path: cannot load '{path}' as a data set ({error!r})") from None
