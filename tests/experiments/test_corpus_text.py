"""The corpus of English: what readers read, near-copies, splits by group, items, and the same files
of the same packages.
"""

import gzip
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from experiments.corpus import text
from packmamba.config import DataConfig
from packmamba.data.token_store import load_corpora

pytestmark = pytest.mark.slow
SAMPLE = Path(text.__file__).with_name("text-sample.jsonl.gz")


def words(rng, count):
    return " ".join("".join(chr(ord("a") + i) for i in rng.integers(0, 26, 6)) for _ in range(count))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Three packages: a dictionary, services that share a description, and pages of which two are
    near-copies.
    """
    root, rng = tmp_path_factory.mktemp("packages"), np.random.default_rng(0)
    heads = sorted({words(rng, 1) for _ in range(400)})
    for kind in ("verb", "adj", "adv"):
        write(root / f"wordnet/usr/share/wordnet/data.{kind}", "  1 licence\n")
    lines = [f'{i:08} 03 n 01 {head} 0 000 | {words(rng, 7)}; "{head} it"  \n' for i, head in enumerate(heads)]
    write(root / "wordnet/usr/share/wordnet/data.noun", "  1 licence\n" + "".join(lines))
    common = f"<p>{words(rng, 30)}</p>"
    for i in range(40):
        shapes = {f"Shape{j}": {"documentation": f"<p>{words(rng, 30)}</p>"} for j in range(5)}
        operations = {"Common": {"documentation": common if i % 2 else common + " again"}}
        for year in ("2015-01-01", "2016-01-01"):
            path = root / f"botocore/botocore/data/service{i}/{year}/service-2.json.gz"
            write(path, gzip.compress(json.dumps({"operations": operations, "shapes": shapes}).encode()))
    for i in range(40):
        page = f"=head1 NAME\n\n{words(rng, 120)}\n\n=head2 C<next> L<one|http://x>\n\nSee B<I<this>>. "
        page += f"{words(rng, 120)}\n"
        write(root / f"perl/usr/share/perl/5.36.0/pod/page{i}.pod", page)
        if i == 7:
            write(root / f"perl/usr/share/perl/5.36.0/pod/copy{i}.pod", page + "\nA copy.\n")
    known = {"wordnet-base": "wordnet", "perl-doc": "perl", "botocore": "botocore"}
    return {name: {"package": name, "version": "1", "root": root / folder} for name, folder in known.items()}


@pytest.fixture(scope="module")
def built(packages, tmp_path_factory):
    output = tmp_path_factory.mktemp("text")
    text.build(packages, output)
    return output


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def every_row(folder):
    names = ("corpus/train", "corpus/validation", "sealed/test")
    return [row for name in names for row in rows(folder / f"{name}.jsonl")]


def test_the_same_packages_give_the_same_files(built, packages, tmp_path):
    text.build(dict(reversed(packages.items())), tmp_path)
    files = [path.relative_to(built) for path in sorted(built.rglob("*")) if path.is_file()]
    assert len(files) == 13 and all((built / name).read_bytes() == (tmp_path / name).read_bytes() for name in files)


def test_no_group_is_in_two_splits_and_each_source_is_in_all(built):
    splits, ids = defaultdict(set), []
    for row in every_row(built):
        splits[row["group"]].add(row["split"])
        ids.append(row["id"])
    assert all(len(found) == 1 for found in splits.values()) and len(set(ids)) == len(ids)
    assert len({(group.split(":")[0], *split) for group, split in splits.items()}) == 9
    listed = [json.loads(line) for line in gzip.decompress((built / "text.jsonl.gz").read_bytes()).splitlines()]
    assert {row["group"]: {row["split"]} for row in listed if "group" in row} == splits


def test_no_near_copies_remain_in_any_split(built):
    found = every_row(built)
    signatures = np.stack([text.signed(row["text"]) for row in found])
    similar = [(signatures[i] == signatures[i + 1 :]).mean(axis=1).max(initial=0) for i in range(len(found))]
    assert max(similar) < 0.5
    assert sum(row["text"].startswith("Common") for row in found) == 1
    assert sum("copy7" in row["id"] or "page7#" in row["id"] for row in found) == 2


def test_the_test_split_is_sealed(built, tmp_path):
    data = DataConfig("splits", str(built / "[cs]*/[tv]*.jsonl"), cache_dir=str(tmp_path))
    corpora = load_corpora(data, progress=False)
    tests = {row["group"] for row in rows(built / "sealed/test.jsonl")}
    assert tests and not tests & {*corpora.train.group_names, *corpora.validation.group_names}
    for path in (built / "items").iterdir():
        assert not tests & {row["group"] for row in rows(path)}


def test_texts_are_plain(built):
    found = {row["id"]: row["text"] for row in every_row(built)}
    page = found["perl:page3#1"]
    assert page.startswith("next one\n\nSee this. ") and "\0" not in page
    assert "<p>" not in "".join(found.values())
    html = "<nav>no</nav><h1>A</h1><p>b\n <b>c</b></p><pre>x\n  y</pre><table><tr><td>1</td><td>2</td></tr></table>"
    assert text.Plain(html).text == "\0A\n\nb c\n\nx\n  y\n1 2"
    assert text.rst("Title\n=====\n\n.. note:: See :ref:`this <that>` and ``x``::\n") == "\0Title\n\nSee this and x:"


def test_an_entry_of_gcide_is_plain_and_its_gloss_is_marked(tmp_path):
    entry = b'Arpent \\Ar"pent\\, n. [F. arpent.]\n   A measure of land in {France}. It was 4 yards. [Obs.]\n   [1913 Webster]\n'
    write(tmp_path / "usr/share/dictd/gcide.dict.dz", gzip.compress(b"x" * 64 + entry.ljust(256)))
    write(tmp_path / "usr/share/dictd/gcide.index", "00-info\tA\tB\nArpent\tBA\tEA\n")
    (found,) = text.gcide(tmp_path)
    assert found.text == "Arpent, n. [F. arpent.] A measure of land in France. It was 4 yards. [Obs.]"
    assert found.gloss[:2] == ("Arpent", "noun") and found.group == "gcide:arp"
    assert found.text[slice(*found.gloss[2:])] == "A measure of land in France"


def test_items_are_of_held_out_entries_and_their_answers_are_right(built):
    of = {row["id"]: row for row in rows(built / "corpus/validation.jsonl")}
    items = rows(built / "items/headword.validation.jsonl")
    assert items
    for item in items:
        head, kind, first, last = of[item["id"]]["gloss"]
        right = item["choices"][item["answer"]]
        assert len(set(item["choices"])) == 4 and right == f" {head}" and item["group"] == of[item["id"]]["group"]
        assert item["contexts"][item["answer"]] + item["continuation"] == of[item["id"]]["text"][:last]
    for item in rows(built / "items/last_word.validation.jsonl"):
        assert of[item["id"]]["text"].startswith(item["context"] + item["continuation"])
    train = {row["id"] for row in rows(built / "corpus/train.jsonl")}
    assert {row["id"] for row in rows(built / "items/pairs.train.jsonl")} <= train


def test_a_dose_counts_the_tokens_behind_another_document():
    assert text.dose(np.full(1000, 512), 1024) == {"behind": 0.5, "padding": 0.0, "tokens": 512000}
    assert text.dose(np.full(1000, 2000), 1024) == {"behind": 0.0, "padding": 0.0, "tokens": 1024000}


def test_the_sample_trains_without_a_package(tmp_path):
    corpora = load_corpora(DataConfig("splits", str(SAMPLE), cache_dir=str(tmp_path)), progress=False)
    assert corpora.train.num_tokens > 300_000 and corpora.validation.num_tokens > 50_000
    assert not {*corpora.train.group_names} & {*corpora.validation.group_names}
