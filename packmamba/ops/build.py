"""Find, or build, and load the compiled kernels.

A kind (``cpu``, ``cuda``) is a shared library of ``kernels/<kind>``. A wheel
may bring it (``setup.py``), for several instruction sets or architectures. Else it is compiled on
first use or by ``kernels build``: some seconds on a CPU, a minute or two for a GPU, for this
machine's instruction set. It is on PyTorch's stable ABI, so that a library serves several versions.

The cache may be shared by machines: a library's name is a hash of all that changes it (sources,
flags, compiler, what "native" means here), and a file lock lets many processes compile it once.

``CXX`` and ``PACKMAMBA_NVCC`` name compilers, ``PACKMAMBA_MARCH`` an instruction set other than
this machine's, ``PACKMAMBA_CUDA_ARCHS`` architectures other than those of the GPUs here,
``PACKMAMBA_CACHE`` another cache, ``PACKMAMBA_SANITIZE`` the CPU compiler's sanitizers.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from packmamba.errors import COMMAND, KernelError, expect

BUILD_COMMAND = f"{COMMAND} kernels build"
# PyTorch 2.11: libraries built for its stable ABI load on it and on later ones.
TORCH_TARGET_VERSION = 0x020B000000000000
# Environment variables that ask for a build of one's own, whatever a wheel brought.
BUILD_VARIABLES = ("PACKMAMBA_MARCH", "PACKMAMBA_CUDA_ARCHS", "PACKMAMBA_SANITIZE")
# Compute capability 8.0 (A100), without its dot.
OLDEST_ARCHITECTURE = 80
TORCH = Path(torch.__file__).parent
FLAGS = ["-std=c++17", "-O3", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION:#x}", "-isystem", f"{TORCH}/include"]
LINK_FLAGS = ["-shared", f"-L{TORCH}/lib", "-ltorch_cpu"]


@dataclass(frozen=True)
class Build:
    """Describe how a library is built.

    Attributes:
        kind: "cpu" or "cuda".
        compiler, version: path, and the line that it prints of itself.
        target: the instruction set or the architectures, for a reader.
        identity: what ``-march=native`` means here, the macros that it defines; empty for CUDA.
    """

    kind: str
    compiler: str
    version: str
    target: str
    flags: list[str]
    link_flags: list[str]
    identity: str = ""

    @property
    def sources(self) -> list[Path]:
        """List the files that are compiled, each on its own."""
        return sorted((kernel_folder() / self.kind).glob("*.cpp" if self.kind == "cpu" else "*.cu"))

    @functools.cached_property
    def path(self) -> Path:
        """Name the library by a hash of all that changes it, which no folder's place does."""
        # The stable ABI is compiled against the headers of this minor version.
        digest = hashlib.sha256(".".join(torch.__version__.split(".")[:2]).encode())
        for fact in (self.version, *self.flags, *self.link_flags, self.identity):
            # Folders become names, so that equal environments at other places share a library.
            for name, folder in (("torch", TORCH), ("compiler", Path(self.compiler).resolve().parents[1])):
                fact = fact.replace(str(folder), name)
            digest.update(fact.encode() + b"\0")
        headers = [path for part in ("common", self.kind) for path in (kernel_folder() / part).glob("*.*h")]
        for path in (*self.sources, *sorted(headers)):
            digest.update(f"{path.parent.name}/{path.name}\0".encode() + path.read_bytes())
        default = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/packmamba"
        cache = Path(os.environ.get("PACKMAMBA_CACHE") or default).expanduser()
        return cache / f"{self.kind}-{digest.hexdigest()[:20]}.so"


def kernel_folder() -> Path:
    """Find the sources in an installed wheel, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def shipped(kind: str) -> Path | None:
    """Find the library that a wheel brought; None if the environment names another build.

    A CPU's is the one for PyTorch's name of its instruction set.
    """
    if any(name in os.environ for name in BUILD_VARIABLES):
        return None
    capability = torch.backends.cpu.get_cpu_capability().lower()
    names = (f"cpu-{capability}.so", "cpu-default.so") if kind == "cpu" else ("cuda.so",)
    folder = Path(__file__).resolve().parents[1] / "prebuilt"
    return next((folder / name for name in names if (folder / name).is_file()), None)


def build(kind: str) -> Path:
    """Return the library of ``kind``. Raises KernelError.

    If no wheel brought it, it is compiled, once for all processes.
    """
    if library := shipped(kind):
        return library
    recipe = describe(kind)
    try:
        if not recipe.path.is_file():
            recipe.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(recipe.path.with_suffix(".lock")):
                # Looked for again under the lock: another process may have compiled it meanwhile.
                if not recipe.path.is_file():
                    _compile(recipe)
    except OSError as error:
        raise KernelError(f"{error}: set PACKMAMBA_CACHE to a writable folder") from error
    return recipe.path


@functools.cache
def load_error(kind: str) -> KernelError | None:
    """Load the library, once a process; return why that failed, for whoever asks again."""
    try:
        torch.ops.load_library(build(kind))
    except KernelError as error:
        return error
    except OSError as error:
        return KernelError(f"'{kind}' kernels do not load: {error}")
    return None


def load(kind: str) -> None:
    """Build if need be and register ``torch.ops.packmamba_<kind>``.

    Raises KernelError, at each call.
    """
    if error := load_error(kind):
        raise error


def info() -> list[dict[str, Any]]:
    """List ``kind, compiler, target, built`` of each kind, and ``problem``.

    ``problem`` says why a kind cannot be built here; None if it can.
    """
    rows = []
    for kind in ("cpu", "cuda"):
        row = {"kind": kind, "compiler": None, "target": None, "built": False, "problem": None}
        try:
            if library := shipped(kind):
                row |= {"compiler": "the wheel's maker", "target": library.name, "built": True}
            else:
                recipe = describe(kind)
                compiler = f"{recipe.compiler} ({recipe.version})"
                row |= {"compiler": compiler, "target": recipe.target, "built": recipe.path.is_file()}
        except KernelError as error:
            row["problem"] = str(error)
        rows.append(row)
    return rows


@functools.cache
def has_c_compiler() -> bool:
    """Return whether Triton finds the C compiler that it needs for each kernel's launcher."""
    return any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang")))


def _describe_cpu() -> Build:
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")
    if compiler is None:
        raise KernelError(f"no C++ compiler: install g++ or name one in CXX, then run `{BUILD_COMMAND}`")
    # A choice at compile time needs no dispatch at run time; the hash holds what the choice was.
    march = f"-march={os.environ.get('PACKMAMBA_MARCH') or 'native'}"
    # No -ffast-math, which would reorder sums and lose NaN. These flags fuse and vectorise.
    flags = [*FLAGS, march, "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
    flags += ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-psabi"]
    link_flags = LINK_FLAGS
    if sanitizers := os.environ.get("PACKMAMBA_SANITIZE"):
        flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g", "-O1"]
        link_flags = [*LINK_FLAGS, f"-fsanitize={sanitizers}"]
    # The compiler's macros say which instructions -march=native means on this machine.
    macros = _output(compiler, march, "-dM", "-E", "-x", "c++", os.devnull)
    sets = {"__AVX512F__": "AVX-512", "__AVX2__": "AVX2", "__ARM_NEON": "NEON"}
    target = next((name for macro, name in sets.items() if f"#define {macro} " in macros), "baseline")
    version = _output(compiler, "--version").splitlines()[0]
    return Build("cpu", compiler, version, target, flags, link_flags, macros)


def _describe_cuda() -> Build:
    compiler = _find_nvcc()
    if compiler is None:
        raise KernelError(f"no nvcc: pip install 'packmamba[cuda]', then run `{BUILD_COMMAND}`")
    architectures = _cuda_architectures()
    flags = [*FLAGS, "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    for architecture in architectures:
        flags += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
    # The wheels' nvcc does not look where the wheels' runtime lies.
    link_flags = [*LINK_FLAGS, f"-L{Path(compiler).resolve().parents[1]}/lib"]
    version = _output(compiler, "--version").splitlines()[-1]
    target = ", ".join(f"sm_{architecture}" for architecture in architectures)
    return Build("cuda", compiler, version, target, flags, link_flags)


def describe(kind: str) -> Build:
    """Return how ``kind`` would be built here. Raises KernelError if it cannot be."""
    return _describe_cpu() if kind == "cpu" else _describe_cuda()


def _find_nvcc() -> str | None:
    """Find nvcc by PACKMAMBA_NVCC, CUDA_HOME, PATH, or in the ``cuda-toolkit`` wheels."""
    home = os.environ.get("CUDA_HOME")
    wheels = sorted(path for entry in sys.path if entry for path in Path(entry).glob("nvidia/cu*/bin/nvcc"))
    candidates = [os.environ.get("PACKMAMBA_NVCC"), home and f"{home}/bin/nvcc", "nvcc", *map(str, wheels)]
    return next(filter(None, map(shutil.which, filter(None, candidates))), None)


def _cuda_architectures() -> list[int]:
    """List compute capabilities without their dot: those named, else those of the devices here."""
    named = os.environ.get("PACKMAMBA_CUDA_ARCHS", "")
    requested = [part.strip().replace(".", "") for part in named.split(",") if part]
    devices = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    present = requested or [f"{major}{minor}" for major, minor in devices]
    usable = {int(part) for part in present if part.isdecimal() and int(part) >= OLDEST_ARCHITECTURE}
    expected = "compute capability 8.0 (A100) or newer, of a GPU here or as PACKMAMBA_CUDA_ARCHS=80,90"
    all_usable = usable and (not requested or len(usable) == len(set(requested)))
    expect(all_usable, "GPU", expected, ", ".join(present) or "no GPU", KernelError)
    return sorted(usable)


def _compile(recipe: Build) -> None:
    """Compile each source in a thread of its own, and link.

    The library is moved to its place whole.
    """
    print(f"Compiling the '{recipe.kind}' kernels for {recipe.target}, once: a minute or two", file=sys.stderr)
    # In the cache's own file system, so that the last rename is atomic.
    with tempfile.TemporaryDirectory(dir=recipe.path.parent) as scratch:
        objects = {source: f"{scratch}/{source.stem}.o" for source in recipe.sources}
        compiler = [recipe.compiler, *recipe.flags, "-c"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda source: _output(*compiler, str(source), "-o", objects[source]), objects))
        library = f"{scratch}/{recipe.path.name}"
        _output(recipe.compiler, *objects.values(), *recipe.link_flags, "-o", library)
        os.replace(library, recipe.path)


def _output(*command: str) -> str:
    """Run a command; return what it printed.

    Raises KernelError with the end of that.
    """
    try:
        return subprocess.run(command, stdout=-1, stderr=subprocess.STDOUT, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "output", None) or ""
        raise KernelError(f"{error}\n{output[-4000:]}".rstrip()) from error
