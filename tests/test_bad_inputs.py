"""A sample of the campaign of wrong inputs, tests/faults/inputs.py, with a fixed seed; `make test-faults` takes longer."""

import sys

import pytest
from hypothesis import strategies

from processes import ROOT

sys.path.append(str(ROOT / "tests" / "faults"))

import campaign as faults
import inputs

from packmamba import MambaLM

ROWS = (
    "key:",
    "key of a bench:",
    "key, drawn",
    "file, drawn",
    "a command in a process",
    "file:",
    "documents",
    "configuration",
    "sweep",
    "model",
    "record",
    "assignment",
    "command",
    "argument of",
)


@pytest.mark.slow
def test_a_few_seconds_of_the_campaign(tmp_path):
    wrong = []
    tmp_path.chmod(0o755)
    made = inputs.campaign(tmp_path, seconds=6, seed=1, examples=4, say=lambda text, flush: wrong.append(text))
    assert not wrong
    counts = made["kinds"].values()
    assert sum(count["trials"] for count in counts) > 30, "a machine that is not all busy tries hundreds"
    assert any("drawn" in row for row in made["kinds"])
    assert set(next(iter(counts))) == set(faults.COUNTS)


def test_the_campaign_has_every_row_and_no_trial_twice(tmp_path):
    MambaLM(300, 8, 1).save_pretrained(tmp_path)
    said = [(row, what) for row, what, _ in inputs.trials(tmp_path) if "argument of" not in row]
    for row in ROWS[:-1]:
        assert sum(kind.startswith(row) for kind, _ in said) >= 10, row
    assert len({what for row, what in said if row.startswith("key:")}) > 700


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("train", "configs/train.yaml", "trainer.max_steps=many"), None),
        (("train", "configs/train.yaml", "trainer.max_steps=many"), "does not name nothing of this kind"),
        (("kernels", "info"), "status 0"),
    ],
)
def test_the_campaign_knows_a_refusal_when_it_sees_one(tmp_path, argv, expected):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train.yaml").write_text("seed: 1\n")
    names = "" if expected is None else "nothing of this kind"
    found = inputs.try_out(inputs.Trial("key: word", argv, names), tmp_path)
    assert found is None if expected is None else found.startswith(expected)


def test_of_what_is_wrong_hypothesis_finds_the_smallest(tmp_path):
    what = strategies.integers(0, 1000)
    tried, found = inputs.drawn.block(
        what, lambda n, _: f"{n} is wrong" if n > 10 else None, tmp_path, seed=0, examples=100
    )
    assert found.endswith(": 11 is wrong") and tried < 100
    (tmp_path / "again").mkdir()
    assert inputs.drawn.block(what, lambda n, _: None, tmp_path / "again", seed=0, examples=100) == (100, None)
