"""Packed scores are those of one document at a time, and depend on neither order nor company by one
bit.
"""

import random

import pytest
import torch

from operators import DEVICES
from packmamba import MambaLM
from packmamba.evaluation import Score, score


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MambaLM(vocab_size=50, d_model=32, n_layer=3).double()


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


def alone(model, context, continuation):
    tokens = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        log_p = model(tokens).log_softmax(-1)[0, len(context) - 1 : -1]
    targets = torch.tensor(continuation)
    total = float(log_p.gather(1, targets[:, None]).sum())
    return Score(total, bool((log_p.argmax(-1) == targets).all()))


@pytest.mark.parametrize("max_slots", [64, 500])
def test_scores_are_those_of_documents_alone(model, max_slots):
    greedy = [int(model(torch.tensor([[1, 2, 3]])).argmax(-1)[0, -1])]
    requests = [*make_requests(), ([1, 2, 3], greedy)]
    scores = score(model, requests, max_slots=max_slots, begin_token=7)
    assert scores[-1].is_greedy and not all(s.is_greedy for s in scores)
    for found, (context, continuation) in zip(scores, requests):
        expected = alone(model, context or [7], continuation)
        assert abs(found.log_likelihood - expected.log_likelihood) < 1e-9
        assert found.is_greedy == expected.is_greedy
    assert score(model, []) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_and_company_change_no_bit(model, dtype, device):
    lm = MambaLM(**model.config)
    lm.load_state_dict(model.state_dict())
    lm = lm.to(device, dtype)
    requests = make_requests()
    scores = score(lm, requests, max_slots=128, begin_token=7)
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    for some in (order, order[:1], order[:9], order[-30:]):
        assert score(lm, [requests[i] for i in some], max_slots=128, begin_token=7) == [scores[i] for i in some]


def test_a_shared_context_is_computed_once(model, monkeypatch):
    tokens = []
    forward = MambaLM.forward

    def counted(self, *arguments, layout, **options):
        tokens.append(layout.num_tokens)
        return forward(self, *arguments, layout=layout, **options)

    monkeypatch.setattr(MambaLM, "forward", counted)
    score(model, [([1] * 100, [2, 3, choice]) for choice in range(4)], max_slots=256)
    assert sum(tokens) == 100 + 4 * 2
    tokens.clear()
    score(model, make_requests(), max_slots=96, begin_token=7)
    assert max(tokens) <= 96


@pytest.mark.parametrize(
    ("requests", "options", "match"),
    [
        ([([1], [])], {}, r"requests\[0\]: continuation"),
        ([([1], [2]), ([], [2])], {}, r"requests\[1\]: context"),
        ([([1], [2])], {"max_slots": 0}, "max_slots"),
        ([([], [2])], {"begin_token": 50}, "begin_token"),
    ],
)
def test_errors_name_the_argument(model, requests, options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        score(model, requests, **options)
