"""The Mamba block's mixer on packed documents. Shapes: B rows, L slots, S documents, D d_inner, N d_state, W d_conv."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packmamba import ops
from packmamba.errors import expect
from packmamba.layout import SequenceLayout
from packmamba.nn.init import DeltaProjection, Projection, on_whole_parameters
from packmamba.ops import checks

State = tuple[Tensor, Tensor]
"""(conv_state (S, D, W-1), ssm_state (S, D, N)) of documents; of Mamba-2 (S, H P + 2 G N, W-1), (S, H, P, N)."""


def check_options(
    sizes: dict, flags: dict, d_conv: int, dt: tuple[float, float, float], backend: str | None
) -> None:
    """Check a mixer's options; dt: (dt_min, dt_max, dt_init_floor)."""
    for name, size in sizes.items():
        checks.check_size(name, size, 256 if name == "d_state" else 2**20)
    checks.check_flags(**flags)
    expect(d_conv in (2, 3, 4), "d_conv", "2, 3 or 4", repr(d_conv))
    fits = 0 < dt[0] <= dt[1] < math.inf and 0 <= dt[2] <= 1
    expect(fits, "dt_min, dt_max", "0 < dt_min <= dt_max", dt)
    expect(backend in (None, *ops.BACKENDS), "backend", f"one of {', '.join(ops.BACKENDS)}", repr(backend))


class Mixer(nn.Module):
    """Hold what both Mambas share: a convolution and a recurrence between ``in_proj`` and ``out_proj``."""

    HUGGING_FACE: dict[str, tuple[str, Any]]
    NO_WEIGHT_DECAY: tuple[str, ...]
    d_model: int
    in_proj: Projection
    conv1d: nn.Conv1d
    out_proj: Projection
    D: nn.Parameter
    state_shape: tuple[int, ...]  # of one document in the recurrence
    initial_state: nn.Parameter | None
    # () -> None: initialise children and the mixer's parameters, in the constructor's order.
    _reset_in_order: Any
    # (in_proj's output, conv_layout, ssm_layout, state, return_state)
    # -> (mixed, final state or None).
    _mix: Any

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
        """Mix hidden (B, L, d_model) to the same shape; with ``return_state`` return also each document's final state.

        Args:
            layout, cu_seqlens: where documents lie, as a layout or as cumulative lengths (S + 1,) over all rows, without padding;
                neither: each row is one. Padding is never read.
            conv_layout, ssm_layout: instead of ``layout`` in one of the two operators: ``layout.flow()`` leaks there.
            state: initial states of the documents of conv_layout and ssm_layout; None: zero, or the learned state.

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
        for name, value in (("layout", layout), ("ssm_layout", ssm_layout)):
            if value is not None:
                checks.check_layout(value, hidden, "hidden", name)
        conv_layout, ssm_layout = (
            layout if given is None else given for given in (conv_layout, ssm_layout)
        )
        if ssm_layout is not None and ssm_layout.has_padding:
            # The projection's weight gradient multiplies padding by zero, which NaN survives.
            hidden = hidden.masked_fill((ssm_layout.slot_documents() < 0)[..., None], 0)
        mixed, state = self._mix(self.in_proj(hidden), conv_layout, ssm_layout, state, return_state)
        return (mixed, state) if return_state else mixed

    def start_state(self, documents: int) -> State:
        """Return the initial states of this many documents: zeros, or the learned state in the recurrence."""
        conv = self.conv1d.weight
        start = conv.new_zeros(self.state_shape) if self.initial_state is None else self.initial_state
        wide = (
            start.to(checks.accumulation_dtype(conv.dtype))
            .expand(documents, *self.state_shape)
            .contiguous()
        )
        return conv.new_zeros(documents, conv.shape[0], conv.shape[2] - 1), wide

    def initial_states(self, state: Any, rows: int, ssm_layout: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the given states; where the recurrence has none, the learned state of each document."""
        pair = (None, None) if state is None else state
        fits = isinstance(pair, (tuple, list)) and len(pair) == 2
        expect(fits, "state", "a pair (conv_state, ssm_state)", type(state).__name__, TypeError)
        conv_state, ssm_state = pair
        if ssm_state is None and self.initial_state is not None:
            ssm_state = self.start_state(rows if ssm_layout is None else ssm_layout.num_documents)[1]
        return conv_state, ssm_state

    def _learn_initial_state(self, learned: bool, *shape: int) -> None:
        """Make the initial state if it is learned."""
        self.state_shape = shape
        self.initial_state = nn.Parameter(torch.empty(shape)) if learned else None

    @on_whole_parameters
    def reset_parameters(self) -> None:
        """Initialise all parameters, those of children too, by the draws of the constructor."""
        self._reset_in_order()
        self._mark_parameters()  # ``to_empty`` makes new ones

    @torch.no_grad()
    def _reset_own(self) -> None:
        """Initialise the parameters that are no child's."""
        nn.init.ones_(self.D)
        if self.initial_state is not None:
            nn.init.zeros_(self.initial_state)

    def _mark_parameters(self) -> None:
        """Mark parameters that do not decay, as state-spaces' optimizers read."""
        for name in self.NO_WEIGHT_DECAY:
            if (parameter := getattr(self, name)) is not None:
                parameter._no_weight_decay = True

    def mix(self, normed: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, State | None]:
        """Compute ``forward(normed * weight)`` without argument checks, weight folded into in_proj."""
        return self._mix(F.linear(normed, self.in_proj.weight * weight, self.in_proj.bias), *others)

    def initialise_in_stack(self, n_layer: int) -> None:
        """Zero biases and divide the last projection by sqrt(n_layer) (Mamba follows GPT-2)."""
        self.in_proj.place_in_stack()
        self.out_proj.place_in_stack(math.sqrt(n_layer))

    @classmethod
    def from_hugging_face(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Translate the keys of transformers' configuration to this mixer's arguments."""
        activation = config.get("hidden_act", "silu")
        expect(activation in ("silu", "swish"), "hidden_act", "'silu'", repr(activation))
        return {ours: config.get(theirs, default) for ours, (theirs, default) in cls.HUGGING_FACE.items()}

    @classmethod
    def to_hugging_face(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Translate this mixer's arguments to the keys of transformers' configuration."""
        expect(
            not options.get("learned_initial_state"), "learned_initial_state", "False in this format", True
        )
        published = {
            theirs: options.get(ours, default) for ours, (theirs, default) in cls.HUGGING_FACE.items()
        }
        return published | {"hidden_act": "silu"}


class PackedMamba(Mixer):
    """Compute Mamba (arXiv 2312.00752, figure 3) on packed documents.

    Parameters have the names, shapes and initialisation of state-spaces' Mamba.

    Args:
        d_model, expand: width of input and output; D = expand * d_model channels inside.
        d_state, d_conv: N, states per channel; W, taps of the convolution, 2 to 4.
        dt_rank: rank of the projection to delta; "auto" is ceil(d_model / 16).
        dt_min, dt_max, dt_init_floor: delta starts log-uniform in [dt_min, dt_max], at least dt_init_floor.
        bias, conv_bias: whether projections and convolution have biases.
        learned_initial_state: scan documents from a learned state (D, N), not from zero.
        recompute, backend: see ``ops.mamba_inner``, ``ops.BACKENDS``.
    """

    NO_WEIGHT_DECAY = ("A_log", "D", "initial_state")
    PUBLISHED = {"state_spaces": "Mamba1", "hugging_face": "mamba", "architecture": "MambaForCausalLM"}
    WITHOUT_EFFECT = ("dt_init", "dt_scale", "use_fast_path")
    HUGGING_FACE = {  # by argument, MambaConfig's key and default
        "d_state": ("state_size", 16), "d_conv": ("conv_kernel", 4), "expand": ("expand", 2),
        "dt_rank": ("time_step_rank", "auto"), "bias": ("use_bias", False), "conv_bias": ("use_conv_bias", True),
    }  # fmt: skip

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        bias: bool = False,
        conv_bias: bool = True,
        learned_initial_state: bool = False,
        recompute: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" and isinstance(d_model, int) else dt_rank
        sizes = {"d_model": d_model, "d_state": d_state, "expand": expand, "dt_rank": dt_rank}
        flags = {"bias": bias, "conv_bias": conv_bias, "learned_initial_state": learned_initial_state}
        check_options(sizes, flags, d_conv, (dt_min, dt_max, dt_init_floor), backend)
        self.d_model, self.d_state, self.d_conv = d_model, d_state, d_conv
        self.d_inner, self.dt_rank = expand * d_model, int(dt_rank)
        self.recompute, self.backend = recompute, backend
        self.in_proj = Projection(d_model, 2 * self.d_inner, bias=bias)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, d_conv, groups=self.d_inner, bias=conv_bias)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = DeltaProjection(self.dt_rank, self.d_inner, dt=(dt_min, dt_max, dt_init_floor))
        self.A_log = nn.Parameter(torch.empty(self.d_inner, d_state))
        self.D = nn.Parameter(torch.empty(self.d_inner))
        self._learn_initial_state(learned_initial_state, self.d_inner, d_state)
        self._reset_own()
        self.out_proj = Projection(self.d_inner, d_model, bias=bias)
        self._mark_parameters()

    def _reset_in_order(self) -> None:
        for part in (self.in_proj, self.conv1d, self.x_proj, self.dt_proj, self.out_proj):
            part.reset_parameters()
        self._reset_own()

    @torch.no_grad()
    def _reset_own(self) -> None:
        super()._reset_own()
        self.A_log.copy_(torch.arange(1.0, self.d_state + 1, device=self.A_log.device).log())

    def _mix(
        self, xz: Tensor, conv_layout: Any, ssm_layout: Any, state: State | None, return_state: bool
    ) -> Any:
        """Mix xz (B, L, 2 D), in_proj's output, to (B, L, d_model); return also final states or None."""
        conv_state, ssm_state = self.initial_states(state, xz.shape[0], ssm_layout)
        wide = checks.accumulation_dtype(xz.dtype)
        mixed, state = ops.mamba_inner(
            xz, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight,
            -torch.exp(self.A_log.to(wide)), self.D.to(wide), self.dt_proj.bias.to(wide), self.out_proj.weight,
            conv_layout=conv_layout, ssm_layout=ssm_layout, conv_state=conv_state, ssm_state=ssm_state,
            return_state=return_state, recompute=self.recompute, backend=self.backend,
        )  # fmt: skip
        bias = self.out_proj.bias
        return mixed if bias is None else mixed + bias.to(mixed.dtype), state
