"""Tables of simulated studies: how often a family holds a false verdict, and what diverged runs do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from scipy.stats import binomtest

from packmamba.lab.report.aggregate import Record, frame
from packmamba.lab.report.html import Kind
from packmamba.lab.report.tables import Cell, Table, make_table

DIVERGING = {"none": "none", "alike": "20 % of both arms, at random", "highest losses": "20 % of both arms, the worst"}
TAILS = {"normal": "normal", "heavy": "heavy (t, 2 degrees)"}
WORDS = ("different (diverges)", "different, of survivors", "open, of survivors", "equivalent", "different", "open")


def tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate rates of false verdicts, and the verdicts where one arm diverges."""
    runs = frame(records, "verdicts")
    fields = [column for column in runs if column.startswith("config.")]  # of a Study
    runs = runs.drop_duplicates(fields, keep="last").rename(columns=lambda column: column.removeprefix("config."))
    return [rates(runs[runs["share"] == 0]), diverging(runs[runs["share"] > 0])]


def rates(runs: pd.DataFrame) -> Table:
    """Make a row for each kind of study: families with a false claim, by the number of seeds."""
    rows, seeds = [], sorted(runs["seeds"].unique())
    kinds = ["groups", "contrasts", "shown", "tails", "diverging"]
    places = {word: place for words in (TAILS, DIVERGING) for place, word in enumerate(words)}
    runs = runs.sort_values(kinds, key=lambda column: column.map(lambda value: places.get(value, value)), kind="stable")
    for (groups, contrasts, shown, tails, lost), some in runs.groupby(kinds, sort=False):
        row: dict[str, Any] = {"intervals": "seeds" if groups == 1 else f"seeds and {groups} groups"}
        row |= {"family": f"{contrasts}" + f", {shown} of them clear" * bool(shown), "tails": TAILS[tails]}
        row["diverging"] = DIVERGING[lost]
        for run in some.to_dict("records"):
            row[f"{'equivalent' if run['effect'] else 'different'}_{run['seeds']}"] = share(run["wrong"], run["trials"])
        rows.append(row)
    claims = [f"false {claim}, {n} seeds = {claim}_{n}[]" for claim in ("different", "equivalent") for n in seeds]
    over_seeds, over_groups = ([*some["trials"].astype(int).unique()] for _, some in runs.groupby(runs["groups"] > 1))
    return make_table(
        "rates",
        "Simulated studies: share of families with at least one false verdict",
        "!intervals over = intervals | !contrasts = family | !tails | !diverged runs = diverging | "
        + " | ".join(claims),
        rows,
        f"Of {either(over_seeds)} studies a cell over seeds, of {either(over_groups)} over seeds and groups; the larger number "
        "where the smaller shows more than 4 %. In brackets the share's 95 % interval by the number of studies (Clopper and "
        "Pearson). False different: no arm has an effect. False equivalent: every effect is the margin. Clear contrasts have "
        "a huge effect, or none, so that Holm's adjustment gets milder for the others.",
    )


def share(wrong: float, trials: float) -> Cell:
    """Make a cell of a share of simulated studies, with its exact 95 % interval."""
    found = binomtest(round(wrong * trials), int(trials)).proportion_ci()
    ends = (wrong, float(found.low), float(found.high))
    low, high = (f"{100 * end:.2f}" for end in ends[1:])
    return Cell(f"{100 * wrong:.2f} % [{low}, {high}]", ends)


def either(counts: list[int]) -> str:
    """Name the numbers of studies."""
    return " or ".join(f"{count:,}" for count in sorted(counts))


def diverging(runs: pd.DataFrame) -> Table:
    """Make a row for each share of one arm's runs that diverge: the verdicts that it gets."""
    shares = runs.reindex(columns=[*WORDS]).fillna(0.0).set_axis([f"verdict_{i}" for i in range(len(WORDS))], axis=1)
    rows = runs[["seeds", "share"]].join(shares).sort_values(["seeds", "share"])
    return make_table(
        "diverging",
        "Simulated studies: verdicts of an arm whose runs diverge, beside one whose runs do not",
        "seeds:d | share of runs = share:% | " + " | ".join(f"{word} = verdict_{i}:%" for i, word in enumerate(WORDS)),
        rows.to_dict("records"),
        "The effect of the runs that do not diverge is the margin.",
    )


KINDS = {"verdicts": Kind(tables)}
