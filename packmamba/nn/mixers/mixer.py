"""Share between the Mambas' mixers: arguments and states, initialisation, names in checkpoints.

A mixer projects tokens (``in_proj``), convolves them, scans them by a recurrence and projects back
(``out_proj``). The convolution and the recurrence take a layout each, since an experiment may let
one of them leak. Mamba-3 has in the convolution's place that a token reads the one before.

Shapes: B rows, L slots, S documents, D channels of the convolution, N states of a channel, W taps.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packmamba import ops
from packmamba.errors import expect
from packmamba.layout import SequenceLayout
from packmamba.nn.init import Projection, on_whole_parameters
from packmamba.ops import checks

# States of documents, tensors (S, ...): convolutions first, the recurrence last. Of Mamba: the
# convolution's last inputs (S, D, W-1), oldest first, and the scan's state (S, D, N). Of Mamba-2:
# (S, H P + 2 G N, W-1) and (S, H, P, N). Of Mamba-3: the last token's k (S, H, N) and v (S, H, P), and
# (S, H, P, N).
State = tuple[Tensor, ...]


def check_options(
    sizes: dict, flags: dict, dt_range: tuple[float, float, float], backend: str | None, d_conv: int = 4
) -> None:
    """Check a mixer's options. Raises TypeError or ValueError that names one.

    dt_range: (dt_min, dt_max, dt_init_floor). d_conv: of a mixer with a convolution.
    """
    for name, size in sizes.items():
        checks.check_size(name, size, 256 if name == "d_state" else 2**20)
    checks.check_flags(**flags)
    expect(d_conv in (2, 3, 4), "d_conv", "2, 3 or 4", repr(d_conv))
    dt_min, dt_max, dt_init_floor = dt_range
    fits = 0 < dt_min <= dt_max < math.inf and 0 <= dt_init_floor <= 1
    expect(fits, "dt_min, dt_max", "0 < dt_min <= dt_max", dt_range)
    backends = (None, *ops.BACKENDS)
    expect(backend in backends, "backend", f"one of {', '.join(ops.BACKENDS)}", repr(backend))


class Mixer(nn.Module):
    """Hold what the Mambas share: a recurrence between ``in_proj`` and ``out_proj``, of two a convolution before it.

    Attributes:
        EXPLICIT: arguments without which a checkpoint's weights may be another model, which it
            therefore states; by name, what a new model takes.
        HUGGING_FACE: by argument, the key of transformers' configuration and its default.
        NO_WEIGHT_DECAY: names of parameters of several dimensions that do not decay.
        WITHOUT_EFFECT: keys of a checkpoint's ssm_cfg that change nothing. A learned initial state
            of an earlier version is a weight, which no longer has a place.
        state_shape: of one document's state in the recurrence.
    """

    EXPLICIT: dict[str, Any] = {}
    HUGGING_FACE: dict[str, tuple[str, Any]]
    NO_WEIGHT_DECAY: tuple[str, ...]
    d_model: int
    in_proj: Projection
    conv1d: nn.Conv1d
    out_proj: Projection
    backend: str | None
    D: nn.Parameter
    state_shape: tuple[int, ...]
    # (in_proj's output (B, L, ...), conv_layout, ssm_layout, state, return_state)
    # -> (mixed (B, L, d_model), final states; None unless return_state).
    _mix: Any
    # () -> None: initialise children and own parameters, in the constructor's order of draws.
    _reset_in_order: Any

    def forward(
        self,
        hidden: Tensor,
        layout: SequenceLayout | None = None,
        conv_layout: SequenceLayout | None = None,
        ssm_layout: SequenceLayout | None = None,
        state: State | None = None,
        return_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """Mix hidden (B, L, d_model) to the same shape; with ``return_state`` also return final states.

        Args:
            layout, cu_seqlens: where documents lie, as a layout or as cumulative lengths (S + 1,)
                over all rows, without padding; neither: each row is one document. Padding is never
                read.
            conv_layout, ssm_layout: instead of ``layout`` in one of the two operators:
                ``layout.flow()`` leaks there.
            state: initial states of the documents of conv_layout and ssm_layout; None: zero.

        Raises TypeError or ValueError.
        """
        self._check_hidden(hidden)
        if cu_seqlens is not None:
            layout = checks.boundary_layout(hidden, cu_seqlens=cu_seqlens, layout=layout)
        for name, to_check in (("layout", layout), ("ssm_layout", ssm_layout)):
            if to_check is not None:
                checks.check_layout(to_check, hidden, "hidden", name)
        conv_layout = layout if conv_layout is None else conv_layout
        ssm_layout = layout if ssm_layout is None else ssm_layout
        if ssm_layout is not None and ssm_layout.has_padding:
            # The projection's weight gradient multiplies padding by zero, which NaN survives.
            is_padding = ssm_layout.slot_documents() < 0
            hidden = hidden.masked_fill(is_padding[..., None], 0)
        mixed, state = self._mix(self.in_proj(hidden), conv_layout, ssm_layout, state, return_state)
        return (mixed, state) if return_state else mixed

    def mix(self, normed: Tensor, weight: Tensor, *layouts_and_state: Any) -> tuple[Tensor, State | None]:
        """Compute ``forward(normed * weight)`` without checks of arguments.

        Args:
            normed: (B, L, d_model), finite at padding.
            weight: (d_model,), which scales in_proj's columns, not the tokens.
            layouts_and_state: conv_layout, ssm_layout, state, return_state, as of ``forward``.
        """
        if is_adapted(self.in_proj):
            projected = self.in_proj(normed * weight)
        else:
            projected = F.linear(normed, self.in_proj.weight * weight, self.in_proj.bias)
        return self._mix(projected, *layouts_and_state)

    def _check_hidden(self, hidden: Tensor) -> None:
        checks.check_is_tensor(hidden, "hidden")
        fits = hidden.dim() == 3 and hidden.shape[2] == self.d_model
        expect(fits, "hidden", f"shape (B, L, {self.d_model})", tuple(hidden.shape))
        dtype = self.in_proj.weight.dtype
        fits = hidden.dtype == dtype or torch.is_autocast_enabled(hidden.device.type)
        expect(fits, "hidden", f"the weights' {dtype}", hidden.dtype, TypeError)

    def _convolve(
        self, x: Tensor, layout: SequenceLayout | None, state: Tensor | None, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve x (B, L, D) and apply SiLU; return final states (S, D, W - 1) if they are asked for."""
        convolved = ops.conv1d_pack(
            x,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            activation="silu",
            layout=layout,
            initial_state=state,
            return_final_state=return_state,
            backend=self.backend,
        )
        return convolved if return_state else (convolved, None)

    def start_state(self, documents: int) -> State:
        """Return initial states of so many documents: zeros."""
        weight = self.conv1d.weight
        conv_state = weight.new_zeros(documents, weight.shape[0], weight.shape[2] - 1)
        dtype = checks.accumulation_dtype(weight.dtype)
        return conv_state, weight.new_zeros(documents, *self.state_shape, dtype=dtype)

    def initial_states(self, state: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return a pair of initial states, each None for zero."""
        pair = (None, None) if state is None else state
        fits = isinstance(pair, (tuple, list)) and len(pair) == 2
        expect(fits, "state", "a pair (conv_state, ssm_state)", type(state).__name__, TypeError)
        return pair

    @on_whole_parameters
    def reset_parameters(self) -> None:
        """Initialise all parameters, those of children too, by the draws of the constructor."""
        self._reset_in_order()
        self._mark_parameters()  # ``to_empty`` makes new ones

    def initialise_in_stack(self, n_layer: int) -> None:
        """Zero biases and divide the last projection by sqrt(n_layer) (Mamba follows GPT-2)."""
        self.in_proj.place_in_stack()
        self.out_proj.place_in_stack(math.sqrt(n_layer))

    @torch.no_grad()
    def _reset_own(self) -> None:
        """Initialise the parameters that are no child's."""
        nn.init.ones_(self.D)

    def _mark_parameters(self) -> None:
        """Mark parameters that do not decay, as state-spaces' optimizers read."""
        for name in self.NO_WEIGHT_DECAY:
            getattr(self, name)._no_weight_decay = True

    @classmethod
    def from_hugging_face(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Translate transformers' configuration to this mixer's arguments. Raises ValueError."""
        activation = config.get("hidden_act", "silu")
        expect(activation in ("silu", "swish"), "hidden_act", "'silu'", repr(activation))
        return {argument: config.get(key, default) for argument, (key, default) in cls.HUGGING_FACE.items()}

    @classmethod
    def to_hugging_face(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Translate this mixer's arguments to transformers' configuration. Raises ValueError."""
        published = {key: options.get(argument, default) for argument, (key, default) in cls.HUGGING_FACE.items()}
        return published | {"hidden_act": "silu"}


def recomputed(function: Any, *arguments: Any) -> Any:
    """Call a function, which the backward computes again from its arguments instead of keeping more."""
    # torch.func's transforms refuse checkpoint, a strict torch.export cannot run it.
    plain = checks.is_transforming() or torch.compiler.is_exporting()
    if plain or not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def is_adapted(projection: nn.Module) -> bool:
    """Return whether an adapter, such as PEFT's, stands in a projection's place: its weight is not the whole."""
    return not isinstance(projection, nn.Linear)
