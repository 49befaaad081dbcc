"""Each bench on a tiny case on a CPU: every arm is recorded and tabulated; a wrong arm is not
timed.
"""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from configured import configured
from torch import nn

import run
from experiments.by_name import find, kinds_of, load_bench
from experiments.operators import cpu, gpu, gpu_implementations
from experiments.operators.arms import CPU_ARMS, GPU_ARMS
from experiments.packing import bench as packing
from experiments.parity.reproduce import GRADIENTS
from experiments.scoring import bench as scoring
from experiments.speedup import bench as speedup
from experiments.speedup.model import TOLERANCES, Arm, Config, exclusive, feed, random_documents, sort_kernels
from experiments.speedup.report import FAMILIES
from experiments.tasks import bench as tasks
from made_records import read_rows
from packmamba import SequenceLayout, ops
from packmamba.data.lengths import draw_lengths
from packmamba.data.packing import STRATEGIES, plan_rows
from packmamba.evaluation import Score
from packmamba.lab.records import read_records
from packmamba.lab.report.html import build_sections
from packmamba.lab.report.tables import write_table
from packmamba.nn.mixers.mamba2 import PackedMamba2
from packmamba.ops import custom_op
from packmamba.training.boundary import Leak
from packmamba.training.lit_module import PackedLitModule

pytestmark = pytest.mark.slow


def tables(question, records):
    sections = build_sections(records, figures=False, kinds=kinds_of(find(question), records))
    return {table.name: table for section in sections for table in section.tables}


def records_of(bench, config, folder):
    """Run a bench; return its records."""
    bench(config, folder / "records.jsonl", progress=False)
    return read_records(folder)


CPU = {"tokens": 96, "shortest": 3, "longest": 30, "channels": 24, "states": 4, "conv_tokens": 64, "conv_channels": 40}
CPU |= {"threads": 1, "rounds": 3, "slow_rounds": 2}


def test_operators_on_a_cpu(tmp_path, monkeypatch):
    names = ("multiply_adds", "exponentials", "copy_bytes", "copy_to_new_bytes")
    # no arm is faster, whatever else runs here
    rates = {f"{name}_per_second": 1e15 for name in names}
    monkeypatch.setattr(cpu, "machine_rates", lambda: rates)
    records = records_of(cpu.run, configured(cpu.Config, CPU), tmp_path)
    expected = [*itertools.product(("scan", "conv"), CPU_ARMS)]
    assert [(record["config"]["operator"], record["arm"]) for record in records] == expected
    for record in records:
        assert CPU_ARMS[record["arm"]].fields().items() <= record["config"].items()
        assert record["metrics"]["seconds_median"] > record["metrics"]["bound_seconds"] > 0
    assert len(tables("operators", records)["operators-ssm-pack"].rows) == len(CPU_ARMS)


def test_a_wrong_operator_is_not_timed(tmp_path, monkeypatch):
    real = custom_op.KERNELS["cpu"]["ssm_forward"]

    def wrong(arguments):
        real(arguments)
        arguments["y"].mul_(1.001)

    monkeypatch.setitem(custom_op.KERNELS["cpu"], "ssm_forward", wrong)
    with pytest.raises(RuntimeError, match="scan, cpu: y is off"):
        cpu.run(configured(cpu.Config, CPU, arms=["cpu"]), tmp_path / "records.jsonl", progress=False)
    assert not (tmp_path / "records.jsonl").exists()


def scan(u, delta, A, B, C, D, z, bias, softplus, layout=None):
    rows = [t.transpose(1, 2).contiguous() for t in (u, delta, B[:, 0], C[:, 0])]
    options = {"z": z.transpose(1, 2).contiguous(), "delta_bias": bias, "delta_softplus": True, "backend": "reference"}
    return ops.ssm_pack(*rows[:2], A, *rows[2:], D, **options).transpose(1, 2)


def peer_forward(*arguments):
    y = scan(*arguments)
    return y, torch.zeros(()), y


def convolve(x, weight, bias, seq_idx, activation):
    layout = SequenceLayout.from_seq_idx(seq_idx)
    y = ops.conv1d_pack(x.transpose(1, 2), weight, bias, layout=layout, activation=activation, backend="reference")
    return y.transpose(1, 2)


def test_operators_of_a_gpu_against_float64():
    """Run the GPU's bench as far as a CPU can, with stand-ins for the peers' kernels."""
    # of the initial states: three channels' rounding may pass the limit by chance
    torch.manual_seed(0)
    layout, some = SequenceLayout.from_lengths([[40, 1, 33, 26]], row_length=100), torch.tensor([0, 7, 63])
    inputs = gpu_implementations.Inputs.random(100, 128, 0, "cpu", torch.bfloat16)
    names = ("scan", "scan-states", "ssd", "conv1d", "projections")
    made, references = gpu_implementations.build({name: GPU_ARMS[name] for name in names}, inputs, some, 48)
    peer = types.SimpleNamespace(fwd=peer_forward, bwd=lambda *arguments: (arguments[8],))
    for packing_ in ("unpacked", "by-document", "padded"):
        made[f"mamba-ssm-{packing_}"] = gpu_implementations.mamba(peer, packing_, inputs, 48)
    made["causal-conv1d"] = gpu_implementations.causal_conv(convolve, inputs)
    errors = gpu.check(made, references, layout, some, gpu.TOLERANCES["bfloat16"])
    assert errors.keys() == made.keys() - {"projections"} and all(0 < output < 1e-2 for output, _ in errors.values())
    counts = {"scan": 8, "scan-states": 9, "ssd": 5, "conv1d": 3, "projections": 8, "causal-conv1d": 3}
    for name, count in counts.items():
        prepared = made[name].prepare(layout)
        assert len(made[name].backward(made[name].forward(prepared), prepared)) == count
    arm = made["causal-conv1d"]
    off = lambda *arguments: arm.output(*arguments) * 1.02
    wrong = gpu_implementations.Implementation(arm.forward, None, arm.prepare, off, arm.expects)
    with pytest.raises(RuntimeError, match="x: output is off"):
        gpu.check({"x": wrong}, references, layout, some, gpu.TOLERANCES["bfloat16"])
    rows = gpu.draw_rows("documents-2k", 5000, 20, 0)
    assert len(rows) == 20 and all(sum(row) == 5000 for row in rows) and rows[0] != rows[1]
    assert gpu.draw_rows("300", 700, 20, 0) == [[300, 300, 100]]


@pytest.mark.gpu
def test_operators_on_a_gpu(tmp_path):
    here = ("packmamba", "packmamba-ssd", "torch")
    ours = [name for name, arm in GPU_ARMS.items() if arm.implementation in here and not arm.per_token]
    values = {"shapes": ["256,128,40", "300,64,short"], "arms": ours, "layouts": 2, "rounds": 2, "slow_rounds": 1}
    records = records_of(gpu.run, configured(gpu.Config, values), tmp_path)
    assert sorted(record["arm"] for record in records) == sorted(2 * ours)
    for record in records:
        assert GPU_ARMS[record["arm"]].fields().items() <= record["config"].items()
        assert record["metrics"]["forward_seconds"] > 0 and record["metrics"]["copy_bytes_per_second"] > 1e10


def test_packing(tmp_path):
    grid = {"num_documents": 50, "row_lengths": [1024, 2048], "buffers": [8, 16], "seeds": [4], "rounds": 2}
    records = records_of(packing.run, configured(packing.Config, grid), tmp_path)
    assert len(records) == 2 * (len(STRATEGIES) - 1 + 2)
    lengths = draw_lengths("documents-2k", 50, 4)
    for record in records:
        config, metrics = record["config"], record["metrics"]
        plan = plan_rows(lengths, config["row_length"], config["strategy"], "split", config["buffer"] or 1)
        assert (metrics["padding_fraction"], metrics["num_rows"]) == (plan.padding_fraction, plan.num_rows)


@pytest.mark.parametrize("array, value", [("document", 0), ("start", 2), ("length", 3), ("slots", 1)])
def test_a_wrong_plan_is_not_timed(array, value):
    lengths = np.array([3, 5, 2, 7])
    plan = plan_rows(lengths, 4, "concat_split")
    packing.check_plan(plan, lengths)
    getattr(plan, array)[2] = value
    with pytest.raises(RuntimeError):
        packing.check_plan(plan, lengths)


BARE, BREAKDOWN, STEPS = "forward_backward", "breakdown", "steps"
ALL = [BARE, BREAKDOWN, STEPS]
ARMS = {
    "single": {"strategy": "single", "parts": [BARE, STEPS]},
    "single-8": {"strategy": "single", "multiple_of": 8},
    "padded-256": {"strategy": "padded", "row_length": 256, "parts": ALL},
    "padded-longest": {"strategy": "padded"},
    "padded-sorted": {"strategy": "padded_sorted"},
    "packed-512-next_fit": {"strategy": "next_fit", "row_length": 512},
    "packed-512-best_fit_decreasing": {"strategy": "best_fit_decreasing", "row_length": 512, "parts": ALL},
}
MODEL = ["model.n_layer=2", "model.d_model=16", "model.d_state=4", "model.vocab_size=60"]
TINY = {"models": ["130m"], "overrides": MODEL, "arms": ARMS, "distribution": "short", "documents": 100, "slots": 512}
TINY |= {"batches": 2, "single_batches": 3, "rounds": 2, "dtype": "float32", "precision": "32-true"}
MAMBA2 = ["model.mixer=mamba2", "model.n_layer=1", *MODEL[1:], "model.mixer_options={headdim: 8}"]
PACKED = ("packed-512-next_fit", "packed-512-best_fit_decreasing")


def test_whole_models(tmp_path):
    records = records_of(speedup.run, configured(Config, TINY), tmp_path)
    by_kind = {}
    for record in records:
        by_kind.setdefault((record["kind"], record["config"]["part"]), []).append(record)
    bare = by_kind["speedup", BARE]
    assert [record["arm"] for record in bare] == list(ARMS)
    for record in bare:
        assert configured(Arm, ARMS[record["arm"]]).fields().items() <= record["config"].items()
        assert record["metrics"]["loss_error"] <= TOLERANCES["float32"]
    padding = {record["arm"]: record["metrics"]["padding_fraction"] for record in bare}
    assert padding["single"] == 0 < padding["single-8"] < padding["padded-256"]
    assert padding["single"] < padding["packed-512-best_fit_decreasing"] < padding["packed-512-next_fit"]
    assert padding["padded-sorted"] < padding["padded-longest"] < padding["padded-256"]
    stepped = [name for name, arm in ARMS.items() if STEPS in arm.get("parts", ())]
    assert [record["arm"] for record in by_kind["speedup", STEPS]] == stepped
    for record in by_kind[BREAKDOWN, BARE]:
        metrics = record["metrics"]
        assert metrics["scan"] > 0 and metrics["conv"] > 0 and metrics["matrix products"] > 0
        assert sum(metrics[family] for family in FAMILIES) == pytest.approx(metrics["seconds"])
    made = tables("speedup", records)
    assert [row[2].text for row in made["arms-130m"].rows] == list(ARMS) and len(made["breakdown"].rows) == 2


def test_sorted_batches_beside_packed_rows(tmp_path):
    names = ("padded-sorted", "padded-sorted-8", "packed-512-best_fit_decreasing")
    arms = {name: ARMS[name.removesuffix("-8")] | {"parts": [BARE, BREAKDOWN]} for name in names}
    arms["padded-sorted-8"]["multiple_of"] = 8
    records = records_of(speedup.run_sorted, configured(Config, TINY | {"arms": arms}), tmp_path)
    assert {record["kind"] for record in records} == {"sorted"}
    odd = {r["arm"]: r["metrics"]["odd_fraction_of_all"] for r in records if r["config"]["part"] == BARE}
    assert odd["padded-sorted"] > 0 == odd["padded-sorted-8"]
    other_run = [record | {"commit": "other"} for record in records if record["arm"] != names[-1]]
    made = tables("speedup", records + other_run[:1])["sorted"]
    assert [row[2].text for row in made.rows] == list(names[1:]), "of one run alone"


def test_cards_and_mixers_stand_side_by_side(tmp_path):
    arms = {name: ARMS[name] for name in ("single", "single-8", "packed-512-next_fit")}
    own = {"arms": arms, "rounds": 1, "parts": [BARE], "overrides": MAMBA2}
    records = records_of(speedup.run, configured(Config, TINY | own), tmp_path)
    assert {(r["config"]["mixer"], r["config"]["d_state"]) for r in records} == {("mamba2", 4)}
    of_cards = []
    for name, factor in (("NVIDIA H200", 1), ("NVIDIA H100 80GB HBM3", 2)):
        for r in records:
            metrics = r["metrics"] | {"seconds_per_batch": 0.5 * factor, "seconds_spread": 0.04 * factor}
            metrics |= {"real_tokens_per_second": 1e6 / factor}
            of_cards.append(r | {"hardware": r["hardware"] | {"gpus": [name]}, "metrics": metrics})
    made = {name: read_rows(write_table(table, "csv")) for name, table in tables("speedup", of_cards).items()}
    cards = ["H200", "H100 80GB HBM3"]
    assert [(row["card"], row["arm"]) for row in made["arms-130m"]] == [*itertools.product(cards, arms)]
    rows = made["headline"]
    assert [row["card"] for row in rows] == cards
    for row, factor in zip(rows, (1, 2)):
        assert (float(row["over_single_8"]), float(row["over_single_8_spread"])) == pytest.approx((1, 0.08 * 2**0.5))
        per_token = 6 * records[0]["metrics"]["flop_parameters"]
        expected = per_token * 1e6 / factor / 989e12, (per_token + 15 * 32 * 4) * 1e6 / factor / 989e12
        found = float(row["model_flops_utilisation"]), float(row["counted_flops_utilisation"])
        assert found == pytest.approx(expected)


class PeerNorm(nn.RMSNorm):
    bias = None

    def __init__(self, width):
        super().__init__(width, eps=1e-5)


class PeerBlock(nn.Module):
    def __init__(self, width, mixer, mlp, norm, **_):
        super().__init__()
        self.norm, self.mixer = norm(width), mixer(width)

    def forward(self, hidden, residual, **boundaries):
        residual = hidden if residual is None else hidden + residual
        return self.mixer(self.norm(residual), **boundaries), residual


class PeerMamba2(PackedMamba2):
    def forward(self, hidden, seq_idx=None):
        return super().forward(hidden, None if seq_idx is None else SequenceLayout.from_seq_idx(seq_idx))


def test_mamba_ssm_s_mamba2_is_told_where_documents_lie(tmp_path, monkeypatch):
    norm = lambda hidden, weight, bias, residual, **_: F.rms_norm(hidden + residual, weight.shape, weight, 1e-5)
    stand_ins = {"Block": PeerBlock, "Mamba2": PeerMamba2, "RMSNorm": PeerNorm, "layer_norm_fn": norm}
    monkeypatch.setattr("experiments.speedup.model._peer", lambda package, module, name: stand_ins[name])
    theirs = {"layers": "mamba-ssm", "parts": [BARE]}
    arms = {name: ARMS[name] | theirs for name in ("single-8", "padded-sorted", *PACKED)}
    values = TINY | {"arms": arms, "rounds": 1, "parts": [BARE], "overrides": MAMBA2}
    assert [r["arm"] for r in records_of(speedup.run, configured(Config, values), tmp_path)] == list(arms)
    monkeypatch.setattr(PeerMamba2, "forward", lambda self, hidden, seq_idx=None: PackedMamba2.forward(self, hidden))
    with pytest.raises(RuntimeError, match="packed-512-next_fit: losses are off"):
        speedup.run(configured(Config, values), tmp_path / "again.jsonl", progress=False)


def test_a_leaking_arm_is_not_timed(tmp_path, monkeypatch):
    loss = PackedLitModule.loss
    monkeypatch.setattr(PackedLitModule, "loss", lambda self, batch, _=None: loss(self, batch, Leak()))
    with pytest.raises(RuntimeError, match="packed-512-next_fit: losses are off"):
        speedup.run(configured(Config, TINY), tmp_path / "records.jsonl", progress=False)


def test_every_arm_holds_every_token_once():
    documents = random_documents(draw_lengths("short", 200, 0), 60, 0)
    for name, fields in ARMS.items():
        found = {}
        for batch, numbers in feed(documents, Arm(**fields), 512).all():
            parts = batch.tokens[batch.layout.documents >= 0].split(batch.layout.lengths.tolist())
            found |= dict(zip(numbers, parts, strict=True))
        expected = np.split(documents.tokens, documents.bounds[1:-1])
        assert all(found[i].tolist() == expected[i].tolist() for i in range(200)), name


def test_time_of_kernels_and_gaps():
    times = [(0.0, 40.0, "ssm"), (44.0, 60.0, "gemm"), (100.0, 104.0, "gemm")]
    gpu_ = torch.autograd.DeviceType.CUDA
    span = types.SimpleNamespace
    events = [span(name=name, device_type=gpu_, time_range=span(start=a, end=b)) for a, b, name in times]
    found = sort_kernels(span(events=lambda: events), True, 110e-6)
    assert found.families["scan"] == pytest.approx(40e-6) and found.families["matrix products"] == pytest.approx(20e-6)
    assert found.idle == pytest.approx(50e-6) and found.gaps == pytest.approx(4e-6)
    overlapping = [(3.0, 7.0, "reduce"), (0.0, 5.0, "backward"), (1.0, 2.0, "inside"), (40.0, 41.0, "reduce")]
    assert exclusive(overlapping) == ({"backward": 5.0, "inside": 0.0, "reduce": 3.0}, 0.0)


SCORING = [
    *("model=130m", "overrides=[model.n_layer=1,model.d_model=32,model.vocab_size=300]"),
    *("dtype=float32", "max_slots=256"),
    "workloads.short-context={contexts: 6, context: 12, continuations: 4, continuation: 3}",
    "workloads.long-context={contexts: 4, context: 80, continuations: 1, continuation: 3}",
    *("prompts=[1,3]", "prompt_length=16", "new_tokens=3", "rounds=2", "arms=[packed,padded-8]"),
]


def test_scoring(tmp_path):
    records = records_of(scoring.run, load_bench("scoring", SCORING).config, tmp_path)
    scores = [record for record in records if record["kind"] == "scoring"]
    assert [record["arm"] for record in scores] == ["packed", "padded-8"] * 2
    assert all(record["metrics"]["mean_difference"] < 1e-5 for record in scores)
    assert {"scoring-short-context", "scoring-long-context", "generation"} <= tables("scoring", records).keys()


def test_wrong_scores_are_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "padded", lambda model, batch: lambda requests: [Score(0.0, False)] * len(requests))
    with pytest.raises(RuntimeError, match="short-context, padded-8: scores differ"):
        scoring.run(load_bench("scoring", SCORING).config, tmp_path / "records.jsonl", progress=False)


def test_gradients_of_packed_and_padded_along_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run.main(["bench", "parity/gradients", *GRADIENTS, f"output={tmp_path}"]) == 0
    made = read_rows((tmp_path / "tables" / "gradients.csv").read_text())
    rows = {(row["arm"], row["precision"]): row for row in made}
    for step in ("step_0", "step_20", "step_39"):
        rounded = float(rows["padded", "bf16-mixed"][step])
        assert 0 < float(rows["packed-reset", "32-true"][step]) <= 1e-5, "other sums, and nothing else"
        assert float(rows["packed-leak", "32-true"][step]) > 1e-3
        assert 0 < float(rows["single", "32-true"][step]) <= 1e-5 and 1e-4 < rounded < 0.1


def test_tasks_of_untrained_models(tmp_path):
    keys = ["questions=[]", "untrained=[mqar,next_line]", "examples=10", "seeds=[0]"]
    records = records_of(tasks.run, load_bench("tasks/answers", keys).config, tmp_path)
    found = {record["arm"]: record["metrics"] for record in records}
    assert found.keys() == {"mqar", "next_line"} and all(0 <= m["accuracy"] <= 1 for m in found.values())
    assert len(tables("tasks", records)["untrained"].rows) == 2


def test_hugging_face_s_trainer(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from experiments.integration import bench as integration

    arms = {
        "padded": {"batches": "padded", "kernels": "torch"},
        "flattened": {"batches": "flattened", "kernels": "torch", "leaks": True},
        "patched": {"batches": "flattened", "patched": True},
        "patched-8": {"batches": "flattened", "patched": True, "multiple_of": 8},
        "padded-8": {"batches": "padded", "kernels": "torch", "multiple_of": 8},
    }
    keys = ["overrides=[model.n_layer=1,model.d_model=16,model.vocab_size=300]", "distribution=short", "rounds=1"]
    keys += ["documents_per_step=3", "steps=2", "warm_up_steps=1", "precision=float32"]
    config = load_bench("integration", keys).config
    config.arms = arms
    found = {record["arm"]: record["metrics"] for record in records_of(integration.run, config, tmp_path)}
    assert list(found) == list(arms)
    for arm in ("patched", "patched-8", "padded-8"):
        assert found[arm]["last_loss"] == pytest.approx(found["padded"]["last_loss"], rel=1e-5), "the same steps"
    assert 0 == found["patched"]["padding_fraction"] < found["patched-8"]["padding_fraction"]
    assert found["padded"]["padding_fraction"] < found["padded-8"]["padding_fraction"]
    documents = [{"input_ids": list(range(length))} for length in (3, 6)]
    for arm in (integration.Arm("flattened", multiple_of=8), integration.Arm("padded", multiple_of=8)):
        batch = arm.collate(documents)
        assert all(values.shape[1] % 8 == 0 for values in batch.values())
        assert (batch["labels"] >= 0).sum() == 7, "no padding is a target"
    assert found["flattened"]["difference"] > 100 * found["patched"]["difference"]
    real = integration.Arm.collate
    leaky = lambda self, features: {k: v for k, v in real(self, features).items() if k != "position_ids"}
    monkeypatch.setattr(integration.Arm, "collate", leaky)
    with pytest.raises(RuntimeError, match="patched: logits differ"):
        integration.run(config, tmp_path / "r.jsonl", progress=False)


def test_hugging_face_s_trainer_of_other_models(tmp_path):
    """Arms that do not run keep an error in their place."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from experiments.integration import bench as integration

    keys = ["only=[bamba]", "distribution=short", "documents_per_step=3", "steps=2", "warm_up_steps=1", "rounds=1"]
    sizes = ["hidden_size=32", "num_hidden_layers=2", "num_attention_heads=4", "mamba_n_heads=4", "mamba_d_head=16"]
    sizes += ["mamba_chunk_size=16", "vocab_size=256", "intermediate_size=32", "mamba_d_state=4"]
    keys += [f"shared.{size}" for size in sizes]
    config = load_bench("integration/trainer", [*keys, "models.bamba.config={attn_layer_indices: [1]}"]).config
    records = records_of(integration.run_trainer, config, tmp_path)
    found = {record["arm"]: record for record in records}
    assert list(found) == ["padded", "grouped", "packed", "slow-path"]
    assert "needs mamba-ssm" in found["padded"]["config"]["error"] and not found["packed"]["config"]["error"]
    assert found["packed"]["metrics"]["loss_difference"] < 1e-5
    assert found["packed"]["metrics"]["real_tokens_per_second"] > 0
    made = tables("integration", records)
    assert len(made["trainer"].rows) == 1 and len(made["trainer-arms"].rows) == 4


@pytest.mark.extras
def test_audit_of_transformers(tmp_path):
    from experiments.leakcheck import bench as audit

    records = records_of(audit.run, load_bench("leakcheck", ["only=[mamba]"]).config, tmp_path)
    leaks = {(r["arm"], r["config"]["boundaries"]): r["metrics"]["leaks"] for r in records}
    assert len(leaks) == 12 and not any(r["metrics"]["fails"] for r in records)  # TRL's collator among them
    assert leaks["mamba", "position_ids"] == 1 and leaks["mamba, patched", "position_ids"] == 0
