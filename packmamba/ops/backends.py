"""The operators' backends: chosen by name, or by the device of the tensors.

A backend is a table from operators to functions, so that another one costs an entry in ``BACKENDS``
and a module. All are imported with the package: a table that grew during a run would make
torch.compile compile again.
"""

import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from packmamba.ops import build

# Operators and their modules.
OPERATORS = {
    "conv1d_pack": "conv",
    "ssm_pack": "scan",
    "ssd_pack": "ssd",
    "mamba_inner": "inner",
    "mamba2_inner": "mamba2_inner",
}
COMPILED = {operator: f"packmamba.ops.{module}:compiled" for operator, module in OPERATORS.items()}


@dataclass(frozen=True)
class Backend:
    """Implementations of the operators.

    Attributes:
        implementations: ``module:function`` by operator; each takes ``ConvArguments``,
            ``ScanArguments``, ``SsdArguments`` or ``InnerArguments`` and returns the operator's
            outputs.
        device: device type of the tensors it takes; None: any.
        packages: packages that must be installed.
    """

    implementations: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    packages: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """List its packages that are not installed."""
        return [name for name in self.packages if name not in sys.modules and importlib.util.find_spec(name) is None]


BACKENDS = {
    "auto": Backend(),  # the compiled kernels of the tensors' device
    "reference": Backend({name: f"packmamba.ops.reference:{name}" for name in OPERATORS}),
    "cpu": Backend(COMPILED | {"ssd_pack": "packmamba.ops.ssd:on_cpu"}, device="cpu"),
    "cuda": Backend(COMPILED, device="cuda"),
    "mamba_ssm": Backend(  # of Mamba-1 alone: mamba-ssm's own layer packs Mamba-2
        {name: f"packmamba.ops.mamba_ssm:{name}" for name in OPERATORS if name not in ("ssd_pack", "mamba2_inner")},
        device="cuda",
        packages=("mamba_ssm", "causal_conv1d"),
    ),
}

_implementations: dict[tuple[str, str], Callable] = {}


def load() -> None:
    """Import all implementations, once.

    torch.compile then finds the same table at every call.
    """
    for name, backend in BACKENDS.items():
        for operator, place in backend.implementations.items():
            module, function = place.split(":")
            _implementations[name, operator] = getattr(importlib.import_module(module), function)


def choose(backend: str | None, device: torch.device, operator: str = "ssm_pack") -> Callable:
    """Return the operator's implementation for ``backend`` on ``device``.

    Raises what ``backend_name`` raises.
    """
    return _implementations[backend_name(backend, device, operator), operator]


def backend_name(backend: str | None, device: torch.device, operator: str = "ssm_pack") -> str:
    """Return the backend that runs: for ``auto`` (and None) the compiled kernels of the device.

    A CPU that cannot build them runs the reference, which is as exact, with one warning; a GPU
    never falls back. Raises ValueError for an unknown backend, or one that does not run here.
    """
    name = "auto" if backend is None else backend
    if name not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    if name == "auto":
        name = "reference" if device.type == "cpu" and not ready("cpu") else device.type
    if name in BACKENDS and BACKENDS[name].device not in (None, device.type):
        raise ValueError(f"backend: '{name}' expected tensors on a {BACKENDS[name].device} device, got {device}")
    if name in BACKENDS and (name, operator) not in _implementations and not torch.compiler.is_compiling():
        load()  # a plugin's
    if (name, operator) not in _implementations:
        names = sorted(other for other, implemented in _implementations if implemented == operator)
        raise ValueError(f"backend: expected one of {', '.join(names)} for {operator}, got '{name}' for {device}")
    return name


def ready(kind: str) -> bool:
    """Return whether kernels of a kind can be loaded; warn that it does not."""
    if error := build.load_error(kind):
        warnings.warn(f"the slower reference runs instead of compiled kernels: {error}", stacklevel=2)
    return error is None


# A constant for torch.compile, as by torch.compiler.assume_constant_result, which imports the
# compiler: seconds.
ready._dynamo_marked_constant = True  # type: ignore[attr-defined]
