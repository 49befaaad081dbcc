"""Runs as a user starts them: records, resuming after SIGKILL, sweeps, refusals, two processes."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import lightning
import pytest
import torch
import yaml
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import run
from packmamba.config import ConfigError, load_config, to_dict
from packmamba.results.record import read_records
from packmamba.results.report import build_sections
from packmamba.training.callbacks import checkpoints
from packmamba.training.fit import decisive, fit, run_folder, run_id
from packmamba.training.module import MambaLitModule
from packmamba.training.sweep import load_sweep, run_sweep
from packmamba.training.throughput import _check_agreement, measure_throughput
from runs import CARRY, tiny_config

ROOT = Path(__file__).resolve().parent.parent


def run_py(*arguments, **kwargs):
    command = [sys.executable, str(ROOT / "run.py"), *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **kwargs
    )


def write_config(path, config):
    path.write_text(yaml.safe_dump(to_dict(config)))
    return path


def final_state(config):
    (last,) = checkpoints(run_folder(config) / "checkpoints")
    return torch.load(last, weights_only=False)


def leaves(value):
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def losses_of(record):
    drop = {"seconds"}
    return {
        name: [{k: v for k, v in point.items() if k not in drop} for point in points]
        for name, points in record["curves"].items()
    }


@pytest.mark.parametrize("keys", [["data.strategy=greedy"], [*CARRY, "data.mode=stream", "data.tokens_per_step=144"]],
                         ids=["packed", "carry"])  # fmt: skip
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, keys):
    overrides = [*keys, "data.num_workers=2", "trainer.max_steps=60", "trainer.validate_every=5",
                 "trainer.checkpoint_every=3", "trainer.threads=1", "model.learned_initial_state=true"]  # fmt: skip
    whole = tiny_config(tmp_path, *overrides, f"runs_dir={tmp_path}/whole")
    killed = tiny_config(tmp_path, *overrides, f"runs_dir={tmp_path}/killed")
    expected = fit(whole, progress=False)
    path = write_config(tmp_path / "killed.yaml", killed)
    folder = run_folder(killed) / "checkpoints"
    moments = random.Random(0)
    kills = 0
    for _ in range(2):
        before = checkpoints(folder)[-1:]
        process = run_py("train", path)
        while process.poll() is None and checkpoints(folder)[-1:] == before:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()
    assert kills == 2 and not (run_folder(killed) / "records").exists(), "the run must die before its end, twice"
    process = run_py("train", path)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (record,) = read_records(run_folder(killed))
    assert losses_of(record) == losses_of(expected)
    a, b = final_state(killed), final_state(whole)
    for part in ("state_dict", "optimizer_states", "carry", "rng"):
        for x, y in zip(leaves(a[part]), leaves(b[part]), strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else (x == y) is True or (x == y).all(), part
    again = fit(killed, progress=False)
    assert again == record, "a finished run is not repeated"


def test_a_run_stopped_in_an_evaluation_evaluates_that_step_again(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.checkpoint_every=1", "trainer.validate_every=3")
    evaluate = MambaLitModule.validation_step

    def stop(module, *arguments):
        if module.global_step == 3:
            raise RuntimeError("stopped")
        evaluate(module, *arguments)

    monkeypatch.setattr(MambaLitModule, "validation_step", stop)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(config, progress=False)
    assert checkpoints(run_folder(config) / "checkpoints")[-1].name == "step=2.ckpt"
    monkeypatch.setattr(MambaLitModule, "validation_step", evaluate)
    assert [point["step"] for point in fit(config, progress=False)["curves"]["validation"]] == [3, 6]


def test_a_record_of_other_documents_is_not_taken_for_this_run(tmp_path):
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.max_steps=1")
    fit(config, progress=False)
    with open(config.data.path, "a") as documents:
        documents.write('{"text": "abcd"}\n')
    with pytest.raises(ConfigError, match="the documents have changed since this run"):
        fit(config, progress=False)


@pytest.mark.parametrize(
    "key", ["seed=-1", "optimizer.lr=nan", "optimizer.warmup_steps=-1", "optimizer.weight_decay=-1"]
)
def test_numbers_that_no_run_can_use_are_refused(tmp_path, key):
    with pytest.raises(ConfigError, match=f"{key.split('=')[0]}: expected"):
        fit(tiny_config(tmp_path, key), progress=False)


def test_a_damaged_checkpoint_is_one_sentence(tmp_path):
    config = tiny_config(tmp_path, "data.strategy=greedy")
    folder = run_folder(config) / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "step=2.ckpt").write_bytes(b"PK broken")
    with pytest.raises(ConfigError, match="step=2.ckpt cannot be read"):
        fit(config, progress=False)


def test_saving_is_not_training_time(tmp_path, monkeypatch):
    save = lightning.Trainer.save_checkpoint
    monkeypatch.setattr(lightning.Trainer, "save_checkpoint", lambda *a, **k: (time.sleep(0.5), save(*a, **k))[1])
    record = fit(tiny_config(tmp_path, "data.strategy=greedy", "trainer.checkpoint_every=1"), progress=False)
    assert record["metrics"]["train_seconds"] < 2 < record["wall_seconds"]


@pytest.mark.parametrize(("clip", "moves"), [("null", True), ("1.0e-9", False)])
def test_clipping_limits_the_step(tmp_path, clip, moves):
    keys = [
        f"optimizer.grad_clip={clip}",
        "optimizer.weight_decay=0",
        "trainer.max_steps=1",
        "optimizer.warmup_steps=0",
    ]
    config = tiny_config(tmp_path, "data.strategy=greedy", *keys)
    fit(config, progress=False)
    lightning.seed_everything(config.seed, workers=True, verbose=False)
    start = MambaLitModule(config, 256).state_dict()
    end = final_state(config)["state_dict"]
    most = max(float((end[name] - start[name]).abs().max()) for name in end)
    # AdamW's first step is the learning rate wherever the gradient is far above its epsilon, 1e-8.
    assert (most > 1e-3) is moves


def test_a_run_leaves_its_record_and_logs(tmp_path):
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.boundary=leak")
    record = fit(config, progress=False)
    assert record["kind"] == "training" and record["config"] == decisive(config)
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


def test_the_last_step_is_evaluated_whatever_the_interval(tmp_path):
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.validate_every=4", "trainer.max_steps=5")
    assert [point["step"] for point in fit(config, progress=False)["curves"]["validation"]] == [4, 5]
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.validate_every=40", "trainer.max_steps=2")
    assert [point["step"] for point in fit(config, progress=False)["curves"]["validation"]] == [2]


def test_a_runs_name_is_what_decides_its_result(tmp_path):
    config = tiny_config(tmp_path)
    assert run_id(config) == run_id(tiny_config(tmp_path, "runs_dir=elsewhere", "experiment=x", "data.cache_dir=y"))
    assert run_id(config) != run_id(tiny_config(tmp_path, "seed=1"))
    assert run_id(tiny_config(tmp_path, "name=packed d_model=3/x")).startswith("packed-d_model-3-x-")


def write_sweep(tmp_path, **changes):
    base = write_config(tmp_path / "base.yaml", tiny_config(tmp_path, "trainer.max_steps=2"))
    sweep = {
        "output": str(tmp_path / "sweep"),
        "base": str(base),
        "common": {"data.row_length": 30},
        "arms": {"padded": {"data.strategy": "padded"}, "packed": {"data.strategy": "greedy"}},
        "grid": {"seed": [0, 1], "model.d_state": [2, 4]},
        "throughput_rounds": 3,
    } | changes
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep))
    return path


def test_a_sweep_runs_its_grid_once(tmp_path):
    path = write_sweep(tmp_path)
    sweep, configs = load_sweep(path, ["model.d_model=4"])
    assert len(configs) == 8 and len({run_id(config) for config in configs}) == 8
    assert {(c.name, c.seed, c.model.d_state, c.data.strategy) for c in configs} == {
        (f"{arm} d_state={n}", seed, n, strategy)
        for arm, strategy in (("padded", "padded"), ("packed", "greedy")) for seed in (0, 1) for n in (2, 4)
    }  # fmt: skip
    assert all(config.data.row_length == 30 and config.model.d_model == 4 for config in configs)
    folder = run_sweep(sweep, configs[:4], progress=False)
    files = {file: file.read_bytes() for file in (folder / "records").iterdir()}
    assert len(files) == 5
    records = read_records(folder)
    timed = [record for record in records if record["kind"] == "throughput"]
    assert {record["arm"] for record in timed} == {"padded d_state=2", "packed d_state=2"}
    assert len({record["config"]["run"] for record in timed}) == 1
    run_sweep(sweep, configs, progress=False)
    assert len(list((folder / "records").iterdir())) == 9
    assert all(file.read_bytes() == content for file, content in files.items()), "nothing that was done is done again"


def test_a_sweep_may_only_time(tmp_path):
    sweep, configs = load_sweep(write_sweep(tmp_path, train=False, grid={}))
    folder = run_sweep(sweep, configs, progress=False)
    records = read_records(folder)
    assert {record["kind"] for record in records} == {"throughput"} and len(records) == 2
    (section,) = build_sections(records)
    assert [figure.name for figure in section.figures] == ["speed"]


def test_arms_that_disagree_are_not_timed():
    _check_agreement({"single": 5.0, "packed": 5.0001})
    with pytest.raises(RuntimeError, match="nothing is timed: arms disagree"):
        _check_agreement({"single": 5.0, "packed": 5.01})


def test_throughput_times_the_same_work_for_every_arm(tmp_path):
    configs = [
        tiny_config(tmp_path, f"name={strategy}", f"data.strategy={strategy}")
        for strategy in ("single", "padded", "greedy")
    ]
    records = list(measure_throughput(configs, rounds=4, experiment="x", progress=False))
    assert [record["arm"] for record in records] == ["single", "padded", "greedy"]
    padding = [record["metrics"]["padding_fraction"] for record in records]
    assert padding[0] == 0 and padding[1] > padding[2] > 0
    for record in records:
        metrics = record["metrics"]
        work = metrics["real_tokens_per_second"] * metrics["seconds_per_step_median"]
        assert 60 < work < 140, "about data.tokens_per_step real tokens a step"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": {}}, "unknown key 'arm'.*'arms'"),
        ({"arms": {}}, "at least one arm"),
        ({"arms": {"x": {"data.stratgy": "padded"}}}, "unknown key 'data.stratgy'.*data.strategy"),
        ({"arms": {"x": {"trainer.boundary": "carry"}}}, "carry needs data.strategy=split"),
        ({"grid": {"seed": []}}, "grid.seed: expected at least one value"),
        ({"base": "missing.yaml"}, "missing.yaml does not exist"),
        ({"throughput_rounds": "many"}, "throughput_rounds|many"),
        ({"train": False, "throughput_rounds": 0}, "nothing to do"),
        ({"common": {"trainer.max_steps": 0}}, "trainer.max_steps: expected at least 1"),
    ],
)
def test_a_sweep_refuses_before_any_work(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_sweep(write_sweep(tmp_path, **changes))
    assert "\n" not in str(caught.value)


MISTAKES = {
    "a command": (["trian", "configs/train.yaml"], "unknown command 'trian'; did you mean 'train'?"),
    "a later command": (["frobnicate"], "unknown command 'frobnicate'"),
    "a key": (["train", "configs/train.yaml", "data.stratgy=x"], "did you mean 'data.strategy'?"),
    "a section": (["train", "configs/train.yaml", "data=3"], "'data' in 'data=3' is a section"),
    "a value": (["train", "configs/train.yaml", "trainer.max_steps=many"], "trainer.max_steps"),
    "a missing file": (["train", "configs/missing.yaml"], "configs/missing.yaml does not exist"),
    "no assignment": (["train", "configs/train.yaml", "best_fit"], "expected key=value, got 'best_fit'"),
    "a strategy": (["train", "configs/train.yaml", "data.strategy=best-fit"], "did you mean 'best_fit'?"),
    "a long document": (["train", "configs/train.yaml", "data.overlong=error"], "data.row_length=1024 is shorter"),
    "carry": (["train", "configs/train.yaml", "trainer.boundary=carry"], "needs data.strategy=split"),
    "a source's file": (
        ["train", "configs/train.yaml", "data.source=jsonl", "data.path=missing.jsonl"], "missing.jsonl"),
    "a backend": (["train", "configs/train.yaml", "ops.backend=cuda", "trainer.accelerator=cpu"], "ops.backend: 'cuda'"),
    "a model size": (["train", "configs/train.yaml", "model=13b"], "known sizes: 1.4b, 130m"),
    "a precision": (["train", "configs/train.yaml", "trainer.precision=8"], "trainer"),
    "a folder": (["report", "experiments/missing"], "experiments/missing"),
    "a bench": (["bench", "configs/train.yaml"], "bench: expected one of packing"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_typo_is_one_sentence_and_status_2(name, tmp_path, capsys):
    arguments, message = MISTAKES[name]
    arguments = [*arguments, *([f"data.cache_dir={tmp_path}"] if arguments[0] == "train" else [])]
    try:
        status = run.main(arguments)
    except SystemExit as exit:
        status = exit.code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert status == 2
    assert len(lines) == 1 and lines[0].startswith("run.py: error: ") and message in lines[0]


def test_a_typo_in_the_shell():
    process = run_py("train", "configs/train.yaml", "data.strategy=best-fit")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and output == ""
    assert len(errors.splitlines()) == 1 and "did you mean 'best_fit'?" in errors


def test_doctor_needs_no_gpu(capsys):
    assert run.main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "reference: available" in output and "PyTorch" in output


def test_configs_are_read_strictly(tmp_path):
    config = load_config("configs/train.yaml", ["model=130m", "data.strategy=best_fit"])
    assert (config.model.d_model, config.model.n_layer, config.model.vocab_size) == (768, 24, 50280)
    path = tmp_path / "broken.yaml"
    path.write_text("data: [1, 2\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(path)
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="not a list"):
        load_config(path)


def assert_trained_as_one(both, alone, tolerance):
    a, b = final_state(both)["state_dict"], final_state(alone)["state_dict"]
    for name, value in b.items():
        assert torch.allclose(a[name], value, rtol=tolerance, atol=tolerance / 1e3), name
    (record,) = read_records(run_folder(both))
    (whole,) = read_records(run_folder(alone))
    assert record["metrics"]["real_tokens"] == whole["metrics"]["real_tokens"]
    for curve in ("train", "validation"):
        for a_point, b_point in zip(losses_of(record)[curve], losses_of(whole)[curve], strict=True):
            assert a_point == pytest.approx(b_point, rel=1e-6)


# Lightning refuses FSDP2 in float64.
@pytest.mark.parametrize(("strategy", "precision", "tolerance"), [("ddp", "64-true", 1e-9), ("fsdp2", "32-true", 1e-4)])
def test_two_processes_train_as_one(tmp_path, strategy, precision, tolerance):
    keys = [
        "data.strategy=greedy",
        "data.slots_per_batch=24",
        "optimizer.grad_clip=0.3",
        f"trainer.precision={precision}",
    ]
    alone = tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/alone")
    fit(alone, progress=False)
    both = tiny_config(
        tmp_path, *keys, f"runs_dir={tmp_path}/both", "trainer.devices=2", f"trainer.strategy={strategy}"
    )
    process = run_py("train", write_config(tmp_path / "both.yaml", both), env=ONE_THREAD)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert_trained_as_one(both, alone, tolerance)


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_machines_train_as_one_by_torchrun(tmp_path):
    """The README's recipe, each machine a torchrun with one process."""
    keys = ["data.strategy=greedy", "data.slots_per_batch=24"]
    alone = tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/alone")
    fit(alone, progress=False)
    both = tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/both", "trainer.num_nodes=2", "trainer.strategy=ddp")
    path = write_config(tmp_path / "both.yaml", both)
    address = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1",
             *address, str(ROOT / "run.py"), "train", str(path)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ONE_THREAD,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert not any("destroy_process_group" in output for output in outputs), (
        "PyTorch warns where a group was left behind"
    )
    assert_trained_as_one(both, alone, 1e-4)


class Meetings(lightning.Callback):
    """Notes, in order, when DDP sends gradients off and when parameters get theirs."""

    def __init__(self):
        self.noted = []

    def on_train_start(self, trainer, module):
        def send(_, bucket):
            self.noted.append("sent")
            return default_hooks.allreduce_hook(None, bucket)

        trainer.strategy.model.register_comm_hook(None, send)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.noted.append("made"))

    def on_train_batch_end(self, *_):
        self.noted.append("step")


def test_gradients_meet_once_a_step_during_its_last_backward(tmp_path, monkeypatch):
    """More than DDP's first bucket of 1 MB, so that there is something to overlap; several batches a step."""
    noted = Meetings()
    make = lightning.Trainer
    monkeypatch.setattr(lightning, "Trainer", lambda **keys: make(**keys | {"callbacks": [*keys["callbacks"], noted]}))
    keys = [
        "data.strategy=greedy",
        "trainer.strategy=ddp",
        "trainer.max_steps=2",
        "model.d_model=256",
        "model.d_state=16",
    ]
    fit(tiny_config(tmp_path, *keys), progress=False)
    text = "".join({"sent": "s", "made": "m", "step": "."}[event] for event in noted.noted)
    first, second, _ = text.split(".")
    parameters = sum(1 for _ in MambaLitModule(tiny_config(tmp_path, *keys), 256).parameters())
    for step in (first, second):
        assert step.count("m") > parameters, "several batches"
        assert "s" not in step[: step.count("m") - parameters], "only the last batch's gradients meet"
    assert second.count("s") > 1 and second.index("s") < second.rindex("m"), "some are sent before all are made"


def test_a_killed_sharded_run_ends_as_one_that_was_not(tmp_path):
    keys = ["data.strategy=greedy", "data.slots_per_batch=24", "trainer.devices=2", "trainer.strategy=fsdp2",
            "trainer.max_steps=20", "trainer.checkpoint_every=4", "trainer.validate_every=10"]  # fmt: skip
    whole, killed = (tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/{name}") for name in ("whole", "killed"))
    folder = run_folder(killed) / "checkpoints"
    process = run_py("train", write_config(tmp_path / "killed.yaml", killed), env=ONE_THREAD)
    while process.poll() is None and not checkpoints(folder):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert checkpoints(folder) and not (run_folder(killed) / "records").exists(), "the run must die before its end"
    for config in (killed, whole):
        process = run_py("train", write_config(tmp_path / "run.yaml", config), env=ONE_THREAD)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    assert_trained_as_one(killed, whole, 1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["trainer.strategy=fsdp"], "trainer.strategy: expected one of auto, ddp, fsdp2, got 'fsdp'"),
        (["trainer.strategy=fsdp2", *CARRY], "trainer.strategy=fsdp2 cannot carry states"),
        (["trainer.strategy=fsdp2", "trainer.precision=16-mixed"], "needs trainer.precision=bf16-mixed or 32-true"),
    ],
)
def test_strategies_refuse_before_any_work(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        fit(tiny_config(tmp_path, *keys), progress=False)


def test_a_process_group_ends_with_its_run_even_by_an_error(tmp_path, monkeypatch):
    def fail(*_):
        assert torch.distributed.is_initialized()
        raise RuntimeError("stopped")

    monkeypatch.setattr(MambaLitModule, "training_step", fail)
    monkeypatch.setattr("sys.argv", ["run.py"])
    with pytest.raises(RuntimeError, match="stopped"):
        fit(tiny_config(tmp_path, "data.strategy=greedy", "trainer.strategy=ddp"), progress=False)
    assert not torch.distributed.is_initialized()
