"""A sweep does not call runs done whose documents have changed, nor trains others beside them."""

from dataclasses import fields, replace

import pytest
import yaml

from packmamba.config import DataConfig
from packmamba.data.token_store import load_corpora
from packmamba.errors import ConfigError
from packmamba.training.sweep import load_sweep, run_sweep
from packmamba.training.unchanged import DECISIVE
from runs import tiny_config, write_config, write_documents

pytestmark = pytest.mark.slow
TASK = ["data.source=task", "data.path=null", "data.task=mqar", "data.num_documents=60"]


@pytest.fixture
def sweep(tmp_path):
    """Two arms of one corpus, one of another, two seeds; trained."""
    own, base = tmp_path / "own.jsonl", tmp_path / "base.yaml"
    own.write_text(write_documents(tmp_path).read_text() + '{"text": "abcd"}\n')
    write_config(base, tiny_config(tmp_path, "trainer.max_steps=1", "data.row_length=30"))
    arms = {
        "one": {"data.strategy": "greedy"},
        "rows": {"data.strategy": "padded"},
        "own": {"data.strategy": "greedy", "data.path": str(own)},
    }
    path = tmp_path / "sweep.yaml"
    said = {"output": str(tmp_path / "sweep"), "base": str(base), "arms": arms, "grid": {"seed": [0, 1]}}
    path.write_text(yaml.safe_dump(said))
    run_sweep(*load_sweep(path), progress=False)
    return path


IN_ROWS = {
    "mode": "stream", "strategy": "split", "row_length": 48, "streams": 2, "stagger": True, "shuffle_steps": 3,
    "tokens_per_step": 96, "slots_per_batch": 96, "validation_documents": 2, "num_workers": 1,
}  # fmt: skip
IN_STEPS = {"overlong": "truncate", "buffer": 8, "cut_documents": 20, "cut_at_steps": True}


@pytest.mark.parametrize(
    "keys", [[], ["data.source=synthetic", "data.path=null"], TASK], ids=["jsonl", "synthetic", "task"]
)
def test_what_lays_tokens_out_decides_no_document(tmp_path, keys):
    assert {field.name for field in fields(DataConfig)} == {*DECISIVE, *IN_ROWS, *IN_STEPS}
    data = tiny_config(tmp_path, *keys).data
    made = load_corpora(data, progress=False)
    prepared = sorted(path.name for path in (tmp_path / "cache").iterdir())
    for layout in (IN_ROWS, IN_STEPS):
        assert load_corpora(replace(data, **layout), progress=False).corpus_hash == made.corpus_hash
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == prepared, "none is made again"


def records(sweep):
    return {path: path.read_bytes() for path in sweep.parent.rglob("records/*.jsonl")}


def test_done_runs_of_other_documents_are_refused_before_any_work(sweep):
    own, before = sweep.parent / "own.jsonl", records(sweep)
    run_sweep(*load_sweep(sweep), progress=False)
    own.write_text(own.read_text() * 2)
    message = (
        r"changed since own, seed 0, was trained, and 1 more; give another output, or remove these runs' records in "
    )
    with pytest.raises(ConfigError, match=message):
        run_sweep(*load_sweep(sweep, ["throughput_rounds=3"]), progress=False)
    assert records(sweep) == before, "nothing was timed or trained"


def test_each_corpus_is_compared_once_and_said_once(sweep, capsys):
    (sweep.parent / "documents.jsonl").unlink()
    capsys.readouterr()
    run_sweep(*load_sweep(sweep), progress=True)
    out = capsys.readouterr().out
    assert out.count("comparing the documents with those of 6 runs that are done") == 1
    assert out.count("whether they have changed is not known, since they cannot be read: data.path") == 1
