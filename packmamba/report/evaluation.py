"""Tables of evaluations: a line for each model that answered the same questions."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from packmamba.report.summary import Record, frame
from packmamba.report.tables import Column, Table, mean_sd, number, word

TITLES = {
    "accuracy": "accuracy",
    "chance": "chance",
    "nats": "nats an answer",
    "choice_accuracy": "right choices",
    "choice_accuracy_by_bytes": "right choices, by bytes",
    "loss": "loss",
    "bits_per_byte": "bits per byte",
}
COUNTS = ("answers", "examples", "documents", "targets")


def evaluation_tables(records: Sequence[Record]) -> list[Table]:
    """Means and standard deviations over seeds; ``records`` are of one evaluation with the same questions."""
    runs = frame(records, "evaluation")
    if runs.empty:
        return []
    name = runs["config.evaluation.name"].iloc[0]
    present = list(dict.fromkeys(metric for record in records for metric in record["metrics"]))
    metrics = sorted((m for m in present if m not in COUNTS), key=[*TITLES, *present].index)
    columns = [Column("model", ("model",), False), Column("runs", ("runs",))]
    columns += [Column(TITLES.get(m, m.replace("_", " ")), (m, f"{m}_sd")) for m in metrics]
    columns += [Column(count, (count,)) for count in COUNTS if count in present]
    table = Table("evaluation", f"Evaluation: {name}", columns)
    for arm, group in runs.groupby("arm", sort=False):
        latest = group.groupby("seed").last()
        cells = [mean_sd(latest[m]) for m in metrics]
        cells += [number(latest[count].mean(), ",.0f") for count in COUNTS if count in present]
        table.rows.append([word(str(arm)), number(len(latest), "d"), *cells])
    return [table]


def evaluation_label(records: Sequence[Record]) -> str:
    """The evaluation's name and a short hash of its questions."""
    chosen = [record for record in records if record["kind"] == "evaluation"][0]
    return f"{chosen['config']['evaluation']['name']}-{zlib.crc32(chosen['corpus_hash'].encode()) & 0xFFFF:04x}"
