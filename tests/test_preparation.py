"""Corpora that several processes make, that are killed, damaged or made twice at once: the bytes are always the same."""

import hashlib
import json
import logging
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from packmamba import cli
from packmamba.config import ConfigError, DataConfig
from packmamba.data import preparation, shards, workers
from packmamba.data.corpus import Corpus, load_corpora
from packmamba.data.integrity import check, write_offsets
from packmamba.data.sources import jsonl, text
from packmamba.errors import UserError

WORDS = "packed rows hold documents of many lengths and nothing leaks from one into the next ☃".split()


def make_texts(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.choice([0, 1, 5, 50, 400]))) for _ in range(count)]


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of 10 kB and chunks of 4,000 characters: a small corpus has many of both."""
    for module in (jsonl, text, preparation):
        monkeypatch.setattr(module, "PART_BYTES", 10_000)
    monkeypatch.setattr(shards, "CHUNK", 4_000)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in make_texts(400)))
    return DataConfig(source="jsonl", path=str(path), cache_dir=str(tmp_path / "cache"), validation_fraction=0.2)


def elsewhere(data, name, **changes):
    return DataConfig(**{**vars(data), "cache_dir": str(Path(data.cache_dir).with_name(name)), **changes})


def files(corpora):
    """Every file of a corpus but its card, and the card without where the source lies."""
    found = {path.name: path.read_bytes() for path in corpora.train.folder.iterdir()}
    meta = json.loads(found.pop("meta.json"))
    return found, {key: value for key, value in meta.items() if key not in ("identity", "checksum")}


def folders(data):
    return sorted(path.name for path in Path(data.cache_dir).iterdir())


def test_hashes_of_corpora_are_those_from_before_there_were_parts(tmp_path):
    texts = [f"document {i} ☃\n" * (1 + i * i % 17) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    (tmp_path / "texts").mkdir()
    for i, one in enumerate(texts):
        (tmp_path / "texts" / f"{i}.txt").write_text(one)
    common = {"cache_dir": str(tmp_path / "cache")}
    for keys, expected in (
        ({"source": "jsonl", "path": str(tmp_path / "a.jsonl"), "validation_fraction": 0.2}, "78333b86fe1c9c5d9043baaccab015c4"),
        ({"source": "text", "path": str(tmp_path / "texts"), "validation_fraction": 0.2}, "a039dbf366ba07f76ecea67fee66b206"),
        ({"source": "synthetic", "num_documents": 500, "corpus_seed": 4}, "eec5162a569a721e0adfdfe9bff4f0a2"),
    ):  # fmt: skip
        assert load_corpora(DataConfig(**keys, **common), progress=False).corpus_hash == expected


# --- several processes


@pytest.mark.slow
@pytest.mark.parametrize("source", ["jsonl", "text"])
def test_the_bytes_do_not_depend_on_the_number_of_processes(data, source, small_parts, tmp_path):
    if source == "text":
        (tmp_path / "texts").mkdir()
        for i, one in enumerate(make_texts(60)):
            (tmp_path / "texts" / f"{i}.txt").write_text(one)
        data = elsewhere(data, "cache", source="text", path=str(tmp_path / "texts"))
    one = load_corpora(elsewhere(data, "one", num_proc=1), progress=False)
    three = load_corpora(elsewhere(data, "three", num_proc=3), progress=False)
    assert files(one) == files(three) and one.skipped == three.skipped == {
        "empty_documents": one.skipped["empty_documents"]
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.undo()
        for module in (jsonl, text, preparation):
            patched.setattr(module, "PART_BYTES", 1 << 25)
        assert files(load_corpora(elsewhere(data, "whole"), progress=False)) == files(one)


def test_a_tokenizer_file_in_several_processes(data, small_parts, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(["[unk]", *WORDS])}, unk_token="[unk]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "words.json"))
    keys = {"tokenizer": str(tmp_path / "words.json"), "begin_token": None, "end_token": "next"}
    one = load_corpora(elsewhere(data, "one", num_proc=1, **keys), progress=False)
    two = load_corpora(elsewhere(data, "two", num_proc=2, **keys), progress=False)
    assert files(one) == files(two) and one.train.vocab_size == len(WORDS) + 1


@pytest.mark.slow
def test_the_first_broken_line_is_the_one_that_is_named(data, small_parts):
    lines = Path(data.path).read_text().splitlines()
    for number in (300, 120, 350):
        lines[number - 1] = "broken"
    Path(data.path).write_text("\n".join(lines))
    for count in (1, 3):
        data.num_proc = count
        with pytest.raises(ConfigError, match=r"corpus\.jsonl:120 is not valid JSON"):
            load_corpora(data, progress=False)
        assert folders(data) == []
    data.bad_lines = "skip"
    assert load_corpora(data, progress=False).skipped["bad_lines"] == 3


@pytest.mark.slow
def test_a_worker_that_is_killed_is_one_sentence_and_its_work_is_not_lost(data, small_parts, monkeypatch):
    whole = load_corpora(elsewhere(data, "whole"), progress=False)
    receive, seen = workers._Worker.receive, []

    def kill(self):
        message = receive(self)
        if isinstance(message, dict):
            seen.append(message)
            if len(seen) == 5:
                self.process.kill()
        return message

    monkeypatch.setattr(workers._Worker, "receive", kill)
    data.num_proc = 2
    with pytest.raises(UserError, match="was killed, perhaps because memory ran out .*the same command goes on"):
        load_corpora(data, progress=False)
    assert files(load_corpora(data, progress=False)) == files(whole)


# --- kills


def child(data, body="", small=True):
    """A process that runs `body`, then load_corpora, and prints the corpus hash."""
    code = (
        "import os, sys, time; from pathlib import Path; from packmamba.config import DataConfig\n"
        "from packmamba.data import corpus, preparation, shards, workers\n"
        "from packmamba.data.sources import jsonl\n"
        + small
        * "jsonl.PART_BYTES = preparation.PART_BYTES = 10_000; shards.CHUNK = 4_000\n"
        + f"data = {data!r}\n{body}\n"
        "print(corpus.load_corpora(data, progress=False).corpus_hash, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True)


STOPS = {
    "before anything": "workers.run = stop_at",
    "before a card": "shards.Shard.close = after(shards.Shard.close, 7, before=True)",
    "while joining": "preparation.Joined._append = after(preparation.Joined._append, 11)",
    "between journal and deletion": "Path.unlink = after(Path.unlink, 4, before=True)",
    "before the rename": "preparation._install = stop_at",
}
AFTER = """
def stop_at(*_):
    print("here", flush=True)
    time.sleep(60)
def after(function, count, before=False):
    calls = []
    def counted(*arguments, **more):
        calls.append(1)
        if before and len(calls) == count:
            stop_at()
        result = function(*arguments, **more)
        if len(calls) == count:
            for one in arguments:
                for file in getattr(one, "_files", {}).values():
                    file.closed or file.flush()
            stop_at()
        return result
    return counted
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", STOPS)
def test_a_killed_preparation_goes_on_and_ends_with_the_same_bytes(data, small_parts, where, caplog):
    whole = load_corpora(elsewhere(data, "whole"), progress=False)
    data.num_proc = 1
    with child(data, AFTER + STOPS[where]) as process:
        assert process.stdout.readline() == "here\n"
        process.kill()
    assert all(name.startswith(".") for name in folders(data))  # nothing that could be taken for a corpus
    made = []
    with pytest.MonkeyPatch.context() as patched, caplog.at_level(logging.WARNING):
        close = shards.Shard.close
        patched.setattr(shards.Shard, "close", lambda self, *given: made.append(self.card) or close(self, *given))
        again = load_corpora(data, progress=False)
    assert files(again) == files(whole) and folders(data) == [again.train.folder.name]
    chunks = len(made)
    if where == "before the rename":
        assert chunks == 0
    assert ("going on with the corpus" in caplog.text) == (where != "before anything")


@pytest.mark.slow
def test_a_preparation_of_several_processes_that_is_killed_leaves_none_running(data, small_parts):
    whole = load_corpora(elsewhere(data, "whole"), progress=False)
    data.num_proc = 2
    body = AFTER + "workers._Worker.receive = after(workers._Worker.receive, 12)\n"
    body += "made = workers._Worker.__init__\n"
    body += "def told(self, *given):\n    made(self, *given)\n    print(self.process.pid, flush=True)\n"
    body += "workers._Worker.__init__ = told"
    with child(data, body) as process:
        started = [int(process.stdout.readline()) for _ in range(2)]
        assert process.stdout.readline() == "here\n"
        process.kill()
    for _ in range(200):
        if not any(Path(f"/proc/{number}/cmdline").exists() and alive(number) for number in started):
            break
        time.sleep(0.05)
    else:
        pytest.fail("workers outlive the process that started them")
    assert files(load_corpora(data, progress=False)) == files(whole)


def alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("what", ["tokens", "journal", "plan"])
def test_what_cannot_be_gone_on_with_is_made_from_the_start(data, small_parts, what, caplog):
    whole = load_corpora(elsewhere(data, "whole"), progress=False)
    data.num_proc = 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(preparation, "_install", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load_corpora(data, progress=False)
    (work,) = Path(data.cache_dir).glob(".*.work")
    if what == "tokens":
        with open(work / "corpus" / "train.tokens", "r+b") as file:
            file.seek(1000)
            file.write(b"\1\2\3")
    elif what == "journal":
        lines = (work / "journal.jsonl").read_text().splitlines(keepends=True)
        (work / "journal.jsonl").write_text("".join(lines[:5]) + lines[5][:20])  # cut in a line: not lost, only shorter
    else:
        (work / "plan.json").write_text('{"plan": [1, 2, 3], "boot": ""}')
    assert files(load_corpora(data, progress=False)) == files(whole)
    assert ("is made from the start" in caplog.text) == (what != "journal")


ONE_LETTER_A_CHUNK = """
close, made = shards.Shard.close, data.path + ".made"
def told(*given):
    time.sleep(0.02)
    with open(made, "a") as file:
        file.write("x")
    return close(*given)
shards.Shard.close = told
"""


@pytest.mark.slow
def test_two_processes_at_once_make_one_corpus(data, small_parts):
    data.num_proc = 1
    processes = [child(data, ONE_LETTER_A_CHUNK) for _ in range(2)]
    hashes = {process.communicate(timeout=120)[0] for process in processes}
    corpora = load_corpora(data)
    assert hashes == {corpora.corpus_hash + "\n"} and folders(data) == [corpora.train.folder.name]
    assert len(Path(data.path + ".made").read_text()) == len(chunks_of(data))


def chunks_of(data):
    made = []
    with pytest.MonkeyPatch.context() as patched:
        close = shards.Shard.close
        patched.setattr(shards.Shard, "close", lambda self, *given: made.append(self.card) or close(self, *given))
        load_corpora(elsewhere(data, "counted", num_proc=1), progress=False)
    return made


# --- damage


@pytest.mark.parametrize(
    "name", ["train.tokens", "train.lengths", "train.offsets", "validation.lengths", "both", "meta.json", "identity"]
)
def test_changed_bytes_are_noticed_when_a_corpus_is_opened(data, name, caplog):
    first = load_corpora(data)
    expected = files(first)
    path = first.train.folder / {"both": "train.lengths", "identity": "meta.json"}.get(name, name)
    content = bytearray(path.read_bytes())
    if name == "meta.json":
        content = content.replace(first.corpus_hash.encode(), b"0" * 32)
    elif name == "identity":  # which decides no token
        content = content.replace(b'"format"', b'"fnrmat"')
    elif name == "both":  # another order, and the offsets that follow from it
        content = np.frombuffer(content, "<i4")[::-1].tobytes()
    else:
        content[8:48] = os.urandom(40)
    path.write_bytes(content)
    if name == "both":
        write_offsets(first.train.folder, "train")
    second = load_corpora(data)
    assert str(path) in caplog.text and "will be prepared again" in caplog.text and files(second) == expected


@pytest.mark.parametrize("old", [False, True])
def test_a_whole_check_notices_changed_tokens(data, old):
    folder = load_corpora(data).train.folder
    if old:  # as corpora were before there were checksums
        meta = json.loads((folder / "meta.json").read_text())
        del meta["checksums"], meta["checksum"]
        (folder / "meta.json").write_text(json.dumps(meta))
    check(folder, whole=True)
    content = bytearray((folder / "validation.tokens").read_bytes())
    content[7] ^= 1
    (folder / "validation.tokens").write_bytes(content)
    check(folder)
    with pytest.raises(ValueError, match=str(folder) if old else "validation.tokens has other bytes"):
        check(folder, whole=True)


def test_doctor_names_the_corpus_that_is_damaged_and_what_to_do(data, capsys):
    good, bad = (load_corpora(elsewhere(data, name), progress=False).train.folder for name in ("good", "bad"))
    assert cli.main(["doctor", str(good)]) == 0
    documents = sum(bool(one) for one in make_texts(400))
    assert f"{good}: whole, {documents} documents of " in capsys.readouterr().out
    content = bytearray((bad / "train.tokens").read_bytes())
    content[100] ^= 1
    (bad / "train.tokens").write_bytes(content)
    assert cli.main(["doctor", str(good), str(bad), str(bad.parent)]) == 1
    _, damaged, missing = capsys.readouterr().out.splitlines()
    assert f"{bad}: damaged ({bad / 'train.tokens'} has other bytes than were written); delete this folder" in damaged
    assert missing == f"{bad.parent}: no prepared corpus: it holds no meta.json"  # nor that it may be deleted
    assert cli.main(["doctor", str(good), str(good / "nothing")]) == 2
    told = capsys.readouterr()
    assert not told.out and told.err.endswith(
        f"{good / 'nothing'} is not a folder; expected one of a prepared corpus, under data.cache_dir\n"
    )


def test_checksums_are_of_the_files(data):
    folder = load_corpora(data).train.folder
    for name, checksum in json.loads((folder / "meta.json").read_text())["checksums"].items():
        assert hashlib.blake2b((folder / name).read_bytes(), digest_size=16).hexdigest() == checksum


def test_a_full_disk_is_one_sentence_and_what_is_done_is_kept(data, small_parts, monkeypatch):
    data.num_proc = 1
    append, calls = preparation.Joined._append, []

    def full(*given):
        calls.append(1)
        if len(calls) == 20:
            raise OSError(28, "No space left on device")
        append(*given)

    monkeypatch.setattr(preparation.Joined, "_append", full)
    with pytest.raises(UserError, match=r"data\.cache_dir .* \(No space left on device\); what is done is kept"):
        load_corpora(data, progress=False)
    corpora = load_corpora(data, progress=False)
    assert np.all(Corpus(corpora.train.folder, "train").lengths > 0)
    assert files(corpora) == files(load_corpora(elsewhere(data, "whole"), progress=False))


@pytest.mark.slow
def test_a_worker_that_cannot_write_is_one_sentence(data, small_parts):
    data.num_proc = 2
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        with pytest.raises(
            UserError, match=r"data\.cache_dir .* cannot be written \(File too large\); what is done is kept"
        ):
            load_corpora(data, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(load_corpora(data, progress=False)) == files(load_corpora(elsewhere(data, "whole"), progress=False))
