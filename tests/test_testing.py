"""The fixture and the callbacks of packmamba.testing catch a leak of the model that trains, and
change no bit of a training.
"""

import os
from contextlib import nullcontext

import lightning
import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from hugging_face import VOCAB, build, documents, plain_torch, settings_of  # noqa: E402, F401
from packmamba import MambaLM, SequenceLayout  # noqa: E402
from packmamba.data.batch import PackedBatch, StepBatch  # noqa: E402
from packmamba.data.tokenizer import write_tokenizer  # noqa: E402
from packmamba.integrations.transformers import patch  # noqa: E402
from packmamba.testing import LeakError, LightningLeakCheck, TrainerLeakCheck, check_batch  # noqa: E402
from packmamba.training import PackedLitModule  # noqa: E402
from processes import fork_ranks, statuses  # noqa: E402

pytest_plugins = ["packmamba.testing"]
pytestmark = pytest.mark.filterwarnings("error:leakcheck")  # that nothing was checked, say
LEAK = r"^batch: expected isolated documents .* from backbone.layers.0.mixer \(MambaMixer\) on.*$"
COLLATORS = {
    "position_ids": {},
    "seq_idx": {"return_position_ids": False, "return_seq_idx": True},
    "cu_seq_lens_q": {"return_position_ids": False, "return_flash_attn_kwargs": True},
}


def mamba(patched, dropout=False):
    model = build("Mamba", num_hidden_layers=1, seed=3)
    if dropout:
        model.backbone.norm_f = nn.Sequential(model.backbone.norm_f, nn.Dropout(0.2))
    return patch(model) if patched else model


def state_of(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [torch.get_rng_state(), *model.state_dict().values(), *gradients]


def test_fixture(leakcheck):
    assert leakcheck(MambaLM(VOCAB, 16, 1, d_state=4), lengths=[3, 5]).ok
    with pytest.raises(LeakError, match="Documents leak"):
        leakcheck(mamba(patched=False), "position_ids", lengths=[3, 5])


def train(model, folder, callback, collator=None, more=(), **options):
    """Train two steps; return Trainer."""
    arguments = settings_of(transformers.TrainingArguments, folder, max_steps=2, save_strategy="no", **options)
    collator = collator or transformers.DataCollatorWithFlattening()
    callbacks = [*more, *([callback] if callback else [])]
    trainer = transformers.Trainer(model, arguments, collator, documents(), callbacks=callbacks)
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", COLLATORS)
def test_trainer(name, tmp_path):
    collator = transformers.DataCollatorWithFlattening(**COLLATORS[name])
    train(mamba(patched=True), tmp_path, TrainerLeakCheck(), collator)
    with pytest.raises(LeakError, match=LEAK) as caught:
        train(mamba(patched=False), tmp_path, TrainerLeakCheck(), collator)
    assert name in str(caught.value)


def test_a_warning_instead(tmp_path):
    with pytest.warns(UserWarning, match="leakcheck: batch: expected isolated documents"):
        trainer = train(mamba(patched=False), tmp_path, TrainerLeakCheck(warn=True))
    assert trainer.state.global_step == 2 and not trainer.model._forward_pre_hooks


@pytest.mark.extras
def test_trl(tmp_path):
    """Its trainer asks models for losses without logits."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    write_tokenizer(tmp_path, "bytes", None, "</s>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, pad_token="</s>")
    config = {"packing": True, "max_length": 16, "max_steps": 1, "save_strategy": "no"}
    arguments = settings_of(trl.SFTConfig, tmp_path, **config)
    rows = datasets.Dataset.from_list(documents())
    for patched in (True, False):
        given = {"train_dataset": rows, "processing_class": tokenizer, "callbacks": [TrainerLeakCheck()]}
        trainer = trl.SFTTrainer(mamba(patched), arguments, **given)
        with nullcontext() if patched else pytest.raises(LeakError, match="seq_idx, cu_seq_lens_q"):
            trainer.train()


class Keep(transformers.TrainerCallback):
    found = ()

    def on_pre_optimizer_step(self, *_, model, **__):
        self.found = self.found or [tensor.clone() for tensor in state_of(model)]


@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_checkpointing": True}], ids=["float32", "bfloat16"])
def test_trainer_s_bits_stay(options, tmp_path):
    """Hold random states, weights, and the first step's gradients."""
    found = []
    for callback in (None, TrainerLeakCheck()):
        torch.manual_seed(0)
        model, keep = mamba(patched=True, dropout=True), Keep()
        train(model, tmp_path, callback, more=[keep], **options)
        found.append([*keep.found, torch.get_rng_state(), *model.state_dict().values()])
    assert len(found[0]) > 30
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_belongs_to_no_document_and_a_mask_may_number_them(side):
    tokens = torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    number = torch.tensor([[1] * 4 + [2] * 5 + [0] * 3, [1] * 12])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0, 0], [*range(12)]])
    if side == "left":
        number[0], positions[0] = number[0].roll(3), positions[0].roll(3)
    batch = {"input_ids": tokens, "attention_mask": number.clamp(max=1), "position_ids": positions}
    assert check_batch(mamba(patched=True).train(), batch)
    for leaks in (batch, {"input_ids": tokens, "attention_mask": number}):
        with pytest.raises(LeakError, match="attention_mask"):
            check_batch(mamba(patched=False), leaks)
    del batch["position_ids"]
    assert not check_batch(mamba(patched=False), batch)


def test_batches_of_single_documents_are_said_to_be_unchecked(tmp_path):
    collator = transformers.DataCollatorWithFlattening()
    with pytest.warns(UserWarning, match="nothing was checked: no batch marks two documents in a row"):
        train(mamba(patched=False), tmp_path, TrainerLeakCheck(), lambda rows: collator(rows[:1]))


class Own(lightning.LightningModule):
    """A user's module around a model."""

    def __init__(self, model, forgets=()):
        super().__init__()
        self.model, self.forgets = model, forgets

    def training_step(self, batch, _):
        if isinstance(batch, list):
            return self.model(*batch).square().mean()
        return self.model(**{name: value for name, value in batch.items() if name not in self.forgets}).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(module, data, callback, **options):
    options = {"max_steps": 2, "devices": 1, "callbacks": [callback] if callback else []} | options
    options |= {"accelerator": "cpu"}
    options |= dict.fromkeys("logger enable_checkpointing enable_progress_bar enable_model_summary".split(), False)
    lightning.Trainer(**options).fit(module, data)


def loader(rows=4):
    return torch.utils.data.DataLoader(documents(), rows, collate_fn=transformers.DataCollatorWithFlattening())


def test_lightning_with_a_user_s_module():
    callback = LightningLeakCheck()
    fit(Own(mamba(patched=True)), loader(), callback)
    assert callback.done and callback.seen == 1
    for module in (Own(mamba(patched=False)), Own(mamba(patched=True), forgets=["position_ids"])):
        with pytest.raises(LeakError, match=LEAK):
            fit(module, loader(), LightningLeakCheck())
    with pytest.warns(UserWarning, match="leakcheck: batch"):
        fit(Own(mamba(patched=False)), loader(), LightningLeakCheck(warn=True))


def test_they_wait_for_neighbours_and_check_all_batches_of_the_step(tmp_path):
    """Nine steps without neighbours, then steps of two batches each; with ``every``, again."""
    collate = transformers.DataCollatorWithFlattening()
    packed = [collate(documents()) for _ in range(6)]
    alone = [collate([{"input_ids": [1, 2, 3]}]) for _ in range(18)]
    data = torch.utils.data.DataLoader(alone + packed, None)
    options = {"max_steps": 12, "accumulate_grad_batches": 2}
    for every, seen in ((0, 2), (2, 4)):
        callback = LightningLeakCheck(every=every)
        fit(Own(mamba(patched=True)), data, callback, **options)
        assert callback.seen == seen and callback.checked_at == 9 + every
    with pytest.raises(LeakError, match=LEAK):
        fit(Own(mamba(patched=False)), data, LightningLeakCheck(), **options)
    callback = TrainerLeakCheck()
    train(mamba(patched=True), tmp_path, callback, gradient_accumulation_steps=2)
    assert callback.seen == 2 and callback.checked_at == 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_s_bits_stay(precision):
    found = []
    for callback in (None, LightningLeakCheck()):
        torch.manual_seed(0)
        module = Own(mamba(patched=True, dropout=True))
        fit(module, loader(), callback, precision=precision, max_steps=1)
        found.append(state_of(module))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_lightning_with_a_way_to_call_the_model():
    data = torch.utils.data.DataLoader([[torch.arange(8)[None]]] * 2, None)
    tight = lambda module, tokens, n: module.model(tokens, SequenceLayout.from_lengths([n], sum(n)))
    fit(Own(MambaLM(VOCAB, 8, 1)), data, LightningLeakCheck(call=tight, vocab_size=VOCAB))
    leaks = LightningLeakCheck(False, lambda module, tokens, n: module.model(tokens), vocab_size=VOCAB, lengths=[3, 5])
    with pytest.raises(LeakError, match=r"^Documents leak .* is model.backbone.layers.0 \(Block\).*$"):
        fit(Own(MambaLM(VOCAB, 8, 1)), data, leaks)
    with pytest.raises(TypeError, match="^call: expected"):
        fit(Own(MambaLM(VOCAB, 8, 1)), data, LightningLeakCheck())


def test_lightning_with_our_module():
    tokens, layout = torch.arange(12).view(2, 6), SequenceLayout.from_lengths([[2, 3], [6]], 6)
    batch = PackedBatch(tokens, tokens.roll(-1, 1), layout.position_indices >= 0, layout)
    step = StepBatch(num_targets=11, num_tokens=11, num_slots=12, batches=[batch])
    for boundary in ("reset", "leak"):
        module = PackedLitModule(model={"vocab_size": VOCAB, "d_model": 8, "n_layer": 1}, boundary=boundary)
        with pytest.raises(LeakError, match="layout, boundary=leak") if boundary == "leak" else nullcontext():
            fit(module, torch.utils.data.DataLoader([step] * 2, None), LightningLeakCheck())


def fit_rank(patched):
    """Train with packed rows in rank 1 alone; return 3 at a leak."""
    data = loader(1 + 3 * int(os.environ["RANK"]))
    try:
        fit(Own(mamba(patched)), data, LightningLeakCheck(), devices=2, strategy="ddp", use_distributed_sampler=False)
    except LeakError:
        return 3


@pytest.mark.slow
@pytest.mark.parametrize("patched", [True, False])
def test_ranks_check_their_own_batches(patched, tmp_path):
    """Where one rank alone has two documents in a row, neither waits for the other; a leak ends its
    process.
    """
    ranks = fork_ranks(2, fit_rank, patched, output=tmp_path / "output.txt")
    ended = statuses(*(ranks if patched else ranks[1:]))
    assert ended == ([0, 0] if patched else [3]), (tmp_path / "output.txt").read_text()[-2000:]
    statuses(ranks[0], timeout=1)
