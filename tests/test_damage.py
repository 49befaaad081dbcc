"""Flipped bits in what lies beside weights and records: found and named, or what is read is what was written."""

import csv
import json
import random
import types

import pytest
from test_kept import ask, model

from made_records import training, write
from packmamba.cli import models
from packmamba.config import ConfigError
from packmamba.data.integrity import read_meta, write_meta
from packmamba.errors import UserError
from packmamba.evaluation.kept import Kept
from packmamba.evaluation.subject import read_config
from packmamba.records import make_record, read_records, write_items, write_sweep
from packmamba.report.items import checksum_of, with_items
from packmamba.training.curves import OneFile
from packmamba.training.model_folder import write_configuration
from packmamba.training.note import NOTE, read_note, write_note
from packmamba.training.runs import run_folder
from runs import tiny_config


def spoilt(path, count=80, cuts=True):
    """The file with a flipped bit, or cut short, again and again; at the end as it was."""
    content, draw = path.read_bytes(), random.Random(0)
    for number in range(count):
        place = draw.randrange(len(content))
        changed = content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
        path.write_bytes(content[:place] if cuts and number % 10 == 0 else changed)
        yield
    path.write_bytes(content)


def test_items_that_are_kept_are_answered_again(tmp_path):
    path = tmp_path / "items.part"
    expected = ask(Kept(path, model()), [])
    asked = []
    for _ in spoilt(path):
        assert ask(Kept(path, model()), asked) == expected
    assert 80 <= len(asked) and len(path.read_text().splitlines()) == 7


def test_lines_that_were_kept_without_a_checksum_are_read(tmp_path):
    path, asked = tmp_path / "items.part", []
    expected = ask(Kept(path, model()), [])
    first, *lines = path.read_text().splitlines(keepends=True)
    plain = [json.dumps([(line := json.loads(text))[0].rpartition(" #")[0], *line[1:]]) + "\n" for text in lines]
    path.write_text("".join([first, *plain]))
    assert ask(Kept(path, model()), asked) == expected and not asked


def test_items_of_a_record(tmp_path):
    path = tmp_path / "items" / "parity-a1.jsonl"
    write_items(path, [{"index": n, "right": n % 2, "answers": 1} for n in range(9)])
    asked = {"id": "a1", "evaluation": {"name": "parity"}}
    record = make_record("evaluation", "q", "a", asked | {"items": checksum_of(path)}, 0, "c", {"accuracy": 0.4}, 1.0)
    for _ in spoilt(path):
        with pytest.raises(ValueError, match=str(path)):
            with_items(tmp_path, [record])
    (found,) = with_items(tmp_path, [record])
    assert found["items"] == str(path)
    path.write_text("{}\n")
    (found,) = with_items(tmp_path, [record | {"config": asked}])  # of a record from before
    assert found["items"] == str(path)


def test_what_a_killed_evaluation_left_is_cleared_away(tmp_path):
    subject = types.SimpleNamespace(model=model(), name="m", trained=False)

    def recorded():
        return models._recorded({"name": "it"}, subject, tmp_path, run)

    def run(part):
        for left in (part.with_suffix(".tmp"), part.with_name(f"{part.stem}.jsonl.1-2.tmp")):
            left.parent.mkdir(exist_ok=True)
            left.touch()
        ask(Kept(part, subject.model), [])
        return {"n": 1.0}, {}, [{"index": 0}], "c"

    record = recorded()
    (items,) = (tmp_path / "items").iterdir()
    assert record["config"]["items"] == checksum_of(items)
    items.with_suffix(".part").touch()
    assert recorded() == record and [*(tmp_path / "items").iterdir()] == [items]


def test_what_a_sweep_says_of_its_runs(tmp_path):
    write(tmp_path, [training("padded"), training("packed-reset")])
    write_sweep(tmp_path, "other", {"mine": [3]})
    write_sweep(tmp_path, "it", {"padded": [0], "packed-reset": [0, 1]}, "padded", steps={"padded": 10})
    expected = read_records(tmp_path)
    assert expected[0]["sweep"]["baseline"] == "padded"
    path = tmp_path / "sweep.json"
    refused = 0
    for _ in spoilt(path, 200):
        try:
            assert read_records(tmp_path) == expected
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 100
    path.write_text('{"it": ')
    with pytest.raises(ConfigError, match=f"{path} is not what a sweep wrote"):
        write_sweep(tmp_path, "it", {"padded": [0]})


def test_the_configuration_of_a_run(tmp_path):
    config = tiny_config(tmp_path, "data.validation_fraction=0.25")
    (tmp_path / "config.json").write_text("{}")
    write_configuration(tmp_path, config)
    expected = read_config(tmp_path)
    path, refused = tmp_path / "configuration.yaml", 0
    for _ in spoilt(path):
        try:
            assert read_config(tmp_path) == expected
        except UserError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 70
    path.write_text(path.read_text().replace("0.25", "0.2"))
    with pytest.raises(ConfigError, match="if you have changed it, remove its first line"):
        read_config(tmp_path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert read_config(tmp_path).data.validation_fraction == 0.2


def test_the_curves_of_a_run(tmp_path, capsys):
    def log(curves, *steps):
        for step in steps:
            curves.log_metrics({"loss": step / 7, "rate": 0.5}, step)

    log(curves := OneFile(tmp_path), 1, 2, 3, 4)
    assert curves.path.read_text().splitlines() == [
        "loss,rate,step", *(f"{step / 7},0.5,{step}" for step in (1, 2, 3, 4))
    ]  # fmt: skip
    for _ in spoilt(curves.path, 120):
        again = OneFile(tmp_path)
        again.go_on_from(3)
        log(again, 4)
        with open(curves.path, newline="") as file:
            *_, last = csv.DictReader(file)
        assert (last["loss"], last["step"]) == (str(4 / 7), "4")
    assert "metrics.csv is damaged" in capsys.readouterr().err
    curves.path.write_text("")
    (again := OneFile(tmp_path)).go_on_from(3)
    log(again, 4)
    assert len(curves.path.read_text().splitlines()) == 2


def test_a_note_of_a_run(tmp_path):
    config = tiny_config(tmp_path)
    path = run_folder(config) / NOTE
    path.parent.mkdir(parents=True)
    said = {"state": "stopped", "step": 4, "steps": 6, "seconds": 1.5, "where": "CPU 0"}
    write_note(path, said)
    assert read_note(config) == said
    for _ in spoilt(path):
        assert read_note(config).items() >= said.items() or not read_note(config)
    path.write_text(json.dumps(said))  # of a run from before
    assert read_note(config) == said


def test_the_meta_json_of_a_corpus_is_the_text_that_was_written(tmp_path):
    meta = {"identity": {"format": 1}, "corpus_hash": "0", "vocab_size": 256, "splits": {}}
    path = tmp_path / "meta.json"
    write_meta(tmp_path, meta)
    written = path.read_text()
    assert read_meta(tmp_path) == meta
    fnrmat = written.replace("format", "fnrmat")  # decides no token
    for changed in (written + "\n", fnrmat, fnrmat.replace("checksum", "chacksum")):
        path.write_text(changed)
        with pytest.raises(ValueError, match=f"{path} has changed since it was written"):
            read_meta(tmp_path)
    path.write_text(json.dumps(meta))  # from before there was a checksum
    assert read_meta(tmp_path) == meta
