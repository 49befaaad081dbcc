"""A run's numbers as they go to its loggers: each step once, also where a run goes on; and the loggers of its own folder."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from packmamba.errors import UserError


class OneFile(Logger):
    """csv/version_0/metrics.csv, a row each time something is logged. A run that goes on goes on in it."""

    name, version = "csv", 0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "csv" / "version_0" / "metrics.csv"
        self._names: list[str] = []

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {"step": step, **metrics}
        with self._said():
            if not row.keys() <= set(self._names):
                self._names, rows = self._read()
                if not row.keys() <= set(self._names):
                    self._write(sorted({*self._names, *row}), rows)
            with open(self.path, "a", newline="") as file:
                csv.DictWriter(file, self._names).writerow(row)

    @rank_zero_only
    def go_on_from(self, step: int) -> None:
        """Leaves out what came after this step, and lines that were cut short."""
        names, rows = self._read()
        kept = [row for row in rows if None not in row.values() and row["step"].isdigit() and int(row["step"]) <= step]
        if len(kept) < len(rows):
            with self._said():
                self._write(names, kept)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """They are in the run's folder."""

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"runs_dir: {self.path} could not be written ({error.strerror})") from None

    def _read(self) -> tuple[list[str], list[dict[str, Any]]]:
        if not self.path.is_file():
            return [], []
        try:
            with open(self.path, newline="") as file:
                reader = csv.DictReader(file)
                rows, names = list(reader), list(reader.fieldnames or ())
            if names and "step" not in names:
                raise ValueError("it has no column 'step'")
        except (ValueError, csv.Error) as error:
            aside = self.path.with_name(f"{self.path.name}.damaged")
            os.replace(self.path, aside)
            print(
                f"warning: {self.path} is damaged ({error}); it is now {aside.name}, and begins anew", file=sys.stderr
            )
            return [], []
        return names, rows

    def _write(self, names: list[str], rows: list[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        with open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)
        self._names = names


def tell(loggers: Iterable[Logger], step: int, numbers: Mapping[str, float]) -> None:
    """Hands numbers of a step, counted from 1, to each logger."""
    for logger in loggers:
        logger.log_metrics(dict(numbers), step)
        logger.save()


class Events(TensorBoardLogger):
    """TensorBoard's files in tensorboard/."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="tensorboard", version="")

    @rank_zero_only
    def go_on_from(self, step: int) -> None:
        """Has TensorBoard leave out what came after this step."""
        begins = SessionLog(status=SessionLog.START)
        self.experiment.file_writer.add_event(Event(step=step + 1, session_log=begins))


def go_on_from(loggers: Iterable[Logger], step: int) -> None:
    """Has those that can forget what came after this step, which is trained again."""
    for logger in loggers:
        if isinstance(logger, (OneFile, Events)):
            logger.go_on_from(step)
