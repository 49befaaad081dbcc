"""Change other documents and see what moves: bits of logits, gradients, outputs of modules.

Shapes: L slots of packed documents, V vocabulary, R x W a model's rows.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from packmamba.errors import expect
from packmamba.isolation.adapters import CheckedCallable

SEED = 0
PAD = 4  # slots of padding beside the longest document


@dataclass
class Documents:
    """Hold documents, what replaces their tokens, and how they lie in a model's rows.

    Rows are packed, or hold one document each, padded on the left or right with neighbours' tokens.

    Attributes:
        way: "packed"; "left" or "right", the side of padding; or "as trained", a batch's own rows.
        tokens, others: (L,) int64 ids, the documents' and what replaces them.
        number: (L,), each slot's document.
        slots: (R, W), the packed slots of the rows' tokens; ``in_document``: (R, W) bool.
    """

    model: CheckedCallable
    way: str
    lengths: list[int]
    tokens: Tensor
    others: Tensor
    number: Tensor
    slots: Tensor
    in_document: Tensor

    def in_rows(self, marks: Tensor) -> Tensor:
        """Arrange marks of packed slots (L,) in rows (R, W)."""
        return marks[self.slots] & self.in_document

    def probes(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield changed tokens (L,), and the slots (L,) whose logits must not change.

        Change the first document's last token, the last one's first, then all around each
        document, to its own first token, which competes with it most for experts' capacity.
        """
        count = len(self.lengths)
        slot = torch.arange(len(self.tokens), device=self.tokens.device)
        last_of_first = slot == self.lengths[0] - 1
        yield torch.where(last_of_first, self.others, self.tokens), self.number != 0
        first_of_last = slot == len(slot) - self.lengths[-1]
        yield torch.where(first_of_last, self.others, self.tokens), self.number != count - 1
        for number in range(count):
            document = self.number == number
            yield torch.where(document, self.tokens, self.tokens[document][0]), document

    def call(self, tokens: Tensor) -> Tensor:
        """Return the packed documents' logits (1, L, V) of tokens (1, L)."""
        if self.way == "packed":
            return self.model.packed(tokens, self.lengths)
        return self.model.padded(tokens[0][self.slots], self.in_document)[self.in_document][None]

    def logits(self, tokens: Tensor | None = None) -> Tensor:
        """Compute the logits of packed tokens."""
        return logits_of(self.call, self.tokens if tokens is None else tokens)

    def alone(self) -> list[Tensor]:
        """Return the logits of each document by itself."""
        return [logits_of(self.model.alone, tokens) for tokens in self.tokens.split(self.lengths)]


def draw(model: CheckedCallable, way: str, lengths: Sequence[int]) -> Documents:
    """Draw tokens of documents and others in their place, and arrange them in a model's rows."""
    device = model.device
    ids = torch.tensor([i for i in range(model.vocab_size) if i not in model.avoid], device=device)
    expect(len(ids) > 1, "vocab_size", "two ids that are not special", len(ids))
    total = sum(lengths)
    # Its own generator: the global one stays.
    drawn = torch.randint(len(ids), (total,), generator=torch.Generator().manual_seed(1)).to(device)
    # Half of the vocabulary on, so that no token is replaced by itself.
    others = ids[(drawn + max(1, len(ids) // 2)) % len(ids)]
    counts = torch.tensor(lengths, device=device)
    number = torch.arange(len(counts), device=device).repeat_interleave(counts)
    if way == "packed":
        row_lengths, width = counts.sum()[None, None], total
    else:
        # Rows of one document: PAD slots beside the longest, whose tokens are the neighbours'.
        row_lengths, width = counts[:, None], max(lengths) + PAD
    ends = row_lengths.cumsum(0)
    place = torch.arange(width, device=device)
    # Slot of each place in the rows, by document: padding on the left comes before its tokens.
    place = place + ends - (width if way == "left" else row_lengths)
    in_document = (place >= ends - row_lengths) & (place < ends)
    return Documents(model, way, list(lengths), ids[drawn], others, number, place % total, in_document)


@contextmanager
def undisturbed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore torch's random states, modes and buffers on leaving."""
    modes = [(module, module.training) for root in modules for module in root.modules()]
    buffers = []
    for module, _ in modes:
        for name, buffer in module.named_buffers(recurse=False):
            buffers.append((module, name, buffer, buffer.clone()))
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    # A cached cast of a weight would be a constant for gradients that are taken later.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.random.fork_rng(devices=devices), torch.inference_mode(False):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                # Keep the very buffer where nothing changed: code may hold a reference to it.
                module._buffers[name] = buffer if torch.equal(buffer, value) else buffer.copy_(value)


def eager() -> AbstractContextManager[Any]:
    """Run compiled code eagerly, so that hooks see into it."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def logits_of(call: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Return logits (L, V); dropout drops the same in each call."""
    torch.manual_seed(SEED)
    logits = call(tokens[None])
    floating = isinstance(logits, Tensor) and logits.is_floating_point()
    expect(floating, "logits", "floating-point numbers", getattr(logits, "dtype", type(logits)), TypeError)
    fits = logits.dim() == 3 and logits.shape[:2] == (1, len(tokens))
    expect(fits, "logits", f"shape (1, {len(tokens)}, vocabulary)", tuple(logits.shape))
    return logits[0]


def moved(after: Tensor, before: Tensor) -> Tensor:
    """Mark values that differ by any bit; NaN equals NaN."""
    return (after != before) & ~(after.isnan() & before.isnan())


def by_slot(values: Tensor, rows: int, width: int) -> Tensor | None:
    """Reduce marks of a module's tensor to slots (R, W); None: no such axis."""
    # Tokens flattened to (R W, ...), as before a projection of all tokens.
    if values.dim() and values.shape[0] == rows * width:
        return values.reshape(rows, width, -1).any(-1)
    if values.dim() < 2 or values.shape[0] != rows:
        return None
    # The first axis of length W: (R, W, D), or channels first (R, D, W).
    axis = next((i for i in range(1, values.dim()) if values.shape[i] == width), None)
    if axis is None:
        # A Conv1d that pads both sides returns some slots more than it got: cut off the last.
        if not width < values.shape[-1] <= width + 8:
            return None
        axis, values = values.dim() - 1, values.narrow(-1, 0, width)
    return values.movedim(axis, 1).reshape(rows, width, -1).any(-1)


class Entries(TorchFunctionMode):
    """Capture tokens' embeddings, to differentiate by.

    They are what ids become when they become floating-point numbers.
    """

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.leaves: list[Tensor] = []
        self._whole = {id(tokens): tokens}  # by identity: tensors computed from all tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        of_tokens = any(id(leaf) in self._whole for leaf in tree_leaves((args, kwargs)))
        if not (of_tokens and isinstance(result, Tensor)):
            return result
        # Still no floating-point numbers (shifted ids, a mask): follow what is computed of them.
        if not result.is_floating_point():
            return self._whole.setdefault(id(result), result)
        # The embeddings become leaves of autograd: the loss is differentiated by them.
        if not result.requires_grad:
            result = result.detach().requires_grad_()
        self.leaves.append(result)
        return result.clone()


def crossing_gradients(documents: Documents) -> bool | None:
    """Return whether some documents' loss has a gradient (NaN too) outside of them.

    Of every other document, of those between, of the last. None: no gradient can be taken.
    """
    torch.manual_seed(SEED)
    tokens, number = documents.tokens[None], documents.number
    with torch.enable_grad(), eager():
        with Entries(tokens) as entries:
            logits = documents.call(tokens)[0]
        if not logits.requires_grad or not entries.leaves:
            return None
        # reached: a gradient inside its documents, without which zero outside means nothing.
        crossed, reached = False, False
        for inside in (number % 2 == 0, number % 2 == 1, number == number[-1]):
            loss_slots = documents.in_rows(inside)
            try:
                gradients = _gradients(logits[inside], entries.leaves)
            except RuntimeError as error:  # reentrant checkpointing takes backward() alone
                if "heckpoint" not in str(error):
                    raise
                return None
            for gradient in gradients:
                marks = None if gradient is None else by_slot(gradient != 0, *loss_slots.shape)
                if marks is not None:
                    crossed |= bool((marks & ~loss_slots).any())
                    reached |= bool((marks & loss_slots).any())
    return crossed if crossed or reached else None


def _gradients(logits: Tensor, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Differentiate a randomly weighted sum of finite logits by the leaves; keep the graph."""
    # Random weights: a plain sum of logits could cancel what crosses.
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(SEED)).to(logits)
    loss = torch.where(logits.isfinite(), logits * weights, 0.0).sum()
    return torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)


class Watch(TorchDispatchMode):
    """Note products' dtypes, and routing: some tokens decide the shapes of products of others."""

    ROUTING = {"topk", "sort", "argsort", "argmax", "bincount", "histc", "_grouped_mm"}
    supports_higher_order_operators = True
    routed = False

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), str(func)
        self.routed = self.routed or not self.ROUTING.isdisjoint(name.split("."))
        # Products decide the rounding; an operator that is not ATen's may be one.
        if not name.startswith("aten.") or any(part in name for part in ("mm", "conv", "attention")):
            tensors = (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor))
            self.dtypes.update(tensor.dtype for tensor in tensors)
        return result


def first_module(documents: Documents, tokens: Tensor, watched: Tensor) -> str | None:
    """Name the first module whose output changes with these tokens while its input does not.

    Both are compared at ``watched`` slots (L,).
    """
    # Slots (R, W) at which nothing should change.
    marks = documents.in_rows(watched)
    # Two passes, the second with other tokens. A call
    # is known by its module's name and its number.
    titles: list[str] = []
    calls: dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]] = {}
    counts: Counter[str] = Counter()

    def differ(before: list[Tensor], after: list[Tensor]) -> bool:
        pairs = [pair for pair in zip(before, after) if pair[0].shape == pair[1].shape]
        slots = [by_slot(moved(*pair), *marks.shape) for pair in pairs]
        return any(bool((marks & changed).any()) for changed in slots if changed is not None)

    def record(title: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        counts[title] += 1
        is_output_class = hasattr(result, "__dict__") and not isinstance(result, Tensor)
        outputs = _tensors(vars(result) if is_output_class else result)
        inputs = _tensors((args, kwargs))
        # The first pass stores inputs and outputs, the second compares with them.
        before = calls.setdefault((title, counts[title]), (inputs, outputs))
        if before[1] is not outputs and differ(before[1], outputs) and not differ(before[0], inputs):
            titles.append(title)

    with ExitStack() as hooks, torch.no_grad(), eager():
        for root in documents.model.modules:
            for name, module in root.named_modules():
                title = f"{name} ({type(module).__name__})" if name else type(module).__name__
                hook = functools.partial(record, title)
                hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        for row in (documents.tokens, tokens):
            counts.clear()
            documents.logits(row)
    return titles[0] if titles else None


def _tensors(tree: Any) -> list[Tensor]:
    """Copy the tensors of nested containers."""
    return [leaf.clone() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
