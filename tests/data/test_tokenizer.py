"""Tokenizers encode text alone, and a tokenizer beside a model encodes as in training, here and in transformers."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packmamba.config import ConfigError, DataConfig
from packmamba.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    load_tokenizer,
    read_tokenizer,
    write_tokenizer,
)


@pytest.fixture
def words(tmp_path):
    """Words a, b, c and a special token; a gap in the ids; truncation, padding and a template that must not apply."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[unk]": 0, "a": 1, "b": 2, "c": 9, "<|end|>": 4}, unk_token="[unk]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|end|>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 4)])
    made.enable_truncation(4)
    made.enable_padding(length=4)
    made.save(str(tmp_path / "words.json"))
    return str(tmp_path / "words.json")


@pytest.mark.parametrize(
    ("begin", "end", "ids", "size"),
    [
        ("<s>", "</s>", (256, 257), 258),
        (None, "</s>", (None, 256), 257),
        ("|", "|", (256, 256), 257),
        (None, None, (None, None), 256),
    ],
)
def test_bytes_round_trip_and_begin_and_end_tokens_get_new_ids(begin, end, ids, size):
    tokenizer = load_tokenizer(DataConfig(begin_token=begin, end_token=end))
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.vocab_size) == (*ids, size)
    for text in ("", "a", "Grüße ☃\0\r\n<s>" * 100):
        assert (
            tokenizer.encode(text).tolist() == list(text.encode()) and tokenizer.decode(tokenizer.encode(text)) == text
        )


def test_a_tokenizer_file_encodes_text_alone(words):
    tokenizer = load_tokenizer(DataConfig(tokenizer=words, begin_token=None, end_token="<|end|>"))
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.vocab_size) == (None, 4, 10)
    assert tokenizer.encode("a b c x a b c").tolist() == [1, 2, 9, 0, 1, 2, 9]
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a", "", "b a"])] == [[1], [], [2, 1]]


def test_wrong_tokenizers_are_refused(words, tmp_path, monkeypatch):
    (tmp_path / "broken.json").write_text('{"version": "1.0"}')
    wrong = [
        ({"tokenizer": "bites"}, "data.tokenizer: .*'bites'"),
        ({"tokenizer": str(tmp_path / "broken.json")}, "data.tokenizer: .*broken.json"),
        ({"tokenizer": words}, "data.begin_token: .*'<s>'"),
        ({"tokenizer": words, "begin_token": None}, "data.end_token: .*'</s>'"),
    ]
    for keys, match in wrong:
        with pytest.raises(ConfigError, match=match):
            load_tokenizer(DataConfig(**keys))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="data.tokenizer: .*pip install tokenizers"):
        load_tokenizer(DataConfig(tokenizer=words))


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, "bytes", "<s>", "</s>")
    return folder


@settings(deadline=None, max_examples=50)
@given(text=st.text().filter(lambda text: "<s>" not in text and "</s>" not in text))
def test_bytes_are_bytes_in_transformers(byte_folder, text):
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(byte_folder)
    assert (
        theirs.encode(text) == list(text.encode("utf-8", "surrogatepass"))
        and theirs.decode(theirs.encode(text)) == text
    )


@pytest.mark.parametrize(("begin", "end"), [(None, None), ("<s>", None), ("<s>", "</s>"), ("<b>", "<b>")])
def test_begin_and_end_tokens_beside_a_model_are_those_of_training(tmp_path, begin, end):
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, "bytes", begin, end)
    ours, theirs = read_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(ours, ByteTokenizer) and vars(ours) == vars(ByteTokenizer(begin, end))
    assert (ours.begin_id, ours.end_id, ours.vocab_size) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))


def test_a_tokenizer_file_goes_along_with_a_model(tmp_path, words):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "run").mkdir()
    write_tokenizer(tmp_path / "run", words, None, "<|end|>")
    ours = read_tokenizer(tmp_path / "run")
    assert isinstance(ours, FileTokenizer) and (ours.begin_id, ours.end_id) == (None, 4)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
    assert ours.encode("b a c").tolist() == [2, 1, 9] == theirs.encode("b a c", add_special_tokens=False)
    with pytest.raises(ConfigError, match="data.tokenizer"):
        read_tokenizer(tmp_path)
