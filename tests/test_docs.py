"""The README and docs/ hold what they promise: commands run, links lead somewhere, numbers are the records'."""

import ast
import csv
import glob
import importlib
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from packmamba import cli
from packmamba.config import load_config
from packmamba.config.rules import named
from packmamba.experiments import find, load_bench, module
from packmamba.training.sweep import load_sweep
from processes import fork_ranks, statuses
from written import write_megatron

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest brings tomli there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNING = [
    pytest.param(page, id=page.name, marks=[pytest.mark.extras] * ("<!-- extra" in page.read_text(encoding="utf-8")))
    for page in PAGES
]
BLOCK = re.compile(r"(?:<!-- (?P<note>[^>]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)

# What makes a command of the pages small. `<!-- needs ... -->` before a block: its configurations are loaded, and nothing runs.
TINY_RUN = [
    *("model.d_model=8", "model.n_layer=1", "trainer.max_steps=2", "trainer.validate_every=2"),
    *("trainer.checkpoint_every=2", "trainer.log_every=1", "trainer.threads=1", "optimizer.warmup_steps=1"),
    *("data.row_length=64", "data.tokens_per_step=128", "data.slots_per_batch=128", "data.validation_documents=4"),
]
TINY_BENCH = {"packing": ["num_documents=100", "seeds=[0]", "row_lengths=[2048]"]}
WRITES = {
    "evaluate.md": "runs/my_evaluations/tables/evaluation-parity.md",
    "cluster.md": "runs/my_comparison/tables/training.csv",
    "own_sweep.md": "runs/my_sweep/tables/differences.md",
    "extend.md": "runs/with_my_table/tables/slots.md",
}
REGISTRIES = [  # what the plugin of a page adds to, put back after its test
    *("packmamba.data.packing:STRATEGIES", "packmamba.data.sources:SOURCES", "packmamba.nn.mixers:MIXERS"),
    *("packmamba.report.kinds:KINDS", "packmamba.ops.backends:BACKENDS"),
    *("packmamba.training.boundary:BOUNDARIES", "packmamba.training.optimizer:OPTIMIZERS"),
    *("packmamba.evaluation.tasks:TASKS",),
]


def blocks(page):
    return list(BLOCK.finditer(page.read_text(encoding="utf-8")))


def commands(text):
    """The words of each line of a shell block, comments left out."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that has what the pages' commands name: configurations, and documents of one's own."""
    for name in ("configs", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name)
    mine = tmp_path / "my"
    (mine / "folder").mkdir(parents=True)
    for number in range(20):
        (mine / "folder" / f"{number}.txt").write_text("a few words of my own, " * (number % 4 + 1))
    (mine / "code").mkdir()
    for number in range(20):
        (mine / "code" / f"{number}.py").write_text(
            "".join(f"name_{i}{number} = {i * 37 % 101:03d}\n" for i in range(30))
        )
    (mine / "lines.txt").write_text("".join(f"line {number} of many\n" for number in range(200)))
    (mine / "documents.jsonl").write_text("".join(f'{{"text": "document {number}"}}\n' for number in range(200)))
    write_data_sets(mine)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("packmamba.report.folder._drawn", lambda *_: [])  # most of the time; other tests draw
    registries = [named(place).registry() for place in REGISTRIES]
    before = [dict(registry) for registry in registries]
    yield tmp_path
    sys.modules.pop("my_plugin", None)
    for registry, names in zip(registries, before):
        for name in registry.keys() - names.keys():
            del registry[name]
        for name in names:
            if registry[name] is not names[name]:
                registry[name] = names[name]


def write_data_sets(mine):
    """Parquet, a saved data set, zstd and Megatron's files, where the packages are here that write them."""
    contents = [f"content {number}" for number in range(100)]
    write_megatron(mine / "ids", [[number % 7, 3] for number in range(100)])
    if importlib.util.find_spec("zstandard"):
        (mine / "lines").mkdir()
        lines = "".join(f'{{"text": "{one}"}}\n' for one in contents)
        (mine / "lines" / "a.json.zst").write_bytes(importlib.import_module("zstandard").compress(lines.encode()))
    if importlib.util.find_spec("pyarrow"):
        import pyarrow.parquet

        (mine / "tables").mkdir()
        pyarrow.parquet.write_table(pyarrow.table({"content": contents}), mine / "tables" / "a.parquet")
    if importlib.util.find_spec("datasets"):
        (mine / "data_set").mkdir()
        shutil.copy(mine / "tables" / "a.parquet", mine / "data_set" / "train.parquet")


def own_keys(words):
    """The ``key=value`` arguments of a command."""
    return [word for word in words if "=" in word and not word.startswith("-")]


def run(words, folder):
    """Runs a command of run.py on little data; the exit statuses of its processes."""
    command, *arguments = (path for word in words for path in sorted(glob.glob(word)) or [word])
    if command == "train":
        if not any(word.startswith("data.source=") for word in arguments):
            arguments += ["data.source=text", "data.path=my/folder"]
        arguments += TINY_RUN
    elif command == "sweep":
        seeds = "[0,1]" if arguments[0] == "my_sweep.yaml" and not own_keys(arguments) else "[0]"
        arguments += ["tune.seeds=[100]"] * (arguments[0] == "my_tuned_sweep.yaml")
        arguments += ["throughput_rounds=1"] * ("throughput_rounds=15" in arguments)
        arguments += [*TINY_RUN, "data.source=text", "data.path=my/folder", f"grid.seed={seeds}"]
    elif command == "bench":
        arguments += TINY_BENCH[arguments[0]]
    if "trainer.devices=2" not in arguments:
        return [cli.main([command, *arguments], prog="run.py")]
    return statuses(*fork_ranks(2, run_in, folder, [command, *arguments], output=folder / "output.txt"))


def run_in(folder, arguments):
    os.chdir(folder)
    return cli.main(arguments, prog="run.py")


def check(words):
    """Loads what a command that cannot run here is told to do."""
    if words[0] == "train":
        load_config(words[1], own_keys(words))
    elif words[0] == "sweep":
        load_sweep(words[1], own_keys(words))
    elif words[0] == "bench":
        load_bench(words[1], own_keys(words))
    elif words[0] == "reproduce":
        assert module(find(words[1]), "reproduce").STEPS
    else:
        raise AssertionError(f"{words[0]} is not for this machine: say how to check it")


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNING)
def test_every_command_of_a_page_runs(page, folder, capsys):
    for block in blocks(page):  # files first: a file may be explained in several blocks
        if (block["note"] or "").startswith("file: "):
            path = folder / block["note"].removeprefix("file: ")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(block["text"])
    names = {}
    for block in blocks(page):
        note, language, text = block["note"] or "", block["language"], block["text"]
        if note.startswith("file: "):
            continue
        if note.startswith("extra ") and importlib.util.find_spec(note.removeprefix("extra ")) is None:
            continue  # where the extra is installed, this block runs
        if language == "python":
            exec(compile(text, page.name, "exec"), names)
        elif language == "sh":
            for words in commands(text):
                if words[0] == "make":
                    assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
                elif words[0] == "pip":
                    extra = re.search(r"packmamba\[(\w+)\]", words[-1])[1]
                    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
                    assert extra in project["optional-dependencies"]
                elif words[0] in ("python", "torchrun"):
                    arguments = words[words.index("run.py") + 1 :]
                    if note.startswith("needs "):
                        check(arguments)
                    else:
                        assert not any(run(arguments, folder)), f"{shlex.join(words)}\n{capsys.readouterr().err}"
                else:
                    raise AssertionError(f"{page.name}: {shlex.join(words)} is not checked")
        else:
            assert language in ("bibtex", ""), f"{page.name}: a block of {language} is not checked"
    assert (folder / WRITES.get(page.name, "")).exists()


def anchors(page):
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "experiments").rglob("README.md"))], ids=str)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)", page.read_text(encoding="utf-8")):
        if not link.startswith(("http://", "https://")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_the_readme_is_a_front_door(tmp_path):
    runpy.run_path(str(ROOT / "docs" / "figures" / "make_schemes.py"))["draw"](tmp_path)
    assert (tmp_path / "schemes.png").stat().st_size > 50_000
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 100


def cell(table, column, **row):
    """A number of a committed table, which another test holds to the records."""
    with (ROOT / "experiments" / table).open(newline="") as file:
        (found,) = (line for line in csv.DictReader(file) if all(line[key] == value for key, value in row.items()))
    return float(found[column])


def intervals():
    """Pages and their intervals, by the tables that have them; tests/test_paper.py has the numbers themselves."""
    padding, schemes = "packing/tables/packing-padding-intervals.csv", "schemes/tables/training.csv"
    for strategy, text in (("in_order", "received order [{:.1f}, {:.1f}]"),
                           ("greedy, buffer 4096", "greedy order [{:.3f}, {:.3f}]")):  # fmt: skip
        numbers = (cell(padding, f"row_length_2048_{end}", strategy=strategy) for end in ("low", "high"))
        yield "README.md", text.format(*numbers)
    for arm, text in (("packed-reset", "[{:+.1e}, {:+.1e}]"), ("packed-leak", "[{:+.4f}, {:+.4f}]")):
        numbers = (cell(schemes, f"difference_{end}", arm=arm) for end in ("low", "high"))
        yield "experiments/schemes/README.md", text.format(*numbers)


@pytest.mark.parametrize(("page", "said"), list(intervals()))
def test_the_pages_intervals_are_the_records(page, said):
    assert said in (ROOT / page).read_text(encoding="utf-8")


def test_every_room_has_a_line():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = {path.relative_to(ROOT) for path in (ROOT / "packmamba").iterdir() if path.name[0] not in "_."}
    for room in rooms:
        assert f"`{room.name}{'' if room.suffix else '/'}`" in text, f"{room} has no line in CONTRIBUTING.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    named = re.findall(
        r"`((?:packmamba|kernels|experiments|configs|tests|training|ops|nn)/[\w/.-]+)`", page.read_text("utf-8")
    )
    for path in named:
        assert (ROOT / path).exists() or (ROOT / "packmamba" / path).exists(), path


def test_each_kind_of_change_has_its_row():
    section = (
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## What a change may cost")[1].split("\n## ")[0]
    )
    assert len([line for line in section.splitlines() if line.startswith("| a")]) == 10


@pytest.mark.parametrize("path", sorted((ROOT / "packmamba").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_says_what_it_holds(path):
    module = ast.parse(path.read_text(encoding="utf-8"))
    assert not module.body or ast.get_docstring(module)
