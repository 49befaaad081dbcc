"""Arms, baselines, paired differences and speeds of invented records."""

import numpy as np
import pandas as pd
import pytest

from made_records import scheme, table, table_files, throughput, training
from packmamba.lab.records import append_record, read_records, write_sweep
from packmamba.lab.report import aggregate
from packmamba.lab.report.aggregate import Arm, item_difference, natural
from written import write_rows


def rows_of(records, name="training"):
    return {row["arm"]: row for row in table(records, name)}


def differences(records):
    return {arm: row["val_loss_difference"] for arm, row in rows_of(records).items()}


def test_the_difference_is_paired_by_seed():
    losses = {"padded": [2.10, 2.00, 2.05, 1.95, 2.20], "packed-leak": [2.16, 2.07, 2.06, 2.00, 2.24]}
    records = [training(arm, seed, loss) for arm, each in losses.items() for seed, loss in enumerate(each)]
    row = rows_of(records)["packed-leak"]
    values = np.subtract(losses["packed-leak"], losses["padded"])
    half = 2.776 * values.std(ddof=1) / np.sqrt(5)  # Student's t, 4 degrees of freedom
    assert row["seeds"] == row["val_loss_difference_pairs"] == "5"
    assert float(row["val_loss"]) == pytest.approx(np.mean(losses["packed-leak"]), rel=1e-7)
    assert float(row["val_loss_sd"]) == pytest.approx(np.std(losses["packed-leak"], ddof=1), rel=1e-7)
    found = [float(row[f"val_loss_difference{side}"]) for side in ("", "_low", "_high")]
    assert found == pytest.approx([values.mean(), values.mean() - half, values.mean() + half], rel=1e-4)
    records = [training("padded", s, 2.0 + s) for s in (0, 1, 2)]
    records += [training("packed-reset", s, 2.5 + s) for s in (1, 2, 9)]
    row = rows_of(records)["packed-reset"]
    assert row["val_loss_difference_pairs"] == "2" and float(row["val_loss_difference"]) == pytest.approx(0.5)


def test_arms_are_compared_by_scheme_or_with_the_sweep_s_baseline():
    arms = [("a", scheme("greedy", "leak"), 3.0), ("b", scheme("padded"), 2.0), ("c", scheme("single"), 2.5)]
    records = [training("mine", loss=loss, config=config) | {"arm": name} for name, config, loss in arms]
    assert differences(records) == {"c": "0.5", "b": "", "a": "1"}
    named = [record | {"sweep": {"baseline": "c"}} for record in records]
    assert differences(named) == {"c": "", "b": "-0.5", "a": "0.5"}


def test_points_of_a_grid_and_variants_are_compared_among_themselves():
    records = []
    for setting, loss, rate in (("d_model=64", 3.0, 50.0), ("d_model=128", 2.0, 20.0)):
        for arm, worse, faster in [("packed-reset", 0.25, 4), ("single", 0.5, 1), ("padded", 0.0, 2)]:
            records.append(training(f"{arm} {setting}", loss=loss + worse))
            records.append(throughput(f"{arm} {setting}", rate * faster))
    found = [(row["arm"], row["val_loss_difference"], row["speedup"]) for row in table(records, "training")]
    assert found == [
        (f"{arm} {setting}", difference, speedup)
        for setting in ("d_model=64", "d_model=128")
        for arm, difference, speedup in (("single", "0.5", "0.5"), ("padded", "", "1"), ("packed-reset", "0.25", "2"))
    ]
    cases = [(64, "padded", 3.0), (64, "single", 3.25), (128, "padded", 2.0), (128, "single", 2.5)]
    records = [training(arm, loss=loss, config={"model": {"d_model": width}}) for width, arm, loss in cases]
    found = differences(records)
    assert found["single (model.d_model=64)"] == "0.25" and found["single (model.d_model=128)"] == "0.5"
    found = differences([record | {"sweep": {"apart": True, "baseline": "padded"}} for record in records])
    assert found["single (model.d_model=128)"] == "-0.5", "runs trained apart have one baseline"


def test_a_sweep_names_seeds_and_baseline(tmp_path):
    for arm in ("padded", "packed-reset", "packed-leak"):
        for seed in (0, 1):
            append_record(tmp_path / "records.jsonl", training(arm, seed))
    seeds = {"padded": [0, 1], "packed-reset": [0, 1, 2], "packed-leak": [1, 0], "packed-carry": range(4)}
    write_sweep(tmp_path, "one", seeds, baseline="packed-reset")
    write_sweep(tmp_path, "another", {"packed-leak": [2, 3]}, baseline="packed-reset")
    arms = aggregate.training_arms(read_records(tmp_path))
    found = {arm.name: str(aggregate.seeds_of(arm, arms)) for arm in arms}
    assert found == {"padded": "2", "packed-reset": "2 of 3, 1 missing", "packed-leak": "2 of 4, 2 missing"}
    rows = rows_of(read_records(tmp_path))
    assert rows["packed-reset"]["val_loss_difference"] == "" != rows["padded"]["val_loss_difference"]
    assert "Without any run: packed-carry." in table_files(read_records(tmp_path))["training.md"]


def test_speedup_is_over_the_baseline_timed_in_the_same_run():
    arms = ["single", "padded", "packed-reset"]
    records = [training(arm) for arm in arms]
    records += [throughput("single", 100.0), throughput("padded", 250.0), throughput("packed-reset", 900.0, run="two")]
    rows = rows_of(records)
    assert [rows[arm]["speedup"] for arm in arms] == ["0.4", "1", ""]
    assert [rows[arm]["real_tokens_per_second"] for arm in arms] == ["100", "250", "100"], "its own run's"
    timed = {(row["run"], row["arm"]): row["speedup"] for row in table(records, "throughput")}
    assert timed == {("one", "single"): "0.4", ("one", "padded"): "1", ("two", "packed-reset"): "1"}
    # untrained: over single, else over padded
    alone = [record for record in records if record["kind"] == "throughput"]
    assert {row["arm"]: row["speedup"] for row in table(alone, "throughput")}["padded"] == "2.5"
    alone = [throughput("packed-reset", 900.0), throughput("padded", 250.0)]
    assert [row["speedup"] for row in table(alone, "throughput")] == ["1", "3.6"]


def test_speeds_come_from_the_timing_that_holds_most_arms():
    records = [training(arm) for arm in ("padded", "packed-reset", "packed-leak")]
    records += [throughput("padded", 50.0), throughput("packed-reset", 60.0)]
    rates = {"padded": 150.0, "packed-reset": 160.0, "packed-leak": 170.0}
    records += [throughput(arm, rate, run="all") for arm, rate in rates.items()]
    assert {arm: float(row["real_tokens_per_second"]) for arm, row in rows_of(records).items()} == rates


def test_items_are_paired_by_what_they_are_and_by_group(tmp_path):
    def documents(name, *nats, **more):
        own = [{key: values[i] for key, values in more.items()} for i in range(len(nats))]
        items = [{"document": i, "targets": 2 + i, "nats": n} | own[i] for i, n in enumerate(nats)]
        return write_rows(tmp_path / name, items)

    def minus(ours, theirs, metric="loss"):
        return item_difference(*(Arm("", (), pd.DataFrame({"items": side})) for side in (ours, theirs)), metric)

    ours, theirs = documents("a", 4.0, 6.0, 8.0), documents("b", 2.0, 6.0, 5.0)
    found = minus({0: ours}, {7: theirs})
    assert (found.mean, found.seeds, found.groups) == (pytest.approx(5 / 9), 1, 3)
    assert minus({0: ours, 1: ours}, {0: theirs, 1: theirs}).seeds == 2
    assert minus({0: ours, 1: ours}, {2: theirs, 3: theirs}) is None  # no common seed
    assert minus({0: ours}, {0: documents("c", 2.0, 6.0)}) is None  # other items
    assert minus({0: ours}, {0: theirs}, "quarter") is None
    grouped = [documents(name, *nats, group=["x", "y", "x"]) for name, nats in (("d", (4, 6, 8)), ("e", (2, 6, 5)))]
    found = minus({0: grouped[0]}, {0: grouped[1]})
    assert (found.mean, found.groups) == (pytest.approx(5 / 9), 2)
    mixtures = [pd.DataFrame({"items": [side], "config.evaluation.data.sources": [["a"]]}) for side in grouped]
    assert item_difference(*(Arm("", (), side) for side in mixtures), "loss").groups == 3, "sources are no sample"


def test_numbers_are_sorted_by_size():
    names = ["lr=0.01", "lr=16", "lr=1e-05", "lr=0.003"]
    assert sorted(names, key=natural) == [names[i] for i in (2, 3, 0, 1)]
