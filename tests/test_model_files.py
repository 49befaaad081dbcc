"""A saved model knows its bytes: damage is found and named when it is read. Files of others carry no checksum and are read."""

import os
import random
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from packmamba.config import CONFIGURATION, load_config
from packmamba.nn import MambaLM
from packmamba.training import model_folder
from packmamba.training.fit import fit
from packmamba.training.run_id import run_folder
from runs import tiny_config

FILES = {"state_spaces": "pytorch_model.bin", "huggingface": "model.safetensors"}
READ = {"state_spaces": lambda path: torch.load(path, weights_only=True), "huggingface": safetensors.torch.load_file}


def saved(folder, format):
    torch.manual_seed(0)
    model = MambaLM(vocab_size=8, d_model=4, n_layer=1, d_state=2)
    model.save_pretrained(folder, format=format)
    return model.state_dict(), folder / FILES[format]


@pytest.mark.parametrize("format", FILES)
def test_a_changed_bit_is_found_and_its_file_named(tmp_path, format):
    weights, path = saved(tmp_path, format)
    content, draw = path.read_bytes(), random.Random(0)
    found = 0
    for place in [*draw.sample(range(len(content)), 150), *range(len(content) - 50, len(content), 7)]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :])
        try:
            read = MambaLM.from_pretrained(tmp_path).state_dict()
        except ValueError as error:
            assert str(path) in str(error)
            found += 1
        else:  # in what says that there is a checksum
            assert all(torch.equal(read[name], weight) for name, weight in weights.items())
    assert found > 140


@pytest.mark.parametrize("format", FILES)
def test_files_that_others_have_written_are_read(tmp_path, format):
    weights, path = saved(tmp_path, format)
    theirs = {name: tensor + 1 for name, tensor in READ[format](path).items()}
    (torch.save if format == "state_spaces" else safetensors.torch.save_file)(theirs, path)
    read = MambaLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(read[name], weight + 1) for name, weight in weights.items())


def test_a_run_s_model_is_on_the_disk_before_its_record_says_so(tmp_path, monkeypatch):
    events, replace, sync = [], os.replace, os.fsync

    def note_replace(source, target):
        events.append(("replace", os.path.basename(target)))
        replace(source, target)

    def note_sync(descriptor):
        events.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        sync(descriptor)

    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.max_steps=2", "trainer.loggers=[]")
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(os, "fsync", note_sync)
    write = model_folder.write_model
    monkeypatch.setattr("packmamba.training.fit.write_model", lambda *given: (events.clear(), write(*given)))
    fit(config, progress=False)

    def last(event):
        return max(number for number, other in enumerate(events) if other == event)

    for name in ("pytorch_model.bin", "config.json", "configuration.yaml"):
        assert ("sync", name) in events[: last(("replace", name))]
    folder = events.index(("sync", run_folder(config).name))
    assert folder > last(("replace", "config.json"))
    assert any(kind == "replace" and name.endswith(".jsonl") for kind, name in events[folder:])


@pytest.mark.parametrize("text", ["${x}", r"a\${name}", r"\\${", "'${'\n\"${a}\"", "C:\\runs\\"])
def test_a_configuration_s_texts_refer_to_nothing(tmp_path, text):
    """Those of a run are resolved: what looks like a reference was escaped where it came from."""
    config = replace(tiny_config(tmp_path), name=text)
    config.data.path = f"{tmp_path}/{text}"
    model_folder.write_configuration(tmp_path, config)
    assert load_config(tmp_path / CONFIGURATION) == config
