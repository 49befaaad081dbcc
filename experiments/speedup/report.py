"""Tables and figures of whole models: schemes, where time goes, growth, several devices. Spreads are interquartile ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from experiments.common import make_columns, make_table, records_of
from packmamba.report.aggregate import Record, of_kind
from packmamba.report.figures import INK, Figure, axes, finish, name_bars
from packmamba.report.html import Kind
from packmamba.report.tables import Cell, Column, Table, gibibytes, number, percent, word

OURS, PEER = "packmamba", "mamba-ssm"
# Times single, packed, on an A100: arXiv 2408.03865.
PAPER = {"1.4b": 3.06, "2.8b": 2.62}
PEAKS = {"H100 80GB HBM3": 989e12, "H200": 989e12}
"""FLOP/s of dense bfloat16 products by card, of the SXM datasheets: nvidia.com/en-us/data-center/h100, h200."""
_THEIRS, _OURS = "#E69F00", "#0072B2"


class Arm(NamedTuple):
    """Name an arm by the fields of a record's configuration."""

    strategy: str
    row_length: int | None = None
    """None: padded to each batch's longest document."""
    multiple_of: int = 1
    layers: str = OURS
    graphs: bool = False

    @classmethod
    def of(cls, record: Record) -> Arm:
        config = record["config"]
        if "strategy" not in config:
            raise ValueError(f"config of the record of {record['arm']} lacks strategy")
        strategy = "padded_sorted" if config.get("sorted_by_length") else config["strategy"]  # as it was a key
        return cls(strategy, *(config.get(name, cls._field_defaults[name]) for name in cls._fields[1:]))

    @property
    def packs(self) -> bool:
        return self.strategy not in ("single", "padded", "padded_sorted")

    @property
    def single(self) -> Arm:
        """The same layers and graphs, one document at a time."""
        return Arm("single", layers=self.layers, graphs=self.graphs)

    @property
    def label(self) -> str:
        schemes = {
            "single": "single",
            "padded": f"padded-{self.row_length or 'longest'}",
            "padded_sorted": "padded-sorted",
        }
        scheme = schemes.get(self.strategy, f"packed-{self.row_length}-{self.strategy}")
        return scheme + f"-{self.multiple_of}" * (self.multiple_of > 1) + "-graph" * self.graphs

    def __str__(self) -> str:
        return self.label if self.layers == OURS else f"{self.layers}-{self.label}"


TODAY = Arm("single", layers=PEER)
Arms = dict[Arm, Record]
Key = tuple[str, str]
"""A model size and a card."""


def card(record: Record) -> str:
    hardware = record["hardware"]
    return hardware["gpus"][0].removeprefix("NVIDIA ") if hardware["gpus"] else hardware["cpu"]


def utilisation(record: Record, counted: bool = False) -> float | None:
    """Return FLOP/s of real tokens over the card's peak: 6 for each parameter, or all operations of the scan too.

    Operations of a state and channel: five in the forward (decay, input times B, their sum, times C, sum), ten in the backward.
    """
    c, metrics = record["config"], record["metrics"]
    states = c["n_layer"] * c["expand"] * c["d_model"] * c["d_state"]
    flops = 6 * metrics["flop_parameters"] + 15 * states * counted
    peak = PEAKS.get(card(record))
    return None if peak is None else flops * metrics["real_tokens_per_second"] / peak


def speedup_tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate the paper's comparison, then every arm of each model size; of equal arms the latest record counts."""
    bare, steps = by_model(records, "speedup", "forward_backward"), by_model(records, "speedup", "steps")
    tables = [_headline(bare, steps, by_model(records, "breakdown", "forward_backward"))] if bare else []
    return [*tables, *(_arms(model, bare, steps) for model in dict.fromkeys(model for model, _ in [*bare, *steps]))]


def speedup_figures(records: Sequence[Record]) -> list[Figure]:
    """Draw real tokens per second of six arms with their spread, and packed's ratio over each; a panel for each model size."""
    bare = by_model(records, "speedup", "forward_backward")
    if not bare:
        return []
    fig, panels = axes(len(bare), width=4.0 * len(bare) + 1.6, height=3.6)
    for ax, ((model, gpu), arms) in zip(panels, bare.items()):
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
        ax.set(title=f"{model.upper()}, {gpu}{paper}", xlabel="real tokens per second")
    caption = (
        "Forward and backward of whole models; in brackets packed's ratio over the arm. mamba-ssm as its users run it (orange) "
        "and our layers, compiled alike (blue). Whiskers: an interquartile range."
    )
    return [finish(fig, "speedup", caption)]


PACKED = "packed, reset"


def _bars(packed: Arm | None) -> dict[str, Arm]:
    """Return the arms of the figure by their plain names."""
    peers = {
        "mamba-ssm, one document at a time": TODAY,
        "mamba-ssm, one document, multiple of 8": TODAY._replace(multiple_of=8),
        "mamba-ssm, sorted by length, padded": Arm("padded_sorted", layers=PEER),
    }
    if packed:
        peers["mamba-ssm, the same rows"] = packed._replace(layers=PEER)
    ours = {
        "one document, CUDA graphs": Arm("single", graphs=True),
        "padded to 2048": Arm("padded", 2048),
        "sorted by length, padded": Arm("padded_sorted"),
    }
    return peers | ours | ({PACKED: packed} if packed else {})


def by_model(records: Sequence[Record], kind: str, part: str) -> dict[Key, Arms]:
    """Records of a kind and part by model size and card, smallest first, then by arm: the latest, if measured alike."""
    of_kind = records_of(records, kind)
    latest = {(record["config"]["model"], card(record)): _settings(record) for record in of_kind}
    found: dict[Key, Arms] = {}
    for record in of_kind:
        key = record["config"]["model"], card(record)
        if record["config"]["part"] == part and _settings(record) == latest[key]:
            found.setdefault(key, {})[Arm.of(record)] = record

    def width(item: tuple[Key, Arms]) -> tuple[int, int]:
        config = next(iter(item[1].values()))["config"]
        return config["d_model"], config["n_layer"]

    return dict(sorted(found.items(), key=width))


_ALIKE = (
    "distribution", "documents", "slots", "dtype", "precision", "d_model", "n_layer", "expand", "d_state", "vocab_size",
    "compile", "recompute",
)  # fmt: skip


def _settings(record: Record) -> list[object]:
    return [record["config"].get(key) for key in _ALIKE]


def _best_packed(arms: Arms) -> Arm | None:
    own = [arm for arm in arms if arm.packs and arm.layers == OURS and not arm.graphs]
    # Where the peers ran some of the same rows, one of those: it has every comparison.
    own = [arm for arm in own if arm._replace(layers=PEER) in arms] or own
    return max(own, key=lambda arm: _rate(arms[arm]) or 0.0, default=None)


def _rate(record: Record | None) -> float | None:
    return None if record is None else record["metrics"]["real_tokens_per_second"]


def _over(record: Record | None, other: Record | None, idle: float = 0.0) -> Cell:
    """Format a ratio of speeds and its spread: both interquartile ranges, relative, added in quadrature.

    idle: seconds of a batch in which the other's device waited for its host, which are taken off.
    """
    if record is None or other is None:
        return Cell("-", (None, None))
    if record is other:
        return Cell("1.00x", (1.0, 0.0))
    a, b = record["metrics"], other["metrics"]
    ratio = a["real_tokens_per_second"] / b["real_tokens_per_second"] * (1 - idle / b["seconds_per_batch"])
    measured = (a,) if idle else (a, b)
    spread = ratio * math.hypot(*(metrics["seconds_spread"] / metrics["seconds_per_batch"] for metrics in measured))
    return Cell(f"{ratio:.2f}x ± {spread:.2f}", (ratio, spread))


def _over_columns(text: str) -> list[Column]:
    """Make columns as make_columns does, each with its spread."""
    return [replace(column, names=(column.names[0], f"{column.names[0]}_spread")) for column in make_columns(text)]


MFU = "MFU, 6 N = model_flops_utilisation | MFU, operations counted = counted_flops_utilisation"


def _headline(bare: dict[Key, Arms], steps: dict[Key, Arms], broken_down: dict[Key, Arms]) -> Table:
    columns = [
        *make_columns(f"!model | !card | !packed arm = arm | real tokens/s = real_tokens_per_second | {MFU}"),
        *_over_columns(
            "over sorted by length and padded = over_padded_sorted | over padded to the longest = over_padded_longest | "
            "over padded to 2048 = over_padded | over single = over_single | over single, multiple of 8 = over_single_8 | "
            "over mamba-ssm, the same rows = over_mamba_ssm_packed | over mamba-ssm, sorted = over_mamba_ssm_padded_sorted | "
            "over mamba-ssm, single, multiple of 8 = over_mamba_ssm_single_8 | "
            "the same, kernels alone = over_mamba_ssm_single_8_kernels | "
            "over mamba-ssm, single = over_mamba_ssm_single | the same, kernels alone = over_mamba_ssm_single_kernels"
        ),
        *make_columns("the paper's, A100 = paper | optimizer steps, real tokens/s = steps_real_tokens_per_second"),
        *_over_columns("steps over bare loop = steps_over_bare"),
        *make_columns("peak memory = peak_memory_bytes"),
    ]
    table = Table("headline", "Packed rows against everything else, real tokens per second", columns)
    for (model, gpu), arms in bare.items():
        best = _best_packed(arms)
        if best is None:
            continue
        profiles = broken_down.get((model, gpu), {})
        idle = {arm: record["metrics"]["idle"] for arm, record in profiles.items()}
        padded = next((arm for arm in arms if arm.strategy == "padded" and arm.row_length and arm.layers == OURS), None)
        others = [
            *(Arm("padded_sorted"), Arm("padded"), padded or Arm("padded", 2048), Arm("single")),
            *(Arm("single", multiple_of=8), best, Arm("padded_sorted")),
        ]
        for arm in (best, best._replace(graphs=True)):
            record, step = arms.get(arm), steps.get((model, gpu), {}).get(arm)
            if record is None:
                continue
            ours = [other._replace(graphs=arm.graphs) for other in others[:5]]
            theirs = [other._replace(layers=PEER) for other in others[5:]]
            singles = []
            for single in (TODAY._replace(multiple_of=8), TODAY):
                kernels = _over(record, arms.get(single), idle[single]) if single in idle else _over(None, None)
                singles += [_over(record, arms.get(single)), kernels]
            table.rows.append(
                [
                    *(word(model), word(gpu), word(arm.label), number(_rate(record), ",.0f")),
                    *(percent(utilisation(record)), percent(utilisation(record, counted=True))),
                    *(_over(record, arms.get(other)) for other in [*ours, *theirs]),
                    *singles,
                    number(PAPER.get(model), ".2f", "x"),
                    number(_rate(step), ",.0f"),
                    _over(step, record),
                    gibibytes(record["metrics"]["peak_memory_bytes"]),
                ]
            )
    table.notes = [
        "Forward and backward of the bare loop; ratios ± both interquartile ranges in quadrature. Optimizer steps: the same "
        "through Lightning with PackedDataModule, float32 masters and AdamW. The paper's column is packed over single on an A100 "
        "(arXiv 2408.03865), on its own documents. Single's speed is its host's; kernels alone: as if the "
        "device never waited. Multiple of 8: a document is padded at its end. -graph: a batch's forward and backward replayed as "
        "one CUDA graph; against our other arms as graphs too. mamba-ssm's Mamba-1 leaks on the same rows.",
        *_apart(bare, steps),
        _hardware(bare),
    ]  # fmt: skip
    return table


def _apart(bare: dict[Key, Arms], steps: dict[Key, Arms]) -> list[str]:
    """A note on arms whose ratio of steps to loop may be that of two machines."""
    names = [
        f"{' '.join(key)} {arm}"
        for key, arms in steps.items()
        for arm, step in arms.items()
        if bare.get(key, {}).get(arm, step)["commit"] != step["commit"]
    ]
    return [f"Steps and bare loop were run at different commits, apart: {', '.join(names)}."] if names else []


def _arms(model: str, bare: dict[Key, Arms], steps: dict[Key, Arms]) -> Table:
    table = Table(
        f"arms-{model}",
        f"{model}: every arm",
        [
            *make_columns(
                "!layers | !card | !arm | real tokens/s = real_tokens_per_second | ms per batch = ms ms_spread"
            ),
            *_over_columns(
                "over single, mamba-ssm = over_mamba_ssm_single | over single, equal terms = over_single | "
                "over single, multiple of 8 = over_single_8"
            ),
            *make_columns(f"padding = padding_fraction | slots/s = slots_per_second | {MFU}"),
            *make_columns(
                "peak memory = peak_memory_bytes | optimizer steps, real tokens/s = steps_real_tokens_per_second"
            ),
            *_over_columns("steps over single's = steps_over_single | steps over bare loop = steps_over_bare"),
            *make_columns("steps' peak memory = steps_peak_memory_bytes"),
        ],
    )
    bare, steps = ({key: arms for key, arms in part.items() if key[0] == model} for part in (bare, steps))
    for key in dict.fromkeys([*bare, *steps]):
        loop, training = bare.get(key, {}), steps.get(key, {})
        for arm in dict.fromkeys([*loop, *training]):
            record, step = loop.get(arm), training.get(arm)
            measured: Record = record or step or {}
            mine = record["metrics"] if record else {}
            leaks = arm.packs and arm.layers == PEER and measured["config"].get("mixer", "mamba1") == "mamba1"
            ms, spread = (None if not mine else 1e3 * mine[name] for name in ("seconds_per_batch", "seconds_spread"))
            singles = (TODAY, Arm("single", graphs=arm.graphs), Arm("single", multiple_of=8, graphs=arm.graphs))
            table.rows.append(
                [
                    word("mamba-ssm, today" if arm.layers == PEER else "ours, equal terms"),
                    word(key[1]),
                    word(arm.label + " (leaks)" * leaks),
                    number(_rate(record), ",.0f"),
                    Cell("-" if ms is None else f"{ms:.4g} ± {spread:.2g}", (ms, spread)),
                    *(_over(record, loop.get(single)) for single in singles),
                    percent(measured["metrics"]["padding_fraction"]),
                    number(mine.get("slots_per_second"), ",.0f"),
                    *(percent(record and utilisation(record, counted)) for counted in (False, True)),
                    gibibytes(mine.get("peak_memory_bytes")),
                    number(_rate(step), ",.0f"),
                    _over(step, training.get(singles[1])),
                    _over(step, record),
                    gibibytes(step["metrics"]["peak_memory_bytes"] if step else None),
                ]
            )
    timed = [record for arms in bare.values() for record in arms.values()]
    c = (timed or [record for arms in steps.values() for record in arms.values()])[0]["config"]
    table.notes = [
        f"Every arm arranges the same {c['documents']} documents in batches of at most {c['slots']} slots (single: one "
        f"document); some batches, evenly spread over their sizes, stand for all. Medians of {c['rounds']} rounds in turns after "
        "a warm-up; spreads are interquartile ranges.",
        f"Bare loop: {c['dtype']} weights, forward and backward; ours: compile={c['compile']}, recompute={c['recompute']}. "
        f"Optimizer steps: Lightning, {c['precision']}, float32 masters, fused AdamW, about {c['slots']} real tokens a step.",
    ]
    table.notes += [*_apart(bare, steps), _hardware(bare or steps)]
    errors, leaking = (
        [record["metrics"][name] for record in timed if record["metrics"][name] is not None]
        for name in ("loss_error", "leak_error")
    )
    if errors:
        leak = f"; a leak makes at least {min(leaking):.2g}" if leaking else ""
        table.notes.append(
            "Before any timing, losses of the same tokens differ from those of documents alone (of rows that leak: by our "
            f"layers) by at most {max(errors):.2g} of their standard deviation{leak}."
        )
    return table


def _hardware(arms: dict[Key, Arms]) -> str:
    records = [record for found in arms.values() for record in found.values()]
    hosts = {f"{card(r)} beside {r['hardware']['cores']} cores of {r['hardware']['cpu']}": None for r in records}
    torch = ", ".join(dict.fromkeys(record["versions"]["torch"] for record in records))
    share = " MFU is of 989 TFLOP/s, dense bfloat16 by NVIDIA's data sheets of H100 SXM and H200."
    return f"{'; '.join(hosts)}; torch {torch}.{share * any(utilisation(record) is not None for record in records)}"


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
            *make_columns("!model | !card | !arm | !what = part | ms"),
            *(Column(f"{family} (%)", (family.replace(" ", "_"),)) for family in FAMILIES),
            *make_columns("outside matrix products, scan and conv = outside"),
        ],
        notes=[
            "One batch, or one optimizer step, by torch.profiler, kernels that overlap counted once; idle: no kernel runs (no "
            "more than the time without the profiler, which slows the host, leaves, but all gaps below 10 us)."
        ],
    )
    for (model, gpu), part, arm, record in _breakdowns(records):
        metrics = record["metrics"]
        shares = {family: metrics[family] / metrics["seconds"] for family in FAMILIES}
        inside = sum(shares[family] for family in ("matrix products", "scan", "conv"))
        cells = [Cell(f"{100 * share:.1f}", (share,)) for share in shares.values()]
        head = [word(model), word(gpu), word(str(arm)), word(_PARTS[part]), number(1e3 * metrics["seconds"], ".4g")]
        table.rows.append([*head, *cells, percent(1 - inside)])
    return [table] if table.rows else []


def _breakdowns(records: Sequence[Record]) -> list[tuple[Key, str, Arm, Record]]:
    parts = {part: by_model(records, "breakdown", part) for part in _PARTS}
    return [
        (key, part, arm, record)
        for key in dict.fromkeys(key for found in parts.values() for key in found)
        for part, found in parts.items() for arm, record in found.get(key, {}).items()
    ]  # fmt: skip


AXES = {"row_length": "row length", "mean_length": "mean document length"}


def growth_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each axis; of equal points the latest record counts, of those as CUDA graphs or not as the latest was."""
    growth = of_kind(records, "growth")
    graphs = [r["config"].get("graphs", r["config"].get("cuda_graphs")) for r in growth]  # as records of before call it
    alike = [record for record, graph in zip(growth, graphs) if graph == graphs[-1]]
    tables = []
    for axis in sorted({record["config"]["axis"] for record in alike}, reverse=True):
        points = {record["config"]["value"]: record for record in alike if record["config"]["axis"] == axis}
        base = points.get(16384) if axis == "row_length" else None
        c = next(iter(points.values()))["config"]
        rows = [
            _milliseconds(record["metrics"], "seconds_per_batch")
            | {
                axis: value,
                "row_length": record["config"]["row_length"],
                "model_flops_utilisation": utilisation(record),
            }
            | {"over_16384": base and _over(record, base).values[0]}
            for value, record in sorted(points.items())
        ]
        table = make_table(
            f"growth-{axis.replace('_', '-')}",
            f"{c['model']}, packed rows: throughput against {AXES[axis]}",
            f"{AXES[axis]} = {axis}:,d | row = row_length:,d | documents = num_documents:,.0f | ms = ms ms_spread:.4g ± .2g | "
            "real tokens/s = real_tokens_per_second:,.0f | model FLOP utilisation = model_flops_utilisation:%"
            + " | over rows of 16384 = over_16384:.3f"
            * bool(base),
            rows,
            f"Forward and backward of one row, {c['dtype']} weights, compile={c['compile']}, recompute={c['recompute']}"
            f"{', as CUDA graphs' * bool(graphs[-1])}; documents in order, the last cut to fit; medians and interquartile ranges "
            f"of {c['rounds']} rounds in turns.",
        )
        tables.append(table)
    return tables


def _milliseconds(metrics: Mapping[str, Any], seconds: str) -> dict[str, Any]:
    return {**metrics, "ms": 1e3 * metrics[seconds], "ms_spread": 1e3 * metrics["seconds_spread"]}


def multi_gpu_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each model size: tokens per second, and over one device real tokens, slots and efficiency."""
    found: dict[str, dict[tuple[str, int], Record]] = {}
    for record in records_of(records, "multi_gpu"):
        config = record["config"]
        found.setdefault(config["model"], {})[config["parallel"], config["devices"]] = record
    tables = []
    for model, arms in found.items():
        one = next((record["metrics"] for (_, devices), record in arms.items() if devices == 1), None)
        rows = []
        for (parallel, devices), record in arms.items():
            real, slots = (
                record["metrics"][rate] / one[rate] if one else None
                for rate in ("real_tokens_per_second", "slots_per_second")
            )
            row = {"strategy": parallel, "devices": devices, "over_one": real, "slots_over_one": slots}
            rows.append(
                row | _milliseconds(record["metrics"], "seconds_per_step") | {"efficiency": slots and slots / devices}
            )
        first = next(iter(arms.values()))
        c, hardware = first["config"], first["hardware"]
        table = make_table(
            f"multi-gpu-{model}",
            f"{model} on several devices, whole optimizer steps through Lightning",
            "!strategy | devices:d | ms per step = ms ms_spread:.4g ± .2g | real tokens/s = real_tokens_per_second:,.0f | "
            "over one device = over_one:.2f x | slots over one device = slots_over_one:.2f x | efficiency:% | "
            "peak memory of one device = peak_memory_bytes:GiB | "
            "loss of the same documents, relative difference = loss_error:.1e",
            rows,
            f"{Arm.of(first).label}, {c['slots']} slots a step and device, {c['precision']}, {c['rounds']} turns of steps after "
            "a warm-up, medians and interquartile ranges. Efficiency is that of slots: the last rows of a plan hold padding, and "
            f"more devices reach them sooner. The losses are of each arm's first {c['same_steps']} steps, on the same documents "
            "for every number of devices.",
            f"{', '.join(dict.fromkeys(hardware['gpus'])) or hardware['cpu']}.",
        )
        tables.append(table)
    return tables


KINDS = {
    # A whole model. config: model, part (forward_backward: the bare loop; steps: whole optimizer steps) and its
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
