"""The command line's entry point; the commands lie in ``packmamba.lab.cli``."""

from packmamba.lab.cli import main as main
