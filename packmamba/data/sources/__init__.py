"""Where documents come from: a source streams its documents in a fixed order and never holds them all.

Whether a document is held out for validation depends on its name or content and ``data.corpus_seed``, never on the
order of files or documents.
"""

from __future__ import annotations

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.jsonl import open_jsonl
from packmamba.data.sources.source import Document, Source
from packmamba.data.sources.stdlib import open_stdlib
from packmamba.data.sources.synthetic import open_synthetic
from packmamba.data.sources.text import open_text

__all__ = ["Document", "Source", "open_source"]


def open_source(data: DataConfig) -> Source:
    """The documents of ``data.source``; files are listed, none is read yet.

    - ``stdlib``: every function and method of the running Python's standard library that is not nested in another
      function, as it stands in its file, decorators included. Held out by file. A file that does not parse is skipped
      and counted (``unparsable_files``).
    - ``text``: every file below the folder ``data.path`` whatever its suffix, each file a document; hidden files and
      folders (leading dot) are not read, links to folders not followed. Held out by file.
    - ``jsonl``: ``data.text_key`` of every line of the file ``data.path``, or of every ``*.jsonl`` file below the
      folder ``data.path``. Lines of white space are no documents. Held out by a hash of the document's text, so equal
      documents are in one split; the share is met on average, with at least one document.
    - ``synthetic``: lengths are ``draw_lengths(data.distribution, data.num_documents, data.corpus_seed)`` exactly, ids
      uniform below ``data.vocab_size``. ``data.tokenizer``, ``data.begin_token`` and ``data.end_token`` do not apply:
      the documents are token ids already, and tokens put around them would change their lengths. Held out by document.

    Raises ConfigError naming the key. `Source.read` raises it too: a text file that is not UTF-8, a broken JSON line
    (file and line named) unless ``data.bad_lines`` is skip, then they are counted (``bad_lines``).
    """
    sources = {"stdlib": open_stdlib, "text": open_text, "jsonl": open_jsonl, "synthetic": open_synthetic}
    if data.source not in sources:
        raise ConfigError(f"data.source '{data.source}' is unknown; known: {', '.join(sources)}")
    if not 0 <= data.validation_fraction < 1:
        raise ConfigError(f"data.validation_fraction must be at least 0 and below 1, got {data.validation_fraction}")
    if data.corpus_seed < 0:
        raise ConfigError(f"data.corpus_seed must not be negative, got {data.corpus_seed}")
    if data.bad_lines not in ("error", "skip"):
        raise ConfigError(f"data.bad_lines must be error or skip, got '{data.bad_lines}'")
    if data.path is not None and data.source in ("stdlib", "synthetic"):
        raise ConfigError(f"data.path is '{data.path}', but data.source={data.source} reads no path: set text or jsonl")
    return sources[data.source](data)
