"""Tokenized corpora on disk, under a hash of everything that decides their tokens.

Files are little-endian, without headers.
"""

import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from packmamba.config import ConfigError, DataConfig, need, refusing
from packmamba.data import streaming
from packmamba.data.corpus import SPLITS, Corpus, Mixture
from packmamba.data.encoding import Opened, SplitWriter, encode, open_documents, write_meta
from packmamba.data.schedule import longest_trained
from packmamba.data.sources import parts_of
from packmamba.data.sources.source import SEED
from packmamba.files import space_for, work_folder


class Corpora(NamedTuple):
    """Hold a corpus or a mixture, and a hash of training and validation.

    The hash is equal on every machine, but for a streamed corpus, whose later documents are not
    known: there it holds what names the corpus, times of files among it.
    """

    train: Any
    validation: Any
    corpus_hash: str
    test: Any = None


def load_corpora(data: DataConfig, progress: bool = True) -> Corpora:
    """Open a corpus, or the mixture of ``data.sources``.

    A corpus that is not there is tokenized, by one process.

    Raises ConfigError.
    """
    if data.sources:
        return _load_mixture(data, progress)
    if data.streaming:
        return Corpora(*streaming.open_stream(data))
    opened = open_documents(data)
    folder = opened.folder(data)
    if not folder.exists():
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))
        failed = f"data.cache_dir, data.path: cannot write '{data.cache_dir}' or read ("
        with space_for(folder), refusing(OSError, prefix=failed, suffix=")"), lock:
            if not folder.exists():  # another process may have made it while this one waited
                _tokenize(folder, data, opened, progress)
    train, validation = Corpus(folder, "train"), Corpus(folder, "validation")
    test = Corpus(folder, "test") if "test" in train.splits else None
    return Corpora(train, validation, train.corpus_hash, test)


def _load_mixture(data: DataConfig, progress: bool) -> Corpora:
    parts = parts_of(data)
    corpora = []
    for number, part in enumerate(parts):
        with refusing(ConfigError, prefix=f"data.sources[{number}]: "):
            corpora.append(load_corpora(part.data, progress))
    mixed = {}
    longest = longest_trained(data)
    # A split of the mixture holds the sources that have this split: some have no test documents.
    for split in SPLITS:
        chosen = [(getattr(one, split), part) for one, part in zip(corpora, parts) if getattr(one, split)]
        if chosen:
            names, weights = [part.name for _, part in chosen], [part.weight for _, part in chosen]
            mixed[split] = Mixture([corpus for corpus, _ in chosen], names, weights, longest)
    return Corpora(mixed["train"], mixed["validation"], mixed["train"].corpus_hash, mixed.get("test"))


def evaluation_documents(corpus: Any, data: DataConfig) -> np.ndarray:
    """Return the numbers of the documents to evaluate on, sorted; all of a test split."""
    limit = None if corpus.split == "test" else data.validation_documents
    # Not the run's seed: all runs of a corpus are evaluated on the same documents.
    return np.sort(np.random.default_rng(SEED).permutation(len(corpus))[:limit])


def _tokenize(folder: Path, data: DataConfig, opened: Opened, progress: bool) -> None:
    """Write a corpus under a temporary name, then rename it: it is whole or absent."""
    source, tokenizer = opened.source, opened.load_tokenizer()
    # None: without a terminal.
    bar = functools.partial(tqdm, unit=" documents", disable=None if progress else True)
    with work_folder(folder) as work:
        writers = {split: SplitWriter(work / split, tokenizer) for split in SPLITS}
        documents = bar(source.read(), f"Tokenizing {data.source}")
        for chunk in encode(documents, tokenizer, data):
            for split, held_out in (("train", False), ("validation", True)):
                writers[split].add([pair for pair in chunk if pair[0].held_out == held_out])
        if source.read_test is not None:
            documents = bar(source.read_test(), f"Tokenizing {data.source}, test")
            for chunk in encode(documents, tokenizer, data):
                writers["test"].add(chunk)
        _check_counts(data, *writers.values())
        if not writers["test"].counts["documents"]:
            del writers["test"]
        write_meta(work, opened, tokenizer, writers)
        os.rename(work, folder)


def _check_counts(data: DataConfig, *writers: SplitWriter) -> None:
    train, validation, test = (writer.counts["documents"] for writer in writers)
    got = f"{train} and {validation} in '{data.path}'" + f" and {test} for test" * bool(test)
    remedy = "add others with text, or lower the fractions held out"
    need(train and validation, "data.path", "documents in training and validation", f"{got}; {remedy}")
    key = "test_path" if data.test_path else "test_fraction"
    has_test = test or not (data.test_path or data.test_fraction)
    need(has_test, f"data.{key}", "test documents", f"none in '{data.test_path or data.path}'; add others with text")
