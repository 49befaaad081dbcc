"""Count the files of the package that a new reader meets, by the functions that run on synthetic
data.

python tests/count_files.py [list]        a whole `train` and `report`
python tests/count_files.py step [list]   one training step: its documents read, arranged and trained on
"""

import contextlib
import inspect
import io
import os
import sys
import tempfile
import threading
from pathlib import Path

PACKAGE = f"{Path.cwd()}/packmamba/"
RUN = "data.source=synthetic data.num_documents=200 data.distribution=short data.row_length=128"
RUN += " data.tokens_per_step=512 data.validation_documents=5 model.d_model=16 trainer.max_steps=4 trainer.validate_every=4"
RUN += " trainer.checkpoint_every=4 trainer.accelerator=cpu"
entered: set[str] = set()


def note(frame, event, _):
    # not the body of a module or class
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        entered.add(frame.f_code.co_filename)


def watch(function):
    """Note the functions of all threads, the backward's among them."""
    threading.setprofile(function)
    sys.setprofile(function)


def step_alone(module_class):
    """Count from the second step's end to the third's: nothing is validated, saved or checked
    there.
    """
    take_step = module_class.training_step

    def training_step(module, step, index):
        loss = take_step(module, step, index)
        if index == 1:
            watch(note)
        elif index == 2:
            watch(None)
        return loss

    module_class.training_step = training_step


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "step" not in sys.argv:
        watch(note)
    from packmamba.lab import cli

    if "step" in sys.argv:
        from packmamba.training.lit_module import PackedLitModule

        step_alone(PackedLitModule)
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        places = [f"output={name}/out", f"runs_dir={name}/runs", f"data.cache_dir={name}/cache"]
        assert not cli.main(["train", *RUN.split(), *places])
        if "step" not in sys.argv:
            assert not cli.main(["report", f"{name}/out"])
    watch(None)
    files = sorted(path.removeprefix(PACKAGE) for path in entered if path.startswith(PACKAGE))
    print(*(files if "list" in sys.argv else ()), f"{len(files)} files entered", sep="\n")
