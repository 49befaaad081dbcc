"""Kernel sources lie at the top of a checkout and travel as package data, which pyproject.toml says by no pattern."""

from pathlib import Path

from setuptools import find_packages, setup

folders = sorted(path.name for path in Path("kernels").iterdir() if path.is_dir())
setup(
    packages=[
        *find_packages(include=["packmamba*"]),
        "packmamba.kernels",
        *(f"packmamba.kernels.{name}" for name in folders),
    ],
    package_dir={"packmamba.kernels": "kernels"},
    package_data={"": ["*.h", "*.cpp", "*.cu", "*.cuh"]},
)
