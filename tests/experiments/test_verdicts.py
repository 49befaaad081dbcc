"""Simulated studies whose truth is known: families hold a false verdict at most in one of twenty."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from configured import configured

from experiments.verdicts import bench
from experiments.verdicts.bench import Study, simulate, studies
from experiments.verdicts.report import KINDS
from made_records import read_rows, table_files
from packmamba.lab.records import read_records

pytestmark = pytest.mark.slow

FOLDER = Path(bench.__file__).parent
SEEDS = [3, 5, 8, 16]


def most(trials):
    """The largest share that 5 % gives by chance, but for one cell in a thousand."""
    return 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_the_bench_makes_its_tables(tmp_path):
    config = configured(bench.Config, {"trials": 2, "group_trials": 1, "seeds": [3]})
    bench.run(config, tmp_path / "records.jsonl", False)
    made = table_files(read_records(tmp_path), KINDS)
    assert len(made["rates.csv"].splitlines()) == 1 + 3 * 2 * 3 + 2 * 2
    assert len(made["diverging.csv"].splitlines()) == 1 + 4


def test_committed_rates_are_at_most_5_percent():
    """Of families with a false verdict, in every kind of study, over seeds and over groups; with an
    interval of its own.
    """
    rates = table_files(read_records(FOLDER), KINDS)["rates.csv"]
    latest = {json.dumps(record["config"]): record["metrics"] for record in read_records(FOLDER)}
    trials = {metrics["wrong"]: metrics["trials"] for metrics in latest.values()}
    for row in read_rows(rates):
        for cell in itertools.product(("different", "equivalent"), SEEDS):
            share, low, high = (float(row["{}_{}".format(*cell) + end]) for end in ("", "_low", "_high"))
            assert low <= share <= high
            assert share <= most(trials[share]), row
            assert share <= bench.NEAR or trials[share] >= 10_000, row


def test_an_arm_that_diverges_is_never_equivalent():
    for seeds in SEEDS:
        found = simulate(Study(seeds, 1, share=1.0), 20, seed=1)
        assert not found["equivalent"] and not found["wrong"]
        assert bool(found["different (diverges)"]) == (seeds > 3)


@pytest.mark.parametrize("seeds", SEEDS)
def test_false_verdicts_of_simulated_studies(seeds):
    for study in studies([seeds]):
        trials = 400 if study.groups == 1 else 40
        assert simulate(study, trials, seed=1)["wrong"] / trials <= most(trials), study
