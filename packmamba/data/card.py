"""What a corpus of packages holds: documents, lengths, near-copies, hashes; and a tokenizer trained on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from packmamba.config import ConfigError, DataConfig
from packmamba.data.corpus import Corpus, load_corpora
from packmamba.data.manifest import Manifest, which_bits
from packmamba.data.sources.packages import UNITS

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
REACHES = (16384, 65536)
"""Lengths of which the card says how many validation documents have them: what long contexts can be measured on."""


def describe(manifest: Manifest, data: DataConfig, progress: bool = True) -> dict[str, Any]:
    """The card: a mapping of plain values. Prepares the corpus of every unit under ``data``, whose path is the manifest's."""
    files = [file for package in manifest.packages for file in package.files]
    functions = [bit for _, file in manifest.taken for bit in which_bits(file.functions or "0:")]
    units = {}
    for unit in UNITS:
        corpora = load_corpora(replace(data, unit=unit), progress=progress)
        splits = {corpus.split: _lengths(corpus) for corpus in (corpora.train, corpora.validation)}
        units[unit] = {"corpus_hash": corpora.corpus_hash, **splits}
    return {
        "manifest": manifest.hash,
        **{key: value for key, value in manifest.header.items() if key != "format"},
        "packages": len(manifest.packages),
        "validation_packages": [f"{p.name} {p.version}" for p in manifest.packages if p.split == "validation"],
        "files": len(files),
        "files_in_clusters": sum(file.cluster is not None for file in files),
        "files_left_out": sum(not file.taken for file in files),
        "functions": len(functions),
        "functions_left_out": len(functions) - sum(functions),
        "units": units,
    }


def _lengths(corpus: Corpus) -> dict[str, Any]:
    lengths = np.asarray(corpus.lengths)
    groups = corpus.groups if corpus.groups is not None else np.zeros(len(lengths))
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "packages": len(np.unique(groups)),
        "mean": float(lengths.mean()),
        "quantiles": np.quantile(lengths, QUANTILES).tolist(),
        "longest": int(lengths.max()),
        "reaches": {
            str(reach): [int((lengths >= reach).sum()), len(np.unique(groups[lengths >= reach]))] for reach in REACHES
        },
    }


def as_text(card: dict[str, Any]) -> str:
    """The card as Markdown."""
    left, near = card["files_left_out"], card["functions_left_out"]
    lines = [
        "# The corpus: Python source of installed packages",
        "",
        f"{card['files']:,} files of {card['packages']} packages, read with Python {card['python']}. Manifest "
        f"`{card['manifest']}`. A document's length is in bytes, with its begin and end tokens.",
        "",
        "| unit | split | documents | packages | tokens | mean | 1 % | 10 % | median | 90 % | 99 % | longest |",
        "|---|---|" + "---:|" * 10,
    ]
    for unit, one in card["units"].items():
        for split in ("train", "validation"):
            s = one[split]
            numbers = [s["documents"], s["packages"], s["tokens"], s["mean"], *s["quantiles"], s["longest"]]
            lines.append(f"| {unit} | {split} | " + " | ".join(f"{value:,.0f}" for value in numbers) + " |")
    reaches = [
        f"{count} of {packages} packages have at least {int(reach):,} tokens"
        for reach, (count, packages) in card["units"]["files"]["validation"]["reaches"].items()
    ]
    lines += [
        "",
        f"**Near-copies.** {card['files_in_clusters']:,} files are in clusters (MinHash, estimated Jaccard similarity of runs of "
        f"five tokens at least {card['similarity']}); the largest of each stays, {left:,} are left out. Of the "
        f"{card['functions']:,} functions of the files that stay, {near:,} are left out likewise. Clusters are made before the "
        "split, so no document of one split is a near-copy of one of the other. Copies of a function inside files that differ "
        "otherwise stay in the unit `files`.",
        "",
        f"**Validation** is {len(card['validation_packages'])} packages (seed {card['seed']}, about "
        f"{100 * card['validation_fraction']:g} % of the bytes, none more than a quarter of that): "
        + ", ".join(card["validation_packages"])
        + ".",
        "",
        f"**Long files.** Of the validation files {', and '.join(reaches)}.",
        "",
        "**Corpus hashes** (bytes, with begin and end tokens): "
        + ", ".join(f"{unit} `{one['corpus_hash']}`" for unit, one in card["units"].items())
        + ".",
    ]
    return "\n".join(lines) + "\n"


def train_tokenizer(data: DataConfig, size: int, path: Path, most_bytes: int = 1 << 26) -> None:
    """Writes a byte-level BPE tokenizer of ``size`` tokens, begin and end tokens of ``data`` among them.

    It is trained on training files in random order, up to ``most_bytes`` of them. ``data`` is a corpus of bytes.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ConfigError("tokenizer_size needs the package tokenizers: pip install tokenizers") from None
    corpus = load_corpora(replace(data, unit="files")).train

    def texts() -> Iterator[str]:
        held = 0
        for i in np.random.default_rng(data.corpus_seed).permutation(corpus.num_documents):
            document = corpus.document(int(i))
            yield document[document < 256].astype(np.uint8).tobytes().decode()
            held += len(document)
            if held > most_bytes:
                return

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(token for token in (data.begin_token, data.end_token) if token))
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(path))
