"""The data module without a Trainer: what it validates on, and what it refuses."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import get_type_hints

import numpy as np
import pytest
from torch.utils.data import DataLoader

from packmamba.config import ConfigError
from packmamba.data.batch import PackedBatch, StepBatch, make_batch
from packmamba.data.packing import STRATEGIES, Strategy
from packmamba.data.token_store import evaluation_documents
from packmamba.training.datamodule import PackedDataModule
from runs import CARRY, SCHEMES, tiny_config


def module(folder, *overrides, trainer=None):
    data = PackedDataModule.from_config(tiny_config(folder, *overrides), progress=False)
    data.trainer = trainer
    data.setup()
    return data


def documents_in(batches):
    """The documents of batches, in order."""
    layouts = [(batch.tokens.flatten().tolist(), batch.layout) for batch in batches]
    spans = [(tokens, span) for tokens, at in layouts for span in zip(at.starts.tolist(), at.ends.tolist())]
    return [tuple(tokens[slice(*span)]) for tokens, span in spans]


def documents_of(plan):
    return Counter(documents_in(make_batch(plan.corpus, plan.rows, rows) for rows in plan.micro_batches))


def pairs_of(batch):
    return zip(batch.tokens[batch.loss_mask].tolist(), batch.targets[batch.loss_mask].tolist())


def test_ranks_share_the_validation_of_whole_documents(tmp_path):
    found = []
    for rank in range(2):
        data = module(tmp_path, "trainer.boundary=leak", trainer=SimpleNamespace(world_size=2, global_rank=rank))
        found.append([documents_of(evaluation) for evaluation in data.evaluations])
    corpus = data.corpora.validation
    every = Counter(tuple(corpus.document(i).tolist()) for i in range(len(corpus)))
    assert all(share for share, _ in found) and found[0][0] + found[1][0] == every
    assert found[0][1] == found[1][1], "every rank reads all documents as trained"


STREAM = {"batching": "stream", "tokens_per_step": 4096}
OTHER = {"strategy": "next_fit"}
CASES = [({}, {"seed": 1}, "seed"), ({}, {"row_length": 9}, "row_length"), (STREAM, OTHER, "strategy"), ({}, OTHER, "")]


@pytest.mark.parametrize(("began", "changed", "name"), CASES)
def test_a_checkpoint_goes_on_with_documents_in_its_order_alone(tmp_path, began, changed, name):
    keys = {"source": "synthetic", "num_documents": 20, "cache_dir": str(tmp_path), "overlong": "truncate"} | began
    state, data = PackedDataModule(**keys).state_dict(), PackedDataModule(**keys | changed)
    refused = pytest.raises(ConfigError, match=rf"^(data\.)?{name}: expected .*, as this run began")
    with refused if name else nullcontext():
        data.load_state_dict(state)
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn="test"))
    data.load_state_dict(state)  # a test reads no steps


def test_a_part_of_the_validation_documents_is_drawn(tmp_path):
    data = module(tmp_path, "data.validation_documents=5")
    drawn = evaluation_documents(data.corpora.validation, data.config).tolist()
    assert drawn == sorted(set(drawn)) and len(drawn) == documents_of(data.evaluations[0]).total() == 5


@pytest.mark.parametrize("boundary", ["reset", "leak"])
def test_the_test_loaders_hold_the_test_documents(tmp_path, boundary):
    keys = ["data.test_fraction=0.3", "data.validation_documents=1", f"trainer.boundary={boundary}"]
    data = module(tmp_path, *keys)
    corpus = data.corpora.test
    every = [tuple(corpus.document(i).tolist()) for i in range(len(corpus))]
    loaders = data.test_dataloader()
    assert len(loaders) == 1 + (boundary == "leak") and len(every) > 5
    assert Counter(documents_in(loaders[0])) == Counter(every)
    assert documents_in(data.predict_dataloader()) == every, "in the corpus's order"


def test_one_text_file_fills_steps_and_is_validated_on(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "input.txt").write_text("abcdefgh" * 100)
    data = module(tmp_path, "data.source=text", f"data.path={tmp_path}/texts", "data.cut_at_steps=true")
    assert data.corpora.train.num_tokens == 640
    assert [data.steps[i].num_tokens for i in range(3)] == [96] * 3
    assert documents_of(data.evaluations[0]) == {tuple(b"abcdefgh" * 20): 1}


def test_without_a_test_split_validation_is_read_and_said(tmp_path):
    data = module(tmp_path)
    for load in (data.test_dataloader, lambda: [data.predict_dataloader()]):
        with pytest.warns(UserWarning, match=r"data\.test_fraction, data\.test_path") as warned:
            (loader,) = load()
        assert len(warned) == 1
        assert Counter(documents_in(loader)) == documents_of(data.evaluations[0])


def test_loaders_say_what_they_yield():
    of = {name: get_type_hints(getattr(PackedDataModule, f"{name}_dataloader"))["return"] for name in LOADERS}
    assert of == LOADERS


LOADERS = {"train": DataLoader[StepBatch], "predict": DataLoader[PackedBatch]}
LOADERS |= dict.fromkeys(("val", "test"), list[DataLoader[PackedBatch]])


def test_a_strategy_that_overfills_rows_is_refused_before_the_first_step(tmp_path, monkeypatch):
    all_in_one = Strategy(lambda lengths, *_: np.zeros(len(lengths), int), keeps_order=False)
    monkeypatch.setitem(STRATEGIES, "all_in_one", all_in_one)
    with pytest.raises(ConfigError, match=r"^data\.strategy[^\n]*all_in_one[^\n]*$"):
        module(tmp_path, "data.strategy=all_in_one")


def test_matched_steps_hold_the_same_documents_under_every_scheme(tmp_path):
    """Documents cut by no row: their counted (token, target) pairs."""
    steps = {name: module(tmp_path, *keys).steps for name, keys in {**SCHEMES, "carry": CARRY}.items()}
    for number in range(6):
        batches = {name: of[number].batches for name, of in steps.items()}
        pairs = {name: Counter(pair for batch in some for pair in pairs_of(batch)) for name, some in batches.items()}
        assert pairs["packed"].total() > 50 and all(found == pairs["single"] for found in pairs.values())


@pytest.mark.parametrize("strategy", ["single", "padded", "greedy", "concat_split"])
def test_every_answer_of_a_task_is_a_target_once(tmp_path, strategy):
    keys = "data.source=task data.path=null data.task=mqar data.num_documents=60 data.tokens_per_step=100000".split()
    keys += ["data.task_options={num_pairs: 4, length: [20, 40], vocab_size: 64}", f"data.strategy={strategy}"]
    data = module(tmp_path, *keys)
    step, corpus = data.steps[0], data.corpora.train
    found = Counter(pair for batch in step.batches for pair in pairs_of(batch))
    answers = [(int(token), int(target)) for token, target in zip(corpus.tokens, corpus.targets) if target >= 0]
    assert found == Counter(answers) and step.num_targets == len(answers)


def test_a_scheme_is_named_and_must_fit_the_data(tmp_path):
    keys = {"source": "synthetic", "num_documents": 50, "cache_dir": str(tmp_path)}
    streams = {"strategy": "concat_split", "batching": "stream", "streams": 2, "row_length": 16}
    assert PackedDataModule(boundary="carry", **keys, **streams).boundary.continues
    with pytest.raises(ConfigError, match="^trainer.boundary: expected one of reset, .*nonsense"):
        PackedDataModule(boundary="nonsense", **keys)
    with pytest.raises(ConfigError, match=r"^\S+: expected .*carr"):
        PackedDataModule(boundary="carry", strategy="greedy", **keys)
