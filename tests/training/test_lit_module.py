"""The data module and the Lightning module in a user's own Trainer."""

import json
import random
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from models import losses_alone
from packmamba import MambaLM, SequenceLayout
from packmamba.config import ConfigError, DataConfig, OptimizerConfig
from packmamba.data.batch import PackedBatch
from packmamba.lab.sweep import load_sweep
from packmamba.training import PackedDataModule, PackedLitModule
from packmamba.training.lit_module import LossByPosition
from packmamba.training.optimizer import SCHEDULES, learning_rate
from processes import run_ranks
from runs import data_of
from written import write_texts

SHAPE = {"d_model": 8, "n_layer": 2, "d_state": 4}


def data_module(folder, **keys):
    """A hundred short text files, most shorter than a row of 64 and some as long as several steps."""
    texts = folder / "texts"
    if not texts.is_dir():
        rng = np.random.default_rng(0)
        lengths = rng.lognormal(3.5, 1, 100).astype(int) + 1
        write_texts(texts, ["".join(rng.choice(list("abcdefgh "), n)) + "." for n in lengths])
    sizes = {"row_length": np.int64(64), "tokens_per_step": 256, "max_tokens_per_batch": 128}
    sizes["validation_fraction"] = 0.2
    where = {"source": "text", "path": str(texts), "cache_dir": str(folder / "cache"), "overlong": "split"}
    return PackedDataModule(**sizes | where | keys, progress=False)


def trainer_of(folder, **keys):
    quiet = {f"enable_{name}": False for name in ("checkpointing", "model_summary", "progress_bar")} | {"logger": False}
    return lightning.Trainer(default_root_dir=folder, accelerator="cpu", **quiet | keys)


def lit_module(data, recompute="none", **keys):
    torch.manual_seed(0)
    data.prepare_data()
    return PackedLitModule(dict(vocab_size=data.vocab_size, recompute=recompute, **SHAPE), warmup_steps=2, **keys)


class Seen(lightning.Callback):
    """The steps of a training, and what it logged."""

    def __init__(self):
        self.steps, self.rates, self.losses = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append(batch)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.losses.append(float(outputs["loss"]))


class RandomScale(lightning.Callback):
    """Scale weights by a number of each random generator."""

    def on_train_batch_start(self, trainer, module, *_):
        drawn = random.random() + np.random.random() + torch.rand(()).item()  # noqa: NPY002  (the global one)
        module.model.lm_head.weight.data.mul_(1 + drawn / 100)


def tokens_of(step):
    return torch.cat([batch.tokens.flatten() for batch in step.batches]).tolist()


def train(folder, devices):
    """Train in a user's own Trainer; write what a rank sees, and its weights."""
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
    (folder / f"{trainer.global_rank} of {devices}.json").write_text(json.dumps(found))


def refuse_strategies(folder):
    """Fit in a rank with strategies that would train other weights on each rank, or fail within a
    step.
    """
    parallel = lightning.pytorch.strategies.ModelParallelStrategy
    data = data_module(folder, strategy="concat_split", streams=4)
    for strategy, boundary, told in ((parallel(), "reset", "data_parallel_size"), (parallel(2, 1), "carry", "ddp")):
        with pytest.raises(ConfigError, match=f"^strategy: expected {told}"):
            trainer_of(folder, devices=2, max_steps=2, strategy=strategy).fit(lit_module(data, boundary=boundary), data)


def test_strategies_that_would_not_share_the_weights_are_refused(tmp_path):
    data_module(tmp_path)  # writes the texts, which ranks at once could not
    run_ranks(2, refuse_strategies, tmp_path, output=tmp_path / "output.txt")


def test_two_ranks_train_as_one_under_lightnings_default_sampler(tmp_path):
    """On 2e9bfb9 the ranks of a user's Trainer trained on different steps, and validated half the
    documents each.
    """
    train(tmp_path, 1)
    run_ranks(2, train, tmp_path, 2, output=tmp_path / "output.txt")
    of_ranks = [tmp_path / f"{name}.json" for name in ("0 of 1", "0 of 2", "1 of 2")]
    alone, first, second = (json.loads(path.read_text()) for path in of_ranks)
    for (targets, every), (a, of_a), (b, of_b) in zip(*(one["steps"] for one in (alone, first, second)), strict=True):
        assert targets == every == a == b == of_a + of_b and of_a and of_b
    one, two = torch.tensor(alone["weights"]), torch.tensor(first["weights"])
    assert (one - two).norm() <= 1e-5 * one.norm()
    assert first["weights"] == second["weights"]
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert first["validation"] == pytest.approx(alone["validation"], rel=1e-5)
    # each rank's own, after the metric is computed
    assert first["targets"] + second["targets"] == alone["targets"]


@pytest.mark.parametrize("limits", [{"max_steps": 12}, {"max_epochs": 2}, {"max_epochs": 9, "max_steps": 12}])
def test_the_trainer_decides_the_steps_and_the_schedule(tmp_path, limits):
    data = data_module(tmp_path, tokens_per_step=1024, max_tokens_per_batch=1024)
    module, seen = lit_module(data, final_lr_fraction=0.0), Seen()
    trainer = trainer_of(tmp_path, callbacks=[seen], limit_val_batches=0, num_sanity_val_steps=0, **limits)
    trainer.fit(module, data)
    steps = limits.get("max_steps") or 2 * -(-int(data.corpora.train.lengths.sum()) // 1024)
    assert trainer.global_step == len(seen.steps) == steps
    assert len({tuple(tokens_of(step)) for step in seen.steps}) == steps  # none is repeated
    assert all(rate > 0 for rate in seen.rates[:-1]) and seen.rates[-1] == pytest.approx(0, abs=1e-9)
    of_number = [tokens_of(data.steps[number]) for number in range(steps)]
    assert [tokens_of(step) for step in seen.steps] == of_number


@pytest.mark.parametrize(
    ("resumed", "optimizer"),
    [({"max_steps": 10}, "adamw"), ({"max_epochs": 2}, "muon"), ({"max_steps": 10, "precision": "64-true"}, "adamw")],
)
def test_a_resumed_training_has_the_same_bits(tmp_path, resumed, optimizer, recwarn):
    """Stopped inside an epoch by its Trainer; carried states, the order of documents and random
    numbers go on.
    """
    keys = {"batching": "stream", "strategy": "concat_split", "streams": 2}

    def train(stop=None, ckpt_path=None):
        data = data_module(tmp_path, **keys)
        lightning.seed_everything(0, verbose=False)
        module = lit_module(data, boundary="carry", schedule_steps=10, name=optimizer)
        checkpoint = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=3, save_top_k=-1)
        limits = resumed if stop is None else resumed | {"max_steps": stop}
        callbacks = [checkpoint, RandomScale()]
        trainer = trainer_of(tmp_path, callbacks=callbacks, enable_checkpointing=True, limit_val_batches=0, **limits)
        trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
        return trainer.global_step, torch.cat([p.detach().flatten() for p in module.model.parameters()])

    steps, whole = train()
    train(stop=3)
    (saved,) = (tmp_path / "checkpoints").glob("*step=3.ckpt")
    again, resumed_weights = train(ckpt_path=saved)
    assert again == steps and torch.equal(whole, resumed_weights)
    assert not [warning for warning in recwarn if "resumable" in str(warning.message)]


@pytest.mark.parametrize("boundary", ["fitted_noise", "state_passing_within_row"])
def test_a_second_training_begins_without_the_states_of_the_first(tmp_path, boundary):
    data = data_module(tmp_path, strategy="concat_split", streams=4, batching="stream")
    # weights keep their bits
    module, seen = lit_module(data, boundary=boundary, lr=1e-30), [Seen(), Seen()]
    for callback in seen:
        trainer_of(tmp_path, max_steps=4, limit_val_batches=0, callbacks=[callback]).fit(module, data)
    assert seen[0].losses == seen[1].losses


@pytest.mark.parametrize("given", ["arguments", "a model"])
def test_a_checkpoint_rebuilds_the_module(tmp_path, given):
    data = data_module(tmp_path, strategy="concat_split", streams=2, batching="stream", tokens_per_step=128)
    module = lit_module(data, "block", boundary="carry", betas=[0.9, 0.99])
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
    tokens, layout = torch.arange(6)[None], SequenceLayout.from_lengths([[4, 2]], row_length=6)
    assert torch.equal(loaded(tokens, layout=layout), module(tokens, layout=layout))
    assert loaded.model.backbone.layers[0].recompute == module.model.backbone.layers[0].recompute
    found, expected = (trainer_of(tmp_path).validate(each, data, verbose=False) for each in (loaded, module))
    assert found == expected


def test_a_foreign_model_is_passed_again(tmp_path):
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
    limits = {"max_steps": 12, "val_check_interval": 4, "check_val_every_n_epoch": None, "log_every_n_steps": 2}
    more = {"logger": CSVLogger(tmp_path, "log"), "callbacks": [best], "enable_checkpointing": True}
    trainer = trainer_of(tmp_path, **limits, **more)
    trainer.fit(module, data)
    lines = (tmp_path / "log" / "version_0" / "metrics.csv").read_text().splitlines()
    header, *rows = (line.split(",") for line in lines)
    at_steps = {name: [r[header.index("step")] for r in rows if r[header.index(name)]] for name in header}
    assert {len(at_steps[f"train/{name}"]) for name in ("loss", "learning_rate", "gradient_norm")} == {6}
    assert len(at_steps["val/loss"]) == 3
    assert ("val/loss_as_trained" in header) is (boundary == "leak")
    assert best.best_model_score == min(float(r[header.index("val/loss")]) for r in rows if r[header.index("val/loss")])
    (result, *_) = trainer.validate(module, data, verbose=False)
    assert result["val/loss"] == pytest.approx(float(trainer.callback_metrics["val/loss"]))
    (tested, *_) = trainer.test(module, data, verbose=False)
    assert tested["test/loss"] == result["val/loss"]
    stopped = trainer_of(tmp_path, **limits, callbacks=[stop])
    stopped.fit(lit_module(data, boundary=boundary), data)
    assert stopped.global_step == 4


def test_test_documents_are_tested_and_predicted(tmp_path):
    data = data_module(tmp_path, test_fraction=0.1)
    module, trainer = lit_module(data), trainer_of(tmp_path)
    (tested, *_) = trainer.test(module, data, verbose=False)
    corpus = data.corpora.test
    alone = [losses_alone(module, corpus.document(i)) for i in range(len(corpus))]
    losses, counts = [float(each.mean()) for each in alone], [*map(len, alone)]
    assert len(counts) == 10
    assert tested["test/loss"] == pytest.approx(np.average(losses, weights=counts), rel=1e-5)
    predicted = trainer.predict(module, data)
    assert torch.cat([one["loss"] for one in predicted]).tolist() == pytest.approx(losses, rel=1e-5)
    assert torch.cat([one["num_targets"] for one in predicted]).tolist() == counts


def test_the_data_module_follows_the_boundary_of_the_trained_module(tmp_path):
    data = data_module(tmp_path, strategy="concat_split", streams=2, batching="stream", tokens_per_step=128)
    trainer_of(tmp_path, max_steps=2).fit(lit_module(data, boundary="carry"), data)
    assert data.steps.schedule.carry and len(data.evaluations) == 2
    # nothing would continue, so carry would train as reset
    with pytest.raises(ConfigError, match="data.strategy"):
        trainer_of(tmp_path, max_steps=2).fit(lit_module(data, boundary="carry"), data_module(tmp_path))


def test_users_own_module_of_ten_lines(tmp_path):
    class Own(lightning.LightningModule):
        def __init__(self, vocab_size):
            super().__init__()
            self.model = MambaLM(vocab_size=vocab_size, **SHAPE)

        def training_step(self, step, _):
            total = 0
            for b in step.batches:
                logits = self.model(b.tokens, layout=b.layout)[b.loss_mask]
                total += torch.nn.functional.cross_entropy(logits, b.targets[b.loss_mask], reduction="sum")
            return total / step.num_targets

        def validation_step(self, b, _):
            logits = self.model(b.tokens, layout=b.layout)[b.loss_mask]
            loss = torch.nn.functional.cross_entropy(logits, b.targets[b.loss_mask])
            self.log("val/loss", loss, batch_size=len(logits))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    data, seen, best = data_module(tmp_path), Seen(), ModelCheckpoint(tmp_path, monitor="val/loss")
    data.prepare_data()
    limits = {"max_steps": 5, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "num_sanity_val_steps": 0}
    limits |= {"val_check_interval": 10, "check_val_every_n_epoch": None, "enable_checkpointing": True}
    module = Own(data.vocab_size)
    trainer_of(tmp_path, callbacks=[seen, best], **limits).fit(module, data)
    assert [tokens_of(step) for step in seen.steps] == [tokens_of(data.steps[i]) for i in range(10)]
    (validated,) = trainer_of(tmp_path).validate(PackedLitModule(module.model), data, verbose=False)
    assert float(best.best_model_score) == pytest.approx(validated["val/loss"], rel=1e-5)


class ByHand(lightning.LightningModule):
    """Optimise by hand, with two optimizers, every fourth StepBatch: half as many steps as batches."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)])
        self.automatic_optimization = False

    def training_step(self, step, index):
        loss = sum(self.model).sum() * step.num_tokens
        self.manual_backward(loss)
        for optimizer in self.optimizers() if index % 4 == 3 else ():
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return [torch.optim.SGD([parameter]) for parameter in self.model]


@pytest.mark.parametrize("last", [{"max_steps": 4}, {"max_epochs": 2}], ids=["steps", "epochs"])
def test_every_step_is_read_once_whatever_an_optimizer_step_is(tmp_path, last):
    def save(trainer, module, outputs, step, index):
        if index == 3 and trainer.current_epoch == 0:
            trainer.save_checkpoint(tmp_path / "after-4.ckpt")

    data, seen, resumed = data_module(tmp_path), Seen(), Seen()
    saving = LambdaCallback(on_train_batch_end=save)
    trainer_of(tmp_path, callbacks=[seen, saving], **last).fit(ByHand(), data)
    wanted = [tokens_of(data.steps[i]) for i in range(8 if "max_steps" in last else 2 * len(data.steps))]
    assert [tokens_of(step) for step in seen.steps] == wanted
    trainer = trainer_of(tmp_path, callbacks=[resumed], **last)
    trainer.fit(ByHand(), data_module(tmp_path), ckpt_path=tmp_path / "after-4.ckpt", weights_only=True)
    assert [tokens_of(step) for step in resumed.steps] == wanted[4:]


def test_the_trainer_overfits_a_few_steps(tmp_path):
    data, seen = data_module(tmp_path), Seen()
    limits = {"max_epochs": 2, "overfit_batches": 2, "enable_checkpointing": True}
    trainer_of(tmp_path, callbacks=[seen], **limits).fit(lit_module(data), data)
    assert [tokens_of(step) for step in seen.steps] == 2 * [tokens_of(data.steps[i]) for i in range(2)]


@pytest.mark.parametrize("mean_over", ["targets", "rows"])
def test_an_adapter_on_the_head_counts(tmp_path, mean_over):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(2 * x)

    data = data_module(tmp_path)
    data.setup()
    module, batch = lit_module(data, mean_over=mean_over).double(), data.steps[0].batches[0]
    with torch.no_grad():
        module.model.lm_head.weight *= 2
    expected = module.loss(batch)
    head = Doubled(*module.model.lm_head.weight.T.shape, bias=False).double()
    head.weight = torch.nn.Parameter(module.model.lm_head.weight / 2)
    module.model.lm_head = head
    torch.testing.assert_close(module.loss(batch), expected)


@pytest.mark.parametrize("file", ["demo.yaml", "sweeps/continuity.yaml"])
def test_rows_that_carry_are_full_in_shipped_configurations(tmp_path, file):
    keys = [f"data.cache_dir={tmp_path}", "data.source=synthetic", "data.num_documents=1000"]
    _, configs = load_sweep(f"configs/{file}", keys)
    carrying = {repr(config.data): config for config in configs if config.trainer.boundary == "carry"}
    for config in carrying.values():
        data = data_of(config)
        steps = [data.steps[number] for number in range(50)]
        assert sum(step.num_tokens for step in steps) > 0.99 * sum(step.num_slots for step in steps)
    assert carrying


def sharing_rows(**keys):
    """A data module whose two ranks share rows, with a Lightning module's keys."""
    data = PackedDataModule(context_parallel=2)
    data.trainer = SimpleNamespace(world_size=2, global_rank=0)
    data.trainer.lightning_module = PackedLitModule(dict(vocab_size=9, **SHAPE), **keys)
    return data


@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("boundary", lambda: PackedLitModule(dict(vocab_size=9, **SHAPE), boundary="lek")),
        ("lr", lambda: PackedLitModule(dict(vocab_size=9, **SHAPE), lr=-1.0)),
        ("mean_over", lambda: PackedLitModule(dict(vocab_size=9, **SHAPE), mean_over="files")),
        ("model", lambda: PackedLitModule()),
        ("model: .*'d_stat'", lambda: PackedLitModule({"vocab_size": 9, "d_stat": 3} | SHAPE)),
        ("'boundry' in PackedLitModule", lambda: PackedLitModule(dict(vocab_size=9, **SHAPE), boundry="leak")),
        ("lr: expected a number", lambda: PackedLitModule(dict(vocab_size=9, **SHAPE), lr="fast")),
        ("config: expected DataConfig", lambda: PackedDataModule("stdlib")),
        ("data.strategy", lambda: PackedDataModule(strategy="gredy")),
        ("context_parallel: expected 1 in", lambda: PackedDataModule(context_parallel=2).predict_dataloader()),
        ("context_parallel: expected a divisor", lambda: PackedDataModule(context_parallel=2).setup()),
        ("context_parallel: expected a divisor", lambda: PackedDataModule(context_parallel=0).setup()),
        ("trainer.cuda_graphs: expected false", lambda: sharing_rows(cuda_graphs=True).setup()),
        ("trainer.context_parallel: expected 1", lambda: sharing_rows(mean_over="rows").setup()),
        ("data.row_length", lambda: PackedDataModule(DataConfig(), row_length=0)),
        # the command line's answer
        ("data.row_length", lambda: PackedDataModule(row_lenght="stream")),
    ],
)
def test_a_wrong_argument_is_named(key, make):
    with pytest.raises(ConfigError, match=key):
        make()


SCHEMES = {
    "padded": {"strategy": "padded"},
    "padded to the longest": {"strategy": "padded_sorted", "max_tokens_per_batch": 1000},
    "packed": {"strategy": "greedy"},
    "packed, two workers": {"strategy": "greedy", "num_workers": 2},
    "packed, many micro-batches": {"strategy": "greedy", "max_tokens_per_batch": 64},
    "packed in order": {"strategy": "next_fit"},
    **dict.fromkeys(("leak", "leak_conv", "leak_scan"), {"strategy": "greedy"}),
}


def gradients(folder, boundary="reset", **keys):
    """Train three steps; return the gradient of each."""
    data, found = data_module(folder, **keys), []
    module = lit_module(data, boundary=boundary, grad_clip=None)
    keep = lambda *_: found.append(torch.cat([p.grad.flatten() for p in module.model.parameters()]))
    callbacks = [LambdaCallback(on_before_optimizer_step=keep)]
    trainer_of(folder, precision="64-true", callbacks=callbacks, max_steps=3, limit_val_batches=0).fit(module, data)
    return found


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    return folder, gradients(folder, strategy="single")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_the_gradient_of_single_at_every_step(single, scheme):
    """In matched mode, with steps of equal tokens; a leak has another one from the first step."""
    folder, expected = single
    boundary = scheme if scheme.startswith("leak") else "reset"
    for gradient, of_single in zip(gradients(folder, boundary, **SCHEMES[scheme]), expected, strict=True):
        difference = float((gradient - of_single).norm() / of_single.norm())
        # At initialisation the skip D dominates the scan's output, so its leak alone is small; the
        # convolution's is not.
        least = {"leak": 1e-2, "leak_conv": 1e-2, "leak_scan": 1e-4}.get(boundary)
        assert difference <= 1e-9 if least is None else difference > least


@pytest.mark.parametrize("mean_over", ["targets", "rows"])
def test_the_loss_is_a_mean_over_the_targets_of_the_whole_step(tmp_path, mean_over):
    """Or over rows, of each row's mean, micro-batch by micro-batch."""
    data = data_module(tmp_path, strategy="greedy", max_tokens_per_batch=128, tokens_per_step=512)
    data.setup()
    module, step = lit_module(data, mean_over=mean_over, schedule_steps=1), data.steps[0]
    assert len(step.batches) > 2
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    total, sums = module.accumulate(step, torch.Tensor.backward), torch.zeros(2)
    for batch in step.batches:
        logits = module(batch.tokens, layout=batch.layout).transpose(1, 2)
        losses = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none") * batch.loss_mask
        of_row = batch.loss_mask.sum(1)
        by_row = (losses.sum(1)[of_row > 0] / of_row[of_row > 0]).mean() * of_row.sum()
        sums += torch.stack([losses.sum(), by_row])
    expected = (sums / step.num_targets).tolist()
    assert float(total) == pytest.approx(expected[mean_over == "rows"], rel=1e-5)
    assert abs(expected[0] - expected[1]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_fall_into_their_buckets(dtype):
    metric = LossByPosition().to(dtype)  # as Lightning's bf16-true converts modules
    positions = torch.tensor([[0, 1, 2, 3, 4, 31, 32, -1, 70000]])
    metric.update(torch.arange(9.0)[None], positions >= 0, positions)
    results = metric.compute()
    assert results["counts"].tolist()[:7] == [1, 1, 2, 1, 0, 1, 1] and results["counts"].tolist()[-1] == 1
    assert results["by_position"][2] == 2.5 and results["loss"] == (36 - 7) / 8
    assert results["loss_start"] == (0 + 1 + 2 + 3 + 4 + 5) / 6
    metric.reset()
    metric.update(torch.full((1, 5000), 5.55), torch.ones(1, 5000, dtype=torch.bool), torch.arange(5000)[None])
    assert float(metric.compute()["loss"]) == pytest.approx(5.55)


def test_learning_rate_warms_up_and_falls_to_its_fraction():
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    rates = [learning_rate(config, step, 20) for step in range(24)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and max(rates) == 1.0
    assert rates[19:] == pytest.approx([0.1] * 5) and rates[4:] == sorted(rates[4:], reverse=True)


def test_learning_rate_follows_the_schedule_that_is_named():
    def rates(schedule, **keys):
        config = OptimizerConfig(lr=1.0, warmup_steps=4, final_lr_fraction=0.0, schedule=schedule, **keys)
        return [learning_rate(config, step, 25) for step in range(25)]

    for schedule in SCHEDULES:
        assert rates(schedule)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates("constant")[4:] == [1.0] * 21
    assert rates("linear")[4:] == pytest.approx([1 - n / 20 for n in range(21)])
    assert rates("wsd", decay_fraction=0.5)[4:] == pytest.approx([1.0] * 11 + [1 - n / 10 for n in range(1, 11)])
    assert rates("inverse_sqrt")[4:] == pytest.approx([(4 / n) ** 0.5 for n in range(5, 26)])


@pytest.mark.parametrize("limit", [0.01, 1e9])
def test_gradients_are_clipped_by_their_norm_before_it(tmp_path, limit):
    data = data_module(tmp_path)
    data.setup()
    module = lit_module(data, grad_clip=limit, schedule_steps=1)
    optimizer = module.configure_optimizers()
    module.take_step(data.steps[0], optimizer, 0)
    norm = torch.cat([p.grad.flatten() for p in module.model.parameters()]).norm()
    assert float(norm) == pytest.approx(min(limit, float(optimizer.gradient_norm)), rel=1e-4)


def test_a_rank_whose_columns_hold_no_document_validates_a_mixture():
    layout = SequenceLayout.from_lengths([[]], 4)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    nothing = torch.arange(0)
    batch = PackedBatch(tokens, tokens, tokens > 0, layout, source=nothing, source_names=("a", "b"))
    module = PackedLitModule(MambaLM(8, 16, 1))
    module.validation_step(batch, 0)
    assert {"a", "b"} == module.by_source.compute().keys()
