"""Quotients and multiples rounded up, of Python's integers and of NumPy's arrays of them.

In one place because ``-(-a // b)`` has to be worked out by every reader.
"""

from typing import TypeVar

import numpy as np

Integers = TypeVar("Integers", int, np.ndarray)


def ceil_div(dividend: Integers, divisor: int) -> Integers:
    """Divide, rounding up: how many boxes of ``divisor`` hold ``dividend`` things."""
    return -(-dividend // divisor)


def round_up(number: Integers, multiple: int) -> Integers:
    """Return the smallest multiple of ``multiple`` that is at least ``number``."""
    return ceil_div(number, multiple) * multiple
