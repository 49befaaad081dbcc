"""The benches of long and large runs: what they record, on the smallest runs, and that they notice what they look for."""

import mmap
import os
import subprocess
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from configured import configured
from tqdm import tqdm

from experiments.reliability import checkpoint_times, determinism, processes, report, scale, soak
from experiments.reliability.yardstick import Yardstick
from packmamba.config import ConfigError, load_config
from packmamba.errors import Unfinished
from packmamba.records import read_records
from packmamba.report.folder import build_sections

TINY = ["data.source=synthetic", "data.num_documents=40", "data.distribution=short", "data.row_length=256",
        "data.tokens_per_step=256", "data.slots_per_batch=256", "model.d_model=8", "model.n_layer=1", "trainer.accelerator=cpu",
        "trainer.leakcheck_every=null"]  # fmt: skip


def samples(slope, noise=0.0, seed=0):
    """An hour of looks at something that grows by ``slope`` an hour."""
    rng, seconds = np.random.default_rng(seed), np.linspace(0, 3600, 240)
    return [{"seconds": s, "held": 5 + slope * s / 3600 + noise * rng.normal()} for s in seconds.tolist()]


def test_a_trend_is_found_and_its_interval_is_of_95_percent():
    config = configured(soak.Config, {})
    exact = soak.trend(config, samples(3.0), "held")
    assert exact["slope"] == pytest.approx(3, abs=0.05) and exact["end"] > exact["begin"] > 5
    found = [soak.trend(config, samples(3.0, 1.0, seed), "held") for seed in range(100)]
    assert 90 <= sum(one["slope_low"] < 3 < one["slope_high"] for one in found) <= 99
    assert all(one["slope_low"] > 0 for one in found)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(-1, 2, "yes"), (-1.9, 2.1, "not shown"), (2.1, 3, "no"), (-4, -2.1, "no"), (-3, 1, "not shown")],
)
def test_a_step_is_flat_if_its_whole_interval_is_within_its_share(low, high, said):
    name = "cpu_seconds_per_step"
    metrics = {f"{name}_begin": 100.0, f"{name}_slope_low": low, f"{name}_slope_high": high}
    assert report.flat_within(metrics, name) == 2 and report.flat(metrics, name) == said


def test_what_a_process_holds_is_seen(tmp_path):
    before = processes.held(os.getpid())
    block = mmap.mmap(-1, 32_000_000, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never memory that was freed before
    block.write(bytes(range(250)) * 128_000)
    with open(tmp_path / "open", "wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        after = processes.held(os.getpid())
        assert after.open_files == before.open_files + 1
    assert after.anonymous_bytes - before.anonymous_bytes > 0.9 * len(block)
    assert after.resident_bytes >= after.anonymous_bytes and after.cpu_seconds >= before.cpu_seconds > 0
    assert processes.folder_bytes(tmp_path) >= 1 << 20


def test_the_time_of_the_yardstick_is_no_step_s(tmp_path):
    def yardstick():
        time.sleep(0.1)
        return 0.01

    config, found = configured(soak.Config, {"every_seconds": 0.001, "minutes": 1e9}), []
    with tqdm(disable=True) as bar:
        sampler = soak.Sampler(config, tmp_path, found, bar, yardstick)
        for step in (1, 2, 3):
            time.sleep(0.002)
            sampler(SimpleNamespace(totals={"steps": step}))
    assert all(sample["seconds_per_step"] < 0.05 for sample in found) and len(found) == 3
    assert found[-1]["step_over_yardstick"] == pytest.approx(found[-1]["seconds_per_step"] / 0.01)


@pytest.mark.slow
def test_the_yardstick_waits_in_a_process_that_ends_with_it():
    with Yardstick() as yardstick:
        process = yardstick.process
        before = processes.held(process.pid).cpu_seconds
        assert yardstick() > 0 and process.is_alive()
        assert processes.held(process.pid).cpu_seconds > before
    assert process.exitcode == 0


def test_weights_are_compared_bit_by_bit_and_by_norm():
    def run(loss, weight):
        points = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": loss}]
        return {"curves": {"train": points}, "metrics": {"steps": 2, "parameters": 3}}, {
            "a": torch.tensor(weight),
            "b": torch.ones(2),
        }

    same, _ = determinism.compare(run(1.0, [3.0]), run(1.0, [3.0]))
    assert (
        same["weights_that_differ"] == 0 == same["weights_relative_difference"]
        and same["first_step_that_differs"] is None
    )
    other, losses = determinism.compare(run(1.0, [3.0]), run(1.5, [3.5]))
    assert other["weights_that_differ"] == 1 and other["first_step_that_differs"] == 2
    assert other["weights_relative_difference"] == pytest.approx(0.5 / 11**0.5)
    assert [point["relative_difference"] for point in losses] == [0, 0.5] and other["loss_relative_difference"] == 0.5


def test_runs_that_cannot_be_here_or_that_fail_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    later = {"arms": {"cpu": {}, "gpu": {"keys": ["trainer.accelerator=gpu"]}}, "keys": TINY, "folder": str(tmp_path)}
    with pytest.raises(ConfigError, match="^trainer.accelerator: 'gpu' needs a GPU that PyTorch can use$"):
        determinism.run(configured(determinism.Config, later), tmp_path / "records" / "a.jsonl", progress=False)
    failed = subprocess.CompletedProcess([], 2, "", "run.py: error: why\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(Unfinished, match="ended with status 2: run.py: error: why$"):
        determinism.train(load_config(None, TINY), determinism.Arm(), tmp_path / "folder")
    assert not (tmp_path / "records").exists()


@pytest.mark.slow
def test_each_bench_records_what_its_table_shows(tmp_path, monkeypatch):
    config = configured(
        soak.Config, {"minutes": 0.02, "every_seconds": 0.05, "blocks": 4, "folder": str(tmp_path), "keys": TINY}
    )
    soak.run(config, tmp_path / "records" / "soak.jsonl", progress=False)
    keys = [*TINY, f"data.cache_dir={tmp_path}/corpora"]
    config = configured(checkpoint_times.Config, {"keys": keys, "steps": 2, "folder": str(tmp_path)})
    checkpoint_times.run(config, tmp_path / "records" / "checkpoint.jsonl", progress=False)
    monkeypatch.setattr(scale, "_elsewhere", lambda work, *rest: work(*rest))
    keys = ["data.mode=stream", "data.row_length=4096", "data.tokens_per_step=8192"]
    config = configured(
        scale.Config, {"documents": 500, "gigabytes": 0.0005, "steps": 2, "keys": keys, "folder": str(tmp_path)}
    )
    scale.run(config, tmp_path / "records" / "scale.jsonl", progress=False)
    records = {record["arm"]: record for record in read_records(tmp_path)}
    assert records["soak"]["metrics"]["steps"] == records["soak"]["curves"]["samples"][-1]["step"] > 0
    assert all(sample["step_over_yardstick"] > 0 for sample in records["soak"]["curves"]["samples"])
    behind = records["behind"]["metrics"]
    assert behind["checkpoint_bytes"] > 12 * behind["parameters"] and behind["copy_seconds"] < behind["write_seconds"]
    assert records["lengths"]["metrics"]["bytes"] == 2000 and records["tokens"]["metrics"]["steps"] == 2
    for kind, made in report.KINDS.items():
        tables = made.tables([record for record in records.values() if record["kind"] == kind])
        assert len(tables) == (kind != "determinism") and all(table.rows for table in tables)
    older = {name: value for name, value in records["soak"]["metrics"].items() if "yardstick" not in name}
    (section,) = build_sections([records["soak"] | {"metrics": older}], figures=False, kinds=report.KINDS)
    assert [len(table.rows) for table in section.tables] == [len(soak.WATCHED) - 1]
    (figure,) = report.soak_figures([records["soak"]])
    assert figure.png and figure.pdf
