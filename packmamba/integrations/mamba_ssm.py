"""mamba_ssm's Mamba layer, with document boundaries and without CUDA.

Shapes: B rows, L slots, S documents, D d_inner, N d_state, W d_conv.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packmamba.layout import SequenceLayout
from packmamba.nn import PackedMamba
from packmamba.ops.checks import accumulation_dtype, check_is_tensor


class Mamba(PackedMamba):
    """Drop-in for ``mamba_ssm.modules.mamba_simple.Mamba``, whose ``forward`` takes boundaries besides; on a CPU too.

    Args (others as of PackedMamba):
        dt_init, dt_scale: delta's projection starts "random" or "constant", at most dt_scale / sqrt(dt_rank).
        use_fast_path: taken and without effect; there is one path.
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
        if dt_init not in ("random", "constant"):
            raise ValueError(f"dt_init: expected 'random' or 'constant', got {dt_init!r}")
        with torch.device(device if device is not None else torch.get_default_device()):
            super().__init__(d_model, d_state, d_conv, expand, dt_rank, dt_min, dt_max, dt_init_floor, bias, conv_bias)
        self.expand, self.use_fast_path, self.layer_idx = expand, use_fast_path, layer_idx
        self.activation, self.act = "silu", nn.SiLU()  # some code reads them
        with torch.no_grad():
            if dt_init == "constant":
                self.dt_proj.weight.fill_(self.dt_rank**-0.5 * dt_scale)
            else:
                self.dt_proj.weight.mul_(dt_scale)
        self.dt_proj.bias._no_reinit = True  # type: ignore[attr-defined]
        if dtype is not None:
            for part in (self.in_proj, self.conv1d, self.x_proj, self.dt_proj, self.out_proj):
                part.to(dtype)

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
            inference_params: mamba_ssm's, with ``seqlen_offset`` and ``key_value_memory_dict``. At offset 0 the rows' last states
                are kept there; later a single token is taken from them (``step``).
            seq_idx: (B, L) integer, the document of each slot; -1 is padding, at a row's tail.
            cu_seqlens: (S + 1,) integer, cumulative lengths over all rows, without padding.
            position_indices: (B, L) integer, each slot's place in its document; -1 is padding.
            layout: the same as a SequenceLayout. Without any of the four, each row is one document.

        Raises:
            TypeError, ValueError: boundaries that are none, that disagree, or beside inference_params.
        """
        given = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens, "position_indices": position_indices, "layout": layout}
        given = {name: value for name, value in given.items() if value is not None}
        if inference_params is None:
            return super().forward(hidden_states, layout=_layout(hidden_states, given))
        if given:
            raise ValueError(f"inference_params: expected none beside {' and '.join(given)}: each row is one document")
        states = self._get_states_from_cache(inference_params, hidden_states.shape[0])
        if inference_params.seqlen_offset > 0:
            return self.step(hidden_states, *states)[0]
        xz = self.in_proj(hidden_states)
        mixed, final = self._mix(xz, None, None, None, True)
        assert final is not None
        # The last W inputs, the oldest first, zeros before a short row, as mamba_ssm has them: ours are the last W - 1.
        last = F.pad(xz[..., : self.d_inner].transpose(1, 2), (self.d_conv - xz.shape[1], 0))
        with torch.no_grad():
            states[0].copy_(last)
            states[1].copy_(final[1])
        return mixed

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step one token a row: (B, 1, d_model), states (B, D, W) and (B, D, N), updated in place; return output and states."""
        if hidden_states.shape[1] != 1:
            raise ValueError(f"hidden_states: expected one token a row, got {hidden_states.shape[1]}")
        xz = self.in_proj(hidden_states)
        state = (conv_state[..., 1:].to(xz.dtype).contiguous(), ssm_state.to(accumulation_dtype(xz.dtype)).contiguous())
        mixed, final = self._mix(xz, None, None, state, True)
        assert final is not None
        with torch.no_grad():
            conv_state.copy_(torch.cat([conv_state[..., 1:], xz[:, 0, : self.d_inner, None].to(conv_state.dtype)], -1))
            ssm_state.copy_(final[1])
        return mixed, conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Allocate zero states (B, D, W) and (B, D, N) of this dtype, or of the parameters'."""
        conv, ssm = self.conv1d.weight, self.dt_proj.weight
        return (
            conv.new_zeros(batch_size, self.d_inner, self.d_conv, dtype=dtype),
            ssm.new_zeros(batch_size, self.d_inner, self.d_state, dtype=dtype),
        )

    def _get_states_from_cache(self, inference_params: Any, batch_size: int) -> tuple[Tensor, Tensor]:
        if self.layer_idx is None:
            raise ValueError("layer_idx: expected a number, since inference_params holds states by layer, got None")
        kept = inference_params.key_value_memory_dict
        if self.layer_idx not in kept:
            kept[self.layer_idx] = self.allocate_inference_cache(batch_size, 0)
        rows = kept[self.layer_idx][0].shape[0]
        if rows != batch_size:
            raise ValueError(f"hidden_states: expected {rows} rows, as inference_params holds, got {batch_size}")
        return kept[self.layer_idx]


def replace(model: nn.Module) -> nn.Module:
    """Replace every Mamba layer of mamba_ssm's in a model by ours, in place; return the model.

    Layers keep their parameters (the same tensors), names, modes and device. ``MambaLMHeadModel`` hands further arguments of its
    forward to its layers: ``model(input_ids, seq_idx=...)`` packs.

    Raises:
        TypeError, ValueError: not a module; there is no such layer, one that is not Mamba-1, or one that we cannot be.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}")
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ in ("Mamba", "Mamba2", "Mamba3", "Mamba2Simple") and not isinstance(child, Mamba)
    ]
    if not found:
        raise ValueError(f"model: expected layers of mamba_ssm's class Mamba, got {type(model).__name__} without any")
    made = {id(child): _of(child) for _, _, child in found}  # all before the first is exchanged
    for parent, name, child in found:
        setattr(parent, name, made[id(child)])
    return model


def _of(layer: Any) -> Mamba:
    """Build our layer with the given layer's parameters."""
    if type(layer).__name__ != "Mamba":
        raise ValueError(f"model: expected layers of class Mamba (Mamba-1) alone, got {type(layer).__name__}")
    if getattr(layer, "activation", "silu") not in ("silu", "swish"):
        raise ValueError(f"model: expected the activation silu, got {layer.activation!r}")
    expected = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    with torch.device("meta"):
        ours = Mamba(
            d_model=layer.d_model,
            d_state=layer.A_log.shape[1],
            d_conv=layer.conv1d.weight.shape[-1],
            expand=layer.conv1d.weight.shape[0] // layer.d_model,
            dt_rank=layer.dt_proj.weight.shape[1],
            conv_bias=layer.conv1d.bias is not None,
            bias=layer.in_proj.bias is not None,
            use_fast_path=getattr(layer, "use_fast_path", True),
            layer_idx=getattr(layer, "layer_idx", None),
        )
    if (own := {name: tuple(value.shape) for name, value in ours.state_dict().items()}) != expected:
        name = sorted(set(own.items()) ^ set(expected.items()))[0][0]
        raise ValueError(f"model: a layer's '{name}': expected shape {own.get(name)}, got {expected.get(name)}")
    for name in [name for name, _ in ours.named_parameters()]:
        owner, _, leaf = name.rpartition(".")
        setattr(ours.get_submodule(owner), leaf, layer.get_parameter(name))
    return ours.train(layer.training)


def _layout(hidden: Tensor, given: dict[str, Any]) -> SequenceLayout | None:
    """Convert boundary arguments to a layout on the device of ``hidden``; None if there are none."""
    layouts = {name: _converted(name, value, hidden) for name, value in given.items()}
    first = next(iter(layouts.values()), None)
    for name, layout in layouts.items():
        if not (torch.equal(first.starts, layout.starts) and torch.equal(first.ends, layout.ends)):  # type: ignore
            raise ValueError(f"{name}: expected the documents that {next(iter(given))} has, got others")
    return first


def _converted(name: str, value: Any, hidden: Tensor) -> SequenceLayout:
    if isinstance(value, SequenceLayout):
        return value
    check_is_tensor(value, name)
    rows, width = hidden.shape[:2]
    if name != "cu_seqlens" and value.shape != (rows, width):
        raise ValueError(f"{name}: expected shape {(rows, width)} like hidden_states, got {tuple(value.shape)}")
    # Every layer of a model is given the same tensor: it is read once, which waits for a GPU. A tensor of inference mode has no
    # version, and memory on the host may be written to by others, such as NumPy.
    version = None if value.is_inference() else value._version
    key = (version, torch.is_inference_mode_enabled(), tuple(hidden.shape[:2]), hidden.device)
    kept = getattr(value, "_packmamba_layout", None)
    if kept is not None and version is not None and kept[0] == key and (kept[2] is None or torch.equal(kept[2], value)):
        return kept[1]
    if name == "cu_seqlens":
        layout = SequenceLayout.from_cu_seqlens(value, rows, width)
    elif name == "seq_idx":
        layout = SequenceLayout.from_seq_idx(value)
    else:
        layout = SequenceLayout.from_position_indices(value)
        if (value[:, 0] > 0).any():
            b = int((value[:, 0] > 0).nonzero()[0])
            raise ValueError(f"{name}[{b}, 0]: expected 0 where a row starts, got {int(value[b, 0])}")
    layout = layout.to(hidden.device)
    value._packmamba_layout = (key, layout, value.clone() if value.device.type == "cpu" else None)
    return layout
