"""Tables made of records. Every record here is invented."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from made_records import PACKING, packing, table, throughput, training, write
from packmamba.records import append_record, make_record, read_records, write_sweep
from packmamba.report import summary, training_figures
from packmamba.report.folder import build_sections, format_table, table_files, write_report
from packmamba.report.kinds import Kind
from packmamba.report.tables import Cell, Column, Table, mean_sd, number, word, write_table

ROOT = Path(__file__).resolve().parents[1]


def test_records_of_an_unknown_kind_are_read_and_not_reported(tmp_path):
    record = make_record("mine", "question", "arm", {}, 0, "corpus", {"anything": 1.0}, 1.0)
    assert read_records(write(tmp_path, [record])) == [record]
    with pytest.raises(ValueError, match="kind 'mine' is unknown; known: training, throughput"):
        format_table([record], kinds={})
    shown = {"mine": Kind(lambda records: [Table("mine", "Mine", [Column("a", ("a",))])], metrics=("anything",))}
    assert format_table([record], shown).startswith("Mine\n")
    with pytest.raises(ValueError, match="metrics of the mine record of arm lack anything"):
        format_table([record | {"metrics": {}}], shown)


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


def test_intervals_are_student_s():
    for n, quantile in ((2, 12.706), (5, 2.776), (31, 2.042), (1001, 1.962)):
        values = pd.Series(np.arange(n, dtype=float))
        found = summary.interval(values)
        assert found.high - found.mean == pytest.approx(quantile * values.std(ddof=1) / np.sqrt(n), rel=1e-12)
        assert (found.mean, found.n) == ((n - 1) / 2, n) and found.mean - found.low == pytest.approx(
            found.high - found.mean
        )


def test_a_diverged_run_stays_in_the_table():
    rows = table([training("padded", 0, 2.0), training("packed-leak", 0, float("nan"))], "training")
    assert [(row["arm"], row["val_loss"], row["difference"]) for row in rows] == [
        ("padded", "2", ""),
        ("packed-leak", "", ""),
    ]


def test_a_row_says_how_many_of_the_seeds_it_is_of():
    records = [training(arm, seed) for arm in ("padded", "packed-leak") for seed in range(3)]
    records[-1] = training("packed-leak", 2, float("nan"))
    records += [training("packed-reset", 0)]
    text = table_files(records)["training.md"]
    seeds = {line.split(" | ")[0]: line.split(" | ")[1] for line in text.splitlines() if line.startswith("| pa")}
    assert seeds == {"| padded": "3", "| packed-reset": "1 of 3, 2 missing", "| packed-leak": "2 of 3, 1 diverged"}
    assert "Means are over the others, and say of how many." in text
    leak = next(line for line in text.splitlines() if line.startswith("| packed-leak"))
    assert "| 2.0000 ± 0.0000 (of 2) |" in leak and "(2 pairs)" in leak
    assert [row["seeds"] for row in table(records, "training")] == ["3", "1", "2"]
    assert "(2 pairs)" in table_files(records)["differences.md"]
    assert "(2 pairs)" in table_files(records)["loss-by-position.md"]


def test_a_sweep_says_what_its_runs_are_and_what_they_are_compared_with(tmp_path):
    made = [training(arm, seed) for arm in ("padded", "packed-reset", "packed-leak") for seed in (0, 1)]
    for record in made:
        record["config"]["optimizer"] = {"lr": 0.01 if record["arm"] == "packed-leak" else 0.02}
        append_record(tmp_path / "records" / "a.jsonl", record)
    assert "minus padded" in table_files(read_records(tmp_path))["training.md"]
    arms = {"padded": [0, 1], "packed-reset": [0, 1, 2], "packed-leak": [1, 0], "packed-carry": range(4)}
    tuned = {"keys": ["optimizer.lr"], "tried": [[0.005, 0.01, 0.02]], "seeds": [8, 9]}
    write_sweep(tmp_path, "one", arms, baseline="packed-reset", tuned=tuned)
    write_sweep(tmp_path, "another", {"packed-leak": [2, 3]}, baseline="packed-reset")
    records = read_records(tmp_path)
    text = table_files(records)["training.md"]
    assert "minus packed-reset" in text
    seeds = {line.split(" | ")[0][2:]: line.split(" | ")[1] for line in text.splitlines() if line.startswith("| pa")}
    assert seeds == {
        "padded": "2",
        "packed-reset": "2 of 3, 1 missing",
        "packed-leak": "2 of 4, 2 missing",
        "packed-carry": "0 of 4, 4 missing",
    }
    chosen = "chosen with 2 other seeds (tuning/): padded 0.02, packed-reset 0.02."
    assert f"Each arm has its own best optimizer.lr, {chosen}" in text
    assert "beyond which a better one may lie: padded its optimizer.lr, packed-reset its optimizer.lr." in text
    rows = {row["arm"]: row for row in table(records, "training")}
    assert rows["packed-carry"]["val_loss"] == rows["packed-reset"]["difference"] == "" != rows["padded"]["difference"]
    append_record(tmp_path / "copied.jsonl", records[0])
    assert "sweep" not in json.loads((tmp_path / "copied.jsonl").read_text())


def test_arms_are_compared_by_what_they_do_not_by_their_names():
    names = {"a": ("greedy", "leak", 3.0), "b": ("padded", "reset", 2.0), "c": ("single", "reset", 2.5)}
    made = [
        training("mine", loss=loss, config={"data": {"strategy": strategy}, "trainer": {"boundary": boundary}})
        | {"arm": name}
        for name, (strategy, boundary, loss) in names.items()
    ]
    rows = table(made, "training")
    assert [(row["arm"], row["difference"]) for row in rows] == [("c", "0.5"), ("b", ""), ("a", "1")]
    assert "minus b [95% CI]" in table_files(made)["training.md"]
    without = [training("packed-leak", loss=3.0), training("packed-reset", loss=2.5)]
    assert [(row["arm"], row["difference"]) for row in table(without, "training")] == [
        ("packed-reset", ""),
        ("packed-leak", "0.5"),
    ]


def test_every_metric_s_differences_are_paired_also_by_position():
    records = [
        training(arm, seed, 2.0 + seed + 0.25 * (arm == "packed-leak") * (1 + seed), val_loss_start=3.0 + seed)
        for arm in ("padded", "packed-leak")
        for seed in range(3)
    ]
    (row,) = table(records, "differences")
    half = 4.303 * 0.25 / np.sqrt(3)
    assert (row["arm"], row["baseline"], row["pairs"]) == ("packed-leak", "padded", "3")
    assert [float(row[f"val_loss{side}"]) for side in ("", "_low", "_high")] == pytest.approx(
        [0.5, 0.5 - half, 0.5 + half]
    )
    assert float(row["val_loss_start"]) == float(row["val_loss_start_low"]) == 0
    first, second = table(records, "loss-by-position")
    assert (first["start"], first["end"], second["start"], second["end"]) == ("0", "7", "8", "63")
    assert float(second["difference_high"]) == pytest.approx(0.5 + half)
    for record in records:
        record["curves"]["loss_by_position"][1]["end"] = 2**31
    text = table_files(records)["loss-by-position.md"]
    assert "| 8 | the end |" in text and table(records, "loss-by-position")[1]["end"] == ""


def test_tables_are_written_as_markdown_csv_and_latex():
    made = Table("t", "A & B", [Column("arm_1", ("arm",), False), Column("x %", ("x", "y"))], notes=["50 % of $1"])
    made.rows = [[word("a|b_c"), Cell("-1.50 ± 0.1", (-1.5, 0.1))], [word("d"), number(float("nan"), ".2f", "x")]]
    assert write_table(made, "csv") == "arm,x,y\na|b_c,-1.5,0.1\nd,\n"
    assert "| arm_1 | x % |\n| --- | ---: |\n| a\\|b_c | -1.50 ± 0.1 |\n| d | - |" in write_table(made, "md")
    assert write_table(made, "tex") == (
        "\\begin{table}\n\\centering\n\\caption{A \\& B}\n\\label{tab:t}\n\\begin{tabular}{lr}\n\\toprule\n"
        "arm\\_1 & x \\% \\\\\n\\midrule\n"
        "a|b\\_c & \\ensuremath{-}1.50 \\ensuremath{\\pm} 0.1 \\\\\nd & - \\\\\n"
        "\\bottomrule\n\\end{tabular}\n\\par\\footnotesize 50 \\% of \\$1\n\\end{table}\n"
    )


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


def test_arms_whose_names_have_spaces_are_compared():
    losses = {
        "packed-reset in rows": 3.25,
        "padded alone": 3.0,
        "padded alone d_state=2": 2.0,
        "packed-reset in rows d_state=2": 2.5,
    }
    records = [training(name, loss=loss) for name, loss in losses.items()]
    rows = table(records, "training")
    assert {row["arm"]: row["difference"] for row in rows} == {
        "packed-reset in rows": "0.25", "padded alone": "", "padded alone d_state=2": "", "packed-reset in rows d_state=2": "0.5",
    }  # fmt: skip
    assert "minus padded alone [95% CI]" in table_files(records)["training.md"]
    named = [record | {"sweep": {"baseline": "packed-reset in rows"}} for record in records]
    differences = {row["arm"]: row["difference"] for row in table(named, "training")}
    assert differences["padded alone"] == "-0.25" and differences["padded alone d_state=2"] == "-0.5"


@pytest.mark.parametrize(
    ("values", "text"),
    [([28192, 28192], "28,192"), ([10, 13], "12 ± 2"), ([1, 1], "1.0000 ± 0.0000"), ([2.5, 2.5], "2.5000 ± 0.0000")],
)
def test_counts_are_printed_as_counts(values, text):
    assert mean_sd(pd.Series(values, dtype=float)).text == text


def test_differences_by_rounding_are_not_printed_as_nothing():
    text = format_table([training("padded", loss=2.0), training("single", loss=2.0 - 3e-9)])
    assert "-3.0e-09 (no claim)" in text


@pytest.mark.slow
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


@pytest.mark.slow
def test_records_of_others_may_say_little_and_have_any_hash(tmp_path):
    one = training("packed-reset", 0, 2.0) | {"config": {}, "curves": {}}
    write_report(write(tmp_path, [one | {"corpus_hash": "a/b"}, one | {"corpus_hash": "../c"}]))
    assert {path.stem for path in (tmp_path / "tables").glob("training*.md")} == {"training-a-b", "training-..-c"}
    alike = table_files([one | {"corpus_hash": "a/b"}, one | {"corpus_hash": "a:b"}])
    assert {name for name in alike if name.endswith(".md")} == {"training-a-b.md", "training-a-b-2.md"}


def test_speeds_that_were_not_timed_together_are_told_apart(monkeypatch):
    records = [training(arm) for arm in ("padded", "packed-reset", "packed-leak")]
    records += [throughput("padded", 50.0), throughput("packed-reset", 60.0)]
    drawn = []
    monkeypatch.setattr(training_figures, "name_bars", lambda _, labels: drawn.append(list(labels)))
    training_figures.training_figures(records)
    assert ["padded", "packed-reset"] in drawn
    text = table_files(records)["training.md"]
    assert "medians. Their own training runs, no comparison: packed-leak.\n" in text
    records.append(throughput("packed-leak", 60.0, run="another"))
    assert "Another timing, not compared with these: packed-leak.\n" in table_files(records)["training.md"]


def test_speeds_come_from_the_timing_that_holds_all_arms():
    records = [training(arm) for arm in ("padded", "packed-reset", "packed-leak")]
    records += [throughput("padded", 50.0), throughput("packed-reset", 60.0)]
    later = {"padded": 150.0, "packed-reset": 160.0, "packed-leak": 170.0}
    records += [throughput(arm, rate, run="all") for arm, rate in later.items()]
    text = table_files(records)["training.md"]
    assert "Another timing" not in text
    assert [rate for rate in ("50", "60", "150", "160", "170") if f"| {rate} |" in text] == ["150", "160", "170"]


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


def test_terminal_table_lines_up():
    records = [training("single"), training("packed-reset")]
    lines = format_table(records).splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line) == {"-", " "})
    ends = [match.end() for match in re.finditer(r"-+", lines[rule])]
    for line in lines[rule + 1 : rule + 3]:
        assert all(end >= len(line) or line[end] == " " for end in ends)
    assert len(build_sections(records, figures=False)) == 1


@pytest.mark.slow
def test_no_two_arms_of_a_figure_look_alike():
    arms = [SimpleNamespace(setting=("", ""), scheme=scheme) for scheme in ("padded", "packed-reset", "own") * 4]
    looks = [repr(style) for _, style in training_figures._styled(arms)]
    assert len(set(looks)) == len(looks)
