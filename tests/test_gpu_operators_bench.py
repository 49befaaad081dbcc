"""The bench of the operators on a GPU, as far as it runs without one: rows, arms, the gate; its tables and figures."""

import csv
import io
import sys
import types

import pytest
import torch
from configured import configured

from experiments.operators import gpu as gpu_operators
from experiments.operators import gpu_bars, gpu_implementations, gpu_inputs, gpu_shapes, gpu_turns, positions
from experiments.operators.arms import GPU_ARMS
from experiments.operators.report import KINDS
from packmamba import SequenceLayout, ops
from packmamba.config import ConfigError
from packmamba.records import make_record, read_records
from packmamba.report.html import build_sections, table_files

LAYOUT = SequenceLayout.from_lengths([[40, 1, 33, 26]], row_length=100)
SOME = torch.tensor([0, 7, 63])


def scan(u, delta, A, B, C, D, z, bias, softplus, layout=None):
    rows = (t.transpose(1, 2).contiguous() for t in (u, delta, B[:, 0], C[:, 0]))
    return ops.ssm_pack(
        *(next(rows), next(rows), A, next(rows), next(rows), D), z=z.transpose(1, 2).contiguous(), delta_bias=bias,
        delta_softplus=softplus, backend="reference",
    ).transpose(1, 2)  # fmt: skip


def peer_forward(*arguments):
    y = scan(*arguments)
    return y, torch.zeros(()), y


PEER = types.SimpleNamespace(fwd=peer_forward, bwd=lambda *arguments: (arguments[8],))


def convolve(x, weight, bias, seq_idx, activation):
    layout = SequenceLayout.from_seq_idx(seq_idx)
    y = ops.conv1d_pack(x.transpose(1, 2), weight, bias, layout=layout, activation=activation, backend="reference")
    return y.transpose(1, 2)


def chunk_scan(x, steps, rates, B, C, chunk_size, seq_idx, dt_softplus, z):
    """Mamba-2 by its definition: one decay per head and token."""
    _, tokens, heads, width = x.shape
    h = torch.zeros(heads, width, B.shape[-1])
    y = []
    for t in range(tokens):
        if t and seq_idx[0, t] != seq_idx[0, t - 1]:
            h = torch.zeros_like(h)
        dt = torch.nn.functional.softplus(steps[0, t].float())
        drive = (dt[:, None] * x[0, t].float())[..., None] * B[0, t, 0].float()
        h = torch.exp(dt * rates)[:, None, None] * h + drive
        y.append((h * C[0, t, 0].float()).sum(-1) * torch.nn.functional.silu(z[0, t].float()))
    return torch.stack(y)[None].to(x.dtype)


@pytest.fixture(scope="module")
def inputs():
    return gpu_inputs.Inputs.random(100, 128, 0, "cpu")


@pytest.fixture(scope="module")
def built(inputs):
    """What ``build`` makes of the arms that run anywhere, and the peers by what stands for them here."""
    here = {name: arm for name, arm in GPU_ARMS.items() if arm.implementation in ("packmamba", "torch")}
    here = {name: arm for name, arm in here.items() if arm.operator != "schedule" and not arm.elsewhere}
    made, references = gpu_implementations.build(here, inputs, SOME, 48)
    for packing in ("unpacked", "by-document", "padded"):
        made[f"mamba-ssm-{packing}"] = gpu_implementations.mamba(PEER, packing, inputs, 48)
    made["mamba2-ssd"], references["ssd"] = gpu_implementations.ssd(chunk_scan, inputs, SOME)
    made["causal-conv1d"] = gpu_implementations.causal_conv(convolve, inputs)
    return made, references


def test_every_arm_computes_what_it_is_held_against(built):
    errors = gpu_turns.check(*built, LAYOUT, SOME)
    assert errors.keys() == GPU_ARMS.keys() - {"projections", "schedule", "scan-indices", "conv1d-indices"}
    assert all(0 < output < 1e-2 for output, _ in errors.values())
    assert {name for name, (_, gradients) in errors.items() if gradients} == {"scan", "scan-states", "conv1d"}


def test_peers_that_are_missing_are_named_once(inputs, capsys, monkeypatch):
    def missing(package, module, name):
        raise ValueError(f"{package} is not installed")

    monkeypatch.setattr(gpu_implementations, "find_peer", missing)
    for package in ("causal_conv1d", "selective_scan_cuda"):
        monkeypatch.setitem(sys.modules, package, None)
    peers = {name: arm for name, arm in GPU_ARMS.items() if arm.implementation not in ("packmamba", "torch")}
    made, _ = gpu_implementations.build(peers, inputs, SOME, 48)
    named = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert named == [f"no {name}" for name in dict.fromkeys(arm.implementation for arm in peers.values())] and not made


def test_padded_documents_are_as_long_as_asked_and_no_shorter_than_the_longest(inputs, built):
    for pad_to, length in ((48, 48), (7, 40)):
        ((u, *_),), _ = gpu_implementations.mamba(PEER, "padded", inputs, pad_to).prepare(LAYOUT)
        assert u.shape == (4, 128, length)
        assert torch.equal(u[2, :, :33].T, inputs.scan["u"][0, 41:74])
    by_document, _ = built[0]["mamba-ssm-by-document"].prepare(LAYOUT)
    assert [u.shape[-1] for u, *_ in by_document] == [40, 1, 33, 26]


def test_arms_differentiate_everything(built):
    for name, count in (("scan", 8), ("scan-states", 9), ("conv1d", 3), ("projections", 8), ("causal-conv1d", 3)):
        arm = built[0][name]
        prepared = arm.prepare(LAYOUT)
        gradients = arm.backward(arm.forward(prepared), prepared)
        assert len(gradients) == count and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("victim", ["scan", "mamba-ssm-padded", "causal-conv1d"])
def test_a_wrong_arm_is_not_timed(built, victim):
    arm = built[0][victim]
    if arm.gradients:
        wrong = gpu_implementations.Implementation(
            arm.forward, arm.backward, lambda layout: arm.prepare(layout.flow()), arm.output, "scan", True
        )
        wrong.prepare = lambda layout: Leaking(**vars(arm.prepare(layout)))
    else:
        wrong = gpu_implementations.Implementation(
            arm.forward, None, arm.prepare, lambda *a: arm.output(*a) * 1.02, arm.expects
        )
    with pytest.raises(RuntimeError, match=f"{victim}: .* is off by .*; nothing is timed"):
        gpu_turns.check({victim: wrong}, built[1], LAYOUT, SOME)


class Leaking(gpu_inputs.Call):
    """Right outputs, wrong gradients."""

    def backward(self, outputs):
        first, *others = super().backward(outputs)
        return (first * (1 if first.dtype == torch.float64 else 1.02), *others)

    def within(self, some):
        return Leaking(**vars(super().within(some)))


def test_position_bytes_counted_by_hand():
    """Two documents of 100 and 28 tokens, an item each, 33 channels: three warps of the scan, one of the convolution."""
    scheduled = positions.Scheduled(items=2, pieces=0, lengths=(100, 28), grid_items=2, grid_pieces=0)
    schedule = 3 * (2 * 4 + 2 * 8 + 2 * 20)
    assert positions.scan_bytes(scheduled, 33, indices=False) == schedule
    assert positions.scan_bytes(scheduled, 33, indices=True) == schedule + 3 * 4 * (104 + 32)
    spans = 128 // 32  # the chip has room for more, but spans have 32 slots at least
    assert positions.conv_bytes(128, 2, 33, 132, 6, indices=False) == spans * 20 + 2 * 8
    assert positions.conv_bytes(128, 2, 33, 132, 6, indices=True) == 4 * 16 * (spans + 16 + 16)
    assert positions.position_bytes(GPU_ARMS["mamba2-ssd"], LAYOUT, 33, 132) == (None, None)


def test_spans_of_the_convolution_fill_whole_waves():
    one, two = (positions.conv_bytes(n * 256 * 132 * 6, 0, 512, 132, 6, indices=False) for n in (1, 2))
    assert one == 4 * 20 * 132 * 6 and two == 2 * one


def test_rows_are_drawn_in_order_and_filled():
    rows = gpu_operators.draw_rows("documents-2k", 5000, 20, 0)
    assert len(rows) == 20 and all(sum(row) == 5000 for row in rows) and rows[0] != rows[1]
    assert gpu_operators.draw_rows("one", 700, 20, 0) == [[700]]
    assert gpu_operators.draw_rows("300", 700, 20, 0) == [[300, 300, 100]]


@pytest.mark.parametrize(
    "shape", ["16384,4096", "16384,4096,medium", "16384,100,one", "0,64,one", "64,64,0", "64,64,-3"]
)
def test_a_shape_that_is_none_is_refused_as_it_is_read(shape):
    with pytest.raises(ConfigError, match="shapes: expected tokens,channels,documents"):
        configured(gpu_operators.Config, {"shapes": ["64,64,one", shape]})


def test_slow_rounds_are_some_of_the_rounds():
    with pytest.raises(ConfigError, match="slow_rounds: expected 1 to rounds=5, got 6"):
        configured(gpu_operators.Config, {"slow_rounds": 6})


def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(ConfigError, match="needs a GPU"):
        gpu_operators.run(gpu_operators.Config(), tmp_path / "r.jsonl", progress=False)


@pytest.mark.gpu
def test_a_run_records_every_arm_that_is_ours(tmp_path):
    ours = [name for name, arm in GPU_ARMS.items() if arm.implementation in ("packmamba", "torch")]
    values = {"shapes": ["256,128,40", "300,64,short"], "arms": ours, "layouts": 2, "rounds": 2, "slow_rounds": 1}
    gpu_operators.run(configured(gpu_operators.Config, values), tmp_path / "records" / "r.jsonl", False)
    records = read_records(tmp_path)
    assert sorted(record["arm"] for record in records) == sorted(2 * ours)
    assert all(GPU_ARMS[record["arm"]].fields().items() <= record["config"].items() for record in records)
    for made in records:
        metrics = made["metrics"]
        assert metrics["forward_seconds"] > 0 and metrics["clock_hz"] > 1e8 and metrics["copy_bytes_per_second"] > 1e10
        if made["arm"].startswith(("scan", "conv1d")):
            assert metrics["backward_seconds"] > 0 and metrics["gradient_error"] < 5e-3
    bytes_read = {(r["config"]["tokens"], r["arm"]): r["metrics"]["position_bytes_forward"] for r in records}
    assert 0 < bytes_read[256, "scan"] < bytes_read[256, "scan-indices"]
    assert 0 < bytes_read[256, "conv1d"] < bytes_read[256, "conv1d-indices"]


def record(arm, milliseconds, tokens=16384, channels=4096, documents="documents-2k", **metrics):
    forward, backward = (None if ms is None else ms / 1e3 for ms in milliseconds)
    values = dict.fromkeys(KINDS["gpu_operators"].metrics) | {
        "forward_seconds": forward, "forward_spread": 1e-6, "backward_seconds": backward,
        "backward_spread": None if backward is None else 1e-6, "total_seconds": forward + (backward or 0), "total_spread": 2e-6,
        "copy_bytes_per_second": 4e12, "multiprocessors": 132, "clock_hz": 1.98e9,
    }  # fmt: skip
    if arm == "scan":
        values |= {"kept_activations": 0.5, "workspace_activations": 1.25}
    config = {
        "tokens": tokens, "channels": channels, "documents": documents, "states": 16, "layouts": 20, "rounds": 7,
        "mean_documents": 31.5,
    }  # fmt: skip
    return make_record("gpu_operators", "operators", arm, config, 0, "random", values | metrics, 1.0)


def every_record():
    """Twice the tokens take twice the time."""
    times = {
        "scan": (0.4, 1.2), "scan-states": (0.41, 1.23), "scan-indices": (0.5, 1.3), "mamba-ssm-unpacked": (1.5, 5.0),
        "mamba-ssm-by-document": (2.0, 6.0), "mamba-ssm-padded": (6.0, 20.0), "mamba2-ssd": (0.6, 2.0), "conv1d": (0.08, 0.13),
        "conv1d-indices": (0.09, 0.14), "causal-conv1d": (0.14, 0.33), "projections": (1.2, 2.4), "schedule": (0.02, None),
    }  # fmt: skip
    shapes = [(n, 4096, "documents-2k") for n in (2048, 4096, 16384, 65536, 131072)]
    shapes += [(16384, d, "documents-2k") for d in (1536, 5120)] + [
        (16384, 4096, e) for e in ("one", "short", "64", "1024")
    ]
    return [
        record(arm, [None if t is None else t * n / 16384 * d / 4096 for t in each], n, d, e)
        for n, d, e in shapes
        for arm, each in times.items()
    ]


def rows_of(records, name):
    return list(csv.DictReader(io.StringIO(table_files(records, KINDS)[f"{name}.csv"])))


def test_bars_against_numbers_worked_out_here():
    rows = {row["what"]: row for row in rows_of(every_record(), "gpu-bars")}
    assert len(rows) == len(gpu_bars.BARS) + 1

    def says(start, value, verdict):
        (row,) = (row for what, row in rows.items() if what.startswith(start))
        assert float(row["measured"]) == pytest.approx(value, rel=1e-6) and row["verdict"] == verdict

    says("mamba-ssm not packed over ours: 16384", 6.5 / 1.6, "met")
    says("the same, one document", 6.5 / 1.6, "stretch met")
    says("Mamba-2 SSD over ours, 65536", 2.6 / 1.6, "met")
    says("time per token", 1.0, "stretch met")
    says("kept", 0.5, "met")
    says("with states", 1.64 / 1.6, "met")
    copied = 16384 * 4096 / 4e12
    says("conv1d_pack forward", 4 * copied / 0.08e-3, "met")
    says("conv1d_pack backward", 6 * copied / 0.13e-3, "met")


def test_a_bar_without_its_shape_is_not_judged():
    rows = rows_of([record("scan", (0.4, 1.2)), record("mamba-ssm-unpacked", (1.0, 4.0))], "gpu-bars")
    assert [row["verdict"] for row in rows[:3]] == ["missed", "-", "-"]


def test_the_limit_is_that_of_the_unit_that_binds():
    elements = 16384 * 4096
    few = record("scan", (0.4, 1.2), multiprocessors=132)
    many = record("scan", (0.4, 1.2), multiprocessors=10**6)
    forward, backward = gpu_shapes.scan_limit(few)
    assert forward == pytest.approx(0.75 * elements * 16 / (132 * 16 * 1.98e9))
    assert backward == pytest.approx(21.5 * elements * 16 / (132 * 128 * 1.98e9))
    assert gpu_shapes.scan_limit(many) == pytest.approx((10 * elements / 4e12, 14 * elements / 4e12))


@pytest.mark.slow
def test_tables_and_figures_of_one_folder_with_every_arm():
    (section,) = build_sections(every_record(), kinds=KINDS)
    assert [t.name for t in section.tables] == [
        "gpu-bars", "gpu-scan", "gpu-conv", "gpu-bottleneck", "gpu-positions", "gpu-times"
    ]  # fmt: skip
    assert [figure.name for figure in section.figures] == ["gpu-tokens", "gpu-channels", "gpu-documents"]
    bottleneck = rows_of(every_record(), "gpu-bottleneck")
    assert {(row["most"], row["peer_most"]) for row in bottleneck} == {("matrix products", "scan")}
    assert float(bottleneck[0]["scan_share"]) == pytest.approx(1.6 / (3.6 + 1.6 + 0.21))
    assert len(rows_of(every_record(), "gpu-times")) == 11 * 12
