"""A model of a published size with random weights."""

from __future__ import annotations

from typing import Any

import torch

from packmamba import MambaLM


def make_model(sizes: Any, device: torch.device, dtype: torch.dtype) -> MambaLM:
    with device:
        model = MambaLM(
            vocab_size=sizes.vocab_size or 50280, d_model=sizes.d_model, n_layer=sizes.n_layer, d_state=sizes.d_state,
            expand=sizes.expand, tie_embeddings=sizes.tie_embeddings,
        )  # fmt: skip
    return model.to(dtype).eval()
