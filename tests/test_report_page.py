"""Figures and the page made of records. Every record here is invented."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from pathlib import Path

import pytest

from made_records import PACKING, packing, throughput, training, write
from packmamba.report import training_figures
from packmamba.report.folder import format_table, table_files, write_report

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: folder.mkdir()])
def test_a_folder_without_records_is_one_sentence(tmp_path, make):
    folder = tmp_path / "nothing"
    make(folder)
    with pytest.raises(ValueError, match=r"nothing (is not a folder|has no records)") as caught:
        write_report(folder)
    assert "\n" not in str(caught.value)


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


def test_the_page_says_what_its_arms_do(tmp_path):
    page = write_report(write(tmp_path, [training("single seq=3"), training("mine")])).read_text()
    assert "<strong>single</strong>: one document at a time" in page
    assert "side by side" not in page


def test_one_seed_claims_nothing(tmp_path):
    records = [training("padded", 0, 2.0), training("packed-reset", 0, 1.9)]
    assert "-0.1000 (no claim)" in format_table(records)
    page = write_report(write(tmp_path, records)).read_text()
    assert "parity claims need the longer run with at least five seeds" in page
    assert "−0.1000 (no claim)" in page
    five = [training(arm, seed, 2.0 + seed) for arm in ("padded", "packed-reset") for seed in range(5)]
    assert "parity claims" not in format_table(five)


def test_results_need_no_torch():
    code = "import sys, packmamba.report.folder, packmamba.records; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
