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


def test_parts_of_a_campaign_are_summed_if_they_belong_together():
    def part(seed, commit="a1", **kinds):
        counts = {kind: dict.fromkeys(campaign.COUNTS, count) for kind, count in kinds.items()}
        return {"campaign": "faults", "commit": commit, "seconds": 2.5, "seed": seed, "kinds": counts, "skipped": {}}

    made = report.merged([part(1, kill=2, flip=3), part(2, kill=40)])
    assert (made["seconds"], made["seed"], made["commit"]) == (5.0, [1, 2], "a1")
    assert {kind: counts["trials"] for kind, counts in made["kinds"].items()} == {"kill": 42, "flip": 3}
    for parts, why in [
        ([part(1), part(2, "b2")], "commit: a1, b2"),
        ([part(1, "a1-dirty"), part(2, "a1-dirty")], "not committed"),
        ([part(1), part(1)], "one seed"),
    ]:
        with pytest.raises(ValueError, match=why):
            report.merged(parts)
