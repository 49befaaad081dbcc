"""Questions that are made here: written for lm-evaluation-harness, and asked in the tokens of a model's own tokenizer."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch

from packmamba import MambaLM, cli
from packmamba.data.corpus import load_corpora
from packmamba.data.tokenization import ByteTokenizer
from packmamba.evaluation.answers import answer, items
from packmamba.evaluation.on_tasks import in_tokens
from packmamba.evaluation.tasks import TASKS
from packmamba.records import read_records
from packmamba.training.fit import fit
from packmamba.training.run_id import run_folder
from runs import tiny_config


def write_texts(folder):
    """Files of lines that are alike; one line in each is not ASCII."""
    (folder / "texts").mkdir()
    for n in range(8):
        lines = [f"    value_{i % 7}{i} = compute({i * (37 + n) % 101}, name_{i % 5})" for i in range(60)]
        lines[30] = "    grüße_an_alle = " + "é" * 40
        (folder / "texts" / f"{n}.py").write_text("\n".join(lines) + "\n")
    return f"data.path={folder / 'texts'}"


@pytest.mark.slow
def test_the_harness_s_accuracy_is_that_of_eval(tmp_path, monkeypatch, capsys):
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("transformers")
    from lm_eval.tasks import TaskManager

    from packmamba.evaluation.harness import PackMambaLM

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    data = [
        "data.source=text",
        write_texts(tmp_path),
        f"data.cache_dir={tmp_path}/cache",
        "data.validation_fraction=0.4",
    ]
    options = ["examples=30", "options.next_line.documents=validation", "options.next_line.context=100"]
    config = tiny_config(tmp_path, *data, "trainer.max_steps=2", "trainer.validate_every=2", "model.d_model=16",
                         "data.begin_token=<s>", "data.end_token=</s>")  # fmt: skip
    fit(config, progress=False)
    run = str(run_folder(config))
    assert cli.main(["questions", str(tmp_path / "tasks"), *data, *options]) == 0
    assert cli.main(["eval", run, "tasks=[next_line]", *options, "device=cpu"]) == 0
    (record,) = read_records(run_folder(config) / "evaluation")
    assert record["corpus_hash"].endswith(f" of {load_corpora(config.data, progress=False).corpus_hash}")
    (file,) = (run_folder(config) / "evaluation" / "items").glob("next_line-*.jsonl")
    ours = [json.loads(line) for line in file.read_text().splitlines()]
    found = lm_eval.simple_evaluate(
        PackMambaLM(run, device="cpu"), tasks=["packmamba_next_line"], bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
    )  # fmt: skip
    samples = sorted(found["samples"]["packmamba_next_line"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(ours) == 30
    chosen = [int(np.argmax([value for value, _ in sample["filtered_resps"]])) for sample in samples]
    assert chosen == [item["choice"] for item in ours] and len(set(chosen)) > 1
    assert [sample["doc"]["answer"] for sample in samples] == [item["answer"] for item in ours]
    theirs = found["results"]["packmamba_next_line"]["acc,none"]
    assert theirs == pytest.approx(record["metrics"]["choice_accuracy"]) and 0 < theirs < 1

    # Questions written anew are asked anew.
    command = [
        "eval",
        run,
        "tasks=[packmamba_next_line]",
        f"include_path={tmp_path / 'tasks'}",
        f"output={tmp_path}/out",
    ]
    assert cli.main(command) == cli.main(command) == 0
    assert len(read_records(tmp_path / "out")) == 1
    assert cli.main(["questions", str(tmp_path / "tasks"), *data, *options[1:], "examples=5"]) == 0
    assert cli.main(command) == 0
    assert sorted(record["metrics"]["sample_len"] for record in read_records(tmp_path / "out")) == [5, 30]

    for file in (tmp_path / "tasks").glob("*.jsonl"):
        file.unlink()
    assert cli.main(command) != 0
    assert "tasks: the documents of 'packmamba_next_line' cannot be had: " in capsys.readouterr().err
    for sample, item in zip(samples, ours):
        # The harness moves the line's end from the context into the choices.
        moved = len(sample["doc"]["context"]) - len(sample["doc"]["context"].rstrip())
        right = sample["doc"]["choices"][item["answer"]]
        assert moved == 1 and item["answers"] == item["bytes"] == len(right.encode())
    assert record["metrics"]["bits_per_byte"] == pytest.approx(record["metrics"]["nats"] / math.log(2))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=mqar"], "task: expected a task with choices, such as next_line, got 'mqar'"),
        (["task=nextline"], "task: expected one of mqar, .*did you mean 'next_line'"),
        (["options.next_line.documents=mine"], "options.next_line.documents: expected 'validation', or null for the"),
        (["options.next_line.contexts=9"], "options.next_line: unknown option 'contexts'"),
        (["examples=0"], "examples: expected at least 1, got 0"),
    ],
)
def test_refuses_in_one_sentence(tmp_path, overrides, message, capsys):
    data = ["data.source=text", write_texts(tmp_path), f"data.cache_dir={tmp_path}/cache"]
    options = ["options.mqar.vocab_size=256"] if overrides == ["task=mqar"] else []
    assert cli.main(["questions", str(tmp_path / "tasks"), *data, *overrides, *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("packmamba: error: ") and not (tmp_path / "tasks").exists()
    assert re.search(message, error), error


class Pairs(ByteTokenizer):
    """Two ASCII bytes are one token, from the left."""

    vocab_size = 256 * 128

    def encode(self, text):
        bytes_ = text.encode()
        return np.array([a + (256 * b if b else 0) for a, b in zip(bytes_[::2], [*bytes_[1::2], 0])], dtype=np.int64)


@pytest.mark.parametrize("name", ["next_line", "passkey"])
def test_examples_of_bytes_in_a_tokenizer_s_tokens(name):
    documents = ["\n".join(f"    value_{i} = compute({i * 37 % 101})" for i in range(200))]
    task = TASKS[name](documents=documents, **({"length": 400} if name == "passkey" else {"context": 200}))
    plain = [task.example(0, i) for i in range(6)]
    examples = [in_tokens(example, Pairs()) for example in plain]
    for before, after in zip(plain, examples):
        prompt = bytes(before.context.tolist()).decode()
        right = bytes(before.targets[before.mask].tolist()).decode()
        assert after.context.tolist() == Pairs().encode(prompt).tolist()
        assert after.targets[after.mask].tolist() == Pairs().encode(right).tolist()
        assert [list(Pairs().encode(bytes(choice).decode())) for choice in before.choices] == list(after.choices)
    torch.manual_seed(0)
    model = MambaLM(vocab_size=Pairs.vocab_size, d_model=8, n_layer=1)
    for item, before in zip(items(answer(model, examples, 512), examples), plain):
        assert item["answers"] == math.ceil(before.mask.sum() / 2)
        if name == "next_line":
            assert item["bytes"] == len(before.choices[before.answer]) == before.mask.sum()
