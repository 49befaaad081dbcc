"""Build a corpus of English from the documentation and dictionaries of named packages, without
near-copies, split by group.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import multiprocessing
import re
import subprocess
import tempfile
import unicodedata
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from experiments.corpus import build as code
from experiments.corpus.minhash import clusters, signature
from experiments.corpus.text_items import write_items, write_lines
from packmamba.config import ConfigError, DataConfig, need
from packmamba.data.corpus import Corpus
from packmamba.data.packing import plan_rows
from packmamba.data.sources.packages import content_hash
from packmamba.data.token_store import load_corpora
from packmamba.files import write_whole

SPLITS = ("train", "validation", "test")
HELD_OUT = 0.05  # of each family's bytes: validation, and as many for test
SECTION = 400  # minimum characters of a page's section; a shorter one is joined to the next
SHORTEST, LONGEST = 20, 400_000  # characters of a document
SAMPLE_BYTES = {"train": 700_000, "validation": 140_000}
TOKENS_PER_STEP, STEPS = 65536, 200  # what a dose is measured on
ROW_LENGTHS = (1024, 2048, 4096)


class Text(NamedTuple):
    """A document. ``group`` is ``source:part``; ``gloss`` is a dictionary's (headword, part of
    speech, first, last character).
    """

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
    HEADINGS = {"h1", "h2", "h3", "h4", "h5"}
    BLOCKS = {"p", "dl", "dt", "pre", "hr"} | LINES | HEADINGS

    def __init__(self, html: str) -> None:
        super().__init__()
        self.parts, self.verbatim = ["\n"], 0
        self.skipped: list[str] = []  # the dropped element, once for each of its name that is open
        self.feed(html)
        self.close()
        self.text = tidy("".join(self.parts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skipped:
            self.skipped += [tag] * (tag == self.skipped[0])
        elif tag in self.DROPPED or any(k in ("class", "id") and self.NAVIGATION.search(v or "") for k, v in attrs):
            self.skipped = [tag]
        elif tag in self.BLOCKS:
            self.end_line(tag)
            self.parts += ["\0"] * (tag in self.HEADINGS)
            self.verbatim += tag == "pre"
        elif tag in ("td", "th") and not self.parts[-1].endswith("\n"):
            self.parts.append(" ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.end_line(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.skipped:
            del self.skipped[len(self.skipped) - (tag == self.skipped[0]) :]
        else:
            self.end_line(tag)
            self.verbatim -= tag == "pre"

    def end_line(self, tag: str) -> None:
        if not self.skipped and tag in self.BLOCKS and not (tag in self.LINES and self.parts[-1].endswith("\n")):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            data = data if self.verbatim > 0 else re.sub(r"\s+", " ", data)
            self.parts.append(data.lstrip(" ") if self.parts[-1].endswith(("\n", "\0")) and not self.verbatim else data)


def tidy(text: str) -> str:
    text = re.sub(r"[ \t\xa0]+\n", "\n", text.replace("\r", "").replace("\xa0", " ").replace("\u200b", ""))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n ")


def html(text: str) -> str:
    return Plain(text).text


def html_without_headings(text: str) -> str:
    return tidy(html(text).replace("\0", ""))


def marked_up(text: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text, flags=re.M)
    return tidy(text)


MARK = r"([=\-~^\"'*+#.:_`])"
RST = (
    (r"^[ \t]*\.\. (?:_.*|SPDX.*|include::.*|toctree::.*|contents::.*)\n", ""),
    (r"^([ \t]*)\.\. [\w:+-]+::[ ]?", r"\1"),
    (r":[\w:+.-]+:`([^`<]*?)(?:\s*<[^`]*>)?`", r"\1"),
    (r"``?([^`\n<]+?)(?:\s*<[^`\n]*>)?``?_{0,2}", r"\1"),
    (r"\*\*(\S[^*\n]*)\*\*", r"\1"),
    (rf"^(?:{MARK}\1\1+\n)?(\S.*)\n{MARK}\3\3+$", "\0\\2"),
    ("::\n", ":\n"),
)
NESTED = ((r"L<([^<>|]+)\|[^<>]*>", r"\1"), (r"L<\|?([^<>]*)>", r"\1"), (r"[BCFISN]<([^<>]*)>", r"\1"))
POD = (
    (r"^=(?:cut|pod|back|over|begin|end|for|encoding|item \*$)\b.*\n", ""),
    (r"^=head[12] ", "\0"),
    (r"^=(?:head[3-6]|item) (?:\* )?", ""),
    (r"[XZ]<[^<>]*>", ""),
    (r"(?s)[A-Z]<{2,} (.*?) >{2,}", r"\1"),
    *(3 * NESTED),
    *(("E<gt>", ">"), ("E<lt>", "<"), ("E<sol>", "/"), ("E<verbar>", "|")),
)


def content_of(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()


def pages(
    root: Path, source: str, base: str, files: str, read: Callable[[str], str], skipped: str = "^$", folders: int = 0
) -> Iterator[Text]:
    """Read files as sections of at least SECTION characters; a group is the path's first
    ``folders``, or a page.
    """
    (folder,) = root.glob(base)
    for path in sorted(folder.rglob(files)):
        name = path.relative_to(folder)
        if re.search(skipped, name.as_posix()):
            continue
        page = name.as_posix().removesuffix(".gz").rpartition(".")[0]
        part = "/".join(name.parts[:-1][:folders]) or "top" if folders else page
        sections = [""]
        for section in read(content_of(path).decode(errors="replace")).split("\0"):
            sections[-1] += section
            sections += [""] * (len(sections[-1]) >= SECTION)
        for number, text in enumerate(sections):
            yield Text(source, part, f"{page}#{number}", text)


def letters(word: str) -> str:
    return re.sub(r"[^a-z]", "", unicodedata.normalize("NFKD", word).lower())[:3] or "other"


BASE_64 = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}
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
    data, spans = content_of(base / "gcide.dict.dz"), set()
    for line in (base / "gcide.index").read_text().splitlines():
        word, *numbers = line.split("\t")
        if not word.startswith("00-"):
            spans.add(tuple(sum(BASE_64[c] * 64**i for i, c in enumerate(reversed(n))) for n in numbers[:2]))
    for start, size in sorted(spans):
        raw = data[start : start + size].decode("ascii", "replace")
        raw = re.sub(r"\[([\"'`^,~])([A-Za-z])\]", lambda m: unicodedata.normalize("NFC", m[2] + ACCENTS[m[1]]), raw)
        raw = TAG.sub("", raw.replace("[ae]", "æ").replace("[oe]", "œ"))
        raw = re.sub(r"[{}]", "", re.sub(r"\s*\\[^\\]*\\|\s\([^()\s]*[*\[][^()\s]*\)", "", raw))
        text = "\n".join(filter(None, (" ".join(part.split()) for part in re.split(r"\n\s*\n", raw))))
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
                last = len(head) + len(re.split(r'; (?=")|\s*$', gloss)[0])
                known = (names[0], KIND.get(kind, kind), len(head), last)
                yield Text("wordnet", letters(names[0]), kind + offset, head + gloss.strip(), known)


def interfaces(
    root: Path, source: str, files: str, service: Callable[[Path], str], key: str, read: Callable[[str], str]
) -> Iterator[Text]:
    """Read operations and shapes of each service's newest version, a stable one before others:
    ``key``, and its members'.
    """
    paths = sorted(root.glob(files), key=lambda path: (not re.search("alpha|beta", path.name), path))
    for name, path in {service(path): path for path in paths}.items():
        content = json.loads(content_of(path))
        named = dict(methods(content))
        for kind in ("schemas", "operations", "shapes"):
            named |= content.get(kind, {})
        for title, one in named.items():
            members: dict[str, Any] = next(
                (one[kind] for kind in ("members", "parameters", "properties") if kind in one), {}
            )
            lines = [f"{member}: {read(each[key])}" for member, each in members.items() if each.get(key)]
            if one.get(key) or lines:
                first = f"{title}: {read(one[key])}" if one.get(key) else title
                yield Text(source, name, f"{name}/{title}", "\n".join([first, *lines]))


def methods(resource: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from ((one["id"], one) for one in resource.get("methods", {}).values())
    for inner in resource.get("resources", {}).values():
        yield from methods(inner)


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
            text = "\n".join(filter(None, [head, *lines(one.get("options")), joined(one.get("notes"))]))
            name = path.relative_to(root / "ansible_collections").with_suffix("").as_posix()
            yield Text("ansible", ".".join(name.split("/")[:2]), name.replace("/plugins/modules", ""), text)


rst, pod = partial(marked_up, rules=RST), partial(marked_up, rules=POD)
RACKET = ("racket", "usr/share/doc/racket", "*.html", html, "index|doc-bibliography", 1)
POSTGRESQL = ("postgresql", "usr/share/doc/postgresql-doc-*/html", "*.html", html, "index|biblio|release")
LIBREOFFICE = ("libreoffice", "usr/share/libreoffice/help/en-US/text", "*.html", html)
PERL = ("perl", "usr/share/perl/*/pod", "*.pod", pod, "perltoc")
LINUX = ("linux", "usr/share/doc/linux-doc-*/Documentation", "*.rst.gz", rst, "^translations/", 2)
BOTOCORE = ("botocore/data/*/*/service-2.json*", lambda path: path.parts[-3], "documentation", html_without_headings)
GOOGLE = ("googleapiclient/discovery_cache/documents/*.json", lambda path: path.name.split(".")[0], "description", str)
# Licence, reader and its arguments by the beginning of a package's name.
READERS: dict[str, tuple[str, Callable[..., Iterator[Text]], tuple[Any, ...]]] = {
    "dict-gcide": ("GPL-2.0-or-later", gcide, ()),
    "wordnet-base": ("WordNet-3.0", wordnet, ()),
    "linux-doc": ("GPL-2.0", pages, LINUX),
    "racket-doc": ("LGPL-2.1-or-later and others", pages, RACKET),
    "postgresql-doc": ("PostgreSQL", pages, POSTGRESQL),
    "libreoffice-help-en-us": ("MPL-2.0", pages, LIBREOFFICE),
    "perl-doc": ("GPL-1.0-or-later or Artistic-1.0-Perl", pages, PERL),
    "botocore": ("Apache-2.0", interfaces, ("botocore", *BOTOCORE)),
    "google-api-python-client": ("Apache-2.0", interfaces, ("google", *GOOGLE)),
    "ansible": ("GPL-3.0-or-later", ansible, ()),
}


def unpack(packages: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Unpack the ``.deb`` and ``.whl`` files of a folder: each source's package, version, file,
    hash, licence, and root.
    """
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
    need(found, "packages", f".deb or .whl files of {', '.join(READERS)}", f"none in '{packages}'")
    return found


def read(name: str, root: Path) -> list[Text]:
    """Read the documents of a package, those of SHORTEST to LONGEST characters, each text once."""
    _, reader, arguments = READERS[name]
    found = (one._replace(text=one.text if one.gloss else one.text.strip()) for one in reader(root, *arguments))
    texts = [one for one in found if SHORTEST <= len(one.text) <= LONGEST]
    return list({one.text: one for one in reversed(texts)}.values())[::-1]


def signed(text: str) -> np.ndarray:
    """Sign the words of a text in lower case."""
    return signature(" ".join(re.findall(r"\w+", text.lower())).encode())


def split_of(texts: list[Text], seed: int) -> list[str]:
    """Draw groups of each family for test, then for validation, until they hold HELD_OUT of its
    bytes.
    """
    families: dict[str, Counter[str]] = defaultdict(Counter)
    for one in texts:
        families[one.family][one.part] += len(one.text.encode())
    held: dict[tuple[str, str], str] = {}
    for family, sizes in families.items():
        for split, share in (("test", HELD_OUT), ("validation", HELD_OUT / (1 - HELD_OUT))):
            for part in code.validation_packages(sizes, share, seed):
                held[family, part] = split
                del sizes[part]
    return [held.get((one.family, one.part), "train") for one in texts]


def build(packages: dict[str, dict[str, Any]], output: Path, seed: int = 0) -> None:
    """Write ``corpus/{train,validation}.jsonl``, ``sealed/test.jsonl``, items of both, and the
    manifest ``text.jsonl.gz``.

    Of texts whose estimated Jaccard similarity (words in lower case) is at least SIMILARITY the
    longest stays, before any split.
    """
    names = [name for name in READERS if name in packages]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.map(read, names, [packages[name]["root"] for name in names])
        texts = [one for part in found for one in part]
        signatures = np.stack(list(pool.map(signed, (one.text for one in texts), chunksize=512)))
    counts = {source: [count, 0] for source, count in Counter(one.source for one in texts).items()}
    stays = code.largest(clusters(signatures, code.SIMILARITY), [len(one.text) for one in texts])
    texts = [one for one, stay in zip(texts, stays) if stay]
    lines: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    members: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one, split in zip(texts, split_of(texts, seed)):
        line = {"id": f"{one.source}:{one.id}", "group": one.group, "split": split, "text": one.text}
        lines[split].append(line | ({"gloss": one.gloss} if one.gloss else {}))
        members[one.group, split].append(json.dumps([line["id"], one.text]))
        counts[one.source][1] += 1
    for split, rows in lines.items():
        place = output / ("sealed" if split == "test" else "corpus")
        write_lines(place / f"{split}.jsonl", rows)
        write_items(place if split == "test" else output / "items", split, rows, seed)
    rows = [{"format": 1, "seed": seed, "held_out": HELD_OUT, "similarity": code.SIMILARITY, "documents": counts}]
    rows += [{key: value for key, value in packages[name].items() if key != "root"} for name in names]
    for (group, split), texts_of in members.items():
        digest = content_hash("\n".join(texts_of).encode())
        rows.append({"group": group, "split": split, "documents": len(texts_of), "hash": digest})
    code.write_manifest(output / "text.jsonl.gz", rows)


def describe(corpus: Corpus) -> dict[str, Any]:
    """Count a split: by source documents, groups, tokens and quantiles of lengths; and the dose by
    row length.
    """
    groups, sources = np.asarray(corpus.groups), np.array([name.split(":")[0] for name in corpus.group_names])
    table = {}
    for source in dict.fromkeys(sources.tolist()):
        chosen = sources[groups] == source
        lengths, among = corpus.lengths[chosen], len(np.unique(groups[chosen]))
        counts = {"documents": len(lengths), "groups": among, "tokens": int(lengths.sum())}
        table[source] = counts | code.spread(lengths)
    doses = {str(n): dose(corpus.lengths, n) for n in ROW_LENGTHS}
    return {"tokens": corpus.num_tokens, "sources": table, "doses": doses}


def dose(lengths: np.ndarray, row_length: int) -> dict[str, float]:
    """Pack documents, cut to ``row_length``, in random order: shares behind another and of padding;
    tokens after the cut.
    """
    cut = np.random.default_rng(0).permutation(np.minimum(lengths, row_length))
    ends = np.searchsorted(np.cumsum(cut), np.arange(1, STEPS + 1) * TOKENS_PER_STEP, "right")
    plans = [plan_rows(step, row_length, "greedy") for step in np.split(cut, ends)[:STEPS] if len(step)]
    tokens, slots = (sum(getattr(plan, name) for plan in plans) for name in ("num_tokens", "num_slots"))
    first = sum(int(plan.length[plan.row_offsets[:-1]].sum()) for plan in plans)
    return {"behind": 1 - first / tokens, "padding": 1 - tokens / slots, "tokens": int(cut.sum())}


def make_sample(output: Path, path: Path) -> None:
    """Write a small corpus of the dictionaries' first groups by hash: train and validation lines,
    gzipped.
    """
    rows = []
    for split, size in SAMPLE_BYTES.items():
        groups: dict[str, list[str]] = defaultdict(list)
        for line in open(output / f"corpus/{split}.jsonl", encoding="utf-8"):
            if '"gloss": [' in line:
                groups[json.loads(line)["group"].split(":")[1]].append(line)
        for part in sorted(groups, key=lambda part: hashlib.blake2b(part.encode()).digest()):
            if (needed := sum(map(len, groups[part]))) <= size:
                rows += groups[part]
                size -= needed
    write_whole(path, gzip.compress("".join(rows).encode(), 9, mtime=0))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = code.command("text", str(__doc__), "my/text", "check that these packages give the texts of this manifest")
    parser.add_argument("--packages", type=Path, required=True, help="folder of .deb and .whl files")
    parser.set_defaults(tokenizer_size=8192)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        build(unpack(options.packages, Path(folder)), options.output, options.seed)
    if options.manifest and options.manifest.read_bytes() != (options.output / "text.jsonl.gz").read_bytes():
        raise ConfigError(f"manifest: {options.manifest} has other texts than {options.packages}; use its versions")
    data = DataConfig("splits", str(options.output / "corpus"), cache_dir=options.cache_dir)
    tokenizer = options.output / "text-tokenizer.json"
    code.train_tokenizer(load_corpora(data).train, options.tokenizer_size, tokenizer)
    card: dict[str, Any] = {}
    for name, config in {"bytes": data, "bpe": replace(data, tokenizer=str(tokenizer))}.items():
        corpora = load_corpora(config)
        card[name] = {"corpus_hash": corpora.corpus_hash, "vocab_size": corpora.train.vocab_size}
        card[name] |= {corpus.split: describe(corpus) for corpus in corpora[:2]}
    write_whole(options.output / "text-card.json", f"{json.dumps(card, indent=1)}\n".encode())
    make_sample(options.output, options.output / "text-sample.jsonl.gz")


if __name__ == "__main__":
    code.run(main)
