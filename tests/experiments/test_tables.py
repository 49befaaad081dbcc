"""Committed tables are what the committed records give."""

from __future__ import annotations

import pytest

from experiments.by_name import kinds_of
from made_records import table_files
from packmamba.lab.records import read_records
from packmamba.lab.report.aggregate import with_items
from processes import ROOT

EXPERIMENTS = ROOT / "experiments"
FOLDERS = sorted(path.parent for path in EXPERIMENTS.glob("**/tables"))


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(EXPERIMENTS)))
def test_committed_tables_are_what_the_committed_records_give(folder):
    records = with_items(folder, read_records(folder))
    made = table_files(records, kinds_of(folder, records))
    committed = {path.name: path.read_text(encoding="utf-8") for path in (folder / "tables").iterdir()}
    assert committed == {name: text for name, text in made.items() if name in committed or name.endswith(".csv")}
