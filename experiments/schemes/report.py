"""The library's tables, without the speed of training runs, which shared their machine."""

from experiments.common import without_speeds
from packmamba.lab.report.html import KINDS as LIBRARY

KINDS = {"training": without_speeds(LIBRARY["training"])}
