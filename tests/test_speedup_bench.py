"""The whole-model bench on a tiny case: every arm is right, recorded and tabulated; a wrong arm is not timed."""

import contextlib
import importlib.util
import io
import json
import sys
import textwrap

import pytest
from configured import configured
from whole_models import ARMS, BARE, STEPS, TINY, run, some, tiny_model

from experiments.speedup import bare_loop
from experiments.speedup import whole_models as bench
from experiments.speedup.arms import Arm, Documents, PeerLM, feed
from experiments.speedup.config import TOLERANCES, Config
from experiments.speedup.report import KINDS
from experiments.speedup.report_breakdown import FAMILIES as BREAKDOWN
from packmamba.data.lengths import draw_lengths
from packmamba.errors import ConfigError
from packmamba.experiments import load_bench
from packmamba.ops.mamba_ssm import _peer
from packmamba.records import read_records
from packmamba.report.html import build_sections
from packmamba.training.boundary import Leak


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """The records of a run with every part, and what it showed."""
    folder, shown = tmp_path_factory.mktemp("speedup"), io.StringIO()
    with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(io.StringIO()):
        bench.run(configured(Config, TINY), folder / "records" / "speedup.jsonl", progress=True)
    return read_records(folder), shown.getvalue()


def arms_of(part):
    return [name for name, arm in ARMS.items() if part in arm.get("parts", [BARE])]


@pytest.mark.slow
def test_every_part_is_recorded(everything):
    records, _ = everything
    by_kind = {}
    for record in records:
        by_kind.setdefault((record["kind"], record["config"]["part"]), []).append(record)
    bare = by_kind["speedup", "forward_backward"]
    assert [record["arm"] for record in bare] == arms_of(BARE) == list(ARMS)
    for record in bare:
        config, given = record["config"], configured(Arm, ARMS[record["arm"]])
        assert {name: config[name] for name in given.fields()} == given.fields()
        metrics = record["metrics"]
        assert metrics["loss_error"] <= TOLERANCES["float32"] < metrics["real_tokens_per_second"]
        assert metrics["slots_per_second"] * (1 - metrics["padding_fraction"]) == pytest.approx(
            metrics["real_tokens_per_second"]
        )
    padding = {record["arm"]: record["metrics"]["padding_fraction"] for record in bare}
    assert padding["single"] == 0 < padding["packed-512-best_fit"] < padding["packed-512-in_order"]
    assert padding["padded-buckets"] < padding["padded-longest"] < padding["padded-256"]
    assert [record["arm"] for record in by_kind["speedup", "steps"]] == arms_of(STEPS)
    for part in ("forward_backward", "steps"):
        assert [record["arm"] for record in by_kind["breakdown", part]] == arms_of("breakdown")
        for record in by_kind["breakdown", part]:
            metrics = record["metrics"]
            assert metrics["scan"] > 0 and metrics["conv"] > 0 and metrics["matrix products"] > 0
            assert sum(metrics[family] for family in BREAKDOWN) == pytest.approx(metrics["seconds"])
    assert [r["config"]["value"] for r in by_kind["growth", "row_length"]] == [256, 512]
    assert [r["config"]["value"] for r in by_kind["growth", "mean_length"]] == [16, 64]
    (section,) = build_sections(records, kinds=KINDS)
    tables = {table.name: table for table in section.tables}
    assert section.tables[0].name == "headline" and len(tables["headline"].rows) == 1
    assert [row[1].text for row in tables["arms-130m"].rows] == list(ARMS)
    assert len(tables["breakdown"].rows) == 4 and len(tables["growth-row-length"].rows) == 2
    best = tables["headline"].rows[0][1].text
    against = {row[4].text: row for row in tables["positions"].rows if row[1].text == best}
    assert against.keys() == {"padded-256", "padded-longest", "padded-buckets"}
    assert against["padded-256"][5].values[0] > against["padded-longest"][5].values[0] > 0
    assert {figure.name for figure in section.figures} == {"speedup", "breakdown", "growth"}
    assert not any("apart" in note for table in section.tables for note in table.notes)
    by_kind["speedup", "steps"][0]["commit"] = "0" * 40
    tables = {table.name: table for table in build_sections(records, figures=False, kinds=KINDS)[0].tables}
    for name, arms in (("headline", "130m single"), ("arms-130m", "single")):
        assert f"Steps and bare loop were run at different commits, apart: {arms}." in tables[name].notes


@pytest.mark.slow
def test_long_work_shows_how_far_it_is(everything):
    _, shown = everything
    for what in ("compares losses", "forward and backward", "growth", "optimizer steps"):
        assert f"{what}: 100%" in shown


@pytest.mark.slow
def test_a_wrong_arm_is_not_timed(tmp_path, monkeypatch):
    """Here packed rows leak: the layout that the model is given is not the batch's."""
    module = bare_loop.growth.PackedLitModule
    loss = module.loss
    monkeypatch.setattr(module, "loss", lambda self, batch, _=None: loss(self, batch, Leak()))
    with pytest.raises(RuntimeError, match="packed-512-in_order: losses are off by .*; nothing is timed"):
        run(tmp_path)
    assert not (tmp_path / "records").exists()


def test_every_scheme_holds_every_token_once():
    documents = Documents(draw_lengths("short", 200, 0), 60, 0)
    for name, fields in ARMS.items():
        fed = feed(documents, Arm(**fields), 512)
        found = {}
        for batch, numbers in fed.all():
            assert batch.tokens.numel() <= 512
            parts = batch.tokens[batch.layout.documents >= 0].split(batch.layout.lengths.tolist())
            found |= dict(zip(numbers, parts, strict=True))
        assert all(found[i].tolist() == documents.document(i).tolist() for i in range(200)), name
        assert len(fed.sample(3)) == 3


def test_arms_are_taken_by_name_in_the_order_they_are_named():
    names = ["packed-4096-best_fit", "single"]
    arms = load_bench(
        "speedup", [f"arms=[{','.join(names)}]", "arms.mine={strategy: greedy, row_length: 4096}"]
    ).config.arms
    assert list(arms) == [*names, "mine"]
    assert arms["packed-4096-best_fit"] == Arm("best_fit", 4096) and arms["mine"] == Arm("greedy", 4096)
    assert arms["single"].parts == [BARE, "breakdown", STEPS]
    for given, message in (
        ("[single,singel]", "expected of mamba-ssm-single.*got 'singel'"),
        ("[single,single]", "dupl"),
    ):
        with pytest.raises(ConfigError, match=f"arms: {message}"):
            load_bench("speedup", [f"arms={given}"])


def test_growth_alone_is_measured(tmp_path):
    records = run(tmp_path, arms={}, parts=["growth"])
    assert [record["config"]["axis"] for record in records] == 2 * ["row_length"] + 2 * ["mean_length"]


@pytest.mark.slow
def test_what_was_not_measured_alike_is_not_compared(tmp_path):
    """The latest counts, and those that were measured as it was."""

    def shown(*records):
        (section,) = build_sections(records, figures=False, kinds=KINDS)
        return [row[1].text for row in section.tables[1].rows]

    records = run(tmp_path, parts=[BARE], arms=some("single", "padded-256"))
    again = json.loads(json.dumps(records[0]))
    assert shown(*records, again) == ["single", "padded-256"]
    elsewhere = again | {"hardware": again["hardware"] | {"gpus": ["another"]}}
    assert shown(*records, elsewhere) == ["single"]
    again["config"]["documents"] += 1
    assert shown(*records, again) == ["single"]


def test_few_batches_stand_for_all():
    documents = Documents(draw_lengths("documents-2k", 4096, 0), 60, 0)
    for arm, count in ((Arm("single"), 16), (Arm("padded", 2048), 2), (Arm("padded"), 2), (Arm("best_fit", 16384), 2)):
        fed = feed(documents, arm, 16384)
        mean = sum(batch.layout.num_tokens for batch in fed.sample(count)) / count
        assert mean == pytest.approx(fed.tokens_per_batch, rel=0.03), arm


FAKES = {
    "modules/mamba_simple.py": """
        from packmamba.nn.mixers.mamba1 import PackedMamba as Mamba
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
    for name in [
        name for name in sys.modules if name.split(".")[0] == "mamba_ssm"
    ]:  # the real one, where it is installed
        monkeypatch.delitem(sys.modules, name)
    from packmamba.ops.mamba_ssm import _peer

    _peer.cache_clear()
    yield
    _peer.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        del sys.modules[name]


PEERS = {f"mamba-ssm-{name}": ARMS[name] | {"layers": "mamba-ssm", "parts": [BARE]} for name in ARMS}


def test_the_peers_arms_share_the_weights_and_leak(tmp_path, peers):
    names = ["mamba-ssm-single", "mamba-ssm-padded-256", "mamba-ssm-packed-512-best_fit"]
    arms = {name: PEERS[name] for name in names} | {"single": {"strategy": "single"}}
    records = run(tmp_path, arms=arms, parts=[BARE])
    assert [record["arm"] for record in records] == list(arms)
    assert [record["config"]["layers"] for record in records] == 3 * ["mamba-ssm"] + ["packmamba"]
    assert records[2]["metrics"]["leak_error"] > 10 * TOLERANCES["float32"], "the gate tells a leak apart"
    module = tiny_model(tmp_path / "x", arms=arms).build()
    assert set(map(id, PeerLM(module.model).parameters())) == set(map(id, module.model.parameters()))


def test_peers_that_are_missing_are_left_out(tmp_path, capsys, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "mamba_ssm" else real(name, *more)
    )
    monkeypatch.delitem(sys.modules, "mamba_ssm", raising=False)
    _peer.cache_clear()
    arms = {"mamba-ssm-single": PEERS["mamba-ssm-single"], "single": ARMS["single"]}
    records = run(tmp_path, arms=arms, parts=[BARE])
    assert [record["arm"] for record in records] == ["single"]
    assert "left out, mamba-ssm-single: " in capsys.readouterr().err


SHORT_ROWS = {"strategy": "best_fit", "row_length": 100}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": {"a": {"strategy": "packed"}}}, "arms.a.strategy: expected one of single, .*, got 'packed'"),
        ({"arms": {"a": {"strategy": "split", "row_length": 512}}}, "arms.a.strategy: expected one of"),
        ({"arms": {"a": {"strategy": "best_fit"}}}, "arms.a.row_length: strategy best_fit needs a number"),
        ({"arms": {"a": {"strategy": "single", "row_length": 512}}}, "arms.a.row_length: expected null"),
        ({"arms": {"a": {"strategi": "single"}}}, "arms.a.strategi"),
        ({"arms": {"a": SHORT_ROWS}}, "arms.a: .*more than the data.row_length=100 slots"),
        ({"arms": {"a": SHORT_ROWS | {"parts": [STEPS]}}}, "arms.a: .*more than the data.row_length=100 slots"),
        ({"arms": {"a": {"strategy": "single", "layers": "mamba"}}}, "arms.a.layers: expected one of packmamba"),
        ({"arms": {"a": {"strategy": "single", "parts": ["split"]}}}, "arms.a.parts"),
        ({"arms": {"a": {"strategy": "single", "parts": ["breakdown"]}}}, "arms.a.parts: breakdown needs"),
        ({"arms": {"a": {"strategy": "single", "parts": [STEPS], "layers": "mamba-ssm"}}}, "arms.a.layers: graphs and"),
        ({"arms": {"a": {"strategy": "single", "graphs": True, "layers": "mamba-ssm"}}}, "arms.a.layers: graphs and"),
        ({"arms": {"a": {"strategy": "single", "parts": [BARE, BARE]}}}, "arms.a.parts: duplicate"),
        ({"parts": ["all"]}, "parts: expected one of"),
        ({"models": ["13b"]}, "known sizes"),
        ({"overrides": ["model.dmodel=1"]}, "unknown key"),
        ({"dtype": "float16"}, "dtype"),
        ({"rounds": 0}, "rounds"),
        ({"arms": {}, "parts": ["breakdown"]}, "expected something to do"),
        ({"parts": [STEPS], "arms": some("padded-longest")}, "expected something to do"),
        ({"models": []}, "expected something to do"),
        ({"models": ["130m", "130m"]}, "models: duplicate '130m'"),
        ({"growth_model": "13m"}, "known sizes"),
        ({"row_lengths": [512, 0]}, "row_lengths: expected at least 1, got 0"),
        ({"peak_flops_per_second": 0.0}, "peak_flops_per_second: expected above 0"),
        ({"precision": "half"}, "precision: expected one of 32-true"),
        ({"seed": -1}, "seed"),
        ({"overrides": ["trainer.devices=2"]}, "overrides: expected model.<key>=.*, got 'trainer.devices=2'"),
        ({"slots": 256, "arms": some("packed-512-best_fit")}, "expected rows of at most slots=256, got 512"),
        ({"overrides": ["model=370m"]}, "overrides: expected model"),
        ({"overrides": ["optimizer.lr=-1"]}, "optimizer.lr"),
        ({"overrides": ["model.vocab_size=null"]}, "overrides: model.vocab_size: expected a number"),
    ],
)
def test_refuses_as_it_is_read(change, message):
    with pytest.raises(ConfigError, match=message):
        configured(Config, TINY, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overrides": [*TINY["overrides"], "ops.backend=cuda"]}, "overrides: ops.backend"),
        ({"growth_graphs": True}, "growth_graphs need a GPU"),
        ({"arms": {"a": {"strategy": "single", "graphs": True}}}, "arms.a: graphs need a GPU; PyTorch sees none"),
    ],
)
def test_refuses_what_this_machine_cannot_do_before_it_measures(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, **change)
    assert not (tmp_path / "records").exists()
