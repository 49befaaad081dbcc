"""What commands do by default where a GPU is: runs take it, go on after a stop, share it in a sweep, and are read on it."""

from __future__ import annotations

import pytest
from test_sweeps import write_sweep

from packmamba import cli
from packmamba.records import read_records
from packmamba.training.callbacks import Stopped
from packmamba.training.fit import fit
from packmamba.training.run_id import run_folder
from processes import fork, run_py, statuses
from runs import CARRY, final_state, tiny_config, write_config

pytestmark = pytest.mark.gpu
AUTO = ["trainer.accelerator=auto", "model.d_model=64", "model.d_state=16"]


def test_a_run_takes_the_gpu_and_is_read_on_it(tmp_path, capsys):
    """The first in a fork, where CUDA starts for the first time."""
    config = tiny_config(tmp_path, *AUTO, "data.strategy=greedy", "data.num_workers=2")
    output = tmp_path / "output.txt"
    train = ["train", str(write_config(tmp_path / "run.yaml", config))]
    assert statuses(fork(cli.main, train, output=output)) == [0], output.read_text()
    folder = run_folder(config)
    (record,) = read_records(folder)
    assert record["hardware"]["backend"] == "cuda" and record["hardware"]["gpus"]
    assert record["metrics"]["peak_memory_bytes"] > 0
    cpu = fit(
        tiny_config(tmp_path, *AUTO, "data.strategy=greedy", "trainer.accelerator=cpu", "name=cpu"), progress=False
    )
    assert record["metrics"]["val_loss"] == pytest.approx(cpu["metrics"]["val_loss"], rel=1e-4)
    assert cli.main(["eval", str(folder), "tasks=[perplexity]"]) == 0
    (read,) = read_records(folder / "evaluation")
    assert read["metrics"]["loss"] == pytest.approx(record["metrics"]["val_loss"], rel=1e-5)
    capsys.readouterr()
    texts = []
    for device in ("cuda", "cpu"):
        assert cli.main(["generate", str(folder), "abc", "max_new_tokens=5", f"device={device}"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "keys",
    [["data.strategy=greedy"], [*CARRY, "data.mode=stream", "data.tokens_per_step=144"]],
    ids=["packed", "carry"],
)
def test_a_stopped_run_goes_on(tmp_path, keys):
    keys = [*AUTO, *keys, "trainer.checkpoint_every=100"]
    whole = fit(tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/whole"), progress=False)["curves"]
    config = tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/stopped")
    with pytest.raises(Stopped):
        fit(config, progress=False, stop=lambda history: history.totals["steps"] == 4)
    stopped = fit(config, progress=False)["curves"]
    for name in ("train", "validation"):
        found, expected = ([point["loss"] for point in curves[name]] for curves in (stopped, whole))
        assert found == pytest.approx(expected, rel=1e-5)
    assert final_state(config)["rng"]["cuda"], "what draws on the GPU goes on too"


def test_runs_of_a_sweep_share_it(tmp_path):
    """In processes that import all, as a user's: the sweep's own asks for the GPU and then times on it."""
    base = write_config(tmp_path / "auto.yaml", tiny_config(tmp_path, *AUTO, "trainer.max_steps=2"))
    path = write_sweep(tmp_path, base=str(base), grid={}, throughput_rounds=2)
    output, errors = run_py("sweep", path, "jobs=2").communicate()
    records = read_records(tmp_path / "sweep")
    assert sorted(record["kind"] for record in records) == ["throughput"] * 2 + ["training"] * 2, output + errors
    trained = [record for record in records if record["kind"] == "training"]
    assert all(r["hardware"]["backend"] == "cuda" and r["metrics"]["peak_memory_bytes"] > 0 for r in trained)
