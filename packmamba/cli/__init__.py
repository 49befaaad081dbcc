"""PackMamba's commands: ``packmamba <command>`` where it is installed, ``python run.py <command>`` in a checkout."""

from __future__ import annotations

import argparse
import difflib
import os
import pkgutil
import re
import select
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

from packmamba.training.process import imports, keep_freed_memory, limit_spinning


class Parser(argparse.ArgumentParser):
    """argparse, whose refusal is one sentence that guesses what was meant."""

    def format_help(self) -> str:
        """With a sentence for each key."""
        text = super().format_help()
        if keys := KEYS.get(command := self.prog.split()[-1]):
            from packmamba.config.load import sections_of, shown

            lines = (
                textwrap.fill(
                    f"{prefix}{key}={shown(getattr(section, key))}: {entry.metadata['help']}",
                    100,
                    subsequent_indent="      ",
                )
                for prefix, section in sections_of(pkgutil.resolve_name(keys)())
                for key, entry in section.__dataclass_fields__.items()
                if "help" in entry.metadata
            )
            title = f"settings and their defaults{OF_RUNS.get(command, '')}:"
            text += f"\n{title}\n" + textwrap.indent("\n".join(lines), "  ") + "\n"
        return text

    def error(self, message: str) -> NoReturn:
        commands = [name for action in self._actions for name in (action.choices or ())]
        if unknown := re.search("invalid choice: '(.*?)'", message):
            close = difflib.get_close_matches(unknown[1], commands, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"commands: {', '.join(commands)}"
            message = f"unknown command '{unknown[1]}'; {hint}"
        elif commands and "are required" in message:
            message = f"expected one of {', '.join(commands)}, got none"
        elif (what := message.removeprefix("unrecognized arguments: ")) != message:
            dashes = what.startswith("--") and "settings have no dashes: key=value"
            message = f"unexpected {what}; {dashes or 'a pattern such as runs/mine-* may stand for several folders'}"
        from packmamba.errors import sentence

        self.exit(2, f"{self.prog.split()[0]}: error: {sentence(message)}\n")


KEYS = {
    "train": "packmamba.config:Config",
    "demo": "packmamba.training.sweep:SweepConfig",
    "sweep": "packmamba.training.sweep:SweepConfig",
    "eval": "packmamba.cli.models:EvalConfig",
    "generate": "packmamba.cli.models:GenerateConfig",
    "leakcheck": "packmamba.cli.leaks:LeakCheckConfig",
    "compare": "packmamba.cli.comparison:CompareConfig",
}
"""Where the keys of each command are declared."""

OF_RUNS = {
    "eval": " (of data: those of the model's run)",
    "demo": " (those of train too, for all runs: see train --help)",
    "sweep": " (those of train too, for all runs: see train --help)",
}


def demo(arguments: argparse.Namespace) -> None:
    """Train one small model under five batching schemes and compare them (minutes on a CPU)."""
    print(
        "PackMamba's demo: one small Mamba, five ways to batch documents, on the Python standard library's functions."
    )
    print("Loading PyTorch ...", flush=True)
    from packmamba.config import CONFIGS

    arguments.config = str(CONFIGS / "demo.yaml")
    sweep(arguments)


def train(arguments: argparse.Namespace) -> None:
    """Train one model. The same command again resumes it."""
    from packmamba.config import CONFIGS, load_config

    # Before the other imports, which take seconds.
    config = load_config(arguments.config or CONFIGS / "train.yaml", arguments.overrides)
    from packmamba.training.checks import check_documents, check_run

    check_run(config)
    check_documents(config)
    with imports():
        from packmamba.errors import Unfinished
        from packmamba.report.folder import format_table
        from packmamba.training.attempt import said_of_divergence
        from packmamba.training.fit import fit
        from packmamba.training.run_id import record_path, run_folder

    record = fit(config)
    print(f"\n{format_table([record])}\n\nRun: {run_folder(config)}\nRecord: {record_path(config)}")
    if "diverged_at_step" in record["metrics"]:
        raise Unfinished(f"the run diverged: {said_of_divergence(record['metrics'])}; its record says so")


def sweep(arguments: argparse.Namespace) -> None:
    """Train every run of one grid or more, and report. The same command again resumes it; with status: show how far it is."""
    from packmamba.records import has_records

    begun = time.monotonic()
    with imports():
        from packmamba.cli.sweeps import load_sweeps
        from packmamba.errors import Unfinished
        from packmamba.training.places import speaks
        from packmamba.training.sweep import run_sweeps, runs_of

    status = "status" in arguments.overrides
    words = [word for word in arguments.overrides if word != "status"]
    named = load_sweeps(arguments.config, words, not status)
    sweeps = list(named.values())
    if status:
        from packmamba.cli.status import sweep_status

        for file, (plan, configs) in named.items():
            print(f"{file}\n" * (len(named) > 1) + sweep_status(runs_of(plan, configs)).text())
        return
    folders = list(dict.fromkeys(plan.output for plan, _ in sweeps))
    try:
        run_sweeps(sweeps, begun=begun)
    except Unfinished as unfinished:
        if unfinished.status == 1 and speaks(sweeps[0][1][0]):
            _report_each([folder for folder in folders if has_records(folder)])
        raise
    if speaks(sweeps[0][1][0]):
        _report_each(folders)


def _report_each(folders: list[str]) -> None:
    for folder in folders:
        report(argparse.Namespace(folder=folder))


def bench(arguments: argparse.Namespace) -> None:
    """Measure time or memory, and report. Without a name: list the benches."""
    from packmamba.config import read_yaml
    from packmamba.experiments import find, names, run_bench

    if arguments.config is None:
        files = [path for name in names() for path in sorted(find(name).glob("*.yaml")) if "bench" in read_yaml(path)]
        folders = {path: path.parent.name for path in files}
        _list({name if path.stem == name else f"{name}/{path.stem}": path for path, name in folders.items()})
        return
    arguments.folder = str(run_bench(arguments.config, arguments.overrides))
    report(arguments)


def report(arguments: argparse.Namespace) -> None:
    """Make tables, figures and report.html from records. Without a name: list the experiments."""
    from packmamba.errors import ConfigError
    from packmamba.experiments import find, folder_of, kinds_of, names
    from packmamba.records import read_records
    from packmamba.report.folder import format_table, write_report
    from packmamba.report.items import with_items

    if arguments.folder is None:
        _list({name: find(name) / "README.md" for name in names()})
        return
    folder = folder_of(arguments.folder)
    try:
        records = with_items(folder, read_records(folder))
        kinds = kinds_of(folder, records)
        path = write_report(folder, kinds)
    except ValueError as error:
        where = "" if f"{folder} " in str(error) or f"{folder}/" in str(error) else f"{folder / 'records'}: "
        raise ConfigError(f"{where}{error}") from None
    print(f"\n{format_table(records, kinds)}\n\nReport, with figures: {path}")


def compare(arguments: argparse.Namespace) -> None:
    """Put runs that were trained apart into one table: folders of runs, or of records, and keys such as baseline=<arm>."""
    from packmamba.cli.comparison import compare_runs

    print(f"\n{compare_runs(arguments.words)}")


def _list(named: dict[str, Path]) -> None:
    """What a command takes, each beside the first line of its file."""
    from packmamba.errors import ConfigError

    if not named:
        raise ConfigError(f"there is no folder experiments/ in {Path.cwd()}: name a file or a folder")
    for name, file in sorted(named.items()):
        line = file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") if file.is_file() else ""
        print(f"{name:{max(map(len, named))}}  {line}")


def reproduce(arguments: argparse.Namespace) -> None:
    """Run an experiment from nothing and compare its headline numbers with the committed ones. Without a name: list them."""
    from packmamba.cli.reproduction import reproduce, reproducible
    from packmamba.experiments import find

    if arguments.experiment is None:
        _list({name: find(name) / "README.md" for name in reproducible()})
        return
    reproduce(arguments.experiment, arguments.overrides)


def kernels(arguments: argparse.Namespace) -> None:
    """Build the compiled kernels for this machine, or show which are built."""
    from packmamba.errors import KernelError
    from packmamba.ops import build

    if arguments.action == "build":
        rows = build.info()
        if all(row["problem"] is not None for row in rows):
            raise KernelError("; ".join(f"{row['kind']}: {row['problem']}" for row in rows))
        for row in rows:
            if row["problem"] is None:
                print(f"Building {row['kind']} kernels for {row['target']} ...", flush=True)
                build.build(row["kind"])
    for row in build.info():
        state = "built" if row["built"] else row["problem"] or "not built; built on first use or by 'kernels build'"
        print(f"{row['kind']}: {state}")
        if row["problem"] is None:
            print(f"  for {row['target']}, by {row['compiler']}\n  {row['path']}")


def doctor(arguments: argparse.Namespace) -> int:
    """Show what is installed, what runs here and what is missing. With folders: read every byte of these prepared corpora."""
    from packmamba.cli.doctor import diagnose, examine

    lines = list(examine(arguments.corpora)) or [(True, line) for line in diagnose()]
    print("\n".join(line for _, line in lines))
    return int(not all(right for right, _ in lines))


def eval(arguments: argparse.Namespace) -> None:
    """Ask a trained model: loss on text, tasks with a right answer, lm-evaluation-harness. The same command again resumes it."""
    from packmamba.cli.models import evaluate_model

    output, records = evaluate_model(arguments.model, arguments.overrides)
    from packmamba.report.folder import format_table  # takes a second

    tables = "\n".join(format_table([record]) for record in records)
    print(f"\n{tables}\n\nRecords and items: {output}")


def generate(arguments: argparse.Namespace) -> None:
    """Continue a text with a trained model."""
    from packmamba.cli.models import continue_text

    print(arguments.prompt + continue_text(arguments.model, arguments.prompt, arguments.overrides))


def export(arguments: argparse.Namespace) -> None:
    """Write a trained model and its tokenizer in Hugging Face's format."""
    from packmamba.cli.models import export_model

    print(f"Written to {export_model(arguments.model, arguments.folder)}; transformers' AutoModelForCausalLM reads it.")


def leakcheck(arguments: argparse.Namespace) -> int:
    """Tell whether anything crosses a document boundary in a model, ours or Hugging Face's. Exit status 1 if so."""
    from packmamba.cli.leaks import check_folder

    result = check_folder(arguments.model, arguments.overrides)
    print(result)
    return 0 if result.ok else 2 if result.raises is not None else 1


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    f.__name__: f
    for f in (
        *(demo, train, sweep, eval, generate, export, leakcheck),
        *(bench, report, compare, reproduce, kernels, doctor),
    )
}


MODEL = ("model", None, "the folder of a run, or of a published checkpoint")
ARGUMENTS: dict[str, list[tuple[str, str | None, str]]] = dict.fromkeys(COMMANDS, []) | {
    "train": [("config", "?", "a YAML file; without one, configs/train.yaml")],
    "sweep": [("config", None, "a YAML file; others may follow, whose runs come after its own")],
    "bench": [("config", "?", "an experiment, <experiment>/<bench>, or a YAML file")],
    "reproduce": [("experiment", "?", "an experiment, <experiment>/<step>, or all")],
    "report": [("folder", "?", "an experiment, or a folder that holds records/")],
    "eval": [MODEL],
    "leakcheck": [MODEL],
    "generate": [MODEL, ("prompt", None, "the text to continue")],
    "export": [MODEL, ("folder", None, "a new folder")],
}
SETTINGS = dict.fromkeys(KEYS.keys() - {"compare"}, "settings, listed below") | {
    "train": "settings, listed below, such as data.strategy=best_fit",
    "sweep": "settings, listed below; or the word status",
    "bench": "keys of the bench's YAML file, such as output=runs/mine",
    "reproduce": "scale=small for a quick look, output=<folder>, keys of the one step that is named",
}


def _is_unread(file: TextIO) -> bool:
    """Whether it is a pipe that nobody reads any more, as of ``| head``."""
    poll = select.poll()
    try:
        poll.register(file, 0)
    except (OSError, ValueError):  # no file of the system's
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def main(argv: list[str] | None = None, prog: str = "packmamba") -> int:
    """The command's exit status. Without arguments it reads those of this process."""
    if argv is None:
        limit_spinning()
        keep_freed_memory()
    parser = Parser(prog=prog, description="Train Mamba on documents of different lengths, packed without leaks.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=Parser)
    for name, function in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        for word, count, text in ARGUMENTS[name]:
            command.add_argument(word, nargs=count, help=text)
        if name in SETTINGS:
            command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=SETTINGS[name])
        if name == "compare":
            command.add_argument("words", nargs="+", metavar="run or key=value", help="folders of runs, and settings")
        if name == "doctor":
            text = "folders of prepared corpora, such as runs/corpora/*"
            command.add_argument("corpora", nargs="*", default=[], help=text)
        if name == "kernels":
            command.add_argument("action", choices=("build", "info"), help="build them, or only show them")
    arguments = parser.parse_args(argv)
    if arguments.command == "train" and arguments.config and "=" in arguments.config:
        arguments.config, arguments.overrides = None, [arguments.config, *arguments.overrides]

    from packmamba.errors import ConfigError, UserError, of_machine, sentence

    try:
        words = [word for word in getattr(arguments, "overrides", []) if "=" not in word]
        if words and MODEL in ARGUMENTS[arguments.command]:
            several = "a pattern such as runs/mine-* may stand for several runs, name one"
            raise ConfigError(f"expected key=value, got '{words[0]}'; {several}")
        status = COMMANDS[arguments.command](arguments) or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"{prog}: error: {sentence(error)}", file=sys.stderr)
        return error.status
    except ModuleNotFoundError as error:
        if error.name is None:
            raise
        hint = "activate the environment first (source .venv/bin/activate, after make demo or make test)"
        print(f"{prog}: error: the package '{error.name}' is not installed here; {hint}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where what is still held goes
            return 128 + signal.SIGPIPE
        if (said := of_machine(error)) is None:
            raise
        print(f"{prog}: error: {sentence(said)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        where = f" {error}" if str(error) else ""
        from_there = "" if where else " from the last checkpoint, if there is one"
        goes_on = f"; the same command goes on{from_there}" * (
            arguments.command in ("demo", "train", "sweep", "reproduce")
        )
        goes_on += "; the same command goes on where it was" * (arguments.command == "eval")
        print(f"\n{prog}: stopped{where}{goes_on}", file=sys.stderr)
        return getattr(error, "status", 130)
