"""The Mamba language model on packed documents. Shapes: B rows, L slots, S documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packmamba.errors import expect
from packmamba.layout import SequenceLayout
from packmamba.nn.block import RECOMPUTE, Block, add_norm
from packmamba.nn.init import Embedding, Head, whole_parameters
from packmamba.nn.mixers import MIXERS, State
from packmamba.nn.pretrained import find_folder, load_weights, read_pretrained, write_pretrained
from packmamba.ops.checks import check_flags, check_layout, check_size


class MambaLM(nn.Module):
    """Predict tokens by blocks between an embedding and a head (Mamba, arXiv 2312.00752).

    Args:
        vocab_size, d_model, n_layer: rows of the embedding, width of the residual stream, blocks.
        tie_embeddings: share the embedding's weight with the head. ``norm_epsilon``: of RMSNorm.
        recompute: activations that the backward recomputes: "none"; "inner", the convolution's output and delta (compiled
            kernels only); "block", all but each block's input (activation checkpointing).
        mixer: a name in ``packmamba.nn.mixers.MIXERS``; options: its own.

    Raises TypeError or ValueError.
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
        **options: Any,
    ) -> None:
        super().__init__()
        for name, value, known in (("recompute", recompute, RECOMPUTE), ("mixer", mixer, tuple(MIXERS))):
            expect(value in known, name, f"one of {', '.join(known)}", repr(value))
        for name, size in (("vocab_size", vocab_size), ("d_model", d_model), ("n_layer", n_layer)):
            check_size(name, size, 2**32 if name == "vocab_size" else 2**20)
        check_flags(tie_embeddings=tie_embeddings)
        self.config = dict(
            vocab_size=vocab_size, d_model=d_model, n_layer=n_layer, tie_embeddings=tie_embeddings,
            norm_epsilon=norm_epsilon, mixer=mixer, **options,
        )  # fmt: skip
        embedding = Embedding(vocab_size, d_model)
        mixers = [MIXERS[mixer](d_model, recompute=recompute == "inner", **options) for _ in range(n_layer)]
        layers = [Block(mixer, norm_epsilon, recompute == "block") for mixer in mixers]
        for layer in layers:
            layer.mixer.initialise_in_stack(n_layer)
        norm = nn.RMSNorm(d_model, eps=norm_epsilon)
        self.backbone: Any = nn.ModuleDict(
            {"embedding": embedding, "layers": nn.ModuleList(layers), "norm_f": norm}
        )
        self.lm_head = Head(d_model, vocab_size, bias=False)
        if tie_embeddings:
            self.lm_head.tie(embedding)
        self._start = add_norm

    def init_weights(self) -> None:
        """Initialise every parameter as a fresh model's under the same seed, and tie the head again.

        For a model that was made on the device ``meta`` and emptied (``to_empty``), whole or
        sharded by FSDP2: there all ranks call it, and rank 0's draws count. Raises TypeError for a
        plugin's mixer without ``reset_parameters``.
        """
        layers = self.backbone.layers
        for layer in layers:
            fits = hasattr(layer.mixer, "reset_parameters")
            expected = "a module with reset_parameters (docs/extend.md)"
            expect(fits, "mixer", expected, type(layer.mixer).__name__, TypeError)
        self.backbone.embedding.reset_parameters()
        for layer in layers:
            with whole_parameters(layer.mixer):  # a plugin's knows of no shards
                layer.mixer.reset_parameters()
                layer.mixer.initialise_in_stack(len(layers))
            layer.norm.reset_parameters()
        self.backbone.norm_f.reset_parameters()
        self.lm_head.reset_parameters()

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, revision: str | None = None, **overrides: Any
    ) -> MambaLM:
        """Load a published checkpoint of state-spaces' or Hugging Face's format, in one file or in shards.

        Args:
            directory: a folder, or else a Hub's name such as state-spaces/mamba-130m, downloaded at ``revision``.
            overrides: further arguments of MambaLM, such as ``backend``.

        Raises FileNotFoundError; ValueError for another configuration, or naming the first weight that does not fit it.
        """
        arguments, weights = read_pretrained(find_folder(directory, revision))
        model = cls(**(arguments | overrides))
        load_weights(model, weights, directory)
        return model

    def save_pretrained(self, directory: str | Path, format: str = "state_spaces") -> None:
        """Write a folder that ``from_pretrained`` reads. Raises ValueError for what ``format`` cannot hold.

        format: "state_spaces", which mamba-ssm reads (without learned initial states and other norm_epsilon), or "huggingface",
        which transformers' AutoModelForCausalLM reads.
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
        """Compute logits (B, L, vocab_size) of tokens (B, L), and with ``return_states`` a list of final states by layer.

        Args:
            tokens: int64 or int32 ids; at padding any valid id, whose logits are finite and meaningless.
            layout: where documents lie; None: each row is one.
            conv_layout, ssm_layout: instead of ``layout`` in the convolutions or the scans; ``layout.flow()`` leaks.
            states: initial states by layer, as the mixer's ``start_state`` has them, of the documents of conv_layout and
                ssm_layout; None: zero, or the learned states.
            return_hidden: return the head's input (B, L, d_model) instead of logits: for ``linear_cross_entropy``.

        Raises TypeError or ValueError.
        """
        got = getattr(tokens, "dtype", type(tokens).__name__)
        expect(got in (torch.int32, torch.int64), "tokens", "an int64 or int32 tensor", got, TypeError)
        whole = tokens.dim() == 2 and 0 not in tokens.shape
        expect(whole, "tokens", "shape (B, L) with at least one slot", tuple(tokens.shape))
        layers = self.backbone.layers
        given: Any = [None] * len(layers) if states is None else states
        expect(len(given) == len(layers), "states", f"one per layer, {len(layers)}", len(given))
        layout = check_layout(layout, tokens, "tokens")
        layouts = tuple(layout if own is None else own for own in (conv_layout, ssm_layout))
        try:
            embedded = self.backbone.embedding(tokens)
        except IndexError:
            ids = f"{int(tokens.min())} to {int(tokens.max())}"
            raise ValueError(
                f"tokens: expected ids from 0 to {len(self.lm_head.weight) - 1}, got {ids}"
            ) from None
        residual = embedded.to(torch.promote_types(embedded.dtype, torch.float32))
        norm_f, kind = self.backbone.norm_f, tokens.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else norm_f.weight.dtype
        residual, normed = self._start(residual, embedded.new_zeros(()).to(dtype), norm_f.eps)
        final_states = []
        for layer, state in zip(layers, given):
            residual, normed, state = layer(residual, normed, *layouts, state, return_states)
            final_states.append(state)
        hidden = normed * norm_f.weight.to(normed.dtype)
        result = hidden if return_hidden else self.lm_head(hidden)
        return (result, final_states) if return_states else result

    def compile_blocks(self, **options: Any) -> None:
        """Compile by torch.compile with ``options``, once for all blocks and layouts."""
        for layer in self.backbone.layers:
            layer.compile(**options)
        self._start = torch.compile(add_norm, **options)

    def start_states(self, documents: int) -> list[State]:
        """Return initial states of documents, by layer."""
        return [layer.mixer.start_state(documents) for layer in self.backbone.layers]

    def weight_decay_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return optimizer groups: matrices decay, without those that mixers exempt."""
        groups: tuple[list, list] = [], []
        exempt = tuple(f".mixer.{name}" for name in MIXERS[self.config["mixer"]].NO_WEIGHT_DECAY)
        for name, parameter in self.named_parameters():
            # By name: copies and shards of a parameter lose its _no_weight_decay.
            groups[parameter.dim() < 2 or name.endswith(exempt)].append(parameter)
        return [
            {"params": groups[0], "weight_decay": weight_decay},
            {"params": groups[1], "weight_decay": 0.0},
        ]
