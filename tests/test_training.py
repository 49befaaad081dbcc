"""Whole training through the Lightning module and the data module: parity of schemes, leaks, carried states."""

import dataclasses

import lightning
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from packmamba import SequenceLayout
from packmamba.config import ConfigError
from packmamba.data import datamodule
from packmamba.data.batching import PackedBatch
from packmamba.data.datamodule import PackedDataModule
from packmamba.training.boundary import BOUNDARIES, Carry, Leak, Reset
from packmamba.training.fit import fit
from packmamba.training.lit_module import PackedLitModule
from packmamba.training.metrics import LossByPosition
from runs import CARRY, SCHEMES, tiny_config


class Gradients(lightning.Callback):
    def __init__(self):
        self.steps = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.steps.append(torch.cat([p.grad.flatten().clone() for p in module.model.parameters()]))


def train(folder, *overrides, precision="64-true", steps=4):
    """(gradients of each step before clipping, module) of a float64 run."""
    config = tiny_config(folder, f"trainer.precision={precision}", f"trainer.max_steps={steps}", *overrides)
    data = PackedDataModule.from_config(config, progress=False)
    lightning.seed_everything(0, verbose=False)
    module = PackedLitModule.from_config(config, data.corpora.train.vocab_size)
    gradients = Gradients()
    trainer = lightning.Trainer(
        accelerator="cpu", precision=precision, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
        use_distributed_sampler=False, callbacks=[gradients],
    )  # fmt: skip
    trainer.fit(module, data)
    assert len(gradients.steps) == steps
    return gradients.steps, module


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    return folder, train(folder, "optimizer.grad_clip=null", "data.strategy=single")[0]


@pytest.mark.parametrize(("scheme", "workers"), [(name, 0) for name in SCHEMES if name != "single"] + [("packed", 2)])
def test_every_scheme_has_the_gradient_of_single_at_every_step(single, scheme, workers):
    folder, expected = single
    steps, _ = train(folder, "optimizer.grad_clip=null", f"data.num_workers={workers}", *SCHEMES[scheme])
    for gradient, of_single in zip(steps, expected):
        assert of_single.norm() > 1e-3
        assert relative(gradient, of_single) <= 1e-9


@pytest.mark.parametrize("slots", [24, 72, 1000])
def test_gradient_accumulation_does_not_matter(single, slots):
    folder, expected = single
    steps, _ = train(folder, "optimizer.grad_clip=null", "data.strategy=greedy", f"data.slots_per_batch={slots}")
    assert all(relative(gradient, of_single) <= 1e-9 for gradient, of_single in zip(steps, expected))


# At initialisation the skip D dominates the scan's output, so its leak alone is small; the convolution's is not.
@pytest.mark.parametrize(("boundary", "least"), [("leak", 1e-2), ("leak_conv", 1e-2), ("leak_scan", 1e-4)])
def test_a_leak_has_another_gradient_from_the_first_step(single, boundary, least):
    folder, expected = single
    steps, _ = train(
        folder, "optimizer.grad_clip=null", "data.strategy=greedy", f"trainer.boundary={boundary}", steps=1
    )
    assert relative(steps[0], expected[0]) > least


def test_carrying_equals_reset_where_nothing_continues(single):
    folder, _ = single
    # One row is as long as a step's documents together: nothing is cut.
    keys = ["data.row_length=200", "data.overlong=error", "optimizer.grad_clip=null"]
    reset, _ = train(folder, "data.strategy=greedy", *keys, steps=1)
    carry, _ = train(folder, "data.strategy=split", "trainer.boundary=carry", *keys, steps=1)
    assert relative(carry[0], reset[0]) <= 1e-9


def carry_batches(folder):
    config = tiny_config(folder, *CARRY, "data.mode=stream", "data.tokens_per_step=72", "data.row_length=24")
    data = PackedDataModule.from_config(config, progress=False)
    data.setup()
    return config, data, [data.steps[i].batches[0] for i in range(6)]


def test_carried_losses_are_those_of_whole_documents(tmp_path):
    config, data, batches = carry_batches(tmp_path)
    torch.manual_seed(0)
    module = PackedLitModule.from_config(config, data.corpora.train.vocab_size).double()
    carry = Carry()
    seen, continued = {}, 0
    whole_documents = {tuple(data.corpora.train.document(i).tolist()) for i in range(data.corpora.train.num_documents)}
    open_documents: dict[int, list] = {}
    with torch.no_grad():
        for batch in batches:
            losses = module.losses(batch, carry)
            layout = batch.layout
            for s in range(layout.num_documents):
                here = slice(int(layout.starts[s]), int(layout.ends[s]))
                row = int(layout.rows[s])
                tokens, loss, mask = (t.flatten()[here].tolist() for t in (batch.tokens, losses, batch.loss_mask))
                if layout.offsets[s]:
                    continued += 1
                    assert len(open_documents[row][0]) == layout.offsets[s]
                    tokens, loss = open_documents[row][0] + tokens, open_documents[row][1] + loss
                open_documents[row] = [tokens, loss]
                if not mask[-1]:
                    seen[tuple(tokens)] = loss
        assert continued >= 3 and max(map(len, seen)) > 24
        for tokens, loss in seen.items():
            assert tokens in whole_documents
            if len(tokens) > 1:
                expected = losses_alone(module, tokens)
                assert torch.allclose(torch.tensor(loss[:-1], dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)


def losses_alone(module, tokens):
    logits = module.model(torch.tensor([tokens]))[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")


def test_carry_refuses_states_of_another_place(tmp_path):
    config, data, batches = carry_batches(tmp_path)
    module = PackedLitModule.from_config(config, data.corpora.train.vocab_size)
    goes_on = next(i for i, batch in enumerate(batches) if batch.layout.continues.any())
    with pytest.raises(ValueError, match="continues, but no batch came before"):
        module.losses(batches[goes_on], Carry())
    carry = Carry()
    for batch in batches[: goes_on + 1]:
        module.losses(batch, carry)
    with pytest.raises(ValueError, match="documents continue at .* stopped at"):
        module.losses(batches[goes_on], carry)


class ScanOnly(Carry):
    """A continuing piece goes on from its own scan state; its convolution starts fresh."""

    def of_continuing(self, own, fresh, layout):
        return [(*new[:-1], old[-1]) for old, new in zip(own, fresh)]


class Zero(Carry):
    """Rows go on, and every piece starts fresh all the same."""

    def of_continuing(self, own, fresh, layout):
        return fresh


class Foreign(Carry):
    """A continuing piece goes on from the state of another row."""

    def of_continuing(self, own, fresh, layout):
        return [tuple(part.roll(1, 0) for part in state) for state in own]


def test_a_scheme_for_continuing_pieces_is_one_method(tmp_path):
    config, data, batches = carry_batches(tmp_path)
    torch.manual_seed(0)
    module = PackedLitModule.from_config(config, data.corpora.train.vocab_size).double()
    losses = {}
    for scheme in (Reset(), Carry(), Zero(), ScanOnly(), Foreign()):
        with torch.no_grad():
            losses[type(scheme)] = [module.losses(batch, scheme) for batch in batches]
    continuing = [batch.layout.continues[batch.layout.documents].where(batch.loss_mask, False) for batch in batches]
    assert sum(int(slots.sum()) for slots in continuing) > 50
    for scheme, found in losses.items():
        for slots, of_scheme, of_reset in zip(continuing, found, losses[Reset]):
            assert torch.equal(of_scheme[~slots], of_reset[~slots]), "heads of documents start fresh in every scheme"
            assert torch.equal(of_scheme[slots], of_reset[slots]) == (scheme in (Reset, Zero) or not slots.any())
    assert not torch.equal(losses[ScanOnly][-1], losses[Carry][-1])


def test_no_gradient_flows_through_carried_states_but_into_learned_starts(tmp_path):
    config, data, batches = carry_batches(tmp_path)
    config.model.learned_initial_state = True
    module = PackedLitModule.from_config(config, data.corpora.train.vocab_size)
    carry = Carry()
    for batch in batches:
        module.losses(batch, carry)
        assert not any(tensor.requires_grad for pair in carry.state_dict()["states"] for tensor in pair)
    module.loss(batches[0], Carry())[0].backward()
    gradient = module.model.backbone.layers[0].mixer.initial_state.grad
    assert gradient is not None and gradient.abs().sum() > 0


def test_the_loss_is_a_token_mean_of_the_whole_step(tmp_path):
    config = tiny_config(tmp_path, "data.strategy=single")
    data = PackedDataModule.from_config(config, progress=False)
    data.setup()
    module = PackedLitModule.from_config(config, data.corpora.train.vocab_size)
    step = data.steps[0]
    total = module.accumulate(step, torch.Tensor.backward)
    losses = [losses_alone(module, batch.tokens[0].tolist()) for batch in step.batches if batch.layout.num_tokens > 1]
    extra = [module.losses(b)[0, -1:] for b in step.batches if b.loss_mask[0, -1]]
    mean = torch.cat([*losses, *extra]).mean()
    assert sum(map(len, [*losses, *extra])) == step.num_targets
    assert torch.allclose(total, mean.detach(), rtol=1e-5)
    row_means = torch.stack([loss.mean() for loss in losses]).mean()
    assert abs(row_means - mean) > 1e-3, "documents of different lengths, or the test shows nothing"


def test_evaluation_is_one_document_at_a_time(tmp_path):
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.boundary=leak")
    data = PackedDataModule.from_config(config, progress=False)
    data.setup()
    torch.manual_seed(0)
    module = PackedLitModule.from_config(config, data.corpora.train.vocab_size).double()
    alone, leaking = LossByPosition(), LossByPosition()
    with torch.no_grad():
        for metric, evaluation, boundary in zip((alone, leaking), data.evaluations, (Reset(), Leak())):
            for i in range(len(evaluation)):
                batch = evaluation[i]
                metric.update(module.losses(batch, boundary), batch.loss_mask, batch.layout.position_indices)
        corpus = data.corpora.validation
        documents = [corpus.document(i).tolist() for i in range(corpus.num_documents)]
        losses = torch.cat([losses_alone(module, tokens) for tokens in documents if len(tokens) > 1])
        start = torch.cat([losses_alone(module, tokens)[:32] for tokens in documents if len(tokens) > 1])
    results = alone.compute()
    assert int(results["counts"].sum()) == len(losses) == int(leaking.compute()["counts"].sum())
    assert torch.allclose(results["loss"], losses.mean(), rtol=1e-9)
    assert torch.allclose(results["loss_start"], start.mean(), rtol=1e-9)
    assert abs(leaking.compute()["loss"] - results["loss"]) > 1e-6


@pytest.mark.parametrize("keys", [["data.strategy=greedy", "trainer.boundary=leak"], CARRY], ids=["leak", "carry"])
def test_evaluation_as_trained_lets_through_what_training_does(tmp_path, keys):
    config = tiny_config(tmp_path, *keys)
    data = PackedDataModule.from_config(config, progress=False)
    data.setup()
    torch.manual_seed(0)
    module = PackedLitModule.from_config(config, data.corpora.train.vocab_size).double()
    as_trained, reset = LossByPosition(), LossByPosition()
    scheme = BOUNDARIES[config.trainer.boundary]()
    module.on_validation_epoch_start()
    with torch.no_grad():
        for i in range(len(data.evaluations[1])):
            batch = data.evaluations[1][i]
            module.validation_step(batch, i, dataloader_idx=1)
            for metric, boundary in ((as_trained, scheme), (reset, Reset())):
                losses = module.losses(batch, boundary)
                metric.update(losses, batch.loss_mask, batch.layout.position_indices)
    loss = module.as_trained.compute()["loss"]
    assert loss == as_trained.compute()["loss"] and abs(loss - reset.compute()["loss"]) > 1e-6


def test_positions_fall_into_their_buckets():
    metric = LossByPosition()
    positions = torch.tensor([[0, 1, 2, 3, 4, 31, 32, -1, 70000]])
    losses = torch.arange(9.0)[None]
    metric.update(losses, positions >= 0, positions)
    results = metric.compute()
    assert results["counts"].tolist()[:7] == [1, 1, 2, 1, 0, 1, 1] and results["counts"].tolist()[-1] == 1
    assert results["by_position"][2] == 2.5 and results["loss"] == (36 - 7) / 8
    assert results["loss_start"] == (0 + 1 + 2 + 3 + 4 + 5) / 6


def test_learning_rate_warms_up_and_falls_to_its_share(tmp_path):
    config = tiny_config(tmp_path, "optimizer.lr=1", "optimizer.warmup_steps=4", "trainer.max_steps=20")
    module = PackedLitModule.from_config(config, 8)
    rates = [module.learning_rate(step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1) and rates[4:] == sorted(rates[4:], reverse=True)


def test_every_step_takes_its_learning_rate(tmp_path):
    taken = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: taken.append({g["lr"] for g in optimizer.param_groups})
    )
    _, module = train(tmp_path, "data.strategy=greedy", "optimizer.lr=0.01")
    hook.remove()
    assert taken == [{module.learning_rate(step)} for step in range(4)] and taken[0] == {0.005}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.boundary=leek", "trainer.boundary: expected one of reset"),
        ("model.d_conv=5", "model.d_conv: expected 2, 3 or 4"),
        ("model.d_model=0", "model.d_model"),
        ("model.vocab_size=3", "model.vocab_size: expected at least 8"),
        ("ops.backend=fast", "ops.backend: expected one of auto"),
        ("model.dt_rank=all", "model.dt_rank"),
    ],
)
def test_refuses_in_one_sentence(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        PackedLitModule.from_config(tiny_config(tmp_path, override), 8)
    assert "\n" not in str(caught.value)


def test_batches_move_whole(tmp_path):
    _, data, batches = carry_batches(tmp_path)
    step = data.steps[0].to("meta")
    assert all(b.tokens.is_meta and b.targets.is_meta and b.loss_mask.is_meta for b in step.batches)
    assert all(b.layout.starts.is_meta for b in step.batches)
    fields = {field.name for field in dataclasses.fields(PackedBatch)}
    assert fields == {"tokens", "targets", "loss_mask", "layout", "turn"}
    assert dataclasses.replace(batches[0], turn=2).to("meta").turn == 2
    assert isinstance(batches[0].layout, SequenceLayout)


def test_rows_that_cut_off_all_answers_are_refused(tmp_path):
    """Prompts fill them: each step would train on nothing, without a word."""
    keys = ["data.path=null", "data.source=task", "data.task=mqar", "data.num_documents=100", "data.row_length=8"]
    keys += ["data.overlong=truncate", "data.strategy=greedy", "trainer.max_steps=3"]
    config = tiny_config(tmp_path, *keys)
    with pytest.raises(
        ConfigError, match="^data: expected something to predict, got none in 3 steps: rows may cut it off"
    ):
        fit(config, progress=False)


def test_documents_of_which_nothing_can_be_predicted_are_refused(tmp_path, monkeypatch):
    """Else the loss would be that of no target: not finite, which reads as a run that diverged."""
    path = tmp_path / "documents.jsonl"
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    path.write_text("".join(f'{{"text": "{letter}"}}\n' for letter in letters))
    keys = ["data.source=jsonl", "data.begin_token=null", "data.end_token=null", "data.validation_fraction=0.3"]
    config = tiny_config(tmp_path, f"data.path={path}", *keys)
    with pytest.raises(ConfigError, match="^data: expected documents of train with something to predict, got none"):
        fit(config, progress=False)
    path.write_text("".join(f'{{"text": "a{letter}"}}\n' for letter in letters))
    data = PackedDataModule.from_config(config, progress=False)
    data.check_targets()
    monkeypatch.setattr(datamodule, "has_target", lambda corpus, _: corpus.split == "train")
    with pytest.raises(ConfigError, match="^data: expected documents of validation with something to predict"):
        data.check_targets()
