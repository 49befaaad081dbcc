"""Language-modelling evaluations on validation or test documents, in nats per target token."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packmamba.config import need
from packmamba.data.corpus import Corpus
from packmamba.data.token_store import evaluation_documents, load_corpora
from packmamba.evaluation.load import EvalContext, EvalResult
from packmamba.evaluation.packed_forward import Pass, TrainingLayoutReader, predict_documents
from packmamba.nn import MambaLM

Losses = list[NDArray[np.float64]]


def token_losses(
    model: MambaLM, documents: Sequence[Any], max_slots: int = 16384, passes: Iterator[Pass] | None = None
) -> Losses:
    """Return documents' losses (n - 1,), from zero states or as in ``passes``."""

    def targets(i: int, start: int, end: int) -> tuple[slice, Any]:
        wanted = documents[i][start + 1 : end + 1]
        return slice(len(wanted)), wanted

    inputs = [document[:-1] for document in documents]
    return [losses for losses, _ in predict_documents(model, inputs, targets, max_slots, passes)]


def by_position(edges: Sequence[int], losses: Losses) -> tuple[list[list[float]], list[dict[str, float]]]:
    """Return documents' sums of losses by bucket of positions, and means over all.

    Bucket i holds positions edges[i] to edges[i + 1] - 1, counted from 1.
    """
    spans = list(zip(edges, edges[1:]))
    # losses[i] is of the token at position i + 1: the token at 0 is never predicted.
    parts = []
    for document in losses:
        parts.append([document[start - 1 : end - 1] for start, end in spans if start <= len(document)])
    sums = [[float(part.sum()) for part in document] for document in parts]
    means = []
    for i, (start, end) in enumerate(spans):
        # Documents that reach the bucket, perhaps in part.
        reaching = [number for number, document in enumerate(parts) if len(document) > i]
        if reaching:
            count = sum(len(parts[number][i]) for number in reaching)
            loss = sum(sums[number][i] for number in reaching) / count
            means.append({"start": start, "end": end, "loss": loss, "count": count, "documents": len(reaching)})
    return sums, means


class Validation(NamedTuple):
    """Hold the held-out documents of an evaluation and its options."""

    corpus: Corpus
    labels: list[dict[str, int]]  # documents' numbers and groups
    documents: list[np.ndarray]
    options: dict[str, int]

    def answered(self, index: int) -> np.ndarray:
        """Return which tokens of a document, from the second on, are answers (n - 1,)."""
        number, length = self.labels[index]["document"], len(self.documents[index])
        return self.corpus.read(number, 0, length, True)[1][:-1] >= 0

    def items(self, which: Iterable[int], **columns: Sequence[Any]) -> list[dict[str, Any]]:
        """Return an item for each of these documents: its label, and its value of each column."""
        rows = zip(which, *columns.values(), strict=True)
        return [self.labels[i] | dict(zip(columns, values)) for i, *values in rows]

    def result(self, metrics: dict[str, float], name: str, curve: Any, items: Any, **by_group: Any) -> EvalResult:
        """Make a result; ``by_group``: key, sums and items of sums over each group's documents."""
        curves = {name: curve}
        if self.corpus.groups is not None and by_group:
            curves["by_group"] = _by_group(**by_group)
        return EvalResult(metrics, curves, items, self.corpus.corpus_hash)


# Integer options: default (None: the row length) and minimum.
OPTIONS: dict[str, dict[str, tuple[int | None, int]]] = {
    "positions": {"window": (None, 2), "most": (64, 2)},
    "long_context": {"window": (None, 2), "most": (64, 2), "context": (0, 0), "documents": (1, 1), "groups": (1, 1)},
}
SPLIT = "split"  # an option of each: "validation", the default, or "test"


def validation(name: str, context: EvalContext, vocab_size: int | None) -> Any:
    """Return a ``Validation``, None while the vocabulary size is unknown. Raises ConfigError."""
    known, options = OPTIONS.get(name, {}), {}
    place = f"{context.key}.{name}"
    for option in context.options:
        need(option in (*known, SPLIT), place, f"options of {', '.join([*known, SPLIT])}", f"'{option}'")
    split = context.options.get(SPLIT, "validation")
    need(split in ("validation", "test"), f"{place}.{SPLIT}", "validation or test", repr(split))
    for option, (default, minimum) in known.items():
        value = context.options.get(option, (context.data.row_length or 1024) if default is None else default)
        whole = type(value) is int and value >= minimum
        need(whole, f"{place}.{option}", f"an integer of at least {minimum}", repr(value))
        options[option] = value
    if vocab_size is None:
        return None
    corpora = load_corpora(context.data)
    corpus = corpora.test if split == "test" else corpora.validation
    expected = "validation, since the documents have no test split"
    need(corpus is not None, f"{place}.{SPLIT}", expected, "'test'; set data.test_path or data.test_fraction")
    scores_all = name != "perplexity" and corpus.has_answers and context.data.source != "task"
    need(not scores_all, name, "documents without prompts", "answers; set data.loss_on=all to score prompts too")
    need(corpus.vocab_size <= vocab_size, "data.tokenizer", f"at most {vocab_size} tokens", corpus.vocab_size)
    numbers, groups = evaluation_documents(corpus, context.data).tolist(), corpus.groups
    labels = [{"document": n} | ({} if groups is None else {"group": int(groups[n])}) for n in numbers]
    documents = [corpus.document(number) for number in numbers]
    # The first option of each is a length; long_context needs two windows.
    needed = max(2, next(iter(options.values()), 1) * (2 if name == "long_context" else 1))
    longest = max(map(len, documents), default=0)
    need(longest >= needed, name, f"a {split} document of at least {needed} tokens", f"at most {longest}")
    return Validation(corpus, labels, documents, options)


def perplexity(model: MambaLM, context: EvalContext) -> EvalResult:
    """Evaluate loss, bits per byte and loss by position; the loss as trained, too.

    Where documents have answers, only these count.
    """
    texts = validation("perplexity", context, len(model.lm_head.weight))
    losses = {"": token_losses(model, texts.documents, context.max_slots)}
    boundary = context.trainer.scheme()
    if boundary.as_trained:
        rows = TrainingLayoutReader(texts.documents, context.data, boundary)
        losses["_as_trained"] = token_losses(model, texts.documents, passes=rows.read(model))
    documents = texts.documents
    if texts.corpus.has_answers:  # positions count answers' tokens, too
        answered = [texts.answered(number) for number in range(len(documents))]
        documents = [document[1:][kept] for document, kept in zip(documents, answered)]
        for suffix, of_documents in losses.items():
            losses[suffix] = [document[kept] for document, kept in zip(of_documents, answered)]
    targets = [len(document) for document in losses[""]]
    decode = context.tokenizer.decode if context.tokenizer else lambda _: ""
    # Part of a character decodes to U+FFFD, of three bytes; it is one, of a tokenizer of bytes.
    size_of = lambda ids: len(decode(ids).replace("\ufffd", "?").encode("utf-8", "replace"))
    # Bytes of the texts: bits per byte compare models of different tokenizers. Nothing predicts a
    # document's first token, which has no bytes if it is a begin token.
    unpredicted = 0 if texts.corpus.has_answers else 1
    sizes = [size_of(document) - size_of(document[:unpredicted]) for document in documents]
    # Octaves of positions: [1, 2), [2, 4), ...
    edges = [2**i for i in range(max(targets).bit_length() + 1)]
    columns: dict[str, Any] = {"targets": targets, "bytes": sizes}
    for suffix, of_documents in losses.items():
        columns["nats" + suffix] = [float(document.sum()) for document in of_documents]
        columns["octaves" + suffix] = by_position(edges, of_documents)[0]
    items = texts.items(range(len(targets)), **columns)
    nats, total = sum(columns["nats"]), sum(targets)
    bits_per_byte = nats / math.log(2) / sum(sizes) if any(sizes) else float("nan")
    metrics = {"loss": nats / total, "bits_per_byte": bits_per_byte, "targets": total, "documents": len(items)}
    for number, name in enumerate(texts.corpus.source_names):
        of_source = [item for item in items if item["group"] == number]
        if targets_of_source := sum(item["targets"] for item in of_source):
            metrics[f"loss.{name}"] = sum(item["nats"] for item in of_source) / targets_of_source
    if boundary.as_trained:
        metrics["loss_as_trained"] = sum(columns["nats_as_trained"]) / total
    buckets = _octaves_of_documents(items, edges, losses)
    sums = ["targets", *("nats" + suffix for suffix in losses)]
    curve = by_position(edges, losses[""])[1]
    return texts.result(metrics, "by_position", curve, items, key="start", sums=sums, items_of=buckets)


def _octaves_of_documents(items: Any, edges: Sequence[int], suffixes: Iterable[str]) -> list[dict[str, Any]]:
    """Return each document's targets and nats in each octave of positions, to be summed by group."""
    octaves = []
    for item in items:
        for i, start in enumerate(edges[: len(item["octaves"])]):
            count = min(2 * start - 1, item["targets"]) - start + 1
            nats = {"nats" + suffix: item["octaves" + suffix][i] for suffix in suffixes}
            octaves.append({"start": start, "targets": count, "group": item.get("group")} | nats)
    return octaves


def _by_group(key: str, sums: Sequence[str], items_of: list[dict[str, Any]]) -> list[dict[str, float]]:
    points: defaultdict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for item in items_of:
        points[item[key], item["group"]].update({name: item[name] for name in sums}, documents=1)
    return [{key: place, "group": group, **point} for (place, group), point in points.items()]


def positions(model: MambaLM, context: EvalContext) -> EvalResult:
    """Evaluate loss by position, in buckets from a sixteenth of a window to ``most`` windows."""
    texts = validation("positions", context, len(model.lm_head.weight))
    window, most = texts.options["window"], texts.options["most"]
    # A sixteenth to a half of a window, then whole windows in powers of two, from token 1.
    fractions = [window >> i for i in range(1, 5)]
    edges = sorted({1, *fractions, *(window << i for i in range(most.bit_length()))} - {0})
    losses = token_losses(model, [document[: edges[-1]] for document in texts.documents], context.max_slots)
    sums, points = by_position(edges, losses)
    items = texts.items(range(len(losses)), targets=list(map(len, losses)), sums=sums)
    metrics = {f"loss_{point['end'] // window:.0f}": point["loss"] for point in points if point["end"] >= window}
    return texts.result(metrics | {"documents": len(items)}, "by_window", points, items)


def long_context(model: MambaLM, context: EvalContext) -> EvalResult:
    """Evaluate the context gain at k = 2, 4, ... ``most`` windows.

    At least ``documents`` documents of ``groups`` groups reach them.

    It is the mean loss of tokens (k - 1) * window + 1 to k * window - 1 read from token (k - 1) *
    window - ``context``, minus that read from the document's start: with context = window, what
    states carry beyond a row of training.
    """
    texts = validation("long_context", context, len(model.lm_head.weight))
    # In the order of OPTIONS.
    window, most, before, least, least_groups = texts.options.values()
    groups = [label.get("group", label["document"]) for label in texts.labels]
    which, windows, end = list[int](), list[int](), 0
    for k in (2**i for i in range(1, most.bit_length())):
        reach = [i for i, document in enumerate(texts.documents) if len(document) >= k * window]
        if len(reach) < least or len({groups[i] for i in reach}) < least_groups:
            break
        end = k * window
        # Else both readings would begin at the document's start.
        if (k - 1) * window > before:
            which, windows = which + reach, windows + [k] * len(reach)
    firsts = [(k - 1) * window for k in windows]
    # Losses read from the document's start, and read from ``before`` tokens ahead of the window.
    whole = token_losses(model, [document[:end] for document in texts.documents], context.max_slots)
    cut = [texts.documents[i][first - before : first + window] for i, first in zip(which, firsts)]
    # Losses of the context are not compared; a window has window - 1 targets.
    short = [float(some[before:].mean()) for some in token_losses(model, cut, context.max_slots)]
    full = [float(whole[i][first : first + window - 1].mean()) for i, first in zip(which, firsts)]
    items = texts.items(which, windows=windows, gain=[one - other for one, other in zip(short, full)])
    curve = []
    for k in dict.fromkeys(windows):
        at = [place for place, count in enumerate(windows) if count == k]
        point = {"windows": k, "gain": float(np.mean([items[i]["gain"] for i in at]))}
        point |= {"loss": float(np.mean([full[i] for i in at])), "documents": len(at)}
        curve.append(point | {"groups": len({groups[which[i]] for i in at})})
    metrics: Any = {f"gain_{point['windows']}": point["gain"] for point in curve}
    metrics["documents"] = float(len(texts.documents))
    return texts.result(metrics, "context_gain", curve, items, key="windows", sums=["gain"], items_of=items)


EVALUATIONS: dict[str, Callable[[MambaLM, EvalContext], EvalResult]] = {
    "perplexity": perplexity,
    "positions": positions,
    "long_context": long_context,
}
