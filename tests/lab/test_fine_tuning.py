"""Fine-tune a checkpoint on prompts and answers: which loss, which weights, on any ranks, after any
stop.
"""

import json
import warnings

import pytest
import torch
import torch.nn.functional as F

from packmamba import MambaLM
from packmamba.config import ConfigError, load_config
from packmamba.data.sources.records import find_chat_template
from packmamba.data.tokenizer import write_tokenizer
from packmamba.evaluation.load import load_model
from packmamba.lab import cli
from packmamba.lab.fit import fit
from packmamba.lab.records import read_records
from packmamba.lab.run_id import run_folder
from packmamba.training import PackedDataModule, PackedLitModule
from processes import ROOT
from runs import assert_same_training, gradients_of_ranks, stop_at, write_config
from written import write_rows

PAIRS = [{"prompt": f"{i} squared? ", "completion": str(i * i)} for i in range(30)]
SIZES = {
    "mamba1": {"d_model": 16, "n_layer": 2, "d_state": 4},
    "mamba2": {"d_model": 16, "n_layer": 2, "d_state": 8, "headdim": 8, "mixer": "mamba2"},
}


def write_pairs(folder):
    return write_rows(folder / "pairs.jsonl", PAIRS)


def write_checkpoint(folder, mixer="mamba1", format="state_spaces", seed=0):
    torch.manual_seed(seed)
    model = MambaLM(vocab_size=260, **SIZES[mixer])
    model.save_pretrained(folder, format=format)
    write_tokenizer(folder, "bytes", None, "</s>")
    return model


def configure(folder, *overrides):
    """Read the configuration that users begin with."""
    keys = [f"model.pretrained={folder}/checkpoint", f"data.path={write_pairs(folder)}", f"runs_dir={folder}/runs"]
    keys += [f"data.cache_dir={folder}/cache", "data.begin_token=null", "data.row_length=64", "trainer.accelerator=cpu"]
    keys += ["trainer.log_every=1", "trainer.loggers=[]", "data.tokens_per_step=200", "trainer.max_steps=6"]
    return load_config(ROOT / "configs" / "fine_tune.yaml", [*keys, *overrides])


def mean_loss_of_answers(model):
    """Score each pair alone: the completion, and the end that follows it."""
    total, targets = 0.0, 0
    for pair in PAIRS:
        ids = torch.tensor([*f"{pair['prompt']}{pair['completion']}".encode(), 256])
        logits = model(ids[None])[0, :-1]
        answer = len(pair["prompt"])
        total += F.cross_entropy(logits[answer - 1 :], ids[answer:], reduction="sum")
        targets += len(ids) - answer
    return total / targets


def test_a_finished_run_that_began_with_other_weights_is_refused(tmp_path):
    write_checkpoint(tmp_path / "checkpoint")
    config = configure(tmp_path, "trainer.max_steps=1")
    record = fit(config, progress=False)
    assert fit(config, progress=False) == record
    write_checkpoint(tmp_path / "checkpoint", seed=1)
    with pytest.raises(ConfigError, match="^model.pretrained: expected the weights that this run began with"):
        fit(config, progress=False)


@pytest.mark.parametrize(("mixer", "format"), [("mamba1", "huggingface"), ("mamba2", "state_spaces")])
def test_the_first_loss_is_the_checkpoints_and_falls(tmp_path, mixer, format):
    model = write_checkpoint(tmp_path / "checkpoint", mixer, format)
    config = configure(tmp_path, "optimizer.lr=3e-2", "optimizer.warmup_steps=1")
    record = fit(config, progress=False)
    assert record["metrics"]["started_from_checksum"] is not None
    assert record["config"]["model"]["pretrained"] == f"{tmp_path}/checkpoint"
    losses = [point["loss"] for point in record["curves"]["train"]]
    before = mean_loss_of_answers(model).item()
    assert losses[0] == pytest.approx(before, rel=0.1), "of the first step's answers alone"
    tuned = load_model(run_folder(config))
    assert tuned.model.config["mixer"] == mixer and len(tuned.model.lm_head.weight) == 260
    assert mean_loss_of_answers(tuned.model).item() < 0.8 * before


def data_module(folder, **keys):
    keys = {"strategy": "greedy", "row_length": 64, "cut_at_steps": False, "tokens_per_step": 10_000} | keys
    data = PackedDataModule(source="jsonl", path=str(write_pairs(folder)), cache_dir=str(folder / "cache"),
                            begin_token=None, max_tokens_per_batch=128, **keys)  # fmt: skip
    data.prepare_data()
    return data


@pytest.mark.parametrize("mixer", SIZES)
def test_packed_rows_of_ranks_give_the_gradient_of_pairs_alone(tmp_path, mixer):
    model = write_checkpoint(tmp_path / "checkpoint", mixer).double()
    module = PackedLitModule(model=model)
    packed, loss, num_targets = gradients_of_ranks(module, data_module(tmp_path), ranks=1, step=0)
    for ranks, strategy in ((2, "greedy"), (1, "single")):
        data = data_module(tmp_path, strategy=strategy)
        gradients, other_loss, other_targets = gradients_of_ranks(module, data, ranks, step=0)
        assert other_targets == num_targets
        torch.testing.assert_close(loss, other_loss)
        torch.testing.assert_close(packed, gradients, rtol=1e-9, atol=1e-12)


def test_answers_that_rows_cut_are_counted_or_refused(tmp_path):
    """Prompts have 9 or 10 tokens; answers, their end among them, 2 to 4."""
    write_checkpoint(tmp_path / "checkpoint")
    config = configure(tmp_path, "data.overlong=truncate", "data.row_length=11", "trainer.samples=2")
    with pytest.warns(UserWarning, match="documents lose the end of their answers"):
        fit(config, progress=False)
    with pytest.warns(UserWarning, match="documents train ends of answers without the prompt"):
        fit(configure(tmp_path, "data.overlong=split", "data.row_length=11"), progress=False)
    with pytest.warns(UserWarning, match="data.cut_at_steps: it cuts answers"):
        data_module(tmp_path, cut_at_steps=True).setup()
    samples = (run_folder(config) / "samples.jsonl").read_text().splitlines()
    assert samples and {json.loads(line)["prompt"] for line in samples} <= {pair["prompt"] for pair in PAIRS}
    with pytest.raises(ConfigError, match="data.row_length: expected rows with targets"):
        fit(configure(tmp_path, "data.overlong=truncate", "data.row_length=8"), progress=False)


def test_a_stopped_run_ends_as_one_that_was_not(tmp_path):
    write_checkpoint(tmp_path / "checkpoint")
    whole = configure(tmp_path, f"runs_dir={tmp_path}/whole")
    stopped = configure(tmp_path, "trainer.checkpoint_every=2")
    expected = fit(whole, progress=False)
    stop_at(stopped, step=3)
    record = fit(stopped, progress=False)
    assert_same_training(stopped, whole, record, expected)
    assert record["metrics"]["started_from_checksum"] == expected["metrics"]["started_from_checksum"]
    saved = load_config(write_config(tmp_path / "again.yaml", stopped))
    assert fit(saved, progress=False) == record, "its written configuration is the same run"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.d_model=32"], "model.d_model: expected 128, unless model.pretrained is null, got 32"),
        (["model.pretrained=no/such/folder"], "data.tokenizer: expected"),
        (["model.pretrained=."], "data.tokenizer: expected a folder with tokenizer.json, got '.' without"),
        (["model.pretrained=no/such/folder", "data.tokenizer=bytes"], "model.pretrained: directory: expected"),
    ],
)
def test_what_does_not_fit_a_checkpoint_is_refused(tmp_path, overrides, message):
    write_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=message):
        fit(configure(tmp_path, *overrides), progress=False)


def test_evaluation_scores_answers_and_a_mixture_s_run_reads_what_it_is_told(tmp_path, capsys):
    write_checkpoint(tmp_path / "checkpoint")
    config = configure(tmp_path)
    record = fit(config, progress=False)
    assert not cli.main(["eval", str(run_folder(config)), "tasks=[perplexity]"], prog="run.py")
    (evaluated,) = read_records(run_folder(config) / "evaluation")
    assert evaluated["metrics"]["loss"] == pytest.approx(record["metrics"]["val_loss"], rel=1e-5)
    answers = sum(len(pair["completion"]) + 1 for pair in PAIRS)
    assert record["metrics"]["targets"] > 0 and evaluated["metrics"]["targets"] < answers
    assert cli.main(["eval", str(run_folder(config)), "tasks=[positions]"], prog="run.py") == 2
    assert "set data.loss_on=all" in capsys.readouterr().err
    assert cli.main(["eval", str(run_folder(config)), "data.tokenizer=bytes"], prog="run.py") == 2
    sources = [{"source": "jsonl", "path": str(write_pairs(tmp_path)), "weight": 1}]
    mixed = configure(tmp_path, "data.source=stdlib", "data.path=null", f"data.sources={json.dumps(sources)}")
    trained = fit(mixed, progress=False)
    assert not cli.main(["eval", str(run_folder(mixed)), "tasks=[perplexity]"], prog="run.py")
    (own,) = read_records(run_folder(mixed) / "evaluation")
    assert own["corpus_hash"] == trained["corpus_hash"]
    (tmp_path / "other.txt").write_text("another text of a few words, " * 9)
    words = ["tasks=[perplexity]", "data.source=text", f"data.path={tmp_path}/other.txt"]
    words += [f"output={tmp_path}/evaluated"]
    assert not cli.main(["eval", str(run_folder(mixed)), *words], prog="run.py")
    (other,) = read_records(tmp_path / "evaluated")
    assert other["corpus_hash"] not in (evaluated["corpus_hash"], trained["corpus_hash"])


def test_a_chat_model_has_its_template(tmp_path):
    write_checkpoint(tmp_path / "checkpoint")
    chat = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "!"}] for i in range(30)]
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": messages} for messages in chat])
    config = configure(tmp_path, f"data.path={path}", "data.chat_template=chatml", "data.row_length=128")
    fit(config, progress=False)
    template, _ = find_chat_template("bytes", "chatml")
    assert find_chat_template(str(run_folder(config)), None) == (template, {"eos_token": "</s>"})


def test_another_tokenizer_of_equal_size_is_warned_of(tmp_path):
    write_checkpoint(tmp_path / "checkpoint")
    write_tokenizer(tmp_path / "other", "bytes", None, "</s>")
    content = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    content["model"]["vocab"] = dict(zip(ids, reversed(ids.values())))
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(content))
    config = configure(tmp_path, f"data.tokenizer={tmp_path}/other", "trainer.max_steps=1")
    for _ in range(2):
        with pytest.warns(UserWarning, match="data.tokenizer: expected ids as of"):
            fit(config, progress=False)
        config.trainer.init_from, config.model.pretrained = config.model.pretrained, None
        vars(config.model).update(SIZES["mamba1"], vocab_size=260)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="data.tokenizer")
        fit(configure(tmp_path, "trainer.max_steps=1"), progress=False)


def test_a_corpus_of_other_ids_is_refused(tmp_path):
    torch.manual_seed(0)
    MambaLM(vocab_size=100, **SIZES["mamba1"]).save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="data.tokenizer"):
        fit(configure(tmp_path, "data.tokenizer=bytes"), progress=False)


def test_a_step_larger_than_the_corpus_is_an_epoch(tmp_path, capsys):
    write_checkpoint(tmp_path / "checkpoint")
    fit(configure(tmp_path, "data.tokens_per_step=100000", "trainer.max_steps=2"), progress=True)
    assert "2 steps, 2 epochs;" in capsys.readouterr().err
