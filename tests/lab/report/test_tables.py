"""Tables in every form, and those that the library makes of invented records."""

import numpy as np
import pytest

from made_records import table, throughput, training
from packmamba.lab.records import make_record
from packmamba.lab.report.html import build_sections
from packmamba.lab.report.tables import Cell, Column, Table, word, write_table


def texts(records, name):
    """The rows of a generated table as readers see them, by arm."""
    made = {table.name: table for section in build_sections(records, figures=False) for table in section.tables}
    return {row[0].text: [cell.text for cell in row[1:]] for row in made[name].rows}


def test_tables_are_written_as_markdown_and_csv():
    made = Table("t", "A & B", [Column("arm_1", ("arm",), False), Column("x %", ("x", "y"))], notes=["50 % of $1"])
    made.rows = [[word("a|b_c"), Cell("-1.50 ± 0.1", (-1.5, 1e-9))], [word("d"), Cell("-", (float("nan"), None))]]
    assert write_table(made, "csv") == "arm,x,y\na|b_c,-1.5,1e-09\nd,,\n"
    assert "| arm_1 | x % |\n| --- | ---: |\n| a\\|b_c | -1.50 ± 0.1 |\n| d | - |" in write_table(made, "md")
    made.rows = [[word("a"), Cell("2.50x", (12345678901, True))]]
    assert write_table(made, "csv").endswith("a,12345678901,True\n"), "integers keep all digits"


def test_diverged_and_missing_seeds_are_counted():
    records = [training(arm, seed) for arm in ("padded", "packed-leak") for seed in range(3)]
    records[-1] = training("packed-leak", 2, float("nan"))
    records += [training("packed-reset", 0)]
    rows = texts(records, "training")
    expected = {"padded": "3", "packed-reset": "1 of 3, 2 missing", "packed-leak": "2 of 3, 1 diverged"}
    assert {arm: row[0] for arm, row in rows.items()} == expected
    assert "2.0000 ± 0.0000" in rows["packed-leak"]
    alone = table([training("padded", 0, 2.0), training("packed-leak", 0, float("nan"))], "training")
    found = [(row["arm"], row["val_loss"], row["val_loss_difference"]) for row in alone]
    assert found == [("padded", "2", ""), ("packed-leak", "", "")]


def test_differences_are_paired_by_position_too():
    records = []
    for seed in range(3):
        losses = {"padded": 2.0 + seed, "packed-leak": 2.25 + 1.25 * seed}
        records += [training(arm, seed, loss, val_loss_start=3.0 + seed) for arm, loss in losses.items()]
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
    records[0]["metrics"]["diverged_at_step"] = 5
    assert table(records, "loss-by-position")[0]["pairs"] == "2"


def test_a_sweep_s_own_metrics_and_columns():
    spec = {"metrics": ["val_loss", "mqar.accuracy"], "columns": ["optimizer.lr", "speedup"]}
    records = [
        training(arm, seed, loss, config={"optimizer": {"lr": loss / 100}}, **{"mqar.accuracy": loss / 4})
        | {"sweep": {"table": spec}}
        for arm, loss in (("padded", 2.0), ("packed-reset", 3.0))
        for seed in (0, 1)
    ]
    padded, packed = table([*records, throughput("padded", 50.0), throughput("packed-reset", 60.0)], "training")
    assert (packed["val_loss_difference"], packed["mqar.accuracy_difference"]) == ("1", "0.25")
    assert (packed["optimizer.lr"], packed["speedup"], padded["val_loss_difference"]) == ("0.03", "1.2", "")


def test_evaluations_of_arms():
    choices = [
        training(arm, seed, **{"next_line.accuracy": 0.1, "next_line.choice_accuracy": right, "next_line.chance": 0.25})
        for arm, rights in (("padded", (0.5, 0.25, None)), ("packed-reset", (0.75, 1.0, 0.5)))
        for seed, right in enumerate(rights)
    ]
    padded, packed = table(choices, "evaluation-next_line")
    assert (float(padded["choice_accuracy"]), float(padded["chance"]), padded["seeds"]) == (0.375, 0.25, "2")
    assert (float(packed["difference"]), packed["pairs"]) == (0.5, "2")
    assert len(table([*choices, training("packed-leak", 0)], "evaluation-next_line")) == 2


def evaluation(name, options, arm="mine", seed=0, curves=None, time="2030-01-01T00:00:00+00:00", **metrics):
    config = {"id": "1", "evaluation": {"name": name, "options": options}, "model": {}}
    return make_record("evaluation", "e", arm, config, seed, "documents", metrics, 1.0, curves) | {"time": time}


def test_each_evaluation_of_models_has_a_table():
    records = [evaluation("perplexity", {}, loss=1.5, **{"loss.documents": 1.25})]
    records += [evaluation("positions", {"window": size}, loss_1=loss) for size, loss in ((64, 2.0), (128, 3.0))]
    (section,) = build_sections(records, figures=False)
    assert {made.name: (made.title, made.rows[0][2].text) for made in section.tables} == {
        "evaluation-perplexity": ("Evaluation: perplexity", "1.5000"),
        "evaluation-positions-window-64": ("Evaluation: positions, window=64", "2.0000"),
        "evaluation-positions-window-128": ("Evaluation: positions, window=128", "3.0000"),
    }
    assert section.tables[0].rows[0][3].text == "1.2500", "the loss of a source that is called documents"
    gains = evaluation("long_context", {}, gain_16=0.1, gain_2=0.2, documents=3.0, gain_4=0.3)
    (made,) = build_sections([gains], figures=False)[0].tables
    assert [column.title for column in made.columns[2:]] == ["gain 2", "gain 4", "gain 16", "documents"]
    late = evaluation("perplexity", {}, loss=2.5, time="2030-01-02T00:00:00+00:00")
    (row,) = table([records[0], late], "evaluation")
    assert (row["arm"], row["runs"], row["loss"]) == ("mine", "1", "2.5"), "the latest counts"
    named = [late | {"arm": arm, "sweep": {"baseline": "b"}} for arm in "ab"]
    assert [row["arm"] for row in table(named, "evaluation")] == ["b", "a"]
