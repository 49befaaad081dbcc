"""PackMamba's commands in a checkout: python run.py <command>."""

import os
import sys

# before PyTorch: else OpenMP's threads spin for ms on a busy machine
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main(argv: list[str] | None = None) -> int:
    from packmamba.lab import cli

    return cli.main(argv, prog="run.py")


if __name__ == "__main__":
    sys.exit(main())
