"""What makes the experiment's records, and the numbers that its README rests on."""

from packmamba.experiments import Headline, Step

TINY = ("arms.bytes-10GB.gigabytes=0.1",)
STEPS = [Step("tokenization.yaml", small=TINY, packages=("tokenizers", "pyarrow"))]


def _of(name: str, arm: str, column: str, over: str | None = None) -> Headline:
    return Headline(name, "tokenization", {"arm": arm}, column, over=None if over is None else {"arm": over})


HEADLINES = [
    _of("10 GB of text, bytes: peak memory (MB)", "bytes-10GB", "peak_memory_megabytes"),
    _of("10 GB of text, bytes: tokens a processor second", "bytes-10GB", "tokens_per_cpu_second"),
    _of("10 GB of text, bytes: tokens/s", "bytes-10GB", "tokens_per_second"),
    _of("10 GB of text, bytes: documents/s", "bytes-10GB", "documents_per_second"),
    _of("memory of 10 GB over 0.5 GB", "bytes-10GB", "peak_memory_megabytes", "bytes"),
    _of("processor time of two processes over one", "bytes", "cpu_seconds", "bytes-one-process"),
    _of("a trained tokenizer: tokens a processor second", "bpe", "tokens_per_cpu_second"),
    _of("JSON lines over generated text, processor time", "bytes-jsonl", "cpu_seconds", "bytes"),
    _of("parquet over generated text, processor time", "bytes-parquet", "cpu_seconds", "bytes"),
    _of("the second run of a killed preparation over a whole one", "bytes-killed", "seconds", "bytes"),
]
