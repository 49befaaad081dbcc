"""The Mamba-2 mixer on packed documents: one projection, a scalar decay a head, a gated norm.

Convolution, scan and norm are one operator, ``ops.mamba2_inner``, with one autograd node: its
backward writes gradients where ``in_proj``'s backward reads them.

Shapes: B rows, L slots, S documents, D d_inner, H heads, P headdim, G ngroups, N d_state, W d_conv.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from packmamba import ops
from packmamba.errors import expect
from packmamba.nn.init import Projection
from packmamba.nn.mixers.mixer import HeadMixer, State
from packmamba.ops.checks import accumulation_dtype
from packmamba.ops.mamba2_inner import mamba2_layer_arguments


class PackedMamba2(HeadMixer):
    """Compute Mamba-2 (arXiv 2405.21060, figure 6) on packed documents.

    Parameters have the names, shapes and initialisation of state-spaces' Mamba2 (rmsnorm,
    norm_before_gate=False).

    Args (others as of PackedMamba):
        d_state: N, states of a channel, at most 256.
        headdim: P, channels of a head; H = expand * d_model / headdim heads.
        ngroups: G, groups of heads that share B and C; it divides H.
        A_init_range: -A, of each head, starts uniform in it.
        dt_limit: (low, high), to which delta is clamped.
        D_has_hdim: the skip D has a weight for each channel, not for each head.
        norm_eps: of the gated norm.
        recompute: without effect; on a GPU the backward always computes the norm again.

    Raises TypeError or ValueError that names the argument.
    """

    NO_WEIGHT_DECAY = ("A_log", "D", "dt_bias")
    PUBLISHED = {"state_spaces": "Mamba2", "hugging_face": "mamba2", "architecture": "Mamba2ForCausalLM"}
    WITHOUT_EFFECT = ("conv_init", "chunk_size", "use_mem_eff_path", "learned_initial_state")
    HUGGING_FACE = {  # by argument, Mamba2Config's key and default
        "d_state": ("state_size", 128),
        "d_conv": ("conv_kernel", 4),
        "expand": ("expand", 2),
        "headdim": ("head_dim", 64),
        "ngroups": ("n_groups", 8),
        "bias": ("use_bias", False),
        "conv_bias": ("use_conv_bias", True),
        "dt_limit": ("time_step_limit", (0.0, math.inf)),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
    }

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        D_has_hdim: bool = False,
        bias: bool = False,
        conv_bias: bool = True,
        norm_eps: float = 1e-5,
        recompute: bool = False,
        backend: str | None = None,
    ) -> None:
        sizes = {"d_model": d_model, "d_state": d_state, "expand": expand, "headdim": headdim, "ngroups": ngroups}
        flags = {"bias": bias, "conv_bias": conv_bias, "D_has_hdim": D_has_hdim}
        super().__init__(sizes, flags, (dt_min, dt_max, dt_init_floor), backend, d_conv)
        self.d_conv = d_conv
        low, high = map(float, dt_limit)
        expect(low <= high, "dt_limit", "(low, high) with low at most high", dt_limit)
        expect(0 < A_init_range[0] <= A_init_range[1], "A_init_range", "(low, high), above zero", A_init_range)
        self.dt_limit = None if (low, high) == (0.0, math.inf) else (low, high)
        self.norm_eps = norm_eps
        self.conv_dim = self.d_inner + 2 * ngroups * d_state  # x, B, C
        # z, x, B, C, dt.
        self.in_proj = Projection(d_model, self.d_inner + self.conv_dim + self.nheads, bias=bias)
        self.conv1d = nn.Conv1d(self.conv_dim, self.conv_dim, d_conv, groups=self.conv_dim, bias=conv_bias)
        self.A_init_range = A_init_range
        self.dt_bias = nn.Parameter(torch.empty(self.nheads))
        self.A_log = nn.Parameter(torch.empty(self.nheads))
        self.D = nn.Parameter(torch.empty(self.d_inner if D_has_hdim else self.nheads))
        self.state_shapes = {"conv_state": (self.conv_dim, d_conv - 1), "ssm_state": (self.nheads, headdim, d_state)}
        self._reset_own()
        # Holds the weight of the gated norm, which ``ops.mamba2_inner`` computes by groups.
        self.norm = nn.RMSNorm(self.d_inner, eps=norm_eps)
        self.out_proj = Projection(self.d_inner, d_model, bias=bias)
        self._mark_parameters()

    @torch.no_grad()
    def _reset_own(self) -> None:
        super()._reset_own()
        self.A_log.uniform_(*self.A_init_range).log_()

    def _mix(
        self, projected: Tensor, conv_layout: Any, ssm_layout: Any, state: State | None, return_state: bool
    ) -> tuple[Tensor, Any]:
        """Mix in_proj's output (B, L, 2 D + 2 G N + H): z, x, B, C and delta."""
        documents = self._check_documents(projected, conv_layout, ssm_layout, state)
        wide = accumulation_dtype(projected.dtype)
        A = -torch.exp(self.A_log.to(wide))
        D = self.D.to(wide)
        D = D if len(D) == self.nheads else D.view(-1, self.headdim)
        options: Any = {"groups": self.ngroups, "epsilon": self.norm_eps}
        options |= {"delta_limit": self.dt_limit, "return_state": return_state}
        arguments = mamba2_layer_arguments(self, projected, A, D, documents, **options)
        normed, *final_states = ops.mamba2_inner(arguments, self.backend)
        return self.out_proj(normed), tuple(final_states) if return_state else None

    @classmethod
    def to_hugging_face(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of a Hugging Face configuration for the mixer's arguments."""
        expect(not options.get("D_has_hdim"), "D_has_hdim", "False in this format", True)
        epsilon, norm_eps = options["norm_epsilon"], options.get("norm_eps", 1e-5)
        expect(norm_eps == epsilon, "norm_eps", f"norm_epsilon's {epsilon} in this format", norm_eps)
        published = super().to_hugging_face({"ngroups": 1} | options)
        published["time_step_limit"] = [*map(float, published["time_step_limit"])]
        heads = published["expand"] * options["d_model"] // published["head_dim"]
        return published | {"num_heads": heads, "rms_norm": True, "time_step_rank": 1}
