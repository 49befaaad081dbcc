"""Tables of evaluations: models that answered the same questions, and trained arms whose runs ended with evaluations."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import pandas as pd

from packmamba.report import summary
from packmamba.report.inference import Resampled
from packmamba.report.items import minus
from packmamba.report.measures import COUNTS, MAIN, arms_evaluations, measures, questions, stem, title
from packmamba.report.summary import Arm, Interval, Record, frame
from packmamba.report.tables import Cell, Column, Table, mean_sd, number, word
from packmamba.report.training import DIFFERENCE, difference, difference_cell, versus


def evaluation_tables(records: Sequence[Record]) -> list[Table]:
    """A table for each question: means and standard deviations over seeds; ``records`` are of one corpus."""
    asked = questions(records)
    return [_models_table(question, some, asked) for question, some in asked.items()]


def _models_table(question: tuple[str, str], records: Sequence[Record], asked: Collection[tuple[str, str]]) -> Table:
    runs = frame(records, "evaluation")
    present = list(dict.fromkeys(metric for record in records for metric in record["metrics"]))
    metrics = measures(present)
    columns = [Column("model", ("model",), False), Column("runs", ("runs",)), *(_column(m, present) for m in metrics)]
    columns += [Column(count, (count,)) for count in COUNTS if count in present]
    name = "evaluation" if len(asked) == 1 else f"evaluation-{stem(question, asked)}"
    options = f", {question[1]}" if len(asked) > 1 and question[1] else ""
    table = Table(name, f"Evaluation: {question[0]}{options}", columns)
    main = next((m for m in MAIN if m in present), "")
    arms = {
        str(arm): group.drop_duplicates("seed", keep="last").set_index("seed")
        for arm, group in runs.groupby("arm", sort=False)
    }
    files = {arm: latest["items"].dropna().to_dict() for arm, latest in arms.items() if "items" in latest}
    first = next((name for name in (*summary.BASELINES, *arms) if name in arms), "")
    arms = {name: arms[name] for name in dict.fromkeys([first, *arms]) if name in arms}
    paired = {arm: minus(of, files[first], main) for arm, of in files.items() if arm != first and first in files}
    said = any(paired.values())
    if said:
        columns.append(Column(f"{title(main, present)} minus {first}'s [95% CI]", (*DIFFERENCE[:3], "items")))
        table.notes = [
            "The difference is paired: of the same items, of groups of them where documents have groups. Its interval is over "
            "items, and over seeds too where both models have several."
        ]
    for arm, latest in arms.items():
        cells = [mean_sd(latest[m], len(latest)) for m in metrics]
        cells += [number(latest[count].mean(), ",.0f") for count in COUNTS if count in present]
        cells += [_minus_cell(paired.get(arm))] * said
        table.rows.append([word(arm), number(len(latest), "d"), *cells])
    return table


def _minus_cell(found: Resampled | None) -> Cell:
    if found is None:
        return Cell("-", (None,) * 4)
    cell = difference_cell(Interval(found.mean, found.low, found.high, found.groups))
    return Cell(cell.text, (found.mean, found.low, found.high, found.groups))


def evaluation_label(records: Sequence[Record]) -> str:
    """The evaluation's name, if it is only one, and a short hash of its documents."""
    asked = questions(records)
    (_, some), *others = asked.items()
    name = "documents" if others else some[0]["config"]["evaluation"]["name"]
    return f"{name}-{zlib.crc32(some[0]['corpus_hash'].encode()) & 0xFFFF:04x}"


def arms_evaluation_tables(records: Sequence[Record]) -> list[Table]:
    """For each evaluation of the trained arms its numbers and the main one's paired difference; ``records`` are of one corpus."""
    arms = summary.training_arms(records)
    return [_arms_table(name, metrics, arms) for name, metrics in arms_evaluations(arms).items()]


def _arms_table(name: str, present: list[str], trained: Sequence[Arm]) -> Table:
    main, counts = present[0], [count for count in COUNTS if count in present]
    arms = [arm for arm in trained if _answers(arm, name, main)]
    others = [m for m in measures(present) if m not in (main, "chance")]
    chance = ["chance"] * ("chance" in present)
    table = Table(
        f"evaluation-{name}",
        f"Evaluation by arm: {name}",
        [
            Column("arm", ("arm",), False),
            Column("seeds", ("seeds", "seeds_without")),
            _column(main, present),
            Column(f"minus {versus(arms)} [95% CI]", DIFFERENCE),
            *(_column(m, present) for m in others),
            *(Column(title(one, present), (one,)) for one in (*chance, *counts)),
        ],
    )
    lacking = False
    for arm in arms:
        count = summary.seeds_of(arm, arms, f"{name}.{main}")
        lacking |= count.finite < count.expected
        table.rows.append(
            [
                word(arm.label),
                Cell(str(count), (count.finite, count.diverged + count.missing)),
                mean_sd(arm[f"{name}.{main}"], count.expected),
                difference_cell(difference(arm, arms, f"{name}.{main}"), count.expected),
                *(mean_sd(arm[f"{name}.{m}"], count.expected) for m in others),
                *(number(arm[f"{name}.{m}"].mean(), ".4g") for m in chance),
                *(number(arm[f"{name}.{m}"].mean(), ",.0f") for m in counts),
            ]
        )
    table.notes = [
        "Every arm's model answers the same questions, each document from zero state; as trained, in its run's rows with its "
        "boundary scheme. Differences are paired over seeds, with 95 % intervals by Student's t."
    ]
    if lacking:
        table.notes.append(
            "A run that diverged answers nothing; one that is missing has no record, or no such number. Means are over the rest."
        )
    return table


def _answers(arm: Arm, name: str, main: str) -> bool:
    """Whether the arm's runs were to answer this evaluation, or have."""
    wanted = arm.runs.get("config.evaluations", pd.Series(dtype=object)).dropna()
    return any(name in asked for asked in wanted) or arm[f"{name}.{main}"].notna().any()


def _column(metric: str, present: Collection[str]) -> Column:
    return Column(title(metric, present), (metric, f"{metric}_sd"))
