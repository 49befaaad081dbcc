"""Files of JSON lines, each line a document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import Document, Source, list_files, share_of, source_path, stat_files


def open_jsonl(data: DataConfig) -> Source:
    """``data.text_key`` of every line of the file ``data.path``, or of every ``*.jsonl`` file below the folder
    ``data.path``. Lines of white space are no documents. A broken line is an error that names file and line, unless
    ``data.bad_lines`` is skip: then it is counted (``bad_lines``).

    Held out by a hash of the document's text, so that equal documents are in one split; the share is met on average,
    with at least one document.
    """
    path = source_path(data)
    root, files = path.parent, [path.name]
    if path.is_dir():
        root, files = path, list_files(path, lambda name: name.endswith(".jsonl"))
        if not files:
            raise ConfigError(f"data.path '{data.path}' has no .jsonl file in it")
    fingerprint, total = stat_files(root, files)

    def texts(advance: Callable[[int], object], skipped: Counter[str]) -> Iterator[str]:
        for name in files:
            with open(root / name, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.isspace():
                        try:
                            yield _json_text(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, data.text_key)
                        except _BadLine as error:
                            if data.bad_lines == "error":
                                raise ConfigError(
                                    f"{root / name}:{number} {error}; mend the line, or set data.bad_lines=skip"
                                ) from None
                            skipped["bad_lines"] += 1
                    advance(len(line))

    def share(text: str) -> float:
        return share_of(text.encode(), data.corpus_seed)

    def read(advance: Callable[[int], object], skipped: Counter[str]) -> Iterator[Document]:
        limit = _reachable_limit(map(share, filter(None, texts(lambda _: None, Counter()))), data.validation_fraction)
        for text in texts(advance, skipped):
            yield Document(share(text) < limit, text)

    return Source([str(root.resolve()), data.text_key, data.bad_lines, fingerprint], total, "B", read)


class _BadLine(Exception):
    """What is wrong with a JSON line, as the end of a sentence."""


def _json_text(line: bytes, key: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLine(f"is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _BadLine(f"is not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"is not JSON that can be read ({error})") from None
    if not isinstance(record, dict):
        raise _BadLine(f"is not a JSON object with a field '{key}' (data.text_key)")
    if key not in record:
        raise _BadLine(f"has no field '{key}' (data.text_key); its fields: {', '.join(record) or 'none'}")
    text = record[key]
    if not isinstance(text, str):
        raise _BadLine(f"has a field '{key}' (data.text_key) that is not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _BadLine(f"has half a surrogate pair in its field '{key}', which is not Unicode text") from None
    return text


def _reachable_limit(shares: Iterable[float], fraction: float) -> float:
    """`fraction`, or just above the smallest share where no share is below it; reads about 1 / fraction shares."""
    smallest = 1.0
    for share in shares if fraction else ():
        if share < fraction:
            return fraction
        smallest = min(smallest, share)
    return float(np.nextafter(smallest, 2)) if fraction else 0.0
