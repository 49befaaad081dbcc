"""What experiments/boundaries makes of records: known effects come back, tuning seeds stay out, a run has every table."""

import csv
import functools
import io
import json

import numpy as np
import pytest

import run
from experiments.boundaries import plots
from experiments.boundaries.plots import _pairs, leak_figures, starts_figures
from experiments.boundaries.report import KINDS, _primary
from experiments.boundaries.runs import arms, by_setting, name_of
from made_records import training
from packmamba import experiments
from packmamba.config import load_config, to_dict
from packmamba.records import read_records
from packmamba.report.aggregate import flatten
from packmamba.report.tables import write_table
from packmamba.training.sweep import load_sweep
from processes import ROOT

FOLDER = ROOT / "experiments" / "boundaries"
POOL = {
    "data.strategy": "split", "data.streams": 1024, "data.stagger": True, "data.mode": "stream", "data.row_length": 2048,
    "data.tokens_per_step": 65536, "data.slots_per_batch": 65536, "model.d_model": 512, "trainer.max_steps": 1526,
}  # fmt: skip
EFFECTS = {
    "reset": (0.0, 0.0),
    "foreign": (0.001, -0.010),
    "carry": (0.001, -0.030),
    "noise": (0.0, -0.004),
    "carry_scan": (0.001, -0.029),
}
"""Nats per target over zero, inside and beyond T."""


@functools.cache
def config_of(boundary):
    return to_dict(load_config(None, [f"{k}={v}" for k, v in (POOL | {"trainer.boundary": boundary}).items()]))


def record(boundary, seed, effect=None):
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


def rows(records, name):
    (table,) = (table for table in KINDS["training"].tables(records) if table.name == name)
    return list(csv.DictReader(io.StringIO(write_table(table, "csv"))))


def primary(records):
    return _primary(by_setting(arms(records))).rows


@pytest.fixture(scope="module")
def ladder():
    return [record(boundary, seed) for seed in range(1, 9) for boundary in EFFECTS]


@pytest.mark.slow
def test_known_effects_come_back(ladder):
    found = {(row["outcome"], row["places"]): row for row in rows(ladder, "primary")}
    expected = {"coverage": {"inside": 0.001, "beyond": -0.010}, "continuity": {"inside": 0.0, "beyond": -0.020}}
    assert len(found) == 4
    for (outcome, places), row in found.items():
        effect = expected[outcome][places]
        assert row["setting"] == "T = 2048, 14M, 100M tokens"
        assert float(row["difference"]) == pytest.approx(effect, abs=4e-4)
        assert float(row["difference_low"]) <= float(row["difference"]) <= float(row["difference_high"])
        assert (row["pairs"], row["every"], row["packages"]) == ("8", "8", "12")
        assert row["equivalent"] == ("yes" if abs(effect) < 0.005 else "no")
        assert float(row["p_holm"]) < 0.05 or effect == 0
    others = {row["what"]: float(row["beyond"]) for row in rows(ladder, "ladder")}
    assert others["own over zero"] == pytest.approx(-0.030, abs=4e-4)
    assert others["noise"] == pytest.approx(-0.004, abs=4e-4) and others["own scan"] == pytest.approx(0.001, abs=4e-4)


@pytest.mark.slow
def test_seeds_that_chose_something_and_runs_that_diverged_are_not_reported(ladder):
    tuned = [record(boundary, 101, effect=(9.0, 9.0)) for boundary in EFFECTS]
    diverged = [json.loads(json.dumps(one)) for one in ladder]
    (lost,) = (one for one in diverged if one["seed"] == 3 and one["config"]["trainer"]["boundary"] == "carry")
    lost["metrics"]["val_loss"] = None
    found = {(row["outcome"], row["places"]): row for row in rows([*tuned, *diverged], "primary")}
    assert float(found["coverage", "beyond"]["difference"]) == pytest.approx(-0.010, abs=4e-4)
    assert found["coverage", "beyond"]["pairs"] == "8" and found["continuity", "beyond"]["pairs"] == "7"
    seeds = {row["arm"]: row["seeds"] for row in rows(diverged, "arms")}
    assert seeds["own"] == "7" and seeds["zero"] == "8"
    lines = primary(diverged)
    assert [row[4].text for row in lines] == ["8 of 8"] * 2 + ["7 of 8, 1 diverged"] * 2
    without = primary([one for one in ladder if one["config"]["trainer"]["boundary"] != "carry"])
    assert [row[2].text for row in without] == ["inside", "beyond"]
    assert without[1][6].values[0] == pytest.approx(8e-4), "four times the least p: what is not measured counts"
    planned = [one | {"sweep": {"seeds": list(range(1, 17))}} for one in diverged]
    assert {row[4].text.partition(",")[0] for row in primary(planned)} == {"8 of 16", "7 of 16"}, (
        "some are still to be trained"
    )


@pytest.mark.slow
def test_context_gains_are_compared_by_seed_and_package():
    records = [record(boundary, seed) for seed in range(1, 6) for boundary in ("reset", "carry")]
    for one in records:
        own, seed = one["config"]["trainer"]["boundary"] == "carry", one["seed"]
        one["curves"]["long_context.by_group"] = [
            {"windows": k, "group": g, "documents": 1 + g, "gain": (1 + g) * (0.01 * seed + own * 0.003 * k)}
            for k in (4, 8) for g in range(6)
        ]  # fmt: skip
    (row,) = rows(records, "gain-differences")
    assert (row["arm"], row["minus"], row["gain_8_pairs"], row["gain_16"]) == ("own", "zero", "5", "")
    for k in (4, 8):
        assert [float(row[f"gain_{k}{end}"]) for end in ("", "_low", "_high")] == pytest.approx([0.003 * k] * 3)


def in_rows(seed, loss, name="any", **data):
    """The same losses everywhere; ``data`` says how documents lie in rows."""
    one = record("reset", seed, effect=(loss, loss))
    config = one["config"] | {"data": one["config"]["data"] | data}
    return one | {"config": config, "arm": name}


@pytest.mark.slow
def test_a_gain_at_one_length_of_rows_is_held_against_that_at_another():
    records = []
    for seed in range(1, 6):
        for T, streams, gain in ((2048, 1024, 0.25), (512, 4096, 0.75)):
            for boundary, loss in (("reset", 4.0 * T), ("carry", 4.0 * T - gain - 0.125 * seed)):
                one = record(boundary, seed, effect=(loss, loss))
                data = one["config"]["data"] | {"row_length": T, "streams": streams}
                records.append(one | {"config": one["config"] | {"data": data}, "arm": f"{boundary} {T}"})
    records = [one for one in records if (one["seed"], one["arm"]) not in ((5, "carry 512"), (4, "carry 2048"))]
    (row,) = [row for row in rows(records, "row-length") if row["arm"] == "own over zero"]
    assert (row["rows"], row["minus"], row["all places_pairs"]) == ("512", "2048", "3")
    assert float(row["2048 to 16,384"]) == pytest.approx(-0.5, abs=2e-3)


def test_seeds_of_two_sweeps_with_one_name_are_wanted_where_each_belongs():
    planned = {"sweep": {"seeds": [1, 2, 3, 101, 102]}}
    records = [in_rows(seed, 0.0, "shuffled", shuffle_steps=1526) | planned for seed in (1, 2, 101)]
    wanted = {arm.setting.tuning: arm.expected for arm in arms(records)}
    assert wanted == {False: {1, 2, 3}, True: {101, 102}}


@pytest.mark.slow
def test_orders_and_lengths_of_rows_are_compared_with_what_differs_in_them_alone():
    shuffled, one_stream = {"shuffle_steps": 1526}, {"shuffle_steps": 1526, "streams": 1, "stagger": False}
    records = []
    for seed in (1, 2, 3):
        records += [
            record("reset", seed),
            record("carry", seed, effect=(-0.5, -0.5)),
            in_rows(seed, 0.25, **one_stream),
            in_rows(seed, 1.0, **one_stream, row_length=8192),
            in_rows(100 + seed, 0.0),
            in_rows(100 + seed, -0.125, **shuffled),
            in_rows(100 + seed, 9.0, "zero lr=0.002"),  # another sweep's run of the same arm
        ]
    found = {
        (row["setting"].partition("tokens")[2], row["what"]): float(row["beyond"]) for row in rows(records, "order")
    }
    expected = {
        ("", "the pool, other rows"): -0.25,
        ("", "own, other rows"): -0.75,
        (", tuning seeds", "shuffled"): -0.125,
    }
    assert found == pytest.approx(expected, abs=2e-3)
    (row,) = rows(records, "row-length")
    assert (row["arm"], row["rows"], row["minus"]) == ("rows", "8192", "2048")
    assert [float(row[name]) for name in ("all places", "first 512", "from 8192 on")] == pytest.approx(
        [0.75] * 3, abs=2e-3
    )


@pytest.mark.slow
def test_runs_that_went_on_from_different_weights_are_no_pairs():
    records = []
    for seed in (1, 2, 3, 4):
        for boundary, loss in (("reset", 0.0), ("carry", -0.25 if seed < 4 else 9.0)):
            one = record(boundary, seed, effect=(loss, loss))
            one["metrics"] |= {"started_from_checksum": seed + 10 * (seed == 4 and boundary == "carry")}
            one["config"] = one["config"] | {"trainer": one["config"]["trainer"] | {"init_from": "any:zero"}}
            gains = [{"windows": 8, "group": g, "documents": 2, "gain": -loss} for g in range(6)]
            records.append(one | {"curves": one["curves"] | {"long_context.by_group": gains}})
    (row,) = [row for row in rows(records, "ladder") if row["what"] == "own over zero"]
    assert (float(row["beyond"]), row["beyond_pairs"]) == (pytest.approx(-0.25, abs=2e-3), "3")
    (row,) = rows(records, "gain-differences")
    assert (float(row["gain_8"]), row["gain_8_pairs"]) == (pytest.approx(0.125), "3")
    (here,) = by_setting(arms(records)).values()
    assert _pairs(here) == 3, "what the figure says"


@pytest.mark.slow
def test_leaks_in_post_training_have_a_figure_and_rows_of_their_own():
    records = []
    for seed in (1, 2, 3):
        for T, share in ((512, 0.01), (2048, 0.05), (8192, 0.2)):
            for boundary, after in (("reset", 0.0), ("leak", share)):
                one = in_rows(seed, after, streams=1, stagger=False, shuffle_steps=500, row_length=T)
                trainer = one["config"]["trainer"] | {"boundary": boundary, "init_from": "any:zero", "max_steps": 500}
                metrics = one["metrics"] | {"tokens_behind_another": share * one["metrics"]["real_tokens"]}
                config = one["config"] | {"trainer": trainer}
                records.append(one | {"config": config, "metrics": metrics, "arm": f"{boundary} {T}"})
    leaks = {row["setting"].partition(",")[0]: float(row["inside"]) for row in rows(records, "leak")}
    assert leaks == pytest.approx({"T = 512": 0.01, "T = 2048": 0.05, "T = 8192": 0.2}, abs=2e-3)
    whole = [
        one | {"config": one["config"] | {"trainer": one["config"]["trainer"] | {"init_from": None, "max_steps": 1526}}}
        for one in records
    ]
    assert [figure.name for figure in leak_figures(records)] == ["leaks-post-training", "dose-post-training"]
    assert not leak_figures([one for one in records if one["seed"] == 1]), "one seed draws nothing"
    assert [figure.name for figure in leak_figures(records + whole)] == [
        "leaks", "dose", "leaks-post-training", "dose-post-training",
    ]  # fmt: skip
    assert "row-length" not in {table.name for table in KINDS["training"].tables(records)}
    assert {row["arm"] for row in rows(records + whole, "row-length")} == {"rows", "leak"}
    assert len(rows(records + whole, "row-length")) == 4, "rows and leak at two lengths, of whole runs alone"


def test_a_leak_is_looked_at_in_places_that_are_alike_at_every_length_of_rows():
    records = []
    for seed in (1, 2, 3):
        for boundary, harm in (("reset", 0.0), ("leak", 0.25)):
            one = in_rows(seed, 0.0, boundary, streams=1, stagger=False, shuffle_steps=500)
            config = one["config"] | {"trainer": one["config"]["trainer"] | {"boundary": boundary}}
            for point in one["curves"]["perplexity.by_group"]:
                point["nats"] += harm * point["targets"] * (point["start"] < 256)
            metrics = one["metrics"] | {"tokens_behind_another": 0.05 * one["metrics"]["real_tokens"]}
            records.append(one | {"config": config, "metrics": metrics})
    (row,) = rows(records, "leak")
    assert float(row["first 256"]) == pytest.approx(0.25, abs=2e-3)
    assert float(row["from 256 on"]) == pytest.approx(0.0, abs=2e-3)
    assert float(row["all places"]) == pytest.approx(0.125, abs=2e-3), "half of the targets stand before place 256"
    assert float(row["dose"]) == pytest.approx(0.05) and row["seeds"] == "3"


@pytest.mark.slow
def test_arms_are_what_their_configuration_says(ladder, monkeypatch):
    monkeypatch.setattr(
        "packmamba.training.sweep.check_run", lambda *_: None
    )  # test_reproduce.py has these keys checked
    expected = {
        "ladder": ["zero", "foreign", "own"],
        "ladder-more": ["noise", "own scan", "whole"],
        "calibration": ["zero", "zero, control"],
        "order": ["zero", "zero, 8 streams a row", "zero, plain streams", "shuffled"],
        "leak": ["rows", "leak", "foreign heads", "leak, convolution", "leak, scan", "learned"],
        "rows-512": ["zero", "foreign", "own", "shuffled"],
        "rows-8192": ["zero", "foreign", "own"],
        "carry-or-shuffle": ["shuffled"],
        "ladder-rate": ["zero", "foreign", "own", "shuffled"],
        "larger": ["zero", "own"],
        "post": ["zero", "foreign", "own"],
        "post-more": ["noise", "shuffled"],
        "post-leak": ["rows", "leak", "foreign heads", "leak, scan", "leak, convolution"],
    }
    for sweep, names in expected.items():
        keys = ["grid={seed: [1]}", *(["trainer.init_from=null"] if sweep.startswith("post") else [])]
        configs = [flatten(to_dict(config)) for config in load_sweep(FOLDER / f"{sweep}.yaml", keys)[1]]
        found = [name_of({f"config.{key}": value for key, value in config.items()}) for config in configs]
        assert list(dict.fromkeys(found)) == names, sweep
    assert [figure.name for figure in starts_figures(ladder)] == ["starts"]


def test_the_figure_of_starts_names_what_it_draws_and_nothing_else(ladder, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "finish", lambda fig, *_: drawn.append(fig))
    starts_figures([one for one in ladder if one["config"]["trainer"]["boundary"] != "noise" or one["seed"] == 1])
    (legend,) = drawn[0].legends
    assert {text.get_text() for text in legend.get_texts()} == {"zero", "foreign", "own", "own scan"}, "noise: one seed"


@pytest.mark.slow
def test_a_small_run_has_every_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = [f"trainer.{key}=33" for key in ("max_steps", "validate_every", "checkpoint_every")]
    keys += ["data.validation_documents=20", "model.d_model=16", "model.n_layer=1"]
    assert run.main(["reproduce", "boundaries/ladder", "scale=small", *keys]) == 0
    folder = tmp_path / "runs" / "reproduce" / "boundaries-small"
    records = read_records(folder)
    assert len(records) == 6 and {record["metrics"].get("state_age_steps") for record in records} == {None, 32}
    for table, count in (("primary", 4), ("ladder", 3), ("arms", 3), ("context-gain", 3)):
        found = list(csv.DictReader(io.StringIO((folder / "tables" / f"{table}.csv").read_text())))
        assert len(found) == count, table
        numbers = [
            row[key] for row in found for key in row if key.startswith(("difference", "inside", "beyond", "gain"))
        ]
        assert all(numbers), table
    assert (folder / "figures" / "starts.png").is_file()


def test_texts_that_are_not_compared_have_names():
    one = record("reset", 1)
    data = one["config"]["data"] = one["config"]["data"] | {"unit": "mixture", "source": "packages"}
    assert KINDS["training"].label([one]) == "mixture"
    data |= {"unit": None, "begin_token": None}
    assert KINDS["training"].label([one]) == "packages-unmarked"


@pytest.mark.slow
def test_a_small_version_has_the_settings_and_arms_that_headlines_name(tmp_path):
    reproduce = experiments.module(FOLDER, "reproduce")
    records = []
    for step in reproduce.STEPS:
        _, configs = load_sweep(FOLDER / step.file, [*step.keys(tmp_path), *step.small])
        for config in configs:
            made = training("single", config.seed, config=to_dict(config))
            records.append(made | {"arm": config.name})
    found = {(arm.setting.label(), arm.name) for arm in arms(records)}
    named = [headline for headline in reproduce.HEADLINES if headline.small]
    assert len(named) > 30
    for headline in named:
        one = {"coverage": "foreign", "continuity": "own", "noise": "noise", "shuffled": "shuffled", "leak": "leak"}
        row = headline.row
        arm = row.get("arm") or one.get(row.get("what") or row["outcome"], "own")
        if "plain" not in headline.name:
            assert (headline.small["setting"], arm) in found, headline.name


def test_an_arm_misses_the_seeds_that_it_was_to_have_and_not_those_of_its_neighbours(ladder):
    seeds = {"noise": [1, 2], "reset": [1, 2, 3, 4]}
    records = [
        one | {"sweep": {"seeds": seeds[boundary]}}
        for one in ladder
        if (boundary := one["config"]["trainer"]["boundary"]) in seeds and one["seed"] <= 2
    ]
    found = {row["arm"]: (row["seeds"], row["missing"]) for row in rows(records, "arms")}
    assert found == {"zero": ("2", "2"), "noise": ("2", "0")}
