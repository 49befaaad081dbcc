"""The data module and the Lightning module in a user's own Trainer."""

import json
import subprocess
import sys
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from packmamba import MambaLM, SequenceLayout
from packmamba.config import ConfigError, DataConfig
from packmamba.training import PackedDataModule, PackedLitModule
from packmamba.training.distributed import disable_lightning_signals
from packmamba.training.sweep import load_sweep

SHAPE = {"d_model": 8, "n_layer": 2, "d_state": 4}


def data_module(folder, **keys):
    """A hundred short text files, most shorter than a row of 64 and some as long as several steps."""
    texts = folder / "texts"
    if not texts.is_dir():
        texts.mkdir(parents=True)
        rng = np.random.default_rng(0)
        for i, n in enumerate(rng.lognormal(3.5, 1, 100).astype(int) + 1):
            (texts / f"{i}.txt").write_text("".join(rng.choice(list("abcdefgh "), n)) + ".")
    sizes = {"row_length": 64, "tokens_per_step": 256, "slots_per_batch": 128, "validation_fraction": 0.2}
    where = {"source": "text", "path": str(texts), "cache_dir": str(folder / "cache"), "overlong": "pieces"}
    return PackedDataModule(**sizes | where | keys, progress=False)


def trainer_of(folder, **keys):
    quiet = {f"enable_{name}": False for name in ("checkpointing", "model_summary", "progress_bar")}
    return lightning.Trainer(default_root_dir=folder, accelerator="cpu", **{"logger": False} | quiet | keys)


def lit_module(data, **keys):
    torch.manual_seed(0)
    data.prepare_data()
    return PackedLitModule(model=dict(vocab_size=data.vocab_size, **SHAPE), warmup_steps=2, **keys)


class Seen(lightning.Callback):
    """The steps of a training, and what it logged."""

    def __init__(self):
        self.steps, self.rates, self.losses = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append(batch)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.losses.append(float(outputs["loss"]))


def tokens_of(step):
    return torch.cat([batch.tokens.flatten() for batch in step.batches]).tolist()


def train(folder, devices):
    """What a rank of a user's own training sees, and its weights."""
    torch.set_num_threads(1)
    data = data_module(folder)
    module, seen = lit_module(data), Seen()
    strategy = "ddp" if devices > 1 else "auto"
    trainer = trainer_of(folder, devices=devices, max_steps=8, strategy=strategy, callbacks=[seen])
    trainer.fit(module, data)
    (result, *_) = trainer.validate(module, data, verbose=False)
    found = {
        "steps": [[s.num_targets, sum(int(b.loss_mask.sum()) for b in s.batches)] for s in seen.steps],
        "loss": seen.losses,
        "weights": torch.cat([p.detach().flatten() for p in module.model.parameters()]).tolist(),
        "validation": result["val/loss"],
        "targets": int(module.alone.counts.sum()),
    }
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))
    return found


def test_two_ranks_train_as_one_under_lightnings_default_sampler(tmp_path):
    """On 2e9bfb9 the ranks of a user's Trainer trained on different steps, and validated half the documents each."""
    alone = train(tmp_path, 1)
    tests = Path(__file__).resolve().parents[1]
    script = tmp_path / "train.py"  # which Lightning starts again as the second rank
    script.write_text(
        f"import sys; sys.path[:0] = {[str(tests.parent), str(tests)]}\n"
        "from training.test_lit_module import Path, train\n"
        "if __name__ == '__main__': train(Path(sys.argv[1]), 2)"
    )
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tests.parent, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for (targets, all_of_them), (a, of_a), (b, of_b) in zip(
        alone["steps"], first["steps"], second["steps"], strict=True
    ):
        assert targets == all_of_them == a == b == of_a + of_b
        assert of_a and of_b
    one, two = torch.tensor(alone["weights"]), torch.tensor(first["weights"])
    assert (one - two).norm() <= 1e-5 * one.norm()
    assert first["weights"] == second["weights"]
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert first["validation"] == pytest.approx(alone["validation"], rel=1e-5)
    assert (
        first["targets"] + second["targets"] == alone["targets"]
    )  # each rank's own, after the metric has been computed


@pytest.mark.parametrize("limits", [{"max_steps": 12}, {"max_epochs": 2}, {"max_epochs": 9, "max_steps": 12}])
def test_the_trainer_decides_the_steps_and_the_schedule(tmp_path, limits):
    data = data_module(tmp_path, tokens_per_step=1024, slots_per_batch=1024)
    module, seen = lit_module(data, final_lr_fraction=0.0), Seen()
    trainer = trainer_of(tmp_path, callbacks=[seen], limit_val_batches=0, num_sanity_val_steps=0, **limits)
    trainer.fit(module, data)
    steps = limits.get("max_steps") or 2 * -(-int(data.corpora.train.lengths.sum()) // 1024)
    assert trainer.global_step == len(seen.steps) == steps
    assert len({tuple(tokens_of(step)) for step in seen.steps}) == steps  # none is repeated
    assert all(rate > 0 for rate in seen.rates[:-1]) and seen.rates[-1] == pytest.approx(0, abs=1e-9)
    of_number = [tokens_of(data.steps[number]) for number in range(steps)]
    assert [tokens_of(step) for step in seen.steps] == of_number


def test_schedule_steps_go_before_the_trainers(tmp_path):
    data = data_module(tmp_path)
    module, seen = lit_module(data, schedule_steps=4, final_lr_fraction=0.5, lr=1.0, grad_clip=0.1), Seen()
    trainer_of(tmp_path, callbacks=[seen], max_steps=6, limit_val_batches=0).fit(module, data)
    assert seen.rates[3:] == pytest.approx([0.5, 0.5, 0.5])


@pytest.mark.parametrize("resumed", [{"max_steps": 10}, {"max_epochs": 2}])
def test_a_resumed_training_has_the_same_bits(tmp_path, resumed):
    """Stopped inside an epoch by its Trainer; carried states and the order of documents go on."""
    keys = {"mode": "stream", "strategy": "split", "streams": 2}

    def train(stop=None, ckpt_path=None):
        data = data_module(tmp_path, **keys)
        module = lit_module(data, boundary="carry", schedule_steps=10)
        checkpoint = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=3, save_top_k=-1)
        limits = resumed if stop is None else {"max_steps": stop}
        trainer = trainer_of(tmp_path, callbacks=[checkpoint], enable_checkpointing=True, limit_val_batches=0, **limits)
        trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
        return trainer.global_step, torch.cat([p.detach().flatten() for p in module.model.parameters()])

    steps, whole = train()
    train(stop=3)
    (saved,) = (tmp_path / "checkpoints").glob("*step=3.ckpt")
    again, resumed_weights = train(ckpt_path=saved)
    assert again == steps and torch.equal(whole, resumed_weights)


@pytest.mark.parametrize("given", ["arguments", "a model"])
def test_a_checkpoint_rebuilds_the_module(tmp_path, given):
    data = data_module(tmp_path, strategy="split", streams=2, mode="stream", tokens_per_step=128)
    module = lit_module(data, boundary="carry", betas=[0.9, 0.99])
    if given == "a model":
        model = MambaLM(vocab_size=data.vocab_size, tie_embeddings=False, **SHAPE)
        module = PackedLitModule(model, boundary="carry", betas=[0.9, 0.99])
    trainer = trainer_of(tmp_path, max_steps=3)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    plain = torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    assert plain["boundary"] == "carry" and plain["model"]["d_model"] == 8
    loaded = PackedLitModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded.optimizer_config.betas == [0.9, 0.99] and loaded.boundary.continues
    tokens = torch.arange(6)[None]
    layout = SequenceLayout.from_lengths([[4, 2]], row_length=6)
    assert torch.equal(loaded(tokens, layout=layout), module(tokens, layout=layout))
    (of_loaded,), (of_module,) = (
        [trainer_of(tmp_path).validate(each, data, verbose=False)[0]] for each in (loaded, module)
    )
    assert of_loaded == of_module


def test_a_foreign_model_is_passed_again(tmp_path):
    class Foreign(MambaLM):
        pass

    class Wrapped(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.inner, self.lm_head = model, model.lm_head
            self.start_states, self.weight_decay_groups = model.start_states, model.weight_decay_groups

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    data = data_module(tmp_path)
    data.prepare_data()
    wrapped = Wrapped(MambaLM(vocab_size=data.vocab_size, **SHAPE))
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.fit(PackedLitModule(wrapped), data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match="model"):
        PackedLitModule.load_from_checkpoint(tmp_path / "a.ckpt")
    PackedLitModule.load_from_checkpoint(tmp_path / "a.ckpt", model=wrapped)


@pytest.mark.parametrize("boundary", ["reset", "leak"])
def test_losses_reach_loggers_callbacks_and_results(tmp_path, boundary):
    data = data_module(tmp_path)
    module = lit_module(data, boundary=boundary)
    stop = EarlyStopping("train/loss", stopping_threshold=1e9)
    best = ModelCheckpoint(tmp_path / "best", monitor="val/loss")
    trainer = trainer_of(
        tmp_path, max_steps=12, val_check_interval=4, check_val_every_n_epoch=None, log_every_n_steps=2,
        logger=CSVLogger(tmp_path, "log"), callbacks=[best], enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(module, data)
    lines = (tmp_path / "log" / "version_0" / "metrics.csv").read_text().splitlines()
    header, *rows = (line.split(",") for line in lines)
    at_steps = {name: [r[header.index("step")] for r in rows if r[header.index(name)]] for name in header}
    assert (
        len(at_steps["train/loss"]) == len(at_steps["train/learning_rate"]) == len(at_steps["train/gradient_norm"]) == 6
    )
    assert len(at_steps["val/loss"]) == 3
    assert ("val/loss_as_trained" in header) is (boundary == "leak")
    assert best.best_model_score == min(float(r[header.index("val/loss")]) for r in rows if r[header.index("val/loss")])
    (result, *_) = trainer.validate(module, data, verbose=False)
    assert result["val/loss"] == pytest.approx(float(trainer.callback_metrics["val/loss"]))
    (tested, *_) = trainer.test(module, data, verbose=False)
    assert tested["test/loss"] == result["val/loss"]
    stopped = trainer_of(tmp_path, max_steps=12, val_check_interval=4, check_val_every_n_epoch=None, callbacks=[stop])
    stopped.fit(lit_module(data, boundary=boundary), data)
    assert stopped.global_step == 4


def test_nothing_is_logged_between_logged_steps(tmp_path, monkeypatch):
    """On a GPU a logged number is waited for."""
    data = data_module(tmp_path)
    module, logged = lit_module(data), []
    monkeypatch.setattr(module, "log", lambda name, value, **_: logged.append((module.global_step, name)))
    trainer_of(tmp_path, max_steps=11, log_every_n_steps=5, limit_val_batches=0).fit(module, data)
    assert [step for step, name in logged if name == "train/loss"] == [1, 5, 10, 11]


def test_the_data_module_follows_the_boundary_of_the_trained_module(tmp_path):
    data = data_module(tmp_path, strategy="split", streams=2, mode="stream", tokens_per_step=128)
    trainer_of(tmp_path, max_steps=2).fit(lit_module(data, boundary="carry"), data)
    assert data.steps.schedule.carry and len(data.evaluations) == 2
    with pytest.raises(ConfigError, match="data.strategy"):  # nothing would continue, so carry would train as reset
        trainer_of(tmp_path, max_steps=2).fit(lit_module(data, boundary="carry"), data_module(tmp_path))


def test_users_own_module_of_ten_lines(tmp_path):
    class Own(lightning.LightningModule):
        def __init__(self, vocab_size):
            super().__init__()
            self.model = MambaLM(vocab_size=vocab_size, **SHAPE)

        def training_step(self, step, _):
            sums = [
                torch.nn.functional.cross_entropy(
                    self.model(b.tokens, layout=b.layout)[b.loss_mask], b.targets[b.loss_mask], reduction="sum"
                )
                for b in step.batches
            ]
            return torch.stack(sums).sum() / step.num_targets

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    data, seen = data_module(tmp_path), Seen()
    data.prepare_data()
    trainer = trainer_of(
        tmp_path, max_steps=5, accumulate_grad_batches=2, gradient_clip_val=1.0, limit_val_batches=0, callbacks=[seen]
    )
    trainer.fit(Own(data.vocab_size), data)
    assert [tokens_of(step) for step in seen.steps] == [tokens_of(data.steps[i]) for i in range(10)]


@pytest.mark.parametrize("strategy", ["single", "padded", "greedy", "best_fit"])
def test_a_step_holds_what_it_says(tmp_path, strategy):
    """With default keys steps of a user's files had 3 to 50,309 tokens; here over several epochs."""
    data = data_module(tmp_path, strategy=strategy, tokens_per_step=256)
    data.setup()
    reference = data_module(tmp_path, strategy="single", tokens_per_step=256)
    reference.setup()
    for number in range(3 * data.steps.schedule.epoch_steps()):
        step = data.steps[number]
        assert step.num_tokens == 256 == sum(batch.layout.num_tokens for batch in step.batches)
        assert step.num_targets == reference.steps[number].num_targets
        assert sorted(tokens_of(step))[-256:] == sorted(tokens_of(reference.steps[number]))


@pytest.mark.parametrize("budget", [7, 5000])
def test_steps_smaller_and_larger_than_the_corpus_hold_what_they_say(tmp_path, budget):
    data = data_module(tmp_path, tokens_per_step=budget)
    data.setup()
    assert {data.steps[number].num_tokens for number in (0, 1, 5, 200)} == {budget}


@pytest.mark.parametrize("file", ["demo.yaml", "sweeps/continuity.yaml"])
def test_rows_that_carry_are_full_in_shipped_configurations(tmp_path, file):
    """They were 55 % padding where steps of matched documents were cut into rows of streams."""
    keys = [f"data.cache_dir={tmp_path}", "data.source=synthetic", "data.num_documents=1000"]
    _, configs = load_sweep(f"configs/{file}", keys)
    carrying = {repr(config.data): config for config in configs if config.trainer.boundary == "carry"}
    for config in carrying.values():
        data = PackedDataModule.from_config(config, progress=False)
        data.setup()
        steps = [data.steps[number] for number in range(50)]
        assert sum(step.num_tokens for step in steps) > 0.99 * sum(step.num_slots for step in steps)
    assert carrying


def test_a_private_name_that_lightning_gives_up_is_noticed(tmp_path):
    trainer = trainer_of(tmp_path)
    disable_lightning_signals(trainer)

    class Renamed:
        pass

    trainer._signal_connector = Renamed()
    with pytest.raises(AssertionError, match="register_signal_handlers"):
        disable_lightning_signals(trainer)


@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("boundary", lambda: PackedLitModule(dict(vocab_size=9, **SHAPE), boundary="lek")),
        ("lr", lambda: PackedLitModule(dict(vocab_size=9, **SHAPE), lr=-1.0)),
        ("mean_over", lambda: PackedLitModule(dict(vocab_size=9, **SHAPE), mean_over="files")),
        ("model", lambda: PackedLitModule()),
        ("data.strategy", lambda: PackedDataModule(strategy="gredy")),
        ("data.row_length", lambda: PackedDataModule(DataConfig(), row_length=0)),
    ],
)
def test_a_wrong_argument_is_named(key, make):
    with pytest.raises(ConfigError, match=key):
        make()
