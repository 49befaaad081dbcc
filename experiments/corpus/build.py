"""Build a corpus of the Python packages of this machine (manifest, card, tokenizer), or check one against its manifest."""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import multiprocessing
import platform
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.corpus.minhash import FUNCTIONS, clusters, signature
from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources import share_of
from packmamba.data.sources.packages import UNITS, content_hash, functions_of, read_manifest
from packmamba.data.token_store import Corpus, load_corpora

SIMILARITY = 0.5
LARGEST_SHARE = 0.25
"""Maximum share of the validation split that one package may have, so that none is most of it."""
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
REACHES = (16384, 65536)
"""Lengths for which the card counts validation documents: what long contexts can be measured on."""
TOKENIZER_BYTES = 1 << 26


class Package(NamedTuple):
    """An installed package and its Python files."""

    name: str
    version: str
    root: Path
    paths: list[str]


class Candidate(NamedTuple):
    """A file that may become documents."""

    hash: str
    size: int
    signature: np.ndarray
    functions: np.ndarray
    """(functions, 256) signatures."""
    sizes: list[int]
    """Bytes of each function."""


def make_manifest(path: Path, names: Sequence[str] = (), fraction: float = 0.1, seed: int = 0) -> None:
    """Write the manifest of the named packages, or of all that are installed.

    Files whose estimated Jaccard similarity is at least SIMILARITY form a cluster, of which the largest stays; likewise the
    functions of the files that stay. Packages are drawn for validation until they hold ``fraction`` of the bytes.
    Raises ConfigError if a package is not installed, or nothing is left to train on.
    """
    packages = installed(names)
    jobs = [package.root / name for package in packages for name in package.paths]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(
            tqdm(pool.map(inspect, jobs, chunksize=64), total=len(jobs), desc="Reading packages", disable=None)
        )
    files = [one for one in found if one is not None]
    if not files:
        raise ConfigError("packages: expected Python files, got none")
    cluster = clusters(np.stack([one.signature for one in files]))
    stays = largest(cluster, [one.size for one in files])
    taken = [one for one, stay in zip(files, stays) if stay]
    sizes = [size for one in taken for size in one.sizes]
    function_stays = iter(largest(clusters(np.concatenate([one.functions for one in taken])), sizes))
    shared = np.bincount(cluster, minlength=len(files))[cluster] > 1
    rows: dict[str, list[list[Any]]] = {package.name: [] for package in packages}
    held = dict.fromkeys(rows, 0)
    numbers, candidates = iter(range(len(files))), iter(found)
    for package in packages:
        for name in package.paths:
            if (one := next(candidates)) is None:
                continue
            i = next(numbers)
            bits = None
            if stays[i]:
                chosen = [next(function_stays) for _ in one.sizes]
                bits = f"{len(chosen)}:{sum(1 << bit for bit, keep in enumerate(chosen) if keep):x}"
                held[package.name] += one.size
            rows[package.name].append([name, one.hash, int(cluster[i]) if shared[i] else None, bits])
    validation = validation_packages(held, fraction, seed)
    header = {"format": 1, "python": platform.python_version(), "seed": seed, "validation_fraction": fraction}
    lines: list[dict[str, Any]] = [header | {"similarity": SIMILARITY}]
    for package in packages:
        if rows[package.name]:
            split = "validation" if package.name in validation else "train"
            lines.append(
                {"name": package.name, "version": package.version, "split": split, "files": rows[package.name]}
            )
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def installed(names: Sequence[str] = ()) -> list[Package]:
    """Find packages and their Python files, by name; of several copies the one that Python imports."""
    found: dict[str, Package] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name is None or name.lower() in found:
            continue
        root = Path(str(distribution.locate_file("")))
        files = [one for one in distribution.files or () if one.suffix == ".py" and ".." not in one.parts]
        paths = sorted({one.as_posix() for one in files if (root / one).is_file()})
        found[name.lower()] = Package(name, distribution.version, root, paths)
    wanted = sorted([name.lower() for name in names] or found.keys() - {"packmamba"})
    if unknown := [name for name in wanted if name not in found]:
        raise ConfigError(f"packages: '{unknown[0]}' is not installed here")
    return [found[name] for name in wanted if found[name].paths]


def inspect(path: Path) -> Candidate | None:
    """Read a file; None if it is empty or not UTF-8."""
    code = path.read_bytes()
    try:
        if not code.decode().strip():
            return None
    except UnicodeDecodeError:
        return None
    functions = [text.encode() for text in functions_of(code) or []]
    signatures = np.stack([signature(text) for text in functions]) if functions else np.empty((0, FUNCTIONS), np.uint32)
    return Candidate(content_hash(code), len(code), signature(code), signatures, [len(text) for text in functions])


def largest(cluster: np.ndarray, sizes: list[int]) -> list[bool]:
    """Mark the largest text of each cluster, the first of equal ones."""
    order = np.lexsort((np.arange(len(sizes)), -np.array(sizes, np.int64), cluster))
    stays = np.zeros(len(sizes), bool)
    stays[order[np.flatnonzero(np.diff(cluster[order], prepend=-1))]] = True
    return stays.tolist()


def validation_packages(sizes: dict[str, int], fraction: float, seed: int) -> set[str]:
    """Choose the packages that are held out; ``sizes`` are the bytes of each."""
    wanted = fraction * sum(sizes.values())
    limit = max(LARGEST_SHARE * wanted, min(filter(None, sizes.values())))
    chosen: set[str] = set()
    held = 0
    for name in sorted(sizes, key=lambda name: share_of(name.lower().encode(), seed)):
        if held < wanted and 0 < sizes[name] <= limit:
            chosen.add(name)
            held += sizes[name]
    if len(chosen) == sum(size > 0 for size in sizes.values()):
        raise ConfigError(f"validation_fraction: {fraction} leaves no package to train on; lower it, or name more")
    return chosen


def describe(data: DataConfig) -> dict[str, Any]:
    """Tokenise the corpus of every unit and count its documents: the card, of plain values."""
    manifest = read_manifest(str(data.path))
    files = [file for package in manifest.packages for file in package["files"]]
    functions = [keep for *_, chosen in manifest.taken() for keep in chosen]
    held_out = [f"{one['name']} {one['version']}" for one in manifest.packages if one["split"] == "validation"]
    units = {}
    for unit in UNITS:
        corpora = load_corpora(replace(data, unit=unit))
        splits = {corpus.split: lengths_of(corpus) for corpus in (corpora.train, corpora.validation)}
        units[unit] = {"corpus_hash": corpora.corpus_hash, **splits}
    return {
        "manifest": manifest.hash,
        **{key: value for key, value in manifest.header.items() if key != "format"},
        "packages": len(manifest.packages),
        "validation_packages": held_out,
        "files": len(files),
        "files_in_clusters": sum(cluster is not None for _, _, cluster, _ in files),
        "files_left_out": sum(chosen is None for *_, chosen in files),
        "functions": len(functions),
        "functions_left_out": len(functions) - sum(functions),
        "units": units,
    }


def lengths_of(corpus: Corpus) -> dict[str, Any]:
    """Summarise the lengths of a split's documents."""
    lengths = corpus.lengths
    groups = corpus.groups if corpus.groups is not None else np.zeros(len(lengths))
    reaches = {str(n): [int((lengths >= n).sum()), len(np.unique(groups[lengths >= n]))] for n in REACHES}
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "packages": len(np.unique(groups)),
        "mean": float(lengths.mean()),
        "quantiles": np.quantile(lengths, QUANTILES).tolist(),
        "longest": int(lengths.max()),
        "reaches": reaches,
    }


def as_markdown(card: dict[str, Any]) -> str:
    """Write the card as a page."""
    header = "| unit | split | documents | packages | tokens | mean | 1 % | 10 % | median | 90 % | 99 % | longest |"
    rows = []
    for unit, one in card["units"].items():
        for split in ("train", "validation"):
            s = one[split]
            numbers = [s["documents"], s["packages"], s["tokens"], s["mean"], *s["quantiles"], s["longest"]]
            rows.append(f"| {unit} | {split} | " + " | ".join(f"{value:,.0f}" for value in numbers) + " |")
    long = card["units"]["files"]["validation"]["reaches"].items()
    reaches = [f"{count} of {packages} packages have at least {int(n):,} tokens" for n, (count, packages) in long]
    hashes = ", ".join(f"{unit} `{one['corpus_hash']}`" for unit, one in card["units"].items())
    return f"""# The corpus: Python source of installed packages

{card["files"]:,} files of {card["packages"]} packages, read with Python {card["python"]}. Manifest `{card["manifest"]}`. A document's length is in bytes, with its begin and end tokens.

{header}
|---|---|{"---:|" * 10}
{chr(10).join(rows)}

**Near-copies.** {card["files_in_clusters"]:,} files are in clusters (MinHash, estimated Jaccard similarity of runs of five tokens at least {card["similarity"]}); the largest of each stays, {card["files_left_out"]:,} are left out. Of the {card["functions"]:,} functions of the files that stay, {card["functions_left_out"]:,} are left out likewise. Clusters are made before the split, so no document of one split is a near-copy of one of the other. Copies of a function inside files that differ otherwise stay in the unit `files`.

**Validation** is {len(card["validation_packages"])} packages (seed {card["seed"]}, about {100 * card["validation_fraction"]:g} % of the bytes, none more than a quarter of that): {", ".join(card["validation_packages"])}.

**Long files.** Of the validation files {", and ".join(reaches)}.

**Corpus hashes** (bytes, with begin and end tokens): {hashes}.
"""  # noqa: E501


def train_tokenizer(data: DataConfig, size: int, path: Path) -> None:
    """Train a byte-level BPE tokenizer of ``size`` tokens on training files in random order, TOKENIZER_BYTES at most."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    corpus = load_corpora(replace(data, unit="files")).train

    def texts() -> Iterator[str]:
        seen = 0
        for i in np.random.default_rng(0).permutation(len(corpus)).tolist():
            document = corpus.document(i)
            yield document[document < 256].astype(np.uint8).tobytes().decode()
            seen += len(document)
            if seen > TOKENIZER_BYTES:
                return

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(token for token in (data.begin_token, data.end_token) if token))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(path))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m experiments.corpus.build", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/corpus"), help="folder of manifest, card, tokenizer")
    parser.add_argument("--manifest", type=Path, help="check the packages here against this manifest, and make none")
    parser.add_argument("--packages", nargs="*", default=[], help="packages of a new manifest; none: all installed")
    parser.add_argument("--validation-fraction", type=float, default=0.1, help="share of the bytes that is held out")
    parser.add_argument("--seed", type=int, default=0, help="seed that draws the validation packages")
    parser.add_argument("--tokenizer-size", type=int, help="also train a tokenizer of so many tokens")
    parser.add_argument("--cache-dir", default="runs/corpora", help="folder of tokenised corpora")
    options = parser.parse_args(arguments)
    path = options.manifest or options.output / "packages.jsonl.gz"
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        if options.manifest is None:
            make_manifest(path, options.packages, options.validation_fraction, options.seed)
        data = DataConfig(source="packages", path=str(path), cache_dir=options.cache_dir)
        card = describe(data)
        committed = path.with_name("card.json")
        if options.manifest is not None and committed.is_file():
            for unit, one in json.loads(committed.read_text())["units"].items():
                if one["corpus_hash"] != card["units"][unit]["corpus_hash"]:
                    raise ConfigError(f"manifest: the corpus of {unit} has another hash here than in {committed}")
        if options.tokenizer_size is not None:
            train_tokenizer(data, options.tokenizer_size, options.output / "tokenizer.json")
    except ConfigError as error:
        sys.exit(str(error))
    (options.output / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (options.output / "card.md").write_text(as_markdown(card))
    print(as_markdown(card))


if __name__ == "__main__":
    main()
