"""Questions of the text corpus: four choices, last words, and pairs to fine-tune on, of the
documents of one split each.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CHOICES = 4
ITEMS = 2000  # of each source and task
PAIRS = 60000  # of each source
Rows = Sequence[dict[str, Any]]
Items = Iterator[dict[str, Any]]


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_items(folder: Path, split: str, rows: Rows, seed: int = 0) -> None:
    """Write ``<task>.<split>.jsonl`` of the lines of a split: items if it is held out, and pairs of
    questions and answers.
    """
    for task in MAKERS if split != "train" else ("pairs",):
        write_lines(folder / f"{task}.{split}.jsonl", MAKERS[task](rows, seed))


def glosses(rows: Rows) -> list[tuple[dict[str, Any], str, str, str]]:
    """Find (line, headword, part of speech, gloss): a gloss of at least 30 characters that does not
    give its word away.
    """
    found = []
    for row in rows:
        if row.get("gloss"):
            head, kind, first, last = row["gloss"]
            gloss = row["text"][first:last]
            hidden = head[: max(4, len(head) - 3)].lower() not in gloss.lower()
            if 30 <= len(gloss) <= 300 and head.isalpha() and len(head) > 2 and hidden:
                found.append((row, head, kind, gloss))
    return found


def headwords(rows: Rows, seed: int) -> Items:
    """Ask which of four words of a kind a gloss defines."""
    rng, known = np.random.default_rng([seed, 1]), glosses(rows)
    words: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row, head, kind, _ in known:
        words[source(row), kind].add(head)
    for row, head, kind, gloss in drawn(known, rng):
        between = f" ({kind}): " if source(row) == "wordnet" else f", {kind[0]}. "
        contexts = {word: word + between for word in words[source(row), kind]}
        yield from choose(row["id"], row, which(gloss), head, contexts, gloss, rng)


def modules(rows: Rows, seed: int) -> Items:
    """Ask which of four modules has an option; options with a description of another module are
    left out.
    """
    rng, options, heads = np.random.default_rng([seed, 2]), [], {}
    for row in rows:
        if source(row) == "ansible":
            module, *lines = row["text"].split("\n")
            heads[module] = "\n".join([module, *lines[:2], ""])
            found = filter(None, (re.fullmatch(r"(\w+): (.{40,300})", line) for line in lines))
            options += [(row, module, *one.groups()) for one in found]
    count = Counter(text for *_, text in options)
    known = [one for one in options if count[one[-1]] == 1 and one[1] not in one[-1]]
    for row, module, option, text in drawn(known, rng):
        question = f"Question: Which module has the option {option}: {text}\nAnswer:"
        yield from choose(f"{row['id']}:{option}", row, question, module, heads, f"{option}: {text}", rng)


def choose(
    id: str, row: Any, question: str, right: str, contexts: dict[str, str], text: str, rng: np.random.Generator
) -> Items:
    """Make an item of the right choice among CHOICES - 1 others in random order; none if there are
    too few.

    ``choices`` continue ``context``, ``answer`` is the right one's index. The other way round
    ``continuation`` follows each of ``contexts``, in the corpus's own form.
    """
    others = sorted(contexts.keys() - {right})
    if len(others) >= CHOICES - 1:
        choices = [others[i] for i in rng.choice(len(others), CHOICES - 1, replace=False)]
        answer = int(rng.integers(CHOICES))
        choices.insert(answer, right)
        item = {"id": id, "group": row["group"], "context": question, "choices": [" " + one for one in choices]}
        yield item | {"answer": answer, "contexts": [contexts[one] for one in choices], "continuation": text}


def last_words(rows: Rows, seed: int) -> Items:
    """Ask for the last word of a definition, after the entry up to it."""
    for row, _, _, gloss in drawn(glosses(rows), np.random.default_rng([seed, 3])):
        found = re.fullmatch(r"(.* )?\b([A-Za-z]{4,})", gloss)
        if found and found[1] and found[2].lower() not in found[1].lower():
            before = row["text"][: row["gloss"][2] + len(found[1]) - 1]
            yield {"id": row["id"], "group": row["group"], "context": before, "continuation": f" {found[2]}"}


def pairs(rows: Rows, seed: int) -> Items:
    """Make a question of each entry: its word by its gloss, or its gloss by its word, by a draw."""
    rng = np.random.default_rng([seed, 4])
    for row, head, kind, gloss in drawn(glosses(rows), rng, PAIRS):
        what = f"Question: What does {head} ({kind}) mean?\nAnswer:"
        question, answer = (which(gloss), head) if rng.random() < 0.5 else (what, gloss)
        yield {"id": row["id"], "group": row["group"], "prompt": question, "completion": f" {answer}"}


MAKERS = {"pairs": pairs, "headword": headwords, "module": modules, "last_word": last_words}


def which(gloss: str) -> str:
    return f"Question: Which word means: {gloss}\nAnswer:"


def source(row: dict[str, Any]) -> str:
    return row["group"].split(":")[0]


def drawn(known: list[Any], rng: np.random.Generator, most: int = ITEMS) -> list[Any]:
    """Draw at most ``most`` of each source, in random order."""
    counts: Counter[str] = Counter()
    chosen = []
    for i in rng.permutation(len(known)).tolist():
        name = source(known[i][0])
        counts[name] += 1
        if counts[name] <= most:
            chosen.append(known[i])
    return chosen
