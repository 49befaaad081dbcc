"""Tokenizers: UTF-8 bytes, or a `tokenizers` JSON file; and files of one beside a model."""

import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packmamba.config import ConfigError, DataConfig, extra, need, refusing
from packmamba.files import write_whole

TOKENIZER, OPTIONS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
BYTES = "packmamba_bytes"  # marks a byte tokenizer in ``tokenizer_config.json``


class Tokenizer:
    """Encode texts as ids, without begin and end tokens.

    Ids are (length,), of ``token_dtype(vocab_size)``.
    """

    vocab_size: int
    begin_id: int | None = None
    end_id: int | None = None
    fingerprint: str  # changes with anything that may change an id

    def encode(self, text: Any) -> np.ndarray:
        """Return the ids of a text, without begin and end tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[Any]) -> list[np.ndarray]:
        """Return the ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids."""
        raise NotImplementedError


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of ids on disk: uint16 up to 65,536 of them, else uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def load_tokenizer(data: DataConfig) -> Tokenizer:
    """Load ``data.tokenizer`` with its begin and end tokens. Raises ConfigError."""
    tokens = data.begin_token, data.end_token
    if data.tokenizer == "bytes":
        return ByteTokenizer(*tokens)
    return FileTokenizer(tokenizer_file(data.tokenizer), *tokens)


def tokenizer_file(name: str) -> Path:
    """Return the tokenizer.json that a file, a folder or a Hub's name means.

    Raises ConfigError.
    """
    path = Path(name)
    if path.is_dir():
        expected = f"a folder with {TOKENIZER}"
        need((path / TOKENIZER).is_file(), "data.tokenizer", expected, f"'{name}' without; name another")
        return path / TOKENIZER
    # A Hub's name is owner/name; if the folder owner exists, a path is meant.
    if path.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) or path.parent.exists():
        return path
    return _download(name) / TOKENIZER


@functools.cache
def _download(name: str) -> Path:
    """Download a tokenizer from the Hub, with its chat template."""
    expected = "bytes, a JSON file, a folder or a Hub's name"
    with refusing(Exception, prefix=f"data.tokenizer: expected {expected}, got '{name}' (", suffix=")"):
        import huggingface_hub

        folder = huggingface_hub.snapshot_download(name, allow_patterns=[TOKENIZER, OPTIONS, TEMPLATE])
    return Path(folder)


def _named(*tokens: str | None) -> list[str]:
    return [token for token in dict.fromkeys(tokens) if token is not None]


class ByteTokenizer(Tokenizer):
    """Encode UTF-8 bytes; begin and end tokens get the next ids, one if they share a name."""

    def __init__(self, begin_token: str | None = None, end_token: str | None = None) -> None:
        names = _named(begin_token, end_token)
        ids: dict[str | None, int] = {name: 256 + number for number, name in enumerate(names)}
        self.begin_id = ids.get(begin_token)
        self.end_id = ids.get(end_token)
        self.vocab_size = 256 + len(names)
        self.fingerprint = f"bytes {begin_token!r} {end_token!r}"

    def encode(self, text: Any) -> np.ndarray:
        """Return the UTF-8 bytes of a text."""
        return np.frombuffer(text.encode(), np.uint8).astype(token_dtype(self.vocab_size))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of bytes; special tokens are left out."""
        numbers = np.asarray(ids, np.int64)
        return numbers[numbers < 256].astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer(Tokenizer):
    """Encode with a `tokenizers` JSON file, without its truncation, padding and template."""

    def __init__(self, path: str | Path, begin_token: str | None = None, end_token: str | None = None) -> None:
        needs = "data.tokenizer: a file needs the package tokenizers; pip install tokenizers ("
        with refusing(ImportError, prefix=needs, suffix=")"):
            import tokenizers
        prefix = f"data.tokenizer: expected bytes, or a JSON file or a folder with one, got '{path}' ("
        with refusing(Exception, prefix=prefix, suffix=")"):  # the package raises plain Exception
            content = Path(path).read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        # Threads of ours encode; the package's own would warn after a fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)  # ids may have gaps
        for key, token in (("begin_token", begin_token), ("end_token", end_token)):
            if token is not None and token not in vocabulary:
                special = [t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special]
                named = f", such as {', '.join(special[:5])}" if special else ""
                raise ConfigError(f"data.{key}: expected null or a token of {path}{named}, got '{token}'")
        self.begin_id, self.end_id = (None if t is None else vocabulary[t] for t in (begin_token, end_token))
        # Of a run's folder ``write_template`` changes the template, which nothing here reads.
        lasting = json.dumps(json.loads(content) | {"post_processor": None}).encode()
        self.fingerprint = f"{hashlib.sha256(lasting).hexdigest()} {begin_token!r} {end_token!r}"

    def encode_batch(self, texts: Sequence[Any]) -> list[np.ndarray]:
        """Return the ids of each text, without the file's template."""
        # Fast: without offsets into the text, which nothing reads here.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, token_dtype(self.vocab_size)) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids, without begin and end tokens."""
        own = [int(i) for i in ids if i not in (self.begin_id, self.end_id)]
        return self._tokenizer.decode(own, skip_special_tokens=False)


class TokenIds(Tokenizer):
    """Pass on documents that are ids already, such as a task's examples."""

    fingerprint = "ids"

    def __init__(self, vocab_size: int | Callable[[], int]) -> None:
        self.vocab_size = vocab_size() if callable(vocab_size) else vocab_size

    def encode(self, text: Any) -> np.ndarray:
        """Return the ids of a document, which are given."""
        return np.asarray(text, token_dtype(self.vocab_size))


def write_tokenizer(
    folder: str | Path, tokenizer: str, begin_token: str | None, end_token: str | None, template: str | None = None
) -> None:
    """Write a tokenizer for PackMamba and transformers' AutoTokenizer.

    The folder is made if need be.

    template: a chat template in Jinja.
    """
    folder = Path(folder)
    file = None if tokenizer == "bytes" else tokenizer_file(tokenizer)
    content = file.read_text("utf-8") if file else _byte_level(begin_token, end_token)
    # What AutoTokenizer reads. BYTES is for ``read_tokenizer``: the vocabulary alone cannot tell.
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    options |= {BYTES: file is None, "bos_token": begin_token, "eos_token": end_token}
    options = {name: value for name, value in options.items() if value is not None}
    write_whole(folder / TOKENIZER, content.encode())
    if template is not None:
        write_whole(folder / TEMPLATE, template.encode())
    write_whole(folder / OPTIONS, (json.dumps(options, indent=2) + "\n").encode())


def train_tokenizer(
    folder: str | Path, texts: Iterable[str], vocab_size: int, *tokens: str | None, template: str | None = None
) -> Tokenizer:
    """Train byte-level BPE; write it into a folder, and read it.

    It gives back every text, but for these tokens in it.

    tokens: begin token and end token, or None; then further special tokens. template: of chats.
    """
    bpe = extra("tokenizers", "tokenize").ByteLevelBPETokenizer()
    special = _named(*tokens)
    # What a special token stands for is never in pieces, so that none is to be learned.
    between = re.compile("|".join(map(re.escape, special)) or "(?!)")
    texts = itertools.chain.from_iterable(map(between.split, texts))
    # Bars on stderr; where that is no terminal, the package would print empty lines on stdout.
    bpe.train_from_iterator(texts, vocab_size, show_progress=os.isatty(2), special_tokens=special)
    file = Path(folder) / TOKENIZER
    write_whole(file, bpe.to_str(pretty=True).encode())
    begin_token, end_token = tokens[:2]
    write_tokenizer(folder, str(file), begin_token, end_token, template)
    return read_tokenizer(folder)


def write_template(folder: str | Path, token: str | None, token_id: int | None) -> None:
    """Let a folder's tokenizer begin texts with a token, as in training, or with none."""
    path = Path(folder) / TOKENIZER
    # tokenizers' TemplateProcessing: A is a text, B the second one of a pair.
    begun = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*begun, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    template = {"type": "TemplateProcessing", "single": begun, "pair": pair, "special_tokens": special}
    content = json.loads(path.read_text("utf-8"))
    content["post_processor"] = None if token is None else template
    write_whole(path, json.dumps(content, ensure_ascii=False, indent=1).encode())


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """Read a folder's tokenizer. Raises ConfigError without one."""
    folder = Path(folder)
    options = json.loads((folder / OPTIONS).read_text("utf-8")) if (folder / OPTIONS).is_file() else {}
    begin, end = (token_text(options.get(name)) for name in ("bos_token", "eos_token"))
    return ByteTokenizer(begin, end) if options.get(BYTES) else FileTokenizer(folder / TOKENIZER, begin, end)


def token_text(token: Any) -> Any:
    """Return the text of a token.

    transformers writes it as such, or as a dictionary with its content and flags.
    """
    return token.get("content") if isinstance(token, dict) else token


def _byte_level(begin_token: str | None, end_token: str | None) -> str:
    """Write ``ByteTokenizer`` as `tokenizers` JSON: byte-level BPE without merges."""
    # ByteLevel: printable bytes are their own characters, others those from 256 on.
    # The characters for bytes are GPT-2's, which decoders of byte-level BPE expect.
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    vocabulary = {chr(i if i in printable else next(others)): i for i in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    names = enumerate(_named(begin_token, end_token), 256)
    content = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": name, **flags} for i, name in names],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return json.dumps(content, ensure_ascii=False, indent=1)
