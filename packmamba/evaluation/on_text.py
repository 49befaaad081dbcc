"""Evaluations on the validation documents of ``data``: losses, and what context is worth."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from packmamba.config import ConfigError
from packmamba.data.corpus import Corpus, evaluation_documents, load_corpora
from packmamba.data.tokenization import Tokenizer, load_tokenizer
from packmamba.evaluation.as_trained import AsTrained
from packmamba.evaluation.asked import Asked, Result
from packmamba.evaluation.perplexity import (
    context_gains,
    gain_entries,
    means_between,
    remembrance,
    sums_between,
    token_losses,
    windows_reached,
)
from packmamba.nn import MambaLM


def perplexity(model: MambaLM, asked: Asked) -> Result:
    """Loss, bits per byte, loss by position; the loss as trained too."""
    corpus, numbers, documents = check_perplexity(asked, len(model.lm_head.weight))

    def alone(which: list[int]) -> list[dict[str, Any]]:
        some = {int(numbers[i]): documents[i] for i in which}
        return [
            {"document": int(numbers[i]), "targets": len(losses), "nats": float(losses.sum()),
             "bytes": _bytes(documents[i], corpus, asked.tokenizer), "octaves": sums_between(_octaves(losses), losses),
             **_group(corpus, numbers[i])}
            for i, losses in zip(which, asked.read.losses(model, some, asked.max_slots))
        ]  # fmt: skip

    items = asked.kept.answers("perplexity", documents, asked.max_slots, alone)
    boundary = asked.boundary()
    if boundary.as_trained:

        def together(which: list[int]) -> list[dict[str, Any]]:
            rows = AsTrained(documents, asked.data, boundary)
            trained = token_losses(model, documents, reader=functools.partial(rows.read, model))
            return [
                {"nats_as_trained": float(some.sum()), "octaves_as_trained": sums_between(_octaves(some), some)}
                for some in trained
            ]

        later = asked.kept.answers("perplexity as trained", documents, asked.max_slots, together, together=True)
        items = [item | other for item, other in zip(items, later)]
    targets = [item["targets"] for item in items]
    sizes = [item["bytes"] for item in items]
    nats = sum(item["nats"] for item in items)
    metrics = {
        "loss": nats / sum(targets),
        "bits_per_byte": nats / math.log(2) / sum(sizes) if all(sizes) else float("nan"),
        "targets": sum(targets),
        "documents": len(documents),
    }
    if boundary.as_trained:
        metrics["loss_as_trained"] = sum(item["nats_as_trained"] for item in items) / sum(targets)
    edges = [2**i for i in range(max(targets).bit_length() + 1)]
    curves = {"by_position": means_between(edges, [item["octaves"] for item in items], targets)}
    if corpus.groups is not None:
        names = {"nats": "octaves"} | ({"nats_as_trained": "octaves_as_trained"} if boundary.as_trained else {})
        places = [
            {"start": start, "targets": min(2 * start - 1, item["targets"]) - start + 1, "group": item["group"]}
            | {name: item[sums][i] for name, sums in names.items()}
            for item in items
            for i, start in enumerate(edges[: len(item["octaves"])])
        ]
        curves["by_group"] = _by_group(places, ["start"], ("targets", *names))
    return Result(metrics, curves, items, corpus.corpus_hash)


def _octaves(losses: np.ndarray) -> list[int]:
    return [2**i for i in range(len(losses).bit_length() + 1)]


def positions(model: MambaLM, asked: Asked) -> Result:
    """Loss by position in windows: options ``window`` (the row length) and ``most`` (64 windows). Buckets double from a
    sixteenth of a window to the farthest."""
    corpus, numbers, documents = check_positions(asked, len(model.lm_head.weight))
    options = _integers("positions", asked, WINDOWS)
    window, most = options["window"], options["most"]
    edges = sorted({0, *(window >> i for i in range(1, 5)), *(window << i for i in range(most.bit_length()))})
    documents = [document[: edges[-1]] for document in documents]

    def alone(which: list[int]) -> list[dict[str, Any]]:
        losses = asked.read.losses(model, {int(numbers[i]): documents[i] for i in which}, asked.max_slots)
        losses = [some[: len(documents[i]) - 1] for i, some in zip(which, losses)]
        return [
            {
                "document": int(numbers[i]),
                "targets": len(some),
                "sums": sums_between(edges, some),
                **_group(corpus, numbers[i]),
            }
            for i, some in zip(which, losses)
        ]

    items = asked.kept.answers("positions", documents, asked.max_slots, alone)
    points = means_between(edges, [item["sums"] for item in items], [item["targets"] for item in items])
    metrics = {f"loss_{point['end'] // window:.0f}": point["loss"] for point in points if point["end"] >= window}
    return Result(metrics | {"documents": len(documents)}, {"by_window": points}, items, corpus.corpus_hash)


def check_positions(asked: Asked, vocab_size: int | None) -> Any:
    window = _integers("positions", asked, WINDOWS)["window"]
    return None if vocab_size is None else _long("positions", asked, vocab_size, window, "a window of {} tokens")


def remembers(model: MambaLM, asked: Asked) -> Result:
    """Effective remembrance: option ``length`` (the row length). How much the first t tokens matter after ``length``, for t a
    quarter, a half and three quarters of it, and along its doublings from either end."""
    corpus, numbers, documents = check_remembers(asked, len(model.lm_head.weight))
    length = _integers("remembrance", asked, {"length": 4})["length"]
    reach = [i for i, document in enumerate(documents) if len(document) >= length]
    documents = [documents[i][:length] for i in reach]
    shares = {"quarter": length // 4, "half": length // 2, "three_quarters": length - length // 4}
    doublings = [2**i for i in range((length - 1).bit_length())]
    starts = sorted({*shares.values(), *doublings, *(length - t for t in doublings)} - {0, length})

    def alone(which: list[int]) -> list[dict[str, Any]]:
        found = remembrance(model, [documents[i] for i in which], length, starts, asked.max_slots)
        return [
            {"document": int(numbers[reach[i]]), "variation": values, **_group(corpus, numbers[reach[i]])}
            for i, values in zip(which, found)
        ]

    items = asked.kept.answers("remembrance", documents, asked.max_slots, alone)
    means = dict(zip(starts, np.mean([item["variation"] for item in items], axis=0).tolist()))
    return Result(
        {name: means[t] for name, t in shares.items()} | {"documents": len(documents)},
        {"remembrance": [{"without": t, "length": length, "variation": value} for t, value in means.items()]},
        items,
        corpus.corpus_hash,
    )


def check_remembers(asked: Asked, vocab_size: int | None) -> Any:
    length = _integers("remembrance", asked, {"length": 4})["length"]
    return None if vocab_size is None else _long("remembrance", asked, vocab_size, length, "length={} tokens")


def check_perplexity(asked: Asked, vocab_size: int | None) -> Any:
    asked.check_options("perplexity", [])
    return None if vocab_size is None else _validation(vocab_size, asked)


def long_context(model: MambaLM, asked: Asked) -> Result:
    """Context gain: options ``window`` (the row length), ``most`` (64 windows), ``context`` (0), ``documents`` and ``groups``
    (1: the fewest that an entry needs)."""
    corpus, numbers, documents = check_long_context(asked, len(model.lm_head.weight))
    options = _windows("long_context", asked)
    groups = None if corpus.groups is None else corpus.groups[numbers].tolist()
    window, context = options["window"], options["context"]
    reached = windows_reached(
        list(map(len, documents)), window, options["most"], groups, (options["documents"], options["groups"])
    )

    def alone(which: list[int]) -> list[dict[str, Any]]:
        some = [documents[i] for i in which]
        parts = {int(numbers[i]): documents[i][: max(reached, default=0) * window] for i in which}
        whole = asked.read.losses(model, parts, asked.max_slots)
        return [
            {"gains": [[k, *values] for k, values in gains.items()]}
            for gains in context_gains(model, some, window, reached, asked.max_slots, context, whole)
        ]

    kept = asked.kept.answers(f"long_context {window} {context} {reached}", documents, asked.max_slots, alone)
    entries = gain_entries([{k: (gain, loss) for k, gain, loss in item["gains"]} for item in kept], groups)
    items: list[dict[str, Any]] = [
        {"document": int(numbers[i]), "windows": entry["windows"], "gain": gain, **_group(corpus, numbers[i])}
        for entry in entries
        for i, gain in entry["gains"].items()
    ]
    curves = {"context_gain": [{key: value for key, value in entry.items() if key != "gains"} for entry in entries]}
    if corpus.groups is not None:
        curves["by_group"] = _by_group(items, ["windows"], ("gain",))
    return Result(
        {f"gain_{entry['windows']}": entry["gain"] for entry in entries} | {"documents": float(len(documents))},
        curves,
        items,
        corpus.corpus_hash,
    )


def _group(corpus: Corpus, number: int) -> dict[str, int]:
    return {} if corpus.groups is None else {"group": int(corpus.groups[number])}


def _by_group(items: list[dict[str, Any]], keys: list[str], sums: Sequence[str]) -> list[dict[str, float]]:
    """Sums over the documents of a group, and their number: what intervals over groups are made of."""
    points: dict[tuple[Any, ...], dict[str, float]] = {}
    for item in items:
        place = {key: item[key] for key in (*keys, "group")}
        point = points.setdefault(tuple(place.values()), {**place, "documents": 0, **dict.fromkeys(sums, 0.0)})
        point["documents"] += 1
        for name in sums:
            point[name] += item[name]
    return list(points.values())


def check_long_context(asked: Asked, vocab_size: int | None) -> Any:
    window = _windows("long_context", asked)["window"]
    return (
        None
        if vocab_size is None
        else _long("long_context", asked, vocab_size, 2 * window, f"two windows of {window} tokens")
    )


WINDOWS = {"window": 2, "most": 2}
"""Integer options and their least values."""


def _windows(name: str, asked: Asked) -> dict[str, int]:
    return {"context": 0, "documents": 1, "groups": 1} | _integers(
        name, asked, WINDOWS | {"context": 0, "documents": 1, "groups": 1}
    )


def _integers(name: str, asked: Asked, least: dict[str, int]) -> dict[str, int]:
    """The options of an evaluation; ``window`` and ``length`` are the row length and ``most`` is 64 where they are not given."""
    asked.check_options(name, least)
    row_length = asked.data.row_length or 1024
    defaults = {
        key: value for key, value in (("window", row_length), ("length", row_length), ("most", 64)) if key in least
    }
    for option, value in asked.options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least[option]:
            raise ConfigError(
                f"{asked.key}.{name}.{option}: expected an integer of at least {least[option]}, got {value!r}"
            )
    return defaults | asked.options


def _long(name: str, asked: Asked, vocab_size: int, least: int, what: str) -> Any:
    """The validation documents, of which one at least must be so long."""
    found = _validation(vocab_size, asked)
    if max(map(len, found[2])) < least:
        raise ConfigError(f"{name}: no validation document is as long as {what.format(least)}")
    return found


HELD_OUT = "validation"
"""What a task on text may be given as its documents."""


def held_out_texts(asked: Asked) -> list[tuple[str, str]]:
    """(group, text) of all validation documents of ``data``; without groups each is one of its own."""
    corpus, tokenizer = load_corpora(asked.data).validation, load_tokenizer(asked.data)
    groups = range(len(corpus)) if corpus.groups is None else corpus.groups
    return [(str(group), tokenizer.decode(corpus.document(i))) for i, group in enumerate(groups)]


def _validation(vocab_size: int | None, asked: Asked) -> tuple[Corpus, np.ndarray, Sequence[np.ndarray]]:
    corpus = load_corpora(asked.data).validation
    if vocab_size is not None and corpus.vocab_size > vocab_size:
        raise ConfigError(f"data.tokenizer: the documents have {corpus.vocab_size} tokens, the model {vocab_size}")
    numbers = evaluation_documents(corpus, asked.data)
    if not len(numbers):
        raise ConfigError(f"data.source={asked.data.source} gives no validation documents")
    return corpus, numbers, [corpus.document(int(number)) for number in numbers]


def _bytes(document: np.ndarray, corpus: Corpus, tokenizer: Tokenizer | None) -> int:
    """Bytes of a document's text, begin and end tokens left out; 0 if its ids have no text."""
    if tokenizer is None:
        return 0
    own = document[~np.isin(document, [i for i in (corpus.begin_id, corpus.end_id) if i is not None])]
    return len(tokenizer.decode(own).encode("utf-8", "replace"))
