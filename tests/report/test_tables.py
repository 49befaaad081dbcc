"""Tables in every form, and those that the library makes of invented records."""

import re

import numpy as np
import pandas as pd
import pytest

from made_records import table, throughput, training
from packmamba.records import make_record
from packmamba.report.html import build_sections, format_table, table_files
from packmamba.report.tables import Cell, Column, Table, mean_sd, word, write_table


def texts(records, name):
    """The rows of a generated table as readers see them, by arm."""
    made = {table.name: table for section in build_sections(records, figures=False) for table in section.tables}
    return {row[0].text: [cell.text for cell in row[1:]] for row in made[name].rows}


def test_tables_are_written_as_markdown_csv_and_latex():
    made = Table("t", "A & B", [Column("arm_1", ("arm",), False), Column("x %", ("x", "y"))], notes=["50 % of $1"])
    made.rows = [[word("a|b_c"), Cell("-1.50 ± 0.1", (-1.5, 1e-9))], [word("d"), Cell("-", (float("nan"), None))]]
    assert write_table(made, "csv") == "arm,x,y\na|b_c,-1.5,1e-09\nd,,\n"
    assert "| arm_1 | x % |\n| --- | ---: |\n| a\\|b_c | -1.50 ± 0.1 |\n| d | - |" in write_table(made, "md")
    assert write_table(made, "tex").endswith(
        "\\begin{table}\n\\centering\n\\caption{A \\& B}\n\\label{tab:t}\n\\begin{tabular}{lr}\n\\toprule\n"
        "arm\\_1 & x \\% \\\\\n\\midrule\n"
        "a|b\\_c & \\ensuremath{-}1.50 \\ensuremath{\\pm} 0.1 \\\\\nd & - \\\\\n"
        "\\bottomrule\n\\end{tabular}\n\\par\\footnotesize 50 \\% of \\$1\n\\end{table}\n"
    )
    made.rows = [[word("a"), Cell("-1.2e-08", (1, 2))], [word("b"), Cell("2.50x", (12345678901, True))]]
    assert r"\ensuremath{-}1.2\ensuremath{\cdot10^{-8}}" in write_table(made, "tex")
    assert r"2.50\ensuremath{\times}" in write_table(made, "tex")
    assert write_table(made, "csv").endswith("b,12345678901,True\n"), "integers keep all digits"


def test_terminal_table_lines_up():
    lines = format_table([training("single"), training("packed-reset")]).splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line) == {"-", " "})
    ends = [match.end() for match in re.finditer(r"-+", lines[rule])]
    for line in lines[rule + 1 : rule + 3]:
        assert all(end >= len(line) or line[end] == " " for end in ends)


@pytest.mark.parametrize(
    ("values", "text"),
    [([28192, 28192], "28,192"), ([10, 13], "12 ± 2"), ([1, 1], "1.0000 ± 0.0000"), ([2.5, 2.5], "2.5000 ± 0.0000")],
)
def test_counts_are_printed_as_counts(values, text):
    assert mean_sd(pd.Series(values, dtype=float)).text == text


def test_diverged_and_missing_seeds_are_counted():
    records = [training(arm, seed) for arm in ("padded", "packed-leak") for seed in range(3)]
    records[-1] = training("packed-leak", 2, float("nan"))
    records += [training("packed-reset", 0)]
    rows = texts(records, "training")
    assert {arm: row[0] for arm, row in rows.items()} == {
        "padded": "3",
        "packed-reset": "1 of 3, 2 missing",
        "packed-leak": "2 of 3, 1 diverged",
    }
    assert "2.0000 ± 0.0000 (of 2)" in rows["packed-leak"] and any("(2 pairs)" in cell for cell in rows["packed-leak"])
    assert any("(2 pairs)" in cell for cell in texts(records, "loss-by-position")["packed-leak"])
    alone = table([training("padded", 0, 2.0), training("packed-leak", 0, float("nan"))], "training")
    assert [(row["arm"], row["val_loss"], row["difference"]) for row in alone] == [
        ("padded", "2", ""),
        ("packed-leak", "", ""),
    ]


def test_one_seed_has_no_interval_and_a_note():
    text = format_table([training("padded", loss=2.0), training("single", loss=2.0 - 3e-9)])
    assert "-3.0e-09 " in text and "[" not in text.splitlines()[-4] and "at least 5 seeds" in text
    five = [training(arm, seed, 2.0 + seed) for arm in ("padded", "packed-reset") for seed in range(5)]
    assert "at least 5 seeds" not in format_table(five)


def test_differences_are_paired_by_position_too():
    records = [
        training(arm, seed, 2.0 + seed + 0.25 * (arm == "packed-leak") * (1 + seed), val_loss_start=3.0 + seed)
        for arm in ("padded", "packed-leak")
        for seed in range(3)
    ]
    (row,) = table(records, "differences")
    half = 4.303 * 0.25 / np.sqrt(3)
    assert (row["arm"], row["baseline"], row["pairs"]) == ("packed-leak", "padded", "3")
    found = [float(row[f"val_loss{side}"]) for side in ("", "_low", "_high")]
    assert found == pytest.approx([0.5, 0.5 - half, 0.5 + half])
    assert float(row["val_loss_start"]) == float(row["val_loss_start_low"]) == 0
    first, second = table(records, "loss-by-position")
    assert (first["start"], first["end"], second["start"], second["end"]) == ("0", "7", "8", "63")
    assert float(second["difference_high"]) == pytest.approx(0.5 + half)
    for record in records:
        record["curves"]["loss_by_position"][1]["end"] = 2**31
    assert table(records, "loss-by-position")[1]["end"] == ""


def test_a_sweep_s_own_metrics_and_columns():
    spec = {"metrics": ["val_loss", "mqar.accuracy"], "columns": ["optimizer.lr", "speedup"], "paired": False}
    records = [
        training(arm, seed, loss, config={"optimizer": {"lr": loss / 100}}, **{"mqar.accuracy": loss / 4})
        | {"sweep": {"table": spec}}
        for arm, loss in (("padded", 2.0), ("packed-reset", 3.0))
        for seed in (0, 1)
    ]
    padded, packed = table([*records, throughput("padded", 50.0), throughput("packed-reset", 60.0)], "training")
    assert (packed["val_loss_difference"], packed["mqar.accuracy_difference"]) == ("1", "0.25")
    assert (packed["optimizer.lr"], packed["speedup"], padded["val_loss_difference"]) == ("0.03", "1.2", "")


def test_speeds_that_were_not_timed_together_are_told_apart():
    records = [training(arm) for arm in ("padded", "packed-reset", "packed-leak")]
    records += [throughput("padded", 50.0), throughput("packed-reset", 60.0)]
    assert "Not timed together with these: packed-leak." in format_table(records)
    assert "own training run: not a comparison" in format_table(records[:3])


def test_arms_that_read_other_documents_are_named():
    records = [
        training(a, config={"data": {"mode": m, "strategy": a}}) for a, m in (("padded", "matched"), ("mine", "stream"))
    ]
    assert "Trained on other documents at a step than the baseline: mine" in format_table(records)


def test_evaluations_of_arms():
    choices = [
        training(arm, seed, **{"next_line.accuracy": 0.1, "next_line.choice_accuracy": right, "next_line.chance": 0.25})
        for arm, rights in (("padded", (0.5, 0.25, None)), ("packed-reset", (0.75, 1.0, 0.5)))
        for seed, right in enumerate(rights)
    ]
    padded, packed = table(choices, "evaluation-next_line")
    assert (float(padded["choice_accuracy"]), float(padded["chance"]), padded["seeds"]) == (0.375, 0.25, "2")
    assert padded["seeds_without"] == "1" and (float(packed["difference"]), packed["pairs"]) == (0.5, "2")
    titles = table_files(choices)["evaluation-next_line.md"].splitlines()[2]
    assert "| right choices |" in titles and "| right choices by chance |" in titles
    others = [
        training("packed-leak", 0, config={"evaluations": []}),
        training("single", 0, config={"evaluations": ["next_line"]}),
    ]
    rows = table([*choices, *others], "evaluation-next_line")
    assert {row["arm"]: row["seeds_without"] for row in rows} == {"padded": "1", "packed-reset": "0", "single": "3"}


def evaluation(name, options, arm="mine", seed=0, curves=None, time="2030-01-01T00:00:00+00:00", **metrics):
    config = {"id": "1", "evaluation": {"name": name, "options": options}, "model": {}}
    return make_record("evaluation", "e", arm, config, seed, "documents", metrics, 1.0, curves) | {"time": time}


def test_each_evaluation_of_models_has_a_table():
    records = [
        evaluation("perplexity", {}, loss=1.5),
        evaluation("positions", {"window": 64}, loss_1=2.0),
        evaluation("positions", {"window": 128}, loss_1=3.0),
    ]
    (section,) = build_sections(records, figures=False)
    assert {made.name: (made.title, made.rows[0][2].text) for made in section.tables} == {
        "evaluation-perplexity": ("Evaluation: perplexity", "1.5000"),
        "evaluation-positions-1": ("Evaluation: positions, window=64", "2.0000"),
        "evaluation-positions-2": ("Evaluation: positions, window=128", "3.0000"),
    }
    gains = evaluation("long_context", {}, gain_16=0.1, gain_2=0.2, documents=3.0, gain_4=0.3)
    (made,) = build_sections([gains], figures=False)[0].tables
    assert [column.title for column in made.columns[2:]] == ["gain 2", "gain 4", "gain 16", "documents"]


def points(*accuracies):
    return [{"start": 2**i, "answers": 10 + i, "accuracy": accuracy} for i, accuracy in enumerate(accuracies)]


def test_curves_of_evaluations_are_means_over_seeds_of_the_latest():
    late = "2030-01-02T00:00:00+00:00"
    records = [
        evaluation("parity", {}, curves={"by_length": points(0.1, 0.1)}, accuracy=0.5),
        evaluation(
            "parity", {}, curves={"by_length": points(0.5, 0.75), "by_load": points(0.6)}, time=late, accuracy=0.5
        ),
        evaluation("parity", {}, seed=1, curves={"by_length": points(1.0, 0.25)}, accuracy=0.5),
    ]
    first, second = table(records, "evaluation-parity-by_length")
    assert (float(first["accuracy"]), float(second["accuracy"]), second["answers"]) == (0.75, 0.5, "11")
    assert float(first["accuracy_sd"]) == pytest.approx(0.125**0.5)
    assert "evaluation-parity-by_load.csv" not in table_files(records), "one place is no curve"
