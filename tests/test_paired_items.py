"""Models that answered the same questions are compared item by item."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
from scipy import stats

from packmamba import MambaLM, cli
from packmamba.report.inference import over_items
from packmamba.report.items import minus


def write(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


def test_with_equal_weights_it_is_a_paired_t_test():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(1, 1, 30), rng.normal(0.8, 1, 30)
    expected = stats.ttest_rel(ours, theirs)
    found = over_items(3 * (ours - theirs), np.full(30, 3.0))
    assert found[:4] == pytest.approx((ours.mean() - theirs.mean(), *expected.confidence_interval(), expected.pvalue))
    assert np.isnan(over_items([1.0], [2.0]).low) and over_items([1.0], [2.0]).mean == 0.5


def test_items_are_paired_by_what_they_are_and_by_group(tmp_path):
    def documents(name, *nats, **more):
        items = [
            {"document": i, "targets": 2 + i, "nats": n} | {k: v[i] for k, v in more.items()}
            for i, n in enumerate(nats)
        ]
        return write(tmp_path / name, items)

    ours, theirs = documents("a", 4.0, 6.0, 8.0), documents("b", 2.0, 6.0, 5.0)
    found = minus({0: ours}, {7: theirs}, "loss")
    assert (found.mean, found.seeds, found.groups) == (pytest.approx(5 / 9), 1, 3)
    assert minus({0: ours, 1: ours}, {0: theirs, 1: theirs}, "loss").seeds == 2
    assert minus({0: ours, 1: ours}, {2: theirs, 3: theirs}, "loss") is None  # no seed that both have
    assert minus({0: ours}, {0: documents("c", 2.0, 6.0)}, "loss") is None  # others were asked
    assert minus({0: ours}, {0: theirs}, "quarter") is None
    grouped = [documents(name, *nats, group=["x", "y", "x"]) for name, nats in (("d", (4, 6, 8)), ("e", (2, 6, 5)))]
    found = minus({0: grouped[0]}, {0: grouped[1]}, "loss")
    assert (found.mean, found.groups) == (pytest.approx(5 / 9), 2)


def test_a_report_of_two_models_has_the_difference(tmp_path, capsys):
    torch.manual_seed(0)
    (tmp_path / "texts").mkdir()
    for i in range(8):
        (tmp_path / "texts" / f"{i}.txt").write_text("some words " * (i + 1))
    data = ["data.source=text", f"data.path={tmp_path}/texts", "data.validation_fraction=0.5"]
    for name in ("one", "two"):
        MambaLM(vocab_size=256, d_model=16, n_layer=1).save_pretrained(tmp_path / name)
        command = ["eval", str(tmp_path / name), "tasks=[perplexity]", f"output={tmp_path}/out", "device=cpu", *data]
        assert cli.main([*command, f"data.cache_dir={tmp_path}/cache"]) == 0
    assert cli.main(["report", str(tmp_path / "out")]) == 0
    assert " [" in capsys.readouterr().out
    text = (tmp_path / "out" / "tables" / "evaluation.md").read_text()
    one, two = csv.DictReader(
        (tmp_path / "out" / "tables" / "evaluation.csv").open()
    )  # within a second either may be first
    assert f"| loss minus {one['model']}'s [95% CI] |" in text and "the same items" in text
    assert one["difference"] == "" and two["items"] == two["documents"] == "4"
    assert float(two["difference"]) == pytest.approx(float(two["loss"]) - float(one["loss"]), abs=1e-6) != 0
    assert float(two["difference_low"]) < float(two["difference"]) < float(two["difference_high"])
