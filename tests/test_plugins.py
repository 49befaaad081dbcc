"""What a user adds outside the tree is a name like ours: in the process, in loaders' workers, in every rank."""

import multiprocessing
import os
import sys
import textwrap

import pytest

import run
from packmamba.config import ConfigError, load_config
from packmamba.nn.mixers import MIXERS
from packmamba.records import read_records
from packmamba.training.boundary import BOUNDARIES
from packmamba.training.fit import fit
from packmamba.training.module import MambaLitModule
from processes import ROOT, fork, fork_ranks, statuses
from runs import final_state, losses_of, tiny_config, write_config

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
    "boundary scheme": (
        """
        from packmamba.training.boundary import BOUNDARIES, Carry

        class Faded(Carry):
            def __init__(self, share=0.5):
                super().__init__()
                self.share = share

            def of_continuing(self, own, fresh, layout):
                return [tuple(self.share * part for part in state) for state in own]

        BOUNDARIES["toy"] = Faded
        """,
        ["trainer.boundary=toy", "data.strategy=split", "data.streams=3", "trainer.boundary_options.share=0.25"],
    ),
    "mixer": (
        """
        import torch
        from torch import nn
        from packmamba.nn.mixers import MIXERS

        class Mean(nn.Module):
            NO_WEIGHT_DECAY = ("rate",)

            def __init__(self, d_model, heads=2, recompute=False, backend=None):
                super().__init__()
                self.d_model = d_model
                self.rate = nn.Parameter(torch.zeros(heads, d_model // heads))
                self.out_proj = nn.Linear(d_model, d_model, bias=False)

            def mix(self, normed, weight, conv_layout, ssm_layout, state, return_state):
                (last,) = self.start_state(ssm_layout.num_documents) if state is None else state
                x, y, finals = (normed * weight).flatten(0, 1), torch.zeros_like(normed).flatten(0, 1), []
                for s in range(ssm_layout.num_documents):
                    h = last[s]
                    for slot in range(int(ssm_layout.starts[s]), int(ssm_layout.ends[s])):
                        h = h + self.rate.flatten().sigmoid() * (x[slot] - h)
                        y[slot] = h
                    finals.append(h)
                mixed = self.out_proj(y.view(normed.shape))
                return mixed, (torch.stack(finals) if finals else last,) if return_state else None

            def start_state(self, documents):
                return (self.rate.new_zeros(documents, self.d_model),)

            def initialise_in_stack(self, n_layer):
                with torch.no_grad():
                    self.out_proj.weight.div_(n_layer**0.5)

        MIXERS["toy"] = Mean
        """,
        ["model.mixer=toy", "model.mixer_options.heads=4", "trainer.boundary=carry", "data.strategy=split", "data.streams=3",
         "model.d_state=16"],
    ),
    "optimizer": (
        """
        import torch
        from packmamba.training.optimizer import OPTIMIZERS

        def sgd(model, config, fused, momentum=0.0):
            return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=momentum)

        OPTIMIZERS["toy"] = sgd
        """,
        ["optimizer.name=toy", "optimizer.options.momentum=0.5"],
    ),
}  # fmt: skip

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


@pytest.mark.slow
@pytest.mark.parametrize("toy", TOYS)
def test_a_plugin_s_name_is_trained(tmp_path, toy):
    record = train(tmp_path, write_toy(tmp_path, toy))
    assert record["metrics"]["steps"] == 2 and record["config"]["plugins"] == ["toy"]


@pytest.mark.slow
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
    succeed(tmp_path, ["report", tmp_path / "sweep"])  # another process, which reads the plugin's name in the record
    assert (tmp_path / "sweep" / "report.html").read_text() == page
    (tmp_path / "toy.py").unlink()
    succeed(tmp_path, ["report", tmp_path / "sweep"])
    assert "A toy table" not in (tmp_path / "sweep" / "report.html").read_text()
    assert "plugins: cannot import 'toy'" in (tmp_path / "output.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("toy", ["boundary scheme", "mixer"])
def test_what_a_plugin_carries_is_gone_on_from(tmp_path, monkeypatch, toy):
    """Stopped after its third step, a run ends as one that was not."""
    monkeypatch.syspath_prepend(tmp_path)
    for mapping in (sys.modules, MIXERS, BOUNDARIES):  # what the toy registers goes when the test ends
        monkeypatch.setitem(mapping, "toy", None)
        del mapping["toy"]
    keys = [*write_toy(tmp_path, toy), "data.mode=stream", "data.tokens_per_step=72", "trainer.checkpoint_every=1"]
    whole, stopped = (tiny_config(tmp_path, f"runs_dir={tmp_path}/{name}", *keys) for name in ("whole", "stopped"))
    expected = losses_of(fit(whole, progress=False))
    take = MambaLitModule.take_step

    def stop(module, step, optimizer, number, *others):
        if number == 3:
            raise RuntimeError("stopped")
        return take(module, step, optimizer, number, *others)

    monkeypatch.setattr(MambaLitModule, "take_step", stop)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(stopped, progress=False)
    monkeypatch.setattr(MambaLitModule, "take_step", take)
    carried = final_state(stopped)["carry"][0]
    assert carried["positions"].any() and all(part.any() for state in carried["states"] for part in state)
    assert losses_of(fit(stopped, progress=False)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("toy", "key", "message"),
    [
        ("boundary scheme", "trainer.boundary_options.part=1", "'trainer.boundary_options.part'; known: share"),
        ("boundary scheme", "data.strategy=greedy data.streams=1", "trainer.boundary=toy needs data.strategy=split"),
        ("mixer", "model.mixer_options.width=1", "unknown key 'model.mixer_options.width'; known: heads"),
        ("mixer", "model.d_conv=3", "model.d_conv: mixer 'toy' has no such option, got 3"),
        ("optimizer", "optimizer.options.beta=1", "unknown key 'optimizer.options.beta'; known: momentum"),
    ],
)
def test_what_a_plugin_has_not_is_refused(tmp_path, toy, key, message):
    config = write_config(tmp_path / "train.yaml", tiny_config(tmp_path))
    arguments = ["train", config, *write_toy(tmp_path, toy), *key.split()]
    output = tmp_path / "output.txt"
    assert statuses(fork(command, tmp_path, arguments, output=output)) == [2]
    assert message in output.read_text() and output.read_text().count("\n") == 1


@pytest.mark.slow
def test_workers_know_plugins(tmp_path):
    losses = []
    for start_method, workers in ((None, 0), ("fork", 1), ("spawn", 1)):
        folder = tmp_path / str(start_method)
        folder.mkdir()
        record = train(folder, [*write_toy(folder, "strategy"), f"data.num_workers={workers}"], start_method)
        losses.append([point["loss"] for point in record["curves"]["train"]])
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.slow
def test_ranks_know_plugins(tmp_path):
    keys = write_toy(tmp_path, "strategy")
    config = write_config(tmp_path / "train.yaml", tiny_config(tmp_path, "trainer.max_steps=2", "trainer.devices=2"))
    output = tmp_path / "output.txt"
    ranks = fork_ranks(2, command, tmp_path, ["train", config, *keys], output=output)
    assert statuses(*ranks) == [0, 0], output.read_text()


@pytest.mark.slow
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


def test_a_plugin_that_cannot_be_imported_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^plugins: cannot import 'no_such_module' \(ModuleNotFoundError: [^\n]*\)$"):
        load_config(None, ["plugins=[no_such_module]"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy_that_fails.py").write_text("1 / 0")
    with pytest.raises(
        ConfigError, match=r"^plugins: cannot import 'toy_that_fails' \(ZeroDivisionError: division by zero\)$"
    ):
        load_config(None, ["plugins=[toy_that_fails]"])
