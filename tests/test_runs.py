"""One run: its record and logs, what it is named after, what it refuses."""

import time
from types import SimpleNamespace

import lightning
import pytest
import torch
import torch.nn.functional as F

import packmamba.training.fit as one_run
from packmamba.config import ConfigError
from packmamba.data.datamodule import PackedDataModule
from packmamba.ops import BACKENDS
from packmamba.ops.backends import Backend
from packmamba.records import read_records
from packmamba.training.callbacks import RunMetrics, checkpoints
from packmamba.training.fit import fit
from packmamba.training.lit_module import PackedLitModule
from packmamba.training.run_id import recorded_config, run_folder, run_id
from runs import final_state, tiny_config


@pytest.mark.slow
@pytest.mark.parametrize(
    "key",
    [
        "seed=-1",
        "optimizer.lr=nan",
        "optimizer.warmup_steps=-1",
        "optimizer.weight_decay=-1",
        "optimizer.final_lr_fraction=2",
        "optimizer.grad_clip=nan",
        "trainer.threads=100000",
    ],
)
def test_numbers_that_no_run_can_use_are_refused(tmp_path, key):
    with pytest.raises(ConfigError, match=f"{key.split('=')[0]}: expected"):
        fit(tiny_config(tmp_path, key), progress=False)


@pytest.mark.parametrize("key", ["output", "runs_dir"])
def test_a_folder_that_cannot_be_written_is_named_before_documents_are_read(tmp_path, key):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"^{key}: .* cannot be written \(Not a directory\)$"):
        fit(tiny_config(tmp_path, f"{key}={tmp_path}/file/mine"), progress=False)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.boundary=lek", "trainer.boundary: expected one of"),
        ("model.d_model=0", "model.d_model: expected an integer of at least 1, got 0"),
        ("model.recompute=all", "model.recompute: expected one of"),
        ("trainer.precision=fp16", "trainer: Precision 'fp16' is invalid"),
        ("trainer.accelerator=tpu", "^trainer.accelerator: 'tpu' needs torch_xla, which is not installed$"),
        ("trainer.accelerator=mps", "^trainer.accelerator: 'mps' needs a Mac whose GPU PyTorch can use$"),
        (
            "ops.backend=mamba_ssm",
            "^ops.backend: 'mamba_ssm' (needs mamba_ssm and causal_conv1d, not installed|expected tensors on)",
        ),
    ],
)
def test_a_run_is_refused_before_documents_are_read(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        fit(tiny_config(tmp_path, override), progress=False)
    assert not (tmp_path / "cache").exists() and not (tmp_path / "runs").exists()


def test_a_backend_whose_packages_are_missing_is_named(tmp_path, monkeypatch):
    missing = Backend(packages=("not_there", "not_there.kernels"))
    monkeypatch.setitem(BACKENDS, "mine", missing)
    message = "^ops.backend: 'mine' needs not_there and not_there.kernels, not installed here$"
    with pytest.raises(ConfigError, match=message):
        fit(tiny_config(tmp_path, "ops.backend=mine"), progress=False)


@pytest.mark.slow
def test_saving_is_not_training_time(tmp_path, monkeypatch):
    save = lightning.Trainer.save_checkpoint
    monkeypatch.setattr(lightning.Trainer, "save_checkpoint", lambda *a, **k: (time.sleep(0.5), save(*a, **k))[1])
    record = fit(tiny_config(tmp_path, "data.strategy=greedy", "trainer.checkpoint_every=1"), progress=False)
    assert record["metrics"]["train_seconds"] < record["wall_seconds"] - 6 * 0.5


def test_evaluations_are_part_of_a_run_s_time(tmp_path, monkeypatch):
    """A sweep takes from it whether the next run fits before its deadline."""
    monkeypatch.setattr(one_run, "run_evaluations", lambda *_: (time.sleep(0.5), ({}, {}))[1])
    config = tiny_config(tmp_path, "trainer.max_steps=1")
    begun = time.perf_counter()
    record = fit(config, progress=False)
    assert time.perf_counter() - begun - record["wall_seconds"] < 0.5


def test_throughput_leaves_out_the_first_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(RunMetrics, "_lap", lambda _: 1.0)
    monkeypatch.setattr(RunMetrics, "settle", lambda _: None)  # laps where some test has used a GPU
    config = tiny_config(tmp_path, "data.strategy=greedy")
    metrics = fit(config, progress=False)["metrics"]
    data = PackedDataModule.from_config(config, progress=False)
    data.setup()
    tokens = [data.steps[i].num_tokens for i in range(6)]
    assert metrics["train_seconds"] == 6 and metrics["real_tokens"] == sum(tokens)
    assert metrics["real_tokens_per_second"] == sum(tokens[3:]) / 3 != sum(tokens) / 6


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("clip", "moves"), [("null", True), ("1.0e-9", False)])
def test_clipping_limits_the_step(tmp_path, clip, moves, accelerator):
    keys = [
        f"trainer.accelerator={accelerator}",
        f"optimizer.grad_clip={clip}",
        "optimizer.weight_decay=0",
        "trainer.max_steps=1",
        "optimizer.warmup_steps=0",
    ]
    config = tiny_config(tmp_path, "data.strategy=greedy", *keys)
    fit(config, progress=False)
    lightning.seed_everything(config.seed, workers=True, verbose=False)
    start = PackedLitModule.from_config(config, 256).state_dict()
    end = final_state(config)["state_dict"]
    most = max(float((end[name].cpu() - start[name]).abs().max()) for name in end)
    # AdamW's first step is the learning rate wherever the gradient is far above its epsilon, 1e-8.
    assert (most > 1e-3) is moves


@pytest.mark.gpu
def test_clipping_in_the_fused_step_is_clipping(tmp_path):
    losses = []
    for accelerator in ("cpu", "gpu"):
        keys = [
            "data.strategy=greedy",
            "optimizer.grad_clip=0.9",
            f"trainer.accelerator={accelerator}",
        ]  # of some steps
        config = tiny_config(tmp_path, f"name={accelerator}", *keys)
        losses.append([point["loss"] for point in fit(config, progress=False)["curves"]["train"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_leaves_its_record_and_logs(tmp_path):
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.boundary=leak")
    record = fit(config, progress=False)
    assert record["kind"] == "training" and record["config"] == recorded_config(config)
    metrics, curves = record["metrics"], record["curves"]
    assert metrics["steps"] == 6 and metrics["val_loss_as_trained"] is not None
    assert [point["step"] for point in curves["train"]] == [1, 2, 3, 4, 5, 6]
    assert [point["step"] for point in curves["validation"]] == [3, 6]
    assert metrics["val_loss"] == curves["validation"][-1]["loss"] < curves["validation"][0]["loss"] + 0.5
    assert 0 < metrics["padding_fraction"] < 0.5 and metrics["real_tokens_per_second"] > 0
    assert metrics["slots_per_second"] > metrics["real_tokens_per_second"]
    assert sum(bucket["count"] for bucket in curves["loss_by_position"]) > 0
    folder = run_folder(config)
    csv = (folder / "csv" / "version_0" / "metrics.csv").read_text()
    for name in ("train/loss", "train/real_tokens_per_second", "data/padding_fraction", "val/loss", "val/loss_start"):
        assert name in csv.splitlines()[0]
    assert list((folder / "tensorboard").glob("events.*"))
    assert [path.name for path in checkpoints(folder / "checkpoints")] == ["step=6.ckpt"]


def test_a_run_that_another_process_finishes_meanwhile_is_not_recorded_twice(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, "trainer.max_steps=1")
    make = one_run.make_trainer

    def make_while_another_finishes(*arguments):
        monkeypatch.setattr(one_run, "make_trainer", make)
        fit(config, progress=False)
        return make(*arguments)

    monkeypatch.setattr(one_run, "make_trainer", make_while_another_finishes)
    with pytest.raises(ConfigError, match="another process has just finished this run"):
        fit(config, progress=False)
    assert len(read_records(run_folder(config))) == 1


def test_the_last_step_is_evaluated_whatever_the_interval(tmp_path):
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.validate_every=4", "trainer.max_steps=5")
    assert [point["step"] for point in fit(config, progress=False)["curves"]["validation"]] == [4, 5]
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.validate_every=40", "trainer.max_steps=2")
    assert [point["step"] for point in fit(config, progress=False)["curves"]["validation"]] == [2]


def test_a_runs_name_is_what_decides_its_result(tmp_path):
    config = tiny_config(tmp_path)
    assert run_id(config) == run_id(tiny_config(tmp_path, "runs_dir=elsewhere", "output=x", "data.cache_dir=y"))
    assert run_id(config) != run_id(tiny_config(tmp_path, "seed=1"))
    assert run_id(tiny_config(tmp_path, "name=packed d_model=3/x")).startswith("packed-d_model-3-x-")


def test_an_output_folder_may_be_the_current_one(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    config = tiny_config(tmp_path, "output=.", "trainer.max_steps=1")
    assert fit(config, progress=False)["experiment"] == "mine"


def test_memory_is_that_of_training(monkeypatch):
    """An evaluation reads documents of any length; what it takes is not the arm's."""
    held = iter([5, 7])
    resets = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(held))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    history, module = RunMetrics(1), SimpleNamespace(device=torch.device("cuda"))
    trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"))
    history.on_validation_start(trainer, module)
    history.on_validation_end(trainer, module)
    assert (history.peak_memory, resets) == (5, [module.device])
    history.on_train_end(trainer, module)
    resumed = RunMetrics(1)
    resumed.load_state_dict(history.state_dict())
    assert resumed.peak_memory == 7


@pytest.mark.parametrize("strategy", ["padded", "greedy"])
def test_a_step_s_mean_may_be_over_rows(tmp_path, strategy):
    """The gradient is that of the mean of row means, pass by pass; a record's losses stay means over targets."""
    config = tiny_config(tmp_path, f"data.strategy={strategy}", "data.slots_per_batch=100000", "trainer.mean_over=rows")
    data = PackedDataModule.from_config(config, progress=False)
    data.setup()
    torch.manual_seed(0)
    module = PackedLitModule.from_config(config, data.corpora.train.vocab_size)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # rows' losses differ
    (batch,) = data.steps[0].batches
    targets = batch.loss_mask.sum(1)
    assert len(targets) > 1 and len(set(targets.tolist())) > 1
    losses = F.cross_entropy(
        module.model(batch.tokens, layout=batch.layout).transpose(1, 2), batch.targets, reduction="none"
    )
    some = targets > 0
    expected = ((losses * batch.loss_mask).sum(1)[some] / targets[some]).mean()
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    found = module.accumulate(data.steps[0], torch.Tensor.backward)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in module.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=1e-3, atol=1e-6), name
    over_targets = (losses * batch.loss_mask).sum() / targets.sum()
    assert module.losses(batch).sum().item() / targets.sum().item() == pytest.approx(over_targets.item(), rel=1e-5)
    assert abs(over_targets - expected) > 1e-3
