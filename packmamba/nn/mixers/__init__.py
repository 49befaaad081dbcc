"""Sequence mixers by name: the values of ``MambaLM(mixer=...)`` and ``model.mixer``.

A mixer is a file here, or a plugin that adds its class to ``MIXERS``. A class gives (S documents, B rows, L slots):

``Mixer(d_model, recompute=False, backend=None, **options)``
    An nn.Module. Options have defaults; what cannot be is a ValueError or TypeError that begins with the option's name.
    ``recompute``: the backward computes again what the mixer can make cheaply from what it keeps anyway; a mixer that has
    nothing of the kind ignores it (a block that recomputes everything does so around the mixer). ``backend``: ``ops.BACKENDS``.
``mixer.d_model``
    Width of input and output.
``mixer.mix(normed, weight, conv_layout, ssm_layout, state, return_state) -> (mixed, state)``
    normed (B, L, d_model) times weight (d_model,), the norm's, is the input: a first projection scales its columns by it, once
    a call. mixed (B, L, d_model) at padding is finite. Short convolutions take conv_layout, recurrences ssm_layout, where
    documents start; a mixer without one of them ignores its layout. state: what the documents of these layouts start from, as
    ``start_state`` has it, or None for its start. The second result: what each document leaves to its continuation, in the same
    form, differentiable; None unless ``return_state``.
``mixer.start_state(documents) -> State``
    What this many fresh documents start from: a tuple of tensors (documents, ...) of any number and shapes, those of convolutions
    first, the recurrence's last.
``mixer.initialise_in_stack(n_layer)``
    Called once by a model of n_layer blocks: the last projection starts smaller, as residual branches add up.
``Mixer.NO_WEIGHT_DECAY``
    Names of its parameters with several dimensions that do not decay; those of one dimension never do.

And where published checkpoints have this mixer:

``Mixer.PUBLISHED``
    {"state_spaces": config.json's ssm_cfg.layer, "hugging_face": its model_type}; ssm_cfg's other keys are the options.
``Mixer.WITHOUT_EFFECT``
    Keys of ssm_cfg that decide only initial weights we do not draw.
``Mixer.from_hugging_face(config) -> options``, ``Mixer.to_hugging_face(options) -> config``
    From and to the keys of Hugging Face's config.json; what that cannot hold is a ValueError.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from packmamba.nn.mixers.mamba1 import PackedMamba

State = tuple[Tensor, ...]
"""States of documents: tensors whose first dimension counts documents."""

MIXERS: dict[str, Any] = {"mamba1": PackedMamba}
