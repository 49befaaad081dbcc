"""Evaluations on the validation documents of ``data``: losses, and what context is worth."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from packmamba.config import ConfigError
from packmamba.data.corpus import Corpus, load_corpora
from packmamba.data.datamodule import evaluation_documents
from packmamba.data.tokenization import Tokenizer, load_tokenizer
from packmamba.evaluation.as_trained import AsTrained
from packmamba.evaluation.asked import Asked, Result
from packmamba.evaluation.perplexity import bits_per_byte, by_position, context_gain, octaves, token_losses
from packmamba.nn import MambaLM


def perplexity(model: MambaLM, asked: Asked) -> Result:
    """Loss, bits per byte, loss by position; the loss as trained too."""
    corpus, numbers, documents = check_perplexity(asked, len(model.lm_head.weight))
    losses = token_losses(model, documents, asked.max_slots)
    sizes = [_bytes(document, corpus, asked.tokenizer) for document in documents]
    targets = sum(map(len, losses))
    metrics = {
        "loss": sum(float(some.sum()) for some in losses) / targets,
        "bits_per_byte": bits_per_byte(losses, sum(sizes)) if all(sizes) else float("nan"),
        "targets": targets,
        "documents": len(documents),
    }
    items: list[dict[str, Any]] = [
        {
            "document": int(number),
            "targets": len(some),
            "nats": float(some.sum()),
            "bytes": size,
            **_group(corpus, number),
        }
        for number, some, size in zip(numbers, losses, sizes)
    ]
    boundary = asked.boundary()
    if boundary.as_trained:
        rows = AsTrained(documents, asked.data, boundary)
        trained = token_losses(model, documents, reader=functools.partial(rows.read, model))
        for item, some in zip(items, trained):
            item["nats_as_trained"] = float(some.sum())
        metrics["loss_as_trained"] = sum(item["nats_as_trained"] for item in items) / targets
    curves = {"by_position": by_position(losses)}
    if corpus.groups is not None:
        read = {"nats": losses} | ({"nats_as_trained": trained} if boundary.as_trained else {})
        places = [
            {"start": start, "targets": len(here), **_group(corpus, number)}
            for number, some in zip(numbers, losses)
            for start, here in octaves(some)
        ]
        for name, found in read.items():
            for place, (_, here) in zip(places, (octave for some in found for octave in octaves(some))):
                place[name] = float(here.sum())
        curves["by_group"] = _by_group(places, ["start"], ("targets", *read))
    return Result(metrics, curves, items, corpus.corpus_hash)


def check_perplexity(asked: Asked, vocab_size: int | None) -> Any:
    asked.check_options("perplexity", [])
    return None if vocab_size is None else _validation(vocab_size, asked)


def long_context(model: MambaLM, asked: Asked) -> Result:
    """Context gain: options ``window`` (the row length), ``most`` (64 windows), ``context`` (0), ``documents`` and ``groups``
    (1: the fewest that an entry needs)."""
    corpus, numbers, documents = check_long_context(asked, len(model.lm_head.weight))
    options = _windows("long_context", asked)
    entries = context_gain(
        model,
        documents,
        options["window"],
        options["most"],
        asked.max_slots,
        options["context"],
        None if corpus.groups is None else corpus.groups[numbers].tolist(),
        (options["documents"], options["groups"]),
    )
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
    if vocab_size is None:
        return None
    found = _validation(vocab_size, asked)
    if max(map(len, found[2])) < 2 * window:
        raise ConfigError(f"long_context: no validation document is as long as two windows of {window} tokens")
    return found


def _windows(name: str, asked: Asked) -> dict[str, int]:
    defaults = {"window": asked.data.row_length or 1024, "most": 64, "context": 0, "documents": 1, "groups": 1}
    asked.check_options(name, list(defaults))
    fewest = {"window": 2, "most": 2, "context": 0, "documents": 1, "groups": 1}
    for option, value in asked.options.items():
        least = fewest[option]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{asked.key}.{name}.{option}: expected an integer of at least {least}, got {value!r}")
    return defaults | asked.options


HELD_OUT = "validation"
"""What a task on text may be given as its documents."""


def held_out_texts(asked: Asked) -> list[tuple[str, str]]:
    """(group, text) of the validation documents of ``data``; without groups each is one of its own."""
    corpus, numbers, documents = _validation(None, asked)
    tokenizer = load_tokenizer(asked.data)
    groups = numbers if corpus.groups is None else corpus.groups[numbers]
    return [(str(group), tokenizer.decode(document)) for group, document in zip(groups, documents)]


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
