"""What the campaign of wrong inputs and hands have found, refused by name; tests/faults/defects/inputs.md lists it."""

import json
import os

import pytest

from made_records import training
from packmamba import MambaLM, cli
from packmamba.config import ConfigError, DataConfig, load
from packmamba.data.corpus import load_corpora
from packmamba.experiments import folder_of, load_bench
from packmamba.nn.checkpoint import read_pretrained
from packmamba.records import append_record, read_records
from packmamba.training.sweep import SweepConfig

COMMANDS = {
    "elements of a list": (["train", "plugins=[{a: 1}]"], "plugins: expected texts, got"),
    "numbers of a list": (["train", "optimizer.betas=[a,b]"], "optimizer.betas"),
    "a bench's list": (["bench", "speedup", "models=[[1]]"], "models: expected texts, got"),
    "a bench's numbers": (["bench", "scoring", "prompts=[{a: 1}]"], "prompts"),
    "a bench's output": (["bench", "packing", 'output="a\\0b"'], "output: expected a folder"),
    "a bench's arms": (["bench", "scoring", "arms.packed.nope=1"], "arms.packed: unknown key 'nope'"),
    "an arm that is a number": (["bench", "scoring", "arms={a: 3}"], "arms.a.method: expected packed, padded or hf"),
    "a bench's plan": (["bench", "packing", "num_documents=100000000000"], "num_documents: expected at most 2147483647"),
    "an audit's boundaries": (["bench", "leakcheck", "boundaries=[nope]"], "boundaries: expected of position_ids"),
    "a task's options": (["questions", "q", "options={next_line: 3}"], "options.next_line: expected parameters"),
    "a task that is a pattern": (["eval", "m", "tasks=['*']"], "tasks: unknown '*'"),
    "an empty output": (["reproduce", "packing", "output="], "output: expected text, got ''"),
    "a device without values": (["generate", "m", "a", "device=meta"], "device: 'meta' cannot be used here"),
    "an unknown kind of records": (["report", "r"], "r/records: record's kind 'baking' is unknown"),
    "a folder of records": (["report", "./speedup"], "speedup is not a folder"),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    MambaLM(300, 8, 1).save_pretrained(folder / "m")
    append_record(folder / "r" / "records" / "a.jsonl", training("single") | {"kind": "baking"})
    (folder / "docs").write_text('{"text": "some words"}\n' * 4)
    return folder


@pytest.mark.parametrize("case", COMMANDS)
def test_a_command_names_what_is_wrong(case, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    argv, said = COMMANDS[case]
    before = sorted(place.rglob("*"))
    assert cli.main(argv) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("packmamba: error: ") and said in errors[0], errors
    assert sorted(place.rglob("*")) == before


SWEEPS = {
    "grid: {seed: [0, 0]}": "grid.seed: duplicate 0",
    "grid: {seed: [[1], [1]]}": "grid.seed: duplicate",
    "common: {data: 3}": "common.data: expected keys and their values, got 3",
    "common: {trainer: [1]}": "common.trainer: expected keys and their values",
}


@pytest.mark.parametrize("line", SWEEPS)
def test_a_sweep_trains_nothing_twice_and_swallows_no_value(line, tmp_path):
    (tmp_path / "it.yaml").write_text(f"arms: {{a: {{data.row_length: 8}}}}\n{line}\n")
    with pytest.raises(ConfigError, match=f"^{SWEEPS[line]}"):
        load(SweepConfig, tmp_path / "it.yaml")


TUNED = ({"": None}, {"keys": 3, "seeds": [1]}, {"keys": [], "seeds": [1], "tried": 1}, 1)


@pytest.mark.parametrize(
    "change", [{"chacksum": "0"}, {"baseline": []}, {"table": [1]}, {"steps": "a"}, *({"tuned": one} for one in TUNED)]
)
def test_a_sweep_json_has_values_of_its_types(change, tmp_path):
    append_record(tmp_path / "records" / "a.jsonl", training("single"))
    sweep = {"baseline": None, "tuned": None, "arms": {"single": [0]}} | change
    (tmp_path / "sweep.json").write_text(json.dumps({"a": sweep}))
    with pytest.raises(ValueError, match="sweep.json is not what a sweep wrote"):
        read_records(tmp_path)


def test_a_published_configuration_names_its_file(tmp_path):
    MambaLM(16, 8, 1).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_embeddings": None}))
    assert read_pretrained(tmp_path)[0]["tie_embeddings"] is None
    with pytest.raises(ValueError, match="config.json: tie_embeddings: expected True or False, got None"):
        MambaLM.from_pretrained(tmp_path)
    with pytest.raises((TypeError, ValueError), match="^backend"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_embeddings": True}))
        MambaLM.from_pretrained(tmp_path, backend=3)


def test_a_cache_of_links_in_a_circle_is_named(tmp_path):
    (tmp_path / "l").symlink_to("l")
    (tmp_path / "docs").write_text('{"text": "some words"}\n' * 4)
    data = DataConfig(source="jsonl", path=str(tmp_path / "docs"), cache_dir=str(tmp_path / "l"), num_proc=1)
    with pytest.raises(ConfigError, match="^data.cache_dir '.*l' cannot be written"):
        load_corpora(data, progress=False)


def test_a_path_is_no_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(folder_of("./packing")) == "packing" and folder_of("packing").is_dir()
    with pytest.raises(ConfigError, match="^arms.a"):
        bench = load_bench("integration", ["arms={a: 3}"])
        bench.run(bench.config, tmp_path / "records" / "a.jsonl", False)
    assert os.listdir(tmp_path) == []
