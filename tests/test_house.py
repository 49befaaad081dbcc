"""The rooms of the package: each imports only from rooms above it, nothing imports in a circle, no file holds two ideas."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 400

# From the top of the house down. A module belongs to the longest name that begins its own.
ROOMS = (
    "errors", "registry", "layout", "config", "ops", "nn", "evaluation.tasks", "data", "records", "timing", "isolation",
    "evaluation", "training", "integrations", "report", "experiments", "cli",
)  # fmt: skip
# What the order alone would allow: room -> rooms that it must not know.
STRANGERS = {
    "ops": {"config"},
    "nn": {"config"},
    "data": {"ops", "nn"},
    "records": set(ROOMS) - {"errors", "records"},
    "report": set(ROOMS) - {"errors", "records", "report"},
}
# Third-party packages and the rooms that alone may import them.
KEPT_APART = {
    "pandas": {"report"},
    "scipy": {"report"},
    "jinja2": {"report"},
    "transformers": {"integrations", "evaluation"},
}
WITHOUT_TORCH = {"errors", "registry", "config", "records", "report", "experiments"}
TORCH = {"torch", "lightning", "torchmetrics"}
LAZY = {
    "SequenceLayout": "packmamba.layout", "PackedMamba": "packmamba.nn", "MambaLM": "packmamba.nn",
    "leakcheck": "packmamba.isolation",
}  # fmt: skip

SOURCES = sorted((ROOT / "packmamba").rglob("*.py"))
PYTHON = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
) or [*SOURCES, *sorted((ROOT / "experiments").rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}


def imports(path: Path, modules: dict[str, Path] = MODULES, root: Path = ROOT) -> Iterator[str]:
    """The modules that a file imports anywhere, also in functions and for type checkers: of ours the module itself."""
    package = path.relative_to(root).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))
            for alias in node.names:
                name = LAZY.get(alias.name, f"{base}.{alias.name}") if base == "packmamba" else f"{base}.{alias.name}"
                yield name if name in modules else base


def room_of(module: str) -> str | None:
    """None for the package itself, which only names what lies in its rooms."""
    name = module.removeprefix("packmamba").lstrip(".")
    return max((room for room in ROOMS if f"{name}.".startswith(f"{room}.")), key=len, default=None)


def trespasses(module: str, imported: list[str]) -> list[str]:
    """What a module imports and must not."""
    own = room_of(module)
    if own is None:
        return []
    found = []
    for name in imported:
        top = name.partition(".")[0]
        if top == "packmamba" and (room := room_of(name)) is not None:
            below = ROOMS.index(room) > ROOMS.index(own)
            if (below and room != own) or room in STRANGERS.get(own, ()):
                found.append(name)
        if top == "experiments" or own not in KEPT_APART.get(top, {own}) or (own in WITHOUT_TORCH and top in TORCH):
            found.append(name)
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Some modules that import each other in a circle; empty if none do."""
    done: set[str] = set()

    def visit(module: str, above: list[str]) -> list[str]:
        if module in above:
            return above[above.index(module) :]
        if module in done:
            return []
        for imported in sorted(graph.get(module, ())):
            if found := visit(imported, [*above, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, []))), [])


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_room_imports_only_from_rooms_above_it(module):
    assert trespasses(module, list(imports(MODULES[module]))) == []


def test_every_module_lies_in_a_room():
    assert [module for module in MODULES if room_of(module) is None] == ["packmamba"]


def test_nothing_imports_in_a_circle():
    graph = {module: set(imports(path)) & MODULES.keys() - {module} for module, path in MODULES.items()}
    assert sum(map(len, graph.values())) > len(MODULES), "imports are not seen"
    assert circle(graph) == []


def test_trespasses_and_circles_are_found(tmp_path):
    module = tmp_path / "packmamba" / "data" / "made.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nfrom packmamba import MambaLM\n"
        "if TYPE_CHECKING:\n    from packmamba.training import fit\n"
        "def late():\n    import pandas\n    from ..ops import conv\n    import experiments.speedup.bench\n"
    )
    modules = dict.fromkeys(("packmamba.nn", "packmamba.training.fit", "packmamba.ops.conv"), module)
    found = trespasses("packmamba.data.made", list(imports(module, modules, tmp_path)))
    assert sorted(found) == sorted([*modules, "pandas", "experiments.speedup.bench"])
    assert trespasses("packmamba.report.page", ["torch", "packmamba.config", "pandas", "packmamba.records"]) == [
        "torch", "packmamba.config",
    ]  # fmt: skip
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_holds_two_ideas(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MOST_LINES, f"{path.name} has {lines} lines"
