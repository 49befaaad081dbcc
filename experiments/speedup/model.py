"""Arms, configuration and records of the bench of whole models, and where a call's time goes by
family of kernels.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Optional, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from experiments import timing
from packmamba.config import Config as RunConfig
from packmamba.config import ConfigError, DataConfig, key, load_config
from packmamba.data.batch import PackedBatch, count_step, make_batch
from packmamba.data.corpus import Corpus, Documents
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.data.packing import STRATEGIES, RowPlan
from packmamba.data.schedule import arrange, micro_batches, pieces_of
from packmamba.lab.records import append_record, make_record
from packmamba.nn import MambaLM
from packmamba.ops.mamba_ssm import _peer
from packmamba.training.lit_module import PackedLitModule

PARTS = BARE, BREAKDOWN, STEPS = "forward_backward", "breakdown", "steps"


@dataclass
class Arm:
    """Hold an arm: how documents become rows, and what computes them.

    Its records hold all but ``parts``.
    """

    strategy: str = key(
        "best_fit_decreasing", "How documents become rows.", choices=sorted(STRATEGIES.keys() - {"concat_split"})
    )
    row_length: Optional[int] = key(
        None, "Slots of a row; null: as many as each document (single) or each batch's longest (padded) has.", low=1
    )
    multiple_of: int = key(1, "Rows end in padding up to a multiple of so many slots; not in steps.", low=1)
    layers: str = key("packmamba", "packmamba, or mamba-ssm if it is installed.", choices=("packmamba", "mamba-ssm"))
    graphs: bool = key(False, "Forward and backward are CUDA graphs (packmamba.training.cuda_graphs).")
    parts: list[str] = key([BARE], "Parts of the bench it is in.", choices=PARTS, check=("at least one part", bool))

    @property
    def packs(self) -> bool:
        return self.strategy not in ("single", "padded", "padded_sorted")

    @property
    def peer(self) -> bool:
        return self.layers == "mamba-ssm"

    def fields(self) -> dict[str, Any]:
        """Return the fields of its records."""
        return {name: value for name, value in asdict(self).items() if name != "parts"}

    def data(self, **others: Any) -> DataConfig:
        """The configuration that arranges so."""
        return DataConfig(batching="stream", strategy=self.strategy, row_length=self.row_length, **others)


def random_documents(lengths: np.ndarray, vocab_size: int, seed: int) -> Documents:
    """Make random documents of given lengths, in memory."""
    tokens = np.random.default_rng(seed).integers(vocab_size, size=int(lengths.sum(dtype=np.int64)))
    return Documents(tokens, lengths)


@dataclass
class Feed:
    """An arm's batches of all the documents, and which documents lie in each, in order."""

    corpus: Corpus
    rows: RowPlan
    groups: list[np.ndarray]

    @property
    def padding_fraction(self) -> float:
        counts = count_step(self.corpus, self.rows, self.groups)
        return 1 - counts.num_tokens / counts.num_slots

    @property
    def tokens_per_batch(self) -> float:
        return int(self.rows.length.sum()) / len(self.groups)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and their length of every batch."""
        return [(len(rows), int(self.rows.slots[rows].max())) for rows in self.groups]

    def sample(self, count: int) -> list[PackedBatch]:
        """``count`` of the batches, evenly spread over their sizes: few that stand for all."""
        sizes = [count_step(self.corpus, self.rows, [rows]).num_tokens for rows in self.groups]
        by_size = np.argsort(sizes, kind="stable")
        count = min(count, len(by_size))
        middles = [by_size[(2 * i + 1) * len(by_size) // (2 * count)] for i in range(count)]
        return [make_batch(self.corpus, self.rows, self.groups[middle]) for middle in middles]

    def all(self) -> list[tuple[PackedBatch, list[int]]]:
        """Every batch and the documents in it, in the order of its tokens."""
        of_row = np.split(self.rows.document, self.rows.row_offsets[1:-1])
        batches = [make_batch(self.corpus, self.rows, rows) for rows in self.groups]
        documents = [[d for row in rows for d in of_row[row].tolist()] for rows in self.groups]
        return list(zip(batches, documents))


def feed(documents: Documents, arm: Arm, slots: int) -> Feed:
    """The documents as the arm arranges them, in batches of at most ``slots`` slots.

    ValueError if a row cannot hold one.
    """
    corpus, data = cast(Corpus, documents), arm.data(max_tokens_per_batch=slots)
    rows = arrange(pieces_of(corpus, np.arange(len(documents.lengths))), data)
    rows = replace(rows, slots=-(-rows.slots // arm.multiple_of) * arm.multiple_of)
    return Feed(corpus, rows, micro_batches(rows, np.arange(len(rows)), data))


class PeerLM(nn.Module):
    """Run mamba-ssm's blocks as its users do: fast path, fused add and norm, residual in float32;
    eager.

    Shares its parameters with ``model``. Mamba-2's layers are told where packed documents lie;
    Mamba-1's cannot be, and leak.
    """

    backbone: Any

    def __init__(self, model: MambaLM) -> None:
        super().__init__()
        c = model.config
        self.leaks = c["mixer"] == "mamba1"
        block = _peer("mamba_ssm", "modules.block", "Block")
        mixer = _peer("mamba_ssm", *(("modules.mamba_simple", "Mamba") if self.leaks else ("modules.mamba2", "Mamba2")))
        norm, self._norm = (_peer("mamba_ssm", "ops.triton.layer_norm", name) for name in ("RMSNorm", "layer_norm_fn"))
        settings = {key: c[key] for key in ("d_state", "d_conv", "expand", "dt_rank", "headdim", "ngroups") if key in c}
        with torch.device("meta"):
            layers = [
                block(
                    c["d_model"], lambda width: mixer(width, **settings), nn.Identity, norm, fused_add_norm=True,
                    residual_in_fp32=True,
                )
                for _ in range(c["n_layer"])
            ]  # fmt: skip
            self.backbone = nn.Module()
            self.backbone.embedding = nn.Embedding(c["vocab_size"], c["d_model"])
            self.backbone.layers = nn.ModuleList(layers)
            self.backbone.norm_f = norm(c["d_model"])
            self.lm_head = nn.Linear(c["d_model"], c["vocab_size"], bias=False)
        self.load_state_dict(model.state_dict(keep_vars=True), assign=True)

    def loss(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy and (B, L) that at each slot, zero where there is no target."""
        boundaries = {"seq_idx": batch.layout.seq_idx} if batch.layout.packed and not self.leaks else {}
        hidden, residual = self.backbone.embedding(batch.tokens), None
        for layer in self.backbone.layers:
            hidden, residual = layer(hidden, residual, **boundaries)
        norm = self.backbone.norm_f
        hidden = self._norm(hidden, norm.weight, norm.bias, residual=residual, eps=norm.eps, is_rms_norm=True)
        logits = self.lm_head(hidden).float()
        losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        losses = torch.where(batch.loss_mask, losses.view(batch.targets.shape), 0)
        return losses.sum(), losses.detach()


# Of the losses of single tokens, against those of documents alone, in units of their standard
# deviation. Rounding through 48 blocks in bfloat16 makes 2.5e-2, and a leak 1.6e-1; through 24,
# 1e-2 and 5e-2.
TOLERANCES = {"bfloat16": 5e-2, "float32": 1e-4}
DISTRIBUTION = "packmamba.data.lengths:LENGTH_DISTRIBUTIONS"


@dataclass
class Config:
    experiment: str = key("speedup", "The question, which the records name.")
    models: list[str] = key(["130m", "1.4b", "2.8b"], "Sizes in configs/model.")
    overrides: list[str] = key([], "key=value of run configurations that hold for all, such as model.compile=true.")
    parts: list[str] = key([*PARTS], "Forward and backward, its kernels, and whole optimizer steps.", choices=PARTS)
    arms: dict[str, Arm] = key({}, "By name; arms=[single,padded-2048] takes some of the file's.")
    distribution: str = key("documents-2k", "Distribution of the documents' lengths.", choices=DISTRIBUTION)
    documents: int = key(4096, "Documents that every arm arranges.", low=1)
    slots: int = key(16384, "Maximum tokens (padding included) of a batch; non-padding tokens of a step.", low=1)
    batches: int = key(2, "Batches of each arm that stand for all, evenly spread over their sizes.", low=1)
    single_batches: int = key(8, "The same for single, whose batch is a document.", low=1)
    rounds: int = key(3, "How often each arm is timed, in turns.", low=1)
    dtype: str = key(
        "bfloat16", "Of the weights in forward and backward; A and D are float32 as in mamba-ssm.", choices=TOLERANCES
    )
    precision: str = key("bf16-mixed", "Of the steps.", choices=("32-true", "bf16-mixed", "bf16-true"))
    seed: int = key(0, "Of lengths, tokens and weights.", low=0)

    def taking_part(self, part: str) -> dict[str, Arm]:
        """Return the arms that take part in a part.

        Raises ConfigError for an arm whose rows PackedDataModule cannot make.
        """
        arms = {name: arm for name, arm in self.arms.items() if part in arm.parts}
        if part == STEPS and (rounded := [name for name, arm in arms.items() if arm.multiple_of > 1]):
            raise ConfigError(f"arms.{rounded[0]}.parts: expected no steps with multiple_of above 1, got {part}")
        return arms


def run_config(model: str, overrides: list[str]) -> RunConfig:
    """Return the configuration of a run of a model size."""
    return load_config(None, [f"model={model}", *overrides])


# The first that matches a kernel's name (on a CPU, an operator's) is its family.
FAMILIES = {
    "conv": r"conv1d|convparams",
    "scan": (
        r"ssm|scanparams|selective_scan|scheduleparams|::schedule\(|_chunk|chunk_|state_passing|_walk"
        r"|^(walk|walk_states|state_parts|pair_parts|input_gradients|gate_gradients|step_gradients|write_steps|combine|finish"
        r"|zero_padding|count_pieces|write_pieces|sort_segments)$"
    ),
    "optimizer": r"multi_tensor|fused_?adam|foreach|AdamW",
    "communication": r"nccl|all_?reduce|all_?gather|reduce_scatter",
    "matrix products": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|aten::(mm|addmm|bmm|linear)$",
    "loss": r"log_?softmax|nll_loss|cross_entropy|logsumexp|_softmax",
    "norm and elementwise": r"triton|norm|aten::|at::native|at_cuda_detail",
}
OTHER = "other"
# microseconds: shorter gaps between kernels are those of launching, whatever the host does
LAUNCH = 10.0


@dataclass
class Breakdown:
    """Hold the seconds of calls by family, of each kernel, slowest first, and in which no kernel
    ran.
    """

    families: dict[str, float]
    kernels: list[tuple[str, str, float]]  # family, name, seconds
    idle: float
    gaps: float = 0.0  # of idle, gaps as short as launching makes them


def by_family(call: Callable[[], Any], device: torch.device) -> Breakdown:
    """Sum a call's time by family of kernels."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        taken = timing.seconds(call, device)
    return sort_kernels(profiler, on_gpu, taken)


def sort_kernels(profiler: profile, on_gpu: bool, taken: float) -> Breakdown:
    """The same of a profile that has ended, of calls that took so many seconds."""
    gaps = 0.0
    if on_gpu:
        events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        by_name, gaps = exclusive((event.time_range.start, event.time_range.end, event.name) for event in events)
    else:
        by_name = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    families = dict.fromkeys([*FAMILIES, OTHER], 0.0)
    kernels = []
    for name, microseconds in by_name.items():
        family = family_of(name)
        families[family] += microseconds / 1e6
        kernels.append((family, name, microseconds / 1e6))
    idle = max(0.0, taken - sum(families.values()))
    return Breakdown(families, sorted(kernels, key=lambda kernel: -kernel[2]), idle, min(idle, gaps / 1e6))


def exclusive(events: Iterable[tuple[float, float, str]]) -> tuple[dict[str, float], float]:
    """Sum the time of (start, end, name) by name, where several run of the one that started first,
    and gaps below ``LAUNCH``.
    """
    taken: dict[str, float] = {}
    covered, gaps = -math.inf, 0.0
    for start, end, name in sorted(events):
        taken[name] = taken.get(name, 0.0) + max(0.0, end - max(start, covered))
        gaps += start - covered if 0 < start - covered < LAUNCH else 0.0
        covered = max(covered, end)
    return taken, gaps


def family_of(name: str) -> str:
    return next((family for family, pattern in FAMILIES.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


class Model:
    """All arms of a model size share one set of weights and arrange the same documents.

    Attributes:
        kind: of all records, whose part then tells breakdowns from speeds; None: ``speedup`` and
            ``breakdown``.
    """

    kind: Optional[str] = None

    def __init__(self, c: Config, name: str, device: torch.device, records_path: Path, progress: bool) -> None:
        self.c, self.name, self.device, self.path, self.progress = c, name, device, records_path, progress
        self.config = run_config(name, c.overrides)
        self.corpus = f"{c.distribution} ({LENGTH_DISTRIBUTIONS[c.distribution]})"
        assert self.config.model.vocab_size is not None
        self.vocab_size = self.config.model.vocab_size
        self.documents = random_documents(draw_lengths(c.distribution, c.documents, c.seed), self.vocab_size, c.seed)
        self.begun = time.perf_counter()
        with torch.device("meta"):
            self.lm = PackedLitModule.from_config(self.config, 1).model

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
        """Return the progress bar's label, if one is to be shown."""
        return f"{self.name}: {what}" if self.progress else None

    def speed(self, seconds: list[float], tokens: float, rate: float, padding_fraction: float) -> dict[str, Any]:
        """Return the fields of a record of speed; flop_parameters are those outside the embedding,
        head included.
        """
        lm = self.lm
        embedding = 0 if self.config.model.tie_embeddings else lm.backbone.embedding.weight.numel()
        return {
            "seconds_per_batch": timing.median(seconds),
            "seconds_spread": timing.spread(seconds),
            "real_tokens_per_batch": tokens,
            "real_tokens_per_second": rate,
            "slots_per_second": rate / (1 - padding_fraction),
            "padding_fraction": padding_fraction,
            "flop_parameters": sum(parameter.numel() for parameter in lm.parameters()) - embedding,
            "rounds": self.c.rounds,
        }

    def record_breakdown(
        self, arm: str, fields: dict[str, Any], part: str, seconds: float, found: Breakdown, calls: int
    ) -> None:
        """Record so many calls, which take so many seconds without the profiler.

        It slows the host, so no more is idle than those seconds leave; but where the GPU ran slower
        while it was profiled they leave too little, and kernels do not follow each other closer
        than they were seen to.
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
        """Append a record; ``fields``: the arm's, and what else its configuration holds."""
        c = self.c
        if self.kind is not None:
            kind, part, curves = self.kind, BREAKDOWN if kind == "breakdown" else part, None
        shared = ("distribution", "documents", "slots", "dtype", "precision", "rounds")
        settings = {"model": self.name, "part": part, **{name: getattr(c, name) for name in shared}}
        if self.progress:
            shown = {name: None if v is None else float(f"{v:.4g}") for name, v in metrics.items()}
            print(self.name, part, arm, shown, flush=True)
        config, taken = {**settings, **self.sizes(), **fields}, time.perf_counter() - self.begun
        append_record(
            self.path, make_record(kind, c.experiment, arm, config, c.seed, self.corpus, metrics, taken, curves)
        )

    def sizes(self) -> dict[str, Any]:
        names = ("d_model", "n_layer", "mixer", "expand", "vocab_size", "compile", "recompute")
        of_mixer = {"d_state": self.lm.backbone.layers[0].mixer.d_state}
        return {name: getattr(self.config.model, name) for name in names} | of_mixer
