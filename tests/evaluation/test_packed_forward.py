"""Passes have one shape, so that a document's activations and states do not depend on the other documents by one bit."""

import numpy as np
import torch

from packmamba import MambaLM
from packmamba.evaluation.packed_forward import read_documents

LENGTHS = (1, 2, 70, 33, 300, 128, 5, 64)


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


def test_company_changes_no_bit():
    torch.manual_seed(0)
    model = MambaLM(vocab_size=64, d_model=24, n_layer=2)
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
