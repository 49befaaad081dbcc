"""Count the files of the package that a new reader meets: those in which `train` and `report` on synthetic data run a function.

python tests/count_files.py [list]
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
RUN = (
    "data.source=synthetic data.num_documents=200 data.distribution=short data.row_length=128 data.tokens_per_step=512"
)
RUN += " data.validation_documents=5 model.d_model=16 trainer.max_steps=4 trainer.validate_every=2"
RUN += " trainer.checkpoint_every=2 trainer.accelerator=cpu"
entered: set[str] = set()


def note(frame, event, _):
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # not the body of a module or class
        entered.add(frame.f_code.co_filename)


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    threading.setprofile(note)
    sys.setprofile(note)
    from packmamba.lab import cli

    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        places = [f"output={name}/out", f"runs_dir={name}/runs", f"data.cache_dir={name}/cache"]
        assert not cli.main(["train", *RUN.split(), *places]) and not cli.main(["report", f"{name}/out"])
    sys.setprofile(None)
    files = sorted(path.removeprefix(PACKAGE) for path in entered if path.startswith(PACKAGE))
    print(*(files if "list" in sys.argv else ()), f"{len(files)} files entered", sep="\n")
