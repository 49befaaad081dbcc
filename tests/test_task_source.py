"""A task's examples as documents: packed, padded or alone, with targets only where the mask says."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from packmamba.config import ConfigError, load_config
from packmamba.data import workers
from packmamba.data.datamodule import PackingDataModule
from packmamba.data.sources import open_source
from packmamba.data.token_store import load_corpora
from packmamba.data.tokenizer import ByteTokenizer
from packmamba.errors import UserError
from packmamba.evaluation.tasks import TASKS
from packmamba.training.fit import fit
from packmamba.training.module import MambaLitModule

OPTIONS = {"num_pairs": 4, "length": [20, 40], "vocab_size": 64}


def make_config(folder, *overrides):
    return load_config(
        None,
        [
            f"runs_dir={folder}/runs", f"data.cache_dir={folder}/cache", "data.source=task", "data.task=mqar",
            "data.task_options={num_pairs: 4, length: [20, 40], vocab_size: 64}", "data.num_documents=60",
            "data.row_length=64", "data.tokens_per_step=256", "data.slots_per_batch=256", "data.validation_fraction=0.2",
            "model.d_model=16", "model.n_layer=1", "trainer.max_steps=3", "trainer.validate_every=3",
            "trainer.checkpoint_every=3", "trainer.accelerator=cpu", *overrides,
        ],
    )  # fmt: skip


def test_a_corpus_holds_the_examples_and_their_answers(tmp_path):
    corpora = load_corpora(make_config(tmp_path).data, progress=False)
    task = TASKS["mqar"](num_pairs=4, length=(20, 40), vocab_size=64)
    assert (len(corpora.train), len(corpora.validation)) == (48, 12) and corpora.train.vocab_size == 64
    for corpus, first in ((corpora.train, 0), (corpora.validation, 48)):
        for number in range(len(corpus)):
            example = task.example(0, first + number)
            assert np.array_equal(corpus.document(number), example.tokens)
            assert np.array_equal(corpus.answers(number), np.where(example.mask, example.targets, -1))
    assert corpora.train.begin_id is None and corpora.train.end_id is None


def test_several_processes_make_the_same_corpus(tmp_path, monkeypatch):
    one = load_corpora(make_config(tmp_path / "one", "data.num_proc=1").data, progress=False)
    monkeypatch.setattr("packmamba.data.sources.task.PART_EXAMPLES", 25)
    config = make_config(tmp_path / "several", "data.num_proc=2").data
    assert len(open_source(config).parts()) == 3
    assert load_corpora(config, progress=False).corpus_hash == one.corpus_hash

    class OfThisTest(TASKS["mqar"]):
        """No other process can import it."""

    monkeypatch.setitem(TASKS, "of_this_test", OfThisTest)
    config = make_config(tmp_path / "own", "data.num_proc=2", "data.task=of_this_test").data
    assert len(open_source(config).parts()) == 1
    assert load_corpora(config, progress=False).corpus_hash == one.corpus_hash


@pytest.mark.parametrize("strategy", ["single", "padded", "greedy", "split"])
def test_every_answer_is_a_target_once_under_every_strategy(tmp_path, strategy):
    config = make_config(tmp_path, f"data.strategy={strategy}", "data.tokens_per_step=100000")
    data = PackingDataModule(config, progress=False)
    arrangement, groups = data.schedule().step(0)
    found = []
    for rows in groups:
        batch = arrangement.batch(rows)
        assert not batch.targets[~batch.loss_mask].any()
        assert (batch.layout.documents[batch.loss_mask] >= 0).all()
        found += batch.targets[batch.loss_mask].tolist()
    answers = data.corpora.train.targets
    assert sorted(found) == sorted(answers[answers >= 0].tolist())
    assert arrangement.count(groups)[0] == len(found) == 48 * 4


def test_packed_with_reset_has_the_gradient_of_single(tmp_path):
    gradients = []
    for strategy in ("single", "greedy"):
        config = make_config(tmp_path, f"data.strategy={strategy}", "trainer.precision=64-true")
        torch.manual_seed(0)
        module = MambaLitModule(config, 64).double()
        data = PackingDataModule(config, progress=False)
        data.setup()
        arrangement, groups = data.schedule().step(0)
        targets = arrangement.count(groups)[0]
        for rows in groups:
            (module.loss(arrangement.batch(rows))[0] / targets).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_run_trains_on_a_task_and_is_a_model(tmp_path):
    record = fit(make_config(tmp_path), progress=False)
    assert record["metrics"]["targets"] < record["metrics"]["real_tokens"] / 5
    assert record["metrics"]["val_loss"] > 3  # of answers alone: ln 32 before anything is learned


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.task=null"], "data.task: expected the name of a task beside data.source=task, got null"),
        (["data.task=mqarr"], "data.task: expected one of .*, got 'mqarr'"),
        (
            ["data.task_options={num_pair: 3}"],
            "^data.task_options: unknown option 'num_pair'; did you mean 'num_pairs'",
        ),
        (["data.task_options={num_pairs: 0}"], "data.task_options: num_pairs: expected an integer of at least 1"),
        (["data.path=x"], "data.path is 'x', but data.source=task reads no path"),
    ],
)
def test_refuses_in_one_sentence(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_corpora(make_config(tmp_path, *overrides).data, progress=False)


@pytest.mark.slow
def test_a_half_made_corpus_of_a_task_goes_on(tmp_path, monkeypatch, caplog):
    """Also the files that not every corpus has: what is to be said."""
    monkeypatch.setattr("packmamba.data.sources.task.PART_EXAMPLES", 25)
    whole = load_corpora(make_config(tmp_path / "whole", "data.num_proc=1").data, progress=False)
    config = make_config(tmp_path / "half", "data.num_proc=1").data
    example, drawn = TASKS["mqar"].example, []

    def stops(task, seed, index):
        if index == 30:
            raise KeyboardInterrupt
        return example(task, seed, index)

    monkeypatch.setattr(TASKS["mqar"], "example", stops)
    with pytest.raises(KeyboardInterrupt):
        load_corpora(config, progress=False)
    monkeypatch.setattr(TASKS["mqar"], "example", lambda *given: (drawn.append(given[2]), example(*given))[1])
    assert load_corpora(config, progress=False).corpus_hash == whole.corpus_hash
    assert "going on with the corpus" in caplog.text and min(drawn) == 25


@pytest.mark.slow
def test_a_task_that_another_process_cannot_make_is_said_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "made_here_alone.py").write_text(
        "from packmamba.evaluation.tasks import TASKS\n\n\n"
        "class MadeHereAlone(TASKS['mqar']):\n"
        "    def __setstate__(self, state):\n"
        "        raise RuntimeError('not here')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(TASKS, "made_here_alone", importlib.import_module("made_here_alone").MadeHereAlone)
    monkeypatch.setattr("packmamba.data.sources.task.PART_EXAMPLES", 25)
    keys = ["data.task=made_here_alone"]
    with pytest.raises(
        UserError, match=r"cannot make what it is to read \(RuntimeError: not here\); data.num_proc=1 reads"
    ):
        load_corpora(make_config(tmp_path, *keys, "data.num_proc=2").data, progress=False)
    assert len(load_corpora(make_config(tmp_path, *keys, "data.num_proc=1").data, progress=False).train) == 48


@pytest.mark.slow
def test_a_process_tells_every_second_how_far_it_is(tmp_path, monkeypatch):
    """Else a bar stands still until a part is done, and a process outlives the one that started it as long."""
    (tmp_path / "slow_part.py").write_text(
        "import time\n"
        "from packmamba.data.sources import Document\n\n\n"
        "def read(advance, skipped):\n"
        "    for _ in range(4):\n"
        "        time.sleep(0.6)\n"
        "        yield Document(False, 'a')\n"
        "        advance(1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    read = importlib.import_module("slow_part").read
    told = []
    tasks = [workers.Task(number, read, frozenset()) for number in range(2)]
    cards = list(workers.run(tasks, 2, ByteTokenizer(None, None), tmp_path, told.append))
    assert len(cards) == 2 and sum(told) == 8 and max(told) < 4
