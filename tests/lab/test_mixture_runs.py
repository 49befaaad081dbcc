"""Runs on a mixture: losses and epochs of each source."""

import json

import pytest

from packmamba.lab.fit import fit
from packmamba.training import PackedDataModule
from runs import tiny_config

LETTERS = {"a": "ab", "b": "cdefgh"}
WEIGHTS = {"a": 3, "b": 1}


def write_sources(folder):
    """Write a file of 40 texts for each source, and return the entries that mix them."""
    entries = []
    for name, letters in LETTERS.items():
        texts = [(letters * 9)[i % 5 : 8 + i % 11] + str(i) for i in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        entries.append({"source": "jsonl", "path": f"{folder}/{name}.jsonl", "weight": WEIGHTS[name]})
    return entries


def configure(folder, *overrides):
    keys = ["data.source=stdlib", "data.path=null", f"data.sources={json.dumps(write_sources(folder))}"]
    return tiny_config(folder, *keys, *overrides)


def test_a_run_says_the_loss_and_the_epochs_of_each_source(tmp_path):
    config = configure(tmp_path)
    record = fit(config, progress=False)
    data = PackedDataModule.from_config(config, progress=False)
    validation, train = data.corpora.validation, data.corpora.train
    targets = {
        name: int((validation.lengths[validation.groups == part] - 1).sum()) for part, name in enumerate(LETTERS)
    }
    last = record["curves"]["validation"][-1]
    mean = sum(last[f"loss.{name}"] * count for name, count in targets.items()) / sum(targets.values())
    assert last["loss.a"] != last["loss.b"] and mean == pytest.approx(last["loss"], rel=1e-6)
    tokens = record["metrics"]["real_tokens"]
    for part, (name, weight) in zip(train.parts, WEIGHTS.items()):
        expected = tokens * weight / sum(WEIGHTS.values()) / part.num_tokens
        assert record["epochs_by_source"][name] == pytest.approx(expected)
