"""A batch's forward and backward pass as a CUDA graph: how a batch fills a shape, and the gradients
of eager steps.
"""

import pytest
import torch

from packmamba.config import load_config
from packmamba.data.batch import PackedBatch
from packmamba.lab.fit import fit
from packmamba.layout import SequenceLayout
from packmamba.training.boundary import BOUNDARIES, flatten_states
from packmamba.training.cuda_graphs import ABSENT, BatchGraphs, Shape, StaticBatch
from packmamba.training.lit_module import PackedLitModule
from runs import data_of, tiny_config


def random_batch(lengths, row_length, seed=0):
    layout = SequenceLayout.from_lengths(lengths, row_length=row_length)
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(1, 50, layout.shape, generator=generator) for _ in range(2))
    mask = layout.documents >= 0
    return PackedBatch(torch.where(mask, tokens, 0), torch.where(mask, targets, 0), mask, layout)


@pytest.mark.parametrize("lengths", [[[3, 90], [100], []], [[128] * 2, [256], [1]]])
def test_a_batch_fills_its_shape(lengths):
    batch = random_batch(lengths, max(map(sum, lengths)))
    shape = Shape.of(batch, accumulates=False)
    assert shape.row_length % 128 == 0 and shape.documents == 4 and shape.longest in (128, 256)
    static = StaticBatch(shape, torch.device("cpu"))
    # nothing of an earlier batch is left
    for filled in (random_batch([[7], [9], [4]], shape.row_length), batch):
        static.fill(filled, num_targets=5)
    mine, count = static.batch, batch.layout.num_documents
    assert static.num_targets == 5
    assert (mine.layout.starts[count:] == ABSENT).all() and (mine.layout.ends[count:] == ABSENT).all()
    expected = SequenceLayout.from_lengths(lengths, row_length=shape.row_length)
    assert torch.equal(mine.layout.starts[:count], expected.starts)
    assert torch.equal(mine.layout.ends[:count], expected.ends)
    for name in ("tokens", "targets", "loss_mask"):
        given, filled = getattr(batch, name), getattr(mine, name)
        width = given.shape[1]
        assert torch.equal(filled[:, :width], given) and not filled[:, width:].any()
    assert mine.layout.num_tokens == mine.layout.num_slots, "how many slots hold tokens is not the shape's"
    assert mine.layout.flow() == SequenceLayout.from_rows(*mine.layout.shape)


def module(*overrides):
    torch.manual_seed(0)
    config = load_config(None, ["model.vocab_size=50", "model.d_model=64", "model.recompute=inner", *overrides])
    with torch.device("cuda"):
        return PackedLitModule.from_config(config, 50)


def gradients(lit):
    return [parameter.grad.clone() for parameter in lit.parameters()]


def assert_near(results, expected, tolerance):
    for result, value in zip(results, expected, strict=True):
        assert (result - value).norm() <= tolerance * value.norm()


BATCHES = [
    random_batch([[60, 3, 65], [128]], 128, 0),
    random_batch([[100, 20], [1, 2, 3]], 120, 1),  # more documents, with padding
    random_batch([[300]], 300, 2),
    random_batch([[60, 64, 4], [127]], 128, 3),  # the first one's
]


def check_steps(lit, replay, steps, boundary, tolerance):
    """Each step's losses and gradients, eager and replayed, and again with other weights."""
    device = next(lit.parameters()).device
    for _ in range(3):
        for step in steps:
            batches = [batch.to(device) for batch in step]
            lit.zero_grad()
            expected = [lit.loss(batch, BOUNDARIES[boundary]()) for batch in batches]
            (sum(total for total, _ in expected) / 7).backward()
            # no autograd graph outlives its step
            expected = [(total.detach(), losses) for total, losses in expected]
            expected_gradients = gradients(lit)
            for i, (batch, (total, losses)) in enumerate(zip(batches, expected)):
                found = replay(batch, 7, first=i == 0, last=i + 1 == len(step))
                assert_near([found[0] * 7, found[1]], [total, losses], tolerance)
            assert_near(gradients(lit), expected_gradients, tolerance)
        with torch.no_grad():
            for parameter in lit.parameters():
                parameter.mul_(1.05)


def stored(boundary):
    """The states that a scheme has for later batches, and where their documents stopped."""
    if isinstance(boundary.stored, dict):
        turns = [boundary.stored[turn] for turn in sorted(boundary.stored)]
        return [part for states, *_ in turns for part in flatten_states(states)], [
            ends.tolist() for _, ends, _ in turns
        ]
    return flatten_states(boundary.stored), []


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("scheme", [name for name, scheme in BOUNDARIES.items() if scheme.stateful])
def test_stateful_schemes_are_replayed(tmp_path, scheme, compiled):
    """Steps of two batches in turns of a pool, replayed and eager: losses, gradients, and what is
    left for later batches.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    keys = ["data.strategy=concat_split", "data.streams=12", "data.stagger=true", "data.batching=stream", "data.row_length=24",
            "data.tokens_per_step=144", "data.max_tokens_per_batch=72"]  # fmt: skip
    config = tiny_config(tmp_path, *keys, f"trainer.boundary={scheme}", f"model.compile={compiled}")
    data = data_of(config)
    eager, replayed = (PackedLitModule.from_config(config, data.vocab_size).to("cuda") for _ in range(2))
    replayed.load_state_dict(eager.state_dict())  # a copy would not be compiled
    replayed.cuda_graphs, continuing = True, 0
    for number in (0, 1, 2, 3, 0, 1):
        step, found = data.steps[number].to("cuda"), []
        continuing += sum(int(batch.layout.continues.sum()) for batch in step.batches)
        for lit in (replayed, eager):
            lit.zero_grad()
            lit.boundary.step = number
            found.append([lit.accumulate(step, torch.Tensor.backward), *gradients(lit)])
        assert_near(*found, 1e-5)
        (states, positions), (expected_states, expected) = (stored(lit.boundary) for lit in (replayed, eager))
        assert_near(states, expected_states, 1e-5)
        assert positions == expected
    assert continuing > 3


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("boundary", ["reset", "leak", "leak_scan"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["32", "bf16"])
def test_losses_and_gradients_are_those_of_eager_steps(dtype, tolerance, boundary, compiled):
    torch._dynamo.reset()
    lit = module(f"model.compile={compiled}")
    replay = BatchGraphs(lambda batch: lit.loss(batch, BOUNDARIES[boundary]()), list(lit.parameters()))
    compiles_few = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
    with compiles_few, torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        check_steps(lit, replay, [[batch] for batch in BATCHES], boundary, tolerance)
        assert len(replay.captured) == 2, "one for each row length; it grows with what batches need"
        check_steps(lit, replay, [BATCHES, BATCHES[2:]], boundary, tolerance)
        assert len(replay.captured) == 4, "those that add gradients are others"


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["single", "padded", "best_fit_decreasing"])
def test_a_run_learns_the_same(tmp_path, strategy):
    keys = [f"data.strategy={strategy}", "data.overlong=truncate", "trainer.accelerator=gpu"]
    plain = fit(tiny_config(tmp_path, "name=plain", *keys), progress=False)
    graph = fit(tiny_config(tmp_path, "name=graph", "trainer.cuda_graphs=true", *keys), progress=False)
    for a, b in zip(plain["curves"]["train"], graph["curves"]["train"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    assert plain["metrics"]["val_loss"] == pytest.approx(graph["metrics"]["val_loss"], rel=1e-4)


@pytest.mark.gpu
def test_clipping_in_the_fused_step_is_clipping(tmp_path):
    losses = []
    for accelerator in ("cpu", "gpu"):
        keys = ["data.strategy=greedy", "optimizer.grad_clip=0.9", f"trainer.accelerator={accelerator}"]
        config = tiny_config(tmp_path, f"name={accelerator}", *keys)
        losses.append([point["loss"] for point in fit(config, progress=False)["curves"]["train"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
