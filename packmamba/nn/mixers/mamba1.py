"""The Mamba block's mixer on packed documents. Shapes: B rows, L slots, S documents, D d_inner, N d_state, W d_conv."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packmamba import ops
from packmamba.errors import expect
from packmamba.layout import SequenceLayout
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
    expect(
        backend in (None, *ops.BACKENDS),
        "backend",
        f"one of {', '.join(ops.BACKENDS)}",
        repr(backend),
    )


def initial_dt(count: int, dt_min: float, dt_max: float, dt_init_floor: float) -> Tensor:
    """Draw biases that softplus makes log-uniform in [dt_min, dt_max]."""
    dt = torch.exp(torch.rand(count) * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min))
    dt = dt.clamp(min=dt_init_floor)
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus


class Mixer(nn.Module):
    """Hold what both Mambas share: a convolution and a recurrence between ``in_proj`` and ``out_proj``."""

    HUGGING_FACE: dict[str, tuple[str, Any]]
    NO_WEIGHT_DECAY: tuple[str, ...]
    d_model: int
    in_proj: nn.Linear
    conv1d: nn.Conv1d
    out_proj: nn.Linear
    state_shape: tuple[int, ...]  # of one document in the recurrence
    initial_state: nn.Parameter | None
    _mix: Any  # (in_proj's output, conv_layout, ssm_layout, state, return_state) -> (mixed, final state or None)

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
        if ssm_layout is not None and ssm_layout.num_tokens < ssm_layout.num_slots:
            # The projection's weight gradient multiplies padding by zero, which NaN survives.
            hidden = hidden.masked_fill((ssm_layout.slot_documents() < 0)[..., None], 0)
        mixed, state = self._mix(self.in_proj(hidden), conv_layout, ssm_layout, state, return_state)
        return (mixed, state) if return_state else mixed

    def start_state(self, documents: int) -> State:
        """Return the initial states of this many documents: zeros, or the learned state in the recurrence."""
        conv = self.conv1d.weight
        start = (
            conv.new_zeros(self.state_shape) if self.initial_state is None else self.initial_state
        )
        wide = (
            start.to(checks.accumulation_dtype(conv.dtype))
            .expand(documents, *self.state_shape)
            .contiguous()
        )
        return conv.new_zeros(documents, conv.shape[0], conv.shape[2] - 1), wide

    def initial_states(
        self, state: Any, rows: int, ssm_layout: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the given states; where the recurrence has none, the learned state of each document."""
        pair = (None, None) if state is None else state
        fits = isinstance(pair, (tuple, list)) and len(pair) == 2
        expect(fits, "state", "a pair (conv_state, ssm_state)", type(state).__name__, TypeError)
        conv_state, ssm_state = pair
        if ssm_state is None and self.initial_state is not None:
            ssm_state = self.start_state(rows if ssm_layout is None else ssm_layout.num_documents)[
                1
            ]
        return conv_state, ssm_state

    def _learn_initial_state(self, learned: bool, *shape: int) -> None:
        """Make the initial state if it is learned; mark parameters that do not decay."""
        self.state_shape = shape
        self.initial_state = nn.Parameter(torch.zeros(shape)) if learned else None
        for name in self.NO_WEIGHT_DECAY:
            if (parameter := getattr(self, name)) is not None:
                parameter._no_weight_decay = True

    def mix(self, normed: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, State | None]:
        """Compute ``forward(normed * weight)`` without argument checks, weight folded into in_proj."""
        return self._mix(F.linear(normed, self.in_proj.weight * weight, self.in_proj.bias), *others)

    def initialise_in_stack(self, n_layer: int) -> None:
        """Zero biases and divide the last projection by sqrt(n_layer) (Mamba follows GPT-2)."""
        with torch.no_grad():
            for projection in (self.in_proj, self.out_proj):
                if projection.bias is not None:
                    projection.bias.zero_()
            self.out_proj.weight.div_(math.sqrt(n_layer))

    @classmethod
    def from_hugging_face(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Translate the keys of transformers' configuration to this mixer's arguments."""
        activation = config.get("hidden_act", "silu")
        expect(activation in ("silu", "swish"), "hidden_act", "'silu'", repr(activation))
        return {
            ours: config.get(theirs, default)
            for ours, (theirs, default) in cls.HUGGING_FACE.items()
        }

    @classmethod
    def to_hugging_face(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Translate this mixer's arguments to the keys of transformers' configuration."""
        expect(
            not options.get("learned_initial_state"),
            "learned_initial_state",
            "False in this format",
            True,
        )
        published = {
            theirs: options.get(ours, default)
            for ours, (theirs, default) in cls.HUGGING_FACE.items()
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
    PUBLISHED = {
        "state_spaces": "Mamba1",
        "hugging_face": "mamba",
        "architecture": "MambaForCausalLM",
    }
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
        dt_rank = (
            math.ceil(d_model / 16) if dt_rank == "auto" and isinstance(d_model, int) else dt_rank
        )
        sizes = {"d_model": d_model, "d_state": d_state, "expand": expand, "dt_rank": dt_rank}
        flags = {
            "bias": bias,
            "conv_bias": conv_bias,
            "learned_initial_state": learned_initial_state,
        }
        check_options(sizes, flags, d_conv, (dt_min, dt_max, dt_init_floor), backend)
        self.d_model, self.d_state, self.d_conv = d_model, d_state, d_conv
        self.d_inner, self.dt_rank = expand * d_model, int(dt_rank)
        self.recompute, self.backend = recompute, backend
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias)
        self.conv1d = nn.Conv1d(
            self.d_inner, self.d_inner, d_conv, groups=self.d_inner, bias=conv_bias
        )
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner)
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        with torch.no_grad():
            self.dt_proj.bias.copy_(initial_dt(self.d_inner, dt_min, dt_max, dt_init_floor))
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, d_state + 1)).repeat(self.d_inner, 1))
        self.D = nn.Parameter(torch.ones(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias)
        self._learn_initial_state(learned_initial_state, self.d_inner, d_state)

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
