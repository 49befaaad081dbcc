"""Rules between keys of several sections of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from packmamba.config.rules import chosen, names

ON_GPUS = ("16-mixed",)
NOT_ON_CPU = "trainer.precision: expected one that a CPU computes, such as bf16-mixed, got '{}', which needs a GPU"


def between_sections(config: Any) -> Iterator[str]:
    """A sentence for each rule between keys of a run's sections that does not hold."""
    yield from stray_options(config.evaluation_options, config.evaluations)
    if config.trainer.evaluate_every is not None and not config.evaluations:
        yield f"trainer.evaluate_every: expected evaluations, got none with {config.trainer.evaluate_every}"
    data, trainer = config.data, config.trainer
    if not data.validation_fraction:
        yield "data.validation_fraction: expected above 0, since every run is evaluated, got 0"
    boundary = chosen(trainer, "boundary")
    if boundary.continues:
        devices = trainer.devices * trainer.num_nodes
        if not chosen(data, "strategy").splits_documents:
            yield (
                f"trainer.boundary={trainer.boundary} needs data.strategy=split, whose rows go on in the next batch, "
                f"got '{data.strategy}'"
            )
        rows = data.batch_rows if data.takes_turns else data.streams // devices
        if rows < boundary.least_rows:
            yield f"trainer.boundary={trainer.boundary} needs batches of at least {boundary.least_rows} rows, got {rows}"
        if data.streams % devices:
            yield f"data.streams: expected a multiple of the {devices} devices, got {data.streams}"
        if data.shuffle_steps is not None:
            yield f"data.shuffle_steps: trainer.boundary={trainer.boundary} needs rows in order, got {data.shuffle_steps}"
        slots = data.streams * (data.row_length or 1)
        if data.takes_turns:
            yield from data.turns(devices)
        elif data.mode == "stream" and data.tokens_per_step % slots:
            yield (
                f"data.tokens_per_step: expected a multiple of data.streams * data.row_length = {slots}, so that steps "
                f"hold whole batches, got {data.tokens_per_step}"
            )
    if trainer.accelerator == "cpu" and trainer.precision in ON_GPUS:
        yield NOT_ON_CPU.format(trainer.precision)
    if trainer.strategy == "fsdp2" and not boundary.sharded:
        yield (
            f"trainer.strategy=fsdp2 cannot keep the states of trainer.boundary={trainer.boundary}, which live outside its "
            "shards; use ddp"
        )
    if trainer.strategy == "fsdp2" and trainer.average_snapshots > 1:
        snapshots = trainer.average_snapshots
        yield f"trainer.average_snapshots: trainer.strategy=fsdp2 keeps shares of weights, expected 1, got {snapshots}"
    if trainer.strategy == "fsdp2" and trainer.precision in ("16-mixed", "64-true"):
        yield f"trainer.strategy=fsdp2 needs trainer.precision=bf16-mixed or 32-true, got '{trainer.precision}'"
    for name, value, known in (
        ("trainer.accelerator", trainer.accelerator, ("auto", "gpu", "cuda")),
        ("trainer.strategy", trainer.strategy, ("auto",)),
        ("trainer.devices", trainer.devices, (1,)),
        ("trainer.num_nodes", trainer.num_nodes, (1,)),
        ("trainer.precision", trainer.precision, ("32-true", "bf16-mixed", "bf16-true")),
        ("trainer.boundary", trainer.boundary, names(trainer, "boundary", lambda scheme: scheme.graphs)),
        ("ops.backend", config.ops.backend, ("auto", "cuda")),
    ):
        if trainer.cuda_graphs and value not in known:
            yield f"trainer.cuda_graphs needs {name} to be {' or '.join(map(str, known))}, got {value}"


def stray_options(given: dict[str, Any], evaluations: list[str]) -> Iterator[str]:
    """A sentence for each entry of ``evaluation_options`` that is of no evaluation, or no mapping."""
    for name, parameters in given.items():
        if name not in evaluations:
            yield f"evaluation_options.{name}: not among evaluations, which are {', '.join(evaluations) or 'none'}"
        elif not isinstance(parameters, dict):
            yield f"evaluation_options.{name}: expected parameters and their values, got {parameters!r}"
