"""The study on natural text: its small sweeps make every table; verdicts and missing runs of
invented records.
"""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import made_records
from experiments.text import plugin, reproduce
from experiments.text.report import KINDS, PRIMARY, registered
from made_records import SCHEMES, read_rows, table_files, training
from packmamba.config import DataConfig
from packmamba.data.token_store import load_corpora
from packmamba.lab.records import read_records
from packmamba.lab.report.aggregate import contrasts, training_arms
from packmamba.lab.report.statistics import NOTHING, Estimate
from packmamba.lab.sweep import load_sweep, run_sweep
from written import write_rows

pytestmark = pytest.mark.slow

FOLDER = Path(reproduce.__file__).parent
GROUPS = 20
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A corpus of invented dictionary entries, as the committed sample has them."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(4, 9))) for _ in range(600)]
    lines = []
    for i in range(400):
        gloss = " ".join(rng.choice(words, 8))
        text, kind = f"{words[i]} (noun): {gloss}", ("train", "train", "train", "validation")[i % 4]
        place = [words[i], "noun", len(text) - len(gloss), len(text)]
        more = " ".join(rng.choice(words, 120)) if i % 5 == 0 else ""
        line = {"id": f"wordnet:{i}", "group": f"wordnet:g{i % 12}", "split": kind, "text": f"{text}\n{more}"}
        lines.append(json.dumps(line | {"gloss": place}) + "\n")
    path = tmp_path_factory.mktemp("text") / "sample.jsonl.gz"
    path.write_bytes(gzip.compress("".join(lines).encode()))
    return path


def test_small_sweeps_make_every_table(sample, tmp_path):
    wanted = [step for step in reproduce.STEPS if step.small and "mamba2" not in " ".join(step.overrides)]
    few = ("trainer.max_steps=2", f"data.cache_dir={tmp_path}/corpora", "data.validation_documents=40")
    for step in wanted:
        given = [key.replace(reproduce.SAMPLE, str(sample)) for key in (*step.overrides, *step.small)]
        given = [key.replace("{output}", str(tmp_path / "text")) for key in given]
        fewer = ["grid.optimizer.lr=[4.0e-3]"] if "name=rates" in given else []
        sweep = load_sweep(FOLDER / step.file, [*given, *few, *fewer, f"output={tmp_path / 'text'}"])
        run_sweep(*sweep, progress=False)
    made = table_files(read_records(tmp_path / "text"), KINDS)
    for name in ("verdicts", "exploratory", "numerics", "parity", "states", "packers", "answers"):
        assert f"{name}-text.csv" in made
    assert made["numerics-text.csv"].count("interim") == 14, "two of eight seeds of every effect"
    rows = read_rows(made["verdicts-text.csv"])
    assert [(row["architecture"], row["seeds"]) for row in rows] == [("Mamba-1", "2")] * 4 + [("Mamba-2", "0")] * 4
    assert ",2,8" in made["finetuning-tuned.csv"] and "0.004" in made["rates-pilot-text.csv"]
    read = read_rows(made["exploratory-text.csv"])
    assert next(row for row in read if row["contrast"].startswith("own's models"))["difference"] != ""


def test_the_sealed_split_is_read_only_where_it_is_named(tmp_path):
    for folder, split in (("corpus", "train"), ("corpus", "validation"), ("sealed", "test")):
        (tmp_path / folder).mkdir(exist_ok=True)
        write_rows(tmp_path / folder / f"{split}.jsonl", [{"text": split, "split": split, "group": "g"}])
    found = {}
    for subset in (None, "validation", "test"):
        data = DataConfig("natural_text", str(tmp_path), subset=subset, cache_dir=str(tmp_path / "cache"))
        corpora = load_corpora(data, progress=False)
        found[subset] = [bytes(side.tokens[1:-1].astype("u1")).decode() for side in corpora[:2]]
    assert found == {None: ["train", "validation"], "validation": ["train", "validation"], "test": ["train", "test"]}


def test_only_the_answer_is_a_target(sample):
    example = plugin.Asked(str(sample), "pairs", "train").example(0, 3)
    one = plugin.items(str(sample), "pairs", "train")[3]
    assert example.targets[example.mask].tolist() == [*one["completion"].encode(), plugin.END]
    assert example.tokens[: int(example.mask.argmax()) + 1].tolist() == [plugin.BEGIN, *one["prompt"].encode()]
    asked = plugin.Asked(str(sample), "headword", "validation").example(0, 0)
    assert len(asked.choices) == 4 and list(asked.choices[asked.answer]) == asked.targets[asked.mask].tolist()


EFFECTS = {"padded": 0.0, "packed-reset": 0.0001, "packed-leak": 0.02, "zero": 0.0, "own": -0.01, "shuffled": 0.01}


def record(arm, seed, effect, mixer="mamba1", margin=0.01):
    """Every group's loss is the run's, with noise of runs and groups."""
    rng = np.random.default_rng([seed, len(arm)])
    loss = 1 + seed / 50 + effect + 0.0005 * rng.standard_normal()
    nats = [100 * (loss + 0.0005 * rng.standard_normal()) for _ in range(GROUPS)]
    points = [{"group": g, "start": 1, "targets": 100, "nats": nats[g]} for g in range(GROUPS)]
    others = [{"nats_zero": each + 3, "nats_foreign": each + 5} for each in nats]
    beyond = [point | {"start": 2048} | other for point, other in zip(points, others)]
    made = training("padded", seed, loss, config={"model": {"mixer": mixer}, **SCHEMES["padded"]})
    made["config"]["data"] = {**made["config"]["data"], "source": "natural_text"}
    curves = {f"{name}.by_group": points for name in ("perplexity", "perplexity_float32")}
    curves["beyond.by_group"] = beyond
    return made | {"arm": f"{arm} mixer={mixer}", "curves": made["curves"] | curves, "sweep": {"margin": margin}}


def rows_of(records, name="verdicts-text"):
    return made_records.rows_of(KINDS, records, name)


def study(**changed):
    effects = EFFECTS | {name.replace("_", "-"): value for name, value in changed.items()}
    return [record(arm, seed, effect) for arm, effect in effects.items() for seed in range(1, 9) if effect is not None]


def test_known_effects_get_their_verdicts():
    rows = {row["primary"][:2]: row for row in rows_of(study()) if row["architecture"] == "Mamba-1"}
    assert {name: row["prediction"] for name, row in rows.items()} == dict.fromkeys(("P1", "P2", "P3", "P4"), "right")
    assert [rows[name]["verdict"] for name in rows] == ["equivalent", "different", "different", "different"]
    effects = {"P1": 0.0001, "P2": 0.0199, "P3": -0.02, "P4": -0.01}
    for name, effect in effects.items():
        assert float(rows[name]["difference"]) == pytest.approx(effect, abs=1e-3), "seeds are pairs"
    read = [row for row in rows_of(study(), "exploratory-text") if row["contrast"].startswith("own's models")]
    assert [float(row["difference"]) for row in read[:2]] == pytest.approx([0.03, 0.05])
    right = [one | {"metrics": one["metrics"] | {"headword.choice_accuracy": one["seed"]}} for one in study()]
    row = rows_of([one for one in right if one["arm"][:6] != "padded" or one["seed"] < 8], "answers-text")[0]
    assert float(row["value"]) == float(row["other"]) == 4, "of the seeds that both arms have"


@pytest.mark.parametrize(
    ("changed", "name", "ruling", "prediction"),
    [
        ({"packed_reset": 0.02, "packed_leak": 0.04}, "P1", "different", "wrong"),
        ({"packed_leak": 0.0001}, "P1", "equivalent, leak not caught", "right"),
        ({"packed_leak": -0.02}, "P2", "different", "wrong"),
        ({"own": 0.0}, "P4", "open", "open"),
        ({"own": 0.01}, "P4", "different", "wrong"),
    ],
)
def test_verdicts_of_other_effects(changed, name, ruling, prediction):
    (row,) = (row for row in rows_of(study(**changed))[:4] if row["primary"].startswith(name))
    assert (row["verdict"], row["prediction"]) == (ruling, prediction)


def test_an_equivalence_without_a_margin_is_open():
    (row,) = (row for row in rows_of([one | {"sweep": {}} for one in study()])[:4] if row["primary"][:2] == "P1")
    assert (row["verdict"], row["prediction"]) == ("open", "open")


def test_a_primary_that_did_not_run_counts_for_holm():
    found = {one: Estimate(0.1, 0.05, 0.15, 8, 0.01) for one in PRIMARY[:3]} | {PRIMARY[3]: NOTHING}
    assert [registered(found, 0.01, 0.2)[one][0] for one in PRIMARY[:3]] == pytest.approx([0.04] * 3)


def numerics_study(lost=None, **effect):
    """Eight seeds of both layouts, micro-batches and precisions; each level adds its effect."""
    records = []
    for layout, size, precision in itertools.product(("reset", "padded"), ("24k", "131k"), ("bf16-mixed", "32-true")):
        names = (layout, "m" + size, "f" + precision[:2], f"{layout}_{size}", f"{layout}_{size}_{precision[:2]}")
        loss = sum(effect.get(name, 0.0) for name in names)
        for seed in range(1, 9):
            made = record(f"{layout}-{size} precision={precision}", seed, loss, margin=0.0012)
            made["config"]["trainer"] = made["config"]["trainer"] | {"precision": precision}
            records.append(made | {"arm": f"{layout}-{size} precision={precision}"})
    return [one for one in records if (one["arm"], one["seed"]) != lost]


@pytest.mark.parametrize(
    ("effect", "expected"),
    [
        ({"m24k": 0.004}, (0.004, 0, 0, 0)),
        ({"reset": -0.004}, (0, -0.004, 0, 0)),
        ({"f32": -0.004}, (0, 0, -0.004, 0)),
        ({"reset_24k": 0.008}, (0.004, 0.004, 0, 0.008)),
    ],
)
def test_effects_of_numerics_come_back(effect, expected):
    rows = rows_of(numerics_study(**effect), "numerics-text")
    assert [row["effect"][:2] for row in rows[:4]] == ["N1", "N2", "N3", "N4"]
    assert [row["family"] for row in rows].count("primary") == 4
    for row, value in zip(rows, expected):
        assert float(row["difference"]) == pytest.approx(value, abs=9e-4)
        assert row["verdict"].startswith("different" if value else ("equivalent", "open"))
        if value:
            assert row["below"] == str(8 * (value < 0))


def test_an_effect_in_one_precision_is_of_that_precision():
    rows = {row["effect"]: row for row in rows_of(numerics_study(reset_131k_bf=-0.004), "numerics-text")}
    found = {title: float(rows[f"reset-131k minus padded-24k, in {title}"]["difference"]) for title in DTYPES}
    assert found == pytest.approx({"float32": 0.0, "bfloat16": -0.004}, abs=9e-4)
    assert float(rows["layout by precision"]["difference"]) == pytest.approx(0.002, abs=9e-4)


def test_a_run_that_is_missing_makes_effects_interim():
    lost = ("padded-24k precision=32-true", 3)
    rows = {row["effect"]: row for row in rows_of(numerics_study(lost, m24k=0.004), "numerics-text")}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert [verdict for name, verdict in verdicts.items() if name[0] == "N"] == ["interim"] * 4
    assert verdicts["micro-batch, 24,576 minus 131,072 slots, in bfloat16"] == "different"
    assert rows["N4 layout by micro-batch"]["seeds"] == "7"
    assert {row["verdict"] for row in rows_of(study(), "numerics-text")} == {"not run"}


def test_what_did_not_run_is_counted_and_a_pilot_stays_out():
    lost = record("packed-leak", 9, 0.0)
    lost["metrics"]["val_loss"] = None
    records = [*study(shuffled=None), record("packed-leak", 101, 5.0), lost]
    rows = rows_of(records)
    assert len(rows) == 2 * len(PRIMARY)
    ran = {(row["architecture"], row["primary"][:2]): (row["seeds"], row["planned"], row["verdict"]) for row in rows}
    assert ran["Mamba-1", "P3"] == ("0", "12", "not run") and ran["Mamba-2", "P1"] == ("0", "16", "not run")
    assert ran["Mamba-1", "P1"][:2] == ("8", "16")
    arms = {(row["architecture"], row["arm"]): row for row in rows_of(records, "parity-text")}
    assert arms["Mamba-1", "single"]["seeds"] == "0" and arms["Mamba-1", "packed-leak"]["seeds"] == "8"
    assert float(arms["Mamba-1", "packed-leak"]["difference"]) == pytest.approx(0.02, abs=1e-3)


# of studies that are not run yet: where rows, streams and documents must be smaller than theirs
REGISTERED = {
    "rates.yaml": ("grid.seed=[17]", "common.data.cut_documents=256", "common.data.max_tokens_per_batch=1024"),
    "bpe.yaml": ("grid.seed=[1]", "common.data.tokenizer=bytes", "common.data.max_tokens_per_batch=1024"),
    "../beyond_rows/beyond_rows.yaml": (
        *("grid.seed=[1]", "common.data.source=natural_text", "common.data.row_length=64", "common.data.streams=64"),
        *("common.data.max_tokens_per_batch=1024", "arms.shuffled.data.shuffle_steps=6"),
        "evaluation_options={positions: {window: 64, most: 8}, beyond: {after: 64, most: 512}}",
    ),
}


@pytest.mark.parametrize("mixer", ["mamba1", "mamba2"])
@pytest.mark.parametrize("file", REGISTERED)
def test_every_arm_of_a_registered_study_trains_and_is_compared(file, mixer, sample, tmp_path):
    given = [key for key in reproduce.TINY if key.split("=")[0] not in ("trainer.max_steps", "grid.seed")]
    given += [*REGISTERED[file], "common.data.subset=validation", "common.trainer.max_steps=6", f"data.path={sample}"]
    given += ["data.validation_documents=40", f"data.cache_dir={tmp_path}/corpora", f"output={tmp_path}/made"]
    given += [f"grid.model.mixer=[{mixer}]"] if file != "bpe.yaml" else [f"model.mixer={mixer}"]
    sweep, configs = load_sweep(FOLDER / file, given)
    run_sweep(sweep, configs, progress=False)
    records = read_records(tmp_path / "made")
    (metric,) = sweep.table.metrics
    assert {record["arm"] for record in records} == {config.name for config in configs}
    assert all(np.isfinite(record["metrics"][metric]) for record in records)
    rulings = contrasts(training_arms(records), metric)
    rates = sweep.grid.get("optimizer.lr", [0])
    assert sum(contrast.comparison.family == "primary" for contrast in rulings) == len(sweep.primary) * len(rates)
    if file.endswith("beyond_rows.yaml"):
        losses = {record["arm"].split()[0]: record["metrics"][metric] for record in records}
        assert len({*losses.values()}) == len(losses), "every arm trains another model"


def test_a_finished_study_is_reported_without_its_gpu_and_documents(tmp_path):
    for file in ("records.jsonl.gz", "sweep.json"):
        shutil.copy(FOLDER.parent / "beyond_rows" / file, tmp_path)
    sweep, configs = load_sweep(FOLDER.parent / "beyond_rows/beyond_rows.yaml", [f"output={tmp_path}"])
    assert {config.trainer.accelerator for config in configs} == {"gpu"}
    assert run_sweep(sweep, configs, progress=False) == tmp_path
    assert "late" not in (tmp_path / "sweep.json").read_text()


def test_only_long_documents_are_of_the_long_source(tmp_path):
    lines = [{"text": "é" * n, "split": split, "group": "g"} for split in ("train", "validation") for n in (2046, 2047)]
    path = write_rows(tmp_path / "text.jsonl", lines)
    data = DataConfig("natural_text_long", str(path), cache_dir=str(tmp_path / "cache"))
    corpora = load_corpora(data, progress=False)
    assert [side.lengths.tolist() for side in corpora[:2]] == [[4096], [4096]]
    every = load_corpora(DataConfig("natural_text", str(path), cache_dir=str(tmp_path / "cache")), progress=False)
    assert [len(side.lengths) for side in every[:2]] == [2, 2]
