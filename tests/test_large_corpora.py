"""What a corpus takes of memory does not grow with what is read of it."""

from pathlib import Path

import numpy as np
import pytest

from packmamba.config import load_config
from packmamba.data import corpus
from packmamba.data.corpus import load_corpora


def resident(path: Path) -> int:
    """Bytes of a mapped file in this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    return next(int(line.split()[1]) * 1024 for line in lines[at:] if line.startswith("Rss:"))


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs Linux's /proc")
def test_pages_that_were_read_are_given_back(tmp_path, monkeypatch):
    keys = ["data.source=synthetic", "data.num_documents=600", "data.vocab_size=70000", f"data.cache_dir={tmp_path}"]
    train = load_corpora(load_config(None, [*keys, "data.distribution=heavy"]).data, progress=False).train
    path = train.folder / "train.tokens"
    assert path.stat().st_size > 4e6
    monkeypatch.setattr(corpus, "HELD", 1 << 20)
    order = np.random.default_rng(0).permutation(len(train)).tolist()
    first = train.document(order[0])
    before, most, total = first.copy(), 0, 0
    for number, index in enumerate(order):
        total += int(train.document(index).sum(dtype=np.int64))
        if number % 29 == 0:
            most = max(most, resident(path))
    assert total == int(train.tokens.sum(dtype=np.int64))
    assert most < (1 << 20) + 4 * int(train.lengths.max()) + (1 << 17) < path.stat().st_size
    assert np.array_equal(first, before), "a view of what was given back reads it again"
