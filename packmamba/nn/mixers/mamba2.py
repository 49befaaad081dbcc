"""The Mamba-2 mixer on packed documents. Shapes: B rows, L slots, S documents, H heads, P headdim, G ngroups, N d_state."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packmamba import ops
from packmamba.errors import expect
from packmamba.nn.init import Projection, dt_bias_
from packmamba.nn.mixers.mamba1 import Mixer, State, check_options
from packmamba.ops.checks import accumulation_dtype, is_transforming


class GatedRMSNorm(nn.Module):
    """Gate y (..., D) by SiLU of z, normalise by groups of channels, and scale."""

    def __init__(self, channels: int, groups: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.groups, self.epsilon = groups, epsilon
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        wide = accumulation_dtype(y.dtype)
        gated = (y.to(wide) * F.silu(z.to(wide))).unflatten(-1, (self.groups, -1))
        return (F.rms_norm(gated, gated.shape[-1:], eps=self.epsilon).flatten(-2) * self.weight).to(y.dtype)


class PackedMamba2(Mixer):
    """Compute Mamba-2 (arXiv 2405.21060, figure 6) on packed documents.

    Parameters have the names, shapes and initialisation of state-spaces' Mamba2 (rmsnorm, norm_before_gate=False).

    Args (others as of PackedMamba):
        d_state, headdim, ngroups, d_conv: N; P, channels of a head; G, groups of heads that share B and C; W, taps of the
            convolution, 2 to 4.
        A_init_range: -A starts uniform in it.
        dt_limit: (low, high), to which delta is clamped.
        D_has_hdim: the skip has a weight for each channel, not for each head.
        norm_eps: of the gated norm.
        learned_initial_state: start documents from a learned state (H, P, N), not from zero.
    """

    NO_WEIGHT_DECAY = ("A_log", "D", "dt_bias", "initial_state")
    PUBLISHED = {"state_spaces": "Mamba2", "hugging_face": "mamba2", "architecture": "Mamba2ForCausalLM"}
    WITHOUT_EFFECT = ("conv_init", "chunk_size", "use_mem_eff_path")
    HUGGING_FACE = {  # by argument, Mamba2Config's key and default
        "d_state": ("state_size", 128), "d_conv": ("conv_kernel", 4), "expand": ("expand", 2), "headdim": ("head_dim", 64),
        "ngroups": ("n_groups", 8), "bias": ("use_bias", False), "conv_bias": ("use_conv_bias", True),
        "dt_limit": ("time_step_limit", (0.0, math.inf)), "norm_eps": ("layer_norm_epsilon", 1e-5),
    }  # fmt: skip

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
        learned_initial_state: bool = False,
        recompute: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "d_model": d_model,
            "d_state": d_state,
            "expand": expand,
            "headdim": headdim,
            "ngroups": ngroups,
        }
        flags = {"bias": bias, "conv_bias": conv_bias, "D_has_hdim": D_has_hdim}
        flags |= {"learned_initial_state": learned_initial_state}
        check_options(sizes, flags, d_conv, (dt_min, dt_max, dt_init_floor), backend)
        d_inner = expand * d_model
        fits = d_inner % headdim == 0 and d_inner // headdim % ngroups == 0
        expect(fits, "headdim", f"a divisor of {d_inner}, with a multiple of {ngroups} heads", headdim)
        self.d_model, self.d_state, self.d_conv, self.d_inner = d_model, d_state, d_conv, d_inner
        self.headdim, self.ngroups, self.nheads = headdim, ngroups, d_inner // headdim
        self.dt_limit = (
            None if tuple(dt_limit) == (0.0, math.inf) else (float(dt_limit[0]), float(dt_limit[1]))
        )
        self.backend = backend
        self.conv_dim = d_inner + 2 * ngroups * d_state
        self.in_proj = Projection(
            d_model, d_inner + self.conv_dim + self.nheads, bias=bias
        )  # z, x, B, C, dt
        self.conv1d = nn.Conv1d(self.conv_dim, self.conv_dim, d_conv, groups=self.conv_dim, bias=conv_bias)
        self.dt_range = (dt_min, dt_max, dt_init_floor)
        self.A_init_range = A_init_range
        self.dt_bias = nn.Parameter(torch.empty(self.nheads))
        self.A_log = nn.Parameter(torch.empty(self.nheads))
        self.D = nn.Parameter(torch.empty(d_inner if D_has_hdim else self.nheads))
        self._learn_initial_state(learned_initial_state, self.nheads, headdim, d_state)
        self._reset_own()
        self.norm = GatedRMSNorm(d_inner, ngroups, norm_eps)
        self.out_proj = Projection(d_inner, d_model, bias=bias)
        self._mark_parameters()

    def _reset_in_order(self) -> None:
        self.in_proj.reset_parameters()
        self.conv1d.reset_parameters()
        self._reset_own()
        self.norm.reset_parameters()
        self.out_proj.reset_parameters()

    @torch.no_grad()
    def _reset_own(self) -> None:
        super()._reset_own()
        dt_bias_(self.dt_bias, *self.dt_range)
        self.A_log.uniform_(*self.A_init_range).log_()

    def _mix(
        self, zxbcdt: Tensor, conv_layout: Any, ssm_layout: Any, state: State | None, return_state: bool
    ) -> Any:
        """Mix in_proj's output to (B, L, d_model); return also final states or None."""
        conv_state, ssm_state = self.initial_states(state, zxbcdt.shape[0], ssm_layout)
        z, xbc, delta = zxbcdt.split([self.d_inner, self.conv_dim, self.nheads], dim=-1)
        out = ops.conv1d_pack(
            xbc, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu", layout=conv_layout,
            initial_state=conv_state, return_final_state=return_state, backend=self.backend,
        )  # fmt: skip
        xbc, conv_state = out if return_state else (out, None)
        x, B, C = xbc.split([self.d_inner, *[self.ngroups * self.d_state] * 2], dim=-1)
        x = x.unflatten(-1, (self.nheads, self.headdim))
        B, C = (t.unflatten(-1, (self.ngroups, self.d_state)) for t in (B, C))
        wide = accumulation_dtype(x.dtype)
        D = self.D.to(wide)
        out = ops.ssd_pack(
            x, delta.to(x.dtype), -torch.exp(self.A_log.to(wide)), B, C, D if len(D) == self.nheads else D.view(-1, self.headdim),
            delta_bias=self.dt_bias.to(wide), delta_softplus=True, delta_limit=self.dt_limit, layout=ssm_layout,
            initial_state=ssm_state, return_final_state=return_state, backend=self.backend,
        )  # fmt: skip
        y, ssm_state = out if return_state else (out, None)
        mixed = self.out_proj(self._normalise(y.flatten(-2), z))
        return mixed, ((conv_state, ssm_state) if return_state else None)

    def _normalise(self, y: Tensor, z: Tensor) -> Tensor:
        """Gate and normalise y; the backward computes it again, which keeps only y and z."""
        # torch.func's transforms refuse checkpoint, a strict torch.export cannot run it.
        plain = is_transforming() or torch.compiler.is_exporting()
        if torch.is_grad_enabled() and not plain:
            return checkpoint(self.norm, y, z, use_reentrant=False, preserve_rng_state=False)
        return self.norm(y, z)

    @classmethod
    def from_hugging_face(cls, config: dict[str, Any]) -> dict[str, Any]:
        options = super().from_hugging_face(config)
        return options | {"dt_limit": tuple(options["dt_limit"])}

    @classmethod
    def to_hugging_face(cls, options: dict[str, Any]) -> dict[str, Any]:
        expect(not options.get("D_has_hdim"), "D_has_hdim", "False in this format", True)
        epsilon, norm_eps = options["norm_epsilon"], options.get("norm_eps", 1e-5)
        expect(norm_eps == epsilon, "norm_eps", f"norm_epsilon's {epsilon} in this format", norm_eps)
        published = super().to_hugging_face({"ngroups": 1} | options)
        published["time_step_limit"] = [*map(float, published["time_step_limit"])]
        heads = published["expand"] * options["d_model"] // published["head_dim"]
        return published | {"num_heads": heads, "rms_norm": True, "time_step_rank": 1}
