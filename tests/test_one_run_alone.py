"""What decides a run and what does not: weights it starts from, determinism, the process's past; and runs that diverge."""

import pytest
import torch
from test_sweeps import write_sweep

import run
from packmamba import MambaLM
from packmamba.config import ConfigError
from packmamba.records import read_records
from packmamba.training import surroundings
from packmamba.training.callbacks import Stopped, checkpoints
from packmamba.training.fit import fit
from packmamba.training.run_id import recorded_config, run_folder, run_id
from packmamba.training.sweep import load_sweep, run_sweep
from runs import final_state, losses_of, tiny_config, write_config

LATER = [
    "name=later",
    "optimizer.lr=0.01",
    "optimizer.warmup_steps=0",
    "trainer.max_steps=4",
    "trainer.checkpoint_every=1",
]


def weights(config):
    return {k.removeprefix("model."): v for k, v in final_state(config)["state_dict"].items() if k.startswith("model.")}


@pytest.mark.slow
def test_a_run_starts_from_another_s_weights_with_its_own_schedule(tmp_path):
    first = tiny_config(tmp_path)
    fit(first, progress=False)
    expected = weights(first)
    (file,) = checkpoints(run_folder(first) / "checkpoints")
    MambaLM.from_pretrained(run_folder(first)).save_pretrained(tmp_path / "published")
    records = []
    for source in (run_folder(first), file, tmp_path / "published"):
        config = tiny_config(tmp_path, *LATER, f"trainer.init_from={source}", "optimizer.lr=1e-12")
        records.append(fit(config, progress=False))
        assert all(torch.allclose(weights(config)[name], expected[name], atol=1e-9) for name in expected), source
    assert len({record["metrics"]["started_from_checksum"] for record in records}) == 1
    assert records[0]["config"]["trainer"]["init_from"] == str(run_folder(first))
    assert records[0]["curves"]["train"][0]["step"] == 1 and records[0]["metrics"]["steps"] == 4
    assert records[0]["curves"]["validation"][-1]["loss"] == pytest.approx(
        read_records(run_folder(first))[0]["metrics"]["val_loss"], rel=1e-6
    )


@pytest.mark.slow
def test_a_stopped_run_goes_on_from_its_own_checkpoint_not_from_where_it_started(tmp_path):
    first = tiny_config(tmp_path)
    fit(first, progress=False)
    keys = [*LATER, "trainer.threads=1", f"trainer.init_from={run_folder(first)}"]
    whole = fit(tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/whole"), progress=False)
    stopped = tiny_config(tmp_path, *keys)
    with pytest.raises(Stopped):
        fit(stopped, progress=False, stop=lambda history: history.totals["steps"] == 2)
    (run_folder(first) / "pytorch_model.bin").unlink()  # it is not looked at again
    found = fit(stopped, progress=False)
    assert losses_of(found) == losses_of(whole)
    assert found["metrics"]["started_from_checksum"] == whole["metrics"]["started_from_checksum"]


@pytest.mark.slow
def test_each_seed_of_a_sweep_starts_from_its_own_run_of_another_sweep(tmp_path):
    sweep, configs = load_sweep(write_sweep(tmp_path, throughput_rounds=0, grid={"seed": [0, 1]}))
    run_sweep(sweep, configs, progress=False)
    for before in (config for config in configs if config.name == "packed"):
        later = tiny_config(tmp_path, *LATER, f"seed={before.seed}", f"trainer.init_from={sweep.output}:packed")
        alike = tiny_config(tmp_path, *LATER, f"seed={before.seed}", f"trainer.init_from={run_folder(before)}")
        assert losses_of(fit(later, progress=False)) == losses_of(fit(alike, progress=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "missing",
            "^trainer.init_from: expected a run's or published checkpoint's folder, a .ckpt file, or .* got 'missing'",
        ),
        ("{}:none", "^trainer.init_from: .* has no trained run of arm 'none' with seed 0; train it there first$"),
        ("{}", "^trainer.init_from: expected a run's or published checkpoint's folder, .* which holds no model$"),
        ("{}/broken.ckpt", "^trainer.init_from: .*broken.ckpt is cut short, or no checkpoint$"),
        (
            "{}/small",
            "^trainer.init_from: .*small: 'backbone.embedding.weight': expected shape .* from this run's keys of model, got",
        ),
    ],
)
def test_weights_that_cannot_be_are_one_sentence(tmp_path, source, message):
    fit(tiny_config(tmp_path, f"output={tmp_path}", "trainer.max_steps=1"), progress=False)
    (tmp_path / "broken.ckpt").write_bytes(b"PK broken")
    MambaLM(vocab_size=9, d_model=8, n_layer=2, d_state=4).save_pretrained(tmp_path / "small")
    config = tiny_config(tmp_path, *LATER, f"trainer.init_from={source.format(tmp_path)}")
    with pytest.raises(ConfigError, match=message) as caught:
        fit(config, progress=False)
    assert "\n" not in str(caught.value) and not (run_folder(config) / "records").exists()


@pytest.mark.parametrize("keys", [[], ["data.strategy=padded", "trainer.average_snapshots=2"]])
def test_a_diverged_run_ends_is_recorded_and_said(tmp_path, keys, capsys):
    config = tiny_config(tmp_path, *keys, "optimizer.lr=1e30", "trainer.max_steps=500", "evaluations=[perplexity]")
    assert run.main(["train", str(write_config(tmp_path / "run.yaml", config))]) == 1
    said = capsys.readouterr()
    assert (
        said.err.splitlines()[-1]
        == "run.py: error: the run diverged: its loss was not finite at step 2; its record says so"
    )
    (record,) = read_records(run_folder(config))
    metrics = record["metrics"]
    assert metrics["diverged_at_step"] == metrics["steps"] == 2 and metrics["val_loss"] is None
    assert not any(name.startswith("perplexity") for name in metrics)
    assert not (run_folder(config) / "config.json").exists(), "a model of NaN is no model"
    assert fit(config, progress=False) == record, "it is not repeated"


def test_a_sweep_goes_on_after_a_diverged_run(tmp_path, capsys):
    arms = {"a": {"optimizer.lr": 1e30}, "b": {}}
    sweep, configs = load_sweep(write_sweep(tmp_path, arms=arms, throughput_rounds=0, grid={}))
    records = read_records(run_sweep(sweep, configs))
    assert {record["arm"]: record["metrics"]["val_loss"] is None for record in records} == {"a": True, "b": False}
    assert "a, seed 0: diverged after" in capsys.readouterr().out


def test_determinism_is_asked_for_while_a_run_trains_and_not_after(tmp_path):
    seen = []

    def look(step):
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()))
        return False

    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    config = tiny_config(
        tmp_path, "trainer.deterministic=true", f"trainer.threads={before[1] + 1}", "trainer.max_steps=2"
    )
    records = [fit(config, False, look)]
    assert seen == [(True, before[1] + 1)] * 2
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == before
    plain = tiny_config(tmp_path)
    assert run_id(config) != run_id(tiny_config(tmp_path, f"trainer.threads={before[1] + 1}", "trainer.max_steps=2"))
    assert (
        "deterministic" not in recorded_config(plain)["trainer"]
        and "init_from" not in recorded_config(plain)["trainer"]
    )
    fit(plain, progress=False)  # something else in between
    config.runs_dir = f"{tmp_path}/again"
    records.append(fit(config, progress=False))
    assert losses_of(records[0]) == losses_of(records[1])


def test_compiled_code_never_falls_back_unsaid(tmp_path, monkeypatch):
    monkeypatch.setattr(surroundings, "MOST_GRAPHS", 2)
    config = tiny_config(tmp_path, "model.compile=true")
    limits = torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit
    with pytest.raises(
        ConfigError, match="^model.compile: expected at most 2 shapes of a batch that are compiled apart"
    ):
        with surroundings.surroundings(config):
            grow = torch.compile(lambda x, n: x + n, backend="eager", dynamic=False)
            for size in range(2, 6):
                grow(torch.zeros(size), size)
    assert (torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit) == limits


@pytest.mark.slow
def test_code_compiled_for_another_run_serves_only_where_it_cannot_matter(tmp_path, monkeypatch):
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    gpu = ["model.compile=true", "trainer.accelerator=auto"]

    def anew(*keys):
        before = len(resets)
        with surroundings.surroundings(tiny_config(tmp_path, *keys)):
            return len(resets) > before

    assert anew("model.compile=true") and anew("model.compile=true"), "on a CPU a run has its own bits"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert anew(*gpu) and not anew(*gpu, "seed=1", "trainer.boundary=leak")
    assert anew(*gpu, "model.d_model=12"), "sizes that differ would be compiled as unknown ones"
    assert anew(*gpu, "model.d_model=12", "trainer.deterministic=true") and anew(*gpu, "model.d_model=12")
