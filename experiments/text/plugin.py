"""The corpus as a source, the loss beyond a row's length read from three states, and the corpus's
questions.

``experiments/corpus/text.py`` builds the corpus: JSON lines ``{text, split, group}``, and items of
its tasks. Of its held-out splits a run sees one, ``data.subset``: the pilot ``validation``,
confirmatory runs ``test``, which nothing else reads.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.corpus import text_items
from packmamba.config import DataConfig, need
from packmamba.data.sources import SOURCES
from packmamba.data.sources.source import Document, Source, hash_files
from packmamba.data.tasks import TASKS
from packmamba.data.tasks.base import Example, make_example
from packmamba.data.token_store import load_corpora
from packmamba.evaluation import language_modeling
from packmamba.evaluation.language_modeling import perplexity, token_losses, validation
from packmamba.evaluation.load import EvalContext, EvalResult
from packmamba.evaluation.packed_forward import DocumentState, Segment, packed_forward, read_to_the_end
from packmamba.evaluation.scoring import score
from packmamba.nn import MambaLM

# Folders of the held-out splits.
HELD_OUT = {"validation": "corpus", "test": "sealed"}
# Ids of the tokens around a document of bytes.
BEGIN, END = 256, 257
# Fewest tokens of a document of the source ``natural_text_long``: eight rows of 512.
LONG = 4096


def lines(path: Path) -> Iterator[dict[str, Any]]:
    need(path.is_file(), "data.path", "the corpus that experiments/corpus/text.py builds", f"no {path}")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def open_natural_text(data: DataConfig, least: int = 0) -> Source:
    """Open the corpus at ``data.path``, a folder or one file, with the held-out split
    ``data.subset``.

    Documents of fewer than ``least`` bytes, begin and end tokens counted, are left out.
    """
    held_out, path = data.subset or "validation", Path(data.path or "")
    need(held_out in HELD_OUT, "data.subset", f"one of {', '.join(HELD_OUT)}", f"'{held_out}'")
    files = [path] if path.is_file() else [path / "corpus/train.jsonl", path / HELD_OUT[held_out] / f"{held_out}.jsonl"]

    def read() -> Iterator[Document]:
        for one in itertools.chain(*map(lines, files)):
            if one["split"] in ("train", held_out) and len(one["text"].encode()) + 2 >= least:
                yield Document(one["split"] == held_out, one["text"], group=one["group"])

    known = [str(path.resolve()), held_out, hash_files(Path(), list(map(str, files)))]
    return Source([*known, str(least)] if least else known, read)


def beyond(model: MambaLM, context: EvalContext) -> EvalResult:
    """Evaluate the loss of places ``after`` to ``most`` of documents, read on at ``after`` from
    three states.

    ``loss``: the document's own state there; ``loss_zero``: zero; ``loss_foreign``: that of another
    document.
    """
    # long documents are few
    every = replace(context, data=replace(context.data, validation_documents=None))
    texts = validation("beyond", every, len(model.lm_head.weight))
    after, most = texts.options.values()
    which = [i for i, document in enumerate(texts.documents) if len(document) > after + 1]
    tails = [texts.documents[i][after:most] for i in which]
    own: dict[int, DocumentState] = {}
    read_to_the_end(model, [texts.documents[i][:after] for i in which], context.max_slots, own)
    order = np.random.default_rng(0).permutation(len(which))
    starts: dict[str, Any] = {
        "": own,
        "_zero": dict.fromkeys(own),
        "_foreign": {i: own[other] for i, other in zip(order.tolist(), np.roll(order, 1).tolist())},
    }
    columns: dict[str, Any] = {"targets": [len(tail) - 1 for tail in tails], "start": [after] * len(tails)}
    for suffix, states in starts.items():
        segments = [Segment(i, tail[:-1], states[i]) for i, tail in enumerate(tails)]
        losses = token_losses(model, tails, passes=packed_forward(model, segments, context.max_slots))
        columns["nats" + suffix] = [float(some.sum()) for some in losses]
    total = sum(columns["targets"])
    metrics = {f"loss{suffix}": sum(columns["nats" + suffix]) / total for suffix in starts}
    items = texts.items(which, **columns)
    sums = ["targets", *("nats" + suffix for suffix in starts)]
    metrics |= {"documents": float(len(items)), "targets": float(total)}
    return texts.result(metrics, "beyond", [], items, key="start", sums=sums, items_of=items)


def perplexity_float32(model: MambaLM, context: EvalContext) -> EvalResult:
    """Evaluate ``perplexity`` in the weights' precision, not under the autocast of training."""
    with torch.autocast(model.lm_head.weight.device.type, enabled=False):
        return perplexity(model, context)


@functools.cache
def items(path: str, task: str, split: str) -> list[dict[str, Any]]:
    """Read a task's items of a split, or make them from the corpus where that is one file."""
    if Path(path).is_file():
        return list(text_items.MAKERS[task]([one for one in lines(Path(path)) if one["split"] == split], 0))
    folder = {"validation": "items", "train": "items", "test": "sealed"}[split]
    return list(lines(Path(path) / folder / f"{task}.{split}.jsonl"))


def choose(task: str, model: MambaLM, context: EvalContext) -> EvalResult:
    """Evaluate which of four contexts makes a text likeliest: headwords of a gloss, modules of an
    option.
    """
    known = items(str(context.data.path), task, context.data.subset or "validation")[: context.examples]
    encode = lambda text: [BEGIN, *text.encode()]
    requests = [(encode(before), [*one["continuation"].encode()]) for one in known for before in one["contexts"]]
    scores = iter(score(model, requests, context.max_slots))
    found = []
    for one in known:
        likeliest = int(np.argmax([next(scores).log_likelihood for _ in one["contexts"]]))
        found.append({"index": one["id"], "group": one["group"], "answer": one["answer"], "choice": likeliest})
    right = float(np.mean([one["choice"] == one["answer"] for one in found]))
    metrics = {"choice_accuracy": right, "chance": 0.25, "examples": float(len(found))}
    return EvalResult(metrics, {}, found, f"{task} of {load_corpora(context.data).corpus_hash}")


class Asked:
    """Questions with an answer, of which alone there are targets: pairs, four choices, or a last
    word.

    ``path``: of the corpus; ``task``: its items; ``end``: the end token belongs to the answer.
    """

    vocab_size, chance = 258, 0.0

    def __init__(self, path: str = "my/text", task: str = "pairs", split: str = "test", end: bool = True) -> None:
        self.found, self.end = functools.partial(items, path, task, split), [END] * end

    @property
    def num_examples(self) -> int:
        return len(self.found())

    def example(self, seed: int, index: int) -> Example:
        one = self.found()[index]
        question = [BEGIN, *one.get("prompt", one.get("context", "")).encode()]
        # Of four choices, or the completion of a pair, or the continuation of a context.
        texts = one.get("choices") or [one.get("completion", one.get("continuation", ""))]
        answers, right = [[*text.encode(), *self.end] for text in texts], one.get("answer")
        answer, choices = answers[right or 0], tuple(answers) if right is not None else ()
        targets = {len(question) - 1 + i: token for i, token in enumerate(answer)}
        tokens = [*question, *answer[:-1]]
        return make_example(tokens, targets, load=len(question), choices=choices, answer=right)


SOURCES["natural_text"] = open_natural_text
SOURCES["natural_text_long"] = functools.partial(open_natural_text, least=LONG)
TASKS |= dict.fromkeys(("pairs", "asked_headword", "last_word"), Asked)
language_modeling.EVALUATIONS |= {
    "beyond": beyond, "perplexity_float32": perplexity_float32,
    "headword": functools.partial(choose, "headword"), "module": functools.partial(choose, "module")
}  # fmt: skip
language_modeling.OPTIONS["beyond"] = {"after": (None, 2), "most": (65536, 2)}
