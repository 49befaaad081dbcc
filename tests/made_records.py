"""Invented records, and the tables made of them."""

from __future__ import annotations

import csv
import io

from experiments.packing.report import KINDS as PACKING
from packmamba.lab.records import METRICS, append_record, make_record, read_records
from packmamba.lab.report.aggregate import with_items
from packmamba.lab.report.html import build_sections, files_of_tables, tables_of, write_sections
from packmamba.lab.report.tables import write_table

TIME = "2030-01-01T00:00:00+00:00"


def scheme(strategy, boundary="reset"):
    return {"data": {"strategy": strategy}, "trainer": {"boundary": boundary}}


SCHEMES = {"single": scheme("single"), "padded": scheme("padded"), "packed-reset": scheme("greedy")}
SCHEMES |= {"packed-leak": scheme("greedy", "leak"), "mine": scheme("best_fit_decreasing")}


def table_files(records, kinds=None):
    """Return the text of each table's files by name."""
    return files_of_tables(tables_of(build_sections(records, figures=False, kinds=kinds)))


def write_report(folder, kinds=None, records=None):
    """Write the report of records, the folder's unless given, and return its page."""
    if records is None:
        records = with_items(folder, read_records(folder))
    return write_sections(folder, build_sections(records, kinds=kinds))


def training(arm, seed=0, loss=2.0, corpus="corpus-a", config=None, time=TIME, **metrics):
    values = dict.fromkeys(METRICS) | {"steps": 10, "real_tokens": 1000, "val_loss": loss, "val_loss_start": loss + 1}
    values |= {"real_tokens_per_second": 100.0, "slots_per_second": 125.0, "padding_fraction": 0.2}
    falling = [{"step": n, "real_tokens": 100 * n, "seconds": n / 7, "loss": loss + 1 / (1 + n)} for n in (0, 5, 10)]
    first = {"start": 0, "end": 8, "loss": loss + 1, "count": 80}
    rest = {"start": 8, "end": 64, "loss": loss, "count": 500}
    curves = {"train": [], "validation": falling, "loss_by_position": [first, rest]}
    config = {"name": arm, "seed": seed, **SCHEMES[arm.split(" ")[0]], **(config or {})}
    made = make_record("training", "question", arm, config, seed, corpus, values | metrics, 1.5, curves)
    return made | {"time": time}


def throughput(arm, rate, run="one", corpus="corpus-a"):
    metrics = {"real_tokens_per_second": rate, "slots_per_second": rate / 0.8, "padding_fraction": 0.2, "rounds": 7}
    metrics |= {"seconds_per_step_median": 1000 / rate, "seconds_per_step_spread": 0.01}
    config = {"run": run, **SCHEMES[arm.split(" ")[0]]}
    return make_record("throughput", "question", arm, config, 0, corpus, metrics, 1.0)


def packing(strategy, row_length, padding, seconds=0.5, buffer=None, seed=0):
    config = {"strategy": strategy, "row_length": row_length, "buffer": buffer, "distribution": "documents-2k"}
    metrics = {"padding_fraction": padding, "planning_seconds": seconds, "num_rows": 10, "num_documents": 2000}
    config |= {"num_documents": 2000, "overlong": "error"}
    return make_record("packing", "packing", strategy, config, seed, "documents-2k-2000", metrics, 1.0)


def write(folder, records):
    for record in records:
        append_record(folder / "records" / "runs.jsonl", record)
    return folder


def read_rows(text):
    """Rows of a CSV, as mappings."""
    return list(csv.DictReader(io.StringIO(text)))


def table(records, name):
    """Rows of a generated CSV, as mappings."""
    return read_rows(table_files(records, PACKING)[f"{name}.csv"])


def rows_of(kinds, records, name):
    """Rows of a table that a study makes of trainings, as mappings."""
    (made,) = (made for made in kinds["training"].tables(records) if made.name == name)
    return read_rows(write_table(made, "csv"))
