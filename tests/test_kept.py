"""A killed evaluation goes on with the items that it lacks and ends, to the bit, as one that was not killed."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch

import run
from packmamba import MambaLM, cli
from packmamba.evaluation import on_tasks
from packmamba.evaluation.kept import PASSES, Kept
from packmamba.records import read_records
from packmamba.training.fit import fit
from packmamba.training.run_id import run_folder
from processes import fork, kill
from runs import tiny_config

DOCUMENTS = [np.arange(n) for n in (3, 5, 1, 8, 2, 9)]


@pytest.mark.slow
def test_a_killed_eval_goes_on_inside_an_evaluation(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, "trainer.max_steps=2", "data.strategy=greedy", "trainer.boundary=leak")
    fit(config, progress=False)
    command = ["eval", str(run_folder(config)), "tasks=[contradiction]", "examples=120", "max_slots=128", "device=cpu",
               "data.row_length=256", "data.slots_per_batch=2560"]  # fmt: skip
    folder, output = tmp_path / "killed", tmp_path / "output.txt"
    process = fork(run.main, [*command, f"output={folder}"], output=output, OMP_NUM_THREADS="1")
    while process.is_alive() and sum(len(path.read_text()) for path in folder.glob("items/*.part")) < 5000:
        time.sleep(0.001)
    kill(process)
    assert not (folder / "records").exists(), output.read_text()
    (part,) = folder.glob("items/*.part")
    kept = len(part.read_text().splitlines()) - 2  # the first says whose they are, the last may be cut short
    assert 9 < kept < 120
    asked, answer = [], on_tasks.answer
    monkeypatch.setattr(
        on_tasks,
        "answer",
        lambda model, examples, *rest: (asked.append(len(examples)), answer(model, examples, *rest))[1],
    )
    torch.set_num_threads(1)
    assert cli.main([*command, f"output={folder}"]) == 0
    *alone, trained = asked
    assert trained == 120 and sum(alone) <= 120 - kept
    assert cli.main([*command, f"output={tmp_path / 'whole'}"]) == 0
    (a,), (b,) = (read_records(place) for place in (folder, tmp_path / "whole"))
    assert a["metrics"] == b["metrics"] and a["curves"] == b["curves"]
    (items,), (others,) = (list(place.glob("items/*")) for place in (folder, tmp_path / "whole"))
    assert items.read_bytes() == others.read_bytes() and len(items.read_text().splitlines()) == 120


def model(seed=0):
    torch.manual_seed(seed)
    return MambaLM(vocab_size=16, d_model=8, n_layer=1)


def ask(kept, asked, **options):
    def answer(which):
        asked.append(which)
        return [{"n": i, "value": i / 7, "more": [0.1 * i]} for i in which]

    return kept.answers("part", DOCUMENTS, 1, answer, **options)


def test_what_is_kept_is_not_asked_again(tmp_path):
    path, first, again = tmp_path / "folder" / "items.part", [], []
    expected = ask(Kept(), [])
    assert ask(Kept(path, model()), first) == expected and [i["n"] for i in expected] == list(range(6))
    assert [sum(len(DOCUMENTS[i]) for i in some[:-1]) < PASSES for some in first] == [True] * len(first) and len(
        first
    ) == 2
    assert ask(Kept(path, model()), again) == expected and not again
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:3]) + whole[3][:9])  # two items, and one that was cut short
    kept = Kept(path, model())
    assert ask(kept, again) == expected and sum(map(len, again)) == 4
    assert path.read_text().splitlines(keepends=True) == whole
    kept.forget()
    assert not path.exists()


def test_what_others_answered_is_thrown_away(tmp_path):
    path = tmp_path / "items.part"
    for other in (model(1), model(1).double()):
        asked = []
        ask(Kept(path, other), asked)
        assert sum(map(len, asked)) == 6
    asked = []
    ask(Kept(path, model(1).double()), asked)
    assert not asked
    Kept(path, model(1).double()).answers(
        "part", DOCUMENTS[:-1], 1, lambda which: [asked.append(i) or {} for i in which]
    )
    assert asked == [0, 1, 2, 3, 4], "other documents are another question"


def test_answers_together_are_kept_whole_or_not(tmp_path):
    path, asked = tmp_path / "items.part", []
    ask(Kept(path, model()), asked, together=True)
    assert asked == [list(range(6))]
    lines = path.read_text().splitlines(keepends=True)
    assert json.loads(lines[1])[1:] == [0, {"n": 0, "value": 0.0, "more": [0.0]}]
    path.write_text("".join(lines[:4]))
    ask(Kept(path, model()), asked, together=True)
    assert asked == [list(range(6))] * 2
