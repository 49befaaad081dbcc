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
from packmamba.evaluation.perplexity import bits_per_byte, by_position, context_gain, token_losses
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
        {"document": int(number), "targets": len(some), "nats": float(some.sum()), "bytes": size}
        for number, some, size in zip(numbers, losses, sizes)
    ]
    boundary = asked.boundary()
    if boundary.as_trained:
        rows = AsTrained(documents, asked.data, boundary)
        trained = token_losses(model, documents, reader=functools.partial(rows.read, model))
        for item, some in zip(items, trained):
            item["nats_as_trained"] = float(some.sum())
        metrics["loss_as_trained"] = sum(item["nats_as_trained"] for item in items) / targets
    return Result(metrics, {"by_position": by_position(losses)}, items, corpus.corpus_hash)


def check_perplexity(asked: Asked, vocab_size: int | None) -> Any:
    asked.check_options("perplexity", [])
    return None if vocab_size is None else _validation(vocab_size, asked)


def long_context(model: MambaLM, asked: Asked) -> Result:
    """Context gain: options ``window`` (the row length) and ``most`` (64 windows)."""
    corpus, numbers, documents = check_long_context(asked, len(model.lm_head.weight))
    entries: list[dict[str, Any]] = list(
        context_gain(model, documents, max_slots=asked.max_slots, **_windows("long_context", asked))
    )
    return Result(
        {f"gain_{entry['windows']}": entry["gain"] for entry in entries} | {"documents": float(len(documents))},
        {"context_gain": [{key: value for key, value in entry.items() if key != "gains"} for entry in entries]},
        [
            {"document": int(numbers[i]), "windows": entry["windows"], "gain": gain}
            for entry in entries
            for i, gain in entry["gains"].items()
        ],
        corpus.corpus_hash,
    )


def check_long_context(asked: Asked, vocab_size: int | None) -> Any:
    window = _windows("long_context", asked)["window"]
    if vocab_size is None:
        return None
    found = _validation(vocab_size, asked)
    if max(map(len, found[2])) < 2 * window:
        raise ConfigError(f"long_context: no validation document is as long as two windows of {window} tokens")
    return found


def _windows(name: str, asked: Asked) -> dict[str, int]:
    defaults = {"window": asked.data.row_length or 1024, "most": 64}
    asked.check_options(name, list(defaults))
    for option, value in asked.options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 2:
            raise ConfigError(f"{asked.key}.{name}.{option}: expected an integer of at least 2, got {value!r}")
    return defaults | asked.options


HELD_OUT = "validation"
"""What a task on text may be given as its documents."""


def held_out_texts(asked: Asked) -> list[str]:
    """The texts of the validation documents of ``data``."""
    _, _, documents = _validation(None, asked)
    tokenizer = load_tokenizer(asked.data)
    return [tokenizer.decode(document) for document in documents]


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
