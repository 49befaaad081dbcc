"""Tables and figures of whole models: single against padded against packed, as users run it today and on equal terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from experiments.old_arms import records_of
from packmamba.report.aggregate import Record
from packmamba.report.figures import INK, Figure, axes, finish, legend_below, name_bars
from packmamba.report.tables import Cell, Column, Table, gibibytes, number, percent, word

OURS, PEER = "packmamba", "mamba-ssm"
# Times single, packed, on an A100: arXiv 2408.03865.
PAPER = {"1.4b": 3.06, "2.8b": 2.62}
_THEIRS, _OURS = "#E69F00", "#0072B2"


class Arm(NamedTuple):
    """What a table compares, by the fields of a record's configuration."""

    strategy: str
    row_length: int | None = None
    """None: padded to each batch's longest document."""
    sorted_by_length: bool = False
    layers: str = OURS
    graphs: bool = False

    @classmethod
    def of(cls, record: Record) -> Arm:
        config = record["config"]
        if "strategy" not in config:
            raise ValueError(f"config of the record of {record['arm']} lacks strategy")
        return cls(*(config.get(name, cls._field_defaults.get(name)) for name in cls._fields))

    @property
    def packs(self) -> bool:
        return self.strategy not in ("single", "padded")

    @property
    def leaks(self) -> bool:
        return self.packs and self.layers == PEER

    @property
    def single(self) -> Arm:
        """The same layers and graphs, one document at a time."""
        return Arm("single", layers=self.layers, graphs=self.graphs)

    @property
    def label(self) -> str:
        length = self.row_length or ("buckets" if self.sorted_by_length else "longest")
        scheme = {"single": "single", "padded": f"padded-{length}"}.get(
            self.strategy, f"packed-{length}-{self.strategy}"
        )
        return scheme + "-graph" * self.graphs

    def __str__(self) -> str:
        return self.label if self.layers == OURS else f"{self.layers}-{self.label}"

    @property
    def description(self) -> str:
        """What it does, for a page's legend."""
        whose = "our layers" if self.layers == OURS else f"{self.layers} as its users run it"
        rows = {
            "single": "one document at a time",
            "padded": f"each document in a row of its own, filled up to {self.row_length or 'the longest of its batch'}",
        }.get(self.strategy, f"documents packed into rows of {self.row_length} by {self.strategy}")
        return (
            f"{whose}; {rows}"
            + ", batches of documents of similar length" * self.sorted_by_length
            + "; state and convolution run on from one document into the next" * self.leaks
            + "; forward and backward replayed as one CUDA graph" * self.graphs
        )


TODAY = Arm("single", layers=PEER)
Arms = dict[Arm, Record]


def speedup_tables(records: Sequence[Record]) -> list[Table]:
    """What the paper compares, then every arm of each model size; of equal arms the latest record counts."""
    bare, steps = by_model(records, "speedup", "forward_backward"), by_model(records, "speedup", "steps")
    if not bare and not steps:
        return []
    broken_down = by_model(records, "breakdown", "forward_backward")
    idle = {model: arms[TODAY]["metrics"]["idle"] for model, arms in broken_down.items() if TODAY in arms}
    tables = [_headline(bare, steps, idle)] if bare else []
    models = [*bare, *(model for model in steps if model not in bare)]
    return [*tables, *(_arms(model, bare.get(model, {}), steps.get(model, {})) for model in models), *_positions(bare)]


def speedup_legend(records: Sequence[Record]) -> dict[str, str]:
    """What each arm does."""
    arms = [Arm.of(record) for kind in ("speedup", "breakdown") for record in records_of(records, kind)]
    return {str(arm): arm.description for arm in arms}


def speedup_figures(records: Sequence[Record]) -> list[Figure]:
    """Real tokens per second of every arm, a panel for each model size."""
    bare = by_model(records, "speedup", "forward_backward")
    if not bare:
        return []
    places = {arm: y for y, arm in enumerate(dict.fromkeys(arm for arms in bare.values() for arm in arms))}
    fig, panels = axes(len(bare), width=4.2 * len(bare) + 1.6, height=1.4 + 0.36 * len(places))
    for ax, (model, arms) in zip(panels, bare.items()):
        rates = {arm: record["metrics"]["real_tokens_per_second"] for arm, record in arms.items()}
        for arm, rate in rates.items():
            y = places[arm]
            ax.barh(y, rate, color=_THEIRS if arm.layers == PEER else _OURS, height=0.66)
            ax.text(rate, y, f" {rate / 1e3:.3g}k", va="center", color=INK, fontsize=8)
        name_bars(ax, list(map(str, places)), ax is panels[0])
        ax.set_xlim(0, 1.2 * max(rates.values()))
        ax.xaxis.set_major_formatter(lambda x, _: f"{x / 1e3:g}k")
        ax.set(title=model, xlabel="real tokens per second")
    for whose, colour in (("mamba-ssm as its users run it; its packed rows leak", _THEIRS), ("ours", _OURS)):
        panels[0].barh(0, 0, color=colour, label=whose)
    legend_below(fig)
    caption = (
        "Forward and backward of whole models, weights as in the tables: mamba-ssm as its users run it (orange; its packed rows "
        "leak), and every scheme with our layers, compiled alike (blue)."
    )
    return [finish(fig, "speedup", caption)]


def by_model(records: Sequence[Record], kind: str, part: str) -> dict[str, Arms]:
    """Records of a kind and part by model size, smallest first, then by arm: the latest, and those that were measured alike."""
    of_kind = records_of(records, kind)
    latest = {record["config"]["model"]: _settings(record) for record in of_kind}
    found: dict[str, Arms] = {}
    for record in of_kind:
        model = record["config"]["model"]
        if record["config"]["part"] == part and _settings(record) == latest[model]:
            found.setdefault(model, {})[Arm.of(record)] = record

    def width(item: tuple[str, Arms]) -> tuple[int, int]:
        config = next(iter(item[1].values()))["config"]
        return config["d_model"], config["n_layer"]

    return dict(sorted(found.items(), key=width))


_ALIKE = (
    "distribution", "documents", "slots", "dtype", "precision", "d_model", "n_layer", "expand", "d_state", "vocab_size",
    "compile", "recompute",
)  # fmt: skip


def _settings(record: Record) -> list[object]:
    hardware = record["hardware"]
    return [hardware["gpus"] or hardware["cpu"], *(record["config"].get(key) for key in _ALIKE)]


def _best_packed(arms: Arms) -> Arm | None:
    own = [arm for arm in arms if arm.packs and arm.layers == OURS and not arm.graphs]
    # Where the peers ran some of the same rows, one of those: it has every comparison.
    own = [arm for arm in own if arm._replace(layers=PEER) in arms] or own
    return max(own, key=lambda arm: _rate(arms[arm]) or 0.0, default=None)


def _rate(record: Record | None) -> float | None:
    return None if record is None else record["metrics"]["real_tokens_per_second"]


def _over(record: Record | None, other: Record | None) -> Cell:
    a, b = _rate(record), _rate(other)
    return number(None if a is None or b is None else a / b, ".2f", "x")


def _over_kernels(record: Record, single: Record | None, idle: float | None) -> float | None:
    """The ratio of speeds if the device never waited for the host in single."""
    if single is None or idle is None:
        return None
    ratio = record["metrics"]["real_tokens_per_second"] / single["metrics"]["real_tokens_per_second"]
    return ratio * (1 - idle / single["metrics"]["seconds_per_batch"])


def _headline(bare: dict[str, Arms], steps: dict[str, Arms], idle: dict[str, float]) -> Table:
    columns = [
        Column("model", ("model",), False),
        Column("packed arm", ("arm",), False),
        Column("real tokens/s", ("real_tokens_per_second",)),
        Column("model FLOP utilisation", ("model_flops_utilisation",)),
        Column("over single, mamba-ssm", ("over_mamba_ssm_single",)),
        Column("the paper's, A100", ("paper",)),
        Column("over single, mamba-ssm, kernels alone", ("over_mamba_ssm_single_kernels",)),
        Column("over the same rows leaking, mamba-ssm", ("over_mamba_ssm_packed",)),
        Column("over single, equal terms", ("over_single",)),
        Column("over padded to 2048, equal terms", ("over_padded",)),
        Column("optimizer steps, real tokens/s", ("steps_real_tokens_per_second",)),
        Column("steps over bare loop", ("steps_over_bare",)),
        Column("peak memory", ("peak_memory_bytes",)),
    ]
    table = Table("headline", "Packed rows against everything else, real tokens per second", columns)
    for model, arms in bare.items():
        best = _best_packed(arms)
        if best is None:
            continue
        padded = next((arm for arm in arms if arm.strategy == "padded" and arm.row_length and arm.layers == OURS), None)
        for arm in (best, best._replace(graphs=True)):
            record, step = arms.get(arm), steps.get(model, {}).get(arm)
            if record is None:
                continue
            table.rows.append(
                [
                    word(model),
                    word(arm.label),
                    number(_rate(record), ",.0f"),
                    percent(record["metrics"]["model_flops_utilisation"]),
                    _over(record, arms.get(TODAY)),
                    number(PAPER.get(model), ".2f", "x"),
                    number(_over_kernels(record, arms.get(TODAY), idle.get(model)), ".2f", "x"),
                    _over(record, arms.get(best._replace(layers=PEER))),
                    _over(record, arms.get(arm.single)),
                    _over(record, padded and arms.get(padded._replace(graphs=arm.graphs))),
                    number(_rate(step), ",.0f"),
                    _over(step, record),
                    gibibytes(record["metrics"]["peak_memory_bytes"]),
                ]
            )
    table.notes = [
        "Forward and backward of the bare loop; optimizer steps: the same through Lightning with PackedDataModule, float32 "
        "masters and AdamW. The paper's column is packed over single on an A100 (arXiv 2408.03865), on its own documents. "
        "Single waits for the host, so its speed is the host's; kernels alone: as if the device never waited. -graph: a batch's "
        "forward and backward replayed as one CUDA graph; on equal terms against single and padded as graphs too.",
        *_apart({f"{model} {arm}": record for model, arms in bare.items() for arm, record in arms.items()},
                {f"{model} {arm}": record for model, arms in steps.items() for arm, record in arms.items()}),
        _hardware(bare),
    ]  # fmt: skip
    return table


def _apart(bare: dict[str, Record], steps: dict[str, Record]) -> list[str]:
    """A note on arms whose ratio of steps to loop may be that of two machines."""
    names = [name for name, step in steps.items() if name in bare and bare[name]["commit"] != step["commit"]]
    return [f"Steps and bare loop were run at different commits, apart: {', '.join(names)}."] if names else []


def _arms(model: str, bare: Arms, steps: Arms) -> Table:
    table = Table(
        f"arms-{model}",
        f"{model}: every arm",
        [
            Column("layers", ("layers",), False),
            Column("arm", ("arm",), False),
            Column("real tokens/s", ("real_tokens_per_second",)),
            Column("ms per batch", ("ms", "ms_spread")),
            Column("over single, mamba-ssm", ("over_mamba_ssm_single",)),
            Column("over single, equal terms", ("over_single",)),
            Column("padding", ("padding_fraction",)),
            Column("slots/s", ("slots_per_second",)),
            Column("model FLOP utilisation", ("model_flops_utilisation",)),
            Column("peak memory", ("peak_memory_bytes",)),
            Column("optimizer steps, real tokens/s", ("steps_real_tokens_per_second",)),
            Column("steps over single's", ("steps_over_single",)),
            Column("steps over bare loop", ("steps_over_bare",)),
            Column("steps' peak memory", ("steps_peak_memory_bytes",)),
        ],
    )
    for arm in dict.fromkeys([*bare, *steps]):
        record, step = bare.get(arm), steps.get(arm)
        single = Arm("single", graphs=arm.graphs)
        metrics = (record or step or {})["metrics"]
        mine = metrics if record else {}
        ms, spread = (None if not mine else 1e3 * mine[key] for key in ("seconds_per_batch", "seconds_spread"))
        table.rows.append(
            [
                word("mamba-ssm, today" if arm.layers == PEER else "ours, equal terms"),
                word(arm.label + " (leaks)" * arm.leaks),
                number(_rate(record), ",.0f"),
                Cell("-" if ms is None else f"{ms:.4g} ± {spread:.2g}", (ms, spread)),
                _over(record, bare.get(TODAY)),
                _over(record, bare.get(single)),
                percent(metrics["padding_fraction"]),
                number(mine.get("slots_per_second"), ",.0f"),
                percent(mine.get("model_flops_utilisation")),
                gibibytes(mine.get("peak_memory_bytes")),
                number(_rate(step), ",.0f"),
                _over(step, steps.get(single)),
                _over(step, record),
                gibibytes(step["metrics"]["peak_memory_bytes"] if step else None),
            ]
        )
    c = next(iter((bare or steps).values()))["config"]
    bounds = [
        f"{arm}: {1 / (1 - record['metrics']['padding_fraction']):.2f}x"
        for arm, record in bare.items()
        if arm.strategy == "padded" and arm.layers == OURS and not arm.graphs
    ]
    table.notes = [
        f"Every arm arranges the same {c['documents']} documents in batches of at most {c['slots']} slots (single: one "
        f"document); some batches, evenly spread over their sizes, stand for all. Medians of {c['rounds']} rounds in turns after "
        "a warm-up; spreads are interquartile ranges.",
        f"Bare loop: {c['dtype']} weights, forward and backward; ours: compile={c['compile']}, recompute={c['recompute']}. "
        f"Optimizer steps: Lightning, {c['precision']}, float32 masters, fused AdamW, about {c['slots']} real tokens a step.",
    ]
    table.notes += _apart(*({str(arm): record for arm, record in part.items()} for part in (bare, steps)))
    if bounds:
        table.notes.append(f"What padding alone can cost, slots over real tokens: {', '.join(bounds)}.")
    errors, leaks = (
        [r["metrics"][key] for r in bare.values() if r["metrics"][key] is not None]
        for key in ("loss_error", "leak_error")
    )
    if errors:
        leak = f"; a leak makes at least {min(leaks):.2g}" if leaks else ""
        table.notes.append(
            "Before any timing, losses of the same tokens differ from those of documents alone (of rows that leak: by our "
            f"layers) by at most {max(errors):.2g} of their standard deviation{leak}."
        )
    return table


def _positions(bare: dict[str, Arms]) -> list[Table]:
    """Bytes that say where documents lie against the bytes that padding moves, of the scan and the convolution."""
    table = Table(
        "positions",
        "Bytes of position data against bytes of padding saved, one batch of packed rows",
        [
            Column("model", ("model",), False),
            Column("packed arm", ("arm",), False),
            Column("ours: a schedule (MB)", ("schedule_bytes",)),
            Column("an index per token (MB)", ("index_bytes",)),
            Column("saved against", ("against",), False),
            Column("padding saved (MB)", ("saved_bytes",)),
            Column("schedule, index over saved", ("schedule_share", "index_share")),
        ],
        notes=[
            "Read by the forward and backward of convolution and scan in all layers. The schedule is what one batch's kernels "
            "share, counted as if each kernel read all of it; an index per token is 4 bytes a slot for each kernel, counted "
            "once. Saved: the slots of padding that the same real tokens would take, times the bytes that operators which "
            "compute padding (ours skip it) move for a slot, 2-byte activations: convolution 2 and 3, scan 4 and 8 of width "
            "d_inner.",
        ],
    )
    for model, arms in bare.items():
        best = _best_packed(arms)
        for arm, record in arms.items():
            own = arm.strategy == "padded" and arm.layers == OURS and not arm.graphs
            if best is None or not own or arms[best]["metrics"]["position_bytes"] is None:
                continue
            c, metrics = arms[best]["config"], arms[best]["metrics"]
            kernels = 4 * c["n_layer"]
            tokens = metrics["real_tokens_per_batch"]
            slots = tokens / (1 - metrics["padding_fraction"])
            saved = tokens / (1 - record["metrics"]["padding_fraction"]) - slots
            saved *= (2 + 3 + 4 + 8) * 2 * c["expand"] * c["d_model"] * c["n_layer"]
            schedule, index = kernels * metrics["position_bytes"], kernels * 4 * slots
            shares = (schedule / saved, index / saved)
            cells = [
                number(schedule / 1e6, ".3g"),
                number(index / 1e6, ".3g"),
                word(arm.label),
                number(saved / 1e6, ",.0f"),
            ]
            table.rows.append(
                [
                    word(model),
                    word(best.label),
                    *cells,
                    Cell(f"{100 * shares[0]:.2g} %, {100 * shares[1]:.2g} %", shares),
                ]
            )
    return [table] if table.rows else []


def _hardware(bare: dict[str, Arms]) -> str:
    records = [record for arms in bare.values() for record in arms.values()]
    names = dict.fromkeys(gpu for record in records for gpu in record["hardware"]["gpus"])
    peak = records[0]["config"]["peak_flops_per_second"]
    share = "" if peak is None else f" Utilisation is of {peak / 1e12:.0f} TFLOP/s."
    return f"{', '.join(names) or records[0]['hardware']['cpu']}; torch {records[0]['versions']['torch']}.{share}"
