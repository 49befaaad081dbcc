"""Tables and figures of whole models: schemes, where time goes.

Spreads are interquartile ranges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.common import hardware, name_bars, records_of
from packmamba.lab.report.aggregate import Record
from packmamba.lab.report.figures import INK, Figure, axes, finish
from packmamba.lab.report.html import Kind
from packmamba.lab.report.tables import Cell, Table, make_table

OURS, PEER = "packmamba", "mamba-ssm"
# Times single, packed, on an A100: arXiv 2408.03865.
PAPER = {"1.4b": 3.06, "2.8b": 2.62}
# FLOP/s of dense bfloat16 products by card, of the SXM datasheets:
# nvidia.com/en-us/data-center/h100, h200.
PEAKS = {"H100 80GB HBM3": 989e12, "H200": 989e12}
_THEIRS, _OURS = "#E69F00", "#0072B2"


class Arm(NamedTuple):
    """Name an arm by the fields of a record's configuration."""

    strategy: str
    row_length: int | None = None  # none: padded to each batch's longest document
    multiple_of: int = 1
    layers: str = OURS
    graphs: bool = False

    @classmethod
    def of(cls, record: Record) -> Arm:
        config = record["config"]
        # as it was a key
        strategy = "padded_sorted" if config.get("sorted_by_length") else config["strategy"]
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
        padded = {"padded": f"padded-{self.row_length or 'longest'}", "padded_sorted": "padded-sorted"}
        schemes = {"single": "single", **padded}
        scheme = schemes.get(self.strategy, f"packed-{self.row_length}-{self.strategy}")
        return scheme + f"-{self.multiple_of}" * (self.multiple_of > 1) + "-graph" * self.graphs

    def __str__(self) -> str:
        return self.label if self.layers == OURS else f"{self.layers}-{self.label}"


TODAY = Arm("single", layers=PEER)
Arms = dict[Arm, Record]
Key = tuple[str, str]  # A model size and a card


def card(record: Record) -> str:
    return hardware(record).removeprefix("NVIDIA ")


def utilisation(record: Record, counted: bool = False) -> float | None:
    """Return FLOP/s of non-padding tokens over the card's peak: 6 for each parameter, or all
    operations of the scan too.

    Operations of a state and channel: five in the forward (decay, input times B, their sum, times
    C, sum), ten in the backward.
    """
    c, metrics = record["config"], record["metrics"]
    states = c["n_layer"] * c["expand"] * c["d_model"] * c["d_state"]
    flops = 6 * metrics["flop_parameters"] + 15 * states * counted
    peak = PEAKS.get(card(record))
    return None if peak is None else flops * metrics["real_tokens_per_second"] / peak


def speedup_tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate the paper's comparison, then every arm of each model size; of equal arms the latest
    record counts.
    """
    bare, steps = by_model(records, "speedup", "forward_backward"), by_model(records, "speedup", "steps")
    tables = [_headline(bare, steps, by_model(records, "breakdown", "forward_backward"))] if bare else []
    return [*tables, *(_arms(model, bare, steps) for model in dict.fromkeys(model for model, _ in [*bare, *steps]))]


def speedup_figures(records: Sequence[Record]) -> list[Figure]:
    """Draw non-padding tokens per second of arms with their spread, and packed's ratio over each; a
    figure for each card.
    """
    bare = by_model(records, "speedup", "forward_backward")
    cards = dict.fromkeys(gpu for _, gpu in bare)
    return [_figure(gpu, {key[0]: arms for key, arms in bare.items() if key[1] == gpu}) for gpu in cards]


def _figure(gpu: str, models: dict[str, Arms]) -> Figure:
    fig, panels = axes(len(models), width=4.0 * len(models) + 1.6, height=3.6)
    bars = {model: _bars(_best_packed(arms)) for model, arms in models.items()}
    # A bar has one place in all panels, empty where a model was not timed so.
    names = [name for name in _bars(_ANY) if any(bars[model].get(name) in arms for model, arms in models.items())]
    for ax, (model, arms) in zip(panels, models.items()):
        packed = _best_packed(arms)
        shown = {name: arms[arm] for name, arm in bars[model].items() if arm in arms}
        for name, record in shown.items():
            y = names.index(name)
            metrics = record["metrics"]
            rate = metrics["real_tokens_per_second"]
            spread = rate * metrics["seconds_spread"] / metrics["seconds_per_batch"] / 2
            ax.barh(y, rate, color=_THEIRS if "mamba-ssm" in name else _OURS, height=0.66)
            ax.errorbar(rate, y, xerr=spread, color=INK, capsize=2, linewidth=1)
            ratio = (arms[packed]["metrics"]["real_tokens_per_second"] if packed else rate) / rate
            text = f" {rate / 1e3:.3g}k" + f"  ({ratio:.1f}x)" * (name != PACKED)
            ax.text(rate + spread, y, text, va="center", fontsize=8)
        name_bars(ax, names, ax is panels[0])
        ax.set_xlim(0, 1.45 * max(record["metrics"]["real_tokens_per_second"] for record in shown.values()))
        ax.xaxis.set_major_formatter(lambda x, _: f"{x / 1e3:g}k")
        paper = f" (the paper: {PAPER[model]}x)" if model in PAPER else ""
        ax.set(title=f"{model.upper()}, {gpu}{paper}", xlabel="non-padding tokens per second")
    caption = (
        "Forward and backward of whole models; in brackets packed's ratio over the arm. mamba-ssm as its users run it (orange) "
        "and our layers, compiled alike (blue). Whiskers: an interquartile range."
    )
    return finish(fig, "speedup" + f"-{gpu.split()[0].lower()}" * (gpu != "H200"), caption)


PACKED = "packed, reset"
_ANY = Arm("best_fit_decreasing", 16384)


def _bars(packed: Arm | None) -> dict[str, Arm]:
    """Return the arms of the figure by their plain names."""
    bars = {
        "mamba-ssm, one document at a time": TODAY,
        "mamba-ssm, one document, multiple of 8": TODAY._replace(multiple_of=8),
        "mamba-ssm, sorted by length, multiple of 8": Arm("padded_sorted", multiple_of=8, layers=PEER),
        "mamba-ssm, the same rows": packed and packed._replace(layers=PEER),
        "one document, CUDA graphs": Arm("single", graphs=True),
        "padded to 2048": Arm("padded", 2048),
        "sorted by length, padded": Arm("padded_sorted"),
        PACKED: packed,
    }
    return {name: arm for name, arm in bars.items() if arm}


def by_model(records: Sequence[Record], kind: str, part: str) -> dict[Key, Arms]:
    """Records of a kind and part by model size and card, smallest first, then by arm: the latest,
    if measured alike.
    """
    of_kind = records_of(records, kind)
    latest = {(record["config"]["model"], card(record)): _settings(record) for record in of_kind}
    found: dict[Key, Arms] = {}
    for record in sorted(of_kind, key=lambda record: [record["config"][name] for name in ("d_model", "n_layer")]):
        key = record["config"]["model"], card(record)
        if record["config"]["part"] == part and _settings(record) == latest[key]:
            found.setdefault(key, {})[Arm.of(record)] = record
    return found


_ALIKE = (
    "distribution documents slots dtype precision d_model n_layer expand d_state vocab_size compile recompute".split()
)


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
    """Format a ratio of speeds and its spread: both interquartile ranges, relative, added in
    quadrature.

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


MFU = "MFU, 6 N = model_flops_utilisation:% | MFU, operations counted = counted_flops_utilisation:%"
RATE = "non-padding tokens/s = real_tokens_per_second:,.0f"
STEPS = "optimizer steps, non-padding tokens/s = steps_real_tokens_per_second:,.0f"


def _measured(record: Record | None) -> dict[str, Any]:
    if record is None:
        return {}
    shares = {"model_flops_utilisation": utilisation(record), "counted_flops_utilisation": utilisation(record, True)}
    return _milliseconds(record["metrics"]) | shares


def _headline(bare: dict[Key, Arms], steps: dict[Key, Arms], broken_down: dict[Key, Arms]) -> Table:
    rows = []
    for (model, gpu), arms in bare.items():
        best = _best_packed(arms)
        if best is None:
            continue
        profiles = broken_down.get((model, gpu), {})
        padded = next((arm for arm in arms if arm.strategy == "padded" and arm.row_length and arm.layers == OURS), None)
        for arm in (best, best._replace(graphs=True)):
            record, step = arms.get(arm), steps.get((model, gpu), {}).get(arm)
            if record is None:
                continue
            others = {
                "over_padded_sorted": Arm("padded_sorted", graphs=arm.graphs),
                "over_padded_longest": Arm("padded", graphs=arm.graphs),
                "over_padded": (padded or Arm("padded", 2048))._replace(graphs=arm.graphs),
                "over_single": arm.single,
                "over_single_8": arm.single._replace(multiple_of=8),
                "over_mamba_ssm_packed": best._replace(layers=PEER),
                "over_mamba_ssm_padded_sorted": Arm("padded_sorted", layers=PEER),
                "over_mamba_ssm_padded_sorted_8": Arm("padded_sorted", multiple_of=8, layers=PEER),
                "over_mamba_ssm_single_8": TODAY._replace(multiple_of=8),
                "over_mamba_ssm_single": TODAY,
            }
            row: dict[str, Any] = {"model": model, "card": gpu, "arm": arm.label, "paper": PAPER.get(model)}
            row |= _measured(record)
            row |= {name: _over(record, arms.get(other)) for name, other in others.items()}
            for name in ("over_mamba_ssm_single_8", "over_mamba_ssm_single"):
                if (other := others[name]) in profiles:
                    row[f"{name}_kernels"] = _over(record, arms.get(other), profiles[other]["metrics"]["idle"])
            rows.append(row | {"steps_real_tokens_per_second": _rate(step), "steps_over_bare": _over(step, record)})
    return make_table(
        "headline",
        "Packed rows against everything else, non-padding tokens per second",
        f"!model | !card | !packed arm = arm | {RATE} | {MFU} | over sorted by length and padded = over_padded_sorted± | "
        "over padded to the longest = over_padded_longest± | over padded to 2048 = over_padded± | "
        "over single = over_single± | over single, multiple of 8 = over_single_8± | "
        "over mamba-ssm, the same rows = over_mamba_ssm_packed± | over mamba-ssm, sorted = over_mamba_ssm_padded_sorted± | "
        "over mamba-ssm, sorted, multiple of 8 = over_mamba_ssm_padded_sorted_8± | "
        "over mamba-ssm, single, multiple of 8 = over_mamba_ssm_single_8± | "
        "the same, kernels alone = over_mamba_ssm_single_8_kernels± | over mamba-ssm, single = over_mamba_ssm_single± | "
        f"the same, kernels alone = over_mamba_ssm_single_kernels± | the paper's, A100 = paper:.2f x | {STEPS} | "
        "steps over forward and backward = steps_over_bare± | peak memory = peak_memory_bytes:GiB",
        rows,
        "Forward and backward; ratios ± both interquartile ranges in quadrature. Optimizer steps: the same "
        "with PackedDataModule, float32 masters and AdamW. The paper's column is packed over single on an A100 (arXiv "
        "2408.03865), on its own documents. Single's speed is its host's; kernels alone: as if the device never waited. Multiple "
        "of 8: a document is padded at its end. -graph: a batch's forward and backward replayed as one CUDA graph; against our "
        "other arms as graphs too. mamba-ssm's Mamba-1 leaks on the same rows.",
        *_apart(bare, steps),
        _hardware(bare),
    )


def _apart(bare: dict[Key, Arms], steps: dict[Key, Arms]) -> list[str]:
    """Note arms whose ratio of steps to loop may be that of two machines."""
    made = [(key, arm, step) for key, arms in steps.items() for arm, step in arms.items()]
    apart = [one for one in made if bare.get(one[0], {}).get(one[1], one[2])["commit"] != one[2]["commit"]]
    names = [f"{' '.join(key)} {arm}" for key, arm, _ in apart]
    return (
        [f"Steps, and forward and backward, were run at different commits, apart: {', '.join(names)}."] if names else []
    )


def _arms(model: str, bare: dict[Key, Arms], steps: dict[Key, Arms]) -> Table:
    bare, steps = ({key: arms for key, arms in part.items() if key[0] == model} for part in (bare, steps))
    rows = []
    for key in dict.fromkeys([*bare, *steps]):
        loop, training = bare.get(key, {}), steps.get(key, {})
        for arm in dict.fromkeys([*loop, *training]):
            record, step = loop.get(arm), training.get(arm)
            measured: Record = record or step or {}
            leaks = arm.packs and arm.layers == PEER and measured["config"].get("mixer", "mamba1") == "mamba1"
            single = Arm("single", graphs=arm.graphs)
            rows.append({
                "layers": "mamba-ssm, today" if arm.layers == PEER else "ours, equal terms",
                "card": key[1],
                "arm": arm.label + " (leaks)" * leaks,
                **_measured(record),
                "padding_fraction": measured["metrics"]["padding_fraction"],
                "over_mamba_ssm_single": _over(record, loop.get(TODAY)),
                "over_single": _over(record, loop.get(single)),
                "over_single_8": _over(record, loop.get(single._replace(multiple_of=8))),
                "steps_real_tokens_per_second": _rate(step),
                "steps_over_bare": _over(step, record),
                "steps_over_single": _over(step, training.get(single)),
                "steps_peak_memory_bytes": step and step["metrics"]["peak_memory_bytes"],
            })  # fmt: skip
    table = make_table(
        f"arms-{model}",
        f"{model}: every arm",
        f"!layers | !card | !arm | {RATE} | ms per batch = ms ms_spread:.4g ± .2g | "
        "over single, mamba-ssm = over_mamba_ssm_single± | over single, equal terms = over_single± | "
        "over single, multiple of 8 = over_single_8± | padding = padding_fraction:% | slots/s = slots_per_second:,.0f | "
        f"{MFU} | peak memory = peak_memory_bytes:GiB | {STEPS} | steps over single's = steps_over_single± | "
        "steps over forward and backward = steps_over_bare± | steps' peak memory = steps_peak_memory_bytes:GiB",
        rows,
    )
    timed = [record for arms in bare.values() for record in arms.values()]
    c = (timed or [record for arms in steps.values() for record in arms.values()])[0]["config"]
    table.notes = [
        f"Every arm arranges the same {c['documents']} documents in batches of at most {c['slots']} slots (single: one "
        f"document); some batches, evenly spread over their sizes, stand for all. Medians of {c['rounds']} rounds in turns after "
        "a warm-up; spreads are interquartile ranges.",
        f"Bare loop: {c['dtype']} weights, forward and backward; ours: compile={c['compile']}, recompute={c['recompute']}. "
        f"Optimizer steps: {c['precision']}, float32 masters, fused AdamW, about {c['slots']} non-padding tokens a step.",
    ]
    table.notes += [*_apart(bare, steps), _hardware(bare or steps)]
    found = [[record["metrics"][name] for record in timed] for name in ("loss_error", "leak_error")]
    errors, leaking = ([error for error in some if error is not None] for some in found)
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


# Metrics of a record, seconds of one call each; experiments.speedup.model measures them.
FAMILIES = "matrix products,scan,conv,norm and elementwise,loss,optimizer,communication,other,idle".split(",")
_PARTS = {"forward_backward": "forward, backward", "steps": "optimizer step"}


def breakdown_tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate time by kernel family, for each model size, part and arm."""
    parts = {part: by_model(records, "breakdown", part) for part in _PARTS}
    rows: list[dict[str, Any]] = []
    for key in dict.fromkeys(key for found in parts.values() for key in found):
        for part, found in parts.items():
            for arm, record in found.get(key, {}).items():
                shares = {name: record["metrics"][name] / record["metrics"]["seconds"] for name in FAMILIES}
                row: dict[str, Any] = {"model": key[0], "card": key[1], "arm": arm, "part": _PARTS[part]}
                row |= {"ms": 1e3 * record["metrics"]["seconds"]}
                row |= {name.replace(" ", "_"): Cell(f"{100 * share:.1f}", (share,)) for name, share in shares.items()}
                inside = sum(shares[name] for name in ("matrix products", "scan", "conv"))
                rows.append(row | {"outside": 1 - inside})
    families = " | ".join(f"{family} (%) = {family.replace(' ', '_')}" for family in FAMILIES)
    table = make_table(
        "breakdown",
        "Time by family of kernels",
        f"!model | !card | !arm | !what = part | ms:.4g | {families} | outside matrix products, scan and conv = outside:%",
        rows,
        "One batch, or one optimizer step, by torch.profiler, kernels that overlap counted once; idle: no kernel runs (no "
        "more than the time without the profiler, which slows the host, leaves, but all gaps below 10 us).",
    )
    return [table]


def sorted_tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate arms of sorted batches beside packed rows; a model's rows are of one run, the
    latest.
    """
    speeds, profiles = (by_model(records, "sorted", part) for part in ("forward_backward", "breakdown"))
    rows = []
    for key, arms in speeds.items():
        packed = next(record for arm, record in arms.items() if arm.packs and arm.layers == OURS)
        profiled = profiles.get(key, {})
        busy = _busy_per_token(profiled.get(Arm.of(packed)), packed)
        for arm, record in arms.items():
            if record["commit"] != packed["commit"]:
                continue
            row = {"model": key[0], "card": key[1], "arm": str(arm), "packed_over": _over(packed, record)}
            if arm in profiled and busy is not None:
                families = profiled[arm]["metrics"]
                row |= {name.replace(" ", "_"): 1e3 * families[name] for name in ("matrix products", "scan", "idle")}
                row["kernels"] = _busy_per_token(profiled[arm], record) / busy
            rows.append(row | _milliseconds(record["metrics"]))
    first = next(iter(next(iter(speeds.values())).values()))["config"]
    table = make_table(
        "sorted",
        "Batches sorted by length beside packed rows",
        f"!model | !card | !arm | {RATE} | packed over it = packed_over± | kernels alone = kernels:.2f x | "
        "padding = padding_fraction:% | slots in rows of odd length = odd_fraction:% | of all batches = odd_fraction_of_all:% | "
        "ms per batch = ms ms_spread:.4g ± .2g | matrix products (ms) = matrix_products:.4g | scan (ms) = scan:.4g | "
        "idle (ms) = idle:.3g",
        rows,
        f"Forward and backward, {first['dtype']} weights, medians of {first['rounds']} rounds in which all arms take turns; "
        "ratios ± both interquartile ranges in quadrature. Every arm arranges the same documents; four of its batches, evenly "
        "spread over their sizes, stand for all. -8: lengths rounded up to multiples of 8. mamba-ssm's matrix products are "
        "slow in rows of odd length: the share of slots in such rows, of the four batches and of all. Kernels alone: without "
        "idle, the time in which no kernel runs.",
        _hardware(speeds).partition(" MFU")[0],
    )
    return [table]


def _busy_per_token(profile: Record | None, record: Record) -> Any:
    """Return the seconds in which kernels run, by a breakdown, over a batch's non-padding tokens."""
    taken = None if profile is None else profile["metrics"]
    return taken and (taken["seconds"] - taken["idle"]) / record["metrics"]["real_tokens_per_batch"]


def _milliseconds(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {**metrics, "ms": 1e3 * metrics["seconds_per_batch"], "ms_spread": 1e3 * metrics["seconds_spread"]}


KINDS = {
    # A whole model. config: model, part (forward_backward: the bare loop; steps: whole optimizer
    # steps) and its sizes. A batch stands for the mean of all the arm's batches of the same
    # documents. peak_memory_bytes is null off a GPU, position_bytes (of one batch) and the gate's
    # errors are null in steps.
    "speedup": Kind(speedup_tables, speedup_figures),
    # Arms of sorted batches, which only their own bench times; config.part: forward_backward or
    # breakdown.
    "sorted": Kind(sorted_tables),
    # Seconds of one call by family of kernels; their sum is seconds.
    "breakdown": Kind(breakdown_tables),
    # Of benches that are no more: their tables lie in logs/.
    "growth": Kind(),
    "multi_gpu": Kind(),
}  # fmt: skip
