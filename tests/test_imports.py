"""Three floors, and nothing below imports from above, at run time either; no circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A floor's parts, from below. At their top, modules import only from their own part and those
# before it; inside functions also from later parts of their floor. A module belongs to the longest
# name that begins its own.
FLOORS = {
    "library": "errors files layout ops nn isolation testing integrations",
    "training": "config data training.boundary training evaluation",
    "lab": "lab.records lab.run_id lab.report lab cli",
}
ORDER = " ".join(FLOORS.values()).split()
NEVER = {"data": {"ops", "nn"}, "lab.report": {"ops", "nn", "data", "training", "evaluation"}}
TRAINING = {"data", "config", "training", "lab", "lab.records", "lab.run_id"}
ONLY_IN = dict.fromkeys(("lightning", "torchmetrics", "omegaconf"), TRAINING) | {"experiments": set()}
ONLY_IN |= dict.fromkeys(("pandas", "scipy", "jinja2"), {"lab.report"})


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "packmamba").rglob("*.py"))}


def imported(module: str, functions: bool = True) -> set[str]:
    """Return names of the modules that ``module`` imports; without ``functions`` those at its top."""
    nodes, names = [ast.parse(MODULES[module].read_text(encoding="utf-8"))], set()
    for node in nodes:  # which grows
        if functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: expected absolute imports"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys() or {node.module}
    return names - {"packmamba"}


def part(module: str) -> str:
    name = module.removeprefix("packmamba.")
    return max((each for each in ORDER if f"{name}.".startswith(f"{each}.")), key=len, default="")


def floor(part_name: str) -> int:
    return next(i for i, parts in enumerate(FLOORS.values()) if part_name in parts.split())


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"packmamba"}))
def test_a_part_imports_only_from_those_before_it(module):
    importer = part(module)
    assert importer, f"{module}: give it a place in FLOORS"
    for name in imported(module):
        if name.startswith("packmamba."):
            assert floor(part(name)) <= floor(importer), f"{name} is a floor above"
            assert part(name) not in NEVER.get(importer, ()), name
        else:
            assert importer in ONLY_IN.get(name.partition(".")[0], {importer}), name
    for name in imported(module, functions=False) & MODULES.keys():
        assert ORDER.index(part(name)) <= ORDER.index(importer), name


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {module: imported(module, False) & MODULES.keys() - {module} for module in MODULES}
    assert sum(map(len, graph.values())) > len(MODULES)
    list(TopologicalSorter(graph).static_order())  # CycleError names the circle


@pytest.mark.slow
def test_layer_operators_and_leakcheck_need_torch_numpy_and_safetensors_alone():
    extra = "lightning omegaconf torchmetrics pandas scipy matplotlib transformers lm_eval".split()
    names = [name for name in MODULES if part(name) in ("layout", "ops", "nn", "isolation", "testing")]
    names += ["packmamba.integrations.mamba_ssm"]
    names = [name for name in names if "triton" not in name]  # entered where torch brings triton
    code = f"import sys, importlib; sys.modules.update(dict.fromkeys({extra})); import packmamba; packmamba.leakcheck"
    code += f"; [importlib.import_module(name) for name in {names}]"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing", [["lightning"], ["omegaconf", "lightning", "torchmetrics", "pandas", "scipy"]], ids=len
)
def test_without_the_extra_an_import_says_what_to_install(missing):
    names = ["training", "lab.fit", "training.boundary"]
    names += ["config", "evaluation", "evaluation.tasks", "lab.report.html"] if len(missing) > 1 else []
    code = f"import sys, importlib; sys.modules.update(dict.fromkeys({missing}))"
    for name in names:
        code += f"\ntry: importlib.import_module('packmamba.{name}'); print('imported {name}')"
        code += "\nexcept ModuleNotFoundError as error: print(error.name, error)"
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        assert line.partition(" ")[0] in missing and line.endswith("pip install 'packmamba[train]'")
    assert len(done.stdout.splitlines()) == len(names)
