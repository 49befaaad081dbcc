"""Language-modelling evaluations on validation documents: loss, loss by position, context gain, remembrance.

Documents are read from a zero state. Losses are nats per target token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packmamba.config import ConfigError
from packmamba.data.token_store import Corpus, evaluation_documents, load_corpora
from packmamba.evaluation.load import EvalContext, EvalResult
from packmamba.evaluation.packed_forward import (
    Reader,
    TrainingLayoutReader,
    log_probabilities,
    predict_documents,
    read_documents,
)
from packmamba.nn import MambaLM

Losses = list[NDArray[np.float64]]


def token_losses(
    model: MambaLM, documents: Sequence[Any], max_slots: int = 16384, reader: Reader | None = None
) -> Losses:
    """Return for each document of n tokens the (n - 1,) losses of tokens 1 to n - 1; ``reader``: not from zero states."""

    def targets(i: int, start: int, end: int) -> tuple[slice, Any]:
        wanted = documents[i][start + 1 : end + 1]
        return slice(len(wanted)), wanted

    reader = reader or functools.partial(read_documents, model, [document[:-1] for document in documents], max_slots)
    return [losses for losses, _ in predict_documents(model, reader, targets, len(documents))]


def sums_between(edges: Sequence[int], losses: NDArray[np.float64]) -> list[float]:
    """Sum a document's losses at positions [edges[i], edges[i + 1]); its first target has position 1."""
    return [
        float(losses[max(start, 1) - 1 : end - 1].sum())
        for start, end in zip(edges, edges[1:])
        if max(start, 1) <= len(losses)
    ]


def means_between(
    edges: Sequence[int], sums: Sequence[Sequence[float]], lengths: Sequence[int]
) -> list[dict[str, float]]:
    """Average losses by position from documents' ``sums_between`` and numbers of targets."""
    rows = []
    for i, (start, end) in enumerate(zip(edges, edges[1:])):
        reach = [n for n, some in enumerate(sums) if len(some) > i]
        count = sum(min(end - 1, lengths[n]) - max(start, 1) + 1 for n in reach)
        if count:
            loss = sum(sums[n][i] for n in reach) / count
            rows.append({"start": start, "end": end, "loss": loss, "count": count, "documents": len(reach)})
    return rows


class Validation(NamedTuple):
    """Hold an evaluation's documents, their numbers in the corpus, and its options."""

    corpus: Corpus
    numbers: list[int]
    documents: list[np.ndarray]
    options: dict[str, int]

    def group(self, i: int) -> dict[str, int]:
        return {} if self.corpus.groups is None else {"group": int(self.corpus.groups[self.numbers[i]])}


OPTIONS: dict[str, dict[str, tuple[int | None, int]]] = {
    "positions": {"window": (None, 2), "most": (64, 2)},
    "long_context": {"window": (None, 2), "most": (64, 2), "context": (0, 0), "documents": (1, 1), "groups": (1, 1)},
    "remembrance": {"length": (None, 4)},
}
"""For each evaluation its integer options: default (None: the row length) and minimum."""


def validation(name: str, context: EvalContext, vocab_size: int | None) -> Any:
    """Return a ``Validation``; None while the vocabulary size is unknown. Raises ConfigError."""
    known, options = OPTIONS.get(name, {}), {}
    for option in context.options.keys() - known:
        raise ConfigError(f"{context.key}.{name}: expected options of {', '.join(known) or 'none'}, got '{option}'")
    for option, (default, minimum) in known.items():
        value = context.options.get(option, (context.data.row_length or 1024) if default is None else default)
        if type(value) is not int or value < minimum:
            key = f"{context.key}.{name}.{option}"
            raise ConfigError(f"{key}: expected an integer of at least {minimum}, got {value!r}")
        options[option] = value
    if vocab_size is None:
        return None
    corpus = load_corpora(context.data).validation
    if corpus.vocab_size > vocab_size:
        raise ConfigError(f"data.tokenizer: expected at most {vocab_size} tokens, got {corpus.vocab_size}")
    numbers = evaluation_documents(corpus, context.data).tolist()
    documents = [corpus.document(number) for number in numbers]
    needed = max(1, next(iter(options.values()), 1) * (2 if name == "long_context" else 1))
    if (longest := max(map(len, documents), default=0)) < needed:
        raise ConfigError(f"{name}: expected a validation document of at least {needed} tokens, got at most {longest}")
    return Validation(corpus, numbers, documents, options)


def perplexity(model: MambaLM, context: EvalContext) -> EvalResult:
    """Evaluate loss, bits per byte and loss by position; the loss as trained too."""
    texts = validation("perplexity", context, len(model.lm_head.weight))
    losses = {"": token_losses(model, texts.documents, context.max_slots)}
    boundary = context.boundary()
    if boundary.as_trained:
        rows = TrainingLayoutReader(texts.documents, context.data, boundary)
        losses["_as_trained"] = token_losses(model, texts.documents, reader=functools.partial(rows.read, model))
    targets = [len(some) for some in losses[""]]
    edges = [2**i for i in range(max(targets).bit_length() + 1)]
    items: list[dict[str, Any]] = []
    for i, document in enumerate(texts.documents):
        size = _bytes(document, texts.corpus, context.tokenizer)
        items.append({"document": texts.numbers[i], "targets": targets[i], "bytes": size, **texts.group(i)})
        for suffix, some in losses.items():
            sums = sums_between(edges, some[i])
            items[-1] |= {"nats" + suffix: float(some[i].sum()), "octaves" + suffix: sums}
    sizes = [item["bytes"] for item in items]
    nats = {suffix: sum(item["nats" + suffix] for item in items) for suffix in losses}
    metrics = {
        "loss": nats[""] / sum(targets),
        "bits_per_byte": nats[""] / math.log(2) / sum(sizes) if all(sizes) else float("nan"),
        "targets": sum(targets),
        "documents": len(items),
    }
    if boundary.as_trained:
        metrics["loss_as_trained"] = nats["_as_trained"] / sum(targets)
    curves = {"by_position": means_between(edges, [item["octaves"] for item in items], targets)}
    if texts.corpus.groups is not None:
        buckets = [
            {"start": start, "targets": min(2 * start - 1, item["targets"]) - start + 1, "group": item["group"]}
            | {"nats" + suffix: item["octaves" + suffix][i] for suffix in losses}
            for item in items
            for i, start in enumerate(edges[: len(item["octaves"])])
        ]
        curves["by_group"] = _by_group(buckets, "start", ["targets", *("nats" + suffix for suffix in losses)])
    return EvalResult(metrics, curves, items, texts.corpus.corpus_hash)


def _bytes(document: np.ndarray, corpus: Corpus, tokenizer: Any) -> int:
    """Count the bytes of a document's text; 0 without a tokenizer."""
    if tokenizer is None:
        return 0
    own = document[~np.isin(document, [i for i in (corpus.begin_id, corpus.end_id) if i is not None])]
    return len(tokenizer.decode(own).encode("utf-8", "replace"))


def _by_group(items: list[dict[str, Any]], key: str, sums: Sequence[str]) -> list[dict[str, float]]:
    """Sum over each group's documents, for intervals over groups."""
    points: dict[tuple[Any, ...], dict[str, float]] = {}
    for item in items:
        place = {key: item[key], "group": item["group"]}
        point = points.setdefault(tuple(place.values()), {**place, "documents": 0, **dict.fromkeys(sums, 0.0)})
        point["documents"] += 1
        for name in sums:
            point[name] += item[name]
    return list(points.values())


def positions(model: MambaLM, context: EvalContext) -> EvalResult:
    """Evaluate the loss by position; buckets double from a sixteenth of a window to ``most`` windows."""
    texts = validation("positions", context, len(model.lm_head.weight))
    window, most = texts.options["window"], texts.options["most"]
    edges = sorted({0, *(window >> i for i in range(1, 5)), *(window << i for i in range(most.bit_length()))})
    losses = token_losses(model, [document[: edges[-1]] for document in texts.documents], context.max_slots)
    items: list[dict[str, Any]] = [
        {"document": texts.numbers[i], "targets": len(some), "sums": sums_between(edges, some), **texts.group(i)}
        for i, some in enumerate(losses)
    ]
    points = means_between(edges, [item["sums"] for item in items], [item["targets"] for item in items])
    metrics = {f"loss_{point['end'] // window:.0f}": point["loss"] for point in points if point["end"] >= window}
    return EvalResult(metrics | {"documents": len(items)}, {"by_window": points}, items, texts.corpus.corpus_hash)


def long_context(model: MambaLM, context: EvalContext) -> EvalResult:
    """Evaluate the context gain at k = 2, 4, ... ``most`` windows that ``documents`` documents of ``groups`` groups reach.

    The gain is the mean loss of tokens (k - 1) * window + 1 to k * window - 1 read from token (k - 1) * window - ``context``,
    minus their mean loss read from the document's start. With context = window, the gain is what states carry beyond one row
    of training; it begins at 4 windows.
    """
    texts = validation("long_context", context, len(model.lm_head.weight))
    window, most, before, least, least_groups = texts.options.values()
    group = [texts.group(i).get("group", number) for i, number in enumerate(texts.numbers)]
    places: list[tuple[int, int, int]] = []  # document, k, first token
    k, end = 2, 0
    while k <= most:
        reach = [i for i, document in enumerate(texts.documents) if len(document) >= k * window]
        if len(reach) < least or len({group[i] for i in reach}) < least_groups:
            break
        first, end = (k - 1) * window, k * window
        places += [(i, k, first) for i in reach if first > before]
        k *= 2
    whole = token_losses(model, [document[:end] for document in texts.documents], context.max_slots)
    cut = [texts.documents[i][first - before : first + window] for i, _, first in places]
    entries, items = {}, []  # type: ignore[var-annotated]
    for (i, k, first), some in zip(places, token_losses(model, cut, context.max_slots)):
        full = float(whole[i][first : first + window - 1].mean())
        entries.setdefault(k, []).append((i, float(some[before:].mean()) - full, full))
        items.append({"document": texts.numbers[i], "windows": k, "gain": entries[k][-1][1], **texts.group(i)})
    curves: dict[str, Any] = {
        "context_gain": [
            {
                "windows": k,
                "gain": float(np.mean([gain for _, gain, _ in some])),
                "loss": float(np.mean([loss for *_, loss in some])),
                "documents": len(some),
                "groups": len({group[i] for i, *_ in some}),
            }
            for k, some in entries.items()
        ]
    }
    if texts.corpus.groups is not None:
        curves["by_group"] = _by_group(items, "windows", ("gain",))
    metrics = {f"gain_{entry['windows']}": entry["gain"] for entry in curves["context_gain"]}
    return EvalResult(metrics | {"documents": float(len(group))}, curves, items, texts.corpus.corpus_hash)


def remembrance(model: MambaLM, context: EvalContext) -> EvalResult:
    """Evaluate effective remembrance (arXiv 2507.02782): how much the first t tokens matter after ``length`` tokens.

    The total variation between the next-token distributions after document[:length] and after document[t:length].
    """
    texts = validation("remembrance", context, len(model.lm_head.weight))
    length = texts.options["length"]
    reach = [i for i, document in enumerate(texts.documents) if len(document) >= length]
    documents = [texts.documents[i][:length] for i in reach]
    shares = {"quarter": length // 4, "half": length // 2, "three_quarters": length - length // 4}
    doublings = [2**i for i in range((length - 1).bit_length())]
    starts = sorted({*shares.values(), *doublings, *(length - t for t in doublings)} - {0, length})
    whole = _last_distributions(model, documents, context.max_slots)
    variations = []
    for t in starts:
        rest = _last_distributions(model, [document[t:] for document in documents], context.max_slots)
        variations.append(((whole - rest).abs().sum(dim=1) / 2).tolist())
    items = [
        {"document": texts.numbers[i], "variation": list(values), **texts.group(i)}
        for i, values in zip(reach, zip(*variations))
    ]
    means = dict(zip(starts, np.mean([item["variation"] for item in items], axis=0).tolist()))
    return EvalResult(
        {name: means[t] for name, t in shares.items()} | {"documents": len(items)},
        {"remembrance": [{"without": t, "length": length, "variation": value} for t, value in means.items()]},
        items,
        texts.corpus.corpus_hash,
    )


def _last_distributions(model: MambaLM, documents: Sequence[Any], max_slots: int) -> Tensor:
    """Return (documents, vocabulary), the next-token distribution after each document."""
    last: dict[int, Tensor] = {}
    for _ in read_documents(model, documents, max_slots, lambda i, first, hidden: last.update({i: hidden[-1]})):
        pass
    hidden = torch.stack([last[i] for i in range(len(documents))])
    return torch.cat([log_p.exp() for _, log_p in log_probabilities(model, hidden)])


EVALUATIONS: dict[str, Callable[[MambaLM, EvalContext], EvalResult]] = {
    function.__name__: function for function in (perplexity, positions, long_context, remembrance)
}
