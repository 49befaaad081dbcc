"""Tables and figures of throughput against row length, document length and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.old_arms import records_of
from experiments.speedup.report_models import OURS, Arm, by_model
from packmamba.report.aggregate import Record, of_kind
from packmamba.report.figures import MUTED, Figure, axes, finish, legend_below, style_of
from packmamba.report.tables import Cell, Column, Table, gibibytes, number, percent, word

PARALLEL = {
    "ddp": "every GPU holds the whole model; gradients are summed once a step",
    "fsdp2": "every GPU holds a share of each weight and gathers the others when it needs them",
}
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
                Column("row", ("row_length",)),
                Column("documents", ("num_documents",)),
                Column("ms", ("ms", "ms_spread")),
                Column("real tokens/s", ("real_tokens_per_second",)),
                Column("model FLOP utilisation", ("model_flops_utilisation",)),
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


def growth_figures(records: Sequence[Record]) -> list[Figure]:
    """Real tokens per second against each axis, and against the model's size where packed arms of several were timed."""
    curves = [
        (_AXES[axis], _measured(points), {v: r["metrics"]["real_tokens_per_second"] for v, r in points.items()})
        for axis, points in _points(records).items()
    ]
    if not curves:
        return []
    sizes: dict[int, float] = {}
    for arms in by_model(records, "speedup", "forward_backward").values():
        packed = [r["metrics"] for arm, r in arms.items() if arm.packs and arm.layers == OURS and not arm.graphs]
        if packed:
            sizes[int(packed[0]["flop_parameters"])] = max(metrics["real_tokens_per_second"] for metrics in packed)
    if len(sizes) > 1:
        curves.append(("parameters", "fastest packed arm, no graph", sizes))
    fig, panels = axes(len(curves), width=3.6 * len(curves), height=3.4)
    for ax, (label, title, points) in zip(panels, curves):
        ax.plot(list(points), list(points.values()), marker="o", color="#0072B2", linewidth=1.8)
        ax.set(title=title, xscale="log", xlabel=label, ylim=(0, 1.12 * max(points.values())))
        ax.set_xticks(list(points), [_short(value) for value in points])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(lambda y, _: f"{y / 1e3:g}k")
    panels[0].set_ylabel("real tokens per second")
    caption = "Forward and backward of packed rows: throughput against row length, mean document length and model size."
    return [finish(fig, "growth", caption)]


def _measured(points: dict[int, Record]) -> str:
    config = next(iter(points.values()))["config"]
    return f"{config['model']}" + " as CUDA graphs" * _graphs(config)


def multi_gpu_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each model size: tokens per second, and over one device real tokens, slots and efficiency."""
    tables = []
    for model, arms in _devices(records).items():
        one = next((record for record in arms.values() if record["config"]["devices"] == 1), None)
        table = Table(
            f"multi-gpu-{model}",
            f"{model} on several devices, whole optimizer steps through Lightning",
            [
                Column("strategy", ("strategy",), False),
                Column("devices", ("devices",)),
                Column("ms per step", ("ms", "ms_spread")),
                Column("real tokens/s", ("real_tokens_per_second",)),
                Column("over one device", ("over_one",)),
                Column("slots over one device", ("slots_over_one",)),
                Column("efficiency", ("efficiency",)),
                Column("peak memory of one device", ("peak_memory_bytes",)),
                Column("loss of the same documents, relative difference", ("loss_error",)),
            ],
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


def multi_gpu_figures(records: Sequence[Record]) -> list[Figure]:
    """Slots per second against devices, beside what devices without each other would give."""
    figures = []
    for model, arms in _devices(records).items():
        lines: dict[str, dict[int, float]] = {}
        for record in arms.values():
            rate = record["metrics"]["slots_per_second"]
            lines.setdefault(record["config"]["parallel"], {})[record["config"]["devices"]] = rate
        fig, (ax,) = axes(1, width=5.4, height=3.8)
        most = max(devices for points in lines.values() for devices in points)
        if alone := next((points[1] for points in lines.values() if 1 in points), None):
            ax.plot([1, most], [alone, most * alone], color=MUTED, linewidth=1, linestyle=(0, (4, 2)), label="linear")
        for rank, (parallel, points) in enumerate(lines.items()):
            colour = style_of(parallel, rank)["color"]
            ax.plot(list(points), list(points.values()), marker="o", color=colour, linewidth=1.8, label=parallel)
        ax.set(xlabel="devices", ylabel="slots per second", title=model, ylim=(0, None))
        ax.set_xticks(sorted({devices for points in lines.values() for devices in points}))
        ax.yaxis.set_major_formatter(lambda y, _: f"{y / 1e3:g}k")
        legend_below(fig)
        figures.append(finish(fig, f"multi-gpu-{model}", "Whole optimizer steps on several devices; packed rows."))
    return figures


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


def _short(value: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value / 1024:.0f}k" if value >= 1024 else f"{value:.0f}"
