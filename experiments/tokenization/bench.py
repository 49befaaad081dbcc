"""How fast documents become tokens on disk, on all cores, and the most memory that takes."""

from __future__ import annotations

import gzip
import json
import resource
import shutil
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from tqdm import tqdm

from experiments.tokenization import generated
from experiments.tokenization.watched import Watched
from packmamba.config import ConfigError, DataConfig, above, at_least, key, named, one_of, some
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.experiments import Bench
from packmamba.records import append_record, make_record, provenance
from packmamba.timing import OtherPrograms

FORMATS = {"generated": "", "jsonl": ".jsonl", "jsonl.gz": ".jsonl.gz", "parquet": ".parquet"}
FILES = 8
"""Of a format."""


@dataclass
class Arm:
    format: str = key(
        "generated", "Where documents are: made as they are read, or files of a format.", one_of(*FORMATS)
    )
    tokenizer: str = key("bytes", "bytes, or bpe: trained on the same text.", one_of("bytes", "bpe"))
    gigabytes: float = key(0.1, "Text, in 10^9 bytes.", above(0))
    processes: Optional[int] = key(None, "data.num_proc; null for one a core.", at_least(1))
    killed_at: Optional[float] = key(
        None, "Kill it when it has joined this share of the tokens, and run it again.", above(0)
    )
    rounds: int = key(1, "How often it is measured, arms in turns.", at_least(1))


@dataclass
class Config:
    experiment: str = key("tokenization", "The question, which the records name.")
    distribution: str = key(
        "documents-2k",
        "Documents have four characters for each token of it.",
        named("packmamba.data.lengths:LENGTH_DISTRIBUTIONS"),
    )
    vocabulary: int = key(16384, "Of the tokenizer that is trained.", at_least(300))
    arms: dict[str, Arm] = key({}, "What is compared.", some("arm"))
    seed: int = key(0, "Of the documents.", at_least(0))
    folder: Optional[str] = key(
        None, "Where corpora and files are kept meanwhile; null for the system's folder for such."
    )


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Appends one record for each arm and round. Each tokenises in a process of its own, which is watched from outside.

    metrics: seconds, from the process's start to its end; cpu_seconds of all its processes; documents, tokens, text_bytes;
    tokens_per_second, documents_per_second, text_bytes_per_second; tokens_per_cpu_second; peak_memory_bytes, the largest sum of
    the processes' resident memory (what they share counts several times), sampled every 50 ms; processes, the most at a time;
    cores_of_others, busy with other programs meanwhile; for a killed arm also seconds_before, until it was killed.

    Raises:
        ConfigError: the disk has not the room.
        RuntimeError: arms with the same documents and tokenizer make different corpora; nothing of that arm is recorded.
    """
    provenance()
    corpus = f"slices of the standard library, {c.distribution} ({LENGTH_DISTRIBUTIONS[c.distribution]}) x 4 bytes"
    hashes: dict[tuple[str, int], str] = {}
    with tempfile.TemporaryDirectory(prefix="tokenization-", dir=c.folder) as name:
        folder = Path(name)
        check_room(folder, max(arm.gigabytes for arm in c.arms.values()))
        if any(arm.tokenizer == "bpe" for arm in c.arms.values()):
            train_tokenizer(folder / "bpe.json", c)
        rounds = range(max(arm.rounds for arm in c.arms.values()))
        turns = [(turn, name) for turn in rounds for name, arm in c.arms.items() if turn < arm.rounds]
        for _, name in tqdm(turns, unit="run", disable=not progress):
            arm = c.arms[name]
            metrics, found = measure(c, arm, folder)
            same = hashes.setdefault((arm.tokenizer, metrics["documents"]), found)
            if found != same:
                raise RuntimeError(
                    f"arm '{name}' makes another corpus than others of its documents; it is not recorded"
                )
            record = make_record(
                kind="tokenization",
                experiment=c.experiment,
                arm=name,
                config={
                    **asdict(arm),
                    "distribution": c.distribution,
                    "vocabulary": c.vocabulary,
                    "corpus_hash": found,
                },
                seed=c.seed,
                corpus_hash=corpus,
                metrics=metrics,
                wall_seconds=metrics["seconds"],
            )
            append_record(records_path, record)


BENCHES = {"tokenization": Bench(Config, run)}


def check_room(folder: Path, gigabytes: float) -> None:
    """Bytes become tokens of two bytes each, and chunks wait beside the corpus."""
    need, free = 3e9 * gigabytes, shutil.disk_usage(folder).free
    if free < need:
        raise ConfigError(f"folder: {folder} needs room for {need / 1e9:.0f} GB and has {free / 1e9:.0f}; name another")


def documents_of(c: Config, gigabytes: float) -> int:
    """How many make about so much text."""
    mean = generated.CHARACTERS_A_TOKEN * float(draw_lengths(c.distribution, 100_000, 0).mean())
    return max(2, round(gigabytes * 1e9 / mean))


def train_tokenizer(path: Path, c: Config) -> None:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=c.vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([generated.library()[:8_000_000]], trainer)
    made.save(str(path))


def measure(c: Config, arm: Arm, folder: Path) -> tuple[dict[str, Any], str]:
    """The metrics of one run, and the hash of its corpus, which is deleted."""
    count = documents_of(c, arm.gigabytes)
    data = DataConfig(
        source="generated",
        num_documents=count,
        distribution=c.distribution,
        corpus_seed=c.seed,
        tokenizer="bytes" if arm.tokenizer == "bytes" else str(folder / "bpe.json"),
        cache_dir=str(folder / "corpora"),
        num_proc=arm.processes,
    )
    if arm.format != "generated":
        data.source, data.path = arm.format.partition(".")[0], str(folder / "files")
        write_files(folder / "files", arm.format, c, count)
    others, begun = OtherPrograms(), resource.getrusage(resource.RUSAGE_CHILDREN)
    watched = Watched()
    text = sum(int(generated.lengths_of(*one, c.distribution, c.seed).sum()) for one in generated.pieces(count))
    metrics: dict[str, Any] = {}
    try:
        if arm.killed_at is not None:
            enough = 2 * arm.killed_at * (text if arm.tokenizer == "bytes" else text / 4)
            metrics["seconds_before"], _ = watched.run(data, lambda: joined(folder / "corpora") > enough)
        metrics["seconds"], said = watched.run(data)
    finally:
        shutil.rmtree(folder / "corpora", ignore_errors=True)
        shutil.rmtree(folder / "files", ignore_errors=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    metrics["cpu_seconds"] = used.ru_utime + used.ru_stime - begun.ru_utime - begun.ru_stime
    metrics |= {"documents": said["documents"], "tokens": said["tokens"], "text_bytes": text}
    for name in ("documents", "tokens", "text_bytes"):
        metrics[f"{name}_per_second"] = metrics[name] / metrics["seconds"]
    metrics["tokens_per_cpu_second"] = metrics["tokens"] / metrics["cpu_seconds"]
    metrics |= {"peak_memory_bytes": watched.memory, "processes": watched.processes, "cores_of_others": others.cores()}
    return metrics, said["corpus_hash"]


def joined(folder: Path) -> int:
    """Bytes of tokens that a corpus in the making has."""
    return sum(path.stat().st_size for path in folder.glob(".*.work/corpus/*.tokens"))


def write_files(folder: Path, format: str, c: Config, count: int) -> None:
    """The same documents, in the same order, in files of a format."""
    folder.mkdir(exist_ok=True)
    parts = list(generated.pieces(count))
    size = -(-len(parts) // FILES)
    for number in range(0, len(parts), size):
        path = folder / f"{number:06d}{FORMATS[format]}"
        made = (
            generated.texts(*one, c.distribution, c.seed, lambda _: None, Counter())
            for one in parts[number : number + size]
        )
        if format == "parquet":
            import pyarrow
            import pyarrow.parquet

            with pyarrow.parquet.ParquetWriter(path, pyarrow.schema([("text", pyarrow.string())])) as writer:
                for texts in made:
                    writer.write_table(pyarrow.table({"text": list(texts)}))
        else:
            with gzip.open(path, "wt", compresslevel=4) if format == "jsonl.gz" else open(path, "w") as file:
                for texts in made:
                    file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
