"""The studies' pages name each sweep of which runs were cut, with what was made; no more and no fewer."""

import re

import pytest

from packmamba.training.runs import record_path
from packmamba.training.sweep import load_sweep
from processes import ROOT

ROW = re.compile(r"^\| `([\w-]+\.yaml)` \| (\d+) of (\d+) \|", re.MULTILINE)
BENCHES = ("speed", "gradients")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["parity", "boundaries", "downstream"])
def test_a_page_names_what_was_cut(experiment, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("packmamba.training.sweep.check_run", lambda *_: None)  # GPUs are not asked for here
    folder = ROOT / "experiments" / experiment
    page = (folder / "README.md").read_text(encoding="utf-8")
    cut = {}
    for path in sorted(folder.glob("*.yaml")):
        if path.stem == "train" or path.stem.startswith(BENCHES) or "tune:" in path.read_text(encoding="utf-8"):
            continue
        configs = load_sweep(path)[1]
        made = sum(record_path(config).is_file() for config in configs)
        if made < len(configs):
            cut[path.name] = (made, len(configs))
    assert {name: (int(made), int(of)) for name, made, of in ROW.findall(page)} == cut
