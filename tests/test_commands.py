"""Commands as a user types them, and mistypes them."""

import errno
import os
import platform
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import run
from packmamba import cli
from packmamba.config import ConfigError, load_config
from packmamba.experiments import run_bench
from processes import fork, run_py, statuses
from runs import write_documents

MISTAKES = {
    "a command": (["trian", "configs/train.yaml"], "unknown command 'trian'; did you mean 'train'?"),
    "a later command": (["frobnicate"], "unknown command 'frobnicate'"),
    "a key": (["train", "configs/train.yaml", "data.stratgy=x"], "did you mean 'data.strategy'?"),
    "a sweep's key": (
        ["sweep", "experiments/downstream/speed.yaml", "throughput_round=2"], "did you mean 'throughput_rounds'?"),
    "a run's key in a sweep": (
        ["sweep", "experiments/downstream/speed.yaml", "max_steps=3"], "did you mean 'trainer.max_steps'?"),
    "a section": (["train", "configs/train.yaml", "data=3"], "'data' in 'data=3' is a section"),
    "a value": (["train", "configs/train.yaml", "trainer.max_steps=many"], "trainer.max_steps"),
    "a missing file": (["train", "configs/missing.yaml"], "configs/missing.yaml does not exist"),
    "no assignment": (["train", "configs/train.yaml", "best_fit"], "expected key=value, got 'best_fit'"),
    "a key without its section": (["train", "configs/train.yaml", "max_steps=3"], "did you mean 'trainer.max_steps'?"),
    "a name of two sections' keys": (
        ["train", "configs/train.yaml", "strategy=greedy"], "did you mean 'data.strategy' or 'trainer.strategy'?"),
    "dashes": (["train", "configs/train.yaml", "--max_steps", "3"], "settings have no dashes: key=value"),
    "a folder as a file": (["train", "configs"], "configs is a folder; expected a YAML file"),
    "two runs": (["generate", "runs/mine-1", "runs/mine-2", "a text"], "got 'a text'; a pattern such as runs/mine-*"),
    "two runs to export": (["export", "runs/mine-1", "runs/mine-2", "new"], "unexpected new; a pattern such as runs/mine-*"),
    "a strategy": (["train", "configs/train.yaml", "data.strategy=best-fit"], "did you mean 'best_fit'?"),
    "a long document": (
        ["train", "configs/train.yaml", "data.overlong=error", "data.row_length=16"], "data.row_length=16 is shorter"),
    "carry": (["train", "configs/train.yaml", "trainer.boundary=carry"], "needs data.strategy=split"),
    "a source's file": (
        ["train", "configs/train.yaml", "data.source=jsonl", "data.path=missing.jsonl"], "missing.jsonl"),
    "a backend": (["train", "configs/train.yaml", "ops.backend=cuda", "trainer.accelerator=cpu"], "ops.backend: 'cuda'"),
    "a model size": (["train", "configs/train.yaml", "model=13b"], "known sizes: 1.4b, 130m"),
    "a precision": (["train", "configs/train.yaml", "trainer.precision=8"], "trainer"),
    "a folder": (["report", "experiments/missing"], "experiments/missing"),
    "a sweep's file": (["train", "configs/demo.yaml"], "python run.py sweep configs/demo.yaml"),
    "a bench's file": (["train", "experiments/packing/packing.yaml"], "python run.py bench experiments/packing/packing.yaml"),
    "a folder that cannot be": (
        ["train", "configs/train.yaml", "data.strategy=greedy", "runs_dir=/proc/runs"], "runs_dir: /proc/runs/"),
    "a bench": (["bench", "experiments/packing/packing.yaml", "bench=speed"], "bench: expected one of packing"),
    "a list as a bench's output": (["bench", "packing", "output=[a]"], "output: expected a folder, got ['a']"),
    "a word as a bench's plugins": (["bench", "packing", "plugins=word"], "plugins: expected a list, such as [a,b], got 'word'"),
    "a bench of a run": (["bench", "configs/train.yaml"], "python run.py train configs/train.yaml"),
    "a bench of a sweep": (["bench", "configs/demo.yaml"], "python run.py sweep configs/demo.yaml"),
    "a sweep of a run": (["sweep", "configs/train.yaml"], "python run.py train configs/train.yaml"),
    "a sweep of a bench": (["sweep", "experiments/speedup/speedup.yaml"], "python run.py bench experiments/speedup/speedup.yaml"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_typo_is_one_sentence_and_status_2(name, tmp_path, capsys):
    arguments, message = MISTAKES[name]
    if arguments[0] == "train":  # on a few documents, unless the mistake says otherwise
        files = ["data.source=jsonl", f"data.path={write_documents(tmp_path)}", f"data.cache_dir={tmp_path}"]
        arguments = [*arguments[:2], *files, *arguments[2:]]
    try:
        status = run.main(arguments)
    except SystemExit as exit:
        status = exit.code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert status == 2
    assert len(lines) == 1 and lines[0].startswith("run.py: error: ") and message in lines[0]


@pytest.mark.slow
def test_a_typo_in_the_shell():
    process = run_py("train", "configs/train.yaml", "data.strategy=best-fit")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and output == ""
    assert len(errors.splitlines()) == 1 and "did you mean 'best_fit'?" in errors


def test_the_help_of_train_has_a_sentence_for_each_key(capsys):
    with pytest.raises(SystemExit):
        run.main(["train", "--help"])
    output = capsys.readouterr().out
    assert "data.validation_fraction=0.05: Share of source files" in output and "model.compile=false: " in output


def test_doctor_needs_no_gpu(capsys):
    assert run.main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "reference: available" in output and "PyTorch" in output
    assert "mamba_ssm: missing: needs " in output


@pytest.mark.gpu
def test_doctor_names_a_gpu(capsys):
    assert run.main(["doctor"]) == 0
    assert f"GPU 0: {torch.cuda.get_device_name(0)}, " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["train", "x"], ["bench", "x"]])
def test_what_goes_on_after_an_interruption(arguments, monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, arguments[0], interrupted)
    assert run.main(arguments) == 130
    assert ("goes on from the last checkpoint" in capsys.readouterr().err) is (arguments[0] == "train")


def test_a_bench_into_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="^output: .* cannot be written"):
        run_bench("experiments/packing/packing.yaml", [f"output={tmp_path}/file", "num_documents=100"])


def test_configs_are_read_strictly(tmp_path):
    config = load_config("configs/train.yaml", ["model=130m", "data.strategy=best_fit"])
    assert (config.model.d_model, config.model.n_layer, config.model.vocab_size) == (768, 24, 50280)
    path = tmp_path / "broken.yaml"
    path.write_text("data: [1, 2\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(path)
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="not a list"):
        load_config(path)


def count_page_faults(keep):
    if keep:
        cli.keep_freed_memory()
    faults = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(sorted(faults)[10])  # up to seven find no freed block: glibc keeps as many of their remainders apart


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.slow
def test_freed_memory_is_kept(tmp_path):
    faults = []
    for keep in (False, True):
        assert statuses(fork(count_page_faults, keep, output=tmp_path / str(keep))) == [0]
        faults.append(int((tmp_path / str(keep)).read_text()))
    assert faults[0] > 4 * faults[1], faults  # 64 MiB are 32 pages or 16384


OPENMP = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))


@pytest.mark.skipif(not OPENMP, reason="another OpenMP")
@pytest.mark.parametrize(("named", "spins"), [({}, "1000"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")])
def test_threads_that_wait_sleep_soon(named, spins):
    """As OpenMP says itself; what the user says comes first."""
    code = f"import ctypes; from packmamba import cli; cli.limit_spinning(); ctypes.CDLL('{OPENMP[0]}')"
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment = {**kept, "OMP_DISPLAY_ENV": "verbose", **named}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


@pytest.mark.parametrize(
    ("command", "name"), [("bench", "speedup/multi_gpu"), ("report", "schemes"), ("reproduce", "packing")]
)
def test_without_a_name_a_command_lists_what_there_is(command, name, capsys):
    assert run.main([command]) == 0
    assert name in dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("read", [True, False])
def test_output_that_nobody_reads_any_more_ends_a_command_without_a_word(monkeypatch, capsys, read):
    """As of ``| head``: with the status of SIGPIPE."""
    end, other = os.pipe()
    with open(other, "w") as unread, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", unread)
        if not read:
            os.close(end)
        assert cli.main(["bench"]) == (0 if read else 128 + signal.SIGPIPE)
    assert not capsys.readouterr().err
    if read:
        os.close(end)


def test_another_pipe_that_breaks_is_said(monkeypatch, capsys):
    def breaks(_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setitem(cli.COMMANDS, "bench", breaks)
    end, other = os.pipe()
    with open(end), open(other, "w") as read, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", read)
        assert cli.main(["bench"]) == 2
    assert "broken pipe" in capsys.readouterr().err
