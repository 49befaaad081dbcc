"""Integers rounded up, alone and in arrays."""

import numpy as np
import pytest

from packmamba.integers import ceil_div, round_up


@pytest.mark.parametrize(
    ("number", "step", "quotient", "rounded"),
    [(0, 4, 0, 0), (1, 4, 1, 4), (4, 4, 1, 4), (5, 4, 2, 8), (2**40 + 1, 2**20, 2**20 + 1, 2**40 + 2**20)],
)
def test_quotients_and_multiples_are_rounded_up(number, step, quotient, rounded):
    assert (ceil_div(number, step), round_up(number, step)) == (quotient, rounded)
    array = np.array([number, number])
    assert (ceil_div(array, step) == quotient).all() and (round_up(array, step) == rounded).all()
