"""A run's folder is a model: eval, generate and export take it as it is."""

from __future__ import annotations

import contextlib
import functools
import json

import numpy as np
import pytest
import torch

from hugging_face import take_own_path
from operators import DEVICES
from packmamba import MambaLM, cli
from packmamba.evaluation.subject import load_subject
from packmamba.records import read_records
from packmamba.training.fit import fit
from packmamba.training.run_id import RunLock, run_folder
from processes import fork, statuses
from runs import tiny_config

pytestmark = pytest.mark.slow  # all need a trained run


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    made = tiny_config(
        tmp_path_factory.mktemp("run"), "data.begin_token=<s>", "data.end_token=</s>", "trainer.max_steps=3", "model.d_model=16"
    )  # fmt: skip
    fit(made, progress=False)
    return made


@pytest.fixture(scope="module")
def run(config):
    return run_folder(config)


def test_a_run_is_a_model(run, config):
    subject = load_subject(run, "cpu")
    assert subject.trained and subject.config == config and subject.name == "tiny"
    assert subject.tokenizer.vocab_size == 258
    checkpoint = torch.load(run / "checkpoints" / "step=3.ckpt", weights_only=False)["state_dict"]
    for name, tensor in MambaLM.from_pretrained(run).state_dict().items():
        assert torch.equal(tensor, checkpoint[f"model.{name}"])


def test_perplexity_is_the_run_s_validation_loss(run, config, capsys):
    assert cli.main(["eval", str(run), "tasks=[perplexity]", "dtype=float64", "device=cpu"]) == 0
    assert "Evaluation: perplexity" in capsys.readouterr().out
    (record,) = read_records(run / "evaluation")
    (training,) = read_records(run)
    assert record["metrics"]["loss"] == pytest.approx(training["metrics"]["val_loss"], abs=1e-5)
    assert record["corpus_hash"] == training["corpus_hash"] and record["seed"] == config.seed
    items = [
        json.loads(line) for line in next((run / "evaluation" / "items").glob("perplexity*")).read_text().splitlines()
    ]
    targets = sum(item["targets"] for item in items)
    assert sum(item["nats"] for item in items) / targets == pytest.approx(record["metrics"]["loss"])
    # One byte a token, and a begin and an end token around each document.
    assert [item["bytes"] for item in items] == [item["targets"] - 1 for item in items]
    assert record["metrics"]["bits_per_byte"] == pytest.approx(
        record["metrics"]["loss"] / np.log(2) * targets / sum(item["bytes"] for item in items)
    )


def test_any_run_on_any_corpus_and_what_is_done_is_not_repeated(run, tmp_path, capsys, monkeypatch):
    other = tmp_path / "texts"
    other.mkdir()
    for i in range(4):
        (other / f"{i}.txt").write_text("some other words " * (i + 1))
    command = [
        "eval", str(run), "tasks=[perplexity,parity,mqar]", "data.source=text", f"data.path={other}",
        "data.validation_fraction=0.5", f"output={tmp_path}/out", "examples=5", "options.mqar.vocab_size=64",
    ]  # fmt: skip
    assert cli.main(command) == 0
    records = read_records(tmp_path / "out")
    assert {record["config"]["evaluation"]["name"] for record in records} == {"perplexity", "parity", "mqar"}
    by_name = {record["config"]["evaluation"]["name"]: record for record in records}
    assert by_name["mqar"]["metrics"]["chance"] == 1 / 32 and by_name["mqar"]["metrics"]["examples"] == 5
    assert by_name["perplexity"]["metrics"]["documents"] == 2
    monkeypatch.setattr("packmamba.evaluation.evaluate.evaluate", lambda *_: pytest.fail("computed again"))
    assert cli.main(command) == 0
    assert len(read_records(tmp_path / "out")) == 3
    capsys.readouterr()


def test_models_that_share_an_output_have_answers_of_their_own(run, tmp_path, capsys):
    other = tmp_path / "other"
    model = MambaLM.from_pretrained(run)
    with torch.no_grad():
        model.backbone.embedding.weight.mul_(2)
    model.save_pretrained(other)
    for folder in (run, other):
        assert cli.main(["eval", str(folder), "tasks=[parity]", "examples=3", f"output={tmp_path}/out"]) == 0
    first, second = read_records(tmp_path / "out")
    assert first["metrics"]["nats"] != second["metrics"]["nats"]
    capsys.readouterr()


def test_what_is_wrong_is_said_before_any_work(run, tmp_path, capsys):
    assert cli.main(["eval", str(run), "tasks=[parity,mqar]", "examples=3", f"output={tmp_path}/out"]) == 2
    assert "mqar: needs a vocabulary of 8192" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("command", "key"),
    [("eval", "include_path"), ("generate", "top_p"), ("questions", "examples"), ("leakcheck", "patch")],
)
def test_help_explains_each_key(command, key, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert f"  {key}=" in capsys.readouterr().out


def test_generate_continues_a_text(run, capsys):
    assert cli.main(["generate", str(run), "abc", "max_new_tokens=5", "device=cpu"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("abc")
    assert cli.main(["generate", str(run), "abc", "max_new_tokens=5", "device=cpu"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("device", DEVICES)
def test_export_gives_transformers_the_same_logits(run, tmp_path, capsys, device, monkeypatch):
    """On a GPU transformers uses the peers' kernels where they are."""
    transformers = pytest.importorskip("transformers")
    if device == "cpu":
        take_own_path(monkeypatch)
    assert cli.main(["export", str(run), str(tmp_path / "new")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    ids = torch.tensor([tokenizer.encode("some text")])
    assert ids.tolist() == [list(b"some text")] and tokenizer.eos_token == "</s>"
    ends = model.generation_config
    assert (ends.bos_token_id, ends.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    with torch.no_grad():
        expected = MambaLM.from_pretrained(run).to(device)(ids.to(device))
        torch.testing.assert_close(model.to(device)(ids.to(device)).logits, expected, rtol=1e-4, atol=1e-4)
    assert cli.main(["eval", str(tmp_path / "new"), "tasks=[parity]", "examples=3"]) == 0  # a checkpoint from elsewhere
    assert cli.main(["export", str(run), str(tmp_path / "new")]) == 2
    assert "is there and not empty; name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "nowhere"], "nowhere is not a folder; expected one of a run or of a checkpoint"),
        (["eval", "RUN", "tasks=[mqarr]"], "tasks: unknown 'mqarr'"),
        (["eval", "RUN", "tasks=[]"], "tasks: expected at least one, got none"),
        (["eval", "RUN", "tasks=[mqar]", "options.mqar.pairs=3"], "options.mqar: "),
        (["eval", "RUN", "tasks=[mqar]", "options.parity.length=3"], "options.parity: not among tasks"),
        (["eval", "RUN", "tasks=[mqar]"], "the model has 258; options.mqar.vocab_size sets it"),
        (["eval", "RUN", "examples=0"], "examples: expected at least 1, got 0"),
        (["eval", "RUN", "task=[mqar]"], "unknown key 'task' in 'task=[mqar]'; did you mean 'tasks'?"),
        (
            ["eval", "RUN", "dtype=float8"],
            "dtype: expected one of float64, float32, bfloat16, float16 or null, got 'float8'",
        ),
        (["eval", "RUN", "device=abacus"], "device: 'abacus' cannot be used here"),
        (["generate", "RUN", "a", "max_new_tokens=0"], "max_new_tokens: expected at least 1, got 0"),
        (["generate", "RUN", "a", "top_p=2"], "top_p: expected above 0 and at most 1, got 2.0"),
        (["generate", "RUN", "a", "top_p=0.5"], "top_p: expected 1 with temperature=0"),
        (["export", "RUN", "/proc/no/folder"], "folder: /proc/no/folder cannot be written"),
        (["eval", "RUN", "tasks=[mqar]", "options.mqar=3"], "options.mqar: expected keys and their values, got 3"),
    ],
)
def test_refuses_in_one_sentence(run, arguments, message, capsys, monkeypatch):
    with contextlib.suppress(ImportError):
        from lm_eval.tasks import TaskManager

        # Its own tasks are 14,000 files.
        monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    assert cli.main([str(run) if argument == "RUN" else argument for argument in arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error and error.startswith("packmamba: error: ")


def test_an_unfinished_run_says_so(run, tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert cli.main(["eval", str(tmp_path)]) == 2
    assert "the run has not ended: repeat its command" in capsys.readouterr().err


@pytest.mark.slow
def test_two_evaluations_do_not_write_to_one_folder_at_once(run, tmp_path):
    output = tmp_path / "output.txt"
    with RunLock(tmp_path / "answers"):
        arguments = ["eval", str(run), "tasks=[parity]", "examples=2", f"output={tmp_path}/answers"]
        assert statuses(fork(cli.main, arguments, output=output)) == [2]
    assert "is in use by another process" in output.read_text()
    assert not (tmp_path / "answers" / "records").exists()


@pytest.mark.slow
def test_a_record_s_file_that_a_crash_left_empty_is_written_again(run, tmp_path):
    arguments = ["eval", str(run), "tasks=[parity]", "examples=2", f"output={tmp_path}"]
    assert cli.main(arguments) == 0
    (path,) = (tmp_path / "records").glob("*.jsonl")
    path.write_text("")
    assert cli.main(arguments) == 0
    assert len(read_records(tmp_path)) == 1
