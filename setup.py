"""Package the sources of kernels and configurations, and in a wheel the compiled kernels beside
them.

Sources lie at the top of a checkout and travel as package data. A wheel also has the CPU's kernels,
compiled for each of ``INSTRUCTION_SETS``, where the environment has PyTorch and the machine a C++
compiler. PACKMAMBA_PREBUILT names the kinds that must be compiled: ``cpu``, ``cpu,cuda`` (for
PACKMAMBA_CUDA_ARCHS, by default ``CUDA_ARCHITECTURES``), or nothing for a wheel of sources alone.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

X86 = platform.machine() in ("x86_64", "AMD64")
INSTRUCTION_SETS = (
    {"default": "x86-64", "avx2": "x86-64-v3", "avx512": "x86-64-v4"} if X86 else {"default": "armv8-a"}
)
"""What the compiler is told, by PyTorch's name of a CPU's capability, which chooses at run time."""
CUDA_ARCHITECTURES = "80,90,100"
OLDEST_PYTORCH = (2, 11)  # of the dependencies in pyproject.toml
if importlib.util.find_spec("torch") is None:
    # pip's isolated build hides the environment. Kernels serve the PyTorch that they are compiled
    # with, so take that one, and download none.
    sys.path.append(sysconfig.get_path("purelib"))


def wanted_kinds() -> list[str]:
    """List the kinds of kernels to compile for a wheel: those named, else the CPU's if that is
    possible.
    """
    named = os.environ.get("PACKMAMBA_PREBUILT")
    if named is not None:
        return [kind for kind in named.split(",") if kind]
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")
    if not compiler or not importlib.util.find_spec("torch"):
        return []
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    return ["cpu"] if OLDEST_PYTORCH <= (int(major), int(minor)) else []


def compile_kernels(kinds: list[str], folder: Path) -> None:
    """Compile into ``folder``, under the names that ``packmamba.ops.build.shipped`` looks for."""
    sys.path.insert(0, str(Path(__file__).parent))
    from packmamba.ops import build

    folder.mkdir(parents=True, exist_ok=True)
    if "cpu" in kinds:
        for capability, march in INSTRUCTION_SETS.items():
            os.environ["PACKMAMBA_MARCH"] = march
            shutil.copy(build.build("cpu"), folder / f"cpu-{capability}.so")
    if "cuda" in kinds:
        os.environ.setdefault("PACKMAMBA_CUDA_ARCHS", CUDA_ARCHITECTURES)
        shutil.copy(build.build("cuda"), folder / "cuda.so")


class BuildWithKernels(build_py):
    """Add compiled kernels to what a wheel is made of; an editable install compiles on first use."""

    def run(self) -> None:
        super().run()
        kinds = [] if self.editable_mode else wanted_kinds()
        if not kinds:
            return
        folder = Path(self.build_lib) / "packmamba" / "prebuilt"
        try:
            compile_kernels(kinds, folder)
        except Exception as error:  # an old compiler, say
            if "PACKMAMBA_PREBUILT" in os.environ:
                raise
            print(f"no compiled kernels in the wheel, they compile on first use: {error}", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)


class WheelOfPlatform(bdist_wheel):
    """Name a wheel with compiled kernels by its platform; they serve every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, name = super().get_tag()
        return "py3", "none", name


class WithKernels(Distribution):
    """Say that a wheel with compiled kernels depends on the platform."""

    def has_ext_modules(self) -> bool:
        return bool(wanted_kinds())


outside = {"kernels": ["*.h", "*.cpp", "*.cu", "*.cuh"], "configs": ["*.yaml"]}
folders = [name for top in outside for name in (top, *(f"{top}/{p.name}" for p in Path(top).iterdir() if p.is_dir()))]
packages = {f"packmamba.{name.replace('/', '.')}": outside[name.split("/")[0]] for name in sorted(folders)}
setup(
    packages=[*find_packages(include=["packmamba*"]), *packages],
    package_dir={f"packmamba.{name}": name for name in outside},
    package_data={"packmamba": ["py.typed"], "packmamba.lab.report": ["page.html", "house.mplstyle"], **packages},
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfPlatform},
    distclass=WithKernels,
)
