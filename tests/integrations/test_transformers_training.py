"""Patched Hugging Face models in training: checkpointing, torch.compile, LoRA, Trainer, TRL; the oracle is single documents."""

import copy
import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from hugging_face import (  # noqa: E402
    FAMILIES,
    ROWS,
    VOCAB,
    arguments,
    both,
    check_same,
    error,
    loss_and_gradients,
    places,
    plain_torch,  # noqa: F401
)

MASK, POSITION, _ = arguments(ROWS)
LENGTHS = [9, 4, 1, 7, 12, 3, 8, 2]
every_family = pytest.mark.parametrize("family", FAMILIES)


def random_tokens(seed=1, rows=6):
    return torch.randint(1, VOCAB, (rows, 14), generator=torch.Generator().manual_seed(seed))


@every_family
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(family, reentrant):
    model, packed = both(family)
    packed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    packed.enable_input_require_grads()
    tokens = random_tokens()
    logits = packed.train()(tokens, attention_mask=MASK, position_ids=POSITION).logits
    check_same(packed, model, logits, tokens, ROWS, 1e-5)


@pytest.mark.parametrize("family", ["Mamba", "Jamba"])
def test_compiled_is_eager(family):
    """One compilation serves batches of other documents."""
    torch._dynamo.reset()
    _, packed = both(family, num_hidden_layers=1 + (family == "Jamba"))  # an attention layer, too
    compiled = torch.compile(copy.deepcopy(packed).train(), backend="aot_eager")
    tokens = random_tokens()
    batches = [ROWS, ROWS[::-1], [([2] * 7, 0, 0)] * len(ROWS), [([n, 14 - n], 0, 0) for n in (1, 5, 7, 13, 2, 3)]]
    graphs = []
    for rows in batches:
        mask, position, _ = arguments(rows)
        given = {"attention_mask": mask, "position_ids": position}
        expected, found = packed.train()(tokens, **given).logits, compiled(tokens, **given).logits
        assert error(found, expected) < 1e-6
        found, expected = ([logits[b, a:e] for b, a, e in places(rows)] for logits in (found, expected))
        wanted = loss_and_gradients(packed, expected, tokens, rows)[1]
        for name, gradient in loss_and_gradients(compiled._orig_mod, found, tokens, rows)[1].items():
            assert error(gradient, wanted[name]) < 1e-5, name
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[-2], graphs


def documents():
    tokens = random_tokens(seed=5, rows=8).flatten().tolist()
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [{"input_ids": tokens[end - n : end]} for n, end in zip(LENGTHS, ends)]


def train(
    trainer_class, packed, folder, config_class=transformers.TrainingArguments, dataset=None, config=None, **options
):
    """Five steps on a CPU; the losses that it logs, and a checkpoint."""
    settings = config_class(
        output_dir=str(folder), max_steps=5, per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True,
        learning_rate=0.01, lr_scheduler_type="constant", save_steps=5, disable_tqdm=True, dataloader_pin_memory=False,
        **{"bf16": False, "gradient_checkpointing": False} | (config or {}),
    )  # fmt: skip
    trainer = trainer_class(model=packed, args=settings, train_dataset=dataset or documents(), **options)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def single_losses(model, batches, learning_rate=0.01):
    """Return the losses of the same steps, document by document, with the same optimizer."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=learning_rate, weight_decay=0.0)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total, targets = 0.0, 0
        for document in batch:
            ids = torch.tensor(document["input_ids"])
            if len(ids) > 1:
                logits = model(ids[None]).logits[0, :-1]
                total = total + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
                targets += len(ids) - 1
        (total / targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach() / targets))
    return losses


@every_family
def test_trainer_with_flattened_batches(family, tmp_path):
    pytest.importorskip("accelerate")
    model, packed = both(family)
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    losses, trainer = train(
        transformers.Trainer, packed, tmp_path, config={"eval_strategy": "steps", "eval_steps": 5}, data_collator=collator,
        eval_dataset=documents(),
    )  # fmt: skip
    all_documents = documents()
    expected = single_losses(model, ([all_documents[:4], all_documents[4:]] * 3)[:5])
    assert losses == pytest.approx(expected, rel=1e-5)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-5")
    for name, weight in loaded.state_dict().items():
        assert error(weight, model.state_dict()[name]) < 1e-3, name
    assert any("eval_loss" in entry for entry in trainer.state.log_history)


@pytest.mark.extras
@pytest.mark.parametrize("way", ["packing", "padding_free"])
def test_trl_s_sft_trainer(way, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from packmamba.data.tokenizer import write_tokenizer

    write_tokenizer(tmp_path, "bytes", None, "</s>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = tokenizer.eos_token
    model, packed = both("Mamba", num_hidden_layers=1, vocab_size=300)
    config = {
        "packing": {"packing": True, "max_length": 16},
        "padding_free": {"padding_free": True, "max_length": None},
    }[way]
    losses, trainer = train(
        trl.SFTTrainer, packed, tmp_path / "out", trl.SFTConfig, datasets.Dataset.from_list(documents()),
        config | {"dataset_kwargs": {"skip_prepare_dataset": way == "padding_free"}}, processing_class=tokenizer,
    )  # fmt: skip
    assert trainer.padding_free and len(losses) == 2
    if way == "packing":
        lengths = [n for row in trainer.train_dataset["seq_lengths"] for n in row]
        assert sorted(lengths) == sorted(LENGTHS) and len(trainer.train_dataset) < len(LENGTHS)
    rows = trainer.train_dataset
    batches = [[split(rows[i]) for i in range(first, min(first + 4, len(rows)))] for first in range(0, len(rows), 4)]
    flat = [[document for row in batch for document in row] for batch in batches]
    assert losses == pytest.approx(single_losses(model, (flat * 2)[:2]), rel=1e-4)


def split(row):
    """The documents of a packed row."""
    ids, found = row["input_ids"], []
    for length in row.get("seq_lengths") or [len(ids)]:
        found.append({"input_ids": ids[:length]})
        ids = ids[length:]
    return found
