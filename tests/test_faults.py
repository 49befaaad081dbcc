"""A few seconds of the fault campaign; docs/reliability.md is what its records say. `make test-faults` takes longer."""

import sys

import pytest

from processes import ROOT

sys.path.append(str(ROOT / "tests" / "faults"))

import campaign
import report

QUICK = {
    "kills": "in a step,writing a checkpoint,writing a record,writing the token store",
    "damage": "damage to a checkpoint,damage to the token store,damage to a record",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_few_seconds_of_the_campaign(tmp_path, name):
    made = campaign.campaign(1.0, 1, None, QUICK[name].split(","), tmp_path)
    assert len(made["kinds"]) == len(QUICK[name].split(","))
    for kind, counts in made["kinds"].items():
        assert not any(counts[name] for name in campaign.COUNTS[1:]), kind
    assert sum(counts["trials"] for counts in made["kinds"].values()) >= len(made["kinds"])  # a kill may come too late


def test_the_page_on_reliability_is_what_the_records_say():
    assert report.PAGE.read_text(encoding="utf-8") == report.page()
