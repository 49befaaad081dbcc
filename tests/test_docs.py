"""README and docs/: code blocks run on little data, links lead somewhere, proofs name tests that
exist.
"""

import ast
import glob
import json
import os
import re
import shlex
import shutil
import sys
from importlib.util import find_spec

import pytest
from matplotlib.figure import Figure

from experiments.by_name import find, load_bench
from experiments.corpus import build
from packmamba.config import load_config
from packmamba.lab import cli
from packmamba.lab.sweep import load_sweep
from processes import ROOT, fork, fork_ranks, statuses
from written import write_megatron

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- (?P<note>[^>]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
TINY_RUN = "data.source=text data.path=my/folder data.row_length=64 data.tokens_per_step=128".split()
TINY_RUN += "data.max_tokens_per_batch=128 data.validation_documents=4 model.d_model=8 model.n_layer=1".split()
TINY_RUN += "trainer.max_steps=2 trainer.validate_every=2 trainer.checkpoint_every=2 trainer.log_every=1".split()
TINY_RUN += "trainer.threads=1 optimizer.warmup_steps=1".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The configurations and documents that the pages' commands name."""
    for name in ("configs", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / name)
    mine = tmp_path / "my"
    for name in ("folder", "code", "tables", "data_set"):
        (mine / name).mkdir(parents=True)
    for number in range(20):
        (mine / "folder" / f"{number}.txt").write_text("a few words of my own, " * (number % 4 + 1))
        code = "".join(f"name_{i}{number} = {i * 37 % 101:03d}\n" for i in range(30))
        (mine / "code" / f"{number}.py").write_text(code)
    (mine / "lines.txt").write_text("".join(f"line {number} of many\n" for number in range(200)))
    (mine / "documents.jsonl").write_text("".join(f'{{"text": "document {number}"}}\n' for number in range(200)))
    pairs = ({"prompt": f"{number} squared? ", "completion": str(number**2)} for number in range(40))
    (mine / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    write_megatron(mine / "ids", [[number % 7, 3] for number in range(100)])
    if find_spec("pyarrow"):
        import pyarrow.parquet

        contents = [f"content {number}" for number in range(100)]
        for path in (mine / "tables" / "a.parquet", mine / "data_set" / "train.parquet"):
            pyarrow.parquet.write_table(pyarrow.table({"content": contents}), path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return tmp_path


def run(words, folder):
    """Run a command of run.py on little data."""
    command, *arguments = (path for word in words for path in sorted(glob.glob(word)) or [word])
    own_source = any(word.startswith(("data.source=", "data.sources=")) for word in arguments)
    if any(word.startswith("model.pretrained=") for word in arguments):
        arguments += [word for word in TINY_RUN if word.startswith(("trainer.", "optimizer."))]
    elif command in ("train", "sweep"):
        arguments += TINY_RUN[2 * (command == "train" and own_source) :]
    if command == "sweep":
        arguments += ["grid.seed=[0]"]
        arguments += ["throughput_rounds=1"] * ("throughput_rounds=15" in arguments)
    elif command == "bench":
        arguments += ["num_documents=100", "seeds=[0]", "row_lengths=[2048]"]
    if "trainer.devices=2" not in arguments:
        assert not cli.main([command, *arguments], prog="run.py"), shlex.join(words)
    else:
        ranks = fork_ranks(2, in_folder, folder, [command, *arguments], output=folder / "output.txt")
        assert not any(statuses(*ranks)), (folder / "output.txt").read_text()


def in_folder(folder, arguments):
    os.chdir(folder)
    return cli.main(arguments, prog="run.py")


LOADERS = {"train": load_config, "sweep": load_sweep, "bench": load_bench, "reproduce": lambda name, _: find(name)}


def run_page(page, folder):
    Figure.savefig = lambda figure, file, **_: file.write(b"")  # drawing takes most of the time
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    found = [(block["note"] or "", block["language"], block["text"]) for block in BLOCK.finditer(page.read_text())]
    for note, _, text in found:  # files first: a file may be explained in several blocks
        if note.startswith("file: "):
            (folder / note[6:]).parent.mkdir(parents=True, exist_ok=True)
            with (folder / note[6:]).open("a") as file:
                file.write(text)
    names = {}
    for note, language, text in found:
        if note.startswith("file: ") or (note.startswith("extra ") and not find_spec(note[6:])):
            continue
        if language == "python":
            exec(compile(text, page.name, "exec"), names)
        for line in text.replace("\\\n", " ").splitlines() if language == "sh" else ():
            words = shlex.split(line, comments=True)
            if words[:1] == ["make"]:
                assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), line
            elif "experiments.corpus.build" in words:
                build.main(words[3:])
            elif "run.py" in words:
                words = words[words.index("run.py") + 1 :]
                if note.startswith("needs "):
                    LOADERS[words[0]](words[1], [word for word in words if "=" in word and not word.startswith("-")])
                else:
                    run(words, folder)


def page_and_marks(page):
    marks = [pytest.mark.extras] * ("<!-- extra" in page.read_text(encoding="utf-8"))
    return pytest.param(page, id=page.name, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page_and_marks(page) for page in PAGES if BLOCK.search(page.read_text())])
def test_every_code_block_of_a_page_runs(page, folder):
    output = folder / "page.txt"
    assert statuses(fork(run_page, page, folder, output=output)) == [0], output.read_text()[-3000:]


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "experiments").rglob("README.md"))], ids=str)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if not link.startswith(("http://", "https://")):
            target = (page.parent / path).resolve() if path else page
            headings = re.findall(r"^#+ (.*)$", target.read_text() if anchor else "", flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert target.exists() and (not anchor or anchor in anchors), f"{page.name}: {link}"


def test_every_statement_of_the_page_of_proofs_names_tests_that_exist():
    page = (ROOT / "docs" / "pui.md").read_text(encoding="utf-8")
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", page)
    for path, name in named:
        module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"
    statements = re.split(r"^(?=\*\*(?:Lemma|Proposition|Theorem|Corollary) \d)", page, flags=re.MULTILINE)[1:]
    assert len(statements) == 9 and len(named) > 15
    assert all(re.search(r"∎.*?\*Checked by\* `tests/", statement, flags=re.DOTALL) for statement in statements)
