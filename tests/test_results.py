"""Records, and the tables, figures and page made of them. Every record here is invented."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from experiments.packing.report import KINDS as PACKING
from packmamba import records as records_module
from packmamba.experiments import kinds_of
from packmamba.records import (
    METRICS,
    append_record,
    make_record,
    provenance,
    read_records,
    validate_record,
)
from packmamba.report import figures as plots
from packmamba.report import summary
from packmamba.report.folder import build_sections, format_table, table_files, write_report
from packmamba.report.kinds import Kind
from packmamba.report.tables import Column, Table

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = sorted({path.parents[1] for path in ROOT.glob("experiments/*/records/*.jsonl")})


def training(arm, seed=0, loss=2.0, corpus="corpus-a", config=None, time=None, **metrics):
    values = dict.fromkeys(METRICS["training"]) | {
        "steps": 10,
        "real_tokens": 1000,
        "val_loss": loss,
        "val_loss_start": loss + 1,
        "real_tokens_per_second": 100.0,
        "slots_per_second": 125.0,
        "padding_fraction": 0.2,
    }
    curves = {
        "train": [],
        "validation": [
            {"step": step, "real_tokens": 100 * step, "seconds": step / 7, "loss": loss + 1 / (1 + step)}
            for step in (0, 5, 10)
        ],
        "loss_by_position": [
            {"start": 0, "end": 8, "loss": loss + 1, "count": 80},
            {"start": 8, "end": 64, "loss": loss, "count": 500},
        ],
    }
    config = {"name": arm, "seed": seed, "data": {"strategy": "greedy"}, **(config or {})}
    made = make_record("training", "question", arm, config, seed, corpus, values | metrics, 1.5, curves)
    return made | ({"time": time} if time else {})


def throughput(arm, rate, run="one", corpus="corpus-a"):
    metrics = {
        "seconds_per_step_median": 1000 / rate,
        "seconds_per_step_spread": 0.01,
        "real_tokens_per_second": rate,
        "slots_per_second": rate / 0.8,
        "padding_fraction": 0.2,
        "rounds": 7,
    }
    return make_record("throughput", "question", arm, {"run": run}, 0, corpus, metrics, 1.0)


def packing(strategy, row_length, padding, seconds=0.5, buffer=None, seed=0):
    config = {"strategy": strategy, "row_length": row_length, "buffer": buffer, "distribution": "documents-2k"}
    metrics = {"padding_fraction": padding, "planning_seconds": seconds, "num_rows": 10, "num_documents": 2000}
    config["num_documents"] = 2000
    return make_record("packing", "packing", strategy, config, seed, "documents-2k-2000", metrics, 1.0)


def write(folder, records):
    for record in records:
        append_record(folder / "records" / "runs.jsonl", record)
    return folder


def table(records, name):
    """Rows of a generated CSV, as mappings."""
    return list(csv.DictReader(io.StringIO(table_files(records, PACKING)[f"{name}.csv"])))


def test_a_record_says_where_it_comes_from_and_survives_the_disk(tmp_path):
    record = training("padded", loss=np.float64(2.5), val_loss_start=float("nan"), steps=np.int64(7))
    assert record["metrics"]["val_loss_start"] is None and record["metrics"]["steps"] == 7
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["versions"]["numpy"] == np.__version__
    assert record["hardware"]["cores"] >= 1 and record["hardware"]["memory_bytes"] > 2**28
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["time"])
    write(tmp_path, [record, record | {"seed": 1}])
    assert read_records(tmp_path) == [record, record | {"seed": 1}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "0"}, "seed must be int"),
        ({"seed": True}, "seed must be int"),
        ({"kind": ""}, "kind is empty"),
        ({"corpus_hash": ""}, "corpus_hash is empty"),
        ({"metrics": {"val_loss": 1.0}}, "lack steps, real_tokens"),
        ({"metrics": dict.fromkeys(METRICS["training"], "2.0")}, "metrics.steps must be a number or null"),
        ({"curves": {"train": [{"loss": "low"}]}}, r"curves.train\[0\].loss must be a number or null"),
        ({"config": {"lr": float("inf")}}, "not strict JSON"),
        ({"extra": 1}, "unknown keys extra"),
        ({"schema": 2}, "schema is 2"),
    ],
)
def test_a_wrong_record_is_refused_by_key(change, message):
    with pytest.raises(ValueError, match=message):
        validate_record(training("single") | change)


def test_records_of_an_unknown_kind_are_read_and_not_reported(tmp_path):
    record = make_record("mine", "question", "arm", {}, 0, "corpus", {"anything": 1.0}, 1.0)
    assert read_records(write(tmp_path, [record])) == [record]
    with pytest.raises(ValueError, match="kind 'mine' is unknown; known: training, throughput"):
        format_table([record], kinds={})
    shown = {"mine": Kind(lambda records: [Table("mine", "Mine", [Column("a", ("a",))])], metrics=("anything",))}
    assert format_table([record], shown).startswith("Mine\n")
    with pytest.raises(ValueError, match="metrics of the mine record of arm lack anything"):
        format_table([record | {"metrics": {}}], shown)


def test_a_record_that_lacks_a_key_is_refused():
    record = training("single")
    del record["commit"], record["seed"]
    with pytest.raises(ValueError, match="lacks commit, seed"):
        validate_record(record)


@pytest.mark.parametrize("line", ["{", '{"kind": NaN}', "[]", '{"kind": "training"}'])
def test_a_broken_line_is_named(tmp_path, line):
    write(tmp_path, [training("single")])
    path = tmp_path / "records" / "runs.jsonl"
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"runs\.jsonl:3: "):
        read_records(tmp_path)


def test_an_append_cut_short_costs_only_itself(tmp_path):
    write(tmp_path, [training("single")])
    path = tmp_path / "records" / "runs.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    append_record(path, training("padded"))
    first, second = path.read_text().splitlines()
    assert json.loads(second)["arm"] == "padded"
    with pytest.raises(ValueError, match=r"runs\.jsonl:1: "):
        read_records(tmp_path)


def test_many_writers_share_a_file(tmp_path):
    path = tmp_path / "records" / "runs.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: append_record(path, training("single", seed)), range(64)))
    assert sorted(record["seed"] for record in read_records(tmp_path)) == list(range(64))


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: folder.mkdir()])
def test_a_folder_without_records_is_one_sentence(tmp_path, make):
    folder = tmp_path / "nothing"
    make(folder)
    with pytest.raises(ValueError, match=r"nothing (is not a folder|has no records)") as caught:
        write_report(folder)
    assert "\n" not in str(caught.value)


def test_commit_and_dirty_are_of_our_own_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    source = tmp_path / "packmamba" / "records.py"
    source.parent.mkdir(parents=True)
    source.write_text("old")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.delenv("PACKMAMBA_COMMIT", raising=False)
    monkeypatch.setattr(records_module, "__file__", str(source))
    assert records_module._commit() == (git("rev-parse", "HEAD"), False)
    written = tmp_path / "experiments" / "q" / "records" / "a.jsonl"
    written.parent.mkdir(parents=True)
    written.write_text("{}")
    assert records_module._commit()[1] is False, "what runs write is no change of code"
    source.write_text("new")
    assert records_module._commit()[1] is True
    inside = tmp_path / "somebody" / "site-packages" / "packmamba" / "results" / "record.py"
    inside.parent.mkdir(parents=True)
    monkeypatch.setattr(records_module, "__file__", str(inside))
    assert records_module._commit() == (None, None), "an installed package is not the repository it lies in"


def test_a_commit_can_be_named(monkeypatch):
    provenance.cache_clear()
    monkeypatch.setenv("PACKMAMBA_COMMIT", "0123abc-dirty")
    assert (provenance()["commit"], provenance()["dirty"]) == ("0123abc", True)
    provenance.cache_clear()


def test_training_table_against_numbers_worked_out_here():
    losses = {
        "padded": [2.10, 2.00, 2.05, 1.95, 2.20],
        "packed-leak": [2.16, 2.07, 2.06, 2.00, 2.24],
    }
    records = [training(arm, seed, loss) for arm, each in losses.items() for seed, loss in enumerate(each)]
    leak = next(row for row in table(records, "training") if row["arm"] == "packed-leak")
    differences = np.subtract(losses["packed-leak"], losses["padded"])
    half = 2.776 * differences.std(ddof=1) / np.sqrt(5)  # Student's t, 4 degrees of freedom
    assert leak["seeds"] == leak["pairs"] == "5"
    assert float(leak["val_loss"]) == pytest.approx(np.mean(losses["packed-leak"]), rel=1e-7)
    assert float(leak["val_loss_sd"]) == pytest.approx(np.std(losses["packed-leak"], ddof=1), rel=1e-7)
    assert float(leak["difference"]) == pytest.approx(differences.mean(), rel=1e-6)
    assert float(leak["difference_low"]) == pytest.approx(differences.mean() - half, rel=1e-4)
    assert float(leak["difference_high"]) == pytest.approx(differences.mean() + half, rel=1e-4)
    assert f"{np.mean(losses['packed-leak']):.4f} ± " in table_files(records)["training.md"]
    padded = next(row for row in table(records, "training") if row["arm"] == "padded")
    assert padded["difference"] == ""


def test_only_shared_seeds_are_paired():
    records = [training("padded", s, 2.0 + s) for s in (0, 1, 2)] + [
        training("packed-reset", s, 2.5 + s) for s in (1, 2, 9)
    ]
    row = next(row for row in table(records, "training") if row["arm"] == "packed-reset")
    assert row["pairs"] == "2" and float(row["difference"]) == pytest.approx(0.5)


def test_t_quantiles():
    assert summary.t95(1) == 12.706 and summary.t95(30) == 2.042
    assert summary.t95(31) == pytest.approx(2.0395, abs=1e-3) and summary.t95(10**6) == pytest.approx(1.95996, abs=1e-4)


def test_a_diverged_run_stays_in_the_table():
    rows = table([training("padded", 0, 2.0), training("packed-leak", 0, float("nan"))], "training")
    assert [(row["arm"], row["val_loss"], row["difference"]) for row in rows] == [
        ("padded", "2", ""),
        ("packed-leak", "", ""),
    ]


def test_the_latest_of_a_repeated_run_counts():
    early, late = "2030-01-01T00:00:00+00:00", "2030-01-02T00:00:00+00:00"
    (row,) = table([training("single", loss=3.0, time=late), training("single", loss=9.0, time=early)], "training")
    assert row["val_loss"] == "3" and row["seeds"] == "1"


def test_one_arm_under_two_configurations_is_two_rows_each_with_its_baseline():
    records = [
        training(arm, loss=loss, config={"model": {"d_model": width}})
        for width, arm, loss in [(64, "padded", 3.0), (64, "single", 3.25), (128, "padded", 2.0), (128, "single", 2.5)]
    ]
    rows = {row["arm"]: row["difference"] for row in table(records, "training")}
    assert rows == {
        "single (model.d_model=64)": "0.25",
        "padded (model.d_model=64)": "",
        "single (model.d_model=128)": "0.5",
        "padded (model.d_model=128)": "",
    }


def test_points_of_a_grid_are_compared_among_themselves_in_numerical_order():
    settings = {"d_model=64": (3.0, 50.0), "d_model=128": (2.0, 20.0)}
    records = []
    for setting, (loss, rate) in settings.items():
        for arm, worse, faster in [("packed-reset", 0.25, 4), ("single", 0.5, 1), ("padded", 0.0, 2)]:
            records.append(training(f"{arm} {setting}", loss=loss + worse))
            records.append(throughput(f"{arm} {setting}", rate * faster))
    assert [(row["arm"], row["difference"], row["speedup"]) for row in table(records, "training")] == [
        ("single d_model=64", "0.5", "1"),
        ("padded d_model=64", "", "2"),
        ("packed-reset d_model=64", "0.25", "4"),
        ("single d_model=128", "0.5", "1"),
        ("padded d_model=128", "", "2"),
        ("packed-reset d_model=128", "0.25", "4"),
    ]


def test_differences_by_rounding_are_not_printed_as_nothing():
    text = format_table([training("padded", loss=2.0), training("single", loss=2.0 - 3e-9)])
    assert "-3.0e-09 (no claim)" in text


def test_corpora_never_meet(tmp_path):
    ours = [training("padded", 0, 2.0), training("packed-reset", 0, 2.5), throughput("single", 50.0)]
    other = [training("packed-reset", 1, 7.0, corpus="corpus-b"), throughput("packed-reset", 400.0, corpus="corpus-b")]
    alone = {row["arm"]: row for row in table(ours, "training")}
    files = table_files(ours + other)
    assert {name for name in files if name.endswith(".csv")} == {
        f"{kind}-{corpus}.csv" for kind in ("training", "throughput") for corpus in ("corpus-a", "corpus-b")
    }
    first, second = (table(ours + other, f"training-corpus-{letter}") for letter in "ab")
    assert {row["arm"]: row for row in first} == alone
    assert [(row["arm"], row["val_loss"], row["difference"], row["speedup"]) for row in second] == [
        ("packed-reset", "7", "", "")
    ]
    assert (
        "Corpus corpus-b. The other corpora of this folder (1) have tables of their own."
        in files["training-corpus-b.md"]
    )
    page = write_report(write(tmp_path, ours + other)).read_text()
    assert "Corpus corpus-a" in page and "Corpus corpus-b" in page


def test_speedup_needs_single_in_the_same_run():
    arms = ["single", "padded", "packed-reset"]
    records = [training(arm) for arm in arms]
    records += [throughput("single", 100.0), throughput("padded", 250.0), throughput("packed-reset", 900.0, run="two")]
    rows = {row["arm"]: row for row in table(records, "training")}
    assert [rows[arm]["speedup"] for arm in arms] == ["1", "2.5", ""]
    assert [rows[arm]["real_tokens_per_second"] for arm in arms] == ["100", "250", "900"]
    timed = {(row["run"], row["arm"]): row["speedup"] for row in table(records, "throughput")}
    assert timed == {("one", "single"): "1", ("one", "padded"): "2.5", ("two", "packed-reset"): ""}


def test_packing_tables():
    records = [
        packing("in_order", 2048, share, seconds, seed=s) for s, share, seconds in [(0, 0.2, 1.0), (1, 0.22, 3.0)]
    ]
    records += [
        packing("greedy", length, share, buffer=b) for length, share, b in [(2048, 0.001, 4096), (4096, 0.002, 4096)]
    ]
    records += [packing("greedy", 2048, 0.01, buffer=512)]
    rows = {row["strategy"]: row for row in table(records, "packing-padding")}
    assert list(rows) == ["in_order", "greedy, buffer 4096", "the paper, received order", "the paper, local greedy"]
    assert float(rows["in_order"]["row_length_2048"]) == pytest.approx(0.21)
    assert rows["in_order"]["row_length_4096"] == ""
    assert rows["greedy, buffer 4096"]["row_length_4096"] == "0.002"
    assert rows["the paper, received order"]["row_length_unknown"] == "0.191"
    assert rows["the paper, local greedy"]["row_length_unknown"] == "0.0041"
    planning = {row["strategy"]: row for row in table(records, "packing-planning")}
    assert float(planning["in_order"]["row_length_2048"]) == pytest.approx(statistics.fmean([1.0, 3.0]) / 2000 * 1e6)
    buffers = {row["buffer"]: row for row in table(records, "packing-buffer")}
    assert (buffers["512"]["row_length_2048"], buffers["4096"]["row_length_2048"]) == ("0.01", "0.001")
    assert "| greedy, buffer 4096 | 0.100 % | 0.200 % | - |" in table_files(records, PACKING)["packing-padding.md"]


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
    monkeypatch.setattr(plots, "finish", lambda fig, name, caption: drawn.update({name: (fig, caption)}))

    def seconds(records):
        plots.training_figures(records)
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


def test_terminal_table_lines_up():
    records = [training("single"), training("packed-reset")]
    lines = format_table(records).splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line) == {"-", " "})
    ends = [match.end() for match in re.finditer(r"-+", lines[rule])]
    for line in lines[rule + 1 : rule + 3]:
        assert all(end >= len(line) or line[end] == " " for end in ends)
    assert len(build_sections(records, figures=False)) == 1


def test_results_need_no_torch():
    code = "import sys, packmamba.report.folder, packmamba.records; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_committed_tables_are_what_the_committed_records_give(folder):
    committed = {path.name: path.read_text(encoding="utf-8") for path in (folder / "tables").glob("*.*")}
    records = read_records(folder)
    assert committed == table_files(records, kinds_of(folder, records))
