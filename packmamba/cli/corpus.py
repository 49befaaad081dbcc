"""The command that makes a corpus from the Python packages of a machine, or checks one against its manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from packmamba.config import ConfigError, DataConfig, Holds, above, at_least, each, key, load
from packmamba.records import check_writable

MANIFEST, CARD, TEXT, TOKENIZER = "packages.jsonl.gz", "card.json", "card.md", "tokenizer.json"


@dataclass
class CorpusConfig:
    """Keys of ``corpus``."""

    output: str = key("runs/corpus", "Folder for the manifest, its card and the tokenizer.")
    manifest: Optional[str] = key(None, "A manifest that is there: takes exactly its files; null makes one.")
    packages: list[str] = key(
        [],
        "The packages of a new manifest; none: all that are installed.",
        each(Holds("names of packages", lambda name: isinstance(name, str))),
    )
    validation_fraction: float = key(
        0.1,
        "Share of the bytes that a new manifest holds out, in whole packages.",
        above(0),
        Holds("below 1", (1.0).__gt__),
    )
    seed: int = key(0, "Draws the packages that a new manifest holds out.", at_least(0))
    tokenizer_size: Optional[int] = key(None, "Also train a tokenizer of this many tokens; null: none.", at_least(300))
    cache_dir: str = key("runs/corpora", "Where tokenised corpora are kept.")


def make_corpus(overrides: Sequence[str]) -> tuple[Path, str]:
    """The folder with manifest and card, and the card's text.

    Raises ConfigError if the files here, or the corpora that are made of them, are not those of a manifest that is given.
    """
    config = load(CorpusConfig, None, overrides)
    output = Path(config.output)
    check_writable(output, "output")
    from packmamba.data.card import as_text, describe, train_tokenizer
    from packmamba.data.manifest import read_manifest
    from packmamba.data.sources.packages import compare

    if config.manifest is not None:
        path = Path(config.manifest)
        manifest = read_manifest(path, "manifest")
        compare(manifest).refuse(str(path))
    else:
        from packmamba.data.recipe import make_manifest

        manifest = make_manifest(config.packages, config.validation_fraction, config.seed)
        path = output / MANIFEST
        output.mkdir(parents=True, exist_ok=True)
        manifest.write(path)
    data = DataConfig(source="packages", path=str(path), cache_dir=config.cache_dir)
    card = describe(manifest, data)
    if config.manifest is not None and (path.parent / CARD).is_file():
        _same(json.loads((path.parent / CARD).read_text()), card)
    output.mkdir(parents=True, exist_ok=True)
    (output / CARD).write_text(json.dumps(card, indent=1) + "\n")
    (output / TEXT).write_text(text := as_text(card))
    if config.tokenizer_size is not None:
        train_tokenizer(data, config.tokenizer_size, output / TOKENIZER)
    return output, text


def _same(committed: dict[str, Any], card: dict[str, Any]) -> None:
    for unit, one in committed["units"].items():
        if one["corpus_hash"] != card["units"][unit]["corpus_hash"]:
            raise ConfigError(
                f"manifest: the corpus of {unit} has another hash here than on its card, so numbers would not be "
                "comparable; was it made with another Python?"
            )
