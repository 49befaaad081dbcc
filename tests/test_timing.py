"""The one clock: turns, the gate, spreads, and on a GPU events behind a wait."""

import time

import numpy as np
import pytest
import torch

from packmamba import timing


def test_arms_take_turns_after_the_warm_up(capsys):
    seen = []

    def arm(name):
        return lambda turn: seen.append(name + str(turn)) or turn

    samples = timing.take_turns(
        {"a": arm("a"), "b": arm("b"), "slow": arm("s")}, 3, warm_up=2, at_most={"slow": 1}, bar="what takes long"
    )
    assert " ".join(seen) == "a0 b0 s0 a1 b1 s1 a2 b2 s2 a3 b3 a4 b4"
    assert samples == {"a": [2, 3, 4], "b": [2, 3, 4], "slow": [2]}
    assert "what takes long: 100%" in capsys.readouterr().err


def test_nothing_is_timed_where_the_gate_raises():
    def gate(name):
        seen.append(name)
        if name == "b":
            raise RuntimeError("b is off")

    seen = []
    with pytest.raises(RuntimeError, match="b is off"):
        timing.take_turns(dict.fromkeys("abc", lambda turn: seen.append(turn)), 1, gate=gate)
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


def test_spread_is_the_interquartile_range():
    values = np.random.default_rng(0).normal(size=9)
    ordered = sorted(values)
    assert timing.spread(values) == pytest.approx(ordered[6] - ordered[2])
    assert timing.spread([3.0]) == 0 and timing.median([1.0, 2.0, 9.0]) == 2


def test_seconds_of_a_call():
    assert 0.02 <= timing.seconds(lambda: time.sleep(0.02)) < 1
    assert timing.PeakMemory("cpu").bytes() is None


@pytest.mark.gpu
def test_phases_are_timed_on_the_device_and_the_host_is_not():
    """The second phase is ten times the first; what is before the first yield, and the host's sleep, do not count."""
    x = torch.randn(4096, 4096, device="cuda")

    def run():
        [x @ x for _ in range(50)]
        yield
        x @ x
        time.sleep(0.002)
        yield
        [x @ x for _ in range(10)]
        yield

    wait = timing.launch_cycles(run)
    assert wait > 2 * 0.002 * timing.clock_hz()
    first, second = timing.device_seconds([run() for _ in range(5)], wait)
    assert 0 < first < 0.5 * second and second == pytest.approx(10 * first, rel=0.5)


@pytest.mark.gpu
def test_peak_memory_counts_from_when_it_was_made():
    held = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    peak = timing.PeakMemory("cuda")
    torch.empty(2**22, dtype=torch.uint8, device="cuda")
    assert peak.more() == 2**22 and peak.bytes() >= 2**22 + held.numel()


def test_programs_beside_this_one_are_noticed(monkeypatch):
    reads = iter([(10.0, 50.0), (12.0, 53.0), (0.0, 0.0), (1.0, 0.0)])
    monkeypatch.setattr(timing.OtherPrograms, "_read", lambda self: next(reads))
    assert timing.OtherPrograms().cores() == 1.5, "3 s in 2 s"
    assert timing.OtherPrograms().cores() is None
    monkeypatch.undo()
    assert 0 <= timing.OtherPrograms().cores() < 1000
