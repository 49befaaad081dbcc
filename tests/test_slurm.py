"""Sweeps on a cluster: jobs that are preempted, cut and killed, each requeued by one party alone."""

import contextlib
import fcntl
import os
import pickle
import signal
import sys
import time
from collections import Counter

import fake_slurm
import pytest
from stand_in import FAILS, pretend
from test_sweeps import write_sweep

from packmamba.config import ConfigError
from packmamba.errors import Unfinished
from packmamba.records import read_records
from packmamba.training import ranks, slurm
from packmamba.training.callbacks import checkpoints
from packmamba.training.fit import fit
from packmamba.training.note import read_note, state_of
from packmamba.training.pool import Queue
from packmamba.training.run_id import record_path, run_folder
from packmamba.training.sweep import load_sweep, run_sweep
from processes import ROOT, fork, statuses
from runs import losses_of, tiny_config

submitit = pytest.importorskip("submitit")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Makes this machine one of a cluster to which so much happens."""
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(submitit.SlurmJob, "_results_timeout_s", 0)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")

    def make(plan):
        for name, value in fake_slurm.install(tmp_path / "cluster", plan).items():
            monkeypatch.setenv(name, value)

    yield make


def said(tmp_path):
    return [line.split() for line in (tmp_path / "cluster" / "log").read_text().splitlines()]


@pytest.mark.slow
def test_jobs_are_requeued_by_one_party_each(tmp_path, cluster, monkeypatch):
    cluster({0: ["usr2"], 1: ["term"], 2: ["both", "usr2"], 3: ["oom"]})
    monkeypatch.setenv("FAKE_GRACE", "0.5")
    arms = {"good": {"data.strategy": "greedy"}}
    path = write_sweep(tmp_path, throughput_rounds=0, grid={"seed": [0, 1, 2, 7, FAILS]}, arms=arms)
    sweep, configs = load_sweep(path, ["launcher=slurm", "slurm.partition=gpus", "slurm.time=2h", "jobs=5"])
    queue = Queue(configs, progress=False)
    executor = slurm.slurm_executor(sweep.slurm, sweep.jobs, "sweep", sweep.output)
    slurm.run_as_jobs(queue, executor, grace=5, train=pretend)
    with pytest.raises(Unfinished, match="^2 of 5 runs failed, 3 are done"):
        queue.check()
    assert [queue.outcomes[n].state for n in range(5)] == ["done"] * 3 + ["failed"] * 2
    assert [read_note(config)["why"] for config in configs[3:]] == [
        "its job 100_3 ended: out_of_memory",
        "made to fail",
    ]
    assert len(read_records(sweep.output)) == 3
    lines = said(tmp_path)
    assert [line[0] for line in lines].count("sbatch") == 1
    assert (
        "--gres" not in str(lines) and '"partition":' in lines[0] and '"gpus",' in lines[0] and '"0-4%5",' in lines[0]
    )
    starts = Counter(line[2] for line in lines if line[0] == "start")
    requeues = Counter(line[2] for line in lines if line[0] == "requeue")
    assert starts == {"0": 2, "1": 2, "2": 3, "3": 1, "4": 1}
    assert requeues == {"0": 1, "2": 2}, "once each; SIGTERM alone is the cluster's"


def in_a_job(config, told, requeued, train=None):
    """Runs a job here that is sent these signals in its first step; ``requeued`` gets what submitit is asked for."""
    from packmamba.training.job import Job, attempt_in_job

    os.environ |= {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}

    def tells(config, where, stop):
        def asked():
            step = read_note(config)["step"]
            for one in told if not stop() and step >= 0 else ():
                os.kill(os.getpid(), one)
            return stop()

        return attempt_in_job(config, where, asked)

    def requeues(signum, frame):
        requeued.write_text("once" + requeued.read_text() if requeued.exists() else "once")
        sys.exit(3)

    signal.signal(signal.SIGUSR2, requeues)
    Job(config, 60, tells)()


@pytest.mark.slow
@pytest.mark.parametrize("told", [[signal.SIGUSR2], [signal.SIGTERM, signal.SIGUSR2]], ids=["usr2", "both"])
def test_a_job_writes_a_checkpoint_and_goes_on_to_the_same_bits(tmp_path, told):
    """Within Lightning, which has handlers of its own for SIGTERM and in jobs of SLURM."""
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.checkpoint_every=6", "trainer.threads=1")
    expected = fit(tiny_config(tmp_path, "data.strategy=greedy", "trainer.checkpoint_every=6", "trainer.threads=1",
                               f"runs_dir={tmp_path}/whole"), progress=False)  # fmt: skip
    requeued = tmp_path / "requeued"
    assert statuses(fork(in_a_job, config, told, requeued, output=tmp_path / "output.txt")) == [3]
    assert requeued.read_text() == "once"
    (checkpoint,) = checkpoints(run_folder(config) / "checkpoints")
    assert checkpoint.name == "step=1.ckpt"
    assert (state_of(config)["state"], read_note(config)["job"]) == ("submitted", "7")
    assert losses_of(fit(config, progress=False)) == losses_of(expected)


def job_that_is_always_cut(config, requeued):
    from packmamba.training.job import Job
    from packmamba.training.note import Outcome

    os.environ |= {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "7"}
    steps = iter([3, 5, 5, 5, 5])

    def cut(config, where, stop):
        os.kill(os.getpid(), signal.SIGUSR2)
        return Outcome("stopped", step=next(steps))

    class Requeued(Exception):
        pass

    def requeues(signum, frame):
        with open(requeued, "a") as file:
            file.write("x")
        raise Requeued

    job = Job(config, 60, cut)
    while True:
        signal.signal(signal.SIGUSR2, requeues)
        try:
            outcome = job()
        except Requeued:
            continue
        assert outcome.state == "failed", outcome
        return


def test_a_job_that_gets_no_further_is_not_requeued_for_ever(tmp_path):
    config, requeued, output = tiny_config(tmp_path), tmp_path / "requeued", tmp_path / "output.txt"
    assert statuses(fork(job_that_is_always_cut, config, requeued, output=output)) == [0], output.read_text()
    assert requeued.read_text() == "xxxx"
    assert read_note(config)["why"].startswith(
        "its jobs were over 3 times before a new checkpoint; give them more slurm.time"
    )


def hangs(config, where, stop):
    time.sleep(60)


def job_without_steps(config, requeued):
    from packmamba.training.job import Job

    os.environ |= {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "7"}
    signal.signal(signal.SIGUSR2, lambda *_: (requeued.touch(), sys.exit(3)))
    os.kill(os.getpid(), 0)
    job = Job(config, 0.5, lambda *_: (os.kill(os.getpid(), signal.SIGUSR2), hangs(*_)))
    job()


def test_a_job_without_a_step_in_time_is_requeued_all_the_same(tmp_path):
    config, requeued = tiny_config(tmp_path), tmp_path / "requeued"
    assert statuses(fork(job_without_steps, config, requeued, output=tmp_path / "output.txt"), timeout=30) == [3]
    assert requeued.exists()


@pytest.mark.slow
def test_a_second_launcher_submits_nothing_twice(tmp_path, cluster):
    """Two at once; then one that begins while jobs wait for others of their array."""
    cluster({})
    path = write_sweep(tmp_path, throughput_rounds=0, grid={"seed": [0, 1]}, arms={"good": {"data.strategy": "greedy"}})
    output = tmp_path / "output.txt"
    launchers = [fork(launch, path, output=output) for _ in range(2)]
    assert statuses(*launchers) == [0, 0], output.read_text()
    assert [line[0] for line in said(tmp_path)].count("start") == 2
    _, configs = load_sweep(path)
    assert all(record_path(config).is_file() for config in configs)


def launch(path):
    slurm.POLL_SECONDS = 0.05
    sweep, configs = load_sweep(path, ["launcher=slurm"])
    queue = Queue(configs, progress=True)
    slurm.run_as_jobs(queue, slurm.slurm_executor(sweep.slurm, 1, "sweep", sweep.output), 5, pretend)
    queue.check()


RANK = """#!{python} -S
import fcntl, json, os, signal, struct, sys, time
config, pipe, where = sys.argv[3], int(sys.argv[4]), sys.argv[5]
open(sys.argv[0] + ".config", "w").write(config)
told = os.read(pipe, 100) if {waits} else b""
ignores = all(signal.getsignal(one) == signal.SIG_IGN for one in (signal.SIGTERM, signal.SIGUSR2))
said = [told[4:].decode(), 1.0, 2.0, f"{{ignores}} {{[name for name in os.environ if 'SLURM_' in name]}} {{where}}", 7]
file = open(sys.argv[0] + ".lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
if os.fork() == 0:
    os.close(pipe)
    time.sleep(60)
if {says}:
    said = json.dumps(said).encode()
    os.write(pipe, struct.pack("!i", len(said)) + said)
    time.sleep(60)
sys.exit(3)
"""


@pytest.mark.parametrize(("waits", "says"), [(True, True), (False, False)])
def test_ranks_of_a_job_are_told_through_their_pipe_and_end_with_it(tmp_path, monkeypatch, waits, says):
    program = tmp_path / "rank"
    program.write_text(RANK.format(python=sys.executable, waits=waits, says=says))
    program.chmod(0o755)
    monkeypatch.setattr(ranks.sys, "executable", str(program))
    monkeypatch.setenv("SLURM_NTASKS", "1")
    config = tiny_config(tmp_path, "trainer.devices=2")
    outcome = ranks.attempt_in_ranks(config, "job 7", lambda: True)
    if says:
        assert outcome == ("stop", 1.0, 2.0, "True [] job 7", 7)
    else:
        assert outcome == ("failed", 0.0, None, "one of its processes ended with exit status 3", 0)
    with open(f"{program}.lock") as file:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        else:
            pytest.fail("one of them is left")
    assert pickle.loads(bytes.fromhex(program.with_suffix(".config").read_text())) == config


def test_a_job_has_what_all_devices_of_its_run_need():
    executor = submitit.SlurmExecutor.__new__(submitit.SlurmExecutor)
    executor.parameters = {"cpus_per_task": 4, "gpus_per_node": 1, "mem": "32GB"}
    assert slurm._of_devices(executor, 1).parameters == executor.parameters
    assert slurm._of_devices(executor, 4).parameters == {"cpus_per_task": 16, "gpus_per_node": 4, "mem": "32GB"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("launcher=slrm", "^launcher: expected one of local, slurm, got 'slrm'"),
        ("slurm.time=2", "^slurm.time: expected minutes, hours or days, such as 30m, 12h or 2d, got '2'"),
        ("slurm.time=4:00:00", "^slurm.time: expected minutes, hours or days"),
        ("slurm.time=1m", "^slurm.grace: expected less than slurm.time, which is 1m, got 90 seconds"),
        ("slurm.gpus=2", "^slurm.gpus: expected 1, or 0 for runs on the CPU, got 2"),
        ("slurm.gpus=-1", "^slurm.gpus: expected 1, or 0"),
        ("slurm.cpus=0", "^slurm.cpus: expected at least 1, got 0"),
        ("slurm.memory=much", "^slurm.memory: expected a size, such as 32GB or null, got 'much'"),
        ("slurm.partition=''", "^slurm.partition: expected text, got ''"),
        ("slurm.gpu=1", "^unknown key 'slurm.gpu'.*did you mean 'slurm.gpus'"),
        ("deadline=9", "^deadline: expected null with launcher=slurm, whose jobs have slurm.time, got 9"),
        ("throughput_rounds=3", "^throughput_rounds: expected 0 with launcher=slurm"),
        ("trainer.num_nodes=2", "^launcher: slurm trains each run on one machine, got trainer.num_nodes=2"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        load_sweep(write_sweep(tmp_path, throughput_rounds=0), ["launcher=slurm", override])


def test_without_submitit_or_slurm_nothing_begins(tmp_path, monkeypatch):
    sweep, configs = load_sweep(write_sweep(tmp_path, throughput_rounds=0), ["launcher=slurm"])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ConfigError, match="^launcher: slurm needs a machine that submits jobs, and sbatch is not found"
    ):
        run_sweep(sweep, configs, progress=False)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match="^launcher: slurm needs the package submitit, .*packmamba\\[slurm\\]'$"):
        run_sweep(sweep, configs, progress=False)
    assert not (tmp_path / "sweep").exists()
