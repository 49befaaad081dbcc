"""The Mamba language model on packed documents: an embedding, blocks, and a head.

Names of modules and parameters are state-spaces', whose checkpoints it reads and writes. Layouts
are handed unchanged to every block. The head is separate from the rest (``return_hidden``), since
the loss of a large vocabulary is computed without all of its logits (``packmamba.nn.loss``).

A block gets the residual stream both as it is and normalised, and hands on both. So the norm of the
next block is computed where the addition is, and what the backward needs is saved once: the
normalised stream and a number a token. The norm's weight is not applied there: it scales the
columns of the mixer's first projection, d_model numbers instead of B L d_model. A gated MLP between
mixers (``d_intermediate``), which works on tokens, has such a norm of its own.

Shapes: B rows, L slots, S documents.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packmamba.errors import expect
from packmamba.layout import SequenceLayout, round_up
from packmamba.nn.init import Embedding, Head, Projection, check_tied, whole_parameters
from packmamba.nn.mixers import MIXERS, State
from packmamba.nn.mixers.mixer import call
from packmamba.nn.pretrained import find_folder, load_weights, read_pretrained, write_pretrained
from packmamba.ops.checks import check_flags, check_layout, check_size, is_transforming

RECOMPUTE = ("none", "inner", "block")  # values of ``MambaLM(recompute=...)``


class MambaLM(nn.Module):
    """Predict tokens by blocks between an embedding and a head (Mamba, arXiv 2312.00752).

    Args:
        vocab_size: rows of the embedding.
        d_model: width of the residual stream.
        n_layer: number of blocks.
        tie_embeddings: share the embedding's weight with the head.
        norm_epsilon: of RMSNorm.
        recompute: activations that the backward computes again instead of keeping: "none"; "inner",
            the convolution's output and delta (as mamba-ssm does; compiled kernels only); "block",
            all but each block's input (activation checkpointing).
        mixer: a name in ``packmamba.nn.mixers.MIXERS``.
        d_intermediate: channels of a gated MLP behind each mixer, rounded up to a multiple of 128;
            0: none.
        options: the mixer's; PackedMamba's are d_state, d_conv, expand, dt_rank,
            backend and others.

    Raises TypeError or ValueError that names the argument.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_layer: int,
        tie_embeddings: bool = True,
        norm_epsilon: float = 1e-5,
        recompute: str = "none",
        mixer: str = "mamba1",
        d_intermediate: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        expect(recompute in RECOMPUTE, "recompute", f"one of {', '.join(RECOMPUTE)}", repr(recompute))
        expect(mixer in MIXERS, "mixer", f"one of {', '.join(MIXERS)}", repr(mixer))
        sizes = {"vocab_size": vocab_size, "d_model": d_model, "n_layer": n_layer}
        for name, size in sizes.items():
            check_size(name, size, 2**32 if name == "vocab_size" else 2**20)
        check_size("d_intermediate", 1 if d_intermediate == 0 else d_intermediate, 2**20)
        check_flags(tie_embeddings=tie_embeddings)
        self.config: dict[str, Any] = {**sizes, "tie_embeddings": tie_embeddings}
        self.config |= {"norm_epsilon": norm_epsilon, "mixer": mixer}
        if d_intermediate:
            self.config["d_intermediate"] = d_intermediate
        self.config |= getattr(MIXERS[mixer], "EXPLICIT", {}) | options
        embedding = Embedding(vocab_size, d_model)
        mixers = [MIXERS[mixer](d_model, recompute=recompute == "inner", **options) for _ in range(n_layer)]
        layers = [Block(mixer, norm_epsilon, recompute == "block", d_intermediate) for mixer in mixers]
        # Additions to the residual stream, by which state-spaces scales the last projections.
        self.num_residuals = n_layer * (2 if d_intermediate else 1)
        for layer in layers:
            layer.mixer.initialise_in_stack(self.num_residuals)
            if layer.mlp is not None:
                layer.mlp.fc2.place_in_stack(math.sqrt(self.num_residuals))
        norm = nn.RMSNorm(d_model, eps=norm_epsilon)
        parts = {"embedding": embedding, "layers": nn.ModuleList(layers), "norm_f": norm}
        self.backbone: Any = nn.ModuleDict(parts)
        self.lm_head = Head(d_model, vocab_size, bias=False)
        if tie_embeddings:
            self.lm_head.tie(embedding)
            self.lm_head.register_load_state_dict_post_hook(Head.tie_again)
        self._start = add_norm  # or compiled, see ``compile_blocks``

    def init_weights(self) -> None:
        """Initialise every parameter as a fresh model's under the same seed; tie the head again.

        For a model that was made on the device ``meta`` and emptied (``to_empty``), whole or
        sharded by FSDP2: there all ranks call it, and rank 0's draws count. A plugin's mixer
        needs ``reset_parameters`` (docs/extend.md).
        """
        layers = self.backbone.layers
        self.backbone.embedding.reset_parameters()
        for layer in layers:
            with whole_parameters(layer.mixer):  # a plugin's knows of no shards
                layer.mixer.reset_parameters()
                layer.mixer.initialise_in_stack(self.num_residuals)
            layer.norm.reset_parameters()
        for layer in (layer for layer in layers if layer.mlp is not None):
            for part in (layer.norm2, layer.mlp.fc1, layer.mlp.fc2):
                part.reset_parameters()
        self.backbone.norm_f.reset_parameters()
        self.lm_head.reset_parameters()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *further: Any) -> None:
        """Refuse an untied head's weight, which would become the tied embedding's, too."""
        if self.config["tie_embeddings"]:
            check_tied(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *further)

    @classmethod
    def from_pretrained(cls, directory: str | Path, revision: str | None = None, **overrides: Any) -> MambaLM:
        """Load a published checkpoint, in one file or in shards.

        It has state-spaces' or Hugging Face's format.

        Args:
            directory: a folder, or else a Hub's name such as state-spaces/mamba-130m, downloaded at
                ``revision``.
            overrides: further arguments of MambaLM, such as ``backend``.

        Raises FileNotFoundError; ValueError for another configuration, for one that lacks what the
        mixer must be told (Mamba-3's ``decay``), or naming the first weight that does not fit it.
        """
        arguments, weights = read_pretrained(find_folder(directory, revision))
        arguments |= overrides
        for name in getattr(MIXERS.get(arguments["mixer"]), "EXPLICIT", {}):
            expected = f"a value in ssm_cfg of {directory}'s config.json, or from_pretrained(..., {name}=...)"
            expect(name in arguments, name, expected, "none")
        model = cls(**arguments)
        load_weights(model, weights, directory)
        return model

    def save_pretrained(self, directory: str | Path, format: str = "state_spaces") -> None:
        """Write a folder that ``from_pretrained`` reads.

        Raises ValueError for what ``format`` cannot hold, and for a tied head that was replaced.
        Merge adapters first: their weights are written, but not read again.

        Args:
            format: "state_spaces", which mamba-ssm reads (but not another norm_epsilon); or
                "huggingface", which transformers' AutoModelForCausalLM reads.
        """
        write_pretrained(directory, self.config, self.state_dict(), format)

    def forward(
        self,
        tokens: Tensor,
        layout: SequenceLayout | None = None,
        conv_layout: SequenceLayout | None = None,
        ssm_layout: SequenceLayout | None = None,
        states: list[State] | None = None,
        return_states: bool = False,
        return_hidden: bool = False,
    ) -> Any:
        """Compute logits (B, L, vocab_size) of tokens (B, L).

        With ``return_states`` also return final states by layer.

        Args:
            tokens: int64 or int32 ids; at padding any valid id, whose logits are finite and
                meaningless.
            layout: where documents lie; None: each row is one.
            conv_layout, ssm_layout: instead of ``layout`` in the convolutions or the scans;
                ``layout.flow()`` leaks.
            states: initial states by layer, as the mixer's ``start_state`` has them, of the
                documents of conv_layout and ssm_layout; None: zero.
            return_hidden: return the head's input (B, L, d_model) instead of logits: for
                ``linear_cross_entropy``.

        Raises TypeError or ValueError.
        """
        got = getattr(tokens, "dtype", type(tokens).__name__)
        expect(got in (torch.int32, torch.int64), "tokens", "an int64 or int32 tensor", got, TypeError)
        fits = tokens.dim() == 2 and 0 not in tokens.shape
        expect(fits, "tokens", "shape (B, L) with at least one slot", tuple(tokens.shape))
        layers = self.backbone.layers
        initial_states: Any = [None] * len(layers) if states is None else states
        fits = len(initial_states) == len(layers)
        expect(fits, "states", f"one per layer, {len(layers)}", len(initial_states))
        layout = check_layout(layout, tokens, "tokens")
        conv_layout = layout if conv_layout is None else conv_layout
        ssm_layout = layout if ssm_layout is None else ssm_layout
        shares_rows = getattr(layers[0].mixer, "SHARES_ROWS", False)
        fits = shares_rows or conv_layout.crossing is ssm_layout.crossing is None
        expect(fits, "layout", "rows that no ranks share", "shared ones")
        residual, normed = self._embed(tokens)
        final_states = []
        for layer, state in zip(layers, initial_states):
            residual, normed, state = layer(residual, normed, conv_layout, ssm_layout, state, return_states)
            final_states.append(state)
        hidden = normed * self.backbone.norm_f.weight.to(normed.dtype)
        result = hidden if return_hidden else self.lm_head(hidden)
        return (result, final_states) if return_states else result

    def _embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream before the first block, and the same normalised.

        Both are (B, L, d_model).
        """
        try:
            embedded = self.backbone.embedding(tokens)
        except IndexError:
            got = f"{int(tokens.min())} to {int(tokens.max())}"
            raise ValueError(f"tokens: expected ids from 0 to {len(self.lm_head.weight) - 1}, got {got}") from None
        residual = embedded.to(torch.promote_types(embedded.dtype, torch.float32))
        norm = self.backbone.norm_f
        device = tokens.device.type
        # Autocast leaves float64 as it is.
        casts = torch.is_autocast_enabled(device) and norm.weight.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device) if casts else norm.weight.dtype
        # The first block's norm, by adding nothing to the stream.
        return self._start(residual, embedded.new_zeros(()).to(dtype), norm.eps)

    def compile_blocks(self, **options: Any) -> None:
        """Compile with torch.compile: one compilation for all blocks and layouts."""
        for layer in self.backbone.layers:
            layer.compile(**options)
        self._start = torch.compile(add_norm, **options)

    def start_states(self, documents: int) -> list[State]:
        """Return initial states of so many documents, by layer: zeros, unless a mixer learns them."""
        return [layer.mixer.start_state(documents) for layer in self.backbone.layers]

    def weight_decay_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return optimizer groups: matrices decay; vectors, and what the mixer exempts, do not."""
        groups: Any = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
        exempt_names = tuple(f".mixer.{name}" for name in MIXERS[self.config["mixer"]].NO_WEIGHT_DECAY)
        for name, parameter in self.named_parameters():
            # By name: copies and shards of a parameter lose its _no_weight_decay.
            is_exempt = parameter.dim() < 2 or name.endswith(exempt_names)
            groups[is_exempt]["params"].append(parameter)
        return groups


class GatedMLP(nn.Module):
    """Compute ``fc2(x * silu(gate))``, x and gate of ``fc1`` (SwiGLU), as state-spaces' GatedMLP.

    channels: of x, rounded up to a multiple of 128.
    """

    def __init__(self, d_model: int, channels: int) -> None:
        super().__init__()
        channels = round_up(channels, 128)
        self.fc1 = Projection(d_model, 2 * channels, bias=False)
        self.fc2 = Projection(channels, d_model, bias=False)

    def forward(self, normed: Tensor, weight: Tensor) -> Tensor:
        """Return ``normed`` (B, L, d_model) times ``weight`` (d_model,), the norm's."""
        x, gate = self.fc1(normed * weight.to(normed.dtype)).chunk(2, dim=-1)
        return self.fc2(x * F.silu(gate))


class Block(nn.Module):
    """Compute ``residual + mixer(norm(residual))``, the residual stream in float32 or wider.

    With ``d_intermediate`` also ``residual + mlp(norm2(residual))`` behind it.

    Args:
        mixer: a module as ``packmamba.nn.mixers`` describes.
        norm_epsilon: of RMSNorm.
        recompute: the backward computes the whole mixer again from its input (activation
            checkpointing), and the MLP.
        d_intermediate: as of MambaLM.
    """

    def __init__(self, mixer: Any, norm_epsilon: float, recompute: bool = False, d_intermediate: int = 0) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = nn.RMSNorm(mixer.d_model, eps=norm_epsilon)
        self.recompute = recompute
        self.mlp: Any = None
        if d_intermediate:
            self.norm2 = nn.RMSNorm(mixer.d_model, eps=norm_epsilon)
            self.mlp = GatedMLP(mixer.d_model, d_intermediate)

    def forward(
        self, residual: Tensor, normed: Tensor, *layouts_and_state: Any
    ) -> tuple[Tensor, Tensor, State | None]:
        """Return the stream behind the block and its norm (both B, L, d_model), and final states.

        Args:
            residual, normed: (B, L, d_model), the stream before the block, and the same as
                ``add_norm`` normalises it.
            layouts_and_state: conv_layout, ssm_layout, state, return_state, as of ``Mixer.mix``.
        """
        mixed, state = call(self.mixer.mix, normed, self.norm.weight, *layouts_and_state, recompute=self.recompute)
        residual, normed = add_norm(residual, mixed, self.norm.eps)
        if self.mlp is not None:
            mixed = call(self.mlp, normed, self.norm2.weight, recompute=self.recompute)
            residual, normed = add_norm(residual, mixed, self.norm2.eps)
        return residual, normed, state


def add_norm(residual: Tensor, mixed: Tensor, epsilon: Any) -> tuple[Tensor, Tensor]:
    """Return residual + mixed, and the same divided by its root mean square: both (B, L, d_model).

    Args:
        residual: (B, L, d_model), float32 or wider, as is the sum.
        mixed: what broadcasts to residual; its dtype is that of the normalised sum.
        epsilon: is added to the mean square.
    """
    if is_transforming():  # torch.func takes no function with a backward of its own
        residual, normed, _ = _add_norm(residual, mixed, epsilon)
        return residual, normed
    return _AddNorm.apply(residual, mixed, epsilon)[:2]


def _add_norm(residual: Tensor, mixed: Tensor, epsilon: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return also the factor by which the sum is multiplied, (B, L, 1)."""
    residual = residual + mixed
    scale = torch.rsqrt(residual.square().mean(-1, keepdim=True) + epsilon)
    normed = residual * scale
    if normed.dtype != mixed.dtype:
        # A ``to`` of the same dtype compiles into an output without a gradient (torch 2.11).
        normed = normed.to(mixed.dtype)
    return residual, normed, scale


class _AddNorm(torch.autograd.Function):
    """Differentiate ``add_norm`` from the normalised sum and its factor alone.

    With r the sum, s the factor and n = r s, gradients dn of n and ds of s add
    ``s (dn - n (mean(dn n) + ds s / d_model))`` to that of r. The factor is a result, with a
    gradient of zero but in second derivatives, since autograd takes what a function saves beside
    arguments and results for constant.
    """

    @staticmethod
    def forward(ctx: Any, residual: Tensor, mixed: Tensor, epsilon: Any) -> tuple[Tensor, Tensor, Tensor]:
        residual, normed, scale = _add_norm(residual, mixed, epsilon)
        ctx.save_for_backward(normed, scale)
        return residual, normed, scale

    @staticmethod
    def backward(ctx: Any, dresidual: Tensor, dnormed: Tensor, dscale: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale = ctx.saved_tensors
        dnormed = dnormed.to(scale.dtype)
        along = (dnormed * normed).mean(-1, keepdim=True) + dscale * scale / normed.shape[-1]
        dresidual = dresidual + scale * (dnormed - normed * along)
        return dresidual, dresidual.to(normed.dtype), None
