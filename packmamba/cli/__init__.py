"""PackMamba's commands: ``packmamba <command>`` where it is installed, ``python run.py <command>`` in a checkout."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import difflib
import re
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo.yaml"


class Parser(argparse.ArgumentParser):
    """argparse, whose refusal is one sentence that guesses what was meant."""

    def error(self, message: str) -> NoReturn:
        commands = [name for action in self._actions for name in (action.choices or ())]
        if unknown := re.search("invalid choice: '(.*?)'", message):
            close = difflib.get_close_matches(unknown[1], commands, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"commands: {', '.join(commands)}"
            message = f"unknown command '{unknown[1]}'; {hint}"
        elif commands and "are required" in message:
            message = f"expected one of {', '.join(commands)}, got none"
        self.exit(2, f"{self.prog.split()[0]}: error: {message}\n")


def demo(arguments: argparse.Namespace) -> None:
    print(
        "PackMamba's demo: one small Mamba, five ways to batch documents, on the Python standard library's functions."
    )
    print("Loading PyTorch ...", flush=True)
    arguments.config = str(DEMO)
    sweep(arguments)


def train(arguments: argparse.Namespace) -> None:
    from packmamba.config import load_config
    from packmamba.report.folder import format_table

    config = load_config(arguments.config, arguments.overrides)  # first: what follows takes seconds to import
    from packmamba.training.fit import fit
    from packmamba.training.runs import record_path, run_folder

    record = fit(config)
    print(f"\n{format_table([record])}\n\nRun: {run_folder(config)}\nRecord: {record_path(config)}")


def sweep(arguments: argparse.Namespace) -> None:
    from packmamba.training.sweep import load_sweep, run_sweep

    plan, configs = load_sweep(arguments.config, arguments.overrides)
    arguments.folder = str(run_sweep(plan, configs))
    report(arguments)


def bench(arguments: argparse.Namespace) -> None:
    from packmamba.experiments import run_bench

    arguments.folder = str(run_bench(arguments.config, arguments.overrides))
    report(arguments)


def report(arguments: argparse.Namespace) -> None:
    from packmamba.errors import ConfigError
    from packmamba.experiments import folder_of, kinds_of
    from packmamba.records import read_records
    from packmamba.report.folder import format_table, write_report

    folder = folder_of(arguments.folder)
    try:
        records = read_records(folder)
        kinds = kinds_of(folder, records)
        path = write_report(folder, kinds)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    print(f"\n{format_table(records, kinds)}\n\nReport, with figures: {path}")


def kernels(arguments: argparse.Namespace) -> None:
    from packmamba.ops import build

    if arguments.action == "build":
        for row in build.info():
            if row["problem"] is None:
                print(f"Building {row['kind']} kernels for {row['target']} ...", flush=True)
                build.build(row["kind"])
    for row in build.info():
        state = "built" if row["built"] else row["problem"] or "not built; built on first use or by 'kernels build'"
        print(f"{row['kind']}: {state}")
        if row["problem"] is None:
            print(f"  for {row['target']}, by {row['compiler']}\n  {row['path']}")


def doctor(arguments: argparse.Namespace) -> None:
    from packmamba.cli.doctor import diagnose

    print("\n".join(diagnose()))


def keep_freed_memory() -> None:
    """Tells glibc to keep what is freed.

    Else it gives large tensors back to the system, which finds and clears the same pages again for the next ones: 47 thousand
    a step of two million parameters, 3 us each on a virtual machine. Other C libraries are left as they are.
    """
    trim_threshold, mmap_max = -1, -4
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, -1)
        libc.mallopt(mmap_max, 0)


def main(argv: list[str] | None = None, prog: str = "packmamba") -> int:
    """The command's exit status. Without arguments it reads those of this process."""
    if argv is None:
        keep_freed_memory()
    parser = Parser(prog=prog, description="Train Mamba on documents of different lengths, packed without leaks.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=Parser)
    for name, function, text in (
        ("demo", demo, "train a small model under every scheme and show the report"),
        ("train", train, "train one model; the same command again goes on where it stopped"),
        ("sweep", sweep, "train a grid of runs and report on them"),
        ("bench", bench, "measure: packing, ..."),
        ("report", report, "tables, figures and report.html from a folder's records"),
        ("kernels", kernels, "build the compiled kernels for this machine, or say which are built"),
        ("doctor", doctor, "what runs here and what is missing"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        if name in ("train", "sweep"):
            command.add_argument("config", help="a YAML file below configs/")
        if name == "bench":
            command.add_argument("config", help="an experiment, <experiment>/<bench>, or a YAML file")
        if name in ("demo", "train", "sweep", "bench"):
            command.add_argument(
                "overrides", nargs="*", default=[], metavar="key=value", help="keys, such as data.strategy=best_fit"
            )
        if name == "kernels":
            command.add_argument("action", choices=("build", "info"), help="build, or only look")
        if name == "report":
            command.add_argument("folder", help="an experiment, or a folder with records/")
        command.set_defaults(function=function)
    arguments = parser.parse_args(argv)

    from packmamba.errors import UserError

    try:
        arguments.function(arguments)
    except UserError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None:
            raise
        hint = "activate the environment first (source .venv/bin/activate, after make demo or make test)"
        print(f"{prog}: error: the package '{error.name}' is not installed here; {hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = "; the same command goes on from the last checkpoint, if there is one" * (
            arguments.command in ("demo", "train", "sweep")
        )
        print(f"\n{prog}: stopped{goes_on}", file=sys.stderr)
        return 130
    return 0
