"""What the arms of whole-model benches compute: documents, arranged as the arm says, by our layers or the peers'."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Optional, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packmamba.config import DataConfig, key
from packmamba.data.batch import PackedBatch, Rows
from packmamba.data.packing import STRATEGIES, plan_rows
from packmamba.data.schedule import micro_batches
from packmamba.data.token_store import Corpus
from packmamba.nn import MambaLM
from packmamba.ops.mamba_ssm import _peer

BARE, BREAKDOWN, STEPS = "forward_backward", "breakdown", "steps"


@dataclass
class Arm:
    """What the tables compare: how documents become rows, and what computes them. Its records hold all but ``parts``."""

    strategy: str = key(
        "best_fit_decreasing",
        "How documents become rows.",
        choices=tuple(name for name in STRATEGIES if name != "concat_split"),
    )
    row_length: Optional[int] = key(
        None, "Slots of a row; null: as many as each document (single) or each batch's longest (padded) has.", low=1
    )
    sorted_by_length: bool = key(False, "Documents are sorted by length before they are arranged.")
    layers: str = key(
        "packmamba",
        "packmamba, or mamba-ssm, which leaks where rows are packed and is left out where it is not installed.",
        choices=("packmamba", "mamba-ssm"),
    )
    graphs: bool = key(False, "Forward and backward are CUDA graphs (packmamba.training.cuda_graphs).")
    parts: list[str] = key(
        [BARE],
        "The bench's parts that it takes part in.",
        choices=(BARE, BREAKDOWN, STEPS),
        check=("at least one part", bool),
    )

    @property
    def packs(self) -> bool:
        return self.strategy not in ("single", "padded")

    @property
    def peer(self) -> bool:
        return self.layers == "mamba-ssm"

    @property
    def leaks(self) -> bool:
        return self.peer and self.packs

    def fields(self) -> dict[str, Any]:
        """What its records hold of it."""
        return {name: value for name, value in asdict(self).items() if name != "parts"}

    def data(self, **others: Any) -> DataConfig:
        """The configuration that arranges so."""
        return DataConfig(batching="stream", strategy=self.strategy, row_length=self.row_length, **others)


class Documents:
    """Random documents of given lengths, in memory, as Rows read them."""

    def __init__(self, lengths: np.ndarray, vocab_size: int, seed: int) -> None:
        self.lengths = lengths
        ends = np.cumsum(lengths, dtype=np.int64)
        self._parts = np.stack([ends - lengths, ends], axis=1)
        self._tokens = np.random.default_rng(seed).integers(vocab_size, size=int(ends[-1]))

    def document(self, number: int) -> np.ndarray:
        start, end = self._parts[number]
        return self._tokens[start:end]


@dataclass
class Feed:
    """An arm's batches of all the documents, and which documents lie in each, in order."""

    rows: Rows
    groups: list[np.ndarray]

    @property
    def padding_fraction(self) -> float:
        _, tokens, slots, *_ = self.rows.count(self.groups)
        return 1 - tokens / slots

    @property
    def tokens_per_batch(self) -> float:
        return int(self.rows.length.sum()) / len(self.groups)

    def sample(self, count: int) -> list[PackedBatch]:
        """``count`` of the batches, evenly spread over their sizes: few that stand for all."""
        sizes = [self.rows.count([rows])[1] for rows in self.groups]
        by_size = np.argsort(sizes, kind="stable")
        count = min(count, len(by_size))
        return [self.rows.batch(self.groups[by_size[(2 * i + 1) * len(by_size) // (2 * count)]]) for i in range(count)]

    def all(self) -> list[tuple[PackedBatch, list[int]]]:
        """Every batch and the documents in it, in the order of its tokens."""
        of_row = np.split(self.rows.document, self.rows.row_offsets[1:-1])
        return [
            (self.rows.batch(rows), [document for row in rows for document in of_row[row].tolist()])
            for rows in self.groups
        ]


def feed(documents: Documents, arm: Arm, slots: int) -> Feed:
    """The documents as the arm arranges them, in batches of at most ``slots`` slots. ValueError if a row cannot hold one."""
    lengths = documents.lengths.astype(np.int64)
    order = np.argsort(lengths, kind="stable") if arm.sorted_by_length else np.arange(len(lengths))
    plan = plan_rows(lengths[order], row_length=arm.row_length, strategy=arm.strategy)
    rows = Rows.of(cast(Corpus, documents), order, np.zeros_like(order), lengths[order], plan)
    return Feed(rows, micro_batches(rows, np.arange(len(rows)), arm.data(max_tokens_per_batch=slots)))


class PeerLM(nn.Module):
    """mamba-ssm's blocks as its users run them: fast path, fused add and norm, residual in float32; eager.

    Shares its parameters with ``model``. Raises ValueError if mamba-ssm is not installed.
    """

    backbone: Any

    def __init__(self, model: MambaLM) -> None:
        super().__init__()
        block, mixer = _peer("mamba_ssm", "modules.block", "Block"), _peer("mamba_ssm", "modules.mamba_simple", "Mamba")
        norm, self._norm = (_peer("mamba_ssm", "ops.triton.layer_norm", name) for name in ("RMSNorm", "layer_norm_fn"))
        c = model.config
        settings = {key: c[key] for key in ("d_state", "d_conv", "expand", "dt_rank") if key in c}
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
        """The summed cross-entropy and (B, L) that at each slot, zero where there is no target. Rows leak."""
        hidden, residual = self.backbone.embedding(batch.tokens), None
        for layer in self.backbone.layers:
            hidden, residual = layer(hidden, residual)
        norm = self.backbone.norm_f
        hidden = self._norm(hidden, norm.weight, norm.bias, residual=residual, eps=norm.eps, is_rms_norm=True)
        logits = self.lm_head(hidden).float()
        losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        losses = torch.where(batch.loss_mask, losses.view(batch.targets.shape), 0)
        return losses.sum(), losses.detach()
