"""The operators' bench on a tiny case: every arm is right, recorded and tabulated; a wrong arm is not timed."""

from functools import partial

import pytest
import torch
from configured import configured

from experiments.operators import cpu as bench
from experiments.operators import host_time
from experiments.operators.arms import CPU_ARMS
from experiments.operators.report import KINDS
from packmamba.errors import ConfigError
from packmamba.ops import custom_op
from packmamba.records import read_records
from packmamba.report.html import build_sections

TINY = {
    "tokens": 96,
    "shortest": 3,
    "longest": 30,
    "channels": 24,
    "states": 4,
    "conv_tokens": 64,
    "conv_channels": 40,
    "threads": 1,
    "rounds": 3,
    "slow_rounds": 2,
}


@pytest.mark.slow
def test_every_arm_is_recorded_and_tabulated(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "machine_rates", partial(bench.machine_rates, 1))
    threads = torch.get_num_threads()
    bench.run(configured(bench.Config, TINY), tmp_path / "records" / "operators.jsonl", progress=False)
    assert torch.get_num_threads() == threads
    records = read_records(tmp_path)
    assert [(r["config"]["operator"], r["arm"]) for r in records] == [
        (operator, arm) for operator in ("scan", "conv") for arm in CPU_ARMS
    ]
    for record in records:
        assert CPU_ARMS[record["arm"]].fields().items() <= record["config"].items()
        assert record["metrics"]["rounds"] == (2 if CPU_ARMS[record["arm"]].slow else 3)
        assert record["metrics"]["seconds_median"] > 0 and record["metrics"]["bound_seconds"] > 0
        assert record["metrics"]["exponentials_per_second"] < record["metrics"]["multiply_adds_per_second"]
    (section,) = build_sections(records, kinds=KINDS)
    tables = {table.name: table for table in section.tables}
    assert {"operators-ssm-pack", "operators-conv1d-pack"} <= tables.keys()
    assert len(tables["operators-ssm-pack"].rows) == len(CPU_ARMS)
    assert "operators" in [figure.name for figure in section.figures]


def test_a_wrong_arm_prints_no_timing(tmp_path, monkeypatch):
    real = custom_op.KERNELS["cpu"]["ssm_forward"]

    def wrong(*arguments):
        real(*arguments)
        arguments[-3].mul_(1.001)  # y

    monkeypatch.setitem(custom_op.KERNELS["cpu"], "ssm_forward", wrong)
    with pytest.raises(RuntimeError, match="scan, cpu: y is off by 1.0e-03"):
        bench.run(configured(bench.Config, TINY, arms=["cpu"]), tmp_path / "records.jsonl", progress=False)
    assert not (tmp_path / "records.jsonl").exists()


def test_rates_that_an_arm_beats_are_not_recorded(tmp_path, monkeypatch):
    slow = dict.fromkeys(bench.machine_rates(1), 1.0)
    monkeypatch.setattr(bench, "machine_rates", lambda: slow)
    with pytest.raises(RuntimeError, match="disturbed"):
        bench.run(configured(bench.Config, TINY, arms=["cpu"]), tmp_path / "records.jsonl", progress=False)
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ["gpu"]}, "arms"),
        ({"dtype": "int8"}, "dtype"),
        ({"tokens": 0}, "tokens"),
        ({"longest": 2}, "longest"),
        ({"slow_rounds": 9}, "slow_rounds"),
    ],
)
def test_refuses_as_it_is_read(change, message):
    with pytest.raises(ConfigError, match=message):
        configured(bench.Config, TINY, **change)


def test_the_host_s_time_for_a_call(tmp_path):
    host_time.run(configured(host_time.Config, {"calls": 3, "rounds": 2}), tmp_path / "records" / "r.jsonl", False)
    records = read_records(tmp_path)
    assert [record["arm"] for record in records] == list(host_time.OURS)
    assert all(
        record["metrics"][name] > 0 for record in records for name in KINDS["host_time"].metrics if "sec" in name
    )
    (table,) = build_sections(records, kinds=KINDS)[0].tables
    assert [(row[0].text, row[1].text) for row in table.rows] == [
        (operator, arguments) for operator in ("conv1d_pack", "ssm_pack") for arguments in ("all", "few")
    ]
