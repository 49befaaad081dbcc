"""Hold what the Mambas' mixers share: checks, states, initialisation, names in checkpoints.

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
from packmamba.nn.init import DeltaProjection, Head, Projection, dt_bias_, whole_parameters
from packmamba.ops import checks

# States of documents, tensors (S, ...): convolutions first, the recurrence last.
# Of Mamba: the convolution's last inputs (S, D, W-1), oldest first, and the
# scan's state (S, D, N). Of Mamba-2: (S, H P + 2 G N, W-1) and (S, H, P, N). Of
# Mamba-3: the last token's k (S, H, N) and v (S, H, P), and (S, H, P, N).
State = tuple[Tensor, ...]
# Attributes of a module that hold its hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Mixer(nn.Module):
    """Hold what the Mambas share: a recurrence between ``in_proj`` and ``out_proj``.

    Args:
        sizes: by name: d_model; d_state, N; expand; and others of the mixer.
        flags: by name.
        dt_range: (dt_min, dt_max, dt_init_floor).
        d_conv: of a mixer with a convolution.

    Attributes:
        d_inner: expand * d_model channels.
        EXPLICIT (optional): arguments that no weight's shape shows and whose default once differed,
            so that a checkpoint must state them; by name, the default of a new model.
        HUGGING_FACE: by argument, the key of transformers' configuration and its default.
        SHARES_ROWS: whether ranks may share rows (``ContextParallel``), as all tokens pass on by
            ``ops`` alone; a mixer without it is refused there.
        NO_WEIGHT_DECAY: names of parameters of several dimensions that do not decay.
        WITHOUT_EFFECT: keys of a checkpoint's ssm_cfg that change nothing. A learned initial state
            of an earlier version is a weight, which no longer has a place.
        state_shapes: of one document's states, by name:
            ``ssm_state``, the recurrence's, is the last.
    """

    HUGGING_FACE: dict[str, tuple[str, Any]]
    SHARES_ROWS = True
    NO_WEIGHT_DECAY: tuple[str, ...]
    in_proj: Projection
    out_proj: Projection
    D: nn.Parameter
    state_shapes: dict[str, tuple[int, ...]]
    # (in_proj's output (B, L, ...), conv_layout, ssm_layout, state, return_state)
    # -> (mixed (B, L, d_model), final states; None unless return_state).
    _mix: Any

    def __init__(self, sizes: dict, flags: dict, dt_range: tuple, backend: str | None, d_conv: int = 4) -> None:
        """Check the options. Raises TypeError or ValueError that names one."""
        super().__init__()
        for name, size in sizes.items():
            checks.check_size(name, size, 256 if name == "d_state" else 2**20)
        checks.check_flags(**flags)
        expect(d_conv in (2, 3, 4), "d_conv", "2, 3 or 4", repr(d_conv))
        dt_min, dt_max, dt_init_floor = dt_range
        fits = 0 < dt_min <= dt_max < math.inf and 0 <= dt_init_floor <= 1
        expect(fits, "dt_min, dt_max", "0 < dt_min <= dt_max", dt_range)
        expect(backend in (None, *ops.BACKENDS), "backend", f"one of {', '.join(ops.BACKENDS)}", repr(backend))
        self.d_model = sizes["d_model"]
        self.d_state = sizes["d_state"]
        self.d_inner = sizes["expand"] * self.d_model
        self.backend = backend

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
        """Mix hidden (B, L, d_model) to the same shape.

        With ``return_state`` also return final states.

        Args:
            layout, cu_seqlens: where documents lie, as a layout or as cumulative lengths (S + 1,)
                over all rows, without padding; neither: each row is one document. Padding is never
                read.
            conv_layout, ssm_layout: instead of ``layout`` in one of the two operators:
                ``layout.flow()`` leaks there.
            state: initial states of the documents of conv_layout and ssm_layout; None: zero.

        Raises TypeError or ValueError.
        """
        checks.check_is_tensor(hidden, "hidden")
        fits = hidden.dim() == 3 and hidden.shape[2] == self.d_model
        expect(fits, "hidden", f"shape (B, L, {self.d_model})", tuple(hidden.shape))
        dtype = self.in_proj.weight.dtype
        fits = hidden.dtype == dtype or torch.is_autocast_enabled(hidden.device.type)
        expect(fits, "hidden", f"the weights' {dtype}", hidden.dtype, TypeError)
        if cu_seqlens is not None:
            layout = checks.boundary_layout(hidden, cu_seqlens=cu_seqlens, layout=layout)
        for name, to_check in (("layout", layout), ("ssm_layout", ssm_layout)):
            if to_check is not None:
                checks.check_layout(to_check, hidden, "hidden", name)
        conv_layout = layout if conv_layout is None else conv_layout
        ssm_layout = layout if ssm_layout is None else ssm_layout
        if ssm_layout is not None and ssm_layout.has_padding:
            # The projection's weight gradient multiplies padding by zero, which NaN survives.
            hidden = hidden.masked_fill((ssm_layout.slot_documents() < 0)[..., None], 0)
        mixed, state = self._mix(self.in_proj(hidden), conv_layout, ssm_layout, state, return_state)
        return (mixed, state) if return_state else mixed

    def mix(self, normed: Tensor, weight: Tensor, *layouts_and_state: Any) -> tuple[Tensor, State | None]:
        """Compute ``forward(normed * weight)`` without the checks of ``hidden``.

        Args:
            normed: (B, L, d_model), finite at padding.
            weight: (d_model,), which scales in_proj's columns, not the tokens.
            layouts_and_state: conv_layout, ssm_layout, state, return_state, as of ``forward``.
        """
        if is_plain(self.in_proj):
            projected = F.linear(normed, self.in_proj.weight * weight, self.in_proj.bias)
        else:
            projected = self.in_proj(normed * weight)
        return self._mix(projected, *layouts_and_state)

    def start_state(self, documents: int) -> State:
        """Return initial states of so many documents: zeros."""
        weight = self.in_proj.weight
        wide = checks.accumulation_dtype(weight.dtype)
        shapes = self.state_shapes
        dtypes = {name: weight.dtype if name == "conv_state" else wide for name in shapes}
        return tuple(weight.new_zeros(documents, *shapes[name], dtype=dtypes[name]) for name in shapes)

    def _check_documents(self, projected: Tensor, conv_layout: Any, ssm_layout: Any, state: Any) -> tuple[Any, ...]:
        """Return two layouts (None: each row is a document), and initial states (None: zero)."""
        conv_layout = checks.check_layout(conv_layout, projected, "hidden", "conv_layout")
        ssm_layout = checks.check_layout(ssm_layout, projected, "hidden", "ssm_layout")
        states = (None,) * len(self.state_shapes) if state is None else state
        fits = isinstance(states, (tuple, list)) and len(states) == len(self.state_shapes)
        expect(fits, "state", f"a tuple ({', '.join(self.state_shapes)})", type(state).__name__, TypeError)
        wide = checks.accumulation_dtype(projected.dtype)
        for (name, of_document), tensor in zip(self.state_shapes.items(), states):
            layout = ssm_layout if name == "ssm_state" else conv_layout
            shape = (layout.num_documents, *of_document)
            dtypes = (projected.dtype, torch.float32) if name == "conv_state" else (wide,)
            checks.check_tensors(projected, "hidden", dtypes, **{name: (tensor, shape)})
        return conv_layout, ssm_layout, *states

    def reset_parameters(self) -> None:
        """Initialise all parameters, those of children too, by the draws of the constructor."""
        parts: list[Any] = [part for part in self.children() if hasattr(part, "reset_parameters")]
        with whole_parameters(self):
            for part in parts[:-1]:
                part.reset_parameters()
            self._reset_own()
            parts[-1].reset_parameters()  # out_proj, made after the layer's own parameters
            self._mark_parameters()  # ``to_empty`` makes new ones

    def initialise_in_stack(self, num_residuals: int) -> None:
        """Zero biases; divide the last projection by sqrt(num_residuals), as GPT-2 and Mamba do."""
        self.in_proj.place_in_stack()
        self.out_proj.place_in_stack(math.sqrt(num_residuals))

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


class HeadMixer(Mixer):
    """Hold what Mamba-2 and Mamba-3 share: heads of so many channels, whose groups share B and C.

    Args (others as of Mixer):
        sizes: also headdim, P, channels of a head; ngroups, G, which divides the heads.

    Attributes:
        nheads: heads, H.
        dt_bias: (H,), of step sizes.
    """

    dt_bias: nn.Parameter

    def __init__(self, sizes: dict, flags: dict, dt_range: tuple, backend: str | None, d_conv: int = 4) -> None:
        super().__init__(sizes, flags, dt_range, backend, d_conv)
        expect(backend != "mamba_ssm", "backend", "auto, reference, cpu or cuda for this mixer", repr(backend))
        self.headdim = sizes["headdim"]
        self.ngroups = sizes["ngroups"]
        self.nheads = self.d_inner // self.headdim
        fits = self.d_inner % self.headdim == 0 and self.nheads % self.ngroups == 0
        divides = f"a divisor of {self.d_inner}, with a multiple of {self.ngroups} heads"
        expect(fits, "headdim", divides, self.headdim)
        self.dt_range = dt_range

    def _reset_own(self) -> None:
        super()._reset_own()
        dt_bias_(self.dt_bias, *self.dt_range)


def call(function: Any, *arguments: Any, recompute: bool) -> Any:
    """Call a function; with ``recompute`` the backward computes it again from its arguments."""
    # torch.func's transforms refuse checkpoint, a strict torch.export cannot run it.
    plain = checks.is_transforming() or torch.compiler.is_exporting()
    if plain or not recompute or not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def is_plain(projection: nn.Module) -> bool:
    """Return whether a projection is no more than its weight and bias.

    Then these may be read instead.

    Adapters (PEFT, loralib), quantisation, pruning and accelerate's hooks change the type,
    ``forward`` or hooks.
    """
    return type(projection) in (nn.Linear, Head, Projection, DeltaProjection) and is_unchanged(projection)


def is_unchanged(module: nn.Module) -> bool:
    """Return whether a module computes what its class does: no hooks, no forward of its own."""
    return "forward" not in vars(module) and not any(getattr(module, name) for name in HOOKS)
