"""Build a corpus of the Python packages of this machine (manifest, card, tokenizer), or check one."""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import multiprocessing
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.corpus.minhash import FUNCTIONS, clusters, signature
from packmamba.config import ConfigError, DataConfig, need
from packmamba.data.corpus import Corpus
from packmamba.data.sources.packages import content_hash, functions_of, read_manifest
from packmamba.data.sources.source import share_of
from packmamba.data.token_store import load_corpora
from packmamba.errors import UserError
from packmamba.files import space_for, write_whole

SIMILARITY = 0.5
# of the validation split that one package may have, so that none is most of it
LARGEST_SHARE = 0.25
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
# lengths for which the card counts documents: what long contexts can be measured on
REACHES = (16384, 65536)
TOKENIZER_BYTES = 1 << 26


class Package(NamedTuple):
    name: str
    version: str
    root: Path
    paths: list[str]


class Candidate(NamedTuple):
    """A file that may become documents; ``functions``: (n, 256) signatures, ``sizes``: bytes of
    each function.
    """

    hash: str
    size: int
    signature: np.ndarray
    functions: np.ndarray
    sizes: list[int]


def make_manifest(path: Path, names: Sequence[str] = (), fraction: float = 0.1, seed: int = 0) -> None:
    """Write the manifest of the named packages, or of all that are installed.

    Files whose estimated Jaccard similarity is at least SIMILARITY form a cluster, of which the
    largest stays; likewise the functions of the files that stay. Packages are drawn for validation
    until they hold ``fraction`` of the bytes.
    """
    packages = installed(names)
    jobs = [(package, name) for package in packages for name in package.paths]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.map(inspect, [package.root / name for package, name in jobs], chunksize=64)
        bar = tqdm(found, total=len(jobs), desc="Reading packages", disable=None)
        files = [(package, name, one) for (package, name), one in zip(jobs, bar) if one is not None]
    cluster = clusters(np.stack([one.signature for *_, one in files]))
    stays = largest(cluster, [one.size for *_, one in files])
    taken = [one for (*_, one), stay in zip(files, stays) if stay]
    sizes = [size for one in taken for size in one.sizes]
    function_stays = iter(largest(clusters(np.concatenate([one.functions for one in taken])), sizes))
    shared = np.bincount(cluster)[cluster] > 1
    rows: dict[str, list[list[Any]]] = {package.name: [] for package in packages}
    held = dict.fromkeys(rows, 0)
    for i, (package, name, one) in enumerate(files):
        bits = None
        if stays[i]:
            chosen = [next(function_stays) for _ in one.sizes]
            bits = f"{len(chosen)}:{sum(keep << bit for bit, keep in enumerate(chosen)):x}"
            held[package.name] += one.size
        rows[package.name].append([name, one.hash, int(cluster[i]) if shared[i] else None, bits])
    validation = validation_packages(held, fraction, seed)
    header = {"format": 1, "python": platform.python_version(), "seed": seed, "validation_fraction": fraction}
    lines: list[dict[str, Any]] = [header | {"similarity": SIMILARITY}]
    for name, version, *_ in packages:
        split = "validation" if name in validation else "train"
        lines += [{"name": name, "version": version, "split": split, "files": rows[name]}] * bool(rows[name])
    write_manifest(path, lines)


def write_manifest(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    write_whole(path, gzip.compress(text.encode(), 9, mtime=0))


def installed(names: Sequence[str] = ()) -> list[Package]:
    """Find packages and their Python files, by name; of several copies the one that Python imports."""
    found: dict[str, Package] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name is not None and name.lower() not in found:
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
    order = np.lexsort((-np.array(sizes, np.int64), cluster))
    stays = np.zeros(len(sizes), bool)
    stays[order[np.flatnonzero(np.diff(cluster[order], prepend=-1))]] = True
    return stays.tolist()


def validation_packages(sizes: Mapping[str, int], fraction: float, seed: int) -> list[str]:
    """Choose the packages that are held out; ``sizes`` are the bytes of each.

    Raises ConfigError if none is left to train on.
    """
    wanted = fraction * sum(sizes.values())
    filled = {name: size for name, size in sizes.items() if size}
    limit = max(LARGEST_SHARE * wanted, min(filled.values()))
    chosen: list[str] = []
    for name in sorted(filled, key=lambda name: share_of(name.lower().encode(), seed)):
        if sum(filled[one] for one in chosen) < wanted and filled[name] <= limit:
            chosen.append(name)
    need(len(chosen) < len(filled), "validation_fraction", "one that leaves a package to train on", fraction)
    return chosen


def describe(data: DataConfig) -> dict[str, Any]:
    """Tokenise the corpus of every unit and count its documents: the card, of plain values."""
    manifest = read_manifest(str(data.path))
    files = [file for package in manifest.packages for file in package["files"]]
    functions = [keep for *_, chosen in manifest.taken() for keep in chosen]
    card = {"manifest": manifest.hash, **manifest.header, "packages": len(manifest.packages)}
    del card["format"]
    held_out = [f"{one['name']} {one['version']}" for one in manifest.packages if one["split"] == "validation"]
    card |= {"validation_packages": held_out, "files": len(files)}
    card["files_in_clusters"] = sum(cluster is not None for _, _, cluster, _ in files)
    card["files_left_out"] = sum(chosen is None for *_, chosen in files)
    card |= {"functions": len(functions), "functions_left_out": len(functions) - sum(functions), "units": {}}
    for unit in ("files", "functions", "mixture"):
        corpora = load_corpora(replace(data, unit=unit))
        splits = {corpus.split: summary(corpus) for corpus in corpora[:2]}
        card["units"][unit] = {"corpus_hash": corpora.corpus_hash, **splits}
    return card


def summary(corpus: Corpus) -> dict[str, Any]:
    """Summarise the lengths of a split's documents."""
    lengths, groups = corpus.lengths, np.asarray(corpus.groups)
    counts = {"documents": len(lengths), "tokens": corpus.num_tokens, "packages": len(np.unique(groups))}
    reaches = {str(n): [int((lengths >= n).sum()), len(np.unique(groups[lengths >= n]))] for n in REACHES}
    return {**counts, "mean": float(lengths.mean()), **spread(lengths), "reaches": reaches}


def spread(lengths: np.ndarray) -> dict[str, Any]:
    return {"quantiles": np.quantile(lengths, QUANTILES).tolist(), "longest": int(lengths.max())}


def train_tokenizer(corpus: Corpus, size: int, path: Path) -> None:
    """Train a byte-level BPE tokenizer of ``size`` tokens on documents, as bytes, in random order,
    TOKENIZER_BYTES at most.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(path))


def command(name: str, about: str, output: str, manifest: str) -> argparse.ArgumentParser:
    """Make a parser of the options that both corpora have."""
    parser = argparse.ArgumentParser(f"python -m experiments.corpus.{name}", description=about)
    parser.add_argument("--output", type=Path, default=Path(output), help="folder of manifest, card, tokenizer")
    parser.add_argument("--manifest", type=Path, help=manifest)
    parser.add_argument("--seed", type=int, default=0, help="seed that draws what is held out")
    parser.add_argument("--tokenizer-size", type=int, help="tokens of the BPE tokenizer")
    parser.add_argument("--cache-dir", default="runs/corpora", help="folder of tokenised corpora")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("build", str(__doc__), "runs/corpus", "check the packages here against this file; make none")
    parser.add_argument("--packages", nargs="*", default=[], help="packages of a new manifest; none: all installed")
    parser.add_argument("--validation-fraction", type=float, default=0.1, help="share of the bytes that is held out")
    options = parser.parse_args(arguments)
    path = options.manifest or options.output / "packages.jsonl.gz"
    options.output.mkdir(parents=True, exist_ok=True)
    if options.manifest is None:
        make_manifest(path, options.packages, options.validation_fraction, options.seed)
    data = DataConfig(source="packages", path=str(path), cache_dir=options.cache_dir)
    card, committed = describe(data), path.with_name("card.json")
    if options.manifest is not None and committed.is_file():
        for unit, one in json.loads(committed.read_text())["units"].items():
            same = one["corpus_hash"] == card["units"][unit]["corpus_hash"]
            need(same, "manifest", f"the corpus of {unit} that is in {committed}", "another hash")
    if options.tokenizer_size is not None:
        files = load_corpora(replace(data, unit="files")).train
        train_tokenizer(files, options.tokenizer_size, options.output / "tokenizer.json")
    write_whole(options.output / "card.json", f"{json.dumps(card, indent=1)}\n".encode())
    for unit, one in card["units"].items():
        counts = (f"{split}: {one[split]['documents']} documents" for split in ("train", "validation"))
        print(unit, one["corpus_hash"], *counts)


def run(main: Callable[[], None]) -> None:
    try:
        with space_for("--output"):
            main()
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    run(main)
