"""Numbers of pages are those of the committed tables."""

from __future__ import annotations

import re

import pytest

from experiments.pages import BLOCK, FOLDER, ROOT, filled, specs

pytestmark = pytest.mark.slow
INTERVAL = re.compile(r"[+-]?\d[\d.]*x? \[[^\[\]()]+\](?!\()")
PAGES = [page for page in specs() if page != "figures"]


@pytest.mark.parametrize("page", PAGES)
def test_tables_of_pages_are_those_of_committed_tables(page):
    assert (ROOT / page).read_text(encoding="utf-8") == filled(page, specs()[page])


@pytest.mark.parametrize("page", PAGES)
def test_an_interval_in_a_sentence_is_one_of_a_table(page):
    paths = [*(ROOT / one for one in PAGES), *FOLDER.glob("**/tables/*.md")]
    known = {found for path in paths for found in intervals(path, inside=True)}
    assert set(intervals(ROOT / page, inside=False)) <= known


def intervals(path, inside):
    text = path.read_text(encoding="utf-8")
    if path.parent.name != "tables":
        text = "".join(block[0] for block in BLOCK.finditer(text)) if inside else BLOCK.sub("", text)
    return INTERVAL.findall(text)
