"""Prompts and conversations: what of a document is trained on, for every kind of file."""

import re

import numpy as np
import pytest

from packmamba.data.batch import make_batch
from packmamba.data.schedule import arrange, pieces_of
from packmamba.data.sources import SOURCES
from packmamba.data.token_store import load_corpora
from packmamba.data.tokenizer import write_tokenizer
from written import of, read, refused, write_rows

PAIRS = [{"prompt": f"question {i}: ", "completion": f"answer {i * i}"} for i in range(40)]
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3 + 3?"},
    {"role": "assistant", "content": "6"},
]


CALL = {"role": "assistant", "content": None, "tool_calls": [{}]}
CHATML = {"chat_template": "chatml"}


def open_corpora(path, **keys):
    return load_corpora(of(path, cache_dir=str(path.parent / "cache"), **keys), progress=False)


def documents(corpus):
    """Return each document as text, with begin and end as < and >, and the text that is trained on."""
    decoded = []
    for number, first in enumerate(corpus.bounds[:-1]):
        tokens = corpus.document(number)
        targets = corpus.targets[first : first + len(tokens)]
        kept = targets >= 0
        assert (targets[:-1][kept[:-1]] == tokens[1:][kept[:-1]]).all(), "a target is the next token"
        assert not kept[-1]
        decoded.append(("".join(map(_character, tokens)), "".join(map(_character, targets[kept]))))
    return sorted(decoded)


def _character(token):
    return {256: "<", 257: ">"}.get(int(token)) or chr(token)


def test_a_completion_and_the_end_are_trained_on(tmp_path):
    corpora = open_corpora(write_rows(tmp_path / "a.jsonl", PAIRS))
    expected = {(f"<{p['prompt']}{p['completion']}>", f"{p['completion']}>") for p in PAIRS}
    assert {*documents(corpora.train), *documents(corpora.validation)} == expected


def test_an_empty_answer_trains_its_end(tmp_path):
    corpora = open_corpora(write_rows(tmp_path / "a.jsonl", [{"prompt": f"{i}", "completion": ""} for i in range(9)]))
    assert {answer for _, answer in documents(corpora.train)} == {">"}


def test_all_tokens_may_be_trained_on(tmp_path):
    corpora = open_corpora(write_rows(tmp_path / "a.jsonl", PAIRS), loss_on="all")
    assert corpora.train.targets is None
    texts = [{"text": pair["prompt"] + pair["completion"]} for pair in PAIRS]
    assert corpora.corpus_hash == open_corpora(write_rows(tmp_path / "b.jsonl", texts)).corpus_hash


def test_a_batch_has_the_answers_alone(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", PAIRS)
    data = of(path, cache_dir=str(tmp_path / "cache"), row_length=64, strategy="greedy")
    corpus = load_corpora(data, progress=False).train
    plan = arrange(pieces_of(corpus, np.arange(len(corpus))), data)
    batch = make_batch(corpus, plan, np.arange(plan.num_rows))
    assert plan.num_rows < len(corpus), "rows hold several documents"
    trained = "".join(map(_character, batch.targets[batch.loss_mask].tolist())).split(">")[:-1]
    assert len(trained) == len(corpus)
    assert {*trained} <= {pair["completion"] for pair in PAIRS}


def test_messages_train_on_what_the_assistant_says(tmp_path):
    asked = [{"role": "user", "content": f"{i}"} for i in range(9)]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [*CHAT[:3], each]} for each in asked])
    corpora = open_corpora(path, chat_template="chatml")
    text, trained = documents(corpora.train)[0]
    assert text.startswith("<<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n")
    assert trained == "4<|im_end|>\n", "and not the document's end, which the user's message is before"
    path = write_rows(tmp_path / "b.jsonl", [{"messages": [each, *CHAT]} for each in asked])
    corpora = open_corpora(path, chat_template="chatml")
    assert {trained for _, trained in documents(corpora.train)} == {"4<|im_end|>\n6<|im_end|>\n>"}


def test_prompt_and_completion_may_be_messages(tmp_path):
    records = [{"prompt": CHAT[:2], "completion": CHAT[2:3]}, {"prompt": CHAT[1:2], "completion": CHAT[2:3]}]
    corpora = open_corpora(write_rows(tmp_path / "a.jsonl", records), chat_template="chatml", validation_fraction=0.5)
    for split in (corpora.train, corpora.validation):
        assert documents(split)[0][1] == "4<|im_end|>\n>"


def test_a_template_lies_beside_the_tokenizer_or_in_a_file(tmp_path):
    folder = tmp_path / "tokenizer"
    write_tokenizer(folder, "bytes", "<s>", "</s>")
    template = "{% for m in messages %}{{ m.role }} {{ bos_token }} {{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    other = tmp_path / "other.jinja"
    other.write_text(template.replace("\n", "!"))
    path = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": CHAT[3:]}])
    beside = read(of(path, tokenizer=str(folder)))
    in_a_file = read(of(path, tokenizer=str(folder), chat_template=str(other)))
    assert [one.content for one in beside][1] == "user <s> 3 + 3?\nassistant <s> 6\n"
    assert [one.content for one in in_a_file][1] == "user <s> 3 + 3?!assistant <s> 6!"


def test_another_template_beside_the_tokenizer_is_another_corpus(tmp_path):
    asked = [{"role": "user", "content": f"{i}"} for i in range(9)]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [*CHAT, each]} for each in asked])
    hashes = set()
    for name, mark in (("one", "!"), ("two", "?")):
        template = "{% for m in messages %}{{ m.content }}" + mark + "{% endfor %}"
        write_tokenizer(tmp_path / name, "bytes", "<s>", "</s>", template)
        hashes.add(open_corpora(path, tokenizer=str(tmp_path / name)).corpus_hash)
    assert len(hashes) == 2


@pytest.mark.parametrize("kind", ["parquet", "huggingface"])
def test_tables_hold_prompts_too(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    expected = open_corpora(write_rows(tmp_path / "a.jsonl", PAIRS)).corpus_hash
    table = datasets.Dataset.from_list(PAIRS)
    path = tmp_path / ("rows.parquet" if kind == "parquet" else "folder")
    table.to_parquet(str(path)) if kind == "parquet" else table.save_to_disk(str(path))
    assert open_corpora(path, source=kind).corpus_hash == expected


@pytest.mark.parametrize(
    ("records", "keys", "message"),
    [
        ([{"prompt": "a"}], {}, "a.jsonl:1: expected both prompt and completion as text, .* got completion None"),
        ([{"messages": "hello"}], {}, "a.jsonl:1: expected messages with role and content, got 'hello'"),
        ([{"messages": CHAT[:2]}], CHATML, "expected an answer of the role assistant, got system, user"),
        ([{"prompt": CHAT[:2], "completion": []}], CHATML, "expected an answer of the role"),
        ([{"messages": [{"content": "hi"}]}], {}, "expected messages with role and content"),
        ([{"messages": [CHAT[1], CALL]}], CHATML, "expected messages of text alone"),
        ([{"instruction": "a", "output": "b"}], {}, "got None of the fields instruction, output"),
        ([{"messages": CHAT}], {}, "data.chat_template: expected chatml or a Jinja file for messages"),
        ([{"messages": CHAT}], {"chat_template": "no.jinja"}, "data.chat_template: .* 'no.jinja'"),
        ([PAIRS[0], {"text": "plain"}], {}, "expected prompts in all documents or in none"),
        ([{"id": 3}], {}, "a.jsonl:1: expected text in the field 'text'"),
    ],
)
def test_what_is_no_document_is_named(tmp_path, records, keys, message):
    error = refused(of(write_rows(tmp_path / "a.jsonl", records), cache_dir=str(tmp_path / "cache"), **keys))
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("template", "key"),
    [("{{ bos_token }}{{ messages[-1].content }}", "begin"), ("{{ messages[-1].content }}{{ eos_token }}\n", "end")],
)
def test_begin_and_end_are_not_written_twice(tmp_path, template, key):
    write_tokenizer(tmp_path / "tokenizer", "bytes", "<s>", "</s>", template)
    path = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}])
    keys = {"tokenizer": str(tmp_path / "tokenizer"), "cache_dir": str(tmp_path / "cache"), "loss_on": "all"}
    assert f"data.{key}_token: expected null" in refused(of(path, **keys))


def test_a_template_that_rewrites_is_refused(tmp_path):
    path = tmp_path / "last.jinja"
    path.write_text("{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}")
    data = of(write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}]), cache_dir=str(tmp_path / "cache"))
    data.chat_template = str(path)
    assert "data.chat_template or data.loss_on=all" in refused(data)
    data.loss_on = "all"
    (document,) = SOURCES[data.source](data).read()
    assert document.content == "6"
