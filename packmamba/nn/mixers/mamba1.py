"""The Mamba block's mixer on packed documents.

Convolution, projections and scan are one operator, ``ops.mamba_inner``, with one autograd node: its
backward writes gradients into place where autograd would concatenate them, and may compute again
what the forward did not keep.

Shapes: B rows, L slots, S documents, D d_inner, N d_state, W d_conv.
"""

from typing import Any

import torch
from torch import Tensor, nn

from packmamba import ops
from packmamba.layout import ceil_div
from packmamba.nn.init import DeltaProjection, Projection
from packmamba.nn.mixers.mixer import Mixer, State, is_plain
from packmamba.ops.checks import accumulation_dtype
from packmamba.ops.inner import layer_arguments


class PackedMamba(Mixer):
    """Compute Mamba (arXiv 2312.00752, figure 3) on packed documents.

    Parameters have the names, shapes and initialisation of state-spaces' Mamba.

    Args:
        d_model: width of input and output.
        d_state: N, states of a channel, at most 256.
        d_conv: W, taps of the convolution, 2 to 4.
        expand: D = expand * d_model channels inside.
        dt_rank: rank of the projection to delta; "auto" is ceil(d_model / 16).
        dt_min, dt_max, dt_init_floor: delta starts log-uniform in [dt_min, dt_max], at least
            dt_init_floor.
        bias, conv_bias: whether projections and convolution have biases.
        recompute: the backward computes the convolution's output and delta again, see
            ``ops.mamba_inner``.
        backend: a name in ``ops.BACKENDS``; None: "auto".

    Raises TypeError or ValueError that names the argument.
    """

    NO_WEIGHT_DECAY = ("A_log", "D")
    PUBLISHED = {"state_spaces": "Mamba1", "hugging_face": "mamba", "architecture": "MambaForCausalLM"}
    WITHOUT_EFFECT = ("dt_init", "dt_scale", "use_fast_path", "learned_initial_state")
    HUGGING_FACE = {  # by argument, MambaConfig's key and default
        "d_state": ("state_size", 16),
        "d_conv": ("conv_kernel", 4),
        "expand": ("expand", 2),
        "dt_rank": ("time_step_rank", "auto"),
        "bias": ("use_bias", False),
        "conv_bias": ("use_conv_bias", True),
    }

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
        recompute: bool = False,
        backend: str | None = None,
    ) -> None:
        if dt_rank == "auto" and isinstance(d_model, int):
            dt_rank = ceil_div(d_model, 16)
        sizes = {"d_model": d_model, "d_state": d_state, "expand": expand, "dt_rank": dt_rank}
        dt_range = (dt_min, dt_max, dt_init_floor)
        super().__init__(sizes, {"bias": bias, "conv_bias": conv_bias}, dt_range, backend, d_conv)
        self.d_conv = d_conv
        self.dt_rank = int(dt_rank)
        self.recompute = recompute
        self.in_proj = Projection(d_model, 2 * self.d_inner, bias=bias)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, d_conv, groups=self.d_inner, bias=conv_bias)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = DeltaProjection(self.dt_rank, self.d_inner, dt_range)
        self.A_log = nn.Parameter(torch.empty(self.d_inner, d_state))
        self.D = nn.Parameter(torch.empty(self.d_inner))
        self.state_shapes = {"conv_state": (self.d_inner, d_conv - 1), "ssm_state": (self.d_inner, d_state)}
        self._reset_own()
        self.out_proj = Projection(self.d_inner, d_model, bias=bias)
        self._mark_parameters()

    @torch.no_grad()
    def _reset_own(self) -> None:
        super()._reset_own()
        self.A_log.copy_(torch.arange(1.0, self.d_state + 1, device=self.A_log.device).log())

    def _mix(
        self, projected: Tensor, conv_layout: Any, ssm_layout: Any, state: State | None, return_state: bool
    ) -> tuple[Tensor, Any]:
        """Mix in_proj's output (B, L, 2 D), the convolution's input and then the gate."""
        documents = self._check_documents(projected, conv_layout, ssm_layout, state)
        is_shared = any(layout.crossing for layout in documents[:2])
        if is_shared or not all(map(is_plain, (self.x_proj, self.dt_proj, self.out_proj))):
            return self._mix_apart(projected, documents, return_state)
        A, D = self._recurrence(projected.dtype)
        arguments = layer_arguments(self, projected, A, D, documents, return_state, self.recompute)
        mixed, *final_states = ops.mamba_inner(arguments, self.backend)
        if self.out_proj.bias is not None:
            mixed = mixed + self.out_proj.bias.to(mixed.dtype)
        return mixed, tuple(final_states) if return_state else None

    def _recurrence(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A and D in the dtype in which activations of this dtype accumulate."""
        wide = accumulation_dtype(dtype)
        return -torch.exp(self.A_log.to(wide)), self.D.to(wide)

    def _mix_apart(self, projected: Tensor, documents: tuple, return_state: bool) -> tuple:
        """Mix as ``ops.mamba_inner``, but call operators and projections, which may be adapters."""
        conv_layout, ssm_layout, conv_state, ssm_state = documents
        options: Any = {"return_final_state": return_state, "backend": self.backend}
        x, z = projected.chunk(2, dim=-1)
        convolution = (self.conv1d.weight.squeeze(1), self.conv1d.bias)
        of_conv = {"layout": conv_layout, "initial_state": conv_state} | options
        convolved = ops.conv1d_pack(x, *convolution, activation="silu", **of_conv)
        u, conv_state = convolved if return_state else (convolved, None)
        delta, B, C = self.x_proj(u).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = self.dt_proj(delta)  # its bias included
        A, D = self._recurrence(u.dtype)
        of_scan = {"layout": ssm_layout, "initial_state": ssm_state} | options
        scanned = ops.ssm_pack(u, delta, A, B, C, D, z=z, delta_softplus=True, **of_scan)
        y, ssm_state = scanned if return_state else (scanned, None)
        return self.out_proj(y), (conv_state, ssm_state) if return_state else None
