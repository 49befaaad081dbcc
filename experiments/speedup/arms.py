"""What the arms of whole-model benches compute: a window of documents, arranged by each scheme, by our layers or the peers'."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packmamba.config import ConfigError, DataConfig
from packmamba.data.batching import Arrangement, PackedBatch
from packmamba.data.corpus import Corpus
from packmamba.data.packing import STRATEGIES, plan_rows
from packmamba.data.schedule import group
from packmamba.nn import MambaLM
from packmamba.ops.mamba_ssm import _peer

PEER, GRAPH = "mamba-ssm-", "-graph"
_PACKING = [name for name in STRATEGIES if name not in ("single", "padded", "split")]


@dataclass(frozen=True)
class Scheme:
    """How an arm arranges documents.

    ``single``; ``padded-2048``, ``padded-longest`` (to each batch's longest), ``padded-buckets`` (the same, documents sorted by
    length before); ``packed-16384-best_fit``, that is row length and strategy. After ``mamba-ssm-`` the peers' layers compute,
    which leak where rows are packed. With ``-graph`` at the end our layers run as CUDA graphs (packmamba.training.graphs).
    """

    name: str
    strategy: str
    row_length: int | None
    buckets: bool
    peer: bool
    graph: bool

    @classmethod
    def parse(cls, name: str) -> Scheme:
        """Raises ConfigError naming the arm."""
        peer = name.startswith(PEER)
        graph = name.endswith(GRAPH) and not peer
        own = name.removesuffix(GRAPH) if graph else name.removeprefix(PEER)
        if own == "single":
            strategy, length = own, None
        elif match := re.fullmatch(r"padded-(\d+|longest|buckets)", own):
            strategy, length = "padded", int(match[1]) if match[1].isdecimal() else None
        elif (match := re.fullmatch(r"packed-(\d+)-(\w+)", own)) and match[2] in _PACKING:
            strategy, length = match[2], int(match[1])
        else:
            raise ConfigError(
                "expected single, padded-2048, padded-longest, padded-buckets, packed-16384-best_fit, one of them "
                f"after {PEER} or before {GRAPH}, got '{name}'"
            )
        return cls(name, strategy, length, own == "padded-buckets", peer, graph)

    @property
    def packs(self) -> bool:
        return self.strategy not in ("single", "padded")

    @property
    def leaks(self) -> bool:
        return self.peer and self.packs

    def fields(self) -> dict[str, Any]:
        """What a record's configuration says of the arm."""
        layers = "mamba-ssm" if self.peer else "packmamba"
        return {
            "strategy": self.strategy, "row_length": self.row_length, "sorted_by_length": self.buckets, "layers": layers,
            "graphs": self.graph,
        }  # fmt: skip

    def data(self, **others: Any) -> DataConfig:
        """The configuration that arranges so."""
        return DataConfig(mode="stream", strategy=self.strategy, row_length=self.row_length, **others)


class Documents:
    """Random documents of given lengths, in memory, as an Arrangement reads them."""

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
    """A scheme's batches of all the documents, and which documents lie in each, in order."""

    arrangement: Arrangement
    groups: list[np.ndarray]

    @property
    def padding_fraction(self) -> float:
        _, tokens, slots = self.arrangement.count(self.groups)
        return 1 - tokens / slots

    @property
    def tokens_per_batch(self) -> float:
        return self.arrangement.plan.num_tokens / len(self.groups)

    def sample(self, count: int) -> list[PackedBatch]:
        """``count`` of the batches, evenly spread over their sizes: few that stand for all."""
        sizes = [self.arrangement.count([rows])[1] for rows in self.groups]
        by_size = np.argsort(sizes, kind="stable")
        count = min(count, len(by_size))
        return [
            self.arrangement.batch(self.groups[by_size[(2 * i + 1) * len(by_size) // (2 * count)]])
            for i in range(count)
        ]

    def all(self) -> list[tuple[PackedBatch, list[int]]]:
        """Every batch and the documents in it, in the order of its tokens."""
        plan, documents = self.arrangement.plan, self.arrangement.documents
        return [
            (self.arrangement.batch(rows), [int(documents[piece.document]) for row in rows for piece in plan[int(row)]])
            for rows in self.groups
        ]


def feed(documents: Documents, scheme: Scheme, slots: int) -> Feed:
    """The documents as the scheme arranges them, in batches of at most ``slots`` slots."""
    lengths = documents.lengths.astype(np.int64)
    order = np.argsort(lengths, kind="stable") if scheme.buckets else np.arange(len(lengths))
    try:
        plan = plan_rows(lengths[order], row_length=scheme.row_length, strategy=scheme.strategy)
    except ValueError as error:
        raise ConfigError(f"{scheme.name}: {error}") from None
    arrangement = Arrangement(cast(Corpus, documents), order, lengths[order], plan)
    rows = np.arange(plan.num_rows)
    return Feed(arrangement, group(arrangement, rows, scheme.data(slots_per_batch=slots), carry=False))


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
