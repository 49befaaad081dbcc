"""Numbers that documents state are those of the committed records."""

import functools
import re

import pytest

from packmamba import experiments
from packmamba.cli.reproduction import cells
from processes import ROOT

LINK = re.compile(r'\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^\s)]+) "(\w+): ([^"]+)"\)')


# Sentences of pages: a number, the headline that it rounds, its unit.
ROUNDED = {
    "README.md": [
        (r"\*\*([\d.]+)x\*\* mamba-ssm on one document", "speedup: 1.4B: over mamba-ssm, one document at a time", 1),
        (r"([\d.]+)x if the GPU never waited", "speedup: 1.4B: over the same, if the GPU never waited for its host", 1),
        (r"Where we have ([\d.]+)x, the paper", "speedup: 1.4B: over mamba-ssm, one document at a time", 1),
        (r"([\d.]+) % in received order", "packing: padding in rows of 2048, received order", 0.01),
        (r"\*\*([\d.]+) %\*\* in greedy", "packing: padding in rows of 2048, greedy within 4096 documents", 0.01),
        (r"\*\*([\d.]+)x\*\* mamba-ssm's speed", "operators: GPU: mamba-ssm, not packed, over our scan", 1),
        (r"([\d.]+)x its padded batches", "integration: patched over padded", 1),
    ],
    "experiments/speedup/README.md": [
        (r"([\d.]+)k real tokens/s on one H200", "speedup: 1.4B: real tokens/s", 1e3),
        (r"([\d.]+) times mamba-ssm on one document", "speedup: 1.4B: over mamba-ssm, one document at a time", 1),
        (
            r"([\d.]+) times mamba-ssm on the same rows",
            "speedup: 1.4B: over mamba-ssm on the same rows, where it leaks",
            1,
        ),
        (r"equal terms packing is [\d.]+, ([\d.]+) and", "speedup: 1.4B: over our own single, both as CUDA graphs", 1),
        (r"on four ([\d.]+) times", "speedup: 1.4B: four GPUs over one, DDP", 1),
    ],
    "experiments/schemes/README.md": [
        (r"difference, (-[\d.]+)e-10", "schemes: validation loss: packed with reset minus padded", 1e-10),
        (r"packed with leak minus padded \| (-[\d.]+)", "schemes: validation loss: packed with leak minus padded", 1),
    ],
    "experiments/operators/README.md": [
        (r"scan is ([\d.]+) times as fast as mamba-ssm's", "operators: GPU: mamba-ssm, not packed, over our scan", 1),
        (
            r"and ([\d.]+) times as fast as mamba-ssm's document",
            "operators: GPU: mamba-ssm, document by document, over our scan",
            1,
        ),
        (r"reaches ([\d.]+) % and", "operators: GPU: our convolution forward, share of copy bandwidth", 0.01),
        (r"and ([\d.]+) % of the copy", "operators: GPU: our convolution backward, share of copy bandwidth", 0.01),
    ],
}


@functools.cache
def headlines(experiment):
    """Every headline number's cell, from the records."""
    folder = experiments.find(experiment)
    return cells(experiments.module(folder, "reproduce").HEADLINES, folder)


def awaited(experiment):
    """What its runs are still to measure: its headlines without a record."""
    return {name for name, cell in headlines(experiment).items() if cell.text == "-"}


def numbers(experiment):
    """The text of every headline number."""
    return {name: cell.text for name, cell in headlines(experiment).items()}


def stated(text):
    """Every number whose link says which headline it is: number, file, experiment, headline."""
    return LINK.findall(text)


def wrong(text):
    return [
        (number, name)
        for number, _, experiment, name in stated(text)
        if (number == "-" and name not in awaited(experiment))
        or (number != "-" and numbers(experiment).get(name, "").replace("−", "-") != number)
    ]


def table_cells(text):
    """Every cell of the document's tables by its row's first cell and its column's title; the second also by None."""
    found, header = {}, []
    for line in text.splitlines():
        row = [part.strip() for part in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if row and not header:
            header = row
        elif row and not set("".join(row)) <= set("-: "):
            found |= {(row[0], column): cell for column, cell in zip([*header[1:], None], [*row[1:], row[1]])}
        header = header if row else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/paper.md", "experiments/README.md"])
def test_linked_numbers_are_the_records(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    assert wrong(text) == []
    for _, file, _, _ in stated(text):
        assert (ROOT / document).parent.joinpath(file).is_file(), file


def test_the_paper_s_claims_are_all_there():
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|") and "python run.py reproduce" in line]
    assert len(rows) == 6
    for row, claim in zip(rows, ("3.06x", "2.62x", "3.91x", "19.1 %", "0.41 %", "PUI")):
        (_, _, experiment, _), *_ = stated(row)
        assert claim in row and f"`python run.py reproduce {experiment}`" in row
        figures = re.findall(r"\((\.\./experiments/\w+/figures/[\w-]+\.png)\)", row)
        assert figures and all((ROOT / "docs" / figure).is_file() for figure in figures)
    assert len(stated(text)) >= 17


def test_the_answers_say_what_is_not_measured():
    """A row says so as long as its headline has no record, and no longer."""
    text = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and stated(line)]
    assert len(rows) >= 9
    for row in rows:
        missing = [name for number, _, _, name in stated(row) if number == "-"]
        assert bool(missing) == ("Not measured yet" in row), row
    named = {experiment for row in rows for _, _, experiment, _ in stated(row)}
    assert {"parity", "boundaries", "downstream", "schemes", "speedup", "packing"} <= named


def test_the_answers_are_short():
    """A row that answers has one effect, or two where the answer needs both, and a few words."""
    text = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and stated(line)]
    for row in rows:
        answer = LINK.sub("", row.split(" | ")[1])
        assert len(stated(row)) <= 2 and len(answer.split()) <= 25, row


def test_a_changed_number_is_noticed():
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    assert wrong(text.replace("[11.29x]", "[11.30x]")) == [("11.30x", "1.4B: over mamba-ssm, one document at a time")]
    assert wrong('[1](x.md "packing: nothing")') == [("1", "nothing")]


@pytest.mark.parametrize(
    ("page", "pattern", "headline", "unit"), [(page, *one) for page, some in ROUNDED.items() for one in some]
)
def test_sentences_round_the_records(page, pattern, headline, unit):
    (number,) = re.findall(pattern, (ROOT / page).read_text(encoding="utf-8"))
    experiment, _, name = headline.partition(": ")
    digits = len(number.partition(".")[2])
    assert f"{headlines(experiment)[name].values[0] / unit:.{digits}f}" == number


@pytest.mark.parametrize(
    "experiment",
    [
        "boundaries",
        "downstream",
        "leakcheck",
        "operators",
        "packing",
        "parity",
        "schemes",
        "speedup",
        "tasks",
        "tokenization",
    ],
)
def test_a_readme_states_every_headline(experiment):
    """In a table: its row has the headline's name; or what follows a colon in it, and a column what is before."""
    found = table_cells((experiments.find(experiment) / "README.md").read_text(encoding="utf-8"))
    differing = {}
    for name, number in numbers(experiment).items():
        group, _, what = name.partition(": ")
        cell = found.get((what, group), found.get((name, None)))
        if cell is None or cell.partition(" (the paper")[0] != number.replace("−", "-"):
            differing[name] = (cell, number)
    assert differing == {}
