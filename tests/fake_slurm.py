"""A cluster in a folder: sbatch, srun, sacct, scontrol, scancel as far as submitit uses them. It preempts and kills as planned.

``install`` puts the programs into a folder for PATH; each is this file under another name. A controller process for each array
starts its tasks, so many at a time as the array says, sends signals, and starts tasks again that were requeued, by their job or,
like PreemptMode=REQUEUE, by the cluster. ``plan.json`` holds for each task, by its number in its array, what happens to its first
start, its second, and so on; what the cluster was asked and did stands in ``log``, a line each.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("sbatch", "srun", "sacct", "scontrol", "scancel")
GRACE = 20.0
"""Seconds between SIGTERM and SIGKILL."""


def install(folder: Path, plan: dict[int, list[str]], python: str = sys.executable) -> dict[str, str]:
    """The environment in which programs find this cluster. What may be planned: ``usr2``, ``term``, ``both`` (the latter and then
    the former), ``timeout`` and ``oom`` (killed without a word)."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in PROGRAMS:
        path = programs / name
        path.write_text(
            f'#!/bin/sh\nexec {shlex.quote(python)} -S {shlex.quote(str(Path(__file__).resolve()))} {name} "$@"\n'
        )
        path.chmod(0o755)
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "log").touch()
    return {"PATH": f"{programs}:{os.environ['PATH']}", "FAKE_SLURM": str(folder)}


def log(*words: object) -> None:
    with open(root() / "log", "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def root() -> Path:
    return Path(os.environ["FAKE_SLURM"])


def sbatch(script: str) -> None:
    text = Path(script).read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
    number = 100
    while True:
        try:
            (root() / f"{number}").mkdir()
            break
        except FileExistsError:
            number += 1
    (root() / f"{number}" / "script.sh").write_text(text)
    last, most = map(int, re.fullmatch(r"0-(\d+)%(\d+)", options.get("array", "0-0%1")).groups())
    for task in range(last + 1):
        say(number, task, state="PENDING")
    log("sbatch", number, json.dumps(options))
    command = [
        sys.executable,
        "-S",
        __file__,
        "control",
        str(number),
        str(last + 1),
        str(most),
        str("array" in options),
    ]
    nothing = subprocess.DEVNULL
    with open(root() / "errors", "a") as errors:
        subprocess.Popen(command, start_new_session=True, stdin=nothing, stdout=nothing, stderr=errors)
    print(f"Submitted batch job {number}")


def state_file(job: object, task: object) -> Path:
    return root() / str(job) / f"{task}.json"


def say(job: object, task: object, **values: object) -> None:
    path = state_file(job, task)
    before = json.loads(path.read_text()) if path.exists() else {}
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(before | values))
    os.replace(temporary, path)


def srun(*arguments: str) -> None:
    words = list(arguments)
    job, task = os.environ["FAKE_JOB"], os.environ["FAKE_TASK"]
    name = f"{job}_{task}" if "SLURM_ARRAY_JOB_ID" in os.environ else job
    while words[0].startswith("--"):
        option = words.pop(0)
        if option in ("--output", "--error"):
            path = words.pop(0).replace("%A_%a", name).replace("%j", name).replace("%t", "0")
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1 if option == "--output" else 2)
    (root() / job / f"{task}.pid").write_text(str(os.getpid()))
    os.execvp(words[0], words)


def sacct(*arguments: str) -> None:
    print("JobID|State|NodeList")
    for job in (word for before, word in zip(arguments, arguments[1:]) if before == "-j"):
        for path in sorted((root() / job).glob("*.json")):
            state = json.loads(path.read_text())["state"]
            print(f"{job}_{path.stem}|{state}|node1")
            if (root() / job / "single").exists():
                print(f"{job}|{state}|node1")


def named(name: str) -> tuple[str, str]:
    job, _, task = name.partition("_")
    return job, task or "0"


def scontrol(verb: str, name: str) -> None:
    job, task = named(name)
    log(verb, job, task)
    (root() / job / f"{task}.requeue").touch()


def scancel(*arguments: str) -> None:
    job, task = named(next(word for word in arguments if not word.startswith("-")))
    log("scancel", job, task)
    (root() / job / f"{task}.cancel").touch()


class Task:
    """One task of an array."""

    def __init__(self, job: str, number: int, planned: list[str], array: bool) -> None:
        self.job, self.number, self.planned, self.array = job, number, planned, array
        self.starts = 0
        self.process: subprocess.Popen | None = None
        self.over = False
        self.killed_at = 0.0
        self.ends_as = ""
        self.sent = False

    def file(self, ending: str) -> Path:
        return root() / self.job / f"{self.number}.{ending}"

    def start(self) -> None:
        self.file("pid").unlink(missing_ok=True)
        raw = int(self.job) * 1000 + self.number if self.array else self.job
        said = {
            "JOB_ID": raw,
            "NTASKS": 1,
            "PROCID": 0,
            "LOCALID": 0,
            "NODEID": 0,
            "JOB_NUM_NODES": 1,
            "JOB_NODELIST": "node1",
        }
        said |= {"ARRAY_JOB_ID": self.job, "ARRAY_TASK_ID": self.number} if self.array else {}
        environment = {f"SLURM_{name}": str(value) for name, value in said.items()}
        environment |= {"SLURM_JOB_NAME": "sweep", "FAKE_JOB": self.job, "FAKE_TASK": str(self.number)}
        script = str(root() / self.job / "script.sh")
        self.process = subprocess.Popen(["bash", script], env={**os.environ, **environment}, start_new_session=True)
        self.sent, self.killed_at, self.ends_as = False, 0.0, ""
        self.starts += 1
        log("start", self.job, self.number)
        say(self.job, self.number, state="RUNNING")

    @property
    def happens(self) -> str:
        """What is planned for this start."""
        return self.planned[self.starts - 1] if self.starts <= len(self.planned) else ""

    def pid(self) -> int | None:
        return int(self.file("pid").read_text() or 0) if self.file("pid").exists() else None

    def signal(self, *signals: int) -> None:
        """To every process of the task but its shell, as SLURM sends them."""
        marks = {f"FAKE_SLURM={root()}".encode(), f"FAKE_JOB={self.job}".encode(), f"FAKE_TASK={self.number}".encode()}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if int(path.name) == self.process.pid or not marks <= {*(path / "environ").read_bytes().split(b"\0")}:
                    continue
                for one in signals:
                    os.kill(int(path.name), one)
            except OSError:
                continue

    def listens(self) -> bool:
        """Whether its process has begun to train, or at least to heed SIGUSR2 and SIGALRM."""
        try:
            status = Path(f"/proc/{self.pid()}/status").read_text()
        except OSError:
            return False
        caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
        return all(caught >> (one - 1) & 1 for one in (signal.SIGUSR2, signal.SIGALRM))

    def look(self) -> None:
        """What is due now."""
        if self.process.poll() is not None:
            if self.file("requeue").exists() or self.ends_as == "REQUEUE":
                self.file("requeue").unlink(missing_ok=True)
                self.process = None
                say(self.job, self.number, state="PENDING")
                return
            self.over = True
            state = self.ends_as or ("COMPLETED" if self.process.returncode == 0 else "FAILED")
            log("end", self.job, self.number, state)
            say(self.job, self.number, state=state)
            return
        if self.file("cancel").exists() and not self.killed_at:
            self.ends_as, self.killed_at = "CANCELLED by 1000", time.monotonic() + 3
            self.signal(signal.SIGTERM)
        if self.file("requeue").exists() and not self.killed_at:
            self.killed_at = time.monotonic() + GRACE
        if self.happens and not self.sent and self.listens():
            self.sent = True
            time.sleep(0.1)
            log(self.happens, self.job, self.number)
            if self.happens == "usr2":
                self.signal(signal.SIGUSR2)
            if self.happens == "both":
                self.signal(signal.SIGTERM, signal.SIGUSR2)
            if self.happens == "term":
                self.signal(signal.SIGTERM)
                self.ends_as, self.killed_at = "REQUEUE", time.monotonic() + float(os.environ.get("FAKE_GRACE", GRACE))
            if self.happens in ("timeout", "oom"):
                self.ends_as, self.killed_at = (
                    {"timeout": "TIMEOUT", "oom": "OUT_OF_MEMORY"}[self.happens],
                    time.monotonic(),
                )
        if self.killed_at and time.monotonic() >= self.killed_at:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def control(job: str, count: str, most: str, array: str) -> None:
    """Runs an array until all its tasks are over."""
    plan = json.loads((root() / "plan.json").read_text())
    if array != "True":
        (root() / job / "single").touch()
    tasks = [Task(job, number, plan.get(str(number), []), array == "True") for number in range(int(count))]
    while not all(task.over for task in tasks):
        for task in tasks:
            if task.process is not None and not task.over:
                task.look()
        free = int(most) - sum(task.process is not None and not task.over for task in tasks)
        for task in [task for task in tasks if task.process is None and not task.over][: max(0, free)]:
            task.start()
        time.sleep(0.02)


if __name__ == "__main__":
    {function.__name__: function for function in (sbatch, srun, sacct, scontrol, scancel, control)}[sys.argv[1]](
        *sys.argv[2:]
    )
