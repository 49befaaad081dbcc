"""The old name of ``packmamba.reproduce``."""

from packmamba.reproduce import *  # noqa: F403
