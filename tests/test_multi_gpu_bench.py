"""The bench of several devices: one device's loss, no rank left behind, refusals."""

import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed.run
from configured import configured
from whole_models import TINY

from experiments.speedup import multi_gpu
from experiments.speedup.report import KINDS
from packmamba.errors import ConfigError
from packmamba.records import read_records
from packmamba.report.html import build_sections
from processes import fork, fork_ranks, statuses

MULTI = {
    "model": "130m",
    # Steps large enough for a wrong gradient to be seen in the next loss.
    "overrides": [*TINY["overrides"], "optimizer.warmup_steps=0", "optimizer.lr=0.01"],
    "arms": {
        "ddp-1": {"parallel": "ddp", "devices": 1},
        "ddp-2": {"parallel": "ddp", "devices": 2},
        "fsdp2-2": {"parallel": "fsdp2", "devices": 2},
    },
    "strategy": "best_fit",
    "row_length": 512,
    "distribution": "short",
    "documents": 400,
    "slots": 512,
    "same_steps": 3,
    "rounds": 2,
    "precision": "32-true",
    "accelerator": "cpu",
    "num_workers": 0,
}


RUN = multi_gpu._run


def run(path, **changes):
    multi_gpu.run(configured(multi_gpu.Config, MULTI, **changes), path, progress=False)


def torchrun(command, env, timeout_seconds):
    """torchrun itself for one process, its ranks for several; all forked, as importing takes seconds."""
    python, *module, ranks = command[:5]
    assert [python, *module] == [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = json.loads(command[-1])
    output = Path(job["folder"]) / "output.txt"
    count = int(ranks.removeprefix("--nproc-per-node="))
    if count == 1:
        done = statuses(fork(torch.distributed.run.main, command[3:], output=output, **env))
    else:
        done = statuses(*fork_ranks(count, multi_gpu._work, job, output=output))
    return max(map(abs, done)), output.read_text()


@pytest.mark.slow
def test_every_strategy_has_the_loss_of_one_device(tmp_path, monkeypatch):
    monkeypatch.setattr(multi_gpu, "_run", torchrun)
    run(tmp_path / "records" / "multi_gpu.jsonl")
    records = read_records(tmp_path)
    assert [record["arm"] for record in records] == list(MULTI["arms"])
    alone = [point["loss"] for point in records[0]["curves"]["loss"]]
    assert alone[0] != alone[1]
    for record in records:
        assert [point["loss"] for point in record["curves"]["loss"]] == pytest.approx(alone, rel=1e-5)
        slots = record["metrics"]["slots_per_second"] * record["metrics"]["seconds_per_step"]
        assert slots == pytest.approx(512 * record["config"]["devices"])
    (section,) = build_sections(records, kinds=KINDS)
    (table,) = section.tables
    assert [(row[0].text, row[1].text) for row in table.rows] == [("ddp", "1"), ("ddp", "2"), ("fsdp2", "2")]
    assert [figure.name for figure in section.figures] == ["multi-gpu-130m"]


def test_an_arm_with_another_loss_is_not_recorded(tmp_path, monkeypatch):
    results = {"losses": [4.0], "seconds": [1.0, 1.0], "slots": [512, 512], "tokens": [500, 500],
               "peak_memory_bytes": None, "corpus": "short", "config": {}}  # fmt: skip
    arms = iter([results, results | {"losses": [4.001]}])
    monkeypatch.setattr(multi_gpu, "_launch", lambda *_: next(arms))
    with pytest.raises(RuntimeError, match="ddp-2: losses .* of the same documents are not"):
        run(tmp_path / "records" / "multi_gpu.jsonl")
    assert [record["arm"] for record in read_records(tmp_path)] == ["ddp-1"]


@pytest.mark.slow
def test_an_arm_that_takes_too_long_is_told_to_end(tmp_path, monkeypatch):
    """As torchrun must be, whose ranks would outlive it."""
    waits = f"""
        import signal, sys, time
        def end(*_):
            open({str(tmp_path / "ended")!r}, "w")
            sys.exit()
        signal.signal(signal.SIGTERM, end)
        open({str(tmp_path / "begun")!r}, "w")
        time.sleep(60)
    """

    def wait(command, env, timeout_seconds):
        return RUN([sys.executable, "-c", textwrap.dedent(waits)], env, timeout_seconds)

    monkeypatch.setattr(multi_gpu, "_run", wait)
    with pytest.raises(ConfigError, match="timeout_seconds: ddp-1 took longer than 3 s"):
        run(tmp_path / "records.jsonl", timeout_seconds=3)
    assert (tmp_path / "begun").exists() and (tmp_path / "ended").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"arms": {"a": {"parallel": "fsdp"}}}, "arms.a.parallel: expected one of .*, got .fsdp."), ({"arms": {}}, "at least one"),
     ({"arms": {"a": {"devices": 0}}}, "arms.a.devices: expected at least 1"), ({"precision": "16-mixed"}, "precision"),
     ({"strategy": "packed"}, "strategy: expected one of"), ({"row_length": None}, "row_length: strategy best_fit"),
     ({"row_length": 100}, "row_length: .*more than the data.row_length=100"), ({"row_length": 1024}, "slots=512, got 1024"),
     ({"accelerator": "gup"}, "accelerator: expected one of gpu, cpu"), ({"distribution": "shrt"}, "distribution"),
     ({"slots": 0}, "slots"), ({"timeout_seconds": 0}, "timeout_seconds"), ({"model": "13b"}, "known sizes")],
)  # fmt: skip
def test_several_devices_are_refused_as_they_are_read(change, message):
    with pytest.raises(ConfigError, match=message):
        configured(multi_gpu.Config, MULTI, **change)


def test_as_many_devices_as_there_are(tmp_path):
    with pytest.raises(ConfigError, match="arms: 99 devices need as many GPUs; PyTorch sees"):
        run(tmp_path / "records.jsonl", accelerator="gpu", arms={"ddp-99": {"devices": 99}})
