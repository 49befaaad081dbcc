"""Runs on a mixture and on a streamed corpus: losses and epochs of each source, ranks, and a stop
in the middle.
"""

import json

import pytest
import torch

from packmamba.lab.fit import fit
from packmamba.lab.run_id import run_folder
from packmamba.training import PackedDataModule, PackedLitModule
from runs import assert_same_training, gradients_of_ranks, stop_at, tiny_config
from written import write_lines, write_small_shards

LETTERS = {"a": "ab", "b": "cdefgh"}
WEIGHTS = {"a": 3, "b": 1}


def configure(folder, *overrides, streamed=False):
    """Mix files of 40 texts for each source, or stream the first."""
    entries = []
    for name, letters in LETTERS.items():
        texts = [(letters * 9)[i % 5 : 8 + i % 11] + str(i) for i in range(40)]
        path = write_lines(folder / f"{name}.jsonl", texts)
        entries.append({"source": "jsonl", "path": str(path), "weight": WEIGHTS[name]})
    keys = ["data.source=stdlib", "data.path=null", f"data.sources={json.dumps(entries)}"]
    if streamed:
        keys = ["data.source=jsonl", f"data.path={entries[0]['path']}", "data.streaming=true", "data.overlong=split"]
    return tiny_config(folder, *keys, *overrides)


def test_a_run_says_the_loss_and_the_epochs_of_each_source(tmp_path):
    config = configure(tmp_path, "evaluations=[perplexity]")
    record = fit(config, progress=False)
    data = PackedDataModule.from_config(config, progress=False)
    validation, train = data.corpora.validation, data.corpora.train
    lengths = {name: validation.lengths[validation.groups == part] for part, name in enumerate(LETTERS)}
    targets = {name: int((of - 1).sum()) for name, of in lengths.items()}
    last = record["curves"]["validation"][-1]
    mean = sum(last[f"loss.{name}"] * count for name, count in targets.items()) / sum(targets.values())
    assert last["loss.a"] != last["loss.b"] and mean == pytest.approx(last["loss"], rel=1e-6)
    for name in targets:
        assert record["metrics"][f"perplexity.loss.{name}"] == pytest.approx(last[f"loss.{name}"], rel=1e-5)
    tokens = record["metrics"]["real_tokens"]
    for part, (name, weight) in zip(train.parts, WEIGHTS.items()):
        expected = tokens * weight / sum(WEIGHTS.values()) / part.num_tokens
        assert record["epochs_by_source"][name] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True], ids=["mixture", "streamed"])
def test_a_stopped_run_ends_as_one_that_was_not(tmp_path, monkeypatch, streamed):
    write_small_shards(monkeypatch, tokens=50)
    whole = configure(tmp_path, f"runs_dir={tmp_path}/whole", streamed=streamed)
    stopped = configure(tmp_path, streamed=streamed)
    expected = fit(whole, progress=False)
    stop_at(stopped, step=3)
    assert_same_training(stopped, whole, fit(stopped, progress=False), expected)
    assert run_folder(stopped) != run_folder(whole)


@pytest.mark.parametrize("streamed", [False, True], ids=["mixture", "streamed"])
def test_two_ranks_have_the_gradient_of_one(tmp_path, monkeypatch, streamed):
    write_small_shards(monkeypatch, tokens=50)
    config = configure(tmp_path, streamed=streamed)
    data = PackedDataModule.from_config(config, progress=False)
    module = PackedLitModule.from_config(config, data.vocab_size).double()
    one, two = (gradients_of_ranks(module, data, ranks, step=1)[0] for ranks in (1, 2))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
