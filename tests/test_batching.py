from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from packmamba.config import ConfigError
from packmamba.data.datamodule import PackedDataModule, StepSampler
from packmamba.data.schedule import arrange
from packmamba.data.token_store import evaluation_documents
from runs import CARRY, SCHEMES, tiny_config


def module(folder, *overrides):
    data = PackedDataModule.from_config(tiny_config(folder, *overrides), progress=False)
    data.setup()
    return data


def epoch_steps(data):
    """Steps of the first epoch: the corpus is one window."""
    schedule = data.schedule()
    schedule.step(0)
    return schedule._first_steps[1]


def pieces_of(batch):
    """(tokens, targets, mask) of each document here, with its offset."""
    layout = batch.layout
    for start, end, offset in zip(layout.starts.tolist(), layout.ends.tolist(), layout.offsets.tolist()):
        yield offset, *(t.flatten()[start:end].tolist() for t in (batch.tokens, batch.targets, batch.loss_mask))


def pairs(data, steps):
    """Every (token, next token) that has a target, and every token, counted."""
    targets, tokens = Counter(), Counter()
    for step in steps:
        for batch in data.steps[step].batches:
            for offset, piece, target, mask in pieces_of(batch):
                tokens.update((offset + t, token) for t, token in enumerate(piece))
                targets.update((offset + t, a, b) for t, (a, b, has) in enumerate(zip(piece, target, mask)) if has)
    return tokens, targets


def expected_pairs(corpus, limit=None):
    tokens, targets = Counter(), Counter()
    for i in range(corpus.num_documents):
        document = corpus.document(i)[:limit].tolist()
        tokens.update(enumerate(document))
        targets.update((t, a, b) for t, (a, b) in enumerate(zip(document, document[1:])))
    return tokens, targets


def test_matched_steps_hold_the_same_documents_under_every_scheme(tmp_path):
    steps = {name: module(tmp_path, *keys) for name, keys in SCHEMES.items()}
    steps["carry"] = module(tmp_path, *CARRY)
    for step in range(6):
        contents = {name: pairs(data, [step]) for name, data in steps.items()}
        assert contents["packed"][1].total() > 50
        assert all(content == contents["single"] for content in contents.values())
        assert len({data.steps[step].num_targets for data in steps.values()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["matched", "stream"])
@pytest.mark.parametrize(
    "keys", [["data.strategy=greedy"], ["data.strategy=single"], CARRY], ids=["packed", "single", "carry"]
)
def test_a_step_is_a_function_of_its_number(tmp_path, mode, keys):
    keys = [*keys, f"data.mode={mode}", "data.tokens_per_step=144"]
    data = module(tmp_path, *keys)
    in_order = [data.steps[i] for i in range(12)]
    fresh = module(tmp_path, *keys)
    for i in (11, 0, 7, 3):
        assert_same(fresh.steps[i], in_order[i])
    loader = DataLoader(
        module(tmp_path, *keys).steps, batch_size=None, sampler=StepSampler(lambda: 4, 12, 12), num_workers=2
    )
    assert len(StepSampler(lambda: 4, 12, 12)) == 12
    for i, step in zip(range(4, 12), loader, strict=True):
        assert_same(step, in_order[i])
    other = module(tmp_path, *keys, "seed=1").steps[0]
    assert pairs_of(other) != pairs_of(in_order[0])


def pairs_of(step):
    return [batch.tokens.tolist() for batch in step.batches]


def assert_same(a, b):
    assert (a.num_targets, a.num_tokens, a.num_slots) == (b.num_targets, b.num_tokens, b.num_slots)
    for x, y in zip(a.batches, b.batches, strict=True):
        assert x.layout == y.layout
        assert all(torch.equal(getattr(x, n), getattr(y, n)) for n in ("tokens", "targets", "loss_mask"))


def test_epochs_differ_in_order(tmp_path):
    data = module(tmp_path, "data.strategy=greedy")
    first = epoch_steps(data)
    assert pairs_of(data.steps[0]) != pairs_of(data.steps[first])
    later = range(first, data.steps.schedule._first_steps[-1])
    assert pairs(data, later)[0] == expected_pairs(data.corpora.train)[0]


@pytest.mark.parametrize("mode", ["matched", "stream"])
def test_rows_of_carrying_batches_continue(tmp_path, mode):
    data = module(tmp_path, *CARRY, f"data.mode={mode}", "data.tokens_per_step=144")
    continuations = 0
    position: list[int] = []
    for step in range(8):
        if mode == "matched":
            position = []
        for batch in data.steps[step].batches:
            layout = batch.layout
            assert layout.shape[0] == 3
            ends = position or [-1] * 3
            for s in range(layout.num_documents):
                row, offset = int(layout.rows[s]), int(layout.offsets[s])
                first = s == 0 or layout.rows[s] != layout.rows[s - 1]
                assert first or offset == 0, "only a row's first document may continue"
                if offset:
                    continuations += 1
                    assert offset == ends[row]
                ends[row] = offset + int(layout.lengths[s])
            position = ends
    assert continuations > 5


def test_ranks_share_the_evaluation(tmp_path):
    found = []
    for rank in range(2):
        data = PackedDataModule.from_config(tiny_config(tmp_path), progress=False)
        data.trainer = SimpleNamespace(world_size=2, global_rank=rank)
        data.setup()
        (evaluation,) = data.evaluations
        batches = [evaluation[i] for i in range(len(evaluation))]
        found.append(Counter(tuple(piece) for batch in batches for _, piece, _, _ in pieces_of(batch)))
    corpus = data.corpora.validation
    assert all(found), "each has a share"
    assert found[0] + found[1] == Counter(tuple(corpus.document(i).tolist()) for i in range(corpus.num_documents))


def test_a_part_of_the_validation_documents_is_drawn(tmp_path):
    data = module(tmp_path, "data.validation_documents=5")
    corpus = data.corpora.validation
    drawn = evaluation_documents(corpus, data.config).tolist()
    assert drawn == sorted(set(drawn)) and len(drawn) == 5 and drawn[-1] < corpus.num_documents
    assert (
        sum(batch.layout.num_documents for batch in (data.evaluations[0][i] for i in range(len(data.evaluations[0]))))
        == 5
    )


def test_truncated_and_padded_shapes(tmp_path):
    data = module(tmp_path, "data.strategy=padded")
    assert {b.tokens.shape[1] for b in data.steps[0].batches} == {24}
    data = module(tmp_path, "data.strategy=padded", "data.row_length=null", "data.overlong=error")
    for batch in data.steps[0].batches:
        assert batch.tokens.shape[1] == int(batch.layout.lengths.max())
    data = module(tmp_path, "data.strategy=single")
    assert all(b.tokens.shape == (1, b.layout.num_tokens) for b in data.steps[0].batches)


def test_a_sorting_packer_imposes_no_curriculum(tmp_path):
    data = module(tmp_path, "data.mode=stream", "data.strategy=best_fit", "data.tokens_per_step=24")
    longest = [int(data.steps[i].batches[0].layout.lengths.max()) for i in range(epoch_steps(data))]
    assert longest != sorted(longest, reverse=True)
    assert np.corrcoef(longest, range(len(longest)))[0, 1] > -0.5


REFUSALS = {
    "data.mode=matchd": "data.mode",
    "data.strategy=bestfit": "data.strategy.*best_fit",
    "data.overlong=drop": "overlong",
    "data.overlong=error": "data.row_length=24 is shorter than the longest document",
    "data.tokens_per_step=0": "data.tokens_per_step",
    "data.slots_per_batch=0": "data.slots_per_batch",
    "data.num_workers=-1": "data.num_workers",
    "data.streams=2": "only strategy split has streams",
    "trainer.boundary=carry": "carry needs data.strategy=split",
    "data.row_length=null": "row_length",
    "data.validation_documents=0": "data.validation_documents",
}


@pytest.mark.parametrize("override", REFUSALS)
def test_refuses_in_one_sentence(tmp_path, override):
    with pytest.raises(ConfigError, match=REFUSALS[override]) as caught:
        module(tmp_path, override)
    assert "\n" not in str(caught.value)


def test_a_validation_document_longer_than_a_row_is_refused_where_rows_are_trained(tmp_path):
    data = module(tmp_path, "data.overlong=error", "data.row_length=1000", "trainer.boundary=leak")
    validation = data.corpora.validation
    with pytest.raises(ConfigError, match=r"^data.overlong is 'error' and document \d+ has \d+ tokens"):
        arrange(validation, np.arange(len(validation)), replace(data.config, row_length=3))


def test_refuses_a_carrying_step_that_would_cut_batches(tmp_path):
    with pytest.raises(ConfigError, match="data.tokens_per_step: expected a multiple of .* 72"):
        module(tmp_path, *CARRY, "data.mode=stream", "data.tokens_per_step=96")
