"""Every real token of an epoch is trained on exactly once, over all steps and ranks, and a step's numbers are those of its ranks.

Tokens are numbered, so that each says which place of which document it is. What must be there is worked out document by document.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packmamba.config import load_config
from packmamba.data import schedule
from packmamba.data.datamodule import PackedDataModule
from packmamba.data.packing import STRATEGIES
from packmamba.data.token_store import Corpora
from packmamba.training.lit_module import PackedLitModule

WINDOW = 17
"""Documents of a window, in place of a million."""
SHORT = [1, 2, 7, 1, 16, 3, 12, 5, 1, 9, 15, 16, 4, 1, 11, 8, 2, 6, 14, 3]
LONG = [1, 2, 30, 7, 1, 55, 16, 3, 24, 12, 5, 1, 9, 40, 17, 33, 16, 4, 64, 8]


class Numbered:
    """A corpus whose token i is i."""

    targets = groups = None

    def __init__(self, lengths):
        self.lengths = np.array(lengths, np.int32)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self.num_documents, self.num_tokens = len(lengths), int(self.offsets[-1])
        self.vocab_size = self.num_tokens

    def document(self, index):
        return np.arange(self.offsets[index], self.offsets[index + 1])

    def __len__(self):
        return self.num_documents


def data_of(lengths, ranks, keys):
    """The data module of each rank."""
    config = load_config(None, ["data.row_length=16", "data.tokens_per_step=48", "data.slots_per_batch=40", *keys])
    made = []
    for rank in range(ranks):
        data = PackedDataModule.from_config(config, progress=False)
        data.run = config
        data._corpora = Corpora(Numbered(lengths), Numbered([4, 2]), "numbered", {})
        data.trainer = SimpleNamespace(world_size=ranks, global_rank=rank)
        data.setup()
        made.append(data)
    return made


def count(lengths, ranks, keys, epoch=0):
    """(how often each token is trained on, how often it has a target) in an epoch over all ranks; checks each step's numbers."""
    modules = data_of(lengths, ranks, keys)
    planned = modules[0].schedule(ranks)
    windows = -(-len(lengths) // schedule.WINDOW_DOCUMENTS)
    while len(planned._first_steps) <= (epoch + 1) * windows:
        planned.step(planned._first_steps[-1])
    first, last = planned._first_steps[epoch * windows], planned._first_steps[(epoch + 1) * windows]
    trained, targets = np.zeros((2, sum(lengths)), int)
    for step in range(first, last):
        shares = [data.steps[step] for data in modules]
        batches = [batch for share in shares for batch in share.batches]
        real = [batch.layout.seq_idx.numpy() >= 0 for batch in batches]
        said = {(share.num_targets, share.num_tokens, share.num_slots, len(share.batches)) for share in shares}
        assert said == {
            (
                sum(int(batch.loss_mask.sum()) for batch in batches),
                sum(int(here.sum()) for here in real),
                sum(batch.tokens.numel() for batch in batches),
                len(batches) // ranks,
            )
        }, "every rank divides by the targets of all, and has as many batches"
        for batch, here in zip(batches, real):
            tokens, wanted, mask = (part.numpy() for part in (batch.tokens, batch.targets, batch.loss_mask))
            assert not mask[~here].any() and not tokens[~here].any() and not wanted[~mask].any()
            assert (wanted[mask] == tokens[mask] + 1).all()
            np.add.at(trained, tokens[here], 1)
            np.add.at(targets, tokens[mask], 1)
    return trained, targets


def must_be(lengths, truncated=None, cut=None):
    """The same of an epoch that trains on each token once and asks for each that follows another: what ``truncated`` to so many
    tokens a part leaves out is not there, and a part that was truncated ends a document."""
    trained, targets = [], []
    for length in lengths:
        part = min(length, cut or length)
        place = np.arange(length)
        kept = place % part < (truncated or length)
        trained += kept.tolist()
        last = (place == length - 1) | (place % part == (truncated or length) - 1) & (
            np.minimum(part, length - place // part * part) > (truncated or length)
        )
        targets += (kept & ~last).tolist()
    return np.array(trained, int), np.array(targets, int)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(schedule, "WINDOW_DOCUMENTS", WINDOW)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["matched", "stream"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_epoch_has_every_token_and_target_once(mode, strategy):
    """Documents longer than a row: refused, their tails dropped, or in pieces; split cuts at row ends whatever is said."""
    keys = [f"data.mode={mode}", f"data.strategy={strategy}"]
    for ranks in (1, 2, 3):
        for overlong, lengths in (("error", SHORT), ("pieces", LONG), ("truncate", LONG)):
            truncated = 16 if overlong == "truncate" and strategy != "split" else None
            found = count(lengths, ranks, [*keys, f"data.overlong={overlong}"])
            np.testing.assert_array_equal(found, must_be(lengths, truncated), f"{ranks} ranks, {overlong}")
            dropped = sum(lengths) - int(found[0].sum())
            assert dropped == (sum(max(0, length - 16) for length in lengths) if truncated else 0)


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=40),
    ranks=st.integers(1, 3),
    epoch=st.integers(0, 1),
    strategy=st.sampled_from(sorted(STRATEGIES)),
    mode=st.sampled_from(["matched", "stream"]),
    overlong=st.sampled_from(["pieces", "truncate"]),
    tokens_per_step=st.integers(1, 200),
    slots_per_batch=st.integers(1, 100),
    cut=st.none() | st.integers(1, 40),
    cut_at_steps=st.booleans(),
    streams=st.integers(1, 5),
    stagger=st.booleans(),
    shuffled=st.none() | st.integers(1, 3),
)
def test_whatever_the_keys_are(lengths, ranks, epoch, strategy, mode, overlong, cut, cut_at_steps, **options):
    splits, pads = STRATEGIES[strategy].splits_documents, STRATEGIES[strategy].pads
    if cut_at_steps and overlong == "truncate":
        overlong = "pieces"  # where steps end would say what is dropped
    keys = {"mode": mode, "strategy": strategy, "overlong": overlong, "buffer": 4}
    keys |= {name: options[name] for name in ("tokens_per_step", "slots_per_batch")}
    keys |= {"cut_documents": cut or "null", "cut_at_steps": cut_at_steps and mode == "matched"}
    keys |= {
        "streams": options["streams"] if splits else 1,
        "stagger": options["stagger"] and splits and mode == "stream",
    }
    keys["shuffle_steps"] = (options["shuffled"] if mode == "stream" and pads else None) or "null"
    found = count(lengths, ranks, [f"data.{name}={value}" for name, value in keys.items()], epoch)
    truncated = 16 if overlong == "truncate" and not splits else None
    np.testing.assert_array_equal(found, must_be(lengths, truncated, cut))


STREAM = ["data.mode=stream", "data.tokens_per_step=96"]
CARRYING = {
    "matched": ["data.mode=matched"],
    "stream": STREAM,
    "stagger": [*STREAM, "data.stagger=true"],
    "turns": ["data.mode=stream", "data.streams=12", "data.slots_per_batch=16"],
}


@pytest.mark.parametrize("keys", CARRYING.values(), ids=CARRYING)
def test_carrying_streams_over_ranks(keys):
    given = ["data.strategy=split", "data.streams=6", "trainer.boundary=carry", *keys]
    for ranks in (1, 3):
        np.testing.assert_array_equal(count(LONG, ranks, [*given, f"trainer.devices={ranks}"]), must_be(LONG))


def test_the_last_step_of_a_window_is_smaller_and_divides_by_its_own_targets():
    """Nothing waits for the next epoch: the last step has what is left, on some ranks perhaps nothing."""
    modules = data_of([16] * 7, 2, ["data.strategy=in_order"])
    found = [data.steps[step] for step in range(3) for data in modules]
    assert [step.num_tokens for step in found] == [48, 48, 48, 48, 16, 16]
    assert [step.num_targets for step in found[-2:]] == [15, 15]
    assert [sum(int(batch.loss_mask.sum()) for batch in step.batches) for step in found[-2:]] == [15, 0]
    assert modules[0].steps[3].num_tokens == 48, "the next epoch begins"


def gradients(module, data, step, ranks):
    """What an optimizer gets: the mean over ranks, as DDP and FSDP2 make it."""
    module.zero_grad()
    loss = sum(float(module.accumulate(one.steps[step], torch.Tensor.backward, ranks)) for one in data)
    return loss, [parameter.grad / ranks for parameter in module.parameters()]


@pytest.mark.parametrize("mode", ["matched", "stream"])
@pytest.mark.parametrize("strategy", ["single", "greedy"])
def test_ranks_together_have_one_process_s_gradient(strategy, mode):
    """Against the mean over all targets of a step, which one process computes without dividing a batch's loss at all."""
    keys = [
        f"data.mode={mode}",
        f"data.strategy={strategy}",
        "data.overlong=pieces",
        "model.d_model=8",
        "model.n_layer=1",
    ]
    torch.manual_seed(0)
    alone = data_of(LONG, 1, keys)
    module = PackedLitModule.from_config(alone[0].run, sum(LONG)).double()
    shared = {ranks: data_of(LONG, ranks, keys) for ranks in (2, 3)}
    uneven = set()
    for step in range(3):
        batches = alone[0].steps[step].batches
        loss = sum(module.loss(batch)[0] for batch in batches) / sum(batch.loss_mask.sum() for batch in batches)
        expected = torch.autograd.grad(loss, list(module.parameters()))
        for ranks, data in ((1, alone), *shared.items()):
            found, made = gradients(module, data, step, ranks)
            assert found == pytest.approx(loss.item(), rel=1e-6)  # losses are summed in float32 to be shown
            for a, b in zip(made, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
            uneven |= {
                ranks for one in data if not any(batch.loss_mask.any() for batch in one.steps[step].batches[-1:])
            }
    assert uneven, "in some step a rank's last batch is empty"
