"""Packed scores are those of one document at a time, and depend on neither order nor company by one bit."""

from __future__ import annotations

import random

import pytest
import torch

from operators import DEVICES
from packmamba import MambaLM
from packmamba.evaluation import Score, score


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MambaLM(vocab_size=50, d_model=32, n_layer=3, learned_initial_state=True).double()


def make_requests(seed=0, count=40):
    """Contexts with one to four continuations, some longer than a pass, some empty."""
    rng = random.Random(seed)

    def ids(n):
        return [rng.randrange(50) for _ in range(n)]

    requests = []
    for i in range(count):
        context = ids(rng.choice([1, 2, 7, 30, 61])) if i % 9 else []
        requests += [(context, ids(rng.choice([1, 1, 2, 5, 20]))) for _ in range(rng.choice([1, 1, 2, 4]))]
    requests += [(ids(200), ids(90)), (ids(150), ids(3)), (ids(3), ids(150))]
    shared = ids(130)
    return requests + [(shared, ids(n)) for n in (1, 2, 70, 140)] + requests[:3]


def alone(model, context, continuation, begin):
    """By the definition: one document, all of its logits."""
    context = context or [begin]
    tokens = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        log_p = model(tokens).log_softmax(-1)[0, len(context) - 1 : -1]
    targets = torch.tensor(continuation)
    return Score(
        float(log_p.gather(1, targets[:, None]).sum()),
        bool((log_p.argmax(-1) == targets).all()),
    )


@pytest.mark.parametrize("max_slots", [64, 500])
def test_scores_are_those_of_documents_alone(model, max_slots):
    requests = make_requests()
    greedy = [int(model(torch.tensor([[1, 2, 3]])).argmax(-1)[0, -1])]
    requests.append(([1, 2, 3], greedy))
    scores = score(model, requests, max_slots=max_slots, begin_token=7)
    assert scores[-1].is_greedy and not all(s.is_greedy for s in scores)
    for found, request in zip(scores, requests):
        expected = alone(model, *request, begin=7)
        assert abs(found.log_likelihood - expected.log_likelihood) < 1e-9
        assert found.is_greedy == expected.is_greedy


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_order_nor_company_changes_a_bit(model, dtype, device):
    lm = MambaLM(**model.config)
    lm.load_state_dict(model.state_dict())
    lm = lm.to(device, dtype)
    requests = make_requests()
    scores = score(lm, requests, max_slots=128, begin_token=7)
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    assert score(lm, [requests[i] for i in order], max_slots=128, begin_token=7) == [scores[i] for i in order]
    for some in (order[:1], order[:9], order[-30:]):
        assert score(lm, [requests[i] for i in some], max_slots=128, begin_token=7) == [scores[i] for i in some]


def test_a_shared_context_is_computed_once(model, monkeypatch):
    seen = []
    forward = MambaLM.forward
    monkeypatch.setattr(
        MambaLM, "forward", lambda self, tokens, layout, **o: seen.append(layout.num_tokens) or forward(self, tokens, layout, **o)
    )  # fmt: skip
    score(model, [([1] * 100, [2, 3, choice]) for choice in range(4)], max_slots=256)
    assert sum(seen) == 100 + 4 * 2


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([([1], [])], {}, r"requests\[0\]: continuation: expected at least one token, got none"),
        ([([1], [2]), ([], [2])], {}, r"requests\[1\]: context: expected at least one token without begin_token"),
        ([([1], [50])], {}, r"requests\[0\]: continuation: expected ids from 0 to 49, got 50"),
        ([([-1], [5])], {}, r"requests\[0\]: context: expected ids from 0 to 49, got -1"),
        ([([1.5], [5])], {}, r"requests\[0\]: context: expected integers, got 1.5"),
        ([("ab", [5])], {}, r"requests\[0\]: context: expected a list of token ids, got str"),
        ([[1, 2, 3]], {}, r"requests\[0\]: expected a pair \(context, continuation\)"),
        ([([1], [2])], {"max_slots": 0}, "max_slots: expected an integer of at least 1, got 0"),
        ([([], [2])], {"begin_token": 50}, "begin_token: expected ids from 0 to 49, got 50"),
    ],
)
def test_refuses_in_one_sentence(model, requests, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        score(model, requests, **options)


def test_nothing_to_score(model):
    assert score(model, []) == []
