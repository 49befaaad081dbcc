"""A disk without space: one error that names the path, nothing half written, and earlier files stay
whole.
"""

import pytest
import torch

from made_records import training, write_report
from packmamba import MambaLM
from packmamba.data.token_store import load_corpora
from packmamba.data.tokenizer import write_tokenizer
from packmamba.files import DiskFull, write_whole
from packmamba.lab import cli
from packmamba.lab.callbacks import CheckpointFile
from packmamba.lab.records import append_record, read_records, write_items, write_sweep
from packmamba.lab.run_id import RunLock
from processes import files_of_at_most
from runs import tiny_config


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def small_and_large(folder):
    """Functions that write a little, or the same name with more than a disk has, by the name."""
    torch.manual_seed(0)
    arms = {f"arm-{number}": range(100) for number in range(99)}
    return {
        "step=1.ckpt": lambda more: CheckpointFile().save_checkpoint(
            {"weight": torch.zeros(5000 * more)}, folder / "step=1.ckpt"
        ),
        "records.jsonl": lambda more: append_record(
            folder / "records.jsonl", training("single") | {"curves": {"x": [{"y": 0.5}] * 1000 * more}}
        ),
        "items.jsonl": lambda more: write_items(folder / "items.jsonl", [{"item": 1}] * (1 + 5000 * more)),
        "sweep.json": lambda more: write_sweep(folder, "sweep", arms if more else {"a": [0]}, None),
        "pytorch_model.bin": lambda more: MambaLM(8 + 500 * more, 8, 1).save_pretrained(folder),
        "model.safetensors": lambda more: MambaLM(8 + 500 * more, 8, 1).save_pretrained(folder, format="huggingface"),
        "file.txt": lambda more: write_whole(folder / "file.txt", b"x" * (1 + 20000 * more)),
    }


@pytest.mark.parametrize("name", small_and_large(None))
def test_what_is_written_is_whole_or_absent(tmp_path, name):
    write = small_and_large(tmp_path)[name]
    for before in (False, True):
        if before:
            write(0)
        there = contents(tmp_path)
        with files_of_at_most(9000), pytest.raises(DiskFull) as raised:
            write(1)
        assert str(tmp_path / name) in str(raised.value) and raised.value.status == 1
        assert {key: value for key, value in contents(tmp_path).items() if value} == there
    write(1)
    assert len((tmp_path / name).read_bytes()) > 9000, "the same call again, once there is space"


def test_an_append_leaves_the_lines_before(tmp_path):
    append_record(tmp_path / "records.jsonl", training("single"))
    with files_of_at_most((tmp_path / "records.jsonl").stat().st_size + 10), pytest.raises(DiskFull):
        append_record(tmp_path / "records.jsonl", training("padded"))
    assert [record["arm"] for record in read_records(tmp_path)] == ["single"]


def test_a_corpus_is_whole_or_absent(tmp_path):
    data = tiny_config(tmp_path).data
    with files_of_at_most(500), pytest.raises(DiskFull, match=str(tmp_path / "cache")):
        load_corpora(data, progress=False)
    assert not [name for name in contents(tmp_path / "cache") if not name.startswith(".")]
    load_corpora(data, progress=False)


def test_a_lock_names_its_file_and_is_free_again(tmp_path):
    with files_of_at_most(10), pytest.raises(DiskFull, match=str(tmp_path / ".lock")), RunLock(tmp_path):
        pass
    with RunLock(tmp_path):
        pass


def test_a_report_keeps_the_tables_of_before(tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: file.write(bytes(10000)))
    records = [training(arm) for arm in ("padded", "single")]
    write_report(tmp_path, records=records)
    there = contents(tmp_path)
    with files_of_at_most(9000), pytest.raises(DiskFull, match="figures"):
        write_report(tmp_path, records=records)
    assert contents(tmp_path) == there


def test_an_export_leaves_no_part(tmp_path, capsys):
    MambaLM(300, 16, 2).save_pretrained(tmp_path / "run")
    write_tokenizer(tmp_path / "run", "bytes", None, None)
    with files_of_at_most(9000):
        assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "out/model.safetensors: expected space" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
