"""Tokenizers encode text alone, and a tokenizer beside a model encodes as in training, here and in
transformers.
"""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packmamba.config import ConfigError, DataConfig
from packmamba.data.tokenizer import ByteTokenizer, load_tokenizer, read_tokenizer, write_template, write_tokenizer


@pytest.fixture
def words(tmp_path):
    """Words a, b, c and a special token; a gap in the ids; truncation, padding and a template that
    must not apply.
    """
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[unk]": 0, "a": 1, "b": 2, "c": 9, "<|end|>": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[unk]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|end|>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 4)])
    made.enable_truncation(4)
    made.enable_padding(length=4)
    made.save(str(tmp_path / "words.json"))
    return str(tmp_path / "words.json")


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
    with pytest.raises(ConfigError, match="data.tokenizer"):
        read_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="data.tokenizer: .*pip install tokenizers"):
        load_tokenizer(DataConfig(tokenizer=words))


@settings(max_examples=50)
@given(text=st.text().filter(lambda text: "<s>" not in text and "</s>" not in text))
def test_bytes_are_bytes_here_and_in_transformers(tmp_path_factory, text):
    folder = tmp_path_factory.getbasetemp() / "bytes"
    if not folder.exists():
        write_tokenizer(folder, "bytes", "<s>", "</s>")
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    assert theirs.encode(text) == ByteTokenizer("<s>", "</s>").encode(text).tolist() == list(text.encode())
    assert theirs.decode(theirs.encode(text)) == ByteTokenizer().decode(list(text.encode())) == text


@pytest.mark.parametrize(
    ("begin", "end", "ids"),
    [(None, None, (None, None)), ("<s>", None, (256, None)), ("<s>", "</s>", (256, 257)), ("<b>", "<b>", (256, 256))],
)
def test_begin_and_end_tokens_beside_a_model_are_those_of_training(tmp_path, begin, end, ids):
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, "bytes", begin, end)
    ours, theirs = read_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert vars(ours) == vars(load_tokenizer(DataConfig(begin_token=begin, end_token=end)))
    assert ids == (ours.begin_id, ours.end_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs) == 256 + len({begin, end} - {None})


def test_a_tokenizer_file_goes_along_with_a_model(tmp_path, words):
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, words, None, "<|end|>")
    ours, theirs = read_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.begin_id, ours.end_id) == (None, 4)
    write_template(tmp_path, "<|end|>", 4)
    assert read_tokenizer(tmp_path).fingerprint == ours.fingerprint, "a template changes no document"
    assert ours.encode("b a c").tolist() == [2, 1, 9] == theirs.encode("b a c", add_special_tokens=False)
