"""What a user adds outside the tree is a name like ours: in the process, in loaders' workers, in every rank."""

import multiprocessing
import os
import subprocess
import sys
import textwrap

import pytest

import run
from packmamba.config import ConfigError, load_config
from packmamba.records import read_records
from packmamba.training.runs import run_id
from processes import ONE_THREAD, ROOT, fork, statuses
from runs import tiny_config, write_config

# What each toy adds, and the keys that ask for it.
TOYS = {
    "strategy": (
        """
        import numpy as np
        from packmamba.data.packing import STRATEGIES, Strategy

        def last_first(lengths, row_length, buffer):
            return np.arange(len(lengths))[::-1]

        STRATEGIES["toy"] = Strategy(last_first, keeps_order=False)
        """,
        ["data.strategy=toy"],
    ),
    "source": (
        """
        from packmamba.data.sources import SOURCES, Document, Source

        def open_toy(data):
            def read(advance, skipped):
                for number in range(60):
                    yield Document(number % 5 == 0, "ab" * (1 + number % 11))
                    advance(1)

            return Source(["toy", 1], 60, " documents", read)

        SOURCES["toy"] = open_toy
        """,
        ["data.source=toy", "data.path=null"],
    ),
    "source of ids": (
        """
        import numpy as np
        from packmamba.data.sources import SOURCES, Document, Source

        def open_toy(data):
            def read(advance, skipped):
                for number in range(60):
                    yield Document(number % 5 == 0, np.arange(1 + number % 11) + number)

            return Source(["ids", 1], 60, " documents", read, vocab_size=70)

        SOURCES["toy"] = open_toy
        """,
        ["data.source=toy", "data.path=null"],
    ),
}

TOY_REPORT = """
    from packmamba.report.figures import axes, finish
    from packmamba.report.kinds import KINDS
    from packmamba.report.summary import frame
    from packmamba.report.tables import Column, Table, number, word

    def tables(records):
        runs = frame(records, "training")
        rows = [[word(run["arm"]), number(run["steps"], ".0f")] for _, run in runs.iterrows()]
        return [Table("toy", "A toy table", [Column("arm", ("arm",), False), Column("steps", ("steps",))], rows)]

    def figures(records):
        fig, (ax,) = axes(1)
        ax.plot(frame(records, "training")["val_loss"])
        return [finish(fig, "toy", "A toy figure.")]

    KINDS["training"] = KINDS["training"].extended(tables, figures)
"""


def write_toy(folder, toy):
    """The toy's module in the folder; its keys."""
    code, keys = TOYS[toy]
    (folder / "toy.py").write_text(textwrap.dedent(code))
    return ["plugins=[toy]", *keys]


def command(folder, arguments, start_method=None):
    """A command where the toy lies; what it registers stays in this process."""
    os.chdir(folder)
    if start_method is not None:
        multiprocessing.set_start_method(start_method, force=True)
    return run.main(list(map(str, arguments)))


def succeed(folder, arguments, start_method=None):
    output = folder / "output.txt"
    assert statuses(fork(command, folder, arguments, start_method, output=output)) == [0], output.read_text()


def train(folder, keys, start_method=None):
    """Two steps; the run's record."""
    config = write_config(folder / "train.yaml", tiny_config(folder, "trainer.max_steps=2"))
    succeed(folder, ["train", config, f"runs_dir={folder}/new", *keys], start_method)
    (record,) = read_records(next((folder / "new").iterdir()))
    return record


@pytest.mark.parametrize("toy", TOYS)
def test_a_plugin_s_name_is_trained(tmp_path, toy):
    record = train(tmp_path, write_toy(tmp_path, toy))
    assert record["metrics"]["steps"] == 2 and record["config"]["plugins"] == ["toy"]


def test_a_plugin_s_table_and_figure_are_in_the_report(tmp_path):
    """For an experiment's own they stand in its report.py: one file, as here."""
    (tmp_path / "toy.py").write_text(textwrap.dedent(TOY_REPORT))
    base = write_config(tmp_path / "base.yaml", tiny_config(tmp_path, "trainer.max_steps=1"))
    (tmp_path / "sweep.yaml").write_text(
        f"base: {base}\noutput: {tmp_path}/sweep\nplugins: [toy]\narms: {{single: {{data.strategy: single}}}}\n"
    )
    succeed(tmp_path, ["sweep", tmp_path / "sweep.yaml"])
    assert (tmp_path / "sweep" / "tables" / "toy.csv").read_text() == "arm,steps\nsingle,1\n"
    assert (tmp_path / "sweep" / "tables" / "toy.tex").read_text().startswith("\\begin{table}")
    assert (tmp_path / "sweep" / "figures" / "toy.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sweep" / "figures" / "toy.pdf").read_bytes().startswith(b"%PDF")
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "<h3>A toy table</h3>" in page and "<figcaption>A toy figure.</figcaption>" in page


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_know_plugins(tmp_path, start_method):
    (tmp_path / "alone").mkdir()
    alone = train(tmp_path / "alone", write_toy(tmp_path / "alone", "strategy"))
    worker = train(tmp_path, [*write_toy(tmp_path, "strategy"), "data.num_workers=1"], start_method)
    losses = [[point["loss"] for point in record["curves"]["train"]] for record in (alone, worker)]
    assert losses[0] == losses[1]


def test_ranks_know_plugins(tmp_path):
    keys = write_toy(tmp_path, "strategy")
    config = write_config(tmp_path / "train.yaml", tiny_config(tmp_path, "trainer.max_steps=2", "trainer.devices=2"))
    arguments = [sys.executable, ROOT / "run.py", "train", config, *keys]
    done = subprocess.run(arguments, cwd=tmp_path, env=ONE_THREAD, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_sweeps_and_benches_take_plugins(tmp_path):
    write_toy(tmp_path, "strategy")
    base = write_config(tmp_path / "base.yaml", tiny_config(tmp_path, "trainer.max_steps=1"))
    (tmp_path / "sweep.yaml").write_text(
        f"base: {base}\noutput: {tmp_path}/sweep\nplugins: [toy]\n"
        "arms: {toy: {data.strategy: toy}, single: {data.strategy: single}}\n"
    )
    small = ["num_documents=50", "row_lengths=[2048]", "seeds=[0]", "rounds=1", "buffers=[8]"]
    bench = ["bench", ROOT / "experiments/packing/packing.yaml", "plugins=[toy]", "strategies=[toy,greedy]", *small]
    for arguments in (["sweep", tmp_path / "sweep.yaml"], [*bench, f"output={tmp_path}/bench"]):
        succeed(tmp_path, arguments)
    assert {record["config"]["data"]["strategy"] for record in read_records(tmp_path / "sweep")} == {"toy", "single"}
    assert {record["arm"] for record in read_records(tmp_path / "bench")} == {"toy", "greedy"}


TABLE = """
from packmamba.report.kinds import KINDS
from packmamba.report.tables import Cell, Column, Table

def count(records):
    table = Table("toy", "How many runs", [Column("runs", ("runs",))])
    table.rows.append([Cell(str(len(records)), (len(records),))])
    return [table]

KINDS["training"] = KINDS["training"].extended(tables=count)
"""


def test_a_report_made_again_has_a_plugin_s_table(tmp_path):
    (tmp_path / "toy.py").write_text(TABLE)
    train(tmp_path, ["plugins=[toy]"])
    folder = next((tmp_path / "new").iterdir())
    succeed(tmp_path, ["report", folder])
    assert "How many runs" in (folder / "report.html").read_text()
    (tmp_path / "toy.py").unlink()
    succeed(tmp_path, ["report", folder])
    assert "How many runs" not in (folder / "report.html").read_text()
    assert "plugins: cannot import 'toy'" in (tmp_path / "output.txt").read_text()


def test_a_plugin_that_cannot_be_imported_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^plugins: cannot import 'no_such_module' \(ModuleNotFoundError: [^\n]*\)$"):
        load_config(None, ["plugins=[no_such_module]"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy_that_fails.py").write_text("1 / 0")
    with pytest.raises(
        ConfigError, match=r"^plugins: cannot import 'toy_that_fails' \(ZeroDivisionError: division by zero\)$"
    ):
        load_config(None, ["plugins=[toy_that_fails]"])


def test_runs_without_plugins_keep_their_names(tmp_path):
    config = tiny_config(tmp_path)
    plain = run_id(config)
    config.plugins = ["json"]
    assert run_id(config) != plain
    assert run_id(load_config()) == "train-4ceb1c41f6"
