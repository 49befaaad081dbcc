"""Evaluations against length, load, place and step: tables hold the records' numbers, figures draw what is a curve."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest

from made_records import table, training
from packmamba.records import make_record
from packmamba.report import evaluation_curves
from packmamba.report.evaluation_curves import arms_curve_figures, models_curve_figures
from packmamba.report.folder import build_sections


def points(*accuracies, **others):
    return [
        {"start": 2**i, "end": 2 ** (i + 1), "answers": 10 + i, "accuracy": accuracy, "nats": 1.0}
        | {name: values[i] for name, values in others.items()}
        for i, accuracy in enumerate(accuracies)
    ]


def run(arm, seed, **curves):
    record = training(arm, seed, **{"parity.accuracy": 0.5})
    return record | {"curves": record["curves"] | curves}


RECORDS = [
    run("padded", 0, **{"parity.by_length": points(0.5, 0.75), "parity.by_load": points(0.6),
                        "evaluations": [{"step": 5, "parity.accuracy": 0.4}, {"step": 10, "parity.accuracy": 0.5}]}),
    run("padded", 1, **{"parity.by_length": points(1.0, 0.25)}),
    run("packed-leak", 0, **{"parity.by_length": points(0.5, 0.5, accuracy_as_trained=(0.125, 0.25))}),
]  # fmt: skip


@pytest.fixture
def names(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        evaluation_curves, "finish", lambda fig, name, caption: (drawn.append((name, fig.axes[0])), plt.close(fig))[0]
    )
    return drawn


def test_a_table_s_numbers_are_means_over_seeds():
    rows = table(RECORDS, "evaluation-parity-by_length")
    found = {(row["arm"], row["start"]): row for row in rows}
    assert len(rows) == 4
    assert float(found["padded", "1"]["accuracy"]) == 0.75 and float(found["padded", "2"]["accuracy"]) == 0.5
    assert float(found["padded", "1"]["accuracy_sd"]) == pytest.approx(0.125**0.5)
    assert found["packed-leak", "2"]["accuracy_as_trained"] == "0.25" and found["padded", "2"]["answers"] == "11"
    assert found["padded", "1"]["accuracy_as_trained"] == ""
    (section,) = build_sections(RECORDS, figures=False)
    assert "evaluation-parity-by_load" not in {table.name for table in section.tables}, "one place is no curve"


def test_figures_of_arms(names):
    arms_curve_figures(RECORDS)
    assert [name for name, _ in names] == ["evaluations-parity", "evaluation-parity-by_length"]
    way, by_length = (ax for _, ax in names)
    assert list(way.lines[0].get_xdata()) == [5, 10] and list(way.lines[0].get_ydata()) == [0.4, 0.5]
    shown = {(line.get_label(), line.get_linestyle()): list(line.get_ydata()) for line in by_length.lines}
    assert shown["padded", "-"] == [0.75, 0.5] and shown["packed-leak", "-"] == [0.5, 0.5]
    assert [0.125, 0.25] in [ys for (_, style), ys in shown.items() if style == ":"]


def test_models_that_were_asked_alone(names):
    def asked(arm, seed, time, **curves):
        record = make_record(
            kind="evaluation", experiment="e", arm=arm, seed=seed, corpus_hash="task parity", metrics={"accuracy": 0.5},
            config={"id": "1", "evaluation": {"name": "parity"}, "model": {}}, wall_seconds=1.0, curves=curves,
        )  # fmt: skip
        return record | {"time": time}

    records = [
        asked("mine", 0, "2030-01-01T00:00:00+00:00", by_length=points(0.1, 0.1)),
        asked("mine", 0, "2030-01-02T00:00:00+00:00", by_length=points(0.5, 0.75)),
        asked("other", 0, "2030-01-01T00:00:00+00:00", by_length=points(0.25, 1.0)),
    ]
    rows = table(records, "evaluation-parity-by_length")
    assert [(row["arm"], float(row["accuracy"])) for row in rows] == [
        ("mine", 0.5), ("mine", 0.75), ("other", 0.25), ("other", 1.0)
    ]  # fmt: skip
    models_curve_figures(records)
    assert [name for name, _ in names] == ["evaluation-parity-by_length"]


def test_questions_about_the_same_documents_have_tables_of_their_own():
    def asked(name, options, **metrics):
        return make_record(
            kind="evaluation", experiment="e", arm="mine", seed=0, corpus_hash="documents", metrics=metrics,
            config={"id": "1", "evaluation": {"name": name, "options": options}, "model": {}}, wall_seconds=1.0,
        )  # fmt: skip

    records = [asked("perplexity", {}, loss=1.5), asked("positions", {"window": 64}, loss_1=2.0),
               asked("positions", {"window": 128}, loss_1=3.0)]  # fmt: skip
    (section,) = build_sections(records, figures=False)
    shown = {made.name: (made.title, made.rows[0][2].text) for made in section.tables}
    ordered = asked("long_context", {}, gain_16=0.1, gain_2=0.2, documents=3.0, gain_4=0.3)
    (made,) = build_sections([ordered], figures=False)[0].tables
    assert [column.title for column in made.columns[2:]] == ["gain 2", "gain 4", "gain 16", "documents"]
    assert shown == {
        "evaluation-perplexity": ("Evaluation: perplexity", "1.5000"),
        "evaluation-positions-1": ("Evaluation: positions, window=64", "2.0000"),
        "evaluation-positions-2": ("Evaluation: positions, window=128", "3.0000"),
    }
