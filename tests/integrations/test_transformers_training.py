"""Patched Hugging Face models in training: checkpointing, torch.compile, LoRA, Trainer, TRL; the
oracle is single documents.
"""

import copy
import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

import hugging_face as hf  # noqa: E402
from hugging_face import every_family, every_family_slowly, plain_torch  # noqa: E402, F401
from packmamba import leakcheck  # noqa: E402
from packmamba.data.tokenizer import write_tokenizer  # noqa: E402
from packmamba.integrations.transformers import disable, enable, patch  # noqa: E402

MASK, POSITION, _ = hf.arguments(hf.ROWS)


@every_family_slowly
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(family, reentrant):
    model, packed = hf.both(family)
    packed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    packed.enable_input_require_grads()
    tokens = hf.random_tokens()
    logits = packed.train()(tokens, attention_mask=MASK, position_ids=POSITION).logits
    hf.check_same(packed, model, logits, tokens, hf.ROWS, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mamba2", "Mamba", "Jamba", "FalconH1"])
def test_compiled_is_eager(family):
    """One compilation serves batches of other documents."""
    torch._dynamo.reset()
    _, packed = hf.both(family, num_hidden_layers=1 + (family == "Jamba"))  # an attention layer, too
    compiled = torch.compile(copy.deepcopy(packed).train(), backend="aot_eager")
    tokens = hf.random_tokens()
    batches = [hf.ROWS, hf.ROWS[::-1], [([3, 3, 8], 0, 0)] * 6, [([n, 14 - n], 0, 0) for n in (1, 5, 7, 13, 2, 3)]]
    graphs = []
    for rows in batches:
        mask, position, _ = hf.arguments(rows)
        given = {"attention_mask": mask, "position_ids": position}
        expected, found = packed.train()(tokens, **given).logits, compiled(tokens, **given).logits
        assert hf.error(found, expected) < 1e-6
        found, expected = ([logits[b, a:e] for b, a, e in hf.places(rows)] for logits in (found, expected))
        wanted = hf.loss_and_gradients(packed, expected, tokens, rows)[1]
        for name, gradient in hf.loss_and_gradients(compiled._orig_mod, found, tokens, rows)[1].items():
            assert hf.error(gradient, wanted[name]) < 1e-5, name
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[-2], graphs
    for layer in packed.base_model.layers:  # one by one, as accelerate does
        layer.compile(backend="aot_eager")
    for n in range(2, 14):
        packed(tokens[:1], position_ids=hf.arguments([([1] * n + [14 - n], 0, 0)])[1])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[-6], graphs


def test_compiled_short_convolutions(monkeypatch):
    """torch.compile must guard the functions that a layer's forward is given, not those of its
    module.
    """
    monkeypatch.undo()  # the module's own function has no defaults, as users find it
    torch._dynamo.reset()
    packed, tokens = hf.both("Lfm2")[1], hf.random_tokens()[:1]
    given = {"position_ids": hf.arguments([([5, 1, 8], 0, 0)])[1]}
    found = torch.compile(copy.deepcopy(packed), backend="eager")(tokens, **given).logits
    assert hf.error(found, packed(tokens, **given).logits) < 1e-6


FIVE_STEPS = {"max_steps": 5, "lr_scheduler_type": "constant", "save_steps": 5}


def train(trainer_class, packed, settings, dataset=None, **options):
    """Train in the documents' order; the losses that it logs, and itself."""
    trainer = trainer_class(model=packed, args=settings, train_dataset=dataset or hf.documents(), **options)
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
            ids = torch.as_tensor(document["input_ids"])
            if len(ids) > 1:
                logits = model(ids[None]).logits[0, :-1]
                total = total + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
                targets += len(ids) - 1
        (total / targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach() / targets))
    return losses


@every_family_slowly
def test_trainer_with_flattened_batches(family, tmp_path):
    pytest.importorskip("accelerate")
    model, packed = hf.both(family)
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    settings = hf.settings_of(transformers.TrainingArguments, tmp_path, eval_strategy="epoch", **FIVE_STEPS)
    losses, trainer = train(transformers.Trainer, packed, settings, data_collator=collator, eval_dataset=hf.documents())
    all_documents = hf.documents()
    expected = single_losses(model, ([all_documents[:4], all_documents[4:]] * 3)[:5])
    assert losses == pytest.approx(expected, rel=1e-5)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-5")
    for name, weight in loaded.state_dict().items():
        assert hf.error(weight, model.state_dict()[name]) < 1e-3, name
    assert any("eval_loss" in entry for entry in trainer.state.log_history)


WAYS = {
    "bfd": {"packing": True, "max_length": 16},
    "bfd_split": {"packing": True, "packing_strategy": "bfd_split", "max_length": 16},
    "padding_free": {"padding_free": True, "max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 23},
}


def sft(model, folder, way):
    """Train by TRL's trainer; the losses that it logs, and itself."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    write_tokenizer(folder, "bytes", None, "</s>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, pad_token="</s>")
    dataset = datasets.Dataset.from_list(hf.documents())
    settings = hf.settings_of(trl.SFTConfig, folder / "out", router_aux_loss_coef=0.0, **FIVE_STEPS, **WAYS[way])
    return train(trl.SFTTrainer, model, settings, dataset, processing_class=tokenizer)


@pytest.mark.extras
@every_family
@pytest.mark.parametrize("way", ["bfd", "bfd_split", "padding_free"])
def test_trl_s_sft_trainer(family, way, tmp_path):
    model, packed = hf.both(family, vocab_size=300)
    losses, trainer = sft(packed, tmp_path, way)
    assert trainer.padding_free
    rows = trainer.train_dataset
    if way != "padding_free":
        lengths = [n for row in rows["seq_lengths"] for n in row]
        assert sorted(lengths) == sorted(hf.LENGTHS) and len(rows) < len(hf.LENGTHS)
    batches = [[split(rows[i]) for i in range(first, min(first + 4, len(rows)))] for first in range(0, len(rows), 4)]
    flat = [[document for row in batch for document in row] for batch in batches]
    assert losses == pytest.approx(single_losses(model, (flat * 5)[:5]), rel=1e-5)


@pytest.mark.extras
@every_family
@pytest.mark.parametrize("length", [23, 40])
def test_trl_s_wrapped_documents_are_refused(family, length, tmp_path, monkeypatch):
    monkeypatch.setitem(WAYS["wrapped"], "max_length", length)
    with pytest.raises(ValueError, match="^position_ids: expected "):
        sft(patch(hf.build(family, vocab_size=300), require_boundaries=True), tmp_path, "wrapped")


@pytest.mark.extras
@every_family
def test_trl_s_trainer_of_a_folder(family, tmp_path, request):
    hf.build(family, vocab_size=300).save_pretrained(tmp_path / "model")
    request.addfinalizer(disable)
    enable()
    assert leakcheck(sft(str(tmp_path / "model"), tmp_path, "bfd")[1].model, lengths=[5, 1, 8]).ok


@pytest.mark.extras
def test_trl_sft_by_a_script(tmp_path, monkeypatch, request):
    """As docs/transformers.md says."""
    trl = pytest.importorskip("trl")
    from trl.scripts.sft import main, make_parser

    hf.build("Mamba", vocab_size=300).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", "bytes", None, "</s>")
    (tmp_path / "data").mkdir()
    texts = [json.dumps({"text": "x" * length}) for length in hf.LENGTHS]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(texts))
    trained, train = [], trl.SFTTrainer.train
    monkeypatch.setattr(trl.SFTTrainer, "train", lambda self, *given, **more: trained.append(self) or train(self))
    words = f"--model_name_or_path {tmp_path}/model --dataset_name {tmp_path}/data --output_dir {tmp_path}/out --packing True"
    words += " --max_length 40 --max_steps 2 --use_cpu True --report_to none --eos_token </s> --pad_token </s>"
    request.addfinalizer(disable)
    enable()
    main(*make_parser().parse_args_and_config(words.split()))
    (trainer,) = trained
    assert trainer.state.global_step == 2 and leakcheck(trainer.model, lengths=[5, 1, 8]).ok


@pytest.mark.extras
@every_family
def test_adapters_learn(family):
    """Train adapters of each projection that PEFT takes; merged into the original they give its
    logits, document by document.
    """
    peft = pytest.importorskip("peft")
    model, packed = hf.both(family)
    linear = {name.split(".")[-1] for name, module in packed.named_modules() if isinstance(module, torch.nn.Linear)}
    targets = linear - {"lm_head"} if family in hf.DELTA else linear & {"in_proj", "x_proj", "dt_proj"}
    if family in ("Jamba", "Zamba", "Bamba", "GraniteMoeHybrid", "Zamba2"):
        targets.add("out_proj")
    config = peft.LoraConfig(r=2, target_modules=sorted(targets), init_lora_weights=False)
    adapted = peft.get_peft_model(packed, config)
    tokens = hf.random_tokens()
    logits = adapted(tokens, attention_mask=MASK, position_ids=POSITION).logits
    gradients = hf.loss_and_gradients(adapted, [logits[b, a:e] for b, a, e in hf.places(hf.ROWS)], tokens, hf.ROWS)[1]
    learned = [name for name, gradient in gradients.items() if gradient.any()]
    assert learned == [name for name, _ in adapted.named_parameters() if "lora_" in name]
    for single, (b, a, e) in hf.alone(adapted, tokens, hf.ROWS):
        assert hf.error(logits[b, a:e], single[0]) < 1e-5
    model.load_state_dict(adapted.merge_and_unload().state_dict())
    tolerance = 1e-4 if family in hf.DELTA else 1e-5  # rounding of merged weights
    for single, (b, a, e) in hf.alone(model, tokens, hf.ROWS):
        assert hf.error(logits[b, a:e], single[0]) < tolerance


def split(row):
    """The documents of a packed row."""
    ids = torch.tensor(row["input_ids"])
    return [{"input_ids": part} for part in ids.split(row.get("seq_lengths") or len(ids))]


@pytest.mark.extras
@pytest.mark.parametrize("family", ["Mamba", "Mamba2"])
def test_fine_tuning_has_the_gradients_of_trl(family, tmp_path, monkeypatch):
    """Prompts and completions: one step of ``train configs/fine_tune.yaml``, and of TRL's trainer
    with a patched model.
    """
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from packmamba.config import load_config
    from packmamba.lab.callbacks import RunMetrics
    from packmamba.lab.fit import fit
    from packmamba.training import PackedDataModule

    model = hf.build(family, vocab_size=300)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, "bytes", None, "</s>")
    pairs = [{"prompt": "ask " * (i % 3), "completion": "answer"[: 1 + i % 6] + str(i)} for i in range(12)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    folders = [f"model.pretrained={tmp_path}", f"data.path={tmp_path}/pairs.jsonl", f"data.cache_dir={tmp_path}/cache"]
    keys = "data.begin_token=null data.row_length=32 data.tokens_per_step=1000 optimizer.grad_clip=null".split()
    keys += "trainer.max_steps=1 trainer.accelerator=cpu trainer.loggers=[]".split()
    config = load_config("configs/fine_tune.yaml", [*folders, *keys, f"runs_dir={tmp_path}/runs"])
    ours = {}

    def keep(self, trainer, module, optimizer):
        for name, parameter in module.model.named_parameters():
            ours[name.replace("embedding.", "embeddings.")] = parameter.grad.clone()

    monkeypatch.setattr(RunMetrics, "on_before_optimizer_step", keep)
    record = fit(config, progress=False)
    corpus = PackedDataModule.from_config(config, progress=False).corpora.train
    trained = [bytes(corpus.document(i)[:-1].astype("u1")).decode() for i in range(len(corpus))]

    dataset = datasets.Dataset.from_list([pair for pair in pairs if pair["prompt"] + pair["completion"] in trained])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, pad_token="</s>")
    one_step = {"max_steps": 1, "learning_rate": 0.0, "max_grad_norm": 0.0, "router_aux_loss_coef": 0.0}
    rows = {"packing": True, "max_length": 32, "per_device_train_batch_size": len(trained)}
    settings = hf.settings_of(trl.SFTConfig, tmp_path / "out", **one_step, **rows)
    theirs = {}

    class Keep(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *arguments, model, **rest):
            theirs.update({name: p.grad.clone() for name, p in model.named_parameters()})

    given = {"train_dataset": dataset, "processing_class": tokenizer, "callbacks": [Keep()]}
    trainer = trl.SFTTrainer(patch(model), settings, **given)
    trainer.train()
    assert len(dataset) == len(corpus) > len(trainer.train_dataset), "TRL packs, too"
    assert trainer.state.log_history[0]["loss"] == pytest.approx(record["curves"]["train"][0]["loss"], rel=1e-4)
    assert theirs.keys() == ours.keys()
    for name, gradient in theirs.items():
        assert hf.error(ours[name], gradient) < 1e-5, name
