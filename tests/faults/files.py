"""Faults of files: every file or folder that a command takes is missing, a folder, empty, binary, cut short, closed or a pipe."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from trials import Trial

Make = Callable[[Path], object]
KEYS = (
    "model.d_model=8",
    "model.n_layer=1",
    "trainer.max_steps=1",
    "trainer.accelerator=cpu",
    "data.num_proc=1",
    "data.overlong=pieces",
)
"""What keeps a run small that should not have begun."""
LINES = '{"text": "some words"}\n{"text": "and others"}\n{"text": "and more"}\n'


def write(name: str, content: bytes | str) -> Make:
    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def pipe(name: str) -> Make:
    return lambda folder: os.mkfifo(folder / name)


def link(name: str, to: str) -> Make:
    return lambda folder: (folder / name).symlink_to(to)


def folder_at(name: str) -> Make:
    return lambda folder: (folder / name).mkdir(parents=True)


def both(*makes: Make) -> Make:
    def make(folder: Path) -> None:
        for one in makes:
            one(folder)

    return make


def closed(name: str, content: str = "x", mode: int = 0) -> Make:
    """A file that nobody but root may read."""

    def make(folder: Path) -> None:
        write(name, content)(folder)
        (folder / name).chmod(mode)

    return make


BINARY = bytes(range(256)) * 8
FAULTS: dict[str, Make] = {
    "missing": lambda folder: None,
    "a folder": folder_at("it"),
    "empty": write("it", ""),
    "binary": write("it", BINARY),
    "not UTF-8": write("it", b'{"text": "caf\xe9"}\n'),
    "a link to nowhere": link("it", "nowhere"),
    "a link to itself": link("it", "it"),
    "a pipe": pipe("it"),
    "below a file": both(write("file", "x"), lambda folder: None),
    "a long name": lambda folder: None,
}


def named(fault: str) -> str:
    return {"below a file": "file/it", "a long name": "n" * 300}.get(fault, "it")


def of_path(argv: Callable[[str], tuple[str, ...]], also: tuple[Make, ...] = ()) -> Iterator[Trial]:
    """A path that a command takes, with every fault. ``also`` makes other files."""
    for fault, make in FAULTS.items():
        yield Trial(f"file: {fault}", argv(named(fault)), "it|n{20}|file", both(make, *also))
    yield Trial("file: closed", argv("it"), "it", both(closed("it", LINES), *also), user=True)
    yield Trial(
        "file: in a closed folder", argv("shut/it"), "shut|data.source=huggingface", both(_shut, *also), user=True
    )


def _shut(folder: Path) -> None:
    write("shut/it", LINES)(folder)
    (folder / "shut").chmod(0)


def train(*more: str) -> Callable[[str], tuple[str, ...]]:
    return lambda name: (
        "train",
        *KEYS,
        *(word.replace("it", name, 1) if word.endswith("=it") else word for word in more),
    )


def sources() -> Iterator[Trial]:
    yield from of_path(train("data.source=text", "data.path=it"))
    for source, package in {"jsonl": "json", "parquet": "pyarrow", "megatron": "numpy", "huggingface": "datasets",
                            "packages": "json"}.items():  # fmt: skip
        if importlib.util.find_spec(package):  # else what is refused is the source
            yield from of_path(train(f"data.source={source}", "data.path=it"))
    beside = (write("docs", LINES),)
    yield from of_path(train("data.source=jsonl", "data.path=docs", "data.tokenizer=it"), also=beside)
    yield from of_path(train("data.source=jsonl", "data.path=docs", "trainer.init_from=it"), also=beside)
    for name, source, path, make in (
        ("a file is binary", "text", "d", both(write("d/a", "x"), write("d/b", BINARY))),
        ("a file is a pipe", "text", "d", both(write("d/a", "x"), pipe("d/b"))),
        ("a file is a link to nowhere", "text", "d", both(write("d/a", "x"), link("d/b", "nowhere"))),
        ("a file is a link to itself", "text", "d", both(write("d/a", "x"), link("d/b", "b"))),
        ("one file alone", "text", "d", write("d/a", "some words")),
        ("only empty files", "text", "d", both(write("d/a", ""), write("d/b", ""))),
        ("only hidden files", "text", "d", write("d/.a", "x")),
        ("no file matches", "jsonl", "d/*.jsonl", write("d/a.txt", "x")),
        ("a line is cut short", "jsonl", "it", write("it", LINES + '{"text": "cut')),
        ("a line is a list", "jsonl", "it", write("it", LINES + "[1]\n")),
        ("a line is null", "jsonl", "it", write("it", LINES + "null\n")),
        ("a text is a number", "jsonl", "it", write("it", LINES + '{"text": 3}\n')),
        ("a text is null", "jsonl", "it", write("it", LINES + '{"text": null}\n')),
        ("another field", "jsonl", "it", write("it", '{"body": "x"}\n' * 4)),
        ("one document", "jsonl", "it", write("it", '{"text": "x"}\n')),
        ("only empty documents", "jsonl", "it", write("it", '{"text": ""}\n' * 4)),
        ("a lone surrogate", "jsonl", "it", write("it", LINES + '{"text": "\\ud800"}\n')),
        ("deeply nested", "jsonl", "it", write("it", LINES + "[" * 20000 + "\n")),
        ("a damaged gzip", "jsonl", "it.jsonl.gz", write("it.jsonl.gz", b"\x1f\x8b\x08" + bytes(40))),
        ("a damaged zstd", "jsonl", "it.jsonl.zst", write("it.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(40))),
        ("a cut parquet", "parquet", "it.parquet", write("it.parquet", b"PAR1" + bytes(60))),
        ("an index without ids", "megatron", "it", write("it.idx", b"MMIDIDX\x00\x00" + bytes(80))),
        ("a damaged index", "megatron", "it", both(write("it.bin", bytes(80)), write("it.idx", BINARY))),
    ):
        yield Trial(
            f"documents: {name}",
            train(
                f"data.source={source}",
                f"data.path={path}",
                *(["data.begin_token=null", "data.end_token=null"] * (name == "only empty documents")),
            )("it"),
            "data|d/|it",
            make,
        )


def configurations() -> Iterator[Trial]:
    for command in ("train", "sweep", "bench"):
        yield from of_path(lambda name, command=command: (command, f"{name}.yaml" if command == "bench" else name))
    for name, text in {
        "no YAML": "data: [1, 2\n",
        "a list": "- 1\n",
        "a word": "train\n",
        "a number": "3\n",
        "null": "null\n",
        "a tab": "data:\n\tsource: text\n",
        "a doubled key": "seed: 1\nseed: 2\n",
        "an unknown key": "sed: 1\n",
        "a section that is a word": "data: text\n",
        "a section that is a list": "data: [text]\n",
        "an unknown variable": "name: ${nope}\n",
        "a variable in a section": "data: ${nope}\n",
        "a broken variable": "name: ${nope\n",
        "itself": "name: ${name}\n",
        "an unknown resolver": "name: ${nope:1}\n",
        "the environment": "name: ${oc.env:NOT_THERE_AT_ALL}\n",
        "missing": "name: ???\n",
        "a tag": "name: !!python/object:os.system {}\n",
        "an anchor": "name: *nothing\n",
        "two documents": "seed: 1\n---\nseed: 2\n",
        "a key that is a list": "? [1, 2]\n: 3\n",
        "a key that is a number": "1: 2\n",
        "a date": "name: 2020-01-01\n" * 0 + "seed: 2020-01-01\n",
        "an unknown size": "model: 13b\n",
        "deeply nested": "a: " + "[" * 3000 + "\n",
        "a key with dots": "data.source: text\n",
        "bytes": "name: !!binary AAAA\n",
        "a set": "name: !!set {a, b}\n",
    }.items():
        yield Trial(f"configuration: {name}", ("train", "it.yaml", *KEYS), "", write("it.yaml", text))
    sweep = "arms: {a: {}, b: {}}\n"
    for name, text in {
        "arms are a list": "arms: [padded, greedy]\n",
        "no arms": "output: out\n",
        "an arm is a word": "arms: {a: padded}\n",
        "an arm is a list": "arms: {a: [data.strategy]}\n",
        "an arm is null": "arms: {a: null}\n",
        "an arm's key": "arms: {a: {data.stratgy: padded}}\n",
        "an arm's value": "arms: {a: {data.strategy: padde}}\n",
        "an arm's type": "arms: {a: {trainer.max_steps: many}}\n",
        "an arm's section": "arms: {a: {data: 3}}\n",
        "an arm without a name": "arms: {'': {}}\n",
        "an arm's long name": f"arms: {{{'n' * 300}: {{}}}}\n",
        "common is a list": sweep + "common: [a]\n",
        "a common key": sweep + "common: {sed: 1}\n",
        "a common value": sweep + "common: {seed: many}\n",
        "grid is a list": sweep + "grid: [seed]\n",
        "a grid's value": sweep + "grid: {seed: 3}\n",
        "an empty grid": sweep + "grid: {seed: []}\n",
        "a grid's null": sweep + "grid: {seed: [null]}\n",
        "a grid's key": sweep + "grid: {sed: [1]}\n",
        "a grid without a key": sweep + "grid: {'': [1]}\n",
        "a base that is missing": sweep + "base: nowhere.yaml\n",
        "a base that is a folder": sweep + "base: .\n",
        "a base that is itself": sweep + "base: it.yaml\n",
        "a baseline": sweep + "baseline: c\n",
        "an evaluation": sweep + "evaluations: [perplexty]\n",
        "an option": sweep + "evaluation_options: {mqar: {}}\n",
        "jobs": sweep + "jobs: many\n",
        "a deadline": sweep + "deadline: -1\n",
        "a tune's key": sweep + "tune: {grid: {optimizer.lrr: [1]}}\n",
        "a tune's word": sweep + "tune: fast\n",
        "a dot as key": "arms: {a: {'.': 1}}\n",
        "a key with two dots": "arms: {a: {data..strategy: padded}}\n",
        "a key of brackets": "arms: {a: {'data[0]': 1}}\n",
    }.items():
        yield Trial(f"sweep: {name}", ("sweep", "it.yaml"), "", write("it.yaml", text))


def models(model: Path) -> Iterator[Trial]:
    """Folders of models for the commands that take one; ``model`` holds a good one."""
    for command in ("eval", "generate", "export", "leakcheck"):
        last = {"generate": ("hello",), "export": ("new",)}.get(command, ())
        yield from of_path(lambda name, command=command, last=last: (command, name, *last))
        for file in ("config.json", "pytorch_model.bin"):
            for fault, change in {
                "missing": lambda path: path.unlink(),
                "empty": lambda path: path.write_bytes(b""),
                "binary": lambda path: path.write_bytes(BINARY),
                "cut short": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
                "a list": lambda path: path.write_text("[1, 2]"),
                "a folder": lambda path: (path.unlink(), path.mkdir()),
                "a link to nowhere": lambda path: (path.unlink(), path.symlink_to("nowhere")),
                "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
            }.items():
                yield Trial(f"model: {file} {fault}", (command, "m", *last), "", _changed(model, file, change))
        for change, text in {
            "no sizes": "{}",
            "a size of text": '{"d_model": "8", "n_layer": 1}',
            "a size below 1": '{"d_model": 0, "n_layer": 1}',
            "a huge size": '{"d_model": 1000000000, "n_layer": 1}',
            "many layers": '{"d_model": 8, "n_layer": 1000000000}',
            "another size": '{"d_model": 16, "n_layer": 1}',
            "another architecture": '{"hidden_size": 8, "model_type": "nothing"}',
            "an unknown option": '{"d_model": 8, "n_layer": 1, "ssm_cfg": {"nope": 1}}',
            "options of text": '{"d_model": 8, "n_layer": 1, "ssm_cfg": "x"}',
            "options of a list": '{"d_model": 8, "n_layer": 1, "ssm_cfg": [1]}',
            "a list of sizes": '{"d_model": [8], "n_layer": 1}',
        }.items():
            yield Trial(
                f"model: config.json has {change}",
                (command, "m", *last),
                "",
                _changed(model, "config.json", lambda path, text=text: path.write_text(text)),
            )
    yield Trial("folder: not empty", ("export", "m", "new"), "new", both(_changed(model), write("new/file", "x")))
    yield Trial("folder: a file", ("export", "m", "new"), "new", both(_changed(model), write("new", "x")))
    yield Trial("folder: below a file", ("export", "m", "f/new"), "folder|new", both(_changed(model), write("f", "x")))
    yield Trial("folder: closed", ("export", "m", "shut/new"), "shut", both(_changed(model), _closed_folder), user=True)


def _changed(model: Path, file: str = "", change: Callable[[Path], object] = lambda path: None) -> Make:
    def make(folder: Path) -> None:
        shutil.copytree(model, folder / "m")
        change(folder / "m" / file)

    return make


def _closed_folder(folder: Path) -> None:
    (folder / "shut").mkdir()
    (folder / "shut").chmod(0o555)


def records(record: str) -> Iterator[Trial]:
    """Folders of records; ``record`` is a good line."""
    yield from of_path(lambda name: ("report", f"./{name}"))
    for name, text in {
        "empty": "",
        "binary": BINARY,
        "cut short": record[: len(record) // 2],
        "a list": "[1]\n",
        "a number": "3\n",
        "no keys": "{}\n",
        "a wrong type": record.replace('"seed": ', '"seed": "a"+'),
        "an unknown kind": record.replace('"kind": "training"', '"kind": "baking"'),
        "another schema": record.replace('"schema": 1', '"schema": 99'),
        "not a number": record.replace('"wall_seconds": ', '"wall_seconds": NaN'),
        "no metrics": record.replace('"steps"', '"stepz"'),
        "not UTF-8": b'{"kind": "caf\xe9"}\n',
        "good and cut": record + record[:50],
        "deeply nested": "[" * 20000 + "\n",
        "a key twice and wrong": "{}{}\n",
    }.items():
        yield Trial(f"record: {name}", ("report", "r"), "r/records", write("r/records/a.jsonl", text))
    yield Trial("record: a folder", ("report", "r"), "r", folder_at("r/records/a.jsonl"))
    yield Trial("record: a pipe", ("report", "r"), "r", both(folder_at("r/records"), pipe("r/records/a.jsonl")))
    yield Trial(
        "record: a link to nowhere", ("report", "r"), "r", both(folder_at("r/records"), link("r/records/a.jsonl", "b"))
    )
    for name, text in {
        "binary": BINARY,
        "a list": "[1]",
        "cut short": '{"a": {',
        "no arms": '{"a": {}}',
        "a number": '{"a": 3}',
    }.items():
        yield Trial(
            f"sweep.json: {name}",
            ("report", "r"),
            "sweep.json",
            both(write("r/records/a.jsonl", record), write("r/sweep.json", text)),
        )
    yield Trial("folder: read-only", ("report", "r"), "r", _read_only(record), user=True)


def _read_only(record: str) -> Make:
    def make(folder: Path) -> None:
        write("r/records/a.jsonl", record)(folder)
        (folder / "r").chmod(0o555)

    return make


def _writable(folder: Path) -> None:
    (folder / "w").mkdir()
    (folder / "w").chmod(0o777)


def outputs() -> Iterator[Trial]:
    """Folders that cannot be written."""
    documents = write("docs", LINES)
    for key in ("runs_dir", "output", "data.cache_dir"):
        for name, value, make, user in (
            ("a file", "f", write("f", "x"), False),
            ("below a file", "f/g", write("f", "x"), False),
            ("no such system folder", "/proc/x", lambda folder: None, False),
            ("read-only", "shut/g", _closed_folder, True),
            ("a link to itself", "l", link("l", "l"), False),
            ("a link to nowhere", "l", link("l", "/proc/x"), False),
        ):
            yield Trial(
                f"folder: {name}",
                train("data.source=jsonl", "data.path=docs", "runs_dir=w/runs", "data.cache_dir=w/c", f"{key}={value}")(
                    "it"
                ),
                key,
                both(documents, _writable, make),
                user,
            )
