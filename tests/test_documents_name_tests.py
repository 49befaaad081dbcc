import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "pui.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("document", ["docs/pui.md", "docs/reliability.md", "tests/mutations.md"])
def test_every_test_that_a_document_names_exists(document):
    named, path = set(), ""
    for here, name in re.findall(r"(tests/\w+\.py)?::(\w+)", (ROOT / document).read_text(encoding="utf-8")):
        path = here or path  # `::test` stands for one of the file before it
        named.add((path, name))
    assert len(named) > 15
    for path, name in sorted(named):
        module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_every_statement_names_a_test():
    statements = re.split(r"^(?=\*\*(?:Lemma|Proposition|Theorem|Corollary) \d)", TEXT, flags=re.MULTILINE)[1:]
    assert [int(re.search(r"\d+", s).group()) for s in statements] == list(range(1, 10))
    for statement in statements:
        checks = statement.split("*Proof.*")[1].split("∎")[1]
        assert re.search(r"\*Checked by\* `tests/", checks), statement.splitlines()[0]
