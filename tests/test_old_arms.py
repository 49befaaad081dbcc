"""Arms are data: what a table compares are fields of a record; one table has them for records of before."""

import csv
import re

import pytest

from experiments import old_arms
from experiments.operators.arms import GpuArm
from experiments.operators.cpu_tables import operators_tables
from experiments.operators.gpu_tables import gpu_operators_tables
from experiments.speedup.report_models import Arm
from packmamba.records import make_record, read_records
from processes import ROOT

TABLE = list(csv.DictReader((ROOT / "experiments" / "old_arms.csv").open(encoding="utf-8")))
COMMITTED = [record for name in ("speedup", "operators") for record in read_records(ROOT / "experiments" / name)]


def of(experiment, *kinds):
    return [r for r in COMMITTED if r["experiment"] == experiment and (not kinds or r["kind"] in kinds)]


def test_the_table_names_every_old_arm_once_and_no_other():
    keys = [tuple(row[name] for name in ("experiment", "kind", "arm", "old_operator")) for row in TABLE]
    old = [r for r in COMMITTED if r["kind"] not in ("training", "throughput", "growth", "host_time")]
    found = {(r["experiment"], r["kind"], r["arm"], r["config"].get("operator", "")) for r in old}
    assert len(keys) == len(set(keys)) and set(keys) == found


def test_labels_of_whole_models_are_the_names_they_had():
    records = of("speedup", "speedup", "breakdown")
    assert len(records) > 100
    for record in records:
        assert str(Arm.of(old_arms.with_fields(record))) == record["arm"]


def test_arms_differ_in_a_field():
    for of_arm, records in ((Arm.of, of("speedup", "speedup")), (GpuArm.of, of("operators", "gpu_operators"))):
        names = {record["arm"] for record in records}
        assert len({of_arm(old_arms.with_fields(record)) for record in records}) == len(names) > 10


def test_fields_of_a_record_come_before_the_table():
    fields = {"strategy": "greedy", "row_length": 512, "sorted_by_length": False, "layers": "packmamba", "graphs": True}
    record = make_record("speedup", "speedup", "single", fields, 0, "corpus", {}, 1.0)
    assert old_arms.with_fields(record) is record
    assert Arm.of(record).label == "packed-512-greedy-graph"


def test_an_arm_that_no_table_names_is_shown_by_its_fields():
    fields = {
        "operator": "scan",
        "implementation": "mine",
        "packing": "packed",
        "boundaries": None,
        "with_states": False,
    }
    (old,) = [r for r in of("operators", "gpu_operators") if r["arm"] == "scan"][:1]
    new = {**old, "arm": "whatever", "config": {**old["config"], **fields}}
    table = next(table for table in gpu_operators_tables([old, new]) if table.name == "gpu-times")
    assert [row[3].text for row in table.rows] == ["ssm_pack", "scan, mine, packed"]
    (old,) = [r for r in of("operators", "operators") if r["arm"] == "cpu" and r["config"]["operator"] == "ssm_pack"][
        :1
    ]
    new = {
        **old,
        "config": {**old["config"], "operator": "scan", "implementation": "mine", "packing": "packed", "memory": "new"},
    }
    (table,) = operators_tables([old, new])
    assert [row[0].text for row in table.rows] == ["compiled, public operator", "mine, packed, new"]


def test_an_arm_without_fields_is_refused():
    record = make_record("speedup", "speedup", "unheard-of", {}, 0, "corpus", {}, 1.0)
    with pytest.raises(ValueError, match="config of the record of unheard-of lacks strategy"):
        Arm.of(old_arms.with_fields(record))


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("experiments/*/*report*.py")) + sorted(ROOT.glob("experiments/*/*tables.py"))
)
def test_no_report_reads_a_name(path):
    """Names are shown; what they once meant is in the table."""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\b(name|arm|label)\.(startswith|endswith|removeprefix|removesuffix|partition|split)\(", text)
    assert not re.search(r"\bre\.", text)
