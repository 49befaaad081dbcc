"""What parity and downstream make of invented records whose answer is known."""

import pytest

from experiments.downstream.report import answers_tables
from experiments.parity import drift
from experiments.parity.report import parity_figures, parity_tables, speed_tables
from made_records import throughput, training

NOISE = (0.0004, -0.0003, 0.0002, -0.0004, 0.0001, 0.0003, -0.0002, -0.0001)
ROUNDING = {"data": {"strategy": "in_order"}}


def parity_record(arm, seed, loss, config=None, packages=4):
    """Every package's loss is the run's, so that only seeds vary."""
    record = training(arm, seed, loss, config=config, **{"perplexity.loss": loss, "targets": 500})
    places = [{"group": g, "start": 1, "documents": 1, "targets": 100, "nats": 100 * loss} for g in range(packages)]
    return record | {"curves": record["curves"] | {"perplexity.by_group": places}}


def of_unit(records, unit="functions"):
    for record in records:
        record["config"]["data"] = record["config"]["data"] | {"unit": unit}
    return records


def rows_of(records, name):
    table = next(table for table in parity_tables(of_unit(records)) if table.name == name)
    names = [column.names[0] for column in table.columns]
    return {row[0].text: dict(zip(names, row)) for row in table.rows}


@pytest.mark.parametrize(
    ("shift", "spread", "said"), [(0.001, 1, "yes"), (0.004, 8, "open"), (0.02, 1, "no"), (-0.02, 1, "no")]
)
def test_equivalence_is_said_of_the_whole_interval(shift, spread, said):
    records = [parity_record("padded", seed, 1.0 + seed / 100) for seed in range(8)]
    records += [
        parity_record("packed-reset", seed, 1.0 + seed / 100 + shift + spread * noise)
        for seed, noise in enumerate(NOISE)
    ]
    row = rows_of(records, "parity")["packed-reset"]
    assert row["within"].text == said
    assert row["difference"].values[0] == pytest.approx(shift, abs=1e-9), "seeds differ more than arms: they are pairs"


def test_missing_and_diverged_runs_are_counted():
    records = [parity_record("padded", seed, 1.0) for seed in range(8)]
    records += [parity_record("packed-reset", seed, 1.0 + noise) for seed, noise in enumerate(NOISE[:4])]
    lost = training("packed-reset", 5, diverged_at_step=7)
    lost["metrics"]["val_loss"] = None
    records.append(lost)
    row = rows_of(records, "parity")["packed-reset"]
    assert row["runs"].text == "4 of 8, 1 diverged" and row["runs"].values == (4, 1, 3)


def test_an_arm_whose_runs_all_diverged_keeps_its_row():
    lost = [training("packed-reset", seed, diverged_at_step=7) for seed in range(3)]
    for record in lost:
        record["metrics"]["val_loss"] = None
    row = rows_of([*(parity_record("padded", seed, 1.0) for seed in range(8)), *lost], "parity")["packed-reset"]
    assert row["runs"].text == "0 of 8, 3 diverged" and row["within"].text == "open"
    assert row["difference"].text == "-" and row["loss"].text == "-"


def test_the_control_is_compared_with_its_own_arm():
    """Not with one that had more steps, which is packed with reset too."""
    records = []
    for seed, noise in enumerate(NOISE):
        records += [
            parity_record("padded", seed, 1.1, {"trainer": {"boundary": "reset", "max_steps": 500}}),
            parity_record("packed-reset", seed, 1.0, {"trainer": {"boundary": "reset", "max_steps": 500}}),
            parity_record("mine", seed, 0.9, {"data": {"strategy": "greedy"}, "trainer": {"max_steps": 900}}),
            parity_record("packed-leak", seed, 1.001 + noise, ROUNDING | {"trainer": {"max_steps": 500}}),
        ]
    rows = rows_of(records, "parity")
    assert rows["packed-leak"]["minus"].text == "packed-reset"
    assert rows["mine"]["within"].text == rows["mine"]["p"].text == "-", "more steps: no question of equivalence"
    assert rows["mine"]["minus"].text == "padded" and rows["mine"]["difference"].values[0] == pytest.approx(-0.2)


def test_an_arm_is_held_against_the_one_with_as_many_validation_documents():
    records = []
    for of, documents, seeds in (("", 400, range(8)), ("-more", 4000, range(8, 16))):
        for name in ("padded", "packed-reset", "packed-leak"):
            one = {"data": {"strategy": "padded" if name == "padded" else "greedy", "validation_documents": documents}}
            records += [parity_record(name, seed, 1.0, one) | {"arm": f"{name}{of}"} for seed in seeds]
    rows = rows_of(records, "parity")
    assert rows["packed-reset-more"]["minus"].text == rows["packed-leak-more"]["minus"].text == "padded-more"
    assert rows["packed-reset"]["minus"].text == "padded" and rows["padded-more"]["minus"].text == "-"
    assert rows["packed-reset-more"]["within"].text == "yes", "of eight pairs"


def with_steps(record, losses, precision):
    record["curves"]["train"] = [{"step": step, "loss": loss, "real_tokens": step} for step, loss in losses.items()]
    record["curves"]["validation"] = [
        {"step": max(losses), "loss": 2 * losses[max(losses)], "real_tokens": max(losses)}
    ]
    record["config"]["trainer"] = {"precision": precision, "boundary": "reset"}
    record["config"]["optimizer"] = {"lr": 2e-3}
    return record


def test_how_far_runs_of_the_same_documents_drift_apart():
    records = []
    for seed, off in ((1, 0.001), (2, -0.004)):
        records += [
            with_steps(parity_record("padded", seed, 1.0), {1: 5.0, 200: 2.0, 250: 1.0}, "bf16-mixed"),
            with_steps(
                parity_record("packed-reset", seed, 1.0), {1: 5.0, 200: 2 + off, 250: 1 - 2 * off}, "bf16-mixed"
            ),
        ]
    row = rows_of(records, "drift")["packed-reset"]
    assert (row["minus"].text, row["precision"].text, row["pairs"].values) == ("padded", "bfloat16", (2,))
    assert [row[name].values[0] for name in ("first", "early", "later", "largest", "validation")] == pytest.approx(
        [0, 0.004, 0.003, 0.008, 0.016]
    )
    assert not parity_figures(of_unit(records)), "bfloat16 alone has nothing to be held against"
    exact = {1: 5.0, 200: 2.0, 250: 1.0}
    for name in ("padded", "packed-reset"):
        one = parity_record(name, 1, 1.0) | {"arm": f"{name}-float32"}
        records.append(with_steps(one, exact, "32-true"))
    row = rows_of(records, "drift")["packed-reset-float32"]
    assert (row["minus"].text, row["precision"].text) == ("padded-float32", "float32"), "of its own precision"
    assert row["largest"].values == (0,)
    assert [figure.name for figure in parity_figures(of_unit(records))] == ["drift"]


def test_lines_of_drift_differ_by_what_their_runs_are(monkeypatch):
    drawn = []
    monkeypatch.setattr(drift, "finish", lambda fig, *_: drawn.append(fig))
    records = []
    for of, precision, changed in (
        ("", "bf16-mixed", {}), ("-float32", "32-true", {}), ("-rate", "bf16-mixed", {"lr": 4e-3}),
        ("-long", "bf16-mixed", {"steps": 900}), ("-more", "bf16-mixed", {"documents": 4000}),
    ):  # fmt: skip
        for name in ("padded", "packed-reset"):
            one = with_steps(
                parity_record(name, 1, 1.0) | {"arm": f"{name}{of}"},
                {1: 5.0, 200: 2.0 + 0.001 * (name == "packed-reset")},
                precision,
            )
            one["config"]["optimizer"]["lr"] = changed.get("lr", 2e-3)
            one["config"]["trainer"]["max_steps"] = changed.get("steps", 500)
            one["config"]["data"]["validation_documents"] = changed.get("documents", 400)
            records.append(one)
    parity_figures(of_unit(records))
    lines = {line.get_label(): line.get_linestyle() for line in drawn[0].axes[0].lines}
    dashes = {tuple(line._unscaled_dash_pattern[1] or ()) for line in drawn[0].axes[0].lines}
    assert len(dashes) == len(lines) == 5 and lines.pop("packed-reset-more minus padded-more") == "--"
    assert lines == {
        "packed-reset minus padded": "-", "packed-reset-float32 minus padded-float32": "--",
        "packed-reset-rate minus padded-rate": ":", "packed-reset-long minus padded-long": "-.",
    }  # fmt: skip


def test_steps_of_equal_time():
    records = [throughput("padded", 100), throughput("packed-reset", 250), throughput("single", 10, run="another")]
    (table,) = speed_tables(of_unit(records))
    assert [(row[0].text, row[4].text, row[5].text) for row in table.rows] == [
        ("padded", "1.000x", "500"),
        ("packed-reset", "2.500x", "1250"),
    ]


def answers(records, tried):
    """Learning rates, and what is said of equivalence."""
    sweep = {"tried": [{"optimizer.lr": [0.001, 0.1]}, {"optimizer.lr": tried}], "seeds": [*range(8)]}
    (table,) = answers_tables([record | {"sweep": sweep} for record in records])
    return [row[-1].text for row in table.rows], [row[7].text for row in table.rows]


def test_seeds_that_solve_a_task_are_counted():
    task = {"data": {"task": "mqar"}}
    records = []
    for arm, solved, nats in (("padded", 8, 0.1), ("packed-reset", 7, 0.1), ("packed-leak", 0, 0.9)):
        for seed, noise in enumerate(NOISE):
            numbers = {"accuracy": 0.95 if seed < solved else 0.3, "nats": nats + noise, "chance": 0.25}
            record = training(arm, seed, 1.0, **{f"mqar.{name}": value for name, value in numbers.items()})
            record["config"]["data"] = record["config"]["data"] | task["data"]
            record["config"]["optimizer"] = {"lr": 0.004 if arm == "padded" else 0.008}
            records.append(record)
    (table,) = answers_tables(records)
    assert [row[-1].text for row in table.rows] == ["0.004", "0.008", "0.008"]
    said = {row[0].text: (row[2].text, row[7].text) for row in table.rows}
    assert said == {"padded": ("8", "-"), "packed-reset": ("7", "yes"), "packed-leak": ("0", "no")}
    assert answers(records, tried=[0.002, 0.004, 0.008, 0.016])[0] == ["0.004", "0.008", "0.008"]
    assert answers(records, tried=[0.004, 0.008, 0.016]) == (["0.004, an end", "0.008", "0.008"], ["-", "open", "no"])
    assert answers(records, tried=[0.002, 0.004, 0.008]) == (
        ["0.004", "0.008, an end", "0.008, an end"],
        ["-", "open", "open"],
    )
    nearly_none = [r | {"metrics": r["metrics"] | {"mqar.nats": r["metrics"]["mqar.nats"] / 100}} for r in records]
    assert answers(nearly_none, tried=[0.004, 0.008])[1] == ["-", "yes", "yes"], "losses are near their least, zero"
    for record in records:
        if record["arm"] == "packed-leak" or (record["arm"], record["seed"]) == ("packed-reset", 2):
            record["metrics"] |= {"val_loss": None, "mqar.nats": None, "mqar.accuracy": None}
    (table,) = answers_tables([record for record in records if (record["arm"], record["seed"]) != ("packed-reset", 5)])
    assert [row[1].text for row in table.rows] == ["8", "6 of 8, 1 diverged, 1 missing", "0 of 8, 8 diverged"]
    assert [row[2].text for row in table.rows] == ["8", "5", "0"] and table.rows[2][7].text == "open"
