"""What answers to a task come to; apart from them, since its base class takes seconds to import."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class Accuracy(Metric):
    """Share of right answers and their loss, together and by doubling length and load: [1, 2), [2, 4), ...

    Update with ``items``. Sums over ranks. ``compute`` gives ``accuracy``, ``nats``, ``answers``; of multiple choice
    ``choice_accuracy``, ``choice_accuracy_by_bytes``, and ``bits_per_byte`` of the right choice (else these are NaN); and the
    tables ``by_length`` and ``by_load``.
    """

    full_state_update = False
    BUCKETS = 32
    sums: Tensor
    choices: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # (length or load, bucket, [answers, right, nats]); [examples with choices, right, right by bytes, bytes of the right one]
        self.add_state("sums", torch.zeros(2, self.BUCKETS, 3, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("choices", torch.zeros(4, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, items: Iterable[Mapping[str, Any]]) -> None:
        for item in items:
            values = torch.tensor([item["answers"], item["right"], item["nats"]], dtype=torch.float64)
            for axis, size in enumerate((item["length"], item["load"])):
                self.sums[axis, min(size.bit_length() - 1, self.BUCKETS - 1)] += values.to(self.sums.device)
            if "choice" in item:
                right = [1, item["choice"] == item["answer"], item["by_bytes"] == item["answer"], item["bytes"]]
                self.choices += torch.tensor(right, dtype=torch.float64, device=self.choices.device)

    def compute(self) -> dict[str, Any]:
        count, right, nats = self.sums[0].sum(dim=0).tolist()
        examples, *chosen, size = self.choices.tolist()
        return {
            "accuracy": right / count if count else float("nan"),
            "nats": nats / count if count else float("nan"),
            "answers": count,
            "choice_accuracy": chosen[0] / examples if examples else float("nan"),
            "choice_accuracy_by_bytes": chosen[1] / examples if examples else float("nan"),
            "bits_per_byte": nats / math.log(2) / size if size else float("nan"),
            "by_length": self._table(0),
            "by_load": self._table(1),
        }

    def _table(self, axis: int) -> list[dict[str, float]]:
        return [
            {"start": 2**i, "end": 2 ** (i + 1), "answers": count, "accuracy": right / count, "nats": nats / count}
            for i, (count, right, nats) in enumerate(self.sums[axis].tolist())
            if count
        ]
