"""leakcheck finds what crosses a document boundary and raises no false alarm: each model here is
tight, or leaks, as made.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import VOCAB, build
from packmamba import SequenceLayout, leakcheck
from packmamba.isolation.adapters import adapt


def layout_of(tokens, lengths):
    return SequenceLayout.from_lengths([lengths], row_length=tokens.shape[1])


def mamba():
    return build(dtype=torch.float32)


def by_document(function):
    """A row function applied to each document by itself."""
    return lambda x, lengths: torch.cat([function(part) for part in x.split(list(lengths), 1)], 1)


def mean_so_far(x):
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Toy(nn.Module):
    """Embedding, something along the row, head; it finds documents in position_ids."""

    def __init__(self, along, *middle):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 16)
        self.middle = nn.Sequential(nn.Linear(16, 16), *middle)
        self.head = nn.Linear(16, VOCAB)
        self.along = along

    def forward(self, input_ids, position_ids=None):
        starts = [0] if position_ids is None else (position_ids[0] == 0).nonzero().flatten().tolist()
        lengths = np.diff([*starts, input_ids.shape[1]]).tolist()
        x = self.along(self.middle(self.embedding(input_ids)), lengths)
        return SimpleNamespace(logits=self.head(x))


class ThroughTime(nn.BatchNorm1d):
    """Batch norm over all slots of a row."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Experts(nn.Module):
    """A mixture of experts. With a capacity, an expert drops tokens that come after it is full."""

    def __init__(self, capacity=None):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16)) for _ in range(4))
        self.capacity = capacity

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        choice = self.router(flat).argmax(-1)
        out = flat.clone()
        for number, expert in enumerate(self.experts):
            mine = (choice == number).nonzero().flatten()[: self.capacity]
            out[mine] = out[mine] + expert(flat[mine])  # as many rows as other tokens leave it
        return out.view_as(x)


class Adapted(nn.Module):
    """As PEFT's model for no task of its own."""

    def __init__(self, model):
        super().__init__()
        self.get_base_model = lambda: model
        self.model = model

    def forward(self, *args, **kwargs):
        return {"logits": self.model(*args, **kwargs).logits}


TIGHT = {
    "adapted": lambda: Adapted(Toy(by_document(mean_so_far))),
    "each document by itself": lambda: Toy(by_document(mean_so_far)),
    "bidirectional": lambda: Toy(by_document(lambda x: x + x.mean(1, keepdim=True))),
    "dropout": lambda: Toy(by_document(mean_so_far), nn.Dropout(0.3)),
    "experts": lambda: Toy(by_document(mean_so_far), Experts()),
}


@pytest.mark.parametrize("name", TIGHT)
def test_a_tight_model_passes(name):
    result = leakcheck(TIGHT[name]())
    assert result.isolated_forward and result.isolated_backward and result.same_as_alone, str(result)
    assert result.ok and result.reach == 0 and result.module is None and result.mixes


def test_a_model_that_mixes_nothing_can_show_no_leak():
    result = leakcheck(Toy(lambda x, lengths: x))
    assert result.ok and result.mixes is False and "no leak could show" in str(result)


def behind(function):
    """x plus something of the whole row."""
    return lambda x, lengths: by_document(mean_so_far)(x, lengths) + function(x)


def taps(x):
    return F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1).mean(-1)


def from_the_first_token(x, lengths):
    """Leak at the first token only, which changing a last token does not show."""
    return by_document(mean_so_far)(x, lengths) + x[:, :1].detach().sign()


def a_gradient_at_one_boundary(x, lengths):
    start = sum(lengths[: (len(lengths) + 1) // 2])
    last, slot = x[:, start - 1, None], torch.arange(x.shape[1])[:, None] == start
    return by_document(mean_so_far)(x, lengths) + slot * (last - last.detach())


LEAKS = {  # forward, backward
    "a state": (lambda: Toy(lambda x, lengths: mean_so_far(x)), False, False),
    "a convolution": (lambda: Toy(lambda x, lengths: taps(x)), False, False),
    "a later document": (lambda: Toy(behind(lambda x: x.flip(1).cumsum(1).flip(1) / 50)), False, False),
    "no gradient": (lambda: Toy(behind(lambda x: x.cumsum(1).detach() / 50)), False, True),
    "a gradient alone": (lambda: Toy(behind(lambda x: mean_so_far(x) - mean_so_far(x).detach())), True, False),
    "a gradient at one boundary": (lambda: Toy(a_gradient_at_one_boundary), True, False),
    "a gradient that is not a number": (lambda: Toy(behind(lambda x: 0 * (x - x).cumsum(1).abs().sqrt())), True, False),
    "the row's first token alone": (lambda: Toy(from_the_first_token), False, True),
    "experts that are full": (lambda: Toy(by_document(mean_so_far), Experts(capacity=30)), False, True),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_found(name):
    make, forward, backward = LEAKS[name]
    result = leakcheck(make())
    assert result.leaks and not result.ok
    assert (result.isolated_forward, result.isolated_backward) == (forward, backward), str(result)


class Flickering(Toy):
    """As kernels whose sums come in any order."""

    count, size = 0, 1e-7

    def forward(self, input_ids, position_ids=None):
        self.count += 1
        return super().forward(input_ids, position_ids).logits + self.size * (self.count % 3)


def test_moves_below_a_model_s_own_flicker_are_not_seen():
    result = leakcheck(Flickering(by_document(mean_so_far)))
    assert not result.leaks and "Two calls with the same tokens differ by" in str(result)
    assert leakcheck(Flickering(LEAKS["a state"][0]().along)).leaks


def test_a_small_move_without_a_gradient_is_rounding_only_where_tokens_are_routed():
    small = behind(lambda x: 2e-8 * x.cumsum(1).detach())
    assert leakcheck(Toy(small)).isolated_forward is False
    result = leakcheck(Toy(small, Experts()))
    # it cannot be told from rounding
    assert result.isolated_forward and "rounding alone" in str(result)
    # that something is bfloat16 excuses no move in float32
    one = torch.ones(1, dtype=torch.bfloat16)
    assert leakcheck(Toy(behind(lambda x: 0.01 * x.mean(1, keepdim=True).detach() * (one + 0)), Experts())).leaks


def test_how_far_and_where():
    result = leakcheck(LEAKS["a state"][0]())
    assert result.reach == 129 and result.endless
    result = leakcheck(LEAKS["a convolution"][0]())
    assert result.reach == 3 and not result.endless

    class Convolved(Toy):
        """A convolution is a module of its own, longer than the row, as on Hugging Face's slow
        path.
        """

        def forward(self, input_ids, **_):
            linear, conv1d = self.middle
            x = linear(self.embedding(input_ids))
            return self.head(conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2).cumsum(1))

    result = leakcheck(Convolved(None, nn.Conv1d(16, 16, 4, padding=3)))
    assert result.module == "middle.1 (Conv1d)" and result.endless and result.ignored


def test_batch_norm_leaks_in_training_alone_and_is_left_as_it_was():
    toy = Toy(by_document(mean_so_far), ThroughTime(16))
    before = {name: value.clone() for name, value in toy.state_dict().items()}
    result = leakcheck(toy)
    assert result.leaks and result.same_as_alone and "In training mode alone" in str(result)
    assert "middle.1" in result.module
    torch.testing.assert_close(dict(toy.state_dict()), before, rtol=0, atol=0)


def test_everything_is_left_as_it_was():
    toy = Toy(by_document(mean_so_far), nn.Dropout(0.3)).train()
    toy.head.eval()
    toy(torch.arange(9)[None]).logits.sum().backward()
    gradients = [p.grad.clone() for p in toy.parameters()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    leakcheck(toy)
    assert torch.equal(torch.get_rng_state(), state)
    assert toy.training and toy.middle.training and not toy.head.training
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(toy.parameters(), gradients))


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_reentrant_checkpointing_leaves_the_gradient_unseen():
    class Checkpointed(Toy):
        def forward(self, input_ids, position_ids=None):
            self.middle.forward = lambda x: checkpoint(self.middle[0], x, use_reentrant=True)
            return super().forward(input_ids, position_ids)

    result = leakcheck(Checkpointed(by_document(mean_so_far)))
    assert result.ok and result.isolated_forward and result.isolated_backward is None
    assert leakcheck(Checkpointed(lambda x, lengths: mean_so_far(x))).leaks


def test_what_is_carried_between_calls_leaks():
    carrying = Flickering(by_document(mean_so_far))
    carrying.size = 0.1
    result = leakcheck(carrying)
    assert result.leaks and "carried from one call to the next" in str(result)


def test_a_place_in_the_row_shows_in_no_move():
    """Hold that positions in the row show beside each document alone only."""
    toy = Toy(lambda x, lengths: by_document(mean_so_far)(x, lengths) + torch.arange(x.shape[1])[:, None] / 50)
    result = leakcheck(toy)
    assert not result.leaks and result.same_as_alone is False and not result.ok


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "position_ids+seq_idx"])
def test_an_argument_that_a_model_refuses(name):
    result = leakcheck(Toy(by_document(mean_so_far)), boundaries=name)
    assert "TypeError" in result.raises and not result.leaks and not result.ok and result.isolated_forward is None


def test_padding_on_either_side():
    class Masked(Toy):
        def forward(self, input_ids, attention_mask=None, position_ids=None):
            return super().forward(input_ids, position_ids)

    result = leakcheck(Masked(by_document(mean_so_far)))
    assert result.ok and result.padding == {"left": False, "right": True}
    assert leakcheck(Masked(by_document(mean_so_far)), "attention_mask").leaks


def test_our_model_by_its_layout():
    model = mamba()
    result = leakcheck(model)
    assert result.ok and result.boundaries == "layout"

    def leaking(conv, scan):
        def call(tokens, lengths):
            layout = layout_of(tokens, lengths)
            flows = (layout.flow() if leaks else layout for leaks in (conv, scan))
            return model(tokens, layout, *flows)

        return call

    for conv, scan in ((True, False), (False, True), (True, True)):
        result = leakcheck(leaking(conv, scan), vocab_size=VOCAB, lengths=[5, 1, 8])
        assert result.leaks and result.isolated_forward is False and result.isolated_backward is False
        assert result.module == "backbone.layers.0 (Block)"
    compiled = mamba()
    compiled.compile_blocks(backend="eager")
    assert leakcheck(compiled, lengths=[3, 4]).ok  # each length compiles again
    assert leakcheck(torch.compile(mamba(), backend="eager"), lengths=[3, 4]).boundaries == "layout"


def test_widened_logits_have_the_rounding_of_the_weights():
    class Rounding(Toy):
        def forward(self, input_ids, position_ids=None):
            logits = super().forward(input_ids, position_ids).logits.float()
            return logits if position_ids is None else logits * 1.0005

    model = Rounding(by_document(mean_so_far))
    assert leakcheck(model).same_as_alone is False
    assert leakcheck(model.half()).ok


def test_callables():
    """Without modules, without gradients, in other dtypes, with ids of the size that was asked for."""
    seen = []

    def tight(tokens, lengths):
        seen.append(int(tokens.max()))
        assert tokens.dtype == torch.int64 and tokens.shape == (1, sum(lengths))
        return by_document(lambda x: x.cumsum(1))(F.one_hot(tokens, 7).bfloat16(), lengths)

    result = leakcheck(tight, vocab_size=7)
    assert result.ok and result.isolated_backward and max(seen) == 6
    leaking = leakcheck(lambda tokens, lengths: F.one_hot(tokens, 32).double().cumsum(1))
    assert (leaking.isolated_forward, leaking.isolated_backward, leaking.same_as_alone) == (False, False, False)
    with torch.no_grad():
        model = mamba()
        assert leakcheck(lambda t, lengths: model(t, layout_of(t, lengths)), vocab_size=VOCAB).isolated_backward
    assert adapt(partial(lambda m, t, lengths: m(t, layout_of(t, lengths)), model), "lengths", None).modules == [model]
    unseen = leakcheck(lambda t, lengths: model(t, layout_of(t, lengths)).detach(), vocab_size=VOCAB)
    assert unseen.ok and unseen.isolated_backward is None
    assert leakcheck(tight, vocab_size=7, lengths=[3, 4]).ok


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((Toy,), "model_or_callable"),
        ((torch.nn.DataParallel(Toy(mean_so_far)),), "model_or_callable"),
        ((Toy(mean_so_far), "position_ids", None, [2.5, 3]), "lengths"),
        ((Toy(mean_so_far), "position_ids", None, 3), "lengths"),
        ((Toy(mean_so_far), "positions"), "boundaries"),
        ((Toy(mean_so_far), "position_ids", 1), "vocab_size"),
        ((lambda t, _: torch.zeros(1, t.shape[1], 4),), "logits"),
        ((lambda t, _: torch.full((1, t.shape[1], 4), torch.nan),), "logits"),
    ],
)
def test_arguments(arguments, name):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
        leakcheck(*arguments)
