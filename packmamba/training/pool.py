"""The runs of a sweep: which is next, how long it may take, and several at a time, each in a worker on a device of its own."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from packmamba.config import Config
from packmamba.data.token_store import load_corpora
from packmamba.errors import ConfigError, Unfinished
from packmamba.training.attempt import attempt
from packmamba.training.callbacks import newest_step
from packmamba.training.claims import taken
from packmamba.training.fit import fit
from packmamba.training.note import NOTE, Outcome, log_path, read_note, write_note
from packmamba.training.places import one_of_several, several_devices
from packmamba.training.ranks import attempt_in_ranks
from packmamba.training.run_id import find_record, record_path, run_folder, training_records
from packmamba.training.signals import Interrupted, Told, terminated_as_interrupted
from packmamba.training.tune import TuneConfig, Tuning
from packmamba.training.worker import Place, Worker

STOP_SECONDS = 10.0
"""Before the deadline, runs are told to stop: they end their step and write a checkpoint."""
NEWS_SECONDS = 60.0
"""Without other news, how long until a line says that runs go on."""

DONE = ("done", "diverged")
"""Outcomes of runs that have a record."""


class Queue:
    """The runs of a sweep in their order. Other processes may train runs of the same sweep at the same time.

    Args:
        begun: of ``time.monotonic``, when the command began.
        seconds: from there to the deadline; None: there is none.
        tuning: runs that come first, and choose for the others.
    """

    def __init__(
        self,
        configs: list[Config],
        progress: bool,
        begun: float = 0.0,
        seconds: float | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self.tuning = tuning or Tuning(TuneConfig(), [])
        self.configs = [*self.tuning.runs, *configs]
        self.undecided = {n for n, config in enumerate(self.configs) if config.name in self.tuning.points}
        self.progress = progress
        self.most = float("inf") if seconds is None else seconds
        self.deadline = begun + self.most
        self.outcomes: dict[int, Outcome] = {}
        self.running: dict[int, float] = {}
        """Of runs that this process trains, when they began."""
        self._corpora: list[Any] = []
        self._warned: set[str] = set()
        self._check_order()
        self._taken: dict[tuple[Path, str], list[float]] = {}
        """By arm, the seconds of the runs that this command has trained."""
        self._recorded: dict[tuple[Path, str], list[float]] = {}
        for number in range(len(self.configs)):
            if self._decide(number) and find_record(self.configs[number]) is not None:
                self.outcomes[number] = Outcome("done")
                self.tuning.check(self.configs[number])
        done = [number for number, outcome in self.outcomes.items() if outcome.state in DONE]
        for folder in {record_path(self.configs[number]).parent for number in done}:
            for record in training_records(folder):
                if "diverged_at_step" not in record["metrics"]:
                    self._recorded.setdefault((folder, record["arm"]), []).append(record["wall_seconds"])

    def next(self) -> int | None:
        """The first run that nobody trains and that there is time for; None: there is none."""
        return next(self.ready(), None)

    def ready(self) -> Iterator[int]:
        """The runs that nobody trains and that there is time for."""
        for number in self.open():
            if not self._decide(number):
                continue
            config = self.configs[number]
            if find_record(config) is not None:
                self.outcomes[number] = Outcome("done")
            elif (
                not self._waits(config)
                and not self._too_long(config)
                and (one_of_several(config) or not taken(run_folder(config)))
            ):
                yield number

    def _waits(self, config: Config) -> bool:
        """Whether it starts from the weights of a run that is still to be trained here."""
        return any(n not in self.outcomes and find_record(self.configs[n]) is None for n in self._before(config))

    def _before(self, config: Config) -> list[int]:
        """The runs here from whose weights it may start."""
        folder, _, arm = str(config.trainer.init_from or "").rpartition(":")
        alike = (n for n, of in enumerate(self.configs) if folder and (of.name, of.seed) == (arm, config.seed))
        return [n for n in alike if os.path.realpath(record_path(self.configs[n]).parent) == os.path.realpath(folder)]

    def _check_order(self) -> None:
        """Refuses a run that would wait for itself. Raises ConfigError."""
        for number, config in enumerate(self.configs):
            reached, ahead = set(), self._before(config)
            while ahead and number not in reached:
                reached.update(ahead)
                ahead = [n for before in ahead for n in self._before(self.configs[before]) if n not in reached]
            if number in reached:
                raise ConfigError(
                    f"trainer.init_from: {config.name}, seed {config.seed}, would start from its own weights; expected those of "
                    "a run that does not start from it"
                )

    def _decide(self, number: int) -> bool:
        """Whether the run's values are known: it may wait for those that choose them."""
        if number in self.undecided and self.tuning.decided(self.configs[number]):
            self.undecided.discard(number)
            try:
                self.configs[number] = self.tuning.choose(self.configs[number])
            except Unfinished as error:
                self.outcomes[number] = Outcome("failed", why=str(error))
                return False
        return number not in self.undecided

    def open(self) -> list[int]:
        """Runs without an outcome that this process does not train."""
        return [n for n in range(len(self.configs)) if n not in self.outcomes and n not in self.running]

    def take(self, number: int, place: str = "") -> None:
        self.running[number] = time.monotonic()
        self.say(number, f"begins on {place}" if place else "begins")

    def close(self, number: int, outcome: Outcome, place: str = "") -> None:
        """Notes what became of a run that was taken."""
        config = self.configs[number]
        seconds = time.monotonic() - self.running.pop(number)
        if outcome.state == "taken":
            return
        outcome = outcome._replace(seconds=outcome.seconds or seconds)
        self.outcomes[number] = outcome
        if outcome.state == "done":
            self.tuning.check(config)
        if outcome.state == "done" and outcome.seconds:
            self._taken.setdefault(_arm(config), []).append(outcome.seconds)
        end = f", validation loss {outcome.loss:.4f}" if outcome.loss is not None else ""
        why = f": {outcome.why}" if outcome.why else ""
        log = f" (see {log_path(config)})" if outcome.state == "failed" and place else ""
        self.say(
            number, f"{outcome.state} after {outcome.seconds:.0f} s{f' on {place}' if place else ''}{end}{why}{log}"
        )

    def warn(self, number: int, warnings: Iterable[str]) -> None:
        """Says what a run, whose own output nobody watches, warned of; of equal ones the first."""
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                self.say(number, f"warning: {warning}")

    def put_back(self, number: int, where: str) -> None:
        """A run that found no memory beside others: it begins again, or goes on, when a place is free."""
        config, seconds = self.configs[number], time.monotonic() - self.running.pop(number)
        write_note(run_folder(config) / NOTE, read_note(config) | {"state": "stopped"})
        self.say(number, f"out of memory after {seconds:.0f} s {where}")

    def say(self, number: int, what: str) -> None:
        if self.progress:
            config = self.configs[number]
            print(f"[{number + 1}/{len(self.configs)}] {config.name}, seed {config.seed}: {what}", flush=True)

    def say_what_is_done(self) -> None:
        """Before the first run begins: a line for each arm."""
        seeds: dict[str, list[str]] = {}
        for number in self.outcomes:
            seeds.setdefault(self.configs[number].name, []).append(str(self.configs[number].seed))
        for arm, done in seeds.items() if self.progress else ():
            print(f"done before: {arm}, seed{'s' * (len(done) > 1)} {', '.join(done)}", flush=True)

    def prepare(self, number: int) -> None:
        """Makes the run's corpus unless it has been seen. Raises ConfigError if it cannot be made."""
        data = self.configs[number].data
        if data not in self._corpora:
            load_corpora(data, progress=self.progress)
            self._corpora.append(data)

    def prepare_ahead(self) -> bool:
        """Makes the first corpus that has not been seen, leaving a refusal to its run; False: there is none."""
        for number in self.open():
            if (data := self.configs[number].data) not in self._corpora:
                try:
                    self.prepare(number)
                except ConfigError:
                    self._corpora.append(data)
                return True
        return False

    def expected(self, config: Config) -> float | None:
        """Seconds that the run still needs: as its arm took, else as all arms took; None if nothing is known. What this command
        has seen counts first: records may be of another machine, or of one that did other work, too."""
        of_arm = self._taken.get(_arm(config)) or self._recorded.get(_arm(config))
        known = of_arm or [second for seen in (self._taken or self._recorded).values() for second in seen]
        done = newest_step(run_folder(config) / "checkpoints") / config.trainer.max_steps
        return statistics.median(known) * (1 - done) if known else None

    def _too_long(self, config: Config) -> bool:
        """Whether the run would be cut now, and not if it began with the command."""
        left, seconds = self.deadline - STOP_SECONDS - time.monotonic(), self.expected(config)
        return left < 0 or (seconds is not None and left < seconds < self.most - STOP_SECONDS)

    def check(self) -> None:
        """Raises Unfinished unless every run is done."""
        states = [outcome.state for outcome in self.outcomes.values()]
        total, failed, done = len(self.configs), states.count("failed"), sum(state in DONE for state in states)
        if failed:
            for number, outcome in sorted(self.outcomes.items()):
                if outcome.state == "failed":
                    self.say(number, f"failed: {outcome.why}")
            raise Unfinished(
                f"{failed} of {total} runs failed, {done} are done; the same command tries the others again"
            )
        if done < total:
            others = sum(taken(run_folder(self.configs[number])) for number in self.open())
            elsewhere = f", {others} are trained by other processes" if others else ""
            kept = f", {STOP_SECONDS:.0f} of the deadline's {self.most:g} seconds are kept for stopping"
            short = kept if self.most < 2 * STOP_SECONDS else ""
            next_time = "the same command goes on" if self.most > STOP_SECONDS else "give a longer one"
            raise Unfinished(f"{done} of {total} runs are done{elsewhere}{short}; {next_time}", status=3)


def _arm(config: Config) -> tuple[Path, str]:
    """The folder of the run's sweep, and its arm there."""
    return record_path(config).parent, config.name


def run_one_by_one(queue: Queue) -> None:
    """In this process."""
    while (number := queue.next()) is not None:
        config = queue.configs[number]
        queue.take(number)
        if one_of_several(config):
            # What goes wrong in it is not its own business.
            queue.close(number, Outcome("done", loss=fit(config, queue.progress)["metrics"]["val_loss"]))
        elif several_devices(config):
            queue.close(number, _attempt_in_ranks(config, queue.progress))
        else:
            with terminated_as_interrupted():
                queue.close(number, attempt(config, "the sweep's own process", queue.progress))


def _attempt_in_ranks(config: Config, progress: bool) -> Outcome:
    """Told to end, it ends the run's ranks as Ctrl-C ends a run; told again by a person, at once."""
    told = Told()
    with told.heard():
        told.looks = True
        outcome = attempt_in_ranks(config, "processes of its own", lambda: bool(told.signal), progress, at_once=True)
        told.looks = False
    if told.signal:
        raise Interrupted(told.signal, outcome.why if outcome.state == "stopped" else "")
    return outcome


def run_side_by_side(queue: Queue, places: list[Place]) -> None:
    """A worker in each place takes the next run whenever it is free."""
    workers = [Worker(place) for place in places[: len(queue.open())]]
    busy: dict[int, int] = {}  # of workers, the run that each trains
    room = Room([worker.place.name for worker in workers])
    heard = time.monotonic()
    with terminated_as_interrupted():
        try:
            if (first := queue.next()) is not None:
                queue.prepare(first)  # one that cannot be made is refused before any work
            while True:
                for which in room.open - busy.keys():
                    if (number := queue.next()) is not None:
                        room.take(which, busy.keys())
                        queue.take(number, workers[which].place.name)
                        if workers[which].ended:
                            workers[which] = Worker(workers[which].place)
                        workers[which].begin(queue.configs[number], queue.deadline - STOP_SECONDS)
                        busy[which] = number
                if not busy:
                    return
                pipes = {workers[which].pipe: which for which in busy}
                if not (ready := wait(pipes, 0)) and queue.prepare_ahead():
                    continue
                ready = ready or wait(pipes, min(NEWS_SECONDS, max(0.0, queue.deadline - time.monotonic())))
                for pipe in ready:
                    which = pipes[pipe]  # type: ignore[index]
                    close(queue, workers[which], busy.pop(which), room, which)
                    heard = time.monotonic()
                if time.monotonic() >= queue.deadline:
                    for which, number in busy.items():
                        workers[which].end()
                        queue.close(number, Outcome("stopped", why="cut at the deadline"), workers[which].place.name)
                    return
                if time.monotonic() - heard >= NEWS_SECONDS and queue.progress:
                    heard = time.monotonic()
                    print(f"{len(queue.outcomes)} of {len(queue.configs)} runs are over, {len(busy)} go on", flush=True)
        finally:
            for worker in workers:
                worker.stop()
            for which, worker in enumerate(workers):
                worker.end(STOP_SECONDS if which in busy else 0)


class Room:
    """How many runs go side by side in places of the same name, such as one GPU: one fewer, once one found no memory there.
    One more goes again after as many runs have ended as go side by side, after twice as many if that was too many.

    Args:
        names: of the places.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.open = set(range(len(names)))
        self._patience: Counter[str] = Counter()
        """Of names, after how many ended runs one more place opens there."""
        self._ended: Counter[str] = Counter()
        self._tried: set[str] = set()
        """Names where a place has been opened again since one was closed."""
        self._accompanied: set[int] = set()
        """Of places, those whose run has had others beside it."""

    def take(self, which: int, busy: Iterable[int]) -> None:
        """A run begins in a place, beside those in others."""
        beside = [other for other in busy if self.names[other] == self.names[which]]
        self._accompanied.discard(which)
        self._accompanied.update([which, *beside] if beside else [])

    def leave(self, which: int) -> int:
        """A run found no memory: its place is closed if it had others beside it. Returns how many are left open there; 0: it was
        alone, which says nothing of other runs, so that all open again."""
        name, alike = self.names[which], self._alike(which)
        if which not in self._accompanied:
            self.open |= alike
            return 0
        if len(self.open & alike) > 1:
            self.open.discard(which)
        left = len(self.open & alike)
        self._patience[name] = max(left, self._patience[name] * (2 if name in self._tried else 1))
        self._tried.discard(name)
        self._ended[name] = 0
        return left

    def end(self, which: int) -> int:
        """A run ended otherwise. Returns how many places are open there if one of them opened now, otherwise 0."""
        name, alike = self.names[which], self._alike(which)
        self._ended[name] += 1
        if alike <= self.open or self._ended[name] < self._patience[name]:
            return 0
        self._ended[name] = 0
        self._tried.add(name)
        self.open.add(min(alike - self.open))
        return len(self.open & alike)

    def _alike(self, which: int) -> set[int]:
        """Places of its name."""
        return {other for other, name in enumerate(self.names) if name == self.names[which]}


def close(queue: Queue, worker: Worker, number: int, room: Room, which: int) -> None:
    """Takes the outcome of a worker's run. After a failure the process ends: the next run gets a fresh one. A run that found no
    memory beside others waits for its next turn."""
    outcome = worker.outcome()
    queue.warn(number, worker.warnings)
    if outcome is None:
        outcome = Outcome("failed", why=f"its process ended with {worker.end()}")
    if outcome.state == "failed":
        worker.end(STOP_SECONDS)
    if outcome.out_of_memory and (left := room.leave(which)):
        queue.put_back(number, f"on {worker.place.name} beside others: {left} at a time there for now")
        return
    queue.close(number, outcome, worker.place.name)
    if outcome.state in DONE and (more := room.end(which)) and queue.progress:
        print(f"{worker.place.name}: {more} at a time again", flush=True)
