"""Length distributions."""

import hashlib

import numpy as np
import pytest

from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths


@pytest.mark.parametrize(("name", "digest"), [("documents-2k", "6b9e94"), ("short", "0de01e"), ("heavy", "00221c")])
def test_lengths_are_the_same_on_every_machine(name, digest):
    lengths, distribution = draw_lengths(name, 20_000, 3), LENGTH_DISTRIBUTIONS[name]
    assert distribution.shortest <= lengths.min() and lengths.max() <= distribution.longest
    assert np.median(lengths) == pytest.approx(np.exp(distribution.mu), rel=0.05)
    assert hashlib.sha256(lengths.tobytes()).hexdigest()[:6] == digest
