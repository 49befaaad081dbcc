"""What would spoil a result quietly makes a noise: values that are not finite, a backend or precision that did not run, a leak
that could not be."""

import json
import logging

import numpy as np
import pytest
import torch

from packmamba import MambaLM
from packmamba.config import ConfigError
from packmamba.data.datamodule import PackingDataModule
from packmamba.ops import backends, build
from packmamba.records import read_records
from packmamba.report.training import training_tables
from packmamba.training import boundary
from packmamba.training.attempt import attempt
from packmamba.training.callbacks import checkpoints
from packmamba.training.fit import fit
from packmamba.training.runs import run_folder
from runs import CARRY, tiny_config, write_documents

POISON = ord("z")
GREEDY = ["data.strategy=greedy", "optimizer.warmup_steps=0"]


def with_poison(folder, *keys, line=33):
    """A run whose documents hold one byte z; the number of that document, and of the step, from 1, that has it."""
    path = write_documents(folder)
    lines = path.read_text().splitlines()
    lines[line] = json.dumps({"text": json.loads(lines[line])["text"][:-3] + "zab"})
    path.write_text("\n".join(lines))
    config = tiny_config(
        folder, *keys, "model.tie_embeddings=false", "trainer.max_steps=20", "trainer.validate_every=20"
    )
    data = PackingDataModule(config, progress=False)
    data.setup()
    corpus = data.corpora.train
    (document,) = [n for n in range(corpus.num_documents) if POISON in np.asarray(corpus.document(n))]
    step = next(n for n in range(20) if any((batch.tokens == POISON).any() for batch in data.steps[n].batches))
    assert 2 < step < 18, "there is something before it and after it"
    return config, document, step + 1


embed = torch.nn.Embedding.forward


def poisoned(self, tokens):
    return embed(self, tokens).masked_fill((tokens == POISON)[..., None], torch.inf)


def diverged(config, caplog):
    with caplog.at_level(logging.WARNING):
        metrics = fit(config, progress=False)["metrics"]
    return metrics, [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        (33, [*GREEDY, "trainer.checkpoint_every=20"]),
        (45, [*CARRY, "data.mode=stream", "data.tokens_per_step=144", "trainer.checkpoint_every=2"]),
    ],
    ids=["from the start", "from a checkpoint"],
)
def test_the_layer_and_the_document_are_named(tmp_path, caplog, monkeypatch, line, keys):
    monkeypatch.setattr(torch.nn.Embedding, "forward", poisoned)
    config, document, step = with_poison(tmp_path, *keys, "trainer.log_every=7", line=line)
    metrics, said = diverged(config, caplog)
    assert metrics["diverged_at_step"] == step and metrics["diverged_document"] == document
    assert said == [
        f"Taken again, step {step} has the first values that are not finite in the output of backbone.embedding, in training "
        f"document {document}."
    ]
    assert all(int(path.stem.partition("=")[2]) < step for path in checkpoints(run_folder(config) / "checkpoints"))


def test_a_gradient_is_named_too(tmp_path, caplog, monkeypatch):
    hidden = boundary.Boundary.hidden

    def without_gradient_at(self, model, batch):
        """The root of zero has none: the loss is finite, and the step after it is not."""
        found = hidden(self, model, batch)
        place = (batch.tokens == POISON) & batch.loss_mask
        return found.index_put((place,), found[place] + (found[place] * 0).sqrt())

    config, document, step = with_poison(tmp_path, *GREEDY, "trainer.log_every=5")
    monkeypatch.setattr(boundary.Boundary, "hidden", without_gradient_at)
    metrics, (said,) = diverged(config, caplog)
    assert metrics["diverged_at_step"] == step + 1 and metrics["diverged_document"] == document
    assert (
        f"step {step} has the first values that are not finite in the gradient at the output of the model, in " in said
    )


def test_a_step_is_named_that_was_not_logged(tmp_path, caplog):
    config = tiny_config(tmp_path, *GREEDY, "optimizer.lr=1e30", "trainer.log_every=100", "trainer.checkpoint_every=4")
    outcome = attempt(config, "here", False)
    (record,) = read_records(run_folder(config))
    assert record["metrics"]["diverged_at_step"] == 2 and record["metrics"]["steps"] == 4
    assert outcome.state == "diverged"
    assert outcome.why.startswith(
        "its loss was not finite at step 2. Taken again, step 2 has the first values that are not"
    )
    assert not checkpoints(run_folder(config) / "checkpoints"), "a model of NaN is no checkpoint"


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_half_precision_is_refused_where_bfloat16_would_run(tmp_path, monkeypatch, accelerator):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="^trainer.precision: expected one that a CPU computes, .* got '16-mixed'"):
        fit(tiny_config(tmp_path, "trainer.precision=16-mixed", f"trainer.accelerator={accelerator}"), progress=False)
    assert not (tmp_path / "cache").exists()


def test_the_record_names_the_backend_that_ran(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, *GREEDY, "trainer.max_steps=1")
    assert fit(config, progress=False)["hardware"]["backend"] == "cpu"
    monkeypatch.setattr(build, "ready", lambda kind: False)
    monkeypatch.setattr(backends, "_chosen", {})
    record = fit(tiny_config(tmp_path, *GREEDY, "trainer.max_steps=1", "seed=1"), progress=False)
    assert record["config"]["ops"]["backend"] == "auto" and record["hardware"]["backend"] == "reference"


def test_a_leak_that_cannot_be_is_said(tmp_path, caplog):
    records = {}
    for strategy in ("single", "greedy"):
        caplog.clear()
        keys = [f"data.strategy={strategy}", f"name={strategy}", "trainer.boundary=leak", "trainer.max_steps=2"]
        config = tiny_config(tmp_path, *keys)
        with caplog.at_level(logging.WARNING):
            records[strategy] = fit(config, progress=False)
        said = "two documents: what trainer.boundary=leak lets cross" in caplog.text
        assert said is (strategy == "single")
    data = PackingDataModule(config, progress=False)
    data.setup()
    behind = [len(row) - 1 for step in range(2) for batch in data.steps[step].batches
              for row in [batch.layout.starts[batch.layout.rows == r] for r in range(batch.layout.shape[0])]]  # fmt: skip
    counts = {strategy: record["metrics"]["documents_behind_another"] for strategy, record in records.items()}
    assert counts == {"single": 0, "greedy": sum(behind)} and sum(behind) > 0
    tokens = sum(
        int((batch.layout.ends - batch.layout.starts)[batch.layout.rows == r][1:].sum())
        for step in range(2)
        for batch in data.steps[step].batches
        for r in range(batch.layout.shape[0])
    )
    doses = {strategy: record["metrics"]["tokens_behind_another"] for strategy, record in records.items()}
    assert doses == {"single": 0, "greedy": tokens} and tokens > sum(behind)
    (table,) = training_tables(list(records.values()))
    assert [note for note in table.notes if "nothing crossed" in note] == [
        "No row of single held two documents: nothing crossed, as under reset."
    ]


def test_weights_that_are_not_finite_are_not_started_from(tmp_path):
    model = MambaLM(vocab_size=256, d_model=8, n_layer=2, d_state=4)
    with torch.no_grad():
        model.backbone.layers[1].mixer.D[3] = torch.nan
    model.save_pretrained(tmp_path / "published")
    with pytest.raises(
        ConfigError, match="^trainer.init_from: .*published: backbone.layers.1.mixer.D has values that are"
    ):
        fit(tiny_config(tmp_path, f"trainer.init_from={tmp_path}/published"), progress=False)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["false", "true"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_document_is_named_on_a_gpu_too(tmp_path, caplog, monkeypatch, graphs, precision):
    monkeypatch.setattr(torch.nn.Embedding, "forward", poisoned)
    keys = ["trainer.accelerator=gpu", f"trainer.cuda_graphs={graphs}", f"trainer.precision={precision}"]
    config, document, step = with_poison(tmp_path, *GREEDY, *keys, "trainer.log_every=7")
    metrics, (said,) = diverged(config, caplog)
    assert metrics["diverged_at_step"] == step and metrics["diverged_document"] == document
    assert "in the output of backbone.embedding, in training document" in said
