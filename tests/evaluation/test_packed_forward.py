"""Passes have one shape, so that a document's activations and states do not depend on the other documents by one bit."""

import numpy as np
import pytest
import torch

from packmamba import MambaLM
from packmamba.evaluation import packed_forward
from packmamba.evaluation.packed_forward import head_rows, log_probabilities, read_documents

LENGTHS = (1, 2, 70, 33, 300, 128, 5, 64)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MambaLM(vocab_size=64, d_model=24, n_layer=2)


def read(model, documents, max_slots):
    parts, finals = {}, {}
    passes = list(
        read_documents(model, documents, max_slots, lambda i, at, h: parts.setdefault(i, []).append((at, h)), finals)
    )
    hidden = [torch.cat([h for _, h in parts[i]]) for i in range(len(documents))]
    for i in range(len(documents)):
        assert [at for at, _ in parts[i]] == list(range(0, len(documents[i]), max_slots))
    states = [[part[row] for layer in pool for part in layer] for pool, row in (finals[i] for i in sorted(finals))]
    return passes, hidden, states


def test_company_changes_no_bit(model):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 64, n) for n in LENGTHS]
    passes, hidden, states = read(model, documents, 96)
    assert sum(passes) == sum(LENGTHS) and max(passes) <= 96
    for i, document in enumerate(documents):
        _, (alone,), (state,) = read(model, [document], 96)
        assert torch.equal(alone, hidden[i])
        assert all(torch.equal(a, b) for a, b in zip(state, states[i], strict=True))
        with torch.no_grad():
            expected = model(torch.tensor(document)[None], return_hidden=True)[0]
        assert torch.allclose(alone, expected, atol=1e-5)


def test_rows_of_logits_fill_a_gpu_and_are_constant(model, monkeypatch):
    assert [head_rows(size, True) for size in (2, 256, 4096, 50280, 10**9)] == [16384, 16384, 8192, 512, 512]
    assert head_rows(256, False) == 512
    hidden = torch.randn(70, 24)
    (expected,) = (log_p for _, log_p in log_probabilities(model, hidden))
    monkeypatch.setattr(packed_forward, "head_rows", lambda vocab_size, on_gpu: 16)
    found = torch.cat([log_p for _, log_p in log_probabilities(model, hidden)])
    assert torch.allclose(found, expected, atol=1e-6) and torch.allclose(found.exp().sum(1), torch.ones(70))
