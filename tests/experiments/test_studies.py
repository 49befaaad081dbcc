"""Tables of parity, downstream and boundaries from invented records whose answer is known."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from experiments.boundaries.report import KINDS as BOUNDARIES
from experiments.downstream.report import answers_tables
from experiments.parity.report import parity_tables, speed_tables
from made_records import rows_of, throughput, training
from packmamba.config import load_config, to_dict

pytestmark = pytest.mark.slow

NOISE = (0.0004, -0.0003, 0.0002, -0.0004, 0.0001, 0.0003, -0.0002, -0.0001)
POOL = "data.strategy=concat_split data.streams=1024 data.stagger=true data.batching=stream model.d_model=512".split()
POOL += "data.row_length=2048 data.tokens_per_step=65536 data.max_tokens_per_batch=65536".split()
POOL += "data.cut_at_steps=false trainer.max_steps=1526".split()
EFFECTS = {"reset": (0, 0), "state_passing": (0.001, -0.01), "carry": (0.001, -0.03), "fitted_noise": (0, -0.004)}


def parity_record(arm, seed, loss, config=None):
    """Every package's loss is the run's, so that only seeds vary."""
    record = training(arm, seed, loss, config=config, **{"perplexity.loss": loss, "targets": 500})
    record["config"]["data"] = record["config"]["data"] | {"unit": "functions"}
    places = [{"group": g, "start": 1, "documents": 1, "targets": 100, "nats": 100 * loss} for g in range(4)]
    return record | {"curves": record["curves"] | {"perplexity.by_group": places}}


def parity_rows(*records):
    table = next(table for table in parity_tables(*records) if table.name == "parity")
    return {row[0].text: dict(zip([column.names[0] for column in table.columns], row)) for row in table.rows}


@pytest.mark.parametrize(
    ("shift", "spread", "alone", "after_holm"),
    [(0.001, 1, "equivalent", "equivalent"), (0.002, 30, "open", "open"), (0.004, 8, "different", "open")],
)
def test_equivalence_is_of_the_whole_interval_and_one_of_three(shift, spread, alone, after_holm):
    records = [parity_record("padded", seed, 1.0 + seed / 100) for seed in range(8)]
    for seed, noise in enumerate(NOISE):
        records += [parity_record("packed-reset", seed, 1.0 + seed / 100 + shift + spread * noise)]
        records += [parity_record("packed-leak", seed, 1.2 + seed / 100 + noise)]
    row = parity_rows(records)["packed-reset"]
    assert (row["registered"].text, row["verdict"].text) == (alone, after_holm)
    assert row["difference"].values[0] == pytest.approx(shift, abs=1e-9), "seeds differ more than arms: they are pairs"


def test_the_primaries_of_three_distributions_are_one_family():
    def corpus(shift):
        records = [parity_record("padded", seed, 1.0) for seed in range(8)]
        return records + [parity_record("packed-reset", s, 1.0 + shift + 8 * noise) for s, noise in enumerate(NOISE)]

    def p_of_first(*others):
        row = parity_rows(corpus(0.0025), others)["packed-reset"]
        assert row["verdict"].text.endswith("no leak arm") or row["verdict"].text == "open"
        return row["p_equivalence"].values[0]

    alone, smallest, second = p_of_first(), p_of_first(corpus(0.004), corpus(0.004)), p_of_first(corpus(0.0))
    assert alone == pytest.approx(smallest), "distributions without runs count"
    assert second == pytest.approx(2 / 3 * smallest)


def test_missing_and_diverged_runs_are_counted():
    records = [parity_record("padded", seed, 1.0) for seed in range(8)]
    records += [parity_record("packed-reset", seed, 1.0 + noise) for seed, noise in enumerate(NOISE[:4])]
    lost = training("packed-reset", 5, diverged_at_step=7)
    lost["metrics"]["val_loss"] = None
    lost["config"]["data"] = lost["config"]["data"] | {"unit": "functions"}
    assert parity_rows([*records, lost])["packed-reset"]["runs"].text == "4 of 8, 1 diverged"


def test_an_arm_is_compared_with_the_one_of_as_many_validation_documents():
    records = []
    for suffix, documents, seeds in (("", 400, range(8)), ("-more", 4000, range(8, 16))):
        for name in ("padded", "packed-reset"):
            data = {"strategy": "padded" if name == "padded" else "greedy", "validation_documents": documents}
            records += [parity_record(name, s, 1.0, {"data": data}) | {"arm": f"{name}{suffix}"} for s in seeds]
    rows = parity_rows(records)
    assert rows["packed-reset-more"]["minus"].text == "padded-more" and rows["packed-reset"]["minus"].text == "padded"


def test_steps_of_equal_time():
    records = [throughput("padded", 100), throughput("packed-reset", 250), throughput("single", 10, run="another")]
    for record in records:
        record["config"]["data"] = record["config"]["data"] | {"unit": "functions"}
    (table,) = speed_tables(records)
    assert [row[4].text for row in table.rows] == ["1.000x", "2.500x"]
    assert [row[5].text for row in table.rows] == ["2.500x", "1.000x"]


def test_seeds_that_solve_a_task_are_counted():
    records = []
    for arm, solved, nats in (("padded", 8, 0.1), ("packed-reset", 7, 0.1), ("packed-leak", 0, 0.9)):
        for seed, noise in enumerate(NOISE):
            numbers = {"accuracy": 0.95 if seed < solved else 0.3, "nats": nats + noise, "chance": 0.25}
            record = training(arm, seed, 1.0, **{f"mqar.{name}": value for name, value in numbers.items()})
            record["config"]["data"] = record["config"]["data"] | {"task": "mqar"}
            record["config"]["optimizer"] = {"lr": 0.002 if arm == "padded" else 0.008}
            record["sweep"] = {"seeds": [*range(8)]}
            records.append(record)
    (table,) = answers_tables(records)
    assert [row[-1].text for row in table.rows] == ["0.002, an end", "0.008", "0.008"]
    assert {row[0].text: row[2].text for row in table.rows} == {"padded": "8", "packed-reset": "7", "packed-leak": "0"}


@functools.cache
def config_of(boundary):
    return to_dict(load_config(None, [*POOL, f"trainer.boundary={boundary}"]))


def boundary_record(boundary, seed, effect=None):
    rng = np.random.default_rng([seed, len(boundary)])
    inside, beyond = effect or EFFECTS[boundary]
    points = []
    for group in range(12):
        for start in (2**i for i in range(16)):
            targets = 1000 + 100 * group
            loss = 1 + 0.1 * group + (inside if start < 2048 else beyond) + 0.0005 * rng.standard_normal()
            points.append({"group": group, "start": start, "targets": targets, "nats": targets * loss})
    made = training("single", seed, config={**config_of(boundary), "seed": seed}, state_age_steps=32)
    return made | {"arm": f"any {boundary}", "curves": made["curves"] | {"perplexity.by_group": points}}


def test_known_effects_come_back():
    ladder = [boundary_record(boundary, seed) for seed in range(1, 9) for boundary in EFFECTS]
    # a tuning seed stays out
    ladder += [boundary_record(boundary, 101, effect=(9.0, 9.0)) for boundary in EFFECTS]
    found = {(row["outcome"], row["places"]): row for row in rows_of(BOUNDARIES, ladder, "primary")}
    expected = {"coverage": {"inside": 0.001, "beyond": -0.010}, "continuity": {"inside": 0.0, "beyond": -0.020}}
    assert len(found) == 4
    for (outcome, places), row in found.items():
        effect = expected[outcome][places]
        assert float(row["difference"]) == pytest.approx(effect, abs=4e-4) and row["pairs"] == "8"
        ruling = "equivalent" if abs(effect) < 0.005 else "different"
        assert row["registered"] == ruling
        assert row["verdict"] == ruling + ", no leak arm" * (ruling == "equivalent")
    others = [row for row in rows_of(BOUNDARIES, ladder, "ladder") if "tuning" not in row["setting"]]
    others = {row["what"]: float(row["beyond"]) for row in others}
    assert others["own over zero"] == pytest.approx(-0.030, abs=4e-4)


def test_runs_from_different_weights_are_no_pairs():
    records = []
    for seed in (1, 2, 3, 4):
        for boundary, loss in (("reset", 0.0), ("carry", -0.25 if seed < 4 else 9.0)):
            one = boundary_record(boundary, seed, effect=(loss, loss))
            one["metrics"] |= {"started_from_checksum": seed + 10 * (seed == 4 and boundary == "carry")}
            one["config"] = one["config"] | {"trainer": one["config"]["trainer"] | {"init_from": "any:zero"}}
            records.append(one)
    (row,) = [row for row in rows_of(BOUNDARIES, records, "ladder") if row["what"] == "own over zero"]
    assert (float(row["beyond"]), row["beyond_pairs"]) == (pytest.approx(-0.25, abs=2e-3), "3")
