"""Build a corpus of English from the documentation and dictionaries of named packages, without near-copies, split by group."""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from experiments.corpus.build import QUANTILES, SIMILARITY, largest, train_tokenizer, validation_packages
from experiments.corpus.minhash import clusters, signature
from experiments.corpus.text_items import write_items
from packmamba.config import ConfigError, DataConfig
from packmamba.data.packing import plan_rows
from packmamba.data.sources.packages import content_hash
from packmamba.data.token_store import Corpus, load_corpora

SPLITS = ("train", "validation", "test")
HELD_OUT = 0.05  # of each family's bytes: validation, and as many for test
SECTION = 400  # minimum characters of a page's section; a shorter one is joined to the next
SHORTEST = 20  # characters of a document
LONGEST = 400_000
SAMPLE_BYTES = 700_000
TOKENS_PER_STEP, STEPS = 65536, 200  # what a dose is measured on
ROW_LENGTHS = (1024, 2048, 4096)


class Text(NamedTuple):
    """A document. ``group`` is ``source:part``; ``gloss`` is a dictionary's (headword, part of speech, first, last character)."""

    source: str
    part: str
    id: str
    text: str
    gloss: tuple[str, str, int, int] | None = None

    @property
    def group(self) -> str:
        return f"{self.source}:{self.part}"

    @property
    def family(self) -> str:
        """Name what is split together: the same headwords of both dictionaries are in one split."""
        return "dictionaries" if self.source in ("gcide", "wordnet") else self.source


class Plain(HTMLParser):
    """Text of HTML; ``\\0`` before each heading."""

    DROPPED = {"script", "style", "head", "header", "footer", "aside", "nav", "noscript", "form"}
    NAVIGATION = re.compile(r"nav(header|footer|set)|toc(set|view)|versionbox|searchbox|^toc$|RBackgroundLabel|DEBUG")
    LINES = {"div", "br", "tr", "li", "ul", "ol", "dd", "table", "blockquote", "note"}
    BLOCKS = {"p", "dl", "dt", "pre", "hr", *LINES}
    HEADINGS = {"h1", "h2", "h3", "h4", "h5"}

    def __init__(self, html: str) -> None:
        super().__init__()
        self.parts, self.skipped, self.depth, self.verbatim = ["\n"], "", 0, 0
        self.feed(html)
        self.close()
        self.text = tidy("".join(self.parts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skipped:
            self.depth += tag == self.skipped
        elif tag in self.DROPPED or any(k in ("class", "id") and self.NAVIGATION.search(v or "") for k, v in attrs):
            self.skipped, self.depth = tag, 1
        elif tag in self.BLOCKS or tag in self.HEADINGS:
            self.end_line(tag)
            self.parts += ["\0"] * (tag in self.HEADINGS)
            self.verbatim += tag == "pre"
        elif tag in ("td", "th") and not self.parts[-1].endswith("\n"):
            self.parts.append(" ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if not self.skipped and tag in self.BLOCKS:
            self.end_line(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.skipped:
            self.depth -= tag == self.skipped
            self.skipped = self.skipped if self.depth else ""
        elif tag in self.BLOCKS or tag in self.HEADINGS:
            self.end_line(tag)
            self.verbatim -= tag == "pre"

    def end_line(self, tag: str) -> None:
        if tag not in self.LINES or not self.parts[-1].endswith("\n"):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            data = data if self.verbatim > 0 else re.sub(r"\s+", " ", data)
            self.parts.append(data.lstrip(" ") if self.parts[-1].endswith(("\n", "\0")) and not self.verbatim else data)


def tidy(text: str) -> str:
    text = re.sub(r"[ \t\xa0]+\n", "\n", text.replace("\r", "").replace("\xa0", " ").replace("\u200b", ""))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n ")


def plain(html: str) -> str:
    return tidy(Plain(html).text.replace("\0", ""))


def rst(text: str) -> str:
    text = re.sub(r"^[ \t]*\.\. (?:_.*|SPDX.*|include::.*|toctree::.*|contents::.*)\n", "", text, flags=re.M)
    text = re.sub(r"^([ \t]*)\.\. [\w:+-]+::[ ]?", r"\1", text, flags=re.M)
    text = re.sub(r":[\w:+.-]+:`([^`<]*?)(?:\s*<[^`]*>)?`", r"\1", text)
    text = re.sub(r"``?([^`\n<]+?)(?:\s*<[^`\n]*>)?``?_{0,2}", r"\1", text)
    text = re.sub(r"\*\*(\S[^*\n]*)\*\*", r"\1", text)
    marks = r"[=\-~^\"'*+#.:_`]"
    return tidy(
        re.sub(rf"^(?:({marks})\1\1+\n)?(\S.*)\n({marks})\3\3+$", "\0\\2", text, flags=re.M).replace("::\n", ":\n")
    )


def pod(text: str) -> str:
    text = re.sub(r"^=(?:cut|pod|back|over|begin|end|for|encoding|item \*$)\b.*\n", "", text, flags=re.M)
    text = re.sub(r"^=(?:head[12]) ", "\0", text, flags=re.M)
    text = re.sub(r"^=(?:head[3-6]|item) (?:\* )?", "", text, flags=re.M)
    text = re.sub(r"[A-Z]<{2,} (.*?) >{2,}", r"\1", re.sub(r"[XZ]<[^<>]*>", "", text), flags=re.S)
    for _ in range(3):
        text = re.sub(
            r"[BCFISN]<([^<>]*)>", r"\1", re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m[1] or m[2], text)
        )
    return tidy(text.replace("E<gt>", ">").replace("E<lt>", "<").replace("E<sol>", "/").replace("E<verbar>", "|"))


def sections(text: str) -> Iterator[str]:
    """Cut a page before its headings, so that each section has at least SECTION characters; the last may have fewer."""
    held = ""
    for part in text.split("\0"):
        held += part
        if len(held) >= SECTION:
            yield held
            held = ""
    yield held


def letters(word: str) -> str:
    found = re.sub(r"[^a-z]", "", unicodedata.normalize("NFKD", word).lower())
    return found[:3] or "other"


ACCENTS = {'"': "\u0308", "'": "\u0301", "`": "\u0300", "^": "\u0302", ",": "\u0327", "~": "\u0303"}
TAG = re.compile(r"\s*\[[^\[\]]*(?:Webster|WordNet|PJC|GCIDE|Century Dict|[A-Z]{2,3})[^\[\]]*\]")
KIND = {"n": "noun", "a": "adjective", "adj": "adjective", "adv": "adverb", "v": "verb"}
ENTRY = re.compile(
    r"(?P<head>[^,(]{2,40}?),? (?:\([^)]*\),? )?(?P<kind>n|adj|adv|a|v)\. (?:(?:t|i|pl|sing)\. )*(?:& n\. )?"
    r"(?:\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\] )?(?:\([^)]*\) )*(?:1\. )?(?:\([^)]*\) )*"
    r"(?P<gloss>[A-Z][^\[\]]{18,300}?)(?=\.? --|\. \[|;|: | Syn:|\.$|\. )"
)


def gcide(root: Path) -> Iterator[Text]:
    """Read the dictionary's entries by its index, whose numbers are in base 64."""
    base = root / "usr/share/dictd"
    data = gzip.decompress((base / "gcide.dict.dz").read_bytes())
    digits = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}
    spans = set()
    for line in (base / "gcide.index").read_text().splitlines():
        word, *numbers = line.split("\t")
        if not word.startswith("00-"):
            spans.add(tuple(int(sum(digits[c] * 64**i for i, c in enumerate(reversed(n)))) for n in numbers[:2]))
    for start, size in sorted(spans):
        raw = data[start : start + size].decode("ascii", "replace")
        raw = re.sub(r"\[([\"'`^,~])([A-Za-z])\]", lambda m: unicodedata.normalize("NFC", m[2] + ACCENTS[m[1]]), raw)
        raw = re.sub(
            r"\s*\\[^\\]*\\|\s\([^()\s]*[*\[][^()\s]*\)", "", TAG.sub("", raw.replace("[ae]", "æ").replace("[oe]", "œ"))
        )
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", re.sub(r"[{}]", "", raw))]
        text = "\n".join(filter(None, paragraphs))
        found, head = ENTRY.match(text.replace("\n", " ")), re.split(r"[,(\[]|\b(?:n|a|v)\.", text)[0].strip()
        gloss = (found["head"], KIND[found["kind"]], *found.span("gloss")) if found else None
        yield Text("gcide", letters(head), f"{start}", text, gloss)


def wordnet(root: Path) -> Iterator[Text]:
    for kind in ("noun", "verb", "adj", "adv"):
        for line in (root / f"usr/share/wordnet/data.{kind}").read_text().splitlines():
            if line[:1] != " ":
                fields, gloss = line.split(" | ", 1)
                offset, _, _, count, *words = fields.split(" ")
                names = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words[: 2 * int(count, 16) : 2]]
                head = f"{', '.join(names)} ({KIND.get(kind, kind)}): "
                first, last = len(head), len(head) + len(re.split(r'; (?=")|\s*$', gloss)[0])
                known = (names[0], KIND.get(kind, kind), first, last)
                yield Text("wordnet", letters(names[0]), kind + offset, head + gloss.strip(), known)


def pages(
    source: str, base: Path, names: Sequence[Path], part: Callable[[Path], str], read: Callable[[str], str]
) -> Iterator[Text]:
    """Read files as sections; ``part`` names a file's group."""
    for name in names:
        content = (base / name).read_bytes()
        content = gzip.decompress(content) if name.suffix == ".gz" else content
        for number, text in enumerate(sections(read(content.decode(errors="replace")))):
            yield Text(source, part(name), f"{name.as_posix().removesuffix('.gz').rpartition('.')[0]}#{number}", text)


def found(base: Path, pattern: str, skipped: str = "^$") -> list[Path]:
    names = sorted(path.relative_to(base) for path in base.rglob(pattern))
    return [name for name in names if not re.search(skipped, name.as_posix())]


def linux(root: Path) -> Iterator[Text]:
    (base,) = root.glob("usr/share/doc/linux-doc-*/Documentation")
    names = found(base, "*.rst.gz", "^translations/")
    return pages("linux", base, names, lambda name: "/".join(name.parts[:-1][:2]) or "top", rst)


def html_pages(source: str, pattern: str, skipped: str, by_folder: bool = False) -> Callable[[Path], Iterator[Text]]:
    """Read HTML below ``pattern``; a group is the first folder of the path, or each page its own."""

    def read(root: Path) -> Iterator[Text]:
        (base,) = root.glob(pattern)

        def part(name: Path) -> str:
            return name.parts[0] if by_folder else name.with_suffix("").as_posix()

        return pages(source, base, found(base, "*.html", skipped), part, lambda html: Plain(html).text)

    return read


def perl(root: Path) -> Iterator[Text]:
    (base,) = root.glob("usr/share/perl/*/pod")
    return pages("perl", base, found(base, "*.pod", "perltoc"), lambda name: name.stem, pod)


def described(name: str, description: str | None, members: dict[str, str | None], read: Callable[[str], str]) -> str:
    """Write a description, and a line for each member that has one; empty if there is none."""
    parts = [f"{key}: {read(one)}" for key, one in members.items() if one]
    return "\n".join([f"{name}: {read(description)}" if description else name, *parts]) if description or parts else ""


def botocore(root: Path) -> Iterator[Text]:
    """Read operations and shapes of the newest version of each service."""
    newest = {path.parent.parent.name: path for path in sorted(root.glob("botocore/data/*/*/service-2.json*"))}
    for service, path in newest.items():
        content = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        for name, one in (content["operations"] | content["shapes"]).items():
            members = {key: member.get("documentation") for key, member in one.get("members", {}).items()}
            text = described(name, one.get("documentation"), members, plain)
            yield Text("botocore", service, f"{service}/{name}", text)


def google(root: Path) -> Iterator[Text]:
    """Read methods and schemas of the newest version of each API, a stable one before others."""
    newest: dict[str, Path] = {}
    paths = (root / "googleapiclient/discovery_cache/documents").glob("*.json")
    for path in sorted(paths, key=lambda path: (not re.search("alpha|beta", path.name), path.name)):
        newest[path.name.split(".")[0]] = path

    def methods(of: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        for one in of.get("methods", {}).values():
            yield one["id"], one, one.get("parameters", {})
        for resource in of.get("resources", {}).values():
            yield from methods(resource)

    for api, path in newest.items():
        content = json.loads(path.read_bytes())
        schemas = [(name, one, one.get("properties", {})) for name, one in content.get("schemas", {}).items()]
        for name, one, members in [*methods(content), *schemas]:
            descriptions = {key: member.get("description") for key, member in members.items()}
            text = described(name, one.get("description"), descriptions, str)
            yield Text("google", api, f"{api}/{name}", text)


def ansible(root: Path) -> Iterator[Text]:
    """Read modules' documentation: title, description, a line for each option and its suboptions."""

    def joined(value: Any) -> str:
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value or "")
        return " ".join(re.sub(r"\b[A-Z]\(([^(),]*)(?:,[^()]*)?\)", r"\1", text).split())

    def lines(options: Any) -> Iterator[str]:
        for name, one in (options or {}).items():
            if isinstance(one, dict):
                yield f"{name}: {joined(one.get('description'))}"
                yield from lines(one.get("suboptions") or one.get("options"))

    for path in sorted(root.glob("ansible_collections/*/*/plugins/modules/**/*.py")):
        found = re.search(r"^DOCUMENTATION\s*=\s*(r?(\"\"\"|''').*?\2)", path.read_text(errors="replace"), re.M | re.S)
        try:
            one = yaml.load(ast.literal_eval(found[1]), yaml.CSafeLoader) if found else None
        except (yaml.YAMLError, SyntaxError, ValueError):
            continue
        if isinstance(one, dict) and isinstance(one.get("options") or {}, dict):
            head = f"{path.stem}\n{joined(one.get('short_description'))}\n{joined(one.get('description'))}"
            text = "\n".join(filter(None, [head, "", *lines(one.get("options")), joined(one.get("notes"))]))
            name = path.relative_to(root / "ansible_collections").with_suffix("").as_posix()
            yield Text("ansible", ".".join(name.split("/")[:2]), name.replace("/plugins/modules", ""), text)


HTML = "usr/share/doc/racket", "usr/share/doc/postgresql-doc-*/html", "usr/share/libreoffice/help/en-US/text"
READERS: dict[str, tuple[str, Callable[[Path], Iterator[Text]]]] = {
    "dict-gcide": ("GPL-2.0-or-later", gcide),
    "wordnet-base": ("WordNet-3.0", wordnet),
    "linux-doc": ("GPL-2.0", linux),
    "racket-doc": ("LGPL-2.1-or-later and others", html_pages("racket", HTML[0], "index|doc-bibliography", True)),
    "postgresql-doc": ("PostgreSQL", html_pages("postgresql", HTML[1], "index|biblio|release")),
    "libreoffice-help-en-us": ("MPL-2.0", html_pages("libreoffice", HTML[2], "^$")),
    "perl-doc": ("GPL-1.0-or-later or Artistic-1.0-Perl", perl),
    "botocore": ("Apache-2.0", botocore),
    "google-api-python-client": ("Apache-2.0", google),
    "ansible": ("GPL-3.0-or-later", ansible),
}
"""Licence and reader by the beginning of a package's name."""


def unpack(packages: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Unpack the ``.deb`` and ``.whl`` files of a folder: each source's package, version, file, hash, licence, and root."""
    found = {}
    for path in sorted([*packages.glob("*.deb"), *packages.glob("*.whl")]):
        package, version = path.stem.split("_" if path.suffix == ".deb" else "-")[:2]
        package = package.replace("_", "-")
        if name := next((name for name in READERS if package.startswith(name)), None):
            root = folder / name
            if path.suffix == ".deb":
                subprocess.run(["dpkg-deb", "-x", path, root], check=True)
            else:
                zipfile.ZipFile(path).extractall(root)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            file = {"file": path.name, "sha256": digest, "licence": READERS[name][0], "root": root}
            found[name] = {"package": package, "version": version.replace("%3a", ":"), **file}
    if not found:
        raise ConfigError(f"packages: expected .deb or .whl files of {', '.join(READERS)} in '{packages}'")
    return found


def read(name: str, root: Path) -> list[Text]:
    """Read the documents of a package, those of SHORTEST to LONGEST characters, each text once."""
    stripped = (one._replace(text=one.text if one.gloss else one.text.strip()) for one in READERS[name][1](root))
    texts = [one for one in stripped if SHORTEST <= len(one.text) <= LONGEST]
    return list({one.text: one for one in reversed(texts)}.values())[::-1]


def normalised(text: str) -> bytes:
    return " ".join(re.findall(r"\w+", text.lower())).encode()


def signed(text: str) -> np.ndarray:
    return signature(normalised(text))


def split_of(texts: list[Text], seed: int) -> list[str]:
    """Draw groups of each family for test, then for validation, until they hold HELD_OUT of its bytes."""
    families: dict[str, Counter[str]] = defaultdict(Counter)
    for one in texts:
        families[one.family][one.part] += len(one.text.encode())
    held: dict[tuple[str, str], str] = {}
    for family, sizes in families.items():
        for split, share in (("test", HELD_OUT), ("validation", HELD_OUT / (1 - HELD_OUT))):
            chosen = validation_packages(sizes, share, seed)
            held |= {(family, part): split for part in chosen}
            sizes = Counter({part: size for part, size in sizes.items() if part not in chosen})
    return [held.get((one.family, one.part), "train") for one in texts]


def build(packages: dict[str, dict[str, Any]], output: Path, seed: int = 0) -> None:
    """Write ``corpus/{train,validation}.jsonl``, ``sealed/test.jsonl``, items of both, and the manifest ``text.jsonl.gz``.

    Of texts whose estimated Jaccard similarity (words in lower case) is at least SIMILARITY the longest stays, before any split.
    """
    names = [name for name in READERS if name in packages]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.map(read, names, [packages[name]["root"] for name in names])
        texts = [one for part in found for one in part]
        signatures = np.stack(list(pool.map(signed, (one.text for one in texts), chunksize=512)))
    before = Counter(one.source for one in texts)
    stays = largest(clusters(signatures, SIMILARITY), [len(one.text) for one in texts])
    texts = [one for one, stay in zip(texts, stays) if stay]
    after = Counter(one.source for one in texts)
    lines: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    members: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one, split in zip(texts, split_of(texts, seed)):
        line = {"id": f"{one.source}:{one.id}", "group": one.group, "split": split, "text": one.text}
        lines[split].append(line | ({"gloss": one.gloss} if one.gloss else {}))
        members[one.group, split].append(json.dumps([line["id"], one.text]))
    for split, rows in lines.items():
        place = output / ("sealed" if split == "test" else "corpus")
        write_lines(place / f"{split}.jsonl", rows)
        write_items(place if split == "test" else output / "items", split, rows, seed)
    counts = {source: [count, after[source]] for source, count in before.items()}
    rows = [{"format": 1, "seed": seed, "held_out": HELD_OUT, "similarity": SIMILARITY, "documents": counts}]
    rows += [{key: value for key, value in packages[name].items() if key != "root"} for name in names]
    for (group, split), texts_of in members.items():
        digest = content_hash("\n".join(texts_of).encode())
        rows.append({"group": group, "split": split, "documents": len(texts_of), "hash": digest})
    content = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (output / "text.jsonl.gz").write_bytes(gzip.compress(content.encode(), 9, mtime=0))


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def describe(corpus: Corpus) -> dict[str, Any]:
    """Count a split: by source documents, groups, tokens and quantiles of lengths; and the dose by row length."""
    groups, sources = np.asarray(corpus.groups), np.array([name.split(":")[0] for name in corpus.group_names])
    table = {}
    for source in dict.fromkeys(sources.tolist()):
        chosen = sources[groups] == source
        lengths, among = corpus.lengths[chosen], len(np.unique(groups[chosen]))
        quantiles = {"quantiles": np.quantile(lengths, QUANTILES).tolist(), "longest": int(lengths.max())}
        table[source] = {"documents": len(lengths), "groups": among, "tokens": int(lengths.sum()), **quantiles}
    doses = {str(n): dose(corpus.lengths, n) for n in ROW_LENGTHS}
    return {"tokens": corpus.num_tokens, "sources": table, "doses": doses}


def dose(lengths: np.ndarray, row_length: int) -> dict[str, float]:
    """Pack documents, cut to ``row_length``, in random order: shares behind another and of padding; tokens after the cut."""
    cut = np.random.default_rng(0).permutation(np.minimum(lengths, row_length))
    ends = np.searchsorted(np.cumsum(cut), np.arange(1, STEPS + 1) * TOKENS_PER_STEP, "right")
    plans = [plan_rows(step, row_length, "greedy") for step in np.split(cut, ends)[:STEPS] if len(step)]
    tokens, slots = (sum(getattr(plan, name) for plan in plans) for name in ("num_tokens", "num_slots"))
    first = sum(int(plan.length[plan.row_offsets[:-1]].sum()) for plan in plans)
    return {"behind": 1 - first / tokens, "padding": 1 - tokens / slots, "tokens": int(cut.sum())}


def make_sample(output: Path, path: Path) -> None:
    """Write a small corpus of the dictionaries' first groups by hash: train and validation lines, gzipped."""
    rows = []
    for split, size in (("train", SAMPLE_BYTES), ("validation", SAMPLE_BYTES // 5)):
        groups: dict[str, list[str]] = defaultdict(list)
        for line in open(output / f"corpus/{split}.jsonl", encoding="utf-8"):
            if '"gloss": [' in line:
                groups[json.loads(line)["group"].split(":")[1]].append(line)
        for part in sorted(groups, key=lambda part: hashlib.blake2b(part.encode()).digest()):
            if (needed := sum(map(len, groups[part]))) <= size:
                rows += groups[part]
                size -= needed
    path.write_bytes(gzip.compress("".join(rows).encode(), 9, mtime=0))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m experiments.corpus.text", description=__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="folder of .deb and .whl files")
    parser.add_argument("--output", type=Path, default=Path("my/text"), help="folder of corpus, items, manifest, card")
    parser.add_argument("--manifest", type=Path, help="check that these packages give the texts of this manifest")
    parser.add_argument("--seed", type=int, default=0, help="seed that draws the groups held out")
    parser.add_argument("--tokenizer-size", type=int, default=8192, help="tokens of the BPE tokenizer")
    parser.add_argument("--cache-dir", default="runs/corpora", help="folder of tokenised corpora")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        build(unpack(options.packages, Path(folder)), options.output, options.seed)
    if options.manifest and options.manifest.read_bytes() != (options.output / "text.jsonl.gz").read_bytes():
        raise ConfigError(f"manifest: {options.manifest} has other texts than {options.packages}; use its versions")
    data = DataConfig("splits", str(options.output / "corpus"), cache_dir=options.cache_dir)
    tokenizer = options.output / "text-tokenizer.json"
    card: dict[str, Any] = {}
    for name in ("bytes", "bpe"):
        if name == "bpe":
            train_tokenizer(load_corpora(data).train, options.tokenizer_size, tokenizer)
            data.tokenizer = str(tokenizer)
        corpora = load_corpora(data)
        card[name] = {"corpus_hash": corpora.corpus_hash, "vocab_size": corpora.train.vocab_size}
        card[name] |= {corpus.split: describe(corpus) for corpus in corpora[:2]}
    (options.output / "text-card.json").write_text(json.dumps(card, indent=1) + "\n")
    make_sample(options.output, options.output / "text-sample.jsonl.gz")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(str(error))
