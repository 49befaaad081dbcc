"""Call a model or a callable for documents' logits.

Shapes: L slots, V vocabulary, R x W a model's rows.
"""

import inspect
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from packmamba.errors import expect
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM

# Boundary arguments of models.
ARGUMENTS = ("position_ids", "seq_idx", "cu_seq_lens_q", "attention_mask")


class CheckedCallable:
    """Call a function of tokens (1, L) and lengths.

    Attributes:
        inputs: "packed", or sides of padding beside a document in a row of its own.
        padding: further sides, checked beside ``inputs``.
        boundaries: how documents are marked; ``optional``: by an argument that may be left out.
        vocab_size: V; 0: the logits' width.
        avoid: special ids, which no document gets.
        longest: maximum slots of a row.
    """

    inputs: tuple[str, ...] = ("packed",)
    padding: tuple[str, ...] = ()
    optional = False
    avoid: Set[int] = frozenset()

    def __init__(
        self, call: Callable[..., Any], modules: list[nn.Module], boundaries: str, vocab_size: int, longest: int
    ) -> None:
        self.call, self.modules = call, modules
        self.boundaries, self.vocab_size, self.longest = boundaries, vocab_size, longest

    @property
    def device(self) -> torch.device:
        """Return the device on which tokens are given."""
        parameters = (p for module in self.modules for p in module.parameters())
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    def packed(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """Return the logits (1, L, V) of packed documents."""
        return self.call(tokens, lengths)

    def padded(self, rows: Tensor, in_document: Tensor) -> Tensor:
        """Return the logits (R, W, V) of rows as they are.

        Their documents lie where the call knows.
        """
        return self.call(rows)

    def alone(self, tokens: Tensor) -> Tensor:
        """Return the logits (1, L, V) of one document, without a boundary argument."""
        return self.packed(tokens, [tokens.shape[1]])


class CheckedModel(CheckedCallable):
    """Call a model that takes ``input_ids`` and boundary arguments."""

    optional = True

    def __init__(self, model: nn.Module, boundaries: str, vocab_size: int | None) -> None:
        # Several arguments may mark documents together, as transformers' collator does.
        self.names = tuple(boundaries.split("+")) if isinstance(boundaries, str) else ()
        masked = self.names == ("attention_mask",)
        valid = masked or (self.names and set(self.names) <= set(ARGUMENTS[:3]))
        expect(valid, "boundaries", f"{', '.join(ARGUMENTS)} (the first three joined by +)", repr(boundaries))
        self.parameters, self.open_ended = forward_parameters(model)
        if masked:
            # A mask marks padding: rows of one document. A packed
            # model with a mask is checked for padding, too.
            self.inputs = ("left", "right")
        elif self.takes("attention_mask"):
            self.padding = ("left", "right")
        config = getattr(model, "config", None)
        # A cache would carry states from one call to the next.
        caches = "use_cache" in self.parameters or hasattr(config, "use_cache")
        self.no_cache = {"use_cache": False} if caches else {}
        # Models with vision or audio keep the text model's configuration inside.
        text_config = getattr(config, "text_config", None) or config
        num_ids = getattr(text_config, "vocab_size", None) or 0
        expect(not 0 < num_ids < (vocab_size or 0), "vocab_size", f"at most {num_ids}", vocab_size)
        longest = getattr(text_config, "max_position_embeddings", None) or 2**31
        super().__init__(model, [model], boundaries, vocab_size or num_ids, longest)
        # Keys such as pad_token_id, of which some hold lists.
        keys = getattr(config, "__dict__", {}).items()
        special = [value for name, value in keys if name.endswith("_token_id")]
        self.avoid = {number for number in tree_leaves(special) if isinstance(number, int)}

    def takes(self, argument: str) -> bool:
        """Tell whether the model's forward has an argument."""
        return self.open_ended or argument in self.parameters

    def packed(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """Compute the logits of documents packed in rows, told where they lie."""
        layout = SequenceLayout.from_lengths([lengths], tokens.shape[1]).to(tokens.device)
        marks = dict(zip(ARGUMENTS, (layout.position_indices.long(), layout.seq_idx, layout.cu_seqlens)))
        arguments: dict[str, Any] = {name: marks[name] for name in self.names}
        if "cu_seq_lens_q" in self.names:  # as transformers' DataCollatorWithFlattening
            further: dict[str, Any] = {"cu_seq_lens_k": layout.cu_seqlens}
            further |= dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
            arguments |= {name: value for name, value in further.items() if self.takes(name)}
        return self._logits(tokens, **arguments)

    def padded(self, rows: Tensor, in_document: Tensor) -> Tensor:
        """Compute the logits of padded rows, told which slots are tokens."""
        return self._logits(rows, attention_mask=in_document.long())

    def alone(self, tokens: Tensor) -> Tensor:
        """Compute the logits of one document in a row of its own."""
        # A patched model refuses tokens without boundaries, so one document gets its positions.
        if getattr(self.call, "require_boundaries", False):
            return self._logits(tokens, position_ids=torch.arange(tokens.shape[1], device=tokens.device)[None])
        return self._logits(tokens)

    def _logits(self, tokens: Tensor, **arguments: Any) -> Tensor:
        return logits_in(self.call(input_ids=tokens, **self.no_cache, **arguments))


def logits_in(output: Any) -> Any:
    """Return the logits of a model's output: an attribute, a key, a tuple's first, or itself."""
    output = output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)
    return output if isinstance(output, Tensor) else output[0]


def adapt(model: Any, boundaries: str, vocab_size: int | None) -> CheckedCallable:
    """Adapt a transformers model, a MambaLM or a callable. Raises TypeError or ValueError."""
    callable_ = callable(model) and not isinstance(model, type)
    expect(callable_, "model_or_callable", "a model or a callable", f"{model!r:.60}", TypeError)
    wrapped = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    got = f"{type(model).__name__}; give its module"
    expect(not wrapped, "model_or_callable", "the model itself", got, TypeError)
    ours = isinstance(model_inside(model), MambaLM)
    if not ours and isinstance(model, nn.Module) and "input_ids" in forward_parameters(model)[0]:
        return CheckedModel(model, boundaries, vocab_size)
    marked_by = "layout" if ours else "lengths"
    expect(boundaries in ("position_ids", marked_by), "boundaries", f"none beside {marked_by}", repr(boundaries))
    if not ours:
        modules = [model] if isinstance(model, nn.Module) else _modules_of(model)
        return CheckedCallable(model, modules, marked_by, vocab_size or 32, 128)

    def call(tokens: Tensor, lengths: list[int]) -> Tensor:
        layout = SequenceLayout.from_lengths([lengths], sum(lengths))
        return model(tokens, layout=layout.to(tokens.device))

    return CheckedCallable(call, [model], marked_by, vocab_size or len(model.lm_head.weight), 2**31)


def model_inside(model: Any) -> Any:
    """Return the model whose forward PEFT's and torch.compile's wrappers call."""
    model = getattr(model, "get_base_model", lambda: model)()
    return getattr(model, "_orig_mod", model)


def forward_parameters(model: nn.Module) -> tuple[dict[str, Any], bool]:
    """Return the parameters of a model's forward, and whether it takes any keyword."""
    parameters = dict(inspect.signature(model_inside(model).forward).parameters)
    return parameters, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _modules_of(function: Any) -> list[nn.Module]:
    """List the modules that a callable binds, encloses or names in its code."""
    # Its arguments, its object, its closure and the globals that its code names.
    found: list[Any] = []
    if isinstance(function, partial):
        found += [*function.args, *function.keywords.values()]
        function = function.func
    found += [getattr(function, "__self__", None), *getattr(function, "__dict__", {}).values()]
    if inspect.isfunction(inner := getattr(function, "__func__", function)):
        enclosed = inspect.getclosurevars(inner)
        found += [*enclosed.nonlocals.values(), *enclosed.globals.values()]
    # One level down: a module may be an attribute of what was found, as in a wrapper class.
    for owner in list(found):
        plain = not isinstance(owner, (nn.Module, type)) and not inspect.ismodule(owner)
        if plain and not inspect.isroutine(owner) and hasattr(owner, "__dict__"):
            found += vars(owner).values()
    return list(dict.fromkeys(module for module in found if isinstance(module, nn.Module)))
