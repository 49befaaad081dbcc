"""Figures and the page made of records. Every record here is invented."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from pathlib import Path

import pytest

from made_records import PACKING, packing, throughput, training, write
from packmamba.experiments import kinds_of
from packmamba.records import read_records
from packmamba.report import training_figures
from packmamba.report.folder import build_sections, format_table, table_files, write_report

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = sorted(path.parent for path in ROOT.glob("experiments/*/tables"))


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: folder.mkdir()])
def test_a_folder_without_records_is_one_sentence(tmp_path, make):
    folder = tmp_path / "nothing"
    make(folder)
    with pytest.raises(ValueError, match=r"nothing: .*no record") as caught:
        write_report(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_report_is_one_file_that_asks_nobody(tmp_path):
    arms = ["single", "padded", "packed-reset", "packed-leak"]
    records = [training(arm, seed, 2.0 + 0.1 * i + 0.01 * seed * i) for i, arm in enumerate(arms) for seed in (0, 1)]
    records += [throughput(arm, 100.0 * (1 + i)) for i, arm in enumerate(arms)]
    records += [packing("greedy", 2048, 0.001, buffer=b) for b in (512, 4096)]
    write(tmp_path, records)
    (tmp_path / "README.md").write_text(
        "# A <title>\n\nIntroduction.\n\n## Question\nWhat does `packing`\nchange?\n\nMore.\n"
    )
    for stale in ("tables/old.md", "figures/old.png"):
        (tmp_path / stale).parent.mkdir(exist_ok=True)
        (tmp_path / stale).write_text("stale")
    page = write_report(tmp_path, PACKING).read_text(encoding="utf-8")
    assert "<h1>A &lt;title&gt;</h1>" in page and "What does <code>packing</code> change?" in page
    assert "2 seeds: differences carry their intervals; parity claims need at least five seeds." in page
    assert not re.search(r"https?:|//\w|<script|<link|<iframe|@import|url\(", re.sub(r"base64,[\w+/=]+", "", page))
    sources = re.findall(r'src="([^"]*)"', page)
    pictures = sorted(path.read_bytes() for path in (tmp_path / "figures").glob("*.png"))
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {
        *("learning-curves", "differences", "speed", "loss-by-position", "packing", "packing-buffer")
    }
    assert sorted(base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources) == pictures
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    narrow = re.findall(r'srcset="data:image/png;base64,([^"]*)"', page)
    assert len(narrow) == len(pictures) and all(base64.b64decode(each).startswith(b"\x89PNG") for each in narrow)
    vectors = sorted((tmp_path / "figures").glob("*.pdf"))
    assert [path.stem for path in vectors] == [path.stem for path in sorted((tmp_path / "figures").glob("*.png"))]
    assert all(b"%PDF" in path.read_bytes() and b"CreationDate" not in path.read_bytes() for path in vectors)
    written = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "tables").iterdir()}
    assert written == table_files(reversed(records), PACKING), "the order of records must not matter"


def test_time_in_learning_curves_is_that_of_arms_timed_in_turns(monkeypatch):
    drawn = {}
    monkeypatch.setattr(training_figures, "finish", lambda fig, name, caption: drawn.update({name: (fig, caption)}))

    def seconds(records):
        training_figures.training_figures(records)
        fig, caption = drawn["learning-curves"]
        return [list(line.get_xdata()) for line in fig.axes[1].lines], caption

    trained = [training(arm) for arm in ("single", "padded")]
    x, caption = seconds(trained + [throughput("single", 100.0), throughput("padded", 200.0)])
    assert x == [[5.0, 10.0], [2.5, 5.0]] and "timed in turns" in caption
    x, caption = seconds(trained + [throughput("single", 100.0)])
    assert x == [[5 / 7, 10 / 7]] * 2 and "which is no comparison" in caption
    padded = trained[1]["curves"]
    padded["validation"] = padded["validation"][-1:]
    seconds(trained)
    markers = [line.get_marker() for line in drawn["learning-curves"][0].axes[1].lines if len(line.get_xdata()) == 1]
    assert "o" in markers, "a line through one point would not be seen"
    trained[0]["curves"]["validation"] = trained[0]["curves"]["validation"][-1:]
    drawn.clear()
    training_figures.training_figures(trained)
    assert drawn and "learning-curves" not in drawn, "who evaluates at the end alone has no curve"


@pytest.mark.slow
def test_the_page_says_what_its_arms_do(tmp_path):
    page = write_report(write(tmp_path, [training("single seq=3"), training("mine")])).read_text()
    assert "<strong>single</strong>: one document at a time" in page
    assert "side by side" not in page


README = """# Is *this* <b>rendered</b>?

**Question.** What, in two ways:
- *today*
- **tomorrow**

**Command.** `run`

## Findings
It is +0.1 [0.0, 0.2] ([table](tables/t.md)).

| what | how much |
|---|---:|
| it | 0.1 |

## How
By ![a picture](figures/x.png) hand.
"""


@pytest.mark.slow
def test_the_readme_stands_on_the_page_findings_first(tmp_path):
    (tmp_path / "README.md").write_text(README)
    page = write_report(write(tmp_path, [training("padded"), training("packed-reset")])).read_text()
    assert "<h1>Is <em>this</em> &lt;b&gt;rendered&lt;/b&gt;?</h1>" in page
    assert "<title>Is this &lt;b&gt;rendered&lt;/b&gt;?</title>" in page
    lead = page[page.index('class="lead"') : page.index('class="facts"')]
    assert "<em>today</em>" in lead and "Command" not in lead
    order = ["<h2>Findings</h2>", "It is +0.1 [0.0, 0.2] (table).", "<td>it</td>", "<h2>Arms</h2>", "<h2>Result</h2>"]
    order += ["Validation loss and speed by arm", "<h2>About</h2>", "<code>run</code>", "<h2>How</h2>", "By  hand."]
    places = [page.index(text) for text in order]
    assert places == sorted(places) and "*" not in re.sub(r"<style>.*?</style>|base64,[\w+/=]+", "", page, flags=re.S)


# The audit's arms are models, which go by their own names; tables of long runs say what each row is.
@pytest.mark.parametrize("folder", [f for f in EXPERIMENTS if f.name != "leakcheck"], ids=lambda folder: folder.name)
def test_every_arm_of_a_committed_table_is_explained(folder):
    records = read_records(folder)
    explained = 0
    for section in build_sections(records, figures=False, kinds=kinds_of(folder, records)):
        for table in section.tables:
            for i, column in enumerate(table.columns):
                if column.title in ("arm", "packed arm", "strategy", "implementation"):
                    names = {row[i].text for row in table.rows if "the paper" not in row[i].text}
                    assert [name for name in names if not name.startswith(tuple(section.arms))] == []
                    explained += len(names)
    assert explained >= 4


def test_nothing_drawn_is_cut_and_no_panel_is_empty(monkeypatch):
    drawn = {}
    monkeypatch.setattr(training_figures, "finish", lambda fig, name, caption: drawn.update({name: fig}))
    arms = [f"mine a_long_key_of_a_grid={value},another_key_of_it={10 * value}" for value in range(9)]
    records = [training(arm) for arm in arms]
    for record in records:
        record["curves"]["loss_by_position"][1]["end"] = 2**31  # it goes on for ever; the axis does not
    training_figures.training_figures(records)
    assert drawn["loss-by-position"].axes[0].get_xlim()[1] < 100
    for fig in drawn.values():
        fig.canvas.draw()
        for legend in fig.legends:
            box = legend.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= fig.bbox.width
        assert all(ax.lines or ax.patches for ax in fig.axes)
    assert len(drawn["loss-by-position"].axes) == 1, "nothing is compared"


@pytest.mark.slow
def test_one_seed_claims_nothing(tmp_path):
    records = [training("padded", 0, 2.0), training("packed-reset", 0, 1.9)]
    assert "-0.1000 (no claim)" in format_table(records)
    page = write_report(write(tmp_path, records)).read_text()
    assert "parity claims need the longer run with at least five seeds" in page
    assert "−0.1000 (no claim)" in page
    five = [training(arm, seed, 2.0 + seed) for arm in ("padded", "packed-reset") for seed in range(5)]
    assert "parity claims" not in format_table(five)


@pytest.mark.slow
def test_results_need_no_torch():
    code = "import sys, packmamba.report.folder, packmamba.records; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
