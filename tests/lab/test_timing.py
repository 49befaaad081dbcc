"""The one clock: turns, the gate, spreads, and on a GPU events behind a wait."""

import time

import pytest
import torch

from experiments import timing
from experiments.common import PeakMemory


def test_arms_take_turns_after_the_warm_up(capsys):
    seen = []
    arms = {name: lambda turn, name=name: seen.append(f"{name}{turn}") or turn for name in ("a", "b", "slow")}
    samples = timing.take_turns(arms, 3, warm_up=2, at_most={"slow": 1}, bar="what takes long")
    assert " ".join(seen) == "a0 b0 slow0 a1 b1 slow1 a2 b2 slow2 a3 b3 a4 b4"
    assert samples == {"a": [2, 3, 4], "b": [2, 3, 4], "slow": [2]}
    assert "what takes long: 100%" in capsys.readouterr().err


def test_nothing_is_timed_where_the_gate_raises():
    def gate(name):
        seen.append(name)
        if name == "b":
            raise RuntimeError("b is off")

    seen = []
    with pytest.raises(RuntimeError, match="b is off"):
        timing.take_turns(dict.fromkeys("abc", seen.append), 1, gate=gate)
    assert seen == ["a", "b"]


def test_an_arm_that_does_not_fit_is_left_out_and_the_others_go_on():
    def large(turn):
        if turn:
            raise torch.OutOfMemoryError
        return turn

    arms, names = {"large": large, "small": lambda turn: turn}, []
    assert timing.take_turns(arms, 2, left_out=names.append) == {"small": [1, 2]} and names == ["large"]
    with pytest.raises(torch.OutOfMemoryError):
        timing.take_turns(arms, 2)


def test_seconds_and_spread():
    assert timing.spread([9.0, 1.0, 2.0, 4.0, 3.0]) == 2 and timing.spread([3.0]) == 0
    assert 0.02 <= timing.seconds(lambda: time.sleep(0.02)) < 1
    assert PeakMemory("cpu").bytes() is None


@pytest.mark.gpu
def test_phases_are_timed_on_the_device_and_the_host_is_not():
    """The second phase is ten times the first; what is before the first yield, and the host's
    sleep, do not count.
    """
    from experiments.operators.gpu import clock_hz, device_seconds, launch_cycles

    x = torch.randn(4096, 4096, device="cuda")

    def run():
        [x @ x for _ in range(50)]
        yield
        x @ x
        time.sleep(0.002)
        yield
        [x @ x for _ in range(10)]
        yield

    wait = launch_cycles(run)
    assert wait > 2 * 0.002 * clock_hz()
    first, second = device_seconds([run() for _ in range(5)], wait)
    assert 0 < first < 0.5 * second and second == pytest.approx(10 * first, rel=0.5)


@pytest.mark.gpu
def test_peak_memory_counts_from_when_it_was_made():
    held = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    peak = PeakMemory("cuda")
    torch.empty(2**22, dtype=torch.uint8, device="cuda")
    assert peak.held >= held.numel() and peak.bytes() == peak.held + 2**22
