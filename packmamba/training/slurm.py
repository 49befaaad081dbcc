"""The runs of a sweep as jobs of SLURM: an array with a job for each, watched until all are over. Needs submitit."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from packmamba.config import Config, ConfigError, Holds, at_least, key
from packmamba.training.claims import Taken, alone, taken
from packmamba.training.note import Outcome, read_note
from packmamba.training.run_id import find_record, run_folder
from packmamba.training.worker import ROOT

if TYPE_CHECKING:
    import submitit

    from packmamba.training.job import Train
    from packmamba.training.pool import Queue

POLL_SECONDS = 5.0
OVER_SECONDS = 60.0
"""A job that was preempted and is not back in the queue after so long is not requeued by SLURM."""
MOST_REQUEUES = 1000
"""Of submitit, which counts those at time limits: ours end where no run goes on (``packmamba.training.job``)."""
PER_DEVICE = ("gpus_per_node", "cpus_per_task")
UNITS = {"m": 1, "h": 60, "d": 24 * 60}
_TIME = re.compile(r"([1-9]\d*)([mhd])")


@dataclass
class SlurmConfig:
    partition: Optional[str] = key(None, "Partition of the jobs; null for the cluster's own choice.")
    time: str = key(
        "4h",
        "Time limit of a job, in minutes, hours or days; a run that needs longer goes on in the next job.",
        Holds("minutes, hours or days, such as 30m, 12h or 2d", lambda value: bool(_TIME.fullmatch(value))),
    )
    gpus: int = key(
        1,
        "GPUs of a job for each of its run's trainer.devices.",
        Holds("1, or 0 for runs on the CPU", lambda value: value in (0, 1)),
    )
    cpus: int = key(4, "Cores of a job for each of its run's trainer.devices.", at_least(1))
    memory: Optional[str] = key(
        None,
        "Memory of each job; null for the cluster's own choice.",
        Holds("a size, such as 32GB", lambda value: bool(re.fullmatch(r"[1-9]\d*[KMGT]B?", value))),
    )
    grace: int = key(
        90, "Seconds before a time limit at which SLURM tells a job, which then writes a checkpoint.", at_least(2)
    )
    setup: list[str] = key([], "Lines of shell that each job begins with, such as [module load cuda].")
    options: dict[str, Any] = key({}, "Further options of sbatch, such as {account: mine, qos: low}.")

    @property
    def minutes(self) -> int:
        number, unit = _TIME.fullmatch(self.time).groups()  # type: ignore[union-attr]
        return int(number) * UNITS[unit]

    def problems(self) -> Iterator[str]:
        if self.grace >= 60 * self.minutes:
            yield f"slurm.grace: expected less than slurm.time, which is {self.time}, got {self.grace} seconds"


def slurm_executor(slurm: SlurmConfig, jobs: int | str, name: str, output: str) -> submitit.Executor:
    """Raises ConfigError where there is no submitit or no SLURM."""
    try:
        import submitit
    except ModuleNotFoundError:
        raise ConfigError(
            "launcher: slurm needs the package submitit, which is not installed: pip install 'packmamba[slurm]'"
        ) from None
    if lacking := [program for program in ("sbatch", "srun", "sacct", "scontrol") if shutil.which(program) is None]:
        raise ConfigError(f"launcher: slurm needs a machine that submits jobs, and {lacking[0]} is not found here")
    executor = submitit.SlurmExecutor(folder=Path(output).absolute() / "jobs", max_num_timeout=MOST_REQUEUES)
    given = {"partition": slurm.partition, "mem": slurm.memory, "gpus_per_node": slurm.gpus or None}
    executor.update_parameters(
        job_name=re.sub(r"[^\w.-]+", "-", name), time=slurm.minutes, cpus_per_task=slurm.cpus, signal_delay_s=slurm.grace,
        array_parallelism=100_000 if jobs == "auto" else jobs, additional_parameters=slurm.options, setup=slurm.setup,
        **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    return executor


def run_as_jobs(queue: Queue, executor: submitit.Executor, grace: float, train: Train | None = None) -> None:
    """Submits a job for each run that nobody trains and none is submitted for, and waits until all are over.

    Other launchers may do the same for the same sweep. Interrupted, jobs go on, and the same command watches them again.

    Args:
        grace, train: see ``packmamba.training.job.Job``.
    """
    # Jobs find this code wherever they start.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    watched: dict[int, submitit.Job] = {}
    preempted: dict[int, float] = {}
    try:
        while True:
            with contextlib.suppress(Taken):  # another launcher submits: look again
                watched |= _submit(queue, executor, grace, train)
            for number, job in list(watched.items()):
                config = queue.configs[number]
                outcome = _outcome(config, job)
                if job.state != "PREEMPTED" or taken(run_folder(config)):
                    preempted.pop(number, None)
                elif time.monotonic() - preempted.setdefault(number, time.monotonic()) > OVER_SECONDS:
                    outcome = Outcome("taken")  # by the cluster, for good: another job takes it up
                if outcome is not None:
                    del watched[number]
                    queue.close(number, outcome, f"job {job.job_id}")
            if not watched and not any(taken(run_folder(queue.configs[n])) for n in queue.open()):
                if next(queue.ready(), None) is None:
                    return
                continue
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        if watched and queue.progress:
            print(f"{len(watched)} jobs go on; the same command watches them, scancel ends them", flush=True)
        raise


def _submit(queue: Queue, executor: submitit.Executor, grace: float, train: Train | None) -> dict[int, submitit.Job]:
    """The jobs of all runs that are free: those that they have in the queue already, else new ones, in one array."""
    from packmamba.training.job import Job, say

    found: dict[int, submitit.Job] = {}
    new: list[int] = []
    with alone(Path(executor.folder), "output", "submits this sweep's jobs"):
        for number in list(queue.ready()):
            if (job := _in_queue(executor, queue.configs[number])) is not None:
                found[number] = job
                queue.say(number, f"is job {job.job_id} already")
            else:
                queue.prepare(number)  # once, here: jobs on machines that do not share locks would meet
                new.append(number)
        for devices in sorted({queue.configs[number].trainer.devices for number in new}):
            alike = [number for number in new if queue.configs[number].trainer.devices == devices]
            array = [Job(queue.configs[number], grace, train) for number in alike]
            for number, job in zip(alike, _of_devices(executor, devices).submit_array(array)):
                found[number] = job
                say(queue.configs[number], state="submitted", job=job.job_id, where=f"job {job.job_id}")
                queue.say(number, f"submitted as job {job.job_id}")
    for number in found:
        queue.running[number] = time.monotonic()
    return found


def _of_devices(executor: submitit.Executor, devices: int) -> submitit.Executor:
    """The same with what so many devices need. A job is one task of SLURM, whose processes the run starts itself."""
    larger = copy.copy(executor)
    needs = {name: devices * executor.parameters[name] for name in PER_DEVICE if name in executor.parameters}
    larger.parameters = {**executor.parameters, **needs}
    return larger


def _in_queue(executor: submitit.Executor, config: Config) -> submitit.Job | None:
    """The job that another launcher, or this command before, has submitted for the run."""
    from submitit import SlurmExecutor

    note = read_note(config)
    if not isinstance(executor, SlurmExecutor) or note.get("state") != "submitted" or "job" not in note:
        return None
    job = executor.job_class(executor.folder, note["job"])
    return job if job.state in ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "SUSPENDED") else None


def _outcome(config: Config, job: submitit.Job) -> Outcome | None:
    """What became of a job; None while it waits or runs."""
    from submitit.core.utils import FailedJobError, UncompletedJobError

    from packmamba.training.job import say

    if not job.done():
        return None
    try:
        return job.result()
    except UncompletedJobError:
        why = f"its job {job.job_id} ended: {job.state.lower()}"
    except FailedJobError as error:
        why = f"its job {job.job_id} failed: {str(error).strip().splitlines()[-1]}"
    if find_record(config) is not None:
        return Outcome("done")
    say(config, state="failed", why=why)
    return Outcome("failed", why=why)
