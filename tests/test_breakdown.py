"""Where a step's time goes: families of kernels, gaps, idle time."""

import json
import types

import pytest
import torch
from whole_models import tiny_model

from experiments.speedup.breakdown import Breakdown, exclusive, family_of, sort_kernels
from experiments.speedup.report_breakdown import FAMILIES as BREAKDOWN


@pytest.mark.parametrize(("profiled_idle", "timed", "idle"), [(3.0, 20.0, 1.5), (9.0, 18.0, 3.0), (3.0, 11.0, 0.25)])
def test_no_more_is_idle_than_is_left_without_the_profiler_but_launches(tmp_path, profiled_idle, timed, idle):
    path = tmp_path / "records.jsonl"
    found = Breakdown(
        {family: 0.0 for family in BREAKDOWN if family != "idle"} | {"scan": 12.0}, [], profiled_idle, 0.5
    )
    tiny_model(path).record_breakdown("packed", {}, "steps", timed, found, 2)
    (record,) = map(json.loads, path.read_text().splitlines())
    assert record["metrics"]["idle"] == idle and record["metrics"]["scan"] == 6
    assert record["metrics"]["seconds"] == 6 + idle


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
