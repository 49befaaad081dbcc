"""What a configuration and a machine show is refused at once: before documents are read, and before slow imports."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from made_records import training
from packmamba import MambaLM, SequenceLayout, cli
from packmamba.config import ConfigError, load_config
from packmamba.errors import of_machine, sentence
from packmamba.evaluation import generate, score
from packmamba.evaluation.tasks import TASKS
from packmamba.records import append_record, check_writable, read_records
from packmamba.training import checks, process
from packmamba.training.checks import check_run
from packmamba.training.fit import fit
from processes import ROOT
from runs import tiny_config

TOO_MUCH = {
    "model.d_model=1000000000": "model.d_model: expected at most 1048576",
    "model.d_model=200000": "model: expected to fit into 16 GiB of memory, got [0-9,]+ parameters, .*model.d_model=200000",
    "model.n_layer=2000000": "model.n_layer: expected at most 1048576",
    "model.vocab_size=10000000000": "model.vocab_size: expected 1 to 2",
    "model.vocab_size=4000000000": "model: expected to fit",
    "model.d_state=1000": "model.d_state: expected at most 256, got 1000",
    "data.slots_per_batch=99999999999999": "data.slots_per_batch: expected at most 2147483647",
    "data.slots_per_batch=2147483647": "data.slots_per_batch: 2147483647 slots take .* GiB",
    "data.row_length=2147483647": "data.row_length: 2147483647 slots take",
    "data.num_workers=5000": "data.num_workers: expected at most 1024",
    "trainer.max_steps=1000000000000000000000000": "trainer.max_steps: expected less than 2",
    "trainer.devices=1000": "trainer.devices: expected at most the .* of this machine, got 1000",
    "trainer.num_nodes=2": "trainer.num_nodes: 2 machines need torchrun or SLURM",
    "data.validation_fraction=0": "data.validation_fraction: expected above 0",
    f"name={'n' * 300}": "name: expected at most 255 characters",
    f"name={'n' * 201}": "name: expected at most 200 bytes",
    "runs_dir=''": "runs_dir: expected text, got ''",
    'data.path="a\\0b"': "data.path: expected text without a zero byte",
    "model.compile=7": "model.compile in 'model.compile=7': expected true or false, got 7",
    "model.mixer_options={bias: {}}": "model.bias: expected True or False, got {}",
    "seed=???": "seed in 'seed=...': expected a value, got ...",
}


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """One whose memory these runs would fill, and that no launcher has started."""
    monkeypatch.setattr(checks, "memory", lambda accelerator: 16 << 30)
    for name in process.LAUNCHED:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("override", TOO_MUCH, ids=lambda text: text[:40])
def test_what_cannot_be_is_refused_before_any_work(tmp_path, override):
    with pytest.raises(ConfigError, match=f"^{TOO_MUCH[override]}"):
        check_run(tiny_config(tmp_path, override))
    assert [path.name for path in tmp_path.iterdir()] == ["documents.jsonl"]


def test_memory_counts_every_layer_and_shards(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, "model.d_model=64", "model.n_layer=5", "model.vocab_size=1000")
    parameters = sum(p.numel() for p in MambaLM(1000, 64, 5, d_state=4).parameters())
    monkeypatch.setattr(checks, "memory", lambda accelerator: 8 * parameters)  # float32 weights and their gradients
    check_run(config)
    monkeypatch.setattr(checks, "memory", lambda accelerator: 8 * parameters - 1)
    with pytest.raises(ConfigError, match="^model: expected to fit"):
        check_run(config)
    two = replace(config, trainer=replace(config.trainer, devices=2, strategy="fsdp2"))
    check_run(two)


def test_several_machines_that_a_launcher_started(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    check_run(tiny_config(tmp_path, "trainer.num_nodes=2"))


@pytest.mark.slow
def test_a_wrong_value_waits_for_no_slow_import(tmp_path):
    """Lightning alone takes four seconds to import, torchmetrics two, the harness's index of its tasks twelve."""
    code = (
        "import sys; from packmamba import MambaLM, cli\n"
        "train = ['train', 'data.source=jsonl', f'data.path={sys.argv[1]}']\n"
        "MambaLM(300, 8, 1).save_pretrained('m')\n"
        "for argv in ([*train, 'model.d_state=1000'], [*train, 'data.path=/nowhere'], [*train, 'trainer.precision=8'],\n"
        "             [*train, 'evaluations=[mqar]', 'data.path=/nowhere'], ['sweep', sys.argv[2], 'nope=1'],\n"
        "             ['bench', 'speedup', 'rounds=0'], ['bench', 'speedup/multi_gpu', 'rounds=0'], ['eval', 'nope'],\n"
        "             ['eval', 'm', 'tasks=[no_such_task]'], ['compare', 'a', 'b'], ['reproduce', 'packing', 'nope=1']):\n"
        "    assert cli.main(argv) == 2\n"
        "    assert not {'lightning', 'torchmetrics', 'lm_eval.tasks'} & {*sys.modules}, argv\n"
    )
    words = [sys.executable, "-c", code, __file__, str(ROOT / "configs" / "demo.yaml")]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 11, done.stderr


def test_a_sentence_is_one_line_that_a_terminal_shows():
    assert sentence("a\nb\x1b[31m\0c") == "a b\\x1b[31m\\x00c"
    assert len(sentence("x" * 100_000)) < 1000


def test_what_the_machine_refuses_is_a_sentence():
    assert of_machine(OSError(28, "No space left on device", "runs/a")) == "runs/a: no space left on device"
    assert "out of memory" in str(of_machine(RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 bytes")))
    assert of_machine(RuntimeError("a defect of ours")) is None


def test_an_empty_text_and_a_huge_number_are_no_values():
    for override in ("output=''", "seed=" + "9" * 400, "data.text_key=''", "plugins=['']"):
        with pytest.raises(ConfigError, match=f"^{override.partition('=')[0]}"):
            load_config(None, [override])


CONSTRUCTED = {
    "a task of 10**12 tokens": (
        lambda: TASKS["mqar"](length=10**12),
        "length: expected at most 16777216, got 1000000000000",
    ),
    "a vocabulary of 10**12": (lambda: TASKS["noisy_recall"](vocab_size=10**12), "vocab_size: expected at most"),
    "no noise": (lambda: TASKS["noisy_recall"](noise=None), "noise: expected at least 0 and below 1, got None"),
    "documents that are a number": (
        lambda: TASKS["passkey"](documents=3),
        "documents: expected a sequence of texts, got int",
    ),
    "no requests": (
        lambda: score(MambaLM(16, 8, 1), None),
        "requests: expected pairs .context, continuation., got NoneType",
    ),
    "no model": (lambda: score(None, [([1], [2])]), "model: expected a MambaLM, got NoneType"),
    "no prompts": (lambda: generate(MambaLM(16, 8, 1), 3), "prompts: expected lists of token ids, got int"),
    "256 states at most": (lambda: MambaLM(16, 8, 1, d_state=257), "d_state: expected at most 256, got 257"),
    "a list as mixer": (lambda: MambaLM(16, 8, 1, mixer=[]), "mixer: expected one of"),
    "lengths without values": (
        lambda: SequenceLayout.from_position_indices(torch.zeros(1, 2, dtype=torch.int64, device="meta")),
        "position_indices: expected an integer tensor of values",
    ),
    "lengths of one row": (
        lambda: SequenceLayout.from_lengths(torch.tensor(3), 4),
        "lengths: expected a sequence of rows",
    ),
}


@pytest.mark.parametrize("case", CONSTRUCTED)
def test_constructors_name_what_is_wrong(case):
    make, message = CONSTRUCTED[case]
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        make()


def test_a_build_without_any_compiler_fails(monkeypatch, capsys):
    rows = [{"kind": kind, "problem": "no compiler", "built": False} for kind in ("cpu", "cuda")]
    monkeypatch.setattr("packmamba.ops.build.info", lambda: rows)
    assert cli.main(["kernels", "build"]) == 2
    assert capsys.readouterr().err == "packmamba: error: cpu: no compiler; cuda: no compiler\n"
    assert cli.main(["kernels", "info"]) == 0


def test_an_empty_file_is_no_configuration(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match="empty.yaml is empty; expected keys and values"):
        load_config(tmp_path / "empty.yaml")


@pytest.mark.parametrize("content", ["[1]", '{"a": 3}', '{"a": {}}', '{"a": {', "\x80"])
def test_a_damaged_sweep_json_is_named(tmp_path, content):
    append_record(tmp_path / "records" / "a.jsonl", training("single"))
    (tmp_path / "sweep.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match="sweep.json is not what a sweep wrote"):
        read_records(tmp_path)


def test_records_are_read_from_files_alone(tmp_path):
    (tmp_path / "records").mkdir()
    os.mkfifo(tmp_path / "records" / "a.jsonl")
    with pytest.raises(ValueError, match="a.jsonl: expected a file of records"):
        read_records(tmp_path)


def test_a_link_to_nowhere_is_no_folder_to_write(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "gone" / "runs")
    with pytest.raises(ConfigError, match="runs_dir: .* cannot be written"):
        check_writable(tmp_path / "runs" / "a", "runs_dir")


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, os.mkfifo, lambda path: path.write_bytes(b"PK" + bytes(99))])
def test_weights_that_are_none_are_refused_before_documents(tmp_path, make):
    make(tmp_path / "weights")
    with pytest.raises(ConfigError, match="^trainer.init_from: .*weights"):
        fit(tiny_config(tmp_path, f"trainer.init_from={tmp_path}/weights"), progress=False)
    assert not (tmp_path / "cache").exists()
