"""PackMamba's commands in a checkout: python run.py <command>."""

from __future__ import annotations

import sys

from packmamba import cli


def main(argv: list[str] | None = None) -> int:
    return cli.main(argv, prog="run.py")


if __name__ == "__main__":
    sys.exit(main())
