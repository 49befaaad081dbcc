"""Whole optimizer steps of the whole-model bench: turns, and what does not fit into memory."""

import json
import types
import weakref

import pytest
import torch
from configured import configured
from whole_models import BARE, STEPS, TINY, run, some, tiny_model

from experiments.speedup import steps
from experiments.speedup import whole_models as bench
from experiments.speedup.arms import Arm
from experiments.speedup.breakdown import Breakdown
from experiments.speedup.config import Config
from experiments.speedup.model import Model
from experiments.speedup.report_breakdown import FAMILIES as BREAKDOWN


@pytest.mark.slow
def test_arms_take_their_turns_as_they_are_named(tmp_path, monkeypatch):
    """Graphs apart from the others, after a warm-up on all that they are timed on; breakdowns are of one step."""
    seen = []

    def take_turns(configs, turns, progress):
        seen.append(([config.trainer.cuda_graphs for config in configs], turns))
        arms = range(len(configs))
        found = Breakdown({family: 0.0 for family in BREAKDOWN if family != "idle"} | {"scan": 12.0}, [], 0.0)
        return types.SimpleNamespace(
            seconds=[[1.0]] * len(arms), slots=[[512.0]] * len(arms), peaks=[None] * len(arms), profiles={0: found}
        )

    monkeypatch.setattr(steps, "take_turns", take_turns)
    arms = some("single", "packed-512-best_fit", parts=[STEPS, "breakdown"])
    arms |= {f"{name}-graph": arm | {"graphs": True} for name, arm in arms.items()}
    path = tmp_path / "records.jsonl"
    steps.measure(tiny_model(path, arms=arms, rounds=3))
    assert [graphs for graphs, _ in seen] == [[False, False], [True, True]]
    for (graphs, turns), counts in zip(seen, ([1, 4], [4, 4])):
        warm_up = [turn.steps for turn in turns if not turn.timed and not turn.profiled]
        assert warm_up == ([16, 16] if graphs[0] else [4, 4])
        assert [turn.steps for turn in turns if turn.timed] == counts * 3
        assert [turn.steps for turn in turns if turn.profiled] == counts
        order = steps.Turns([range(99), range(99)], turns).order
        assert [step for arm, step in order if arm == 1] == [*range(warm_up[1]), *range(4 * counts[1])]
        watch = steps.Watch(
            turns, [types.SimpleNamespace(trainer=types.SimpleNamespace(cuda_graphs=g)) for g in (True, False)]
        )
        module = types.SimpleNamespace(device=torch.device("cpu"), cuda_graphs=None)
        for index, (arm, _) in enumerate(order[: -sum(counts)]):  # but those that are profiled
            watch.on_train_batch_start(None, module, None, index)
            assert module.cuda_graphs is (arm == 0)
    records = map(json.loads, path.read_text().splitlines())
    found = {r["arm"]: r["metrics"]["scan"] for r in records if r["kind"] == "breakdown"}
    assert found == {"single": 12.0, "single-graph": 3.0}


@pytest.mark.slow
def test_steps_that_do_not_fit_into_memory_together_are_timed_alone(tmp_path, monkeypatch, capsys):
    take_turns, seen = steps.take_turns, []

    def take_few(configs, turns, progress):
        names = [config.data.strategy for config in configs]
        seen.append(names)
        if len(names) > 1 or names == ["padded"]:
            raise torch.OutOfMemoryError
        return take_turns(configs, turns, progress)

    monkeypatch.setattr(steps, "take_turns", take_few)
    arms = some("single", "padded-256", "packed-512-best_fit")
    records = run(tmp_path, arms=arms, parts=[STEPS], rounds=1)
    assert [len(names) for names in seen] == [3, 1, 1, 1]
    assert [record["arm"] for record in records] == ["single", "packed-512-best_fit"]
    together, left_out = capsys.readouterr().err.splitlines()
    assert together == f"one after the other, 130m, {', '.join(arms)}, steps: do not fit into memory together"
    assert left_out == "left out, 130m, padded-256, steps: does not fit into memory"


@pytest.mark.slow
def test_steps_have_the_memory_of_the_bare_loop(tmp_path, monkeypatch):
    """Its weights, which hold its gradients, are not referred to any more once memory is freed."""
    weights, alive, build = [], [], Model.build

    def note(self):
        module = build(self)
        weights.extend(weakref.ref(parameter) for parameter in module.parameters())
        return module

    def count(*_):
        alive.append(sum(weight() is not None for weight in weights))

    monkeypatch.setattr(Model, "build", note)
    monkeypatch.setattr(steps, "_measure", count)
    run(tmp_path, parts=[BARE, STEPS])
    assert weights and alive == [0]


@pytest.mark.slow
def test_steps_that_do_not_fit_leave_their_memory(tmp_path, monkeypatch):
    """The next arm is timed when those that failed, and their trainer, are not referred to any more."""
    weights, alive, make = [], [], steps.PackedLitModule

    def note(*arguments):
        alive.append(sum(weight() is not None for weight in weights))
        module = make(*arguments)
        weights.extend(weakref.ref(parameter) for parameter in module.parameters())
        return module

    def fail(self, trainer, module, outputs, batch, index):
        module.kept = self
        raise torch.OutOfMemoryError

    monkeypatch.setattr(steps, "PackedLitModule", note)
    monkeypatch.setattr(steps.Watch, "on_train_batch_end", fail)
    bench.run(
        configured(Config, TINY, arms=some("padded-256", "packed-512-best_fit"), parts=[STEPS], rounds=1),
        tmp_path / "records.jsonl",
        progress=False,
    )
    assert weights and alive == [0, 0, 0]


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_left_out(tmp_path, monkeypatch, capsys):
    build = Model.build

    def build_small(self):
        if self.name == "370m":
            raise torch.OutOfMemoryError
        return build(self)

    monkeypatch.setattr(Model, "build", build_small)
    records = run(tmp_path, models=["370m", "130m"], parts=[BARE])
    assert {record["config"]["model"] for record in records} == {"130m"}
    assert capsys.readouterr().err == "left out, 370m, what was not recorded before: does not fit into memory\n"


@pytest.mark.slow
def test_no_profiler_outlives_what_does_not_fit(tmp_path, monkeypatch):
    """It would slow all that is timed after it."""
    end = steps.Watch.on_train_batch_end

    def fail(self, trainer, module, outputs, batch, index):
        if self._profiler is not None:
            raise torch.OutOfMemoryError
        end(self, trainer, module, outputs, batch, index)

    monkeypatch.setattr(steps.Watch, "on_train_batch_end", fail)
    run(tmp_path, arms=some("padded-256"), rounds=1, parts=[BARE, "breakdown", STEPS])
    assert not torch.autograd._profiler_enabled()


@pytest.mark.slow
def test_ctrl_c_in_steps_is_one(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(steps.Watch, "on_train_batch_end", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, parts=[STEPS])


def test_the_last_step_which_is_logged_is_in_no_turn_and_ranks_meet_before_none_of_them(tmp_path, monkeypatch):
    meet_before = []
    monkeypatch.setattr(steps, "leave_signals", meet_before.append)
    config = steps.step_config(tiny_model(tmp_path / "r.jsonl"), Arm("best_fit", 512), 512, str(tmp_path))
    watch = steps.take_turns([config], [steps.Turn(0, 2, timed=False), steps.Turn(0, 1)])
    assert len(watch.losses[0]) == 4 and len(watch.seconds[0]) == 1 and len(meet_before) == 1
