"""Packing for Hugging Face's Mamba models: one line, in place."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from packmamba.integrations.transformers.boundaries import KNOWN

NAMES = ("MambaForCausalLM", "FalconMambaForCausalLM")
PLACES = (
    "transformers.models.mamba.modeling_mamba",
    "transformers.models.falcon_mamba.modeling_falcon_mamba",
    "packmamba.integrations.transformers.models",  # patched before
)

Model = TypeVar("Model", bound=nn.Module)


def patch(model: Model) -> Model:
    """Patch a MambaForCausalLM or FalconMambaForCausalLM in place to respect documents, by our kernels; return it.

    Its forward then takes packed rows: ``position_ids`` (B, L) that start again at 0, ``seq_idx`` (B, L) or ``cu_seq_lens_q``
    (S + 1,), any of them together if they agree, and ``attention_mask`` (B, L) with padding on either side. A document has the
    logits and gradients that it has alone; labels at its first token count as -100. Weights and their names stay. A model inside
    ``model`` (that an adapter wraps, say) is patched too.

    Raises:
        TypeError: neither model is inside.
        ValueError: transformers' version is not known, the model is wrapped already, or set to what our kernels do not compute
            (a convolution of other than 2 to 4 taps, another activation than SiLU).
    """
    kinds = {type(module) for module in model.modules()} if isinstance(model, nn.Module) else set()
    if not any(kind.__module__ in PLACES and kind.__name__ in NAMES for kind in kinds):
        raise TypeError(f"model: expected {' or '.join(NAMES)} of transformers, got {type(model).__name__}")
    import transformers

    if not transformers.__version__.startswith("5."):
        raise ValueError(f"transformers: expected version 5, got {transformers.__version__}")
    try:
        from packmamba.integrations.transformers import models
    except ImportError as error:
        raise ValueError(f"transformers {transformers.__version__} is unlike {KNOWN}: {error}") from error
    models.exchange(model)
    return model
