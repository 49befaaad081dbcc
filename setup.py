"""Sources of kernels and configurations lie at the top of a checkout and travel as package data."""

from pathlib import Path

from setuptools import find_packages, setup

outside = {"kernels": ["*.h", "*.cpp", "*.cu", "*.cuh"], "configs": ["*.yaml"]}
folders = [name for top in outside for name in (top, *(f"{top}/{p.name}" for p in Path(top).iterdir() if p.is_dir()))]
packages = {f"packmamba.{name.replace('/', '.')}": outside[name.split("/")[0]] for name in sorted(folders)}
setup(
    packages=[*find_packages(include=["packmamba*"]), *packages],
    package_dir={f"packmamba.{name}": name for name in outside},
    package_data={"packmamba": ["py.typed"], "packmamba.lab.report": ["page.html", "house.mplstyle"], **packages},
)
