"""Between logged steps nothing waits for a GPU, and ranks do not wait for each other: its next kernels are launched meanwhile."""

import json

import lightning
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.logger_connector import result

import run
from packmamba.training.fit import fit
from processes import fork_ranks, statuses
from runs import tiny_config, write_config

LOGGED = 4
KEYS = ["data.strategy=greedy", "trainer.max_steps=8", "trainer.validate_every=8", "trainer.checkpoint_every=8",
        f"trainer.log_every={LOGGED}"]  # fmt: skip


def with_callback(monkeypatch, callback):
    make = lightning.Trainer
    monkeypatch.setattr(
        lightning, "Trainer", lambda **keys: make(**keys | {"callbacks": [*keys["callbacks"], callback]})
    )


def test_lightning_turns_no_tensor_of_a_step_into_a_number(tmp_path, monkeypatch, capsys):
    """Which would be a wait on a GPU; the line of progress has its numbers from logged steps."""
    turned, turn = [], result.convert_tensors_to_scalars

    def note(value):
        turned.append(trainers[0].state.stage)
        return turn(value)

    trainers = []
    callback = lightning.Callback()
    callback.on_train_start = lambda trainer, module: trainers.append(trainer)
    with_callback(monkeypatch, callback)
    monkeypatch.setattr(result, "convert_tensors_to_scalars", note)
    record = fit(tiny_config(tmp_path, *KEYS), progress=True)
    assert turned and set(turned) == {"validate"}
    last = f"loss={record['curves']['train'][-1]['loss']:.3f}"[:9]
    shown = capsys.readouterr().err
    assert last in shown and "validation=" in shown and "real_tok/s=" in shown


class Strict(lightning.Callback):
    """Has PyTorch refuse every wait in the steps after a logged one, until the next."""

    def on_train_batch_start(self, trainer, module, batch, index):
        torch.cuda.set_sync_debug_mode("error" if LOGGED <= index < 2 * LOGGED - 1 else "default")

    def on_fit_end(self, *_):
        torch.cuda.set_sync_debug_mode("default")

    on_exception = on_fit_end


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", ["false", "true"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_step_between_logged_ones_waits_for_a_gpu(tmp_path, monkeypatch, graphs, precision):
    # Rows of one length and steps of one batch: what a graph is captured for is there from the first step.
    keys = ["trainer.accelerator=gpu", f"trainer.precision={precision}", f"trainer.cuda_graphs={graphs}",
            "data.row_length=96", "data.slots_per_batch=96"]  # fmt: skip
    with_callback(monkeypatch, Strict())
    assert fit(tiny_config(tmp_path, *KEYS, *keys), progress=True)["metrics"]["steps"] == 8


def train_and_note(path, folder):
    """Trains; leaves the numbers of the steps in which this rank waited for the others."""
    noted, ask, meet = (
        {"asked": [], "waited": []},
        _TrainingEpochLoop._broadcast_sigterm_tensor,
        torch.distributed.barrier,
    )

    def note_ask(loop):
        noted["asked"].append(loop.trainer.global_step)
        return ask(loop)

    class Note(lightning.Callback):
        """From a step's data on its device to its logging."""

        inside = False

        def on_train_batch_start(self, *_):
            self.inside = True

        def on_train_batch_end(self, *_):
            self.inside = False

    note = Note()

    def note_meeting(*arguments, **keys):
        if note.inside:
            noted["waited"].append("a barrier")
        return meet(*arguments, **keys)

    _TrainingEpochLoop._broadcast_sigterm_tensor = note_ask
    torch.distributed.barrier = note_meeting
    make = lightning.Trainer
    lightning.Trainer = lambda **keys: make(**keys | {"callbacks": [*keys["callbacks"], note]})
    status = run.main(["train", path])
    (folder / f"{torch.multiprocessing.current_process().name}.json").write_text(json.dumps(noted))
    return status


def test_ranks_meet_at_logged_steps_only_besides_their_gradients(tmp_path):
    config = tiny_config(tmp_path, *KEYS, "trainer.devices=2", "trainer.strategy=ddp")
    path = write_config(tmp_path / "run.yaml", config)
    output, folder = tmp_path / "output.txt", tmp_path / "noted"
    folder.mkdir()
    assert statuses(*fork_ranks(2, train_and_note, str(path), folder, output=output)) == [0, 0], output.read_text()
    noted = [json.loads(file.read_text()) for file in folder.iterdir()]
    assert noted == [{"asked": [0, LOGGED], "waited": []}] * 2
