"""The old name of ``packmamba.reproduce``."""

from packmamba.reproduce import Bench as Bench
from packmamba.reproduce import Headline as Headline
from packmamba.reproduce import Step as Step
from packmamba.reproduce import find as find
from packmamba.reproduce import kinds_of as kinds_of
from packmamba.reproduce import load_bench as load_bench
from packmamba.reproduce import module as module
from packmamba.reproduce import run_bench as run_bench
