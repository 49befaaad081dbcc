"""From a record to a document: a text, a prompt with its completion, or a conversation.

A record is a line of JSON or a row of a table. What of it is trained on is decided here, once, as
ranges of characters (``Document.answers``); the tokenizer then turns ranges into targets, so that
packing, batches and losses know nothing of prompts. Prompt and completion are tokenized apart, as
they are when a model continues a prompt.

    {"text": ...}                          every token
    {"prompt": ..., "completion": ...}     the completion, and the token after the document
    {"messages": [{"role", "content"}]}    what the assistant says, in the chat template's words

Prompt and completion may be lists of messages, too. With ``data.loss_on=all`` every token counts.
"""

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packmamba.config import ConfigError, DataConfig, extra, need, refusing
from packmamba.data.sources.source import Document
from packmamba.data.tokenizer import (
    OPTIONS,
    TEMPLATE,
    load_tokenizer,
    token_text,
    tokenizer_file,
    write_template,
    write_tokenizer,
)

Range = tuple[int, int]
PROMPT_KEYS = ("prompt", "completion", "messages")
# The template ``chatml``, of OpenAI's chat markup language.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def read_documents(place: str, data: DataConfig, records: Iterator[Any]) -> Iterator[Document]:
    """Yield a document, not held out, for each record.

    Raises ConfigError naming place and number of a record that is none.
    """
    number = 1
    try:
        for record in records:
            document = read_document(record, data)
            document.content.encode()  # half a surrogate pair is no text
            yield document
            number += 1
    except Exception as error:  # packages that read files raise all kinds
        # The datasets package raises sentences that leave out their cause.
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise ConfigError(f"data.path: {place}:{number}: {reason}") from None


def read_document(record: Any, data: DataConfig) -> Document:
    """Make a document of a record's fields. Raises ValueError."""
    fields = record if isinstance(record, dict) else {}
    if data.text_key in fields or not fields.keys() & set(PROMPT_KEYS):
        text = fields.get(data.text_key)
        if not isinstance(text, str):
            expected = f"text in the field '{data.text_key}' (data.text_key), or prompt and completion, or messages"
            raise ValueError(f"expected {expected}, got {text!r:.60} of the fields {', '.join(fields) or 'none'}")
        return Document(False, text)
    if "messages" in fields:
        text, answers = _conversation(fields["messages"], data)
    else:
        text, answers = _prompt_and_completion(fields.get("prompt"), fields.get("completion"), data)
    return Document(False, text, answers=None if data.loss_on == "all" else answers)


def of_one_kind(documents: Iterable[Document]) -> Iterator[Document]:
    """Pass documents on. Raises ConfigError where some have answers and others are plain text."""
    first: Document | None = None
    for document in documents:
        first = first or (document if document.content else None)
        mixed = first and document.content and (document.answers is None) != (first.answers is None)
        got = 'both; write a text without a prompt as {"prompt": "", "completion": ...}, or set data.loss_on=all'
        need(not mixed, "data.path", "prompts in all documents or in none", got)
        yield document


def _prompt_and_completion(prompt: Any, completion: Any, data: DataConfig) -> tuple[str, tuple[Range, ...]]:
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation([*prompt, *completion], data, first=len(prompt))
    for name, part in (("prompt", prompt), ("completion", completion)):
        if not isinstance(part, str):
            raise ValueError(f"expected both prompt and completion as text, or as messages, got {name} {part!r:.60}")
    return prompt + completion, ((len(prompt), len(prompt) + len(completion)),)


def _conversation(messages: Any, data: DataConfig, first: int = 0) -> tuple[str, tuple[Range, ...]]:
    """Return a conversation's text, and the ranges of its answers.

    These are what the assistant says from message ``first`` on.
    """
    _check_messages(messages, data)
    text = _render(messages, data)
    for key, is_twice in (("begin_token", text.startswith), ("end_token", text.rstrip().endswith)):
        token = getattr(data, key)
        need(not (token and is_twice(token)), f"data.{key}", "null, since the chat template writes it", repr(token))
    answers = []
    for number, message in enumerate(messages):
        if number >= first and message["role"] == "assistant" and data.loss_on == "completion":
            start = _render(messages[:number], data, add_generation_prompt=True)
            until = _render(messages[: number + 1], data)
            _continuation(until, text)
            answers.append(_continuation(start, until))
    if data.loss_on == "completion" and not answers:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"expected an answer of the role assistant, got {roles}; set data.loss_on=all")
    return text, tuple(answers)


def _check_messages(messages: Any, data: DataConfig) -> None:
    """Raise ValueError for what a template would write as Python's words, or leave out."""
    is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if not messages or not is_list or not all(isinstance(message.get("role"), str) for message in messages):
        raise ValueError(f"expected messages with role and content, got {messages!r:.60}")
    for message in messages if data.chat_template == "chatml" else ():
        if not isinstance(message.get("content"), str) or message.get("tool_calls"):
            raise ValueError(f"expected messages of text alone with data.chat_template=chatml, got {message!r:.80}")


def _continuation(start: str, text: str) -> Range:
    """Return the range of ``text`` after ``start``. Raises ValueError if it begins otherwise."""
    if not text.startswith(start):
        expected = "a chat template in which a conversation begins with its earlier messages"
        got = "one that rewrites them, so answers cannot be told apart; set data.chat_template or data.loss_on=all"
        raise ValueError(f"expected {expected}, got {got}")
    return len(start), len(text)


def _render(messages: list[Any], data: DataConfig, add_generation_prompt: bool = False) -> str:
    """Write messages in the words of the chat template. Raises ConfigError without one."""
    template, tokens = find_chat_template(data.tokenizer, data.chat_template)
    expected = f"chatml or a Jinja file for messages, since the tokenizer '{data.tokenizer}' has no template"
    need(template is not None, "data.chat_template", expected, "null")
    rendered, _ = extra("transformers.utils.chat_template_utils").render_jinja_template(
        conversations=[messages], chat_template=template, add_generation_prompt=add_generation_prompt, **tokens
    )
    return rendered[0]


@functools.lru_cache
def find_chat_template(tokenizer: str, chosen: str | None) -> tuple[str | None, dict[str, Any]]:
    """Return the chat template, if there is one, and special tokens.

    It is the one that is chosen, or lies beside the tokenizer.
    """
    options: dict[str, Any] = {}
    template = None
    if tokenizer != "bytes":
        folder = tokenizer_file(tokenizer).parent
        if (folder / OPTIONS).is_file():
            options = json.loads((folder / OPTIONS).read_text("utf-8"))
        file = folder / TEMPLATE
        template = file.read_text("utf-8") if file.is_file() else options.get("chat_template")
    if chosen == "chatml":
        template = CHATML
    elif chosen is not None:
        prefix = f"data.chat_template: expected chatml or a Jinja file, got '{chosen}' ("
        with refusing(OSError, UnicodeDecodeError, prefix=prefix, suffix=")"):
            template = Path(chosen).read_text("utf-8")
    tokens = {name: token_text(value) for name, value in options.items() if name.endswith("_token")}
    return template if isinstance(template, str) else None, tokens


def write_tokenizer_of(data: DataConfig, folder: str | Path) -> None:
    """Write the tokenizer of documents into a model's folder.

    In transformers it begins texts as training does.
    """
    template, _ = find_chat_template(data.tokenizer, data.chat_template)
    write_tokenizer(folder, data.tokenizer, data.begin_token, data.end_token, template)
    write_template(folder, data.begin_token, load_tokenizer(data).begin_id)
