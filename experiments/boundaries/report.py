"""Arms by their configuration, losses by place and package; tables and figures of starts, order and
leaks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from experiments.common import ruled_columns, unit
from packmamba.lab.report import aggregate, statistics
from packmamba.lab.report.aggregate import Record, Seeds, divergence, frame
from packmamba.lab.report.figures import MUTED, Figure, axes, finish, legend_below
from packmamba.lab.report.html import Kind
from packmamba.lab.report.statistics import Comparison, Estimate, difference_by_group, estimate, holm, rule, verdict
from packmamba.lab.report.tables import Cell, Table, make_table, ruled

STARTS = {"reset": "zero", "fitted_noise": "noise", "state_passing": "foreign"}
STARTS |= {"carry": "own", "carry_scan": "own scan"}
LEAKS = {"reset": "rows", "leak": "leak", "leak_conv": "leak, convolution", "leak_scan": "leak, scan"}
LEAKS |= {"state_passing_within_row": "foreign heads"}
RATE = 2e-3  # learning rate of all runs that name none
TUNING = 100  # seeds from here on are for choices, and are not reported
REACH = 32  # beyond: from T to this many times T
GAINS = "long_context.by_group"


def name_of(run: pd.Series) -> str:
    """Name an arm's scheme from its configuration."""
    says = lambda key: run.get(f"config.{key}")
    if says("data.strategy") != "concat_split":
        return "whole"
    boundary = says("trainer.boundary")
    # Streams for each row of a step.
    pool = says("data.streams") * says("data.row_length") / says("data.tokens_per_step")
    if says("data.stagger") and not says("data.shuffle_steps"):
        control = says("data.max_tokens_per_batch") < says("data.tokens_per_step")
        place = "" if pool >= 32 else f", {pool:g} streams a row" if pool > 1 else ", plain streams"
        return STARTS.get(boundary, boundary) + (", control" if control else "") + place
    if says("data.stagger"):
        return "shuffled"
    return "learned" if says("model.learned_initial_state") else LEAKS.get(boundary, boundary)


@dataclass(frozen=True)
class Setting:
    """Hold the setting that compared arms share; T is the length of rows, or of the rows that whole
    is compared with.
    """

    T: int
    tokens: int
    width: int
    lr: float
    stagger: bool
    after: bool  # from the weights of another run
    tuning: bool  # seeds on which things were chosen
    tried: bool  # true in a sweep that tries learning rates: compared inside it alone

    def label(self) -> str:
        size = {512: "14M", 768: "47M"}.get(self.width, f"width {self.width}")
        marks = [", post-training"] * self.after + [", tuning seeds"] * self.tuning
        marks += [f", rate {self.lr:g}"] * (self.tried or (self.lr != RATE and not self.after))
        return f"T = {self.T}, {size}, {self.tokens / 1e6:.3g}M tokens" + "".join(marks)


@dataclass(frozen=True, eq=False)
class Arm:
    """Runs of one arm, by seed."""

    name: str
    setting: Setting
    runs: pd.DataFrame
    points: ClassVar[Any] = aggregate.Arm.points
    __getitem__: ClassVar[Any] = aggregate.Arm.__getitem__
    diverged: ClassVar[Any] = aggregate.Arm.diverged

    @property
    def expected(self) -> set[int]:
        """Return the seeds that it has or that sweeps say it should have."""
        said = [sweep["seeds"] for sweep in self.runs.get("sweep", ()) if isinstance(sweep, dict)]
        wanted = (seed for seeds in said for seed in seeds if (seed >= TUNING) == self.setting.tuning)
        return {*self.runs.index, *wanted}

    @functools.cached_property
    def places(self) -> pd.DataFrame:
        """Return nats and targets by seed, package and start of places, of the seeds that did not
        diverge.
        """
        points = replace(self, runs=self.runs[self.runs["val_loss"].notna()]).points("perplexity.by_group")
        return points if len(points) else pd.DataFrame([], columns=["seed", "group", "start", "nats", "targets"])

    @functools.cache
    def losses(self, low: float, high: float) -> tuple[pd.DataFrame, pd.Series]:
        """Sum nats (seeds, packages) at places from low up to high, and targets (packages,)."""
        here = self.places[self.places["start"].between(low, high, inclusive="left")]
        here = statistics.of_finite_runs(here, "nats")
        sums = here.groupby(["seed", "group"])[["nats", "targets"]].sum()
        return sums["nats"].unstack("group"), sums["targets"].groupby("group").last()


Settings = dict[Setting, dict[str, Arm]]


def arms_by_setting(records: Sequence[Record]) -> Settings:
    """All arms that were trained, by setting and name; of a repeated run the latest."""
    runs = frame(records, "training")
    runs["tried"] = runs["arm"].str.contains(" lr=", regex=False)
    runs["arm"] = [name_of(run) for _, run in runs.iterrows()]
    runs["budget"] = runs["config.trainer.max_steps"] * runs["config.data.tokens_per_step"]
    whole = runs["arm"] == "whole"
    rows = runs["config.data.row_length"].astype(float)
    window = runs.get("config.evaluation_options.long_context.window", pd.Series(np.nan, runs.index)).astype(float)
    runs["T"] = rows.where(~whole, window.fillna(rows))
    runs["staggered"] = runs.get("config.data.stagger", pd.Series(False, runs.index)).fillna(False).astype(bool) | whole
    runs["tuning"] = runs["seed"] >= TUNING
    runs["after"] = runs.get("config.trainer.init_from", pd.Series(None, runs.index)).notna()
    keys = ["T", "budget", "config.model.d_model", "config.optimizer.lr", "staggered", "after", "tuning", "tried"]
    settings: Settings = {}
    for (T, tokens, width, lr, *marks, name), group in runs.groupby([*keys, "arm"], sort=True):
        latest = group.drop_duplicates("seed", keep="last").set_index("seed").sort_index()
        setting = Setting(int(T), int(tokens), int(width), float(lr), *map(bool, marks))
        settings.setdefault(setting, {})[name] = Arm(name, setting, latest)
    return settings


def of_one_start(*some: Arm) -> list[Arm]:
    """Each without the seeds of which these arms' runs went on from different weights: they are no
    pairs.
    """
    starts = [arm.runs["started_from_checksum"] for arm in some if "started_from_checksum" in arm.runs]
    apart = pd.concat([pd.Series(dtype=object), *starts], axis=1).nunique(axis=1) > 1
    lost = apart.index[apart]
    return [replace(arm, runs=arm.runs.drop(index=lost, errors="ignore")) if len(lost) else arm for arm in some]


def paired(
    arm: Arm, other: Arm, low: float, high: float, less: tuple[Arm, Arm] | None = None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return nats of one arm minus the other's (seeds, packages) and targets (packages,); ``less``:
    minus these two's too.
    """
    sides = [one.losses(low, high) for one in of_one_start(arm, other, *reversed(less or ()))]
    differences, targets = sides[0]
    for sign, (nats, theirs) in zip((-1, 1, -1), sides[1:]):
        if not targets.equals(theirs):
            return None
        differences = differences + sign * nats
    differences = differences.dropna()
    return None if differences.empty else (differences.to_numpy(), targets.to_numpy())


def contrast(arm: Arm, other: Arm, low: float, high: float, less: tuple[Arm, Arm] | None = None) -> Estimate | None:
    """Estimate ``paired`` in nats per target; without packages, by Student's t over seeds."""
    both = paired(arm, other, low, high, less)
    return estimate(*both) if both else None


def comparison(arm: Arm, other: Arm, low: float, high: float, **family: Any) -> Comparison:
    """Hold what decides about ``contrast``; ``family``: further fields of Comparison."""
    differences, targets = paired(arm, other, low, high) or ([], None)
    return Comparison(differences, targets, MARGIN, divergence(arm, other), **family)


def dose(arm: Arm) -> float:
    """Share of the tokens that stand behind another document in their row."""
    return arm["tokens_behind_another"].mean() / arm["real_tokens"].mean()


def spans(T: int) -> dict[str, tuple[float, float]]:
    return {"inside": (0, T), "beyond": (T, REACH * T)}


COLORS = {"noise": "#E69F00", "foreign": "#0072B2", "own": "#009E73", "shuffled": "#D55E00"}
# powers of two between which places are drawn: before them differences are many times larger
LEAST, MOST = 5, 16


def starts_figures(records: Sequence[Record]) -> list[Figure]:
    """Draw the difference from zero against the place in the document over T, at the two T with
    most seeds and shuffled rows.
    """
    shown = [(s, here) for s, here in arms_by_setting(records).items() if not s.tuning and _pairs(here) > 1]
    shown.sort(key=lambda one: ("shuffled" not in one[1], one[0].after, -_pairs(one[1])))
    settings = list({s.T: (s, here) for s, here in reversed(shown)}.values())[::-1][:2]
    if not settings:
        return []
    fig, panels = axes(len(settings), width=10.0, height=4.2)
    for ax, (setting, here) in zip(panels, settings):
        ax.axhspan(-MARGIN, MARGIN, color=MUTED, alpha=0.12, linewidth=0)
        ax.axhline(0, color=MUTED, linewidth=1.2)
        ax.axvline(1, color="#b4b9c1", linewidth=1)
        drawn = [name for name in COLORS if name in here and _pairs(here, name) > 1]
        for i, name in enumerate(drawn):
            dodge = 2**0.5 * 1.09 ** (i - len(drawn) / 2)
            places = [(2**power, 2**power * setting.T) for power in range(-4, 5)]
            points = [(x * dodge, contrast(here[name], here["zero"], low, 2 * low)) for x, low in places]
            label = "the pool's rows, shuffled" if name == "shuffled" else f"{name} state"
            _draw(ax, points, label=label, color=COLORS[name], markersize=4, linewidth=1.4)
        title = f"Rows of {setting.T} tokens ({_pairs(here)} seeds)"
        ax.set(title=title, xscale="log", xlabel="place in the document / row length")
        ax.set_xticks([1 / 16, 1 / 4, 1, 4, 16], ["1/16", "1/4", "1", "4", "16"])
        ax.set_xticks([], minor=True)
        ax.sharey(panels[0])
        for x, text, side in ((0.9, "inside T", "right"), (1.1, "beyond T", "left")):
            ax.text(x, 0.98, text, ha=side, va="top", color=MUTED, transform=ax.get_xaxis_transform())
    panels[0].set_ylabel("loss minus that of zero states, nats")
    legend_below(fig, columns=4)
    caption = (
        "Loss minus that of zero states, by the place in the document over the row length; below zero is better. Bars are 95 % "
        f"intervals over seeds and packages, the band is the margin of {MARGIN} nats."
    )
    return [finish(fig, "starts", caption)]


def _pairs(here: dict[str, Arm], name: str = "own", other: str = "zero") -> int:
    """Seeds that have both arms."""
    if not {other, name} <= here.keys():
        return 0
    first, second = of_one_start(here[other], here[name])
    return len(first.runs.index.intersection(second.runs.index))


def leak_figures(records: Sequence[Record]) -> list[Figure]:
    """Draw a leak's effect in post-training on the loss by position in the document."""
    known = arms_by_setting(records).items()
    settings = {s: here for s, here in known if s.after and not s.tuning and _pairs(here, "leak", "rows") > 1}
    if not settings:
        return []
    fig, (ax,) = axes(1, width=7.0)
    for i, ((setting, here), color) in enumerate(zip(settings.items(), itertools.cycle(COLORS.values()))):
        points = [
            (2 ** (power + 0.5) * 1.09**i, contrast(here["leak"], here["rows"], 2**power, 2 ** (power + 1)))
            for power in range(LEAST, MOST)
        ]
        label = f"{setting.label()}, {_pairs(here, 'leak', 'rows')} seeds"
        _draw(ax, points, label=label, color=color, linewidth=1.6)
    ax.axhline(0, color=MUTED, linewidth=1.2)
    ax.set(xscale="log", xlabel="place in the document", ylabel="loss: leak minus reset, nats")
    ax.set_xticks([64, 256, 1024, 4096, 16384], ["64", "256", "1024", "4096", "16,384"])
    ax.set_xticks([], minor=True)
    legend_below(fig, columns=1)
    caption = (
        f"Leak minus the same rows with reset, by the place in the document from {2**LEAST} on, each document read from "
        "zero; runs that went on from zero; bars are 95 % intervals over seeds and packages."
    )
    return [finish(fig, "leaks-post-training", caption)]


def _draw(ax: Any, points: Iterable[tuple[float, Estimate | None]], **style: Any) -> None:
    """Draw the estimates of several seeds with their intervals, those that have one."""
    found = [(x, one) for x, one in points if one and one.seeds > 1]
    means = [one.mean for _, one in found]
    halves = np.nan_to_num([[one.mean - one.low for _, one in found], [one.high - one.mean for _, one in found]])
    ax.errorbar([x for x, _ in found], means, np.maximum(halves, 0), marker="o", capsize=2, **style)


MARGIN = 0.005
MIDDLE = 2048  # row length that others are compared with
FIRST = 256  # places at the start of a document, where a leak is felt
PRIMARY_SETTING = "T = 2048, 14M, 100M tokens"
PRIMARY = (("coverage", "foreign", "zero"), ("continuity", "own", "foreign"))
LADDER = (
    *PRIMARY,
    ("own over zero", "own", "zero"),
    ("noise", "noise", "zero"),
    ("foreign over noise", "foreign", "noise"),
    ("own over noise", "own", "noise"),
    ("own scan", "own scan", "own"),
    ("whole", "whole", "own"),
    ("control", "zero, control", "zero"),
)
ORDER = (
    ("8 streams a row", "zero, 8 streams a row", "zero"),
    ("plain streams", "zero, plain streams", "zero"),
    ("shuffled", "shuffled", "zero"),
    ("plain streams, shuffled", "zero, plain streams", "shuffled"),
    ("the pool, other rows", "zero", "rows"),
    ("own, other rows", "own", "rows"),
    ("own, shuffled", "own", "shuffled"),
    ("rows, shuffled", "rows", "shuffled"),
)
LEAK = tuple((name, name, "rows") for name in (*list(LEAKS.values())[1:], "learned"))


def starts_tables(records: Sequence[Record]) -> list[Table]:
    """Primary outcomes, the ladder, order, leaks, context gain, and the arms; ``records`` are of
    one corpus.
    """
    settings = arms_by_setting(records)
    final = {setting: here for setting, here in settings.items() if not setting.tuning}
    tables = [
        _primary(final),
        _contrasts("ladder", "The ladder: what a continuing piece starts from", settings, LADDER),
        _agreement(final),
        _contrasts("order", "Order: pieces in other orders, all from zero unless said", _with_rows(settings), ORDER),
        _leaks(settings),
        _exploratory(final),
        _lengths(final),
        _gains(settings),
        _gain_differences(final),
        _arms(settings),
    ]
    return [table for table in tables if table.rows]


def _with_rows(settings: Settings) -> Settings:
    """Staggered pools, with the shuffled rows of ``leak.yaml`` beside them, whose documents lie in
    one stream.
    """
    rows = {s: here["rows"] for s, here in settings.items() if "rows" in here}
    beside = {s: rows.get(replace(s, stagger=False)) for s in settings if s.stagger}
    return {s: settings[s] | ({"rows": other} if other else {}) for s, other in beside.items()}


def _primary(settings: Settings) -> Table:
    """Four tests in each setting, Holm over them."""
    rows = []
    for setting, here in settings.items():
        every = len(set().union(*(here[name].expected for name in ("zero", "foreign", "own") if name in here)))
        family: dict[tuple[str, str], Comparison] = {}
        sides: dict[str, tuple[Arm, Arm]] = {}
        for title, *names in PRIMARY:
            if here.keys() >= set(names):
                sides[title] = here[names[0]], here[names[1]]
                for places, span in spans(setting.T).items():
                    family[title, places] = comparison(*sides[title], *span)
        # All four, measured or not: Holm does not get milder where an arm is missing.
        for (title, places), ruling in rule(family, {None: 4 - len(family)}).items():
            one, lost = ruling.estimate, len(sides[title][0].diverged | sides[title][1].diverged)
            said = f", {lost} diverged" if lost else ""
            row = {"setting": setting.label(), "outcome": title, "places": places, "packages": one.groups}
            rows.append(row | ruled(ruling) | {"every": Cell(f"{one.seeds} of {every}{said}", (every, lost))})
    return make_table(
        "primary",
        "Coverage and continuity inside and beyond T, nats per target",
        "!setting | !outcome | !places | difference [95% CI] = difference[] pairs | seeds = every diverged | packages:d | "
        + ruled_columns(MARGIN),
        rows,
        f"Coverage is foreign minus zero, continuity own minus foreign. Inside: places below T; beyond: T to {REACH} T.",
        f"Intervals and p resample seeds and packages together, {statistics.DRAWS:,} times. Primary is T = 2048 at "
        "14M; the rest explores. Holm over a setting's four. As registered: by the interval alone.",
    )


def compared(settings: Settings, pairs: Iterable[tuple[str, str, str]]) -> Iterator[tuple[Setting, str, Arm, Arm]]:
    """Yield the named pairs that a setting has."""
    for setting, here in settings.items():
        for what, arm, other in pairs:
            if {arm, other} <= here.keys():
                yield setting, what, here[arm], here[other]


def _span_columns(places: Iterable[str], form: str = "") -> str:
    """Make columns of make_table for the intervals at these places."""
    names = {place: place.removesuffix(" T").replace(" ", "~") for place in places}
    return " | ".join(f"{place} [95% CI] = {name}[] {name}_pairs{form}" for place, name in names.items())


def _at(
    places: Mapping[str, tuple[float, float]], arm: Arm, other: Arm, less: tuple[Arm, Arm] | None = None
) -> dict[str, Estimate | None]:
    return {place: contrast(arm, other, *span, less) for place, span in places.items()}


def _contrasts(name: str, title: str, settings: Settings, pairs: Sequence[tuple[str, str, str]]) -> Table:
    return make_table(
        name,
        f"{title}, nats per target",
        f"!setting | !what | !minus | {_span_columns(('inside T', 'beyond T'))}",
        [
            {"setting": setting.label(), "what": what, "minus": other.name} | _at(spans(setting.T), arm, other)
            for setting, what, arm, other in compared(settings, pairs)
        ],
        "Exploratory but for the primary outcomes; intervals are not adjusted for their number.",
    )


def _exploratory(settings: Settings) -> Table:
    """Make a row for each contrast of at least three seeds that is not primary; Holm over all of
    them.
    """
    ordered, rows = _with_rows(settings), []
    for setting, here in settings.items():
        for family, some in ((LADDER, here), (ORDER, ordered.get(setting, {})), (LEAK, here)):
            for _, what, arm, other in compared({setting: some}, family):
                if setting.label() == PRIMARY_SETTING and what in ("coverage", "continuity"):
                    continue
                for places, span in spans(setting.T).items():
                    both = paired(arm, other, *span)
                    if both and len(both[0]) > 2:
                        by_seed = both[0].sum(axis=1) / both[1].sum()
                        row: dict[str, Any] = {"setting": setting.label(), "what": what, "minus": other.name}
                        row["lost"] = divergence(arm, other).lost(len(both[0]))
                        row |= {"places": places, "difference": contrast(arm, other, *span), "same": _same(arm, other)}
                        row["p_equivalence"] = statistics.p_of_equivalence(by_seed, None, MARGIN)
                        row["p"] = (statistics.interval(by_seed) or statistics.NOTHING).p
                        rows.append(row | {"leaks": family is LEAK})
    _rule_exploratory(rows)
    return make_table(
        "exploratory",
        "Every exploratory contrast of the ladder, of order and of leaks, nats per target",
        "!setting | !what | !minus | !places | difference [95% CI] = difference[] pairs | "
        f"seeds at one commit and GPU = same:d | p of difference = p:p | {ruled_columns(MARGIN, 'by the interval alone')}",
        rows,
        "Intervals resample seeds and packages and are not adjusted. p: Student's t over seeds alone; "
        f"Holm over the {len(rows)} rows. Verdict: by the interval, and by p after Holm. Leak not caught, no leak arm: no leak "
        "of the setting is shown to harm at these places, so the test could not have failed.",
    )


def _rule_exploratory(rows: Sequence[dict[str, Any]]) -> None:
    """Add adjusted p and verdicts; a leak is caught in its own setting and at the same places."""
    of_zero, of_equivalence = (holm({i: row[p] for i, row in enumerate(rows)}) for p in ("p", "p_equivalence"))
    caught: dict[tuple[str, str], int] = {}
    rulings = []
    for i, row in enumerate(rows):
        found, at = row["difference"], (row["setting"], row["places"])
        claim = verdict(found, None if row["lost"] else MARGIN, of_zero[i], of_equivalence[i]) + row["lost"]
        rulings.append(statistics.Ruling(claim, found, of_zero[i], of_equivalence[i], verdict(found, MARGIN)))
        if row["leaks"]:
            caught[at] = max(caught.get(at, 0), rulings[i].shows_harm())
    for row, ruling in zip(rows, rulings):
        row |= ruled(ruling._replace(leak_caught=caught.get((row["setting"], row["places"]))))


def _same(arm: Arm, other: Arm) -> int:
    """Count the pairs whose runs have one commit and one kind of GPU."""
    runs = [one.runs for one in of_one_start(arm, other)]
    ours, theirs = (each["commit"] + each["hardware"].map(lambda hardware: str(hardware["gpus"])) for each in runs)
    return int(ours.eq(theirs).sum())


def _leaks(settings: Settings) -> Table:
    """Places alike at every T, too: inside and beyond T are others at another T."""
    spans_of = {"all places": (0, np.inf), f"first {FIRST}": (0, FIRST), f"from {FIRST} on": (FIRST, np.inf)}
    judged = [*spans_of][:2]
    rows: list[dict[str, Any]] = []
    family: dict[tuple[int, str], Comparison] = {}
    for setting, what, arm, other in compared(settings, LEAK):
        found, label = _at(spans_of | spans(setting.T), arm, other), setting.label()
        for place in judged:
            at = (label, place)
            family[len(rows), place] = comparison(arm, other, *spans_of[place], setting=at, is_leak=True)
        seeds = one.seeds if (one := found["all places"]) else 0
        rows.append({"setting": label, "what": what, "minus": other.name, "dose": dose(arm), "seeds": seeds} | found)
    for (i, place), ruling in rule(family).items():
        rows[i] |= {f"{place} verdict": ruling.verdict, f"{place} alone": ruling.by_interval}
    verdicts = [
        f"!{place}, {title} = {place.replace(' ', '~')}~{column}"
        for place in judged
        for title, column in ((f"verdict, margin ± {MARGIN}", "verdict"), ("by the interval alone", "alone"))
    ]
    return make_table(
        "leak",
        "Leaks: documents end to end in shuffled rows, minus the same rows with reset, nats per target",
        f"!setting | !what | !minus | dose:% | seeds:d | {_span_columns((*spans_of, 'inside T', 'beyond T'), ':5')} | "
        + " | ".join(verdicts),
        rows,
        "Dose: the share of tokens that stand behind another document in their row. Exploratory; intervals resample seeds and "
        f"packages and are not adjusted for their number. Verdict: by the interval, and by p after Holm over {len(family)}, the "
        f"rows at {' and '.join(judged)}.",
    )


def _lengths(settings: Settings) -> Table:
    """One arm at several T, and what own gains over zero: as many tokens a step, cut into rows of
    other lengths.
    """
    spans_of = {"all places": (0, np.inf), "first 512": (0, 512), "2048 to 16,384": (2048, 16384)}
    spans_of |= {"from 8192 on": (8192, np.inf)}
    rows = []
    for setting, here in settings.items():
        if setting.T == MIDDLE or setting.after:
            continue
        other = settings.get(replace(setting, T=MIDDLE), {})
        both = here.keys() & other.keys()
        pairs: dict[str, Any] = {name: (here[name], other[name]) for name in ("rows", "leak", "zero") if name in both}
        if {"own", "zero"} <= both:
            pairs["own over zero"] = here["own"], here["zero"], (other["own"], other["zero"])
        rows += [{"arm": name, "rows": setting.T, "minus": MIDDLE} | _at(spans_of, *of) for name, of in pairs.items()]
    return make_table(
        "row-length",
        f"Rows of other lengths minus rows of {MIDDLE}, nats per target",
        f"!arm | !rows | !minus | {_span_columns(spans_of)}",
        rows,
        "A step has as many tokens at every T, so that it holds fewer documents in longer rows. Rows and leak read the same "
        "documents at every T, the pool's zero other ones. Own over zero: its gain at one T minus that at the other. "
        "Exploratory.",
    )


def _agreement(settings: Settings) -> Table:
    """Tabulate agreement over seeds and packages."""
    rows = []
    for setting, what, arm, other in compared(settings, LADDER):
        for places, span in spans(setting.T).items():
            found = paired(arm, other, *span)
            if found is None or len(found[1]) < 2:
                continue
            differences, targets = found
            packages, mean = differences.mean(axis=0), differences.mean(axis=0).sum() / targets.sum()
            without = (packages.sum() - packages) / (targets.sum() - targets)
            row = {"setting": setting.label(), "what": what, "places": places, "difference": mean}
            for name, part in (("seeds", differences.sum(axis=1)), ("packages", packages)):
                agree = int((np.sign(part) == np.sign(mean)).sum())
                row[name] = Cell(f"{agree} of {len(part)}", (agree, len(part)))
            row["least"] = Cell(f"{without.min():+.4f} to {without.max():+.4f}", (without.min(), without.max()))
            rows.append(row | {"like": targets.sum() ** 2 / (targets**2).sum()})
    return make_table(
        "agreement",
        "The ladder: how many seeds and packages agree, and what is left without any one package",
        "!setting | !what | !places | difference:+.4f | seeds of this sign = seeds of_seeds | "
        "packages of this sign = packages of_packages | packages weigh like = like:.0f | "
        "without any one package = least most",
        rows,
        "A package's difference is the mean over seeds. Packages of unequal size weigh like so many of equal size.",
    )


def _gains(settings: Settings) -> Table:
    """Tabulate the gain from context before the last T tokens, by its length."""
    arms_of = [(setting, arm) for setting, here in settings.items() for arm in here.values()]
    windows = [k for k in (2, 4, 8, 16, 32) if any(f"long_context.gain_{k}" in arm.runs for _, arm in arms_of)]
    return make_table(
        "context-gain",
        "Context gain: what context beyond T tokens is worth, nats per target",
        " | ".join(["!setting | !arm", *(f"{k} T = gain_{k} gain_{k}_sd" for k in windows)]),
        [
            {"setting": setting.label(), "arm": arm.name}
            | {f"gain_{k}": arm[f"long_context.gain_{k}"] for k in windows}
            for setting, arm in arms_of
            if windows
        ],
        "Mean and standard deviation over the seeds that each arm has; same targets in every arm. Differences are paired in "
        "gain-differences.",
    )


def _gain_differences(settings: Settings) -> Table:
    """Tabulate by how much more than another an arm uses what lies farther back than T."""
    windows, rows = [4, 8, 16, 32], []
    for setting, here in settings.items():
        for name, arm in here.items():
            other = next((one for one in ("zero", "rows") if one in here and one != name), None)
            if other is None:
                continue
            one, base = of_one_start(arm, here[other])
            sums = {k: difference_by_group(one, base, GAINS, "gain", "documents", f"windows == {k}") for k in windows}
            found = {f"gain_{k}": statistics.bootstrap(*some) for k, some in sums.items()}
            if any(gain.seeds for gain in found.values()):
                row = {"setting": setting.label(), "arm": name, "minus": other}
                rows.append(row | {k: gain if gain.seeds else None for k, gain in found.items()})
    return make_table(
        "gain-differences",
        "Context gain: an arm's minus another's, nats per target",
        " | ".join(["!setting | !arm | !minus", *(f"{k} T [95% CI] = gain_{k}[] gain_{k}_pairs" for k in windows)]),
        rows,
        "Paired by seed; intervals resample seeds and packages, each document weighs the same. Exploratory.",
    )


def _arms(settings: Settings) -> Table:
    rows = []
    for setting, here in settings.items():
        for arm in here.values():
            runs, diverged = arm.runs, len(arm.diverged)
            seeds = Seeds(len(runs) - diverged, diverged, len(arm.expected) - len(runs))
            row = {"setting": setting.label(), "arm": arm.name, "lr": setting.lr, "dose": dose(arm)}
            row |= {"seeds": Cell(str(seeds), tuple(seeds))}
            row |= {"real_tokens": runs["real_tokens"].mean(), "val_loss": runs["val_loss"]}
            row |= {name: arm[name].mean() for name in ("peak_memory_bytes", "state_bytes", "state_age_steps")}
            rows.append(row | {places: _mean(arm, span) for places, span in spans(setting.T).items()})
    return make_table(
        "arms",
        "Every arm: losses and cost",
        "!setting | !arm | seeds = seeds diverged missing | learning rate = lr:g | tokens = real_tokens:,.0f | "
        "validation loss = val_loss val_loss_sd | inside T = inside:.4f | beyond T = beyond:.4f | "
        "peak memory = peak_memory_bytes:GiB | states = state_bytes:GiB | age, steps = state_age_steps:.0f | dose:%",
        rows,
        "Means are over the seeds that each arm has; the other tables pair them. Dose: the share of tokens that stand behind "
        "another document in their row, of the runs whose records have it.",
    )


def _mean(arm: Arm, span: tuple[float, float]) -> float | None:
    nats, targets = arm.losses(*span)
    return None if nats.empty else float(nats.mean(axis=0).sum() / targets.sum())


def texts(records: Sequence[Record]) -> str:
    """Name the unit of a document, and whether tokens mark it."""
    return unit(records) + ("" if records[0]["config"]["data"].get("begin_token") else "-unmarked")


KINDS = {"training": Kind(starts_tables, lambda records: [*starts_figures(records), *leak_figures(records)], texts)}
