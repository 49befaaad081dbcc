"""Sequence mixers by name: the values of ``MambaLM(mixer=...)`` and ``model.mixer``.

A mixer is a file here, or a plugin that adds its class to ``MIXERS``. A class has (S documents, B rows, L slots):

- ``Mixer(d_model, recompute=False, backend=None, **options)``: an nn.Module with ``d_model``; options have defaults, errors
  begin with an option's name; ``recompute``: the backward recomputes what is cheap.
- ``mix(normed, weight, conv_layout, ssm_layout, state, return_state) -> (mixed, state)``: mix normed (B, L, d_model) times the
  norm's weight (d_model,) to the same shape, finite at padding. Short convolutions take conv_layout, recurrences ssm_layout.
  state: initial states of these layouts' documents, or None; the second result: final states, None unless ``return_state``.
- ``start_state(documents) -> State``: initial states: tensors (documents, ...), convolutions first, the recurrence last.
- ``initialise_in_stack(n_layer)``: called once by a model of n_layer blocks.
- ``NO_WEIGHT_DECAY``: names of parameters of several dimensions that do not decay.

For published checkpoints: ``PUBLISHED`` {"state_spaces": ssm_cfg.layer, "hugging_face": model_type}; ``WITHOUT_EFFECT``: keys
of ssm_cfg that only decide initial weights; ``from_hugging_face(config)``, ``to_hugging_face(options)``: raise ValueError.
"""

from typing import Any

from torch import Tensor

from packmamba.nn.mixers.mamba1 import PackedMamba
from packmamba.nn.mixers.mamba2 import PackedMamba2

State = tuple[Tensor, ...]
"""States of documents: tensors whose first dimension counts documents."""

MIXERS: dict[str, Any] = {"mamba1": PackedMamba, "mamba2": PackedMamba2}
