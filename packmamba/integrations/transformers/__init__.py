"""Packing for Hugging Face's models with Mamba or gated delta layers, by one line."""

from types import ModuleType
from typing import TypeVar

from torch import nn

from packmamba.errors import expect
from packmamba.integrations.transformers.boundaries import KNOWN

Model = TypeVar("Model", bound=nn.Module)


def patch(model: Model, require_boundaries: bool = False) -> Model:
    """Patch a model of transformers, or one inside, in place; return it.

    Models: Mamba, FalconMamba, Jamba, Zamba, Mamba2, Bamba, GraniteMoeHybrid, FalconH1, NemotronH,
    Zamba2, Qwen3Next, Qwen3_5, Qwen3_5Moe, OlmoHybrid, KimiLinear, Lfm2 and Lfm2Moe, ForCausalLM.
    Its forward then takes packed rows: ``position_ids`` (B, L) that start again at 0, ``seq_idx``
    (B, L) or ``cu_seq_lens_q`` (S + 1,), any of them together if they agree, and ``attention_mask``
    (B, L) with padding on either side. A document has the logits and gradients that it has alone;
    labels at its first token count as -100.

    Args:
        require_boundaries: raise ValueError at a batch without a cache and without boundaries. A
            mask is none: TRL's ``wrapped`` has one.

    Raises:
        TypeError: no such model is inside.
        ValueError: transformers' version is not known, the model
            is wrapped already, or our kernels do not compute it.
    """
    models = _models()
    kinds = {type(module) for module in model.modules()} if isinstance(model, nn.Module) else set()
    known = {*models.WHOLE, *map(models.CLASSES.get, models.WHOLE)}
    names = " or ".join(kind.__name__ for kind in models.WHOLE)
    expect(kinds & known, "model", f"{names} of transformers", type(model).__name__, TypeError)
    models.exchange(model, require_boundaries)
    return model


def enable(require_boundaries: bool = False) -> None:
    """Patch, as ``patch`` does, every such model that is made or loaded from now on."""
    models = _models()
    for kind, init in models.WHOLE.items():
        kind.__init__ = models._made(kind, init, require_boundaries)


def disable() -> None:
    """Undo ``enable`` for models that are made from now on."""
    for kind, init in _models().WHOLE.items():
        kind.__init__ = init


def _models() -> ModuleType:
    import transformers

    expect(transformers.__version__.startswith("5."), "transformers", "version 5", transformers.__version__)
    try:
        from packmamba.integrations.transformers import models
    except ImportError as error:
        raise ValueError(f"transformers {transformers.__version__} is unlike {KNOWN}: {error}") from error
    return models
