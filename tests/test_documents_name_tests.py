"""The page of proofs names tests that exist, for each of its statements."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "pui.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", TEXT)
    assert len(named) > 15
    for path, name in named:
        module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_every_statement_names_a_test():
    statements = re.split(r"^(?=\*\*(?:Lemma|Proposition|Theorem|Corollary) \d)", TEXT, flags=re.MULTILINE)[1:]
    assert [int(re.search(r"\d+", s).group()) for s in statements] == list(range(1, 10))
    assert all(re.search(r"∎.*?\*Checked by\* `tests/", s, flags=re.DOTALL) for s in statements)
