"""The whole-model benches on a tiny case: every arm is right, recorded and tabulated; a wrong arm is not timed."""

import importlib.util
import json
import sys
import textwrap
import types
import weakref
from pathlib import Path

import pytest
import torch

from packmamba.bench import multi_gpu, steps
from packmamba.bench import speedup as bench
from packmamba.bench.arms import Documents, PeerLM, Scheme, feed
from packmamba.bench.breakdown import Breakdown, exclusive, family_of, sort_kernels
from packmamba.data.lengths import draw_lengths
from packmamba.errors import ConfigError
from packmamba.ops.mamba_ssm import _peer
from packmamba.results.record import BREAKDOWN, read_records
from packmamba.results.report import build_sections
from processes import fork_ranks, statuses

ARMS = ["single", "padded-256", "padded-longest", "padded-buckets", "packed-512-in_order", "packed-512-best_fit"]
TINY = {
    "models": ["130m"],
    "overrides": ["model.n_layer=2", "model.d_model=16", "model.d_state=4", "model.vocab_size=60", "trainer.threads=1"],
    "arms": ARMS,
    "breakdown_arms": ["padded-256", "packed-512-best_fit"],
    "step_arms": ["single", "padded-256", "packed-512-best_fit"],
    "distribution": "short",
    "documents": 100,
    "slots": 512,
    "batches": 2,
    "single_batches": 3,
    "rounds": 2,
    "dtype": "float32",
    "precision": "32-true",
    "peak_flops_per_second": 1e11,
    "row_lengths": [256, 512],
    "mean_lengths": [16, 64],
}


def run(tmp_path, **changes):
    bench.run({**TINY, **changes}, tmp_path / "records" / "speedup.jsonl", progress=False)
    return read_records(tmp_path)


def test_every_part_is_recorded(tmp_path):
    records = run(tmp_path)
    by_kind = {}
    for record in records:
        by_kind.setdefault((record["kind"], record["config"]["part"]), []).append(record)
    bare = by_kind["speedup", "forward_backward"]
    assert [record["arm"] for record in bare] == ARMS
    for record in bare:
        metrics = record["metrics"]
        assert metrics["loss_error"] <= bench.TOLERANCES["float32"] < metrics["real_tokens_per_second"]
        assert metrics["slots_per_second"] * (1 - metrics["padding_fraction"]) == pytest.approx(
            metrics["real_tokens_per_second"]
        )
    padding = {record["arm"]: record["metrics"]["padding_fraction"] for record in bare}
    assert padding["single"] == 0 < padding["packed-512-best_fit"] < padding["packed-512-in_order"]
    assert padding["padded-buckets"] < padding["padded-longest"] < padding["padded-256"]
    assert [record["arm"] for record in by_kind["speedup", "steps"]] == TINY["step_arms"]
    for part in ("forward_backward", "steps"):
        assert [record["arm"] for record in by_kind["breakdown", part]] == TINY["breakdown_arms"]
        for record in by_kind["breakdown", part]:
            metrics = record["metrics"]
            assert metrics["scan"] > 0 and metrics["conv"] > 0 and metrics["matrix products"] > 0
            assert sum(metrics[family] for family in BREAKDOWN) == pytest.approx(metrics["seconds"])
    assert [r["config"]["value"] for r in by_kind["growth", "row_length"]] == [256, 512]
    assert [r["config"]["value"] for r in by_kind["growth", "mean_length"]] == [16, 64]
    (section,) = build_sections(records)
    tables = {table.name: table for table in section.tables}
    assert section.tables[0].name == "headline" and len(tables["headline"].rows) == 1
    assert [row[1].text for row in tables["arms-130m"].rows] == ARMS
    assert len(tables["breakdown"].rows) == 4 and len(tables["growth-row-length"].rows) == 2
    best = tables["headline"].rows[0][1].text
    against = {row[4].text: row for row in tables["positions"].rows if row[1].text == best}
    assert against.keys() == {"padded-256", "padded-longest", "padded-buckets"}
    assert against["padded-256"][5].values[0] > against["padded-longest"][5].values[0] > 0
    assert {figure.name for figure in section.figures} == {"speedup", "breakdown", "growth"}
    assert not any("apart" in note for table in section.tables for note in table.notes)
    by_kind["speedup", "steps"][0]["commit"] = "0" * 40
    tables = {table.name: table for table in build_sections(records)[0].tables}
    for name, arms in (("headline", "130m single"), ("arms-130m", "single")):
        assert f"Steps and bare loop were run at different commits, apart: {arms}." in tables[name].notes


def test_long_work_shows_how_far_it_is(tmp_path, capsys):
    bench.run(TINY | {"row_lengths": [256], "mean_lengths": []}, tmp_path / "records" / "speedup.jsonl", progress=True)
    shown = capsys.readouterr().err
    for what in ("compares losses", "forward and backward", "growth", "optimizer steps"):
        assert f"{what}: 100%" in shown


def test_a_wrong_arm_is_not_timed(tmp_path, monkeypatch):
    """Here packed rows leak: the layout that the model is given is not the batch's."""
    loss = bench.MambaLitModule.loss
    monkeypatch.setattr(bench.MambaLitModule, "loss", lambda self, batch, boundary="leak": loss(self, batch, "leak"))
    with pytest.raises(RuntimeError, match="packed-512-in_order: losses are off by .*; nothing is timed"):
        run(tmp_path)
    assert not (tmp_path / "records").exists()


def test_every_scheme_holds_every_token_once():
    documents = Documents(draw_lengths("short", 200, 0), 60, 0)
    for name in ARMS:
        fed = feed(documents, Scheme.parse(name), 512)
        found = {}
        for batch, numbers in fed.all():
            assert batch.tokens.numel() <= 512
            parts = batch.tokens[batch.layout.documents >= 0].split(batch.layout.lengths.tolist())
            found |= dict(zip(numbers, parts, strict=True))
        assert all(found[i].tolist() == documents.document(i).tolist() for i in range(200)), name
        assert len(fed.sample(3)) == 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("single-graph", ("single", None, False, False, True)),
        ("padded-buckets", ("padded", None, True, False, False)),
        ("padded-2048-graph", ("padded", 2048, False, False, True)),
        ("packed-64-best_fit-graph", ("best_fit", 64, False, False, True)),
        ("mamba-ssm-packed-64-best_fit", ("best_fit", 64, False, True, False)),
    ],
)
def test_names_of_arms(name, expected):
    scheme = Scheme.parse(name)
    assert (scheme.strategy, scheme.row_length, scheme.buckets, scheme.peer, scheme.graph) == expected


@pytest.mark.parametrize(
    "name", ["mamba-ssm-single-graph", "packed-64-split", "packed-64-best_fit-graph-graph", "graph"]
)
def test_arms_that_there_are_not(name):
    with pytest.raises(ConfigError, match="expected single"):
        Scheme.parse(name)


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
    arms = ["single", "packed-512-best_fit", "single-graph", "packed-512-best_fit-graph"]
    c = bench.SpeedupBenchConfig(**{**TINY, "step_arms": arms, "breakdown_arms": arms, "rounds": 3})
    path = tmp_path / "records.jsonl"
    steps.measure(bench.Bench(c, "130m", torch.device("cpu"), path, False))
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


def test_steps_that_do_not_fit_into_memory_together_are_timed_alone(tmp_path, monkeypatch, capsys):
    take_turns, seen = steps.take_turns, []

    def take_few(configs, turns, progress):
        names = [config.data.strategy for config in configs]
        seen.append(names)
        if len(names) > 1 or names == ["padded"]:
            raise torch.OutOfMemoryError
        return take_turns(configs, turns, progress)

    monkeypatch.setattr(steps, "take_turns", take_few)
    arms = ["single", "padded-256", "packed-512-best_fit"]
    records = run(tmp_path, arms=[], breakdown_arms=[], step_arms=arms, parts=["steps"])
    assert [len(names) for names in seen] == [3, 1, 1, 1]
    assert [record["arm"] for record in records] == ["single", "packed-512-best_fit"]
    together, left_out = capsys.readouterr().err.splitlines()
    assert together == f"one after the other, 130m, {', '.join(arms)}, steps: do not fit into memory together"
    assert left_out == "left out, 130m, padded-256, steps: does not fit into memory"


def test_steps_have_the_memory_of_the_bare_loop(tmp_path, monkeypatch):
    """Its weights, which hold its gradients, are not referred to any more once memory is freed."""
    weights, alive, build = [], [], bench.Bench.build

    def note(self):
        module = build(self)
        weights.extend(weakref.ref(parameter) for parameter in module.parameters())
        return module

    def count(*_):
        alive.append(sum(weight() is not None for weight in weights))

    monkeypatch.setattr(bench.Bench, "build", note)
    monkeypatch.setattr(steps, "_measure", count)
    run(tmp_path, parts=["forward_backward", "steps"])
    assert weights and alive == [0]


def test_steps_that_do_not_fit_leave_their_memory(tmp_path, monkeypatch):
    """The next arm is timed when those that failed, and their trainer, are not referred to any more."""
    weights, alive, make = [], [], steps.MambaLitModule

    def note(*arguments):
        alive.append(sum(weight() is not None for weight in weights))
        module = make(*arguments)
        weights.extend(weakref.ref(parameter) for parameter in module.parameters())
        return module

    def fail(self, trainer, module, outputs, batch, index):
        module.kept = self
        raise torch.OutOfMemoryError

    monkeypatch.setattr(steps, "MambaLitModule", note)
    monkeypatch.setattr(steps.Watch, "on_train_batch_end", fail)
    arms = ["padded-256", "packed-512-best_fit"]
    changes = {"arms": [], "breakdown_arms": [], "step_arms": arms, "parts": ["steps"]}
    bench.run(TINY | changes, tmp_path / "records.jsonl", progress=False)
    assert weights and alive == [0, 0, 0]


def test_a_model_that_does_not_fit_is_left_out(tmp_path, monkeypatch, capsys):
    build = bench.Bench.build

    def build_small(self):
        if self.name == "370m":
            raise torch.OutOfMemoryError
        return build(self)

    monkeypatch.setattr(bench.Bench, "build", build_small)
    records = run(tmp_path, models=["370m", "130m"], parts=["forward_backward"])
    assert {record["config"]["model"] for record in records} == {"130m"}
    assert capsys.readouterr().err == "left out, 370m, what was not recorded before: does not fit into memory\n"


def test_no_profiler_outlives_what_does_not_fit(tmp_path, monkeypatch):
    """It would slow all that is timed after it."""
    end = steps.Watch.on_train_batch_end

    def fail(self, trainer, module, outputs, batch, index):
        if self._profiler is not None:
            raise torch.OutOfMemoryError
        end(self, trainer, module, outputs, batch, index)

    monkeypatch.setattr(steps.Watch, "on_train_batch_end", fail)
    changes = {"arms": ["padded-256"], "breakdown_arms": ["padded-256"], "step_arms": ["padded-256"], "rounds": 1}
    run(tmp_path, **changes, parts=["forward_backward", "breakdown", "steps"])
    assert not torch.autograd._profiler_enabled()


def test_ctrl_c_in_steps_is_one(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(steps.Watch, "on_train_batch_end", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, arms=[], breakdown_arms=[], parts=["steps"])


def test_growth_alone_is_measured(tmp_path):
    records = run(tmp_path, arms=[], breakdown_arms=[], parts=["growth"])
    assert [record["config"]["axis"] for record in records] == 2 * ["row_length"] + 2 * ["mean_length"]


def test_what_was_not_measured_alike_is_not_compared(tmp_path):
    """The latest counts, and those that were measured as it was."""
    records = run(tmp_path, parts=["forward_backward"], arms=ARMS[:2], breakdown_arms=[])
    again = json.loads(json.dumps(records[0]))
    assert [row[1].text for row in build_sections([*records, again])[0].tables[1].rows] == ARMS[:2]
    again["config"]["documents"] += 1
    assert [row[1].text for row in build_sections([*records, again])[0].tables[1].rows] == ARMS[:1]


def test_the_last_step_which_is_logged_is_in_no_turn_and_ranks_meet_before_none_of_them(tmp_path, monkeypatch):
    meet_before = []
    monkeypatch.setattr(steps, "stop_together", lambda trainer, every: meet_before.append(every))
    shared = bench.Bench(bench.SpeedupBenchConfig(**TINY), "130m", torch.device("cpu"), tmp_path / "r.jsonl", False)
    config = steps.step_config(shared, Scheme.parse("packed-512-best_fit"), 512, str(tmp_path))
    watch = steps.take_turns([config], [steps.Turn(0, 2, timed=False), steps.Turn(0, 1)])
    assert len(watch.losses[0]) == 4 and len(watch.seconds[0]) == 1 and meet_before == [4]


@pytest.mark.parametrize(("profiled_idle", "timed", "idle"), [(3.0, 20.0, 1.5), (9.0, 18.0, 3.0), (3.0, 11.0, 0.25)])
def test_no_more_is_idle_than_is_left_without_the_profiler_but_launches(tmp_path, profiled_idle, timed, idle):
    path = tmp_path / "records.jsonl"
    shared = bench.SpeedupBenchConfig(models=["130m"], experiment="x")
    found = Breakdown(
        {family: 0.0 for family in BREAKDOWN if family != "idle"} | {"scan": 12.0}, [], profiled_idle, 0.5
    )
    bench.Bench(shared, "130m", torch.device("cpu"), path, False).record_breakdown("packed", "steps", timed, found, 2)
    (record,) = map(json.loads, path.read_text().splitlines())
    assert record["metrics"]["idle"] == idle and record["metrics"]["scan"] == 6
    assert record["metrics"]["seconds"] == 6 + idle


def test_few_batches_stand_for_all():
    documents = Documents(draw_lengths("documents-2k", 4096, 0), 60, 0)
    for name, count in (("single", 16), ("padded-2048", 2), ("padded-longest", 2), ("packed-16384-best_fit", 2)):
        fed = feed(documents, Scheme.parse(name), 16384)
        mean = sum(batch.layout.num_tokens for batch in fed.sample(count)) / count
        assert mean == pytest.approx(fed.tokens_per_batch, rel=0.03), name


FAKES = {
    "modules/mamba_simple.py": """
        from packmamba.nn.mixer import PackedMamba as Mamba
    """,
    "modules/block.py": """
        import torch
        class Block(torch.nn.Module):
            def __init__(self, dim, mixer, mlp, norm, fused_add_norm, residual_in_fp32):
                super().__init__()
                self.norm, self.mixer = norm(dim), mixer(dim)
            def forward(self, hidden, residual=None):
                residual = hidden if residual is None else hidden + residual
                return self.mixer(self.norm(residual)), residual
    """,
    "ops/triton/layer_norm.py": """
        import torch
        class RMSNorm(torch.nn.RMSNorm):
            bias = None
            def __init__(self, dim):
                super().__init__(dim, eps=1e-5)
        def layer_norm_fn(hidden, weight, bias, residual, eps, is_rms_norm):
            return torch.nn.functional.rms_norm(hidden + residual, weight.shape, weight, eps)
    """,
}


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """A package with the peers' names, whose layers are ours without layouts: rows leak, as the peers' do."""
    for name, text in {"__init__.py": "raise ImportError", **FAKES}.items():
        path = tmp_path / "site" / "mamba_ssm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    from packmamba.ops.mamba_ssm import _peer

    _peer.cache_clear()
    yield
    _peer.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        del sys.modules[name]


def test_the_peers_arms_share_the_weights_and_leak(tmp_path, peers):
    arms = ["mamba-ssm-single", "mamba-ssm-padded-256", "mamba-ssm-packed-512-best_fit", "single"]
    records = run(tmp_path, arms=arms, breakdown_arms=[], parts=["forward_backward"])
    assert [record["arm"] for record in records] == arms
    assert records[2]["metrics"]["leak_error"] > 10 * bench.TOLERANCES["float32"], "the gate tells a leak apart"
    module = bench.Bench(
        bench.Config(**TINY | {"arms": arms}), "130m", torch.device("cpu"), tmp_path / "x", False
    ).build()
    assert set(map(id, PeerLM(module.model).parameters())) == set(map(id, module.model.parameters()))


def test_peers_that_are_missing_are_left_out(tmp_path, capsys, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "mamba_ssm" else real(name, *more)
    )
    monkeypatch.delitem(sys.modules, "mamba_ssm", raising=False)
    _peer.cache_clear()
    records = run(tmp_path, arms=["mamba-ssm-single", "single"], breakdown_arms=[], parts=["forward_backward"])
    assert [record["arm"] for record in records] == ["single"]
    assert "left out, mamba-ssm-single: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("void (anonymous namespace)::backward<true, true>(ScanParams)", "scan"),
        ("void (anonymous namespace)::forward<__nv_bfloat16, 4, 4>(ConvParams)", "conv"),
        ("triton_red_fused__log_softmax__to_copy_arange_eq_exp_gather_neg", "loss"),
        ("void at::native::(anonymous namespace)::sum_and_scatter<float, long>(...)", "norm and elementwise"),
        ("void selective_scan_bwd_kernel<...>", "scan"),
        ("void causal_conv1d_channellast_fwd_kernel<...>", "conv"),
        ("triton_per_fused_add_mul_0", "norm and elementwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
    ],
)
def test_families_of_kernels(name, family):
    assert family_of(name) == family


def test_a_gpus_time_is_kernels_and_gaps(monkeypatch):
    gpu = torch.autograd.DeviceType.CUDA

    def event(name, start, end, device=gpu):
        return types.SimpleNamespace(
            name=name, device_type=device, time_range=types.SimpleNamespace(start=start, end=end)
        )

    events = [event("ssm", 0.0, 40.0), event("gemm", 44.0, 60.0), event("gemm", 100.0, 104.0)]
    events.append(event("launch", 0.0, 90.0, torch.autograd.DeviceType.CPU))
    found = sort_kernels(types.SimpleNamespace(events=lambda: events), True, 110e-6)
    assert found.families["scan"] == pytest.approx(40e-6) and found.families["matrix products"] == pytest.approx(20e-6)
    assert found.idle == pytest.approx(50e-6) and found.gaps == pytest.approx(4e-6)


def test_kernels_that_wait_for_each_other_count_once():
    events = [
        (3.0, 7.0, "reduce"),
        (0.0, 5.0, "backward"),
        (1.0, 2.0, "inside"),
        (9.0, 10.0, "backward"),
        (40.0, 41.0, "reduce"),
    ]
    assert exclusive(events) == ({"backward": 6.0, "inside": 0.0, "reduce": 3.0}, 2.0), "30 us are no launch"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ["packed"]}, "arms: expected single"),
        ({"arms": ["packed-100-best_fit"], "breakdown_arms": []}, "arms: packed-100-best_fit"),
        ({"parts": ["all"]}, "parts: expected of"),
        ({"models": ["13b"]}, "known sizes"),
        ({"overrides": ["model.dmodel=1"]}, "unknown key"),
        ({"dtype": "float16"}, "dtype"),
        ({"breakdown_arms": ["split"]}, "breakdown_arms"),
        ({"step_arms": ["mamba-ssm-single"]}, "step_arms: expected arms of ours"),
        ({"rounds": 0}, "rounds"),
        (
            {"step_arms": ["packed-100-best_fit"]},
            "step_arms: packed-100-best_fit: .*more than the data.row_length=100 slots",
        ),
        ({"step_arms": ["packed"]}, "step_arms: expected single"),
        ({"arms": [], "parts": ["breakdown"]}, "breakdown_arms: expected of arms .none., got"),
        ({"parts": ["steps"], "step_arms": []}, "expected something to do"),
        ({"models": []}, "expected something to do"),
        ({"models": ["130m", "130m"]}, "models: expected each once, got '130m' 2 times"),
        ({"growth_model": "13m"}, "known sizes"),
        ({"row_lengths": [512, 0]}, "row_lengths: expected at least 1, got 0"),
        ({"peak_flops_per_second": 0.0}, "peak_flops_per_second: expected above 0"),
        ({"precision": "half"}, "precision: expected of 32-true"),
        ({"seed": -1}, "seed"),
        ({"overrides": ["trainer.devices=2"]}, "overrides: expected model.<key>=.*, got 'trainer.devices=2'"),
        ({"overrides": ["model=370m"]}, "overrides: expected model"),
        ({"overrides": ["optimizer.lr=-1"]}, "optimizer.lr"),
        ({"overrides": ["model.vocab_size=null"]}, "overrides: model.vocab_size: expected a number"),
        ({"overrides": ["ops.backend=cuda"]}, "overrides: ops.backend"),
    ],
)
def test_refuses_before_it_measures(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, **change)
    assert not (tmp_path / "records").exists()


MULTI = {
    "model": "130m",
    # Steps large enough for a wrong gradient to be seen in the next loss.
    "overrides": [*TINY["overrides"], "optimizer.warmup_steps=0", "optimizer.lr=0.01"],
    "arms": ["ddp-1", "ddp-2", "fsdp2-2"],
    "scheme": "packed-512-best_fit",
    "distribution": "short",
    "documents": 400,
    "slots": 512,
    "same_steps": 3,
    "rounds": 2,
    "precision": "32-true",
    "accelerator": "cpu",
}


RUN = multi_gpu._run


def torchrun(command, env, timeout_seconds):
    """torchrun itself for one process, its ranks for several, which start at once."""
    ranks = int(next(part for part in command if part.startswith("--nproc-per-node=")).partition("=")[2])
    if ranks == 1:
        return RUN(command, env, timeout_seconds)
    job = json.loads(command[-1])
    output = Path(job["folder"]) / "output.txt"
    done = statuses(*fork_ranks(ranks, multi_gpu._work, job, output=output))
    return max(map(abs, done)), output.read_text()


def test_every_strategy_has_the_loss_of_one_device(tmp_path, monkeypatch):
    monkeypatch.setattr(multi_gpu, "_run", torchrun)
    multi_gpu.run(MULTI, tmp_path / "records" / "multi_gpu.jsonl", progress=False)
    records = read_records(tmp_path)
    assert [record["arm"] for record in records] == MULTI["arms"]
    alone = [point["loss"] for point in records[0]["curves"]["loss"]]
    assert alone[0] != alone[1]
    for record in records:
        assert [point["loss"] for point in record["curves"]["loss"]] == pytest.approx(alone, rel=1e-5)
        slots = record["metrics"]["slots_per_second"] * record["metrics"]["seconds_per_step"]
        assert slots == pytest.approx(512 * record["config"]["devices"])
    (section,) = build_sections(records)
    (table,) = section.tables
    assert [(row[0].text, row[1].text) for row in table.rows] == [("ddp", "1"), ("ddp", "2"), ("fsdp2", "2")]
    assert [figure.name for figure in section.figures] == ["multi-gpu-130m"]


def test_an_arm_with_another_loss_is_not_recorded(tmp_path, monkeypatch):
    results = {"losses": [4.0], "seconds": [1.0, 1.0], "slots": [512, 512], "tokens": [500, 500],
               "peak_memory_bytes": None, "corpus": "short", "config": {}}  # fmt: skip
    arms = iter([results, results | {"losses": [4.001]}])
    monkeypatch.setattr(multi_gpu, "_launch", lambda *_: next(arms))
    with pytest.raises(RuntimeError, match="ddp on 2 devices: losses .* of the same documents are not"):
        multi_gpu.run(MULTI, tmp_path / "records" / "multi_gpu.jsonl", progress=False)
    assert [record["arm"] for record in read_records(tmp_path)] == ["ddp-1"]


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
    with pytest.raises(ConfigError, match="timeout_seconds: ddp on 1 devices took longer than 5 s"):
        multi_gpu.run(MULTI | {"timeout_seconds": 5}, tmp_path / "records.jsonl", progress=False)
    assert (tmp_path / "begun").exists() and (tmp_path / "ended").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"arms": ["fsdp-2"]}, "arms: expected strategy-devices"), ({"arms": []}, "at least one"),
     ({"accelerator": "gpu", "arms": ["ddp-99"]}, "arms: 99 devices need as many GPUs; PyTorch sees"),
     ({"scheme": "mamba-ssm-single"}, "scheme"), ({"precision": "16-mixed"}, "precision"),
     ({"scheme": "packed-512-best_fit-graph"}, "scheme: expected one of ours, and not as a graph"),
     ({"scheme": "packed"}, "scheme: expected single"), ({"accelerator": "gup"}, "accelerator: expected gpu or cpu"),
     ({"distribution": "shrt"}, "distribution"), ({"slots": 0}, "slots"), ({"timeout_seconds": 0}, "timeout_seconds")],
)  # fmt: skip
def test_several_devices_are_refused_before_any_work(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        multi_gpu.run(MULTI | change, tmp_path / "records.jsonl", progress=False)
