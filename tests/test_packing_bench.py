"""The packing bench: records, refusals, and that it notices a wrong plan."""

import numpy as np
import pytest
from configured import configured

from experiments.packing import bench
from packmamba.config import ConfigError
from packmamba.data.lengths import draw_lengths
from packmamba.data.packing import STRATEGIES, plan_rows
from packmamba.records import read_records


def test_bench_records_every_point_of_the_grid(tmp_path):
    grid = {"num_documents": 50, "row_lengths": [1024, 2048], "buffers": [8, 16], "seeds": [4], "rounds": 2}
    bench.run(configured(bench.Config, grid), tmp_path / "records" / "packing.jsonl", progress=False)
    records = read_records(tmp_path)
    assert len(records) == 2 * (len(STRATEGIES) - 1 + 2)
    lengths = draw_lengths("documents-2k", 50, 4)
    for record in records:
        config, metrics = record["config"], record["metrics"]
        plan = plan_rows(lengths, config["row_length"], config["strategy"], "pieces", config["buffer"] or 1)
        assert (metrics["padding_fraction"], metrics["num_rows"]) == (plan.padding_fraction, plan.num_rows)
        assert (config["buffer"] is None) == (config["strategy"] != "greedy")
        assert metrics["planning_seconds"] > 0


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("strategies", ["bestfit"], "did you mean 'best_fit'"),
        ("distribution", "heavi", "did you mean 'heavy'"),
        ("overlong", "error", "document 0 has 2048 tokens"),
        ("row_lengths", [0], "row_length"),
        ("buffers", [0], "buffer"),
        ("rounds", 0, "rounds: expected at least 1, got 0"),
        ("seeds", [-1], "seeds: expected at least 0"),
    ],
)
def test_bench_refuses_as_it_is_read(key, value, message):
    with pytest.raises(ConfigError, match=message):
        configured(bench.Config, {key: value})


@pytest.mark.parametrize("array, value", [("document", 0), ("start", 2), ("length", 3), ("slots", 1)])
def test_bench_notices_a_wrong_plan(array, value):
    lengths = np.array([3, 5, 2, 7])
    plan = plan_rows(lengths, 4, "split")
    bench.check_plan(plan, lengths)
    getattr(plan, array)[2] = value
    with pytest.raises(RuntimeError, match="loses or repeats"):
        bench.check_plan(plan, lengths)
