"""Build and load the compiled kernels.

A kind (``cpu``, ``cuda``) is one shared library of ``kernels/common`` and ``kernels/<kind>`` on PyTorch's stable ABI, compiled
on first use or by ``python run.py kernels build`` into a cache that machines may share, under a hash of all that matters.

``CXX`` and ``PACKMAMBA_NVCC`` name compilers, ``PACKMAMBA_MARCH`` an instruction set other than this machine's,
``PACKMAMBA_CUDA_ARCHS`` architectures other than those of the GPUs that are here.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from packmamba.errors import COMMAND, KernelError

KINDS = ("cpu", "cuda")
BUILD_COMMAND = f"{COMMAND} kernels build"
# Libraries built for this version of the stable ABI load on it and on later ones.
TORCH_TARGET_VERSION = 0x020B000000000000
OLDEST_ARCHITECTURE = 80
TORCH = Path(torch.__file__).parent


@dataclass(frozen=True)
class Build:
    """How one library is made; ``target`` names the instruction set or the architectures, ``identity`` what native means here."""

    kind: str
    compiler: str
    version: str
    target: str
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    identity: str = ""

    @functools.cached_property
    def key(self) -> str:
        """Hash of everything that changes the result; where torch and the compiler lie does not."""
        digest = hashlib.sha256(".".join(torch.__version__.split(".")[:2]).encode())
        for fact in (self.version, *self.flags, *self.link_flags, self.identity):
            for name, folder in (("torch", TORCH), ("compiler", Path(self.compiler).resolve().parents[1])):
                fact = fact.replace(str(folder), name)
            digest.update(fact.encode() + b"\0")
        for path in (*self.sources, *self.headers):
            digest.update(f"{path.parent.name}/{path.name}\0".encode() + path.read_bytes())
        return digest.hexdigest()[:20]

    @property
    def path(self) -> Path:
        return cache_folder() / f"{self.kind}-{self.key}.so"

    @property
    def built(self) -> bool:
        return self.path.is_file()


def cache_folder() -> Path:
    """Return ``PACKMAMBA_CACHE``, else ``XDG_CACHE_HOME``/packmamba, else ~/.cache/packmamba."""
    if named := os.environ.get("PACKMAMBA_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "packmamba"


def kernel_folder() -> Path:
    """Find the sources: package data of an installed wheel, or the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "cpu").is_dir():
            return folder
    raise KernelError(f"kernel sources are missing: expected {package.parent / 'kernels'}")


def describe(kind: str) -> Build:
    """Return how ``kind`` would be built here. Raises KernelError if it cannot be."""
    return {"cpu": _describe_cpu, "cuda": _describe_cuda}[kind]()


def build(kind: str) -> Path:
    """Compile the library of ``kind`` unless it is cached; concurrent processes compile it once.

    Raises:
        KernelError: no compiler, or it failed.
    """
    recipe = describe(kind)
    if recipe.built:
        return recipe.path
    try:
        recipe.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(recipe.path.with_suffix(".lock")):
            if not recipe.built:
                _compile(recipe)
    except OSError as error:
        raise KernelError(f"{error}: set PACKMAMBA_CACHE to a writable folder") from error
    return recipe.path


_loaded: dict[str, Path | KernelError] = {}
_loading = threading.Lock()


def load(kind: str) -> Path:
    """Build if need be and register ``torch.ops.packmamba_<kind>``, once per process.

    Raises:
        KernelError: as ``build``, or the library does not load. The first outcome stays.
    """
    with _loading:
        if kind not in _loaded:
            try:
                path = build(kind)
                torch.ops.load_library(path)
                _loaded[kind] = path
            except KernelError as error:
                _loaded[kind] = error
            except OSError as error:
                _loaded[kind] = KernelError(f"'{kind}' kernels do not load: {error}")
    outcome = _loaded[kind]
    if isinstance(outcome, KernelError):
        raise outcome
    return outcome


@functools.cache
def operator(kind: str, name: str) -> Callable[..., Any]:
    """Return ``torch.ops.packmamba_<kind>.<name>``, loaded. Raises KernelError as ``load``."""
    load(kind)
    return getattr(getattr(torch.ops, f"packmamba_{kind}"), name).default


def ready(kind: str) -> bool:
    """Return whether ``load`` succeeds; warn that it does not."""
    try:
        load(kind)
    except KernelError as error:
        warnings.warn(f"the slower reference runs instead of compiled kernels: {error}", stacklevel=2)
        return False
    return True


# A constant for torch.compile, as by torch.compiler.assume_constant_result, which imports the compiler: seconds.
ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def info() -> list[dict[str, Any]]:
    """List ``kind, compiler, target, path, built`` of each kind, and ``problem``: None, or why it cannot be built here."""
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        rows.append(dict.fromkeys(("compiler", "target", "path", "problem")) | {"kind": kind, "built": False})
        try:
            of = describe(kind)
            compiler = f"{of.compiler} ({of.version})"
            rows[-1] |= {"compiler": compiler, "target": of.target, "path": str(of.path), "built": of.built}
        except KernelError as error:
            rows[-1]["problem"] = str(error)
    return rows


def _describe_cpu() -> Build:
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")
    if compiler is None:
        raise KernelError(f"no C++ compiler: install g++ (conda: gxx) or name one in CXX, then run `{BUILD_COMMAND}`")
    # A choice at compile time needs no dispatch at run time; the key holds what the choice was.
    march = f"-march={os.environ.get('PACKMAMBA_MARCH') or 'native'}"
    flags = ["-std=c++17", "-O3", march, "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
    flags += ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-psabi"]
    link_flags = ["-shared", f"-L{TORCH / 'lib'}", "-ltorch_cpu"]
    if sanitizers := os.environ.get("PACKMAMBA_SANITIZE"):
        flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g", "-O1"]
        link_flags += [f"-fsanitize={sanitizers}"]
    macros = _output(compiler, march, "-dM", "-E", "-x", "c++", os.devnull)
    sets = {"__AVX512F__": "AVX-512", "__AVX2__": "AVX2", "__ARM_NEON": "NEON"}
    target = next((name for macro, name in sets.items() if f"#define {macro} " in macros), "baseline")
    version = _output(compiler, "--version").splitlines()[0]
    return _finish("cpu", compiler, version, target, flags, link_flags, "\n".join(sorted(macros.splitlines())))


def _describe_cuda() -> Build:
    compiler = _find_nvcc()
    if compiler is None:
        raise KernelError(f"no nvcc: pip install 'packmamba[cuda]', then run `{BUILD_COMMAND}`")
    architectures = _cuda_architectures()
    flags = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    for architecture in architectures:
        flags += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
    if os.environ.get("PACKMAMBA_PER_TOKEN_INDICES"):
        # An ablation: resets by a position per token instead of the schedule (kernels/cuda/params.h).
        flags.append("-DPACKMAMBA_PER_TOKEN_INDICES")
    link_flags = ["-shared", f"-L{TORCH / 'lib'}", "-ltorch_cpu"]
    # The wheels' nvcc does not look where the wheels' runtime lies.
    runtime = Path(compiler).resolve().parents[1] / "lib"
    if (runtime / "libcudart_static.a").is_file():
        link_flags.insert(1, f"-L{runtime}")
    version = _output(compiler, "--version").splitlines()[-1]
    target = ", ".join(f"sm_{architecture}" for architecture in architectures)
    return _finish("cuda", compiler, version, target, flags, link_flags)


def _finish(
    kind: str, compiler: str, version: str, target: str, flags: list, link_flags: list, identity: str = ""
) -> Build:
    suffix = {"cpu": ".cpp", "cuda": ".cu"}[kind]
    files = sorted(path for part in ("common", kind) for path in (kernel_folder() / part).glob("*") if path.is_file())
    sources = tuple(path for path in files if path.parent.name == kind and path.suffix == suffix)
    headers = tuple(path for path in files if path.suffix in (".h", ".cuh"))
    flags = [*flags, f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION:#x}", "-isystem", str(TORCH / "include")]
    return Build(kind, compiler, version, target, tuple(flags), tuple(link_flags), sources, headers, identity)


def _find_nvcc() -> str | None:
    """Find nvcc by PACKMAMBA_NVCC, CUDA_HOME, PATH, or in the ``cuda-toolkit`` wheels."""
    home = os.environ.get("CUDA_HOME")
    wheels = sorted(path for entry in sys.path if entry for path in Path(entry).glob("nvidia/cu*/bin/nvcc"))
    candidates = [os.environ.get("PACKMAMBA_NVCC"), home and f"{home}/bin/nvcc", "nvcc", *map(str, wheels)]
    return next((path for candidate in candidates if candidate and (path := shutil.which(candidate))), None)


def _cuda_architectures() -> list[str]:
    """List compute capabilities without their dot: those named, else those of the devices here."""
    if named := os.environ.get("PACKMAMBA_CUDA_ARCHS"):
        parts = {part.strip().replace(".", "") for part in named.split(",")}
        if wrong := sorted(part for part in parts if not part.isdecimal() or int(part) < OLDEST_ARCHITECTURE):
            raise KernelError(f"PACKMAMBA_CUDA_ARCHS: expected compute capabilities from 80 up, got {wrong[0]!r}")
        return sorted(parts, key=int)
    if not torch.cuda.is_available():
        raise KernelError("no CUDA device to build for; name architectures in PACKMAMBA_CUDA_ARCHS, such as 80,90")
    devices = (torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count()))
    architectures = sorted({10 * major + minor for major, minor in devices})
    if architectures[-1] < OLDEST_ARCHITECTURE:
        raise KernelError(f"GPU: expected compute capability 8.0 (A100) or newer, got {architectures[-1] / 10}")
    return [str(architecture) for architecture in architectures if architecture >= OLDEST_ARCHITECTURE]


def _compile(recipe: Build) -> None:
    print(f"Compiling the '{recipe.kind}' kernels for {recipe.target}, once: up to a minute or two", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=recipe.path.parent) as scratch:
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in recipe.sources]
        compiler = [recipe.compiler, *recipe.flags, "-c"]
        commands = [[*compiler, str(source), "-o", made] for source, made in zip(recipe.sources, objects)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(functools.partial(_run, recipe.kind), commands))
        library = Path(scratch) / recipe.path.name
        _run(recipe.kind, [recipe.compiler, *objects, *recipe.link_flags, "-o", str(library)])
        os.replace(library, recipe.path)


def _run(kind: str, command: list[str]) -> None:
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise KernelError(f"compiling the '{kind}' kernels failed:\n{' '.join(command)}\n{done.stdout[-4000:]}")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"the compiler does not run: {error}") from error
