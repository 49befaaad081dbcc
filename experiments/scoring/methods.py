"""Ways to score requests: packed passes, padded batches of the same kernels, lm-evaluation-harness' own class."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packmamba import MambaLM, SequenceLayout
from packmamba.data.tokenizer import write_tokenizer
from packmamba.evaluation import Score, score
from packmamba.evaluation.packed_forward import log_probabilities
from packmamba.ops.mamba_ssm import _peer

Request = tuple[list[int], list[int]]
Method = Callable[[Sequence[Request]], list[Score]]


def make_model(sizes: Any, device: torch.device, dtype: torch.dtype) -> MambaLM:
    """Make a model of a published size with random weights."""
    names = ("d_model", "n_layer", "d_state", "expand", "tie_embeddings")
    with device:
        model = MambaLM(vocab_size=sizes.vocab_size or 50280, **{name: getattr(sizes, name) for name in names})
    return model.to(dtype).eval()


@dataclass(frozen=True)
class Workload:
    """Contexts with ``continuations`` continuations each, of random ids; lengths in tokens are log-normal."""

    contexts: int
    context: int
    continuations: int
    continuation: int
    sigma: float = 0.5

    def draw(self, vocab_size: int, seed: int) -> list[Request]:
        """Draw requests, those of one context next to each other, of a quarter to four times the median length."""
        rng = np.random.Generator(np.random.PCG64(seed))

        def ids(median: int) -> list[int]:
            length = np.clip(rng.lognormal(np.log(median), self.sigma), max(1, median / 4), 4 * median)
            return rng.integers(vocab_size, size=int(length)).tolist()

        contexts = [ids(self.context) for _ in range(self.contexts)]
        return [(context, ids(self.continuation)) for context in contexts for _ in range(self.continuations)]


def packed(model: MambaLM, max_slots: int, share: bool) -> Method:
    return lambda requests: score(model, requests, max_slots, progress=False, share_contexts=share)


def padded(model: MambaLM, batch: int) -> Method:
    """Batches as lm-evaluation-harness makes them: longest first, each padded to its longest, one request a row.

    Each row is a document with padding behind it; logits are made for the continuations alone.
    """

    def run(requests: Sequence[Request]) -> list[Score]:
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][0]) - len(requests[i][1]))
        scores: dict[int, Score] = {}
        for first in range(0, len(order), batch):
            some = order[first : first + batch]
            for i, result in zip(some, _one_batch(model, [requests[i] for i in some])):
                scores[i] = result
        return [scores[i] for i in range(len(requests))]

    return run


def _one_batch(model: MambaLM, requests: list[Request]) -> list[Score]:
    device = next(model.parameters()).device
    rows = [context + continuation[:-1] for context, continuation in requests]
    longest = max(map(len, rows))
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
    layout = SequenceLayout.from_lengths([[len(ids)] for ids in rows], row_length=longest).to(device)
    with torch.inference_mode():
        hidden = model(tokens.to(device), layout=layout, return_hidden=True)
    asked = [hidden[row, len(context) - 1 : len(rows[row])] for row, (context, _) in enumerate(requests)]
    targets = torch.tensor([token for _, continuation in requests for token in continuation], device=device)
    values, greedy = [], []
    for part, log_p in log_probabilities(model, torch.cat(asked)):
        values.append(log_p.gather(1, targets[part, None]).squeeze(1))
        greedy.append(log_p.argmax(dim=1) == targets[part])
    lengths = [len(continuation) for _, continuation in requests]
    split_values = torch.cat(values).double().cpu().split(lengths)
    split_greedy = torch.cat(greedy).cpu().split(lengths)
    return [Score(float(v.sum()), bool(g.all())) for v, g in zip(split_values, split_greedy)]


def harness(model: MambaLM, batch: int, slow: bool) -> Method:
    """lm-evaluation-harness' class ``hf`` around transformers' Mamba with the same weights.

    ``slow``: transformers' path without kernels; else mamba-ssm's and causal-conv1d's, which must be installed.
    """
    from lm_eval.models.huggingface import HFLM

    theirs, tokenizer = _transformers(model)
    if slow is takes_kernels(theirs):
        raise ValueError(f"transformers' Mamba takes its {'fast' if slow else 'slow'} path here")
    lm = HFLM(pretrained=theirs, tokenizer=tokenizer, batch_size=batch)

    def run(requests: Sequence[Request]) -> list[Score]:
        # Keys that differ: the class computes equal keys once.
        keyed = [((str(i), ""), *request) for i, request in enumerate(requests)]
        return [Score(*found) for found in lm._loglikelihood_tokens(keyed, disable_tqdm=True)]

    return run


@functools.cache
def _transformers(model: MambaLM) -> tuple[Any, Any]:
    with contextlib.suppress(ValueError):  # before transformers' model is imported, which looks for the kernels then
        _peer("mamba_ssm", "ops.selective_scan_interface", "selective_scan_fn")
        _peer("mamba_ssm", "ops.triton.selective_state_update", "selective_state_update")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, format="huggingface")
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        write_tokenizer(folder, "bytes", None, "</s>")  # requests are ids already, but the class wants one
        tokenizer = AutoTokenizer.from_pretrained(folder)
    moved: Any = theirs
    return moved.to(next(model.parameters()).device).eval(), tokenizer


def takes_kernels(theirs: Any) -> bool:
    """Whether transformers' Mamba found mamba-ssm's scan when it was imported."""
    module = sys.modules[type(theirs).__module__]
    found = [getattr(module, name, None) for name in ("mamba_inner_fn", "mamba_selective_scan", "selective_scan_fn")]
    facts = [inspect.getclosurevars(function).nonlocals for function in found if function is not None]
    return any(fact.get("is_new_implementation") for fact in facts)
