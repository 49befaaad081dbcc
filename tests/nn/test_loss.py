"""The chunked loss of a linear head is cross-entropy, and so are its gradients."""

import pytest
import torch
import torch.nn.functional as F

from models import LAYOUT
from operators import relative_error
from packmamba.nn import loss
from packmamba.nn.loss import linear_cross_entropy


def head_case(dtype, vocabulary=37, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*LAYOUT.shape, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, 12, generator=generator, dtype=torch.float64) / 3
    targets = torch.randint(vocabulary, LAYOUT.shape, generator=generator)
    mask = (LAYOUT.documents >= 0) & (torch.rand(LAYOUT.shape, generator=generator) < 0.8)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, mask


def plain_loss(hidden, weight, targets, mask):
    losses = F.cross_entropy((hidden.double() @ weight.double().T).flatten(0, 1), targets.flatten(), reduction="none")
    losses = torch.where(mask, losses.view(mask.shape), 0)
    return losses.sum(), losses


@pytest.mark.parametrize("slots", [None, LAYOUT.token_slots], ids=["all", "tokens"])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerances"),
    [(torch.float64, (1e-13, 1e-13)), (torch.float32, (1e-6, 1e-6)), (torch.bfloat16, (2e-3, 5e-3))],
)
def test_the_loss_is_cross_entropy(dtype, tolerances, chunk, slots, monkeypatch):
    hidden, weight, targets, mask = head_case(dtype)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk * len(weight))
    shares = None if chunk == 5 else torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    total, losses = linear_cross_entropy(hidden, weight, targets, mask, slots, shares=shares)
    expected, each = plain_loss(hidden, weight, targets, mask)
    expected = expected if shares is None else (each * shares).sum()
    assert not losses.requires_grad and losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(total.detach(), expected.detach()) <= tolerances[0]
    assert relative_error(losses, each.detach()) <= tolerances[0]
    found = torch.autograd.grad(total / 7, (hidden, weight))
    for gradient, wanted in zip(found, torch.autograd.grad(expected / 7, (hidden, weight))):
        assert relative_error(gradient, wanted.double()) <= tolerances[1]
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, targets, mask, slots)[1], losses)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [37, 9001])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_the_kernel_s_loss_is_cross_entropy(dtype, tolerance, vocabulary, monkeypatch):
    hidden, weight, targets, mask = head_case(dtype, vocabulary)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 5 * len(weight))
    shares = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    _, each = plain_loss(hidden, weight, targets, mask)
    wanted = [each.detach(), *torch.autograd.grad((each * shares).sum(), (hidden, weight))]
    leaves = [tensor.detach().cuda().requires_grad_() for tensor in (hidden, weight)]
    inputs = [tensor.cuda() for tensor in (targets, mask, LAYOUT.token_slots)]
    total, losses = linear_cross_entropy(*leaves, *inputs, shares=shares.cuda())
    found = [losses, *torch.autograd.grad(total, leaves)]
    errors = [relative_error(one.cpu(), other.double()) for one, other in zip(found, wanted)]
    assert max(errors) <= tolerance, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_s_bits_whatever_stands_beside_it(dtype, monkeypatch):
    """Compare losses and the hidden states' gradient, at one shape of chunks; other documents have
    NaN and other targets.
    """
    hidden, weight, targets, mask = head_case(dtype)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 5 * len(weight))
    results, own = [], LAYOUT.documents == 1
    for other in (hidden, torch.where(own[..., None], hidden, torch.nan)):
        there = other.detach().requires_grad_()
        total, losses = linear_cross_entropy(there, weight, torch.where(own, targets, len(results)), mask)
        results.append((losses[own], torch.autograd.grad(total, there)[0][own]))
    for one, two in zip(*results):
        assert one.isfinite().all() and one.count_nonzero() and torch.equal(one, two)


def test_the_loss_sums_the_weight_s_gradient_in_float32_beside_bfloat16_activations(monkeypatch):
    """As under autocast: the float32 weight is used in bfloat16, its gradient is not."""
    hidden, weight, targets, mask = head_case(torch.float32)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 2 * len(weight))
    narrow = hidden.detach().bfloat16().requires_grad_()
    total, _ = linear_cross_entropy(narrow, weight, targets, mask)
    expected, _ = plain_loss(narrow, weight.bfloat16(), targets, mask)
    found = torch.autograd.grad(total, weight)[0]
    assert found.dtype == torch.float32 and relative_error(found, torch.autograd.grad(expected, weight)[0]) <= 5e-3


def test_what_lies_outside_the_slots_is_never_looked_at():
    hidden, weight, targets, mask = head_case(torch.float32)
    poisoned = torch.where((LAYOUT.documents >= 0)[..., None], hidden, float("nan")).detach().requires_grad_()
    pairs = [linear_cross_entropy(x, weight, targets, mask, LAYOUT.token_slots)[0] for x in (hidden, poisoned)]
    found = [torch.autograd.grad(total, (x, weight)) for total, x in zip(pairs, (hidden, poisoned))]
    assert all(torch.equal(a, b) for a, b in zip(*found)) and found[0][0].isfinite().all()
