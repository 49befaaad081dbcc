"""Count the files of the package that a new reader meets: those in which `train` and `report` on synthetic data run a function.

python tests/count_files.py [list]

A file counts where the body of one of its functions or methods runs, in the main process or one of its threads, between the
start of the process and its end. Module and class bodies alone, which an import runs, do not count; files that are only
imported are counted apart.
"""

import contextlib
import inspect
import io
import os
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path.cwd()
RUN = [
    *("data.source=synthetic", "data.num_documents=200", "data.distribution=short", "data.row_length=128"),
    *("data.tokens_per_step=512", "model.d_model=16", "trainer.max_steps=4", "trainer.validate_every=2"),
    *("trainer.checkpoint_every=2", "trainer.accelerator=cpu", "data.validation_documents=5"),
]
entered: set[str] = set()


def note(frame, event, _):
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        entered.add(frame.f_code.co_filename)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    threading.setprofile(note)
    sys.setprofile(note)
    from packmamba import cli

    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        places = [f"output={name}/out", f"runs_dir={name}/runs", f"data.cache_dir={name}/cache"]
        statuses = [cli.main(["train", *RUN, *places]), cli.main(["report", f"{name}/out"])]
    sys.setprofile(None)
    if any(statuses):
        sys.exit(f"train and report ended with {statuses}")
    package = f"{ROOT}/packmamba/"
    files = sorted(path.removeprefix(package) for path in entered if path.startswith(package))
    loaded = [module for module in sys.modules if module.partition(".")[0] == "packmamba"]
    print(*(files if "list" in sys.argv else ()), sep="\n")
    print(
        f"{len(files)} files entered, {len(loaded)} imported, {len(list(Path(package).rglob('*.py')))} in the package"
    )


if __name__ == "__main__":
    main()
