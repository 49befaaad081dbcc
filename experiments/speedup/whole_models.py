"""Whole models, single against padded against packed: the paper's comparison, as users run it today and on equal terms."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from experiments.speedup import growth, steps
from experiments.speedup.arms import Documents, Feed, PeerLM, Scheme, feed
from experiments.speedup.breakdown import Breakdown, by_family
from experiments.speedup.config import TOLERANCES, SpeedupBenchConfig, check
from packmamba.config import Config as RunConfig
from packmamba.config import load_config
from packmamba.data.batching import PackedBatch
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.records import append_record, make_record, provenance
from packmamba.training.graphs import BatchGraphs
from packmamba.training.module import MambaLitModule

LEAK_OVER_ERROR = 3
GATE_DOCUMENTS = 8

Loss = Callable[[PackedBatch], tuple[Tensor, Tensor]]


Config = SpeedupBenchConfig


def run(config: SpeedupBenchConfig | Mapping[str, Any], records_path: Path, progress: bool = True) -> None:
    """Appends records of kinds speedup, breakdown and growth; see experiments.speedup.report.

    All arms of a model share one set of weights and take turns. Every arm arranges the same documents; its time for all of
    them is estimated from some of its batches, evenly spread over their sizes.

    Raises:
        ConfigError: a value is refused; nothing has been measured.
        RuntimeError: arms disagree on the losses of the same documents; nothing of that model is recorded.
    """
    c = config if isinstance(config, SpeedupBenchConfig) else SpeedupBenchConfig(**config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    schemes = check(c, device)
    provenance()  # of the code as it is now, not as it may be after minutes
    for name in c.models:
        steps.free_memory()
        try:
            Bench(c, name, device, records_path, progress).run(schemes)
        except torch.OutOfMemoryError:
            print(f"left out, {name}, what was not recorded before: does not fit into memory", file=sys.stderr)


@dataclass
class Arm:
    scheme: Scheme
    loss: Loss
    feed: Feed
    batches: list[PackedBatch]
    targets: list[int]
    seconds: list[float] = field(default_factory=list)
    peak_memory_bytes: int | None = None
    loss_error: float | None = None
    leak_error: float | None = None


class Bench:
    """One model size: its weights, the arms that share them, and the records they leave."""

    def __init__(self, c: SpeedupBenchConfig, model: str, device: torch.device, records_path: Path, progress: bool):
        self.c, self.name, self.device, self.path, self.progress = c, model, device, records_path, progress
        self.config: RunConfig = load_config(None, [f"model={model}", *c.overrides])
        self.corpus = f"{c.distribution} ({LENGTH_DISTRIBUTIONS[c.distribution]})"
        assert self.config.model.vocab_size is not None
        lengths = draw_lengths(c.distribution, c.documents, c.seed)
        self.documents = Documents(lengths, self.config.model.vocab_size, c.seed)
        self.begun = time.perf_counter()
        self.graphs: BatchGraphs | None = None

    def run(self, schemes: list[Scheme]) -> None:
        if {"forward_backward", "breakdown", "growth"} & set(self.c.parts):
            self.run_bare_loop(schemes)
        if "steps" in self.c.parts:
            steps.measure(self)

    def run_bare_loop(self, schemes: list[Scheme]) -> None:
        c = self.c
        module = self.build()
        self.parameters = list(module.parameters())
        arms = self.arms(module, schemes)
        self.gate(module, arms)
        # Graphs keep memory that other arms may need: they take their turns afterwards.
        for graph in (False, True):
            group = [arm for arm in arms if arm.scheme.graph == graph]
            if graph and group:
                self.graphs = BatchGraphs(module.loss, self.parameters)
            if {"forward_backward", "breakdown"} & set(c.parts):
                group = self.measure(group, c.rounds)
                for arm in group:
                    self.record("speedup", arm.scheme.name, "forward_backward", self.rates(arm))
            for arm in group:
                if "breakdown" in c.parts and arm.scheme.name in c.breakdown_arms:
                    self.break_down(arm)
        self.graphs = None
        if "growth" in c.parts and self.name == c.growth_model:
            growth.measure(self, module)
        self.parameters = []

    def build(self) -> MambaLitModule:
        """The model with weights of ``dtype``, but A and D, which mamba-ssm keeps in float32 too."""
        torch.compiler.reset()  # compiled code of other sizes counts against the limit for this one
        torch.manual_seed(self.c.seed)
        with self.device:
            module = MambaLitModule(self.config, 1)
        for name, parameter in module.named_parameters():
            if not name.endswith(("A_log", ".D")):
                parameter.data = parameter.data.to(getattr(torch, self.c.dtype))
        return module

    def arms(self, module: MambaLitModule, schemes: list[Scheme]) -> list[Arm]:
        try:
            peer = PeerLM(module.model) if any(scheme.peer for scheme in schemes) else None
        except ValueError as error:
            print(f"left out, {', '.join(s.name for s in schemes if s.peer)}: {error}", file=sys.stderr)
            schemes, peer = [scheme for scheme in schemes if not scheme.peer], None
        made = []
        for scheme in schemes:
            fed = feed(self.documents, scheme, self.c.slots)
            chosen = fed.sample(self.c.single_batches if scheme.strategy == "single" else self.c.batches)
            targets = [int(batch.loss_mask.sum()) for batch in chosen]
            loss = peer.loss if scheme.peer and peer is not None else module.loss
            made.append(Arm(scheme, loss, fed, [batch.to(self.device) for batch in chosen], targets))
        return made

    def gate(self, module: MambaLitModule, arms: list[Arm]) -> None:
        """RuntimeError unless every token's loss is that of its document alone, or of the row that leaks by our layers.

        Of packed arms the difference that a leak makes is measured too: the gate must tell them apart.
        """
        few = Documents(self.documents.lengths[:GATE_DOCUMENTS], int(self.config.model.vocab_size or 0), self.c.seed)
        tolerance = TOLERANCES[self.c.dtype]
        alone = self.token_losses(module.loss, feed(few, Scheme.parse("single"), self.c.slots))
        for arm in self.bar(arms, "compares losses", "arm"):
            fed = feed(few, arm.scheme, self.c.slots)
            expected = alone
            if arm.scheme.packs:
                leaking = self.token_losses(lambda batch: module.loss(batch, "leak"), fed)
                arm.leak_error = _difference(leaking, alone)
                expected = leaking if arm.scheme.leaks else alone
            loss = arm.loss
            if arm.scheme.graph:
                graphs = BatchGraphs(module.loss, self.parameters)
                loss = lambda batch: graphs(batch, 1)  # noqa: B023, E731
            arm.loss_error = _difference(self.token_losses(loss, fed), expected)
            if not arm.loss_error <= tolerance:
                raise RuntimeError(
                    f"{self.name}, {arm.scheme.name}: losses are off by {arm.loss_error:.1e}; nothing is timed"
                )
            if arm.leak_error is not None and not arm.leak_error >= LEAK_OVER_ERROR * arm.loss_error:
                raise RuntimeError(
                    f"{self.name}, {arm.scheme.name}: a leak would not be seen ({arm.leak_error:.1e}); nothing is timed"
                )

    def token_losses(self, loss: Loss, fed: Feed) -> Tensor:
        """The losses of all targets, document after document."""
        parts: dict[int, Tensor] = {}
        for batch, documents in fed.all():  # with gradients, so that what is compiled is what is timed
            losses = loss(batch.to(self.device))[1].detach().cpu()[batch.loss_mask].double()
            parts |= zip(documents, losses.split([int(n) - 1 for n in batch.layout.lengths]))
        return torch.cat([parts[number] for number in sorted(parts)])

    def measure(self, arms: list[Arm], rounds: int) -> list[Arm]:
        """Times the arms in turns, after a round that warms up; those that do not fit into memory are left out."""
        for turn in self.bar(range(rounds + 1), "forward and backward", "round"):
            for arm in list(arms):
                try:
                    self.forget_gradients()
                    held = self.reset_peak()
                    seconds = self.seconds(lambda: self.forward_backward(arm))  # noqa: B023
                except torch.OutOfMemoryError:
                    print(f"left out, {self.name}, {arm.scheme.name}: does not fit into memory", file=sys.stderr)
                    arms.remove(arm)
                    torch.cuda.empty_cache()
                    continue
                if turn:
                    arm.seconds.append(seconds / len(arm.batches))
                # A graph's memory is taken when it is captured, and kept: what other arms keep is not this one's.
                if held is not None and turn == (0 if arm.scheme.graph else rounds):
                    weights = sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)
                    arm.peak_memory_bytes = torch.cuda.max_memory_allocated() - held + weights
        return arms

    def rates(self, arm: Arm) -> dict[str, Any]:
        """What an arm's record holds of its times: seconds of a batch, that stand for all batches' mean."""
        median = statistics.median(arm.seconds)
        return {
            "seconds_per_batch": median,
            "seconds_spread": float(np.subtract(*np.percentile(arm.seconds, [75, 25]))),
            "real_tokens_per_batch": arm.feed.tokens_per_batch,
            "peak_memory_bytes": arm.peak_memory_bytes,
            "position_bytes": None if arm.scheme.graph else sum(map(_position_bytes, arm.batches)) / len(arm.batches),
            "loss_error": arm.loss_error,
            "leak_error": arm.leak_error,
            **self.speed(arm.feed.tokens_per_batch / median, arm.feed.padding_fraction),
        }

    def speed(self, real_tokens_per_second: float, padding_fraction: float) -> dict[str, Any]:
        """What every record says of a speed. FLOPs: 6 for each token and parameter outside the embedding, head included."""
        model = self.config.model
        if not hasattr(self, "flop_parameters"):
            with torch.device("meta"):
                lm = MambaLitModule(self.config, 1).model
            self.flop_parameters = sum(p.numel() for p in lm.parameters())
            if not model.tie_embeddings:
                self.flop_parameters -= lm.backbone.embedding.weight.numel()
        flops, peak = 6 * self.flop_parameters * real_tokens_per_second, self.c.peak_flops_per_second
        return {
            "real_tokens_per_second": real_tokens_per_second,
            "slots_per_second": real_tokens_per_second / (1 - padding_fraction),
            "padding_fraction": padding_fraction,
            "model_flops_utilisation": None if peak is None else flops / peak,
            "flop_parameters": self.flop_parameters,
            "rounds": self.c.rounds,
        }

    def break_down(self, arm: Arm) -> None:
        found = by_family(lambda: self.forward_backward(arm), self.device.type == "cuda")
        seconds = statistics.median(arm.seconds) * len(arm.batches)
        self.record_breakdown(arm.scheme.name, "forward_backward", seconds, found, len(arm.batches))

    def record_breakdown(self, arm: str, part: str, seconds: float, found: Breakdown, calls: int) -> None:
        """Of so many calls, which take so many seconds without the profiler.

        It slows the host, so no more is idle than those seconds leave; but where the GPU ran slower while it was profiled they
        leave too little, and kernels do not follow each other closer than they were seen to.
        """
        metrics = {family: taken / calls for family, taken in found.families.items()}
        metrics["idle"] = min(found.idle, max(found.gaps, seconds - sum(found.families.values()))) / calls
        metrics["seconds"] = sum(metrics.values())
        slowest = [{"seconds": taken / calls} for _, _, taken in found.kernels[:20]]
        names = [f"{family}: {name[:100]}" for family, name, _ in found.kernels[:20]]
        self.record("breakdown", arm, part, metrics, {"kernels": names}, {"kernels": slowest})

    def record(
        self, kind: str, arm: str, part: str, metrics: dict[str, Any], config: dict[str, Any] | None = None,
        curves: dict[str, list[dict[str, Any]]] | None = None,
    ) -> None:  # fmt: skip
        c = self.c
        shared = {
            key: getattr(c, key) for key in ("distribution", "documents", "slots", "dtype", "precision", "rounds")
        }
        settings = {"model": self.name, "part": part, **shared, **self.sizes(), **(config or {})}
        if kind != "growth":
            settings |= Scheme.parse(arm).fields()
        settings["peak_flops_per_second"] = c.peak_flops_per_second
        if self.progress:
            shown = {name: None if v is None else float(f"{v:.4g}") for name, v in metrics.items()}
            print(self.name, part, arm, shown, flush=True)
        record = make_record(
            kind=kind, experiment=c.experiment, arm=arm, config=settings, seed=c.seed, corpus_hash=self.corpus,
            metrics=metrics, wall_seconds=time.perf_counter() - self.begun, curves=curves,
        )  # fmt: skip
        append_record(self.path, record)

    def sizes(self) -> dict[str, Any]:
        names = ("d_model", "n_layer", "expand", "d_state", "vocab_size", "compile", "recompute")
        return {name: getattr(self.config.model, name) for name in names}

    def forward_backward(self, arm: Arm) -> None:
        for batch, targets in zip(arm.batches, arm.targets):
            self.forget_gradients()
            if arm.scheme.graph and self.graphs is not None:
                self.graphs(batch, targets)
            else:
                (arm.loss(batch)[0] / targets).backward()

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def seconds(self, call: Callable[[], Any]) -> float:
        """From an idle device to an idle device."""
        self.synchronise()
        begun = time.perf_counter()
        call()
        self.synchronise()
        return time.perf_counter() - begun

    def bar(self, items: Sequence[Any], what: str, unit: str) -> Iterable[Any]:
        """The items, with a bar of progress."""
        return tqdm(items, desc=f"{self.name}: {what}", unit=unit, disable=not self.progress)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def reset_peak(self) -> int | None:
        """Bytes that are in use now; the largest number is counted from here."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()


def _difference(losses: Tensor, expected: Tensor) -> float:
    return float((losses - expected).norm() / (expected - expected.mean()).norm())


def _position_bytes(batch: PackedBatch) -> int:
    """What a batch says of its documents' places: starts and ends, and a GPU's schedule made of them."""
    from packmamba.ops.cuda.schedule import schedule_bytes

    return 8 * batch.layout.starts.numel() + schedule_bytes(batch.layout.starts)
