"""A report is one page that makes no requests, beside its tables and figures; records of two
corpora are not compared.
"""

import base64
import re

import matplotlib.pyplot as plt
import pytest

from made_records import PACKING, packing, table, table_files, throughput, training, write, write_report
from packmamba.lab.records import make_record
from packmamba.lab.report import figures, html
from packmamba.lab.report.figures import training_figures
from packmamba.lab.report.html import Kind, format_table
from packmamba.lab.report.tables import Column, Table


def test_the_footer_names_the_command_that_is_installed(tmp_path, monkeypatch, undrawn):
    monkeypatch.setattr(html, "COMMAND", "packmamba")
    page = write_report(write(tmp_path, [training("single")])).read_text(encoding="utf-8")
    assert "<code>packmamba report</code>" in page and "run.py" not in page


@pytest.mark.slow
def test_the_report_is_one_file_that_makes_no_requests(tmp_path):
    arms = ["single", "padded", "packed-reset", "packed-leak"]
    records = [training(arm, seed, 2.0 + 0.1 * i + 0.01 * seed * i) for i, arm in enumerate(arms) for seed in (0, 1)]
    records += [throughput(arm, 100.0 * (1 + i)) for i, arm in enumerate(arms)]
    records += [packing("greedy", 2048, 0.001, buffer=b) for b in (512, 4096)]
    write(tmp_path, records)
    for stale in ("tables/old.md", "figures/old.png"):
        (tmp_path / stale).parent.mkdir(exist_ok=True)
        (tmp_path / stale).write_text("stale")
    page = write_report(tmp_path, PACKING).read_text(encoding="utf-8")
    assert "<h1>PackMamba: question</h1>" in page and "+0.1050" in page and "1.50x" in page
    assert not re.search(r"https?:|//\w|<script|<link|<iframe|@import|url\(", re.sub(r"base64,[\w+/=]+", "", page))
    pictures = sorted(path.read_bytes() for path in (tmp_path / "figures").iterdir())
    names = {"learning-curves", "differences", "speed", "loss-by-position", "packing", "packing-buffer"}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {f"{name}.png" for name in names}
    sources = re.findall(r'<img [^>]*srcset="data:image/png;base64,([\w+/=]*)', page)
    assert sorted(map(base64.b64decode, sources)) == pictures and all(p.startswith(b"\x89PNG") for p in pictures)
    written = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "tables").iterdir()}
    assert written == table_files(reversed(records), PACKING), "the order of records must not matter"


def test_corpora_are_not_compared(tmp_path, undrawn):
    ours = [training("padded", 0, 2.0), training("packed-reset", 0, 2.5), throughput("single", 50.0)]
    other = [training("packed-reset", 1, 7.0, corpus="corpus/b"), throughput("packed-reset", 400.0, corpus="corpus/b")]
    alone = {row["arm"]: row for row in table(ours, "training")}
    files = table_files(ours + other)
    assert {name for name in files if name.endswith(".csv")} == {
        f"{kind}-{corpus}.csv" for kind in ("training", "throughput") for corpus in ("corpus-a", "corpus-b")
    }
    first, second = (table(ours + other, f"training-corpus-{letter}") for letter in "ab")
    assert {row["arm"]: row for row in first} == alone
    assert [(row["arm"], row["val_loss"], row["val_loss_difference"]) for row in second] == [("packed-reset", "7", "")]
    alike = table_files([ours[0] | {"corpus_hash": "a/b"}, ours[0] | {"corpus_hash": "a:b"}])
    assert {name for name in alike if name.endswith(".md")} == {"training-a-b.md", "training-a-b-2.md"}
    page = write_report(write(tmp_path, ours + other)).read_text()
    assert "Corpus corpus-a" in page and "Corpus corpus/b" in page


def test_records_of_an_unknown_kind_need_a_report():
    record = make_record("mine", "question", "arm", {}, 0, "corpus", {"anything": 1.0}, 1.0)
    with pytest.raises(ValueError, match="kind: .*, got mine"):
        format_table([record], kinds={})
    shown = {"mine": Kind(lambda records: [Table("mine", "Mine", [Column("a", ("a",))])])}
    assert format_table([record], shown).startswith("Mine\n")


@pytest.fixture
def drawn(monkeypatch):
    """Canvas and caption of each figure by name."""
    found = {}
    monkeypatch.setattr(figures, "finish", lambda fig, name, caption: found.update({name: (fig, caption)}))
    yield found
    plt.close("all")


def test_time_in_learning_curves_is_at_the_speed_timed_in_turns(drawn):
    trained = [training(arm) for arm in ("single", "padded")]
    training_figures([*trained, throughput("single", 100.0), throughput("padded", 200.0)])
    by_time = drawn["learning-curves"][0].axes[1]
    assert [list(line.get_xdata()) for line in by_time.lines] == [[5.0, 10.0], [2.5, 5.0]]
    training_figures([*trained, throughput("single", 100.0)])
    panels = [ax.get_title() for ax in drawn["learning-curves"][0].axes]
    assert panels == ["Against data", "The same, minus padded"], "runs of their own may have shared a machine"
    trained[0]["curves"]["loss_by_position"] = [{"start": 0, "end": 8, "loss": None, "count": 80}] * 2
    training_figures(trained)  # all of an arm's runs diverged


def test_curves_that_coincide_are_drawn_as_paired_differences(drawn):
    records = [training(arm, seed=seed) for arm in ("padded", "packed-reset") for seed in range(3)]
    for record in records:
        for point in record["curves"]["validation"]:
            point["loss"] = 10 * record["seed"] + (0.25 if record["arm"] == "packed-reset" else 0)
    training_figures(records)
    panel = drawn["learning-curves"][0].axes[-1]
    assert panel.get_title() == "The same, minus padded"
    assert [line.get_ydata().tolist() for line in panel.lines] == [[0.25, 0.25]]


def test_nothing_drawn_is_cut_and_no_panel_is_empty(drawn):
    arms = [f"mine a_long_key_of_a_grid={value},another_key_of_it={10 * value}" for value in range(9)]
    records = [training(arm) for arm in arms]
    for record in records:
        record["curves"]["loss_by_position"][1]["end"] = 2**31  # the axis ends
    training_figures(records)
    assert drawn["loss-by-position"][0].axes[0].get_xlim()[1] < 100
    for fig, _ in drawn.values():
        fig.canvas.draw()
        for legend in fig.legends:
            box = legend.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= fig.bbox.width
        assert all(ax.lines or ax.patches for ax in fig.axes)
    assert len(drawn["loss-by-position"][0].axes) == 1, "nothing is compared"


def test_lines_without_a_number_are_not_drawn():
    """Of runs that diverged before a validation, which a logarithmic axis would refuse."""
    line = figures.pd.DataFrame(float("nan"), index=[1, 2], columns=["mean", "low", "high"])
    assert not figures._line_figure("name", "", [], [figures._Panel("", "", "", {None: line})], log=True)
