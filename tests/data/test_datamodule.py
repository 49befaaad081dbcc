"""The data module without a Trainer: what it validates on, and what it refuses."""

from collections import Counter
from types import SimpleNamespace

import pytest

from packmamba.config import ConfigError
from packmamba.data.datamodule import PackedDataModule
from packmamba.data.token_store import evaluation_documents
from runs import CARRY, SCHEMES, tiny_config


def module(folder, *overrides, trainer=None):
    data = PackedDataModule.from_config(tiny_config(folder, *overrides), progress=False)
    data.trainer = trainer
    data.setup()
    return data


def documents_of(rows, groups):
    layouts = [(batch.tokens.flatten().tolist(), batch.layout) for batch in map(rows.batch, groups)]
    spans = [(tokens, span) for tokens, at in layouts for span in zip(at.starts.tolist(), at.ends.tolist())]
    return Counter(tuple(tokens[slice(*span)]) for tokens, span in spans)


def pairs_of(batch):
    return zip(batch.tokens[batch.loss_mask].tolist(), batch.targets[batch.loss_mask].tolist())


def test_ranks_share_the_validation_of_whole_documents(tmp_path):
    found = []
    for rank in range(2):
        data = module(tmp_path, "trainer.boundary=leak", trainer=SimpleNamespace(world_size=2, global_rank=rank))
        found.append([documents_of(*evaluation) for evaluation in data.evaluations])
    corpus = data.corpora.validation
    every = Counter(tuple(corpus.document(i).tolist()) for i in range(corpus.num_documents))
    assert all(share for share, _ in found) and found[0][0] + found[1][0] == every
    assert found[0][1] == found[1][1], "every rank reads all documents as trained"


def test_a_part_of_the_validation_documents_is_drawn(tmp_path):
    data = module(tmp_path, "data.validation_documents=5")
    drawn = evaluation_documents(data.corpora.validation, data.config).tolist()
    assert drawn == sorted(set(drawn)) and len(drawn) == documents_of(*data.evaluations[0]).total() == 5


def test_matched_steps_hold_the_same_documents_under_every_scheme(tmp_path):
    """Documents cut by no row: their counted (token, target) pairs."""
    steps = {name: module(tmp_path, *keys).steps for name, keys in {**SCHEMES, "carry": CARRY}.items()}
    for number in range(6):
        batches = {name: of[number].batches for name, of in steps.items()}
        pairs = {name: Counter(pair for batch in some for pair in pairs_of(batch)) for name, some in batches.items()}
        assert pairs["packed"].total() > 50 and all(found == pairs["single"] for found in pairs.values())


def test_a_changed_corpus_is_refused_where_a_run_resumes(tmp_path):
    data = module(tmp_path)
    data.load_state_dict(data.state_dict())
    with pytest.raises(ConfigError, match="data: expected the documents"):
        data.load_state_dict({"corpus_hash": "another"})


@pytest.mark.parametrize("strategy", ["single", "padded", "greedy", "concat_split"])
def test_every_answer_of_a_task_is_a_target_once(tmp_path, strategy):
    keys = "data.source=task data.path=null data.task=mqar data.num_documents=60 data.tokens_per_step=100000".split()
    keys += ["data.task_options={num_pairs: 4, length: [20, 40], vocab_size: 64}", f"data.strategy={strategy}"]
    data = module(tmp_path, *keys)
    step, corpus = data.steps[0], data.corpora.train
    found = Counter(pair for batch in step.batches for pair in pairs_of(batch))
    answers = [(int(token), int(target)) for token, target in zip(corpus.tokens, corpus.targets) if target >= 0]
    assert found == Counter(answers) and step.num_targets == len(answers)


@pytest.mark.parametrize("name, hint", [("mode", "rename it to data.batching"), ("row_lenght", "data.row_length")])
def test_an_argument_that_is_no_key_gets_the_command_line_s_answer(name, hint):
    with pytest.raises(ConfigError, match=hint):
        PackedDataModule(**{name: "stream"})
