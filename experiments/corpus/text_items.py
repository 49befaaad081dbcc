"""Questions of the text corpus: four choices, last words, and pairs to fine-tune on, of the documents of one split each."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CHOICES = 4
ITEMS = 2000  # of each source and task
PAIRS = 60000  # of each source
Rows = list[dict[str, Any]]


def write_items(folder: Path, split: str, rows: Sequence[dict[str, Any]], seed: int = 0) -> None:
    """Write ``<task>.<split>.jsonl`` of the lines of a split: items if it is held out, and pairs of questions and answers.

    Fields of an item: ``id``, ``group``, ``context``, ``choices`` (its continuations), ``answer`` (index of the right one);
    ``contexts`` and ``continuation`` ask the other way round, in the corpus's own form. Of a last word: ``context`` and
    ``continuation``. Of a pair: ``question`` and ``answer``.
    """
    made = {"pairs": pairs(rows, seed)}
    if split != "train":
        made |= {"headword": headwords(rows, seed), "module": modules(rows, seed), "last_word": last_words(rows, seed)}
    folder.mkdir(parents=True, exist_ok=True)
    for task, items in made.items():
        content = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        (folder / f"{task}.{split}.jsonl").write_text(content, encoding="utf-8")


def glosses(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str, str, str]]:
    """Find (line, headword, part of speech, gloss): a gloss of at least 30 characters that does not give its word away."""
    found = []
    for row in rows:
        if row.get("gloss"):
            head, kind, first, last = row["gloss"]
            gloss = row["text"][first:last]
            hidden = head[: max(4, len(head) - 3)].lower() not in gloss.lower()
            if 30 <= len(gloss) <= 300 and head.isalpha() and len(head) > 2 and hidden:
                found.append((row, head, kind, gloss))
    return found


def headwords(rows: Sequence[dict[str, Any]], seed: int) -> Rows:
    """Ask which of four words of a kind a gloss defines."""
    rng, known, items = np.random.default_rng([seed, 1]), glosses(rows), []
    words: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row, head, kind, _ in known:
        words[source(row), kind].append(head)
    for row, head, kind, gloss in drawn(known, rng):
        others = sorted(set(words[source(row), kind]) - {head})
        item = choose(head, others, rng)
        if item:
            between = f" ({kind}): " if source(row) == "wordnet" else f", {kind[0]}. "
            contexts = [word + between for word in item["choices"]]
            item["choices"] = [" " + word for word in item["choices"]]
            named = {"id": row["id"], "group": row["group"], "context": which(gloss)}
            items.append(named | item | {"contexts": contexts, "continuation": gloss})
    return items


def modules(rows: Sequence[dict[str, Any]], seed: int) -> Rows:
    """Ask which of four modules has an option; options with a description of another module are left out."""
    rng = np.random.default_rng([seed, 2])
    options, heads = [], {}
    for row in rows:
        if source(row) == "ansible":
            module, *lines = row["text"].split("\n")
            heads[module] = "\n".join([module, *(line for line in lines[:2])]) + "\n"
            options += [
                (row, module, *one.groups()) for line in lines if (one := re.fullmatch(r"(\w+): (.{40,300})", line))
            ]
    count, items = Counter(text for *_, text in options), []
    for row, module, option, text in drawn(
        [one for one in options if count[one[-1]] == 1 and one[1] not in one[-1]], rng
    ):
        item = choose(module, sorted(heads.keys() - {module}), rng)
        if item:
            contexts = [heads[name] for name in item["choices"]]
            item["choices"] = [" " + name for name in item["choices"]]
            question = f"Question: Which module has the option {option}: {text}\nAnswer:"
            named = {"id": f"{row['id']}:{option}", "group": row["group"], "context": question}
            items.append(named | item | {"contexts": contexts, "continuation": f"{option}: {text}"})
    return items


def last_words(rows: Sequence[dict[str, Any]], seed: int) -> Rows:
    """Ask for the last word of a definition, after the entry up to it."""
    rng, items = np.random.default_rng([seed, 3]), []
    for row, _, _, gloss in drawn(glosses(rows), rng):
        found = re.fullmatch(r"(.* )?\b([A-Za-z]{4,})", gloss)
        if found and found[1] and found[2].lower() not in found[1].lower():
            end = row["gloss"][2] + len(found[1]) - 1
            named = {"id": row["id"], "group": row["group"]}
            items.append(named | {"context": row["text"][:end], "continuation": f" {found[2]}"})
    return items


def pairs(rows: Sequence[dict[str, Any]], seed: int) -> Rows:
    """Make a question of each entry: its word by its gloss, or its gloss by its word, by a draw."""
    rng, items = np.random.default_rng([seed, 4]), []
    for row, head, kind, gloss in drawn(glosses(rows), rng, PAIRS):
        asked = (which(gloss), f" {head}") if rng.random() < 0.5 else (what(head, kind), f" {gloss}")
        items.append({"id": row["id"], "group": row["group"], "question": asked[0], "answer": asked[1]})
    return items


def which(gloss: str) -> str:
    return f"Question: Which word means: {gloss}\nAnswer:"


def what(head: str, kind: str) -> str:
    return f"Question: What does {head} ({kind}) mean?\nAnswer:"


def source(row: dict[str, Any]) -> str:
    return row["group"].split(":")[0]


def choose(right: str, others: list[str], rng: np.random.Generator) -> dict[str, Any] | None:
    """Put the right choice among CHOICES - 1 others in random order; None if there are too few."""
    if len(others) < CHOICES - 1:
        return None
    choices = [others[i] for i in rng.choice(len(others), CHOICES - 1, replace=False)]
    answer = int(rng.integers(CHOICES))
    choices.insert(answer, right)
    return {"choices": choices, "answer": answer}


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
