"""The scoring bench at a tiny size: every arm is recorded with its agreement, a wrong arm stops it."""

from __future__ import annotations

import pytest
import torch

from experiments.scoring import bench as scoring
from experiments.scoring import exactness
from experiments.scoring.requests import Workload
from packmamba import MambaLM
from packmamba.config import ConfigError
from packmamba.evaluation import Score
from packmamba.experiments import kinds_of, load_bench
from packmamba.records import read_records
from packmamba.report.html import write_report

TINY = [
    "model=130m", "overrides=[model.n_layer=1,model.d_model=32,model.vocab_size=300]", "dtype=float32", "max_slots=256",
    "workloads.short-context={contexts: 6, context: 12, continuations: 4, continuation: 3}",
    "workloads.long-context={contexts: 4, context: 80, continuations: 1, continuation: 3}",
    "prompts=[1,3]", "prompt_length=16", "new_tokens=3", "rounds=2",
]  # fmt: skip
ARMS = {
    "packed": {"method": "packed", "share": True},
    "packed-unshared": {"method": "packed", "share": False},
    "padded-8": {"method": "padded", "batch": 8},
}


EMPTY = {"contexts": 0, "context": 1, "continuations": 1, "continuation": 1}


def load(**changes):
    config = load_bench("scoring", TINY).config
    config.arms = ARMS
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.slow
def test_every_arm_is_recorded_and_tabulated(tmp_path):
    scoring.run(load(), tmp_path / "records" / "scoring.jsonl", progress=False)
    records = read_records(tmp_path)
    scores = [record for record in records if record["kind"] == "scoring"]
    assert [record["arm"] for record in scores] == list(ARMS) * 2
    for record in scores:
        assert record["metrics"]["mean_difference"] < 1e-5
        assert record["metrics"]["requests_per_second"] > 0
    assert {record["arm"] for record in records} - set(ARMS) == {"1 prompts", "3 prompts"}
    write_report(tmp_path, kinds_of(tmp_path, records))
    text = (tmp_path / "tables" / "scoring-short-context.md").read_text()
    assert all(arm in text for arm in ARMS)


@pytest.mark.slow
def test_a_wrong_arm_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "padded", lambda model, batch: lambda requests: [Score(0.0, False)] * len(requests))
    with pytest.raises(RuntimeError, match="short-context, padded-8: scores differ by"):
        scoring.run(load(), tmp_path / "records" / "scoring.jsonl", progress=False)
    assert not (tmp_path / "records" / "scoring.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": {}}, "arms: expected at least one that runs here, got none"),
        ({"arms": {"x": {"method": "magic"}}}, "arms.x.method: expected packed, padded or hf, got 'magic'"),
        ({"arms": {"x": {"method": "padded", "size": 8}}}, "arms.x: .*size"),
        ({"workloads": {"w": EMPTY}}, "workloads.w.contexts: expected above 0, got 0"),
        ({"workloads": {"w": {"contexts": 1}}}, "workloads.w: .*missing"),
    ],
)  # fmt: skip
def test_refuses_in_one_sentence(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        scoring.run(load(**changes), tmp_path / "records" / "scoring.jsonl", progress=False)


def test_lengths_are_about_their_medians():
    requests = Workload(400, 64, 4, 16).draw(100, seed=0)
    assert len(requests) == 1600 and all(a[0] is b[0] for a, b in zip(requests[::4], requests[3::4]))
    contexts = torch.tensor([float(len(context)) for context, _ in requests[::4]])
    assert 58 < contexts.median() < 70 and contexts.min() >= 16 and contexts.max() <= 256


def test_packed_scores_are_counted_against_one_at_a_time(tmp_path):
    tiny = ["dtypes=[float64,bfloat16]", "device=cpu", "contexts=3", "continuations=2", "max_slots=128", *TINY[:2]]
    config = load_bench("scoring/exactness", tiny).config
    exactness.run(config, tmp_path / "records" / "exactness.jsonl", progress=False)
    for record in read_records(tmp_path):
        metrics = record["metrics"]
        assert (
            metrics["requests"] == 6 and metrics["greedy"] >= 3
        )  # each context's first continuation is what the model says
        assert metrics["shuffled_differ"] == metrics["split_differ"] == 0
        if record["arm"] == "float64":
            assert 0 <= metrics["largest_difference"] < 1e-9 and metrics["greedy_flips"] == metrics["choice_flips"] == 0
    (table,) = kinds_of(tmp_path, read_records(tmp_path))["exactness"].tables(read_records(tmp_path))
    assert [row[0].text for row in table.rows] == ["float64", "bfloat16"]


def test_what_differs_is_counted(monkeypatch):
    torch.manual_seed(0)
    model = MambaLM(vocab_size=30, d_model=16, n_layer=1).double()
    config = load_bench("scoring/exactness", ["max_slots=128"]).config
    honest = exactness.score

    def score(model, requests, *arguments, **options):  # the call with shuffled requests answers in the wrong order
        found = honest(model, requests, *arguments, **options)
        calls.append(len(requests))
        return found[::-1] if len(calls) == 2 else found

    calls = []
    monkeypatch.setattr(exactness, "score", score)
    metrics = exactness._compare(model, Workload(6, 12, 2, 3), config)
    assert metrics["shuffled_differ"] > 6 and metrics["split_differ"] == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dtypes=[float64]", "dtypes: expected of float32, bfloat16 with device=cuda, got 'float64'"),
        ("dtypes=[half]", "dtypes: expected of float32, bfloat16 with device=cuda, got 'half'"),
    ],
)
def test_exactness_refuses_in_one_sentence(tmp_path, override, message):
    config = load_bench("scoring/exactness", [override]).config
    with pytest.raises(ConfigError, match=message):
        exactness.run(config, tmp_path / "exactness.jsonl", progress=False)
