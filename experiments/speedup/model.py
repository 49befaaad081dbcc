"""One model size in a bench: its weights, its documents, and the records that its arms leave."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from experiments.speedup.arms import Documents
from experiments.speedup.breakdown import Breakdown
from experiments.speedup.config import Config, run_config
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.records import append_record, make_record
from packmamba.training.lit_module import PackedLitModule


class Model:
    """All arms of a model size share one set of weights and arrange the same documents."""

    def __init__(self, c: Config, name: str, device: torch.device, records_path: Path, progress: bool) -> None:
        self.c, self.name, self.device, self.path, self.progress = c, name, device, records_path, progress
        self.config = run_config(name, c.overrides)
        self.corpus = f"{c.distribution} ({LENGTH_DISTRIBUTIONS[c.distribution]})"
        assert self.config.model.vocab_size is not None
        self.vocab_size = self.config.model.vocab_size
        self.documents = Documents(draw_lengths(c.distribution, c.documents, c.seed), self.vocab_size, c.seed)
        self.begun = time.perf_counter()

    def build(self) -> PackedLitModule:
        """The model with weights of ``dtype``, but A and D, which mamba-ssm keeps in float32 too."""
        torch.compiler.reset()  # compiled code of other sizes counts against the limit for this one
        torch.manual_seed(self.c.seed)
        with self.device:
            module = PackedLitModule.from_config(self.config, 1)
        for name, parameter in module.named_parameters():
            if not name.endswith(("A_log", ".D")):
                parameter.data = parameter.data.to(getattr(torch, self.c.dtype))
        return module

    def bar(self, what: str) -> str | None:
        """What a bar of progress is called, if one is to be shown."""
        return f"{self.name}: {what}" if self.progress else None

    def speed(self, real_tokens_per_second: float, padding_fraction: float) -> dict[str, Any]:
        """What every record says of a speed. FLOPs: 6 for each token and parameter outside the embedding, head included."""
        model = self.config.model
        if not hasattr(self, "flop_parameters"):
            with torch.device("meta"):
                lm = PackedLitModule.from_config(self.config, 1).model
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

    def record_breakdown(
        self, arm: str, fields: dict[str, Any], part: str, seconds: float, found: Breakdown, calls: int
    ) -> None:
        """Of so many calls, which take so many seconds without the profiler.

        It slows the host, so no more is idle than those seconds leave; but where the GPU ran slower while it was profiled they
        leave too little, and kernels do not follow each other closer than they were seen to.
        """
        metrics = {family: taken / calls for family, taken in found.families.items()}
        metrics["idle"] = min(found.idle, max(found.gaps, seconds - sum(found.families.values()))) / calls
        metrics["seconds"] = sum(metrics.values())
        slowest = [{"seconds": taken / calls} for _, _, taken in found.kernels[:20]]
        names = [f"{family}: {name[:100]}" for family, name, _ in found.kernels[:20]]
        self.record("breakdown", arm, {**fields, "kernels": names}, part, metrics, {"kernels": slowest})

    def record(
        self, kind: str, arm: str, fields: dict[str, Any], part: str, metrics: dict[str, Any],
        curves: dict[str, list[dict[str, Any]]] | None = None,
    ) -> None:  # fmt: skip
        """Appends a record; ``fields``: the arm's, and what else its configuration holds."""
        c = self.c
        shared = ("distribution", "documents", "slots", "dtype", "precision", "rounds", "peak_flops_per_second")
        settings = {"model": self.name, "part": part, **{name: getattr(c, name) for name in shared}}
        if self.progress:
            shown = {name: None if v is None else float(f"{v:.4g}") for name, v in metrics.items()}
            print(self.name, part, arm, shown, flush=True)
        record = make_record(
            kind=kind, experiment=c.experiment, arm=arm, config={**settings, **self.sizes(), **fields}, seed=c.seed,
            corpus_hash=self.corpus, metrics=metrics, wall_seconds=time.perf_counter() - self.begun, curves=curves,
        )  # fmt: skip
        append_record(self.path, record)

    def sizes(self) -> dict[str, Any]:
        names = ("d_model", "n_layer", "expand", "d_state", "vocab_size", "compile", "recompute")
        return {name: getattr(self.config.model, name) for name in names}
