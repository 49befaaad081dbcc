"""Between logged steps nothing waits for a GPU, and ranks do not wait for each other: its next kernels are launched meanwhile."""

import json

import lightning
import pytest
import torch
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
        self.be(LOGGED <= index < 2 * LOGGED - 1)

    def on_fit_end(self, *_):
        self.be(False)

    on_exception = on_fit_end

    def be(self, strict):
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        torch.cuda.synchronize = self.refuse if strict else synchronize

    def refuse(self, *_):
        raise RuntimeError("waits for the GPU")


synchronize = torch.cuda.synchronize


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["false", "true"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_step_between_logged_ones_waits_for_a_gpu(tmp_path, monkeypatch, graphs, precision):
    # Documents of one length, four a row, a row a step: the first step captures the only graph.
    documents = tmp_path / "alike.jsonl"
    documents.write_text("".join(json.dumps({"text": f"{i:024}"}) + "\n" for i in range(60)))
    keys = ["trainer.accelerator=gpu", f"trainer.precision={precision}", f"trainer.cuda_graphs={graphs}",
            f"data.path={documents}", "data.row_length=96", "data.slots_per_batch=96"]  # fmt: skip
    config = tiny_config(tmp_path, *KEYS, *keys)
    with_callback(monkeypatch, Strict())
    assert fit(config, progress=True)["metrics"]["steps"] == 8


def train_and_note(path, folder):
    """Trains; leaves the numbers of the steps after which this rank asked the others, and its waits for them inside steps."""
    asked, waited, inside = [], [], []
    all_reduce, barrier, make = torch.distributed.all_reduce, torch.distributed.barrier, lightning.Trainer

    class Note(lightning.Callback):
        def on_train_batch_start(self, trainer, *_):
            inside.append(True)

        def on_train_batch_end(self, *_):
            inside.clear()

    def note_question(tensor, op=torch.distributed.ReduceOp.SUM, *arguments, **keys):
        if op == torch.distributed.ReduceOp.MAX:
            asked.append(trainers[0].global_step)
        return all_reduce(tensor, op, *arguments, **keys)

    def note_meeting(*arguments, **keys):
        waited.extend(inside)
        return barrier(*arguments, **keys)

    trainers = []

    def make_and_note(**keys):
        trainers.append(make(**keys | {"callbacks": [*keys["callbacks"], Note()]}))
        return trainers[0]

    torch.distributed.all_reduce, torch.distributed.barrier = note_question, note_meeting
    lightning.Trainer = make_and_note
    status = run.main(["train", path])
    name = torch.multiprocessing.current_process().name
    (folder / f"{name}.json").write_text(json.dumps({"asked": asked, "waited": waited}))
    return status


@pytest.mark.slow
def test_ranks_meet_at_logged_steps_only_besides_their_gradients(tmp_path):
    config = tiny_config(tmp_path, *KEYS, "trainer.devices=2", "trainer.strategy=ddp")
    path = write_config(tmp_path / "run.yaml", config)
    output, folder = tmp_path / "output.txt", tmp_path / "noted"
    folder.mkdir()
    assert statuses(*fork_ranks(2, train_and_note, str(path), folder, output=output)) == [0, 0], output.read_text()
    noted = [json.loads(file.read_text()) for file in folder.iterdir()]
    assert noted == [{"asked": [LOGGED, 2 * LOGGED], "waited": []}] * 2
