"""A tokenizer beside a model encodes as it did in training, here and in transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packmamba.config import ConfigError
from packmamba.data.tokenization import ByteTokenizer, FileTokenizer
from packmamba.data.tokenizer_files import read_tokenizer, write_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("bytes")
    write_tokenizer(made, "bytes", "<s>", "</s>")
    return made


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_bytes_are_bytes_in_transformers(folder, theirs, text):
    if "<s>" in text or "</s>" in text:
        return
    ids = theirs.encode(text)
    assert ids == list(text.encode("utf-8", "surrogatepass")) == ByteTokenizer().encode(text).tolist()
    assert theirs.decode(ids) == text


def test_begin_and_end_tokens_are_those_of_training(folder, theirs):
    ours = read_tokenizer(folder)
    assert isinstance(ours, ByteTokenizer)
    assert (ours.begin_id, ours.end_id) == (theirs.bos_token_id, theirs.eos_token_id) == (256, 257)
    assert ours.vocab_size == len(theirs) == 258


@pytest.mark.parametrize(("begin", "end"), [(None, None), ("<s>", None), ("<b>", "<b>")])
def test_bytes_without_begin_or_end_tokens(tmp_path, begin, end):
    write_tokenizer(tmp_path, "bytes", begin, end)
    ours, expected = read_tokenizer(tmp_path), ByteTokenizer(begin, end)
    assert vars(ours) == vars(expected)
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path)) == expected.vocab_size


def test_a_tokenizer_of_a_file_goes_along(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<e>": 2, "?": 3}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["<e>"])
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "run").mkdir()
    write_tokenizer(tmp_path / "run", str(tmp_path / "words.json"), None, "<e>")
    (tmp_path / "words.json").unlink()
    ours = read_tokenizer(tmp_path / "run")
    assert isinstance(ours, FileTokenizer) and (ours.begin_id, ours.end_id) == (None, 2)
    assert np.array_equal(ours.encode("b a c"), [1, 0, 3])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "run").encode("b a c") == [1, 0, 3]


def test_refuses_in_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="has no tokenizer.json; name one with data.tokenizer"):
        read_tokenizer(tmp_path)
    write_tokenizer(tmp_path, "bytes", None, None)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config.json is not JSON"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<z>"}}))
    with pytest.raises(ConfigError, match="'<z>' is not a token of"):
        read_tokenizer(tmp_path)
