"""The audit of transformers' models: what it records and tabulates, and that its committed verdicts come out again."""

import pytest

from experiments.leakcheck import bench, report
from packmamba.config import ConfigError
from packmamba.experiments import load_bench
from packmamba.records import read_records


def audited(tmp_path, *overrides):
    loaded = load_bench("leakcheck", list(overrides))
    loaded.run(loaded.config, tmp_path / "records" / "leakcheck.jsonl", False)
    return read_records(tmp_path)


@pytest.mark.slow
def test_verdicts_of_three_models(tmp_path):
    records = audited(tmp_path, "only=[llama,mamba]", "boundaries=[position_ids]")
    found = {(r["arm"], r["config"]["boundaries"]): report.verdict(r) for r in records}
    assert found == {
        ("llama", "position_ids"): "tight",
        ("mamba", "position_ids"): "leaks, ignores it",
        ("mamba, patched", "position_ids"): "tight",
    }
    matrix, counts, full = report.audit_tables(records)
    assert [cell.text for cell in matrix.rows[1]] == ["mamba", "state-space", "leaks, ignores it"]
    assert [cell.text for cell in counts.rows[0]] == ["position_ids", "1", "0", "1", "1", "0"]
    assert "backbone.layers.0.mixer (MambaMixer)" in [cell.text for cell in full.rows[1]]


def test_the_newest_version_counts_and_devices_stand_apart():
    def record(arm, version, time, device="cpu", boundaries="position_ids", **metrics):
        named = dict.fromkeys(report.METRICS, 0) | {"leaks": 0, "same_as_alone": 1} | metrics
        config = {
            "boundaries": boundaries,
            "transformers": version,
            "device": device,
            "family": "hybrid",
            "kernels": {},
        }
        config |= {"module": None, "error": None}
        return {"kind": "audit", "arm": arm, "config": config, "metrics": named, "time": time}

    records = [
        record("gone", "5.9.0", "1"), record("a", "5.10.0", "2", leaks=1), record("a", "5.10.0", "3"),
        record("a", "5.10.0", "4", device="cuda:0", raises=1), record("a", "5.9.0", "5", leaks=1),
    ]  # fmt: skip
    tables = {table.name: table for table in report.audit_tables(records)}
    assert list(tables) == ["audit", "audit-counts", "audit-full", "audit-cuda", "audit-cuda-counts", "audit-cuda-full"]
    assert [[cell.text for cell in row] for row in tables["audit"].rows] == [["a", "hybrid", "tight"]]
    assert tables["audit-cuda"].rows[0][2].text == "refuses" and "5.10.0" in tables["audit"].title
    assert report.audit_tables([]) == []


@pytest.mark.slow
def test_every_model_that_passes_something_along_a_row_is_listed():
    """Of the version that is installed; a newer one may bring more, which the bench then names."""
    models = load_bench("leakcheck", []).config.models
    assert len(models) > 25
    without = {name: of for name, of in models.items() if name not in ("bamba", "rwkv", "qwen3_5_moe_text")}
    assert {"bamba", "rwkv", "qwen3_5_moe"} <= set(bench.unlisted(without)) - set(bench.unlisted(models))


@pytest.mark.slow
@pytest.mark.parametrize(
    "override, message",
    [
        ("only=[mumba]", "only: unknown model 'mumba'; did you mean 'mamba'?"),
        (
            "models={mumba: {family: hybrid}}",
            "models.[a-z_0-9]*: transformers has no such model type; did you mean",
        ),  # old ones lack others
        ("models={mamba: {config: {size: 3}}}", "models.mamba.config.size: MambaConfig has no such key"),
        ("device=nowhere", "device: 'nowhere' cannot be used here"),
        ("boundaries=[]", "boundaries: expected at least one argument"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?").replace("(", r"\(")):
        audited(tmp_path, override)
    assert not list(tmp_path.iterdir())
