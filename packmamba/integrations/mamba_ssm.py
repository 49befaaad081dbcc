"""mamba_ssm's Mamba layer with boundaries.

Shapes: B rows, L slots, S documents, D d_inner, N d_state, W d_conv.
"""

from typing import Any

import torch
from torch import Tensor, nn

from packmamba.errors import expect
from packmamba.layout import SequenceLayout
from packmamba.nn import PackedMamba
from packmamba.nn.mixers.mixer import is_unchanged
from packmamba.ops.checks import accumulation_dtype, boundary_layout


class Mamba(PackedMamba):
    """Replace ``mamba_ssm.modules.mamba_simple.Mamba``, with boundaries and on a CPU too.

    Args (others as of PackedMamba):
        dt_init, dt_scale: "random" and 1, mamba_ssm's defaults, which its published models have.
        layer_idx: which states of ``inference_params`` are this layer's.
        device, dtype: of the parameters; A_log and D are float32.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        start = (dt_init, dt_scale)
        expect(start == ("random", 1.0), "dt_init, dt_scale", "'random' and 1.0", start)
        with torch.device(device if device is not None else torch.get_default_device()):
            dt_range = (dt_min, dt_max, dt_init_floor)
            super().__init__(d_model, d_state, d_conv, expand, dt_rank, *dt_range, bias, conv_bias)
        self.expand, self.use_fast_path, self.layer_idx = expand, use_fast_path, layer_idx
        self.activation, self.act = "silu", nn.SiLU()  # some code reads them
        if dtype is not None:  # A_log and D stay float32, as in mamba_ssm
            for part in (self.in_proj, self.conv1d, self.x_proj, self.dt_proj, self.out_proj):
                part.to(dtype)

    def _mark_parameters(self) -> None:
        super()._mark_parameters()
        # The initialisation of mamba_ssm's models zeroes other biases.
        self.dt_proj.bias._no_reinit = True  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        inference_params: Any = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        position_indices: Tensor | None = None,
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        """Mix hidden_states (B, L, d_model) to the same shape.

        Args:
            inference_params: mamba_ssm's. At ``seqlen_offset`` 0 rows leave their last states
                there; later a token takes a step.
            seq_idx, position_indices: (B, L) integer, each slot's document,
                or its place there; -1 is padding, at a row's tail.
            cu_seqlens: (S + 1,) integer, cumulative lengths over all rows, without padding.
            layout: a SequenceLayout. Without any of the four, each row is one document.

        Raises TypeError or ValueError for boundaries that
        are none, that disagree, or beside inference_params.
        """
        layout = boundary_layout(
            hidden_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens, position_indices=position_indices, layout=layout
        )
        if inference_params is None:
            return super().forward(hidden_states, layout=layout)
        expect(layout is None, "inference_params", "none beside boundaries", "some")
        states = self._get_states_from_cache(inference_params, hidden_states.shape[0])
        if inference_params.seqlen_offset > 0:
            return self.step(hidden_states, *states)[0]
        # At offset 0 a prompt begins: from zero, whatever the cache holds.
        return self._advance(hidden_states, states[0].zero_(), states[1], fresh=True)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step one token a row, (B, 1, d_model); update states (B, D, W) and (B, D, N) in place.

        Return output and states.
        """
        expect(hidden_states.shape[1] == 1, "hidden_states", "one token a row", hidden_states.shape[1])
        return self._advance(hidden_states, conv_state, ssm_state), conv_state, ssm_state

    def _advance(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor, fresh: bool = False) -> Tensor:
        """Mix rows from these states (fresh: from zero), which become the last ones."""
        xz = self.in_proj(hidden_states)
        # Copies: a backward holds them.
        # mamba_ssm's convolution state is the last W inputs; the operator's is the last W - 1.
        start = (conv_state[..., 1:].to(xz.dtype).clone(), ssm_state.to(accumulation_dtype(xz.dtype)).clone())
        mixed, final = self._mix(xz, None, None, None if fresh else start, True)
        # The last W inputs, older ones from the state where there are fewer.
        inputs = xz[:, -self.d_conv :, : self.d_inner].transpose(1, 2).to(conv_state.dtype)
        with torch.no_grad():
            conv_state.copy_(torch.cat([conv_state, inputs], -1)[..., -self.d_conv :])
            ssm_state.copy_(final[1])
        return mixed

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Allocate zero states (B, D, W) and (B, D, N)."""
        shapes = (self.conv1d.weight, self.d_conv), (self.dt_proj.weight, self.d_state)
        conv, ssm = (like.new_zeros(batch_size, self.d_inner, last, dtype=dtype) for like, last in shapes)
        return conv, ssm

    def _get_states_from_cache(self, inference_params: Any, batch_size: int) -> tuple[Tensor, Tensor]:
        expect(self.layer_idx is not None, "layer_idx", "a number beside inference_params", None)
        cache = inference_params.key_value_memory_dict
        if self.layer_idx not in cache:
            cache[self.layer_idx] = self.allocate_inference_cache(batch_size, 0)
        rows = cache[self.layer_idx][0].shape[0]
        expect(rows == batch_size, "hidden_states", f"{rows} rows, as inference_params holds", batch_size)
        return cache[self.layer_idx]


def replace(model: nn.Module) -> nn.Module:
    """Replace every Mamba layer of mamba_ssm's in a model by ours, in place; return the model.

    Layers keep their parameters, names, modes and device. ``MambaLMHeadModel`` hands further
    arguments of its forward to its layers: ``model(input_ids, seq_idx=...)`` packs. Raises
    TypeError; ValueError without such a layer, with another, or with one that has hooks;
    RuntimeError for parameters that Mamba-1 has not.
    """
    expect(isinstance(model, nn.Module), "model", "a module", type(model).__name__, TypeError)
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if type(child).__name__ in ("Mamba", "Mamba2", "Mamba3", "Mamba2Simple") and not isinstance(child, Mamba)
    ]
    expect(layers, "model", "layers of mamba_ssm's class Mamba", f"{type(model).__name__} without any")
    made = {id(child): _of(child) for _, _, child in layers}  # all before the first is exchanged
    for parent, name, child in layers:
        setattr(parent, name, made[id(child)])
    return model


def _of(layer: Any) -> Mamba:
    kind, activation = type(layer).__name__, getattr(layer, "activation", "silu")
    expect(kind == "Mamba", "model", "layers of class Mamba (Mamba-1) alone", kind)
    expect(activation in ("silu", "swish"), "model", "the activation silu", repr(activation))
    # Hooks, and a forward of an instance's own, would be lost with the layer that they are on.
    expect(all(map(is_unchanged, layer.modules())), "model", "layers without hooks", "one with a hook or wrapped")
    inner, d_state = layer.A_log.shape
    # On meta, since every parameter is the replaced layer's own (assign, keep_vars).
    with torch.device("meta"):
        ours = Mamba(
            layer.d_model, d_state, layer.conv1d.weight.shape[-1], inner // layer.d_model, layer.dt_proj.weight.shape[1],
            conv_bias=layer.conv1d.bias is not None, bias=layer.in_proj.bias is not None,
            use_fast_path=getattr(layer, "use_fast_path", True), layer_idx=getattr(layer, "layer_idx", None),
        )  # fmt: skip
    frozen = [parameter for parameter in layer.parameters() if not parameter.requires_grad]
    ours.load_state_dict(layer.state_dict(keep_vars=True), assign=True)
    for parameter in frozen:
        parameter.requires_grad_(False)  # assigning gives it what the parameter on meta had
    return ours.train(layer.training)
