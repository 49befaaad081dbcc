"""Parts of documents: steps that hold exactly as many tokens as they are asked to, alike in every arm."""

from collections import Counter

import numpy as np
import pytest

from packmamba.config import load_config
from packmamba.data.datamodule import PackedDataModule

ARMS = {
    "single": ["data.strategy=single"],
    "padded": ["data.strategy=padded", "data.row_length=null"],
    "packed": ["data.strategy=greedy"],
    "best_fit": ["data.strategy=best_fit", "data.slots_per_batch=128"],
}


def module(tmp_path, *overrides):
    config = load_config(None, [
        "data.source=synthetic", "data.num_documents=60", "data.distribution=short", f"data.cache_dir={tmp_path}",
        "data.row_length=64", "data.overlong=pieces", "data.tokens_per_step=200", "data.slots_per_batch=256",
        "data.vocab_size=50", *overrides,
    ])  # fmt: skip
    data = PackedDataModule.from_config(config, progress=False)
    data.setup()
    return data


def content(step):
    """Tokens, and pairs of a token and its target, counted."""
    tokens, pairs = Counter(), Counter()
    for batch in step.batches:
        inside = batch.layout.seq_idx >= 0
        tokens.update(batch.tokens[inside].tolist())
        pairs.update(zip(batch.tokens[batch.loss_mask].tolist(), batch.targets[batch.loss_mask].tolist()))
    return tokens, pairs


@pytest.mark.parametrize("longest", [None, 64, 100])
def test_every_arm_has_the_same_steps_of_exactly_so_many_tokens(tmp_path, longest):
    keys = ["data.cut_at_steps=true"] + [f"data.cut_documents={longest}"] * (longest is not None)
    arms = {name: module(tmp_path, *keys, *own) for name, own in ARMS.items()}
    train = arms["single"].corpora.train
    train_tokens = train.num_tokens - train.num_tokens % 200
    steps = train_tokens // 200
    total, pairs = Counter(), Counter()
    for number in range(steps):
        seen = {name: content(data.steps[number]) for name, data in arms.items()}
        assert all(one == seen["single"] for one in seen.values())
        step = arms["packed"].steps[number]
        assert step.num_tokens == 200
        assert step.num_targets == seen["packed"][1].total()
        total += seen["packed"][0]
        pairs += seen["packed"][1]
    assert total.total() == train_tokens and total <= Counter(np.asarray(train.tokens).tolist())
    expected = Counter()
    for i in range(train.num_documents):
        document = train.document(i).tolist()
        expected.update(zip(document, document[1:]))
    assert pairs <= expected  # the last token of a part has the next one as its target


def test_without_the_key_steps_are_as_they_were(tmp_path):
    plain, cut = module(tmp_path), module(tmp_path, "data.cut_at_steps=true")
    sizes = [plain.steps[i].num_tokens for i in range(10)]
    assert min(sizes) < 200 < max(sizes)
    assert {cut.steps[i].num_tokens for i in range(10)} == {200}


def test_long_documents_are_spread_over_steps(tmp_path):
    """Cut first, parts of one document come apart: else its tokens fill steps of their own."""
    data = module(tmp_path, "data.cut_at_steps=true", "data.cut_documents=16")
    order = data.steps.schedule._window(0).order
    assert order.lengths.max() <= 16
    assert (np.diff(order.documents) != 0).mean() > 0.9
