"""A run's folder is a model: eval, generate and export take it, and eval repeats the numbers of its
record.
"""

import json
import shutil

import numpy as np
import pytest
import torch

from hugging_face import take_own_path
from operators import DEVICES
from packmamba import MambaLM
from packmamba.config import ConfigError
from packmamba.evaluation import registry
from packmamba.evaluation.load import load_model, read_config
from packmamba.lab import cli
from packmamba.lab.fit import fit
from packmamba.lab.records import read_records
from packmamba.lab.run_id import run_folder
from runs import tiny_config
from written import write_lines

ASKED = ["evaluations=[parity,perplexity]", "evaluation_examples=12", "evaluation_options.parity.length=6"]
SAME = ["tasks=[parity,perplexity]", "examples=12", "options.parity.length=6", "device=cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, request):
    begin = getattr(request, "param", "<s>")
    keys = ("data.end_token=</s>", "trainer.max_steps=3", "trainer.validate_every=3", *ASKED)
    config = tiny_config(tmp_path_factory.mktemp("run"), f"data.begin_token={begin}", *keys)
    fit(config, progress=False)
    return run_folder(config)


@pytest.mark.parametrize("run", ["<s>", "null"], indirect=True)
def test_eval_repeats_the_numbers_of_the_record(run, tmp_path, monkeypatch):
    command = ["eval", str(run), *SAME, f"output={tmp_path}"]
    assert cli.main(command) == 0
    (training,) = read_records(run)
    records = {record["config"]["evaluation"]["name"]: record for record in read_records(tmp_path)}
    for name, record in records.items():
        (items,) = (tmp_path / "items").glob(f"{name}-*.jsonl")
        assert items.read_text() == (run / "evaluation" / "items" / f"{name}.jsonl").read_text()
        own = {key: value for key, value in training["metrics"].items() if key.startswith(f"{name}.")}
        assert own == {f"{name}.{key}": value for key, value in record["metrics"].items()}
    metrics = records["perplexity"]["metrics"]
    assert metrics["loss"] == pytest.approx(training["metrics"]["val_loss"], abs=1e-5)
    items = [json.loads(line) for line in (run / "evaluation" / "items" / "perplexity.jsonl").read_text().splitlines()]
    # All bytes but the first one, which nothing predicts, where no begin token stands before it.
    assert [item["bytes"] for item in items] == [item["targets"] - 1 for item in items]
    per_byte = metrics["loss"] / np.log(2) * metrics["targets"] / sum(item["bytes"] for item in items)
    assert metrics["bits_per_byte"] == pytest.approx(per_byte)
    monkeypatch.setattr(registry, "evaluate", lambda *_: pytest.fail("computed again"))
    assert cli.main(command) == 0 and len(read_records(tmp_path)) == 2


def test_changed_documents_are_evaluated_again(run, tmp_path, capsys):
    documents = tmp_path / "documents.jsonl"
    asked = ["tasks=[perplexity,next_line]", "options.next_line={documents: validation, context: 64}", "examples=9"]
    asked += ["data.source=jsonl", f"data.path={documents}", f"output={tmp_path}/out"]
    asked += ["data.begin_token=null", "data.end_token=null"]
    for letter in "éb":
        write_lines(documents, ["".join(f"{letter * 12} {i:02}\n" for i in range(length)) for length in range(9, 30)])
        assert cli.main(["eval", str(run), *asked, f"data.cache_dir={tmp_path}/cache"]) == 0
    found = [record["metrics"] for record in read_records(tmp_path / "out")]
    assert found[0] != found[2] and found[1] != found[3]
    per_byte = pytest.approx(found[0]["loss"] / np.log(2))
    assert found[0]["bits_per_byte"] == per_byte, "a byte a target, inside of characters, too"


def test_a_checkpoint_without_a_tokenizer_needs_one(tmp_path, capsys):
    MambaLM(300, 16, 1).save_pretrained(tmp_path / "model")
    write_lines(tmp_path / "documents.jsonl", [f"text {number}" for number in range(30)])
    asked = ["tasks=[perplexity]", "data.source=jsonl", f"data.path={tmp_path}/documents.jsonl"]
    asked += [f"data.cache_dir={tmp_path}/cache", f"output={tmp_path}/out"]
    assert cli.main(["eval", str(tmp_path / "model"), *asked]) == 2
    assert "data.tokenizer: expected" in capsys.readouterr().err
    assert cli.main(["eval", str(tmp_path / "model"), *asked, "data.tokenizer=bytes"]) == 0
    write_lines(tmp_path / "documents.jsonl", "abcdefghij")  # of one token, which nothing predicts
    assert cli.main(["eval", str(tmp_path / "model"), *asked, "data.tokenizer=bytes"]) == 2


def test_models_that_share_an_output_have_records_of_their_own(run, tmp_path):
    model = MambaLM.from_pretrained(run)
    with torch.no_grad():
        model.backbone.embedding.weight.mul_(2)
    model.save_pretrained(tmp_path / "other")
    for folder in (run, tmp_path / "other", shutil.copytree(tmp_path / "other", tmp_path / "third")):
        assert cli.main(["eval", str(folder), "tasks=[parity]", "examples=3", f"output={tmp_path}/out"]) == 0
    first, second, third = read_records(tmp_path / "out")
    assert first["metrics"]["nats"] != second["metrics"]["nats"] and third["arm"] == "third"


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (["evaluations=[mqar]"], "mqar: needs a vocabulary of 8192, the model has 256"),
        (["evaluations=[long_context]", "data.row_length=30"], "long_context"),
    ],
)
def test_an_evaluation_is_checked_before_training(tmp_path, asked, match):
    with pytest.raises(ConfigError, match=match):
        fit(tiny_config(tmp_path, *asked), progress=False)
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


@pytest.mark.parametrize("device", DEVICES)
def test_export_gives_transformers_the_same_logits(run, tmp_path, device, monkeypatch):
    """On a GPU transformers uses the peers' kernels where they are."""
    transformers = pytest.importorskip("transformers")
    if device == "cpu":
        take_own_path(monkeypatch)
    assert cli.main(["export", str(run), str(tmp_path / "new")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    ids = torch.tensor([tokenizer.encode("some text")])
    assert ids.tolist() == [[256, *b"some text"]] and tokenizer.eos_token == "</s>"
    for published in (model.generation_config, transformers.AutoConfig.from_pretrained(tmp_path / "new")):
        assert (published.bos_token_id, published.eos_token_id) == (256, 257)
    with torch.no_grad():
        expected = MambaLM.from_pretrained(run).to(device)(ids.to(device))
        torch.testing.assert_close(model.to(device)(ids.to(device)).logits, expected, rtol=1e-4, atol=1e-4)
    assert read_config(tmp_path / "new").data.tokenizer.startswith(str(tmp_path))
    assert cli.main(["export", str(run), str(tmp_path / "new")]) == 2  # it is not empty


def test_folders_without_a_model(tmp_path, run):
    with pytest.raises(ConfigError, match="nowhere"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="has not ended"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="device"):
        load_model(run, "abacus")
