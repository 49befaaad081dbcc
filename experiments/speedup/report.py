"""Tables and figures of whole models: schemes, where time goes, growth, several devices. Spreads are interquartile ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.common import make_columns, records_of
from packmamba.report.aggregate import Record, of_kind
from packmamba.report.figures import INK, Figure, axes, finish, name_bars
from packmamba.report.html import Kind
from packmamba.report.tables import Cell, Column, Table, gibibytes, number, percent, word

OURS, PEER = "packmamba", "mamba-ssm"
# Times single, packed, on an A100: arXiv 2408.03865.
PAPER = {"1.4b": 3.06, "2.8b": 2.62}
_THEIRS, _OURS = "#E69F00", "#0072B2"


class Arm(NamedTuple):
    """Name an arm by the fields of a record's configuration."""

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


TODAY = Arm("single", layers=PEER)
Arms = dict[Arm, Record]


def speedup_tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate the paper's comparison, then every arm of each model size; of equal arms the latest record counts."""
    bare, steps = by_model(records, "speedup", "forward_backward"), by_model(records, "speedup", "steps")
    if not bare and not steps:
        return []
    broken_down = by_model(records, "breakdown", "forward_backward")
    idle = {model: arms[TODAY]["metrics"]["idle"] for model, arms in broken_down.items() if TODAY in arms}
    tables = [_headline(bare, steps, idle)] if bare else []
    models = [*bare, *(model for model in steps if model not in bare)]
    return [*tables, *(_arms(model, bare.get(model, {}), steps.get(model, {})) for model in models)]


def speedup_figures(records: Sequence[Record]) -> list[Figure]:
    """Draw real tokens per second of six arms with their spread, and packed's ratio over each; a panel for each model size."""
    bare = by_model(records, "speedup", "forward_backward")
    if not bare:
        return []
    fig, panels = axes(len(bare), width=4.0 * len(bare) + 1.6, height=3.6)
    for ax, (model, arms) in zip(panels, bare.items()):
        packed = _best_packed(arms)
        shown = {name: arms[arm] for name, arm in _bars(packed).items() if arm in arms}
        for y, (name, record) in enumerate(shown.items()):
            metrics = record["metrics"]
            rate = metrics["real_tokens_per_second"]
            spread = rate * metrics["seconds_spread"] / metrics["seconds_per_batch"] / 2
            ax.barh(y, rate, color=_THEIRS if "mamba-ssm" in name else _OURS, height=0.66)
            ax.errorbar(rate, y, xerr=spread, color=INK, capsize=2, linewidth=1)
            ratio = (arms[packed]["metrics"]["real_tokens_per_second"] if packed else rate) / rate
            ax.text(
                rate + spread,
                y,
                f" {rate / 1e3:.3g}k" + f"  ({ratio:.1f}x)" * (name != PACKED),
                va="center",
                fontsize=8,
            )
        name_bars(ax, list(shown), ax is panels[0])
        ax.set_xlim(0, 1.45 * max(record["metrics"]["real_tokens_per_second"] for record in shown.values()))
        ax.xaxis.set_major_formatter(lambda x, _: f"{x / 1e3:g}k")
        paper = f" (the paper, A100: {PAPER[model]}x over single)" if model in PAPER else ""
        ax.set(title=model.upper() + paper, xlabel="real tokens per second")
    caption = (
        "Forward and backward of whole models; in brackets packed's ratio over the arm. mamba-ssm as its users run it (orange) "
        "and our layers, compiled alike (blue). Whiskers: an interquartile range."
    )
    return [finish(fig, "speedup", caption)]


PACKED = "packed, reset"


def _bars(packed: Arm | None) -> dict[str, Arm]:
    """Return the arms of the figure by their plain names."""
    peers = {"mamba-ssm, one document at a time": TODAY}
    if packed:
        peers["mamba-ssm, the same rows (leaks)"] = packed._replace(layers=PEER)
    ours = {
        "one document, CUDA graphs": Arm("single", graphs=True),
        "padded to 2048": Arm("padded", 2048),
        "sorted by length, padded": Arm("padded", sorted_by_length=True),
    }
    return peers | ours | ({PACKED: packed} if packed else {})


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
    columns = make_columns(
        "!model | !packed arm = arm | real tokens/s = real_tokens_per_second | "
        "model FLOP utilisation = model_flops_utilisation | "
        "over single, mamba-ssm = over_mamba_ssm_single | the paper's, A100 = paper | "
        "over single, mamba-ssm, kernels alone = over_mamba_ssm_single_kernels | "
        "over the same rows leaking, mamba-ssm = over_mamba_ssm_packed | "
        "over single, equal terms = over_single | over padded to 2048, equal terms = over_padded | "
        "optimizer steps, real tokens/s = steps_real_tokens_per_second | "
        "steps over bare loop = steps_over_bare | peak memory = peak_memory_bytes"
    )
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
        make_columns(
            "!layers | !arm | real tokens/s = real_tokens_per_second | ms per batch = ms ms_spread | "
            "over single, mamba-ssm = over_mamba_ssm_single | over single, equal terms = over_single | "
            "padding = padding_fraction | slots/s = slots_per_second | "
            "model FLOP utilisation = model_flops_utilisation | peak memory = peak_memory_bytes | "
            "optimizer steps, real tokens/s = steps_real_tokens_per_second | "
            "steps over single's = steps_over_single | steps over bare loop = steps_over_bare | "
            "steps' peak memory = steps_peak_memory_bytes"
        ),
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


def _hardware(bare: dict[str, Arms]) -> str:
    records = [record for arms in bare.values() for record in arms.values()]
    names = dict.fromkeys(gpu for record in records for gpu in record["hardware"]["gpus"])
    peak = records[0]["config"]["peak_flops_per_second"]
    share = "" if peak is None else f" Utilisation is of {peak / 1e12:.0f} TFLOP/s."
    return f"{', '.join(names) or records[0]['hardware']['cpu']}; torch {records[0]['versions']['torch']}.{share}"


FAMILIES = (
    "matrix products",
    "scan",
    "conv",
    "norm and elementwise",
    "loss",
    "optimizer",
    "communication",
    "other",
    "idle",
)
"""Metrics of a record, seconds of one call each; experiments.speedup.model measures them."""
_PARTS = {"forward_backward": "forward, backward", "steps": "optimizer step"}


def breakdown_tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate time by kernel family, for each model size, part and arm."""
    table = Table(
        "breakdown",
        "Time by family of kernels",
        [
            *make_columns("!model | !arm | !what = part | ms"),
            *(Column(f"{family} (%)", (family.replace(" ", "_"),)) for family in FAMILIES),
            *make_columns("outside matrix products, scan and conv = outside"),
        ],
        notes=[
            "One batch, or one optimizer step, by torch.profiler, kernels that overlap counted once; idle: no kernel runs (no "
            "more than the time without the profiler, which slows the host, leaves, but all gaps below 10 us)."
        ],
    )
    for model, part, arm, record in _breakdowns(records):
        metrics = record["metrics"]
        shares = {family: metrics[family] / metrics["seconds"] for family in FAMILIES}
        inside = sum(shares[family] for family in ("matrix products", "scan", "conv"))
        cells = [Cell(f"{100 * share:.1f}", (share,)) for share in shares.values()]
        head = [word(model), word(str(arm)), word(_PARTS[part]), number(1e3 * metrics["seconds"], ".4g")]
        table.rows.append([*head, *cells, percent(1 - inside)])
    return [table] if table.rows else []


def _breakdowns(records: Sequence[Record]) -> list[tuple[str, str, Arm, Record]]:
    parts = {part: by_model(records, "breakdown", part) for part in _PARTS}
    models = list(dict.fromkeys(model for found in parts.values() for model in found))
    return [
        (model, part, arm, record)
        for model in models for part, found in parts.items() for arm, record in found.get(model, {}).items()
    ]  # fmt: skip


_AXES = {"row_length": "row length (tokens)", "mean_length": "mean document length (tokens)"}


def growth_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each axis; of equal points the latest record counts."""
    tables = []
    for axis, points in _points(records).items():
        some = next(iter(points.values()))["config"]
        base = points.get(16384) if axis == "row_length" else None
        table = Table(
            f"growth-{axis.replace('_', '-')}",
            f"{some['model']}, packed rows: throughput against {_AXES[axis].replace(' (tokens)', '')}",
            [
                Column(_AXES[axis].replace(" (tokens)", ""), (axis,)),
                *make_columns(
                    "row = row_length | documents = num_documents | ms = ms ms_spread | "
                    "real tokens/s = real_tokens_per_second | model FLOP utilisation = model_flops_utilisation"
                ),
                *([Column("over rows of 16384", ("over_16384",))] if base else []),
            ],
        )
        for value, record in points.items():
            metrics = record["metrics"]
            ms, spread = 1e3 * metrics["seconds_per_batch"], 1e3 * metrics["seconds_spread"]
            rate = metrics["real_tokens_per_second"]
            cells = [
                number(value, ",d"),
                number(record["config"]["row_length"], ",d"),
                number(metrics["num_documents"], ",.0f"),
                Cell(f"{ms:.4g} ± {spread:.2g}", (ms, spread)),
                number(rate, ",.0f"),
                percent(metrics["model_flops_utilisation"]),
            ]
            if base:
                cells.append(number(rate / base["metrics"]["real_tokens_per_second"], ".3f"))
            table.rows.append(cells)
        graphs = ", as CUDA graphs" if _graphs(some) else ""
        table.notes = [
            f"Forward and backward of one row, {some['dtype']} weights, compile={some['compile']}, "
            f"recompute={some['recompute']}{graphs}; documents in order, the last cut to fit; points in turns, medians and "
            f"interquartile ranges of {some['rounds']} rounds."
        ]
        if axis == "mean_length":
            table.notes.append("Lengths are the corpus's, scaled to the mean.")
        tables.append(table)
    return tables


def multi_gpu_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each model size: tokens per second, and over one device real tokens, slots and efficiency."""
    tables = []
    for model, arms in _devices(records).items():
        one = next((record for record in arms.values() if record["config"]["devices"] == 1), None)
        table = Table(
            f"multi-gpu-{model}",
            f"{model} on several devices, whole optimizer steps through Lightning",
            make_columns(
                "!strategy | devices | ms per step = ms ms_spread | real tokens/s = real_tokens_per_second | "
                "over one device = over_one | slots over one device = slots_over_one | efficiency | "
                "peak memory of one device = peak_memory_bytes | "
                "loss of the same documents, relative difference = loss_error"
            ),
        )
        for record in arms.values():
            c, metrics = record["config"], record["metrics"]
            ms, spread = 1e3 * metrics["seconds_per_step"], 1e3 * metrics["seconds_spread"]
            real, ratio = (
                metrics[rate] / one["metrics"][rate] if one else None
                for rate in ("real_tokens_per_second", "slots_per_second")
            )
            table.rows.append(
                [
                    word(c["parallel"]),
                    number(c["devices"], "d"),
                    Cell(f"{ms:.4g} ± {spread:.2g}", (ms, spread)),
                    number(metrics["real_tokens_per_second"], ",.0f"),
                    number(real, ".2f", "x"),
                    number(ratio, ".2f", "x"),
                    percent(None if ratio is None else ratio / c["devices"]),
                    gibibytes(metrics["peak_memory_bytes"]),
                    number(metrics["loss_error"], ".1e"),
                ]
            )
        first = next(iter(arms.values()))
        c, hardware = first["config"], first["hardware"]
        table.notes = [
            f"{Arm.of(first).label}, {c['slots']} slots a step and device, {c['precision']}, {c['rounds']} turns of steps after "
            "a warm-up, medians and interquartile ranges. Efficiency is that of slots: the last rows of a plan hold padding, and "
            f"more devices reach them sooner. The losses are of each arm's first {c['same_steps']} steps, on the same documents "
            "for every number of devices.",
            f"{', '.join(dict.fromkeys(hardware['gpus'])) or hardware['cpu']}.",
        ]
        tables.append(table)
    return tables


def _points(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """By axis and value, of those measured as the latest were: as CUDA graphs, or not."""
    found: dict[str, dict[int, Record]] = {}
    growth = of_kind(records, "growth")
    for record in growth:
        if _graphs(record["config"]) == _graphs(growth[-1]["config"]):
            found.setdefault(record["config"]["axis"], {})[record["config"]["value"]] = record
    return {axis: dict(sorted(points.items())) for axis, points in sorted(found.items(), reverse=True)}


def _graphs(config: Mapping[str, Any]) -> bool:
    return bool(config.get("graphs", config.get("cuda_graphs")))  # as records of before call it


def _devices(records: Sequence[Record]) -> dict[str, dict[tuple[str, int], Record]]:
    """By model, then by what shares the work and the number of devices."""
    found: dict[str, dict[tuple[str, int], Record]] = {}
    for record in records_of(records, "multi_gpu"):
        config = record["config"]
        found.setdefault(config["model"], {})[config["parallel"], config["devices"]] = record
    return found


KINDS = {
    # A whole model. config: model, part (forward_backward: the bare loop; steps: whole optimizer steps through Lightning) and its
    # sizes. A batch stands for the mean of all the arm's batches of the same documents. peak_memory_bytes is null off a GPU,
    # position_bytes (of one batch) and the gate's errors are null in steps.
    "speedup": Kind(
        speedup_tables,
        speedup_figures,
    ),
    # Seconds of one call by family of kernels; their sum is seconds.
    "breakdown": Kind(breakdown_tables),
    # config: axis (row_length or mean_length) and its value.
    "growth": Kind(growth_tables),
    # Whole optimizer steps; losses of the first steps, which all arms take on the same documents, are in curves["loss"].
    "multi_gpu": Kind(multi_gpu_tables),
}  # fmt: skip
