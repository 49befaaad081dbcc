"""One run: its record, files and checks; the weights that it starts from; the settings of its
process.
"""

import functools
import itertools
from types import SimpleNamespace

import lightning
import pytest
import torch

from packmamba import MambaLM
from packmamba.config import ConfigError, load_config
from packmamba.lab.callbacks import checkpoints
from packmamba.lab.fit import fit, load_initial_weights
from packmamba.lab.records import read_records
from packmamba.lab.run_id import RunLock, recorded_config, run_folder
from packmamba.ops import BACKENDS
from packmamba.ops.backends import Backend
from runs import data_of, final_state, tiny_config

LATER = ["name=later", "optimizer.lr=0.01", "optimizer.warmup_steps=0", "trainer.max_steps=4", "trainer.checkpoint_every=1",
         "trainer.threads=1"]  # fmt: skip


def test_a_run_leaves_its_record_model_and_logs(tmp_path):
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.boundary=leak")
    record = fit(config, progress=False)
    assert record["kind"] == "training" and record["config"] == recorded_config(config)
    assert record["hardware"]["backend"] in BACKENDS
    metrics, curves = record["metrics"], record["curves"]
    assert metrics["steps"] == 6 and metrics["val_loss_as_trained"] is not None
    assert [point["step"] for point in curves["train"]] == [1, 2, 3, 4, 5, 6]
    assert [point["step"] for point in curves["validation"]] == [3, 6]
    assert metrics["val_loss"] == curves["validation"][-1]["loss"] < curves["validation"][0]["loss"] + 0.5
    assert 0 < metrics["padding_fraction"] < 0.5 and metrics["slots_per_second"] > metrics["real_tokens_per_second"] > 0
    assert sum(bucket["count"] for bucket in curves["loss_by_position"]) > 0
    folder = run_folder(config)
    assert [path.name for path in checkpoints(folder / "checkpoints")] == ["step=6.ckpt"]
    weights = MambaLM.from_pretrained(folder).state_dict()
    state = final_state(config)["state_dict"]
    assert all(torch.equal(state[f"model.{name}"], weight) for name, weight in weights.items())
    assert read_records(folder) == [record] == [fit(config, progress=False)], "a finished run is not repeated"


@pytest.mark.parametrize("key", ["output", "runs_dir"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, key):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=key):
        fit(tiny_config(tmp_path, f"{key}={tmp_path}/file/mine"), progress=False)
    assert not (tmp_path / "cache").exists(), "before documents are read"


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [
        ("trainer.accelerator", "gpu", []),
        ("trainer.cuda_graphs", "true", []),
        ("trainer.precision", "16-mixed", []),
        ("trainer.boundary_options", "{unknown: 1}", []),
        ("trainer.callbacks", "[lightning.pytorch.callbacks.EMAWeightAveraging]", ["trainer.strategy=fsdp2"]),
        ("evaluation_options.parity", "{unknown: 6}", ["evaluations=[parity]"]),
        ("model.vocab_size", "9", []),
        ("trainer.callbacks", "[{class: missing}]", []),
        ("trainer.samples", "2", ["data.source=synthetic", "data.path=null"]),
        ("optimizer.options", "{momentum: abc}", ["optimizer.name=muon"]),
        ("ops.backend", "missing", []),
        ("data.chat_template", "chatlm", ["data.source=text"]),
    ],
)
def test_a_run_that_cannot_be_is_refused_by_its_key(tmp_path, monkeypatch, key, value, others):
    monkeypatch.setitem(BACKENDS, "missing", Backend(packages=("not_there",)))
    with pytest.raises(ConfigError, match=f"^(unknown key ')?{key}[:.]"):
        config = tiny_config(tmp_path, f"{key}={value}", *others)
        with RunLock(run_folder(config)):  # as a sweep does
            fit(config, progress=False)
    assert not [*tmp_path.rglob("*-seed*")]


def test_speed_leaves_out_the_first_steps_and_validation_and_checkpoints(tmp_path, monkeypatch):
    # each look at the clock takes a second
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("packmamba.lab.callbacks.time", clock)
    save = lightning.Trainer.save_checkpoint
    slow = lambda *a, **k: [save(*a, **k), *(clock.perf_counter() for _ in range(99))]
    monkeypatch.setattr(lightning.Trainer, "save_checkpoint", slow)
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.checkpoint_every=2")
    metrics = fit(config, progress=False)["metrics"]
    data = data_of(config)
    tokens = [data.steps[i].num_tokens for i in range(6)]
    waits = {"leakcheck": 1, "checkpoints": 3, "validations": 2}
    assert metrics["real_tokens"] == sum(tokens) and metrics["train_seconds"] == 6 + sum(waits.values())
    assert metrics["real_tokens_per_second"] == sum(tokens[3:]) / (3 + 3) != sum(tokens) / 12


def test_a_run_starts_from_weights_with_its_own_schedule(tmp_path):
    config = tiny_config(tmp_path, f"output={tmp_path}/sweep", f"runs_dir={tmp_path}/sweep/runs")
    record = fit(config, progress=False)
    model = MambaLM.from_pretrained(run_folder(config))
    model.save_pretrained(tmp_path / "published")
    records = []
    for source in (run_folder(config), tmp_path / "published", f"{config.output}:tiny"):
        later = tiny_config(tmp_path, *LATER, f"trainer.init_from={source}", "optimizer.lr=1e-12")
        records.append(fit(later, progress=False))
        state = final_state(later)["state_dict"]
        assert all(torch.allclose(state[f"model.{n}"], w, atol=1e-9) for n, w in model.state_dict().items()), source
    assert len({each["metrics"]["started_from_checksum"] for each in records}) == 1
    assert records[0]["metrics"]["steps"] == 4 and records[0]["curves"]["train"][0]["step"] == 1
    assert records[0]["metrics"]["val_loss"] == pytest.approx(record["metrics"]["val_loss"], rel=1e-6)


@pytest.mark.parametrize("source", ["missing", "{}:none", "{}", "{}/small"])
def test_weights_that_cannot_be_are_refused(tmp_path, source):
    MambaLM(vocab_size=9, d_model=8, n_layer=2, d_state=4).save_pretrained(tmp_path / "small")
    config = tiny_config(tmp_path, *LATER, f"trainer.init_from={source.format(tmp_path)}")
    with pytest.raises(ConfigError, match=r"trainer\.init_from") as refused:
        fit(config, progress=False)
    assert "\n" not in str(refused.value) and not run_folder(config).exists()


def test_weights_of_another_decay_are_refused(tmp_path):
    """Both decays have weights of the same names and shapes."""
    make = functools.partial(MambaLM, 9, 16, 1, mixer="mamba3", d_state=8, headdim=8)
    make(decay="softplus").save_pretrained(tmp_path)
    config = load_config(None, ["model.mixer=mamba3", f"trainer.init_from={tmp_path}"])
    load_initial_weights(make(decay="softplus"), config)
    with pytest.raises(ConfigError, match=r"trainer\.init_from: decay: expected softplus"):
        load_initial_weights(make(), config)


def test_weights_of_other_heads_are_refused(tmp_path):
    """Two groups of 4 states have the shapes of one of 8."""
    make = functools.partial(MambaLM, 9, 16, 1, mixer="mamba2", headdim=8)
    make(d_state=4, ngroups=2).save_pretrained(tmp_path)
    config = load_config(None, ["model.mixer=mamba2", f"trainer.init_from={tmp_path}"])
    load_initial_weights(make(d_state=4, ngroups=2), config)
    with pytest.raises(ConfigError, match=r"trainer\.init_from: d_state: expected 4, as of .*, got 8"):
        load_initial_weights(make(d_state=8), config)
    make(d_state=8, tie_embeddings=False).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.init_from: lm_head.weight: .* tie_embeddings=F"):
        load_initial_weights(make(d_state=8), config)
    make(d_state=8, dt_limit=(0.0, 1.0)).save_pretrained(tmp_path)
    load_initial_weights(make(d_state=8, dt_limit=(0, 1), tie_embeddings=False), config)


def test_what_is_overridden_of_lightning_exists(tmp_path, monkeypatch):
    """A private name that a later version drops would stay overridden for nothing."""
    monkeypatch.delattr(lightning.pytorch.loops._TrainingEpochLoop, "_broadcast_sigterm_tensor")
    with pytest.raises(AssertionError, match="_broadcast_sigterm_tensor"):
        fit(tiny_config(tmp_path), progress=False)
