"""Files that hypothesis changes: cut, flipped, written over, encoded otherwise, or with another value somewhere in their JSON."""

from __future__ import annotations

import codecs
import contextlib
import copy
import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from files import KEYS, LINES, Make
from hypothesis import strategies as st
from trials import Trial, try_out

from packmamba.config import DataConfig
from packmamba.data.corpus import load_corpora
from packmamba.errors import UserError

TRAIN = "data: {source: text}\nmodel: {d_model: 8, n_layer: 1}\ntrainer: {max_steps: 1, accelerator: cpu}\nseed: 3\nname: it\n"
SWEEP = """output: out
common: {data.source: text, model.d_model: 8, trainer.accelerator: cpu}
arms: {a: {data.strategy: greedy}, b: {data.strategy: padded, data.row_length: null}}
grid: {seed: [0, 1]}
"""
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
    "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "?": 3}, "unk_token": "?"},
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A command on a file that is not what it was."""

    trial: Trial
    how: str
    may_be_right: bool

    def __str__(self) -> str:
        return f"{self.trial}, {self.how}"


def copied(source: Path, name: str) -> Make:
    return lambda folder: shutil.copytree(source, folder / name)


Attempt = Callable[[Any, Path], "str | None"]


def every(model: Path, record: str) -> Iterator[tuple[str, st.SearchStrategy[Any], Attempt]]:
    """(row, changes, how one is tried) of every kind of file. ``model``: the folder of a good one; ``record``: a good line."""
    small, nowhere = ("train", *KEYS), "data.path=nowhere"
    sweep = {"a": {"baseline": None, "tuned": None, "arms": {"single": [0]}}}
    texts: list[tuple[str, str, bytes, tuple[str, ...], bool]] = [
        ("a configuration", "it.yaml", TRAIN.encode(), ("train", "it.yaml", nowhere), False),
        ("a sweep", "it.yaml", SWEEP.encode(), ("sweep", "it.yaml", "table.columns=[no_such_column]"), False),
        ("a tokenizer", "it.json", json.dumps(TOKENIZER).encode(),
         (*small, "data.source=text", "data.tokenizer=it.json", nowhere), False),
        ("records", "r/records/a.jsonl", record.encode(), ("report", "r"), True),
        ("sweep.json", "r/sweep.json", json.dumps(sweep).encode(), ("report", "r"), True),
    ]  # fmt: skip
    for name, file, good, argv, right in texts:
        beside = {"r/records/a.jsonl": record.encode()} if name == "sweep.json" else {}
        yield f"file, drawn: {name}", CHANGES(good).map(partial(_written, file, argv, right, beside)), try_change
    yield "file, drawn: documents", CHANGES(LINES.encode()), try_documents
    for command, last in {
        "generate": ("hi", "max_new_tokens=2"),
        "export": ("new",),
        "leakcheck": ("lengths=[2,3]",),
    }.items():
        for file in ("config.json", "pytorch_model.bin"):
            good = (model / file).read_bytes()
            yield (
                "file, drawn: a model",
                CHANGES(good).map(partial(_of_model, model, file, (command, "m", *last))),
                try_change,
            )


def _written(
    file: str, argv: tuple[str, ...], right: bool, beside: dict[str, bytes], drawn: tuple[str, bytes]
) -> Change:
    how, content = drawn

    def make(folder: Path) -> None:
        for name, data in {**beside, file: content}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)

    return Change(Trial("file, drawn", argv, "", make), f"{file} {how}", right)


def _of_model(model: Path, file: str, argv: tuple[str, ...], drawn: tuple[str, bytes]) -> Change:
    how, content = drawn

    def make(folder: Path) -> None:
        shutil.copytree(model, folder / "m")
        (folder / "m" / file).write_bytes(content)

    return Change(Trial("file, drawn", argv, "", make), f"{file} {how}", True)


def try_change(change: Change, folder: Path) -> str | None:
    """As a trial; a command that takes the file, because it may be right, is as good."""
    found = try_out(change.trial, folder)
    return None if change.may_be_right and (found or "").startswith(("status 0", "status 1")) else found


def try_documents(drawn: tuple[str, bytes], folder: Path) -> str | None:
    """They make a corpus, or are refused by name; in the function that does it, for a command would go on to train."""
    how, content = drawn
    path = folder / "docs"
    path.write_bytes(content)
    data = DataConfig(
        source="jsonl", path=str(path), cache_dir=str(folder / "c"), validation_fraction=0.5, num_proc=1, row_length=64
    )
    try:
        load_corpora(data, progress=False)
    except UserError as error:
        return None if re.search("docs|data", str(error)) else f"docs {how}: does not name them: {error}"
    except Exception as error:
        return f"docs {how}: {type(error).__name__}: {str(error)[:200]}"
    return None


ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-7", "cp037")


@st.composite
def CHANGES(draw: st.DrawFn, good: bytes) -> tuple[str, bytes]:
    """(what is done, the content after it)."""
    at = st.integers(0, len(good))
    junk = st.binary(max_size=8) | st.sampled_from(
        [b"\0", b"\xff\xfe", codecs.BOM_UTF8, b"\r", b"\t", b"\x1a", b"\x85", b"[" * 2000]
    )
    ways: list[Callable[[], tuple[str, bytes]]] = [
        lambda: (f"cut at {(k := draw(at))}", good[:k]),
        lambda: (f"without {(k := sorted([draw(at), draw(at)]))}", good[: k[0]] + good[k[1] :]),
        lambda: (f"with {(b := draw(junk))[:20]!r} at {(k := draw(at))}", good[:k] + b + good[k:]),
        lambda: (f"over {(k := draw(at))}: {(b := draw(junk))[:20]!r}", good[:k] + b + good[k + len(b) :]),
        lambda: ("compressed", gzip.compress(good)),
        lambda: ("with CRLF", good.replace(b"\n", b"\r\n")),
        lambda: ("twice", good + good),
        lambda: ("of zeros", bytes(len(good))),
        lambda: (f"then {(b := draw(junk))[:20]!r}", good + b),
        lambda: (f"is {(b := draw(st.binary(max_size=40)))!r}", b),
    ]
    with contextlib.suppress(UnicodeDecodeError):
        text = good.decode()
        ways.append(lambda: (f"as {(e := draw(st.sampled_from(ENCODINGS)))}", text.encode(e)))
        with contextlib.suppress(ValueError):
            ways.extend([partial(_otherwise, draw, json.loads(text))] * 10)
    return draw(st.sampled_from(ways))()


def _otherwise(draw: st.DrawFn, value: Any) -> tuple[str, bytes]:
    """JSON with one value less, or another one in its place."""
    from drawn import VALUES

    value = copy.deepcopy(value)
    places = [(of, key) for of in _containers(value) for key in (of if isinstance(of, dict) else range(len(of)))]
    of, key = draw(st.sampled_from(places))
    if draw(st.booleans()) and isinstance(of, dict):
        del of[key]
        return f"without {key!r}", json.dumps(value).encode()
    of[key] = draw(VALUES)
    return f"with {key!r} as {of[key]!r:.60}", json.dumps(value).encode()


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        yield value
        for one in value.values() if isinstance(value, dict) else value:
            yield from _containers(one)
