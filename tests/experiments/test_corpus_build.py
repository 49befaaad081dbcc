"""The corpus of installed packages: near-copies, the split, the manifest, and that other files are
refused.
"""

import importlib
import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from experiments.corpus import build
from experiments.corpus.minhash import clusters, signature
from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.packages import read_manifest
from packmamba.data.token_store import load_corpora
from written import refused

pytestmark = pytest.mark.slow


def runs_of_five(text):
    """The set that ``shingles`` hashes, by a regular expression."""
    tokens = re.findall(r"\w+|[^\w\s]", text)
    width = min(5, len(tokens))
    return {tuple(tokens[i : i + width]) for i in range(len(tokens) - width + 1)} if tokens else set()


def jaccard(a, b):
    a, b = runs_of_five(a), runs_of_five(b)
    return len(a & b) / len(a | b)


def words(rng, count):
    return [f"word_{i}" for i in rng.integers(0, 500, count)]


def test_clusters_are_those_of_all_pairs():
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(30):
        base = words(rng, 200)
        texts += [" ".join(base[cut:] + words(rng, cut)) for cut in (0, 10, 150)]
        texts.append(" ".join(base))
    signatures = np.stack([signature(text.encode()) for text in texts])
    expected = np.arange(len(texts))
    for i in range(len(texts)):
        for j in range(i):
            if (signatures[i] == signatures[j]).mean() >= 0.5:
                expected[expected == expected[i]] = expected[j]
    found = clusters(signatures)
    assert (found == np.array([np.flatnonzero(expected == e)[0] for e in expected])).all()
    assert len(np.unique(found)) == 60  # of each four, three are near-copies


MODULE = """{doc}


def {name}(a, b):
    return {body}


class C:
    def shared(self, one, two, three, four):
        self.a, self.b = one, two
        return three + four
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Four packages: two hold a near-copy of the other two's file, all hold the same method, one
    has odd files.
    """
    rng = np.random.default_rng(3)
    texts = {
        name: MODULE.format(doc=f'"""{" ".join(words(rng, 150))}"""', name=f"of_{name}", body=" + ".join(words(rng, 9)))
        for name in ("alpha", "beta")
    }
    texts["gamma"] = texts["alpha"].replace("of_alpha", "of_gamma") + "\n# vendored\n"
    texts["delta"] = texts["beta"]
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(text)
        files = [f"{name}/a.py"]
        if name == "alpha":
            (tmp_path / name / "empty.py").write_text("\n")
            (tmp_path / name / "latin.py").write_bytes(b"# \xe9\n")
            (tmp_path / name / "broken.py").write_text("def broken(:\n    " + " ".join(words(rng, 40)))
            files += [f"{name}/{file}.py" for file in ("empty", "latin", "broken")]
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    monkeypatch.syspath_prepend(str(tmp_path))
    # few files
    monkeypatch.setattr(build, "ProcessPoolExecutor", lambda mp_context: ThreadPoolExecutor(1))
    importlib.invalidate_caches()
    return tmp_path


def corpus_of(site, *names):
    path = site / "packages.jsonl.gz"
    build.make_manifest(path, names or ["alpha", "beta", "gamma", "delta"])
    whole = {"begin_token": None, "end_token": None}
    return DataConfig(source="packages", path=str(path), cache_dir=str(site / "cache"), **whole)


def documents(data):
    found = {}
    corpora = load_corpora(data, progress=False)
    for corpus in (corpora.train, corpora.validation):
        texts = [bytes(corpus.document(i).tolist()).decode() for i in range(len(corpus))]
        found[corpus.split] = list(zip([corpus.group_names[group] for group in corpus.groups], texts))
    return found


def test_of_near_copies_one_stays_and_packages_are_in_one_split(site):
    data = corpus_of(site)
    manifest, content = read_manifest(data.path), (site / "packages.jsonl.gz").read_bytes()
    taken = {f"{package['name']}/{path}" for package, path, *_ in manifest.taken()}
    assert taken - {"beta/beta/a.py", "delta/delta/a.py"} == {"alpha/alpha/broken.py", "gamma/gamma/a.py"}
    assert len(taken) == 3
    found = documents(data)
    assert found["train"] and found["validation"]
    assert all(jaccard(a, b) < 0.5 for _, a in found["train"] for _, b in found["validation"])
    held = {package["name"] for package in manifest.packages if package["split"] == "validation"}
    assert {group for group, _ in found["validation"]} <= held and not {group for group, _ in found["train"]} & held
    corpus_of(site)
    assert (site / "packages.jsonl.gz").read_bytes() == content


def test_functions_stand_once_and_a_mixture_has_some_files_whole(site):
    data = corpus_of(site, "beta", "gamma", "delta")
    found = {}
    for data.unit in ("files", "functions", "mixture"):
        found[data.unit] = {text for split in documents(data).values() for _, text in split}
    assert len(found["functions"]) == 3  # of_gamma, of_beta, and the method that all share
    assert sum("def shared" in text for text in found["functions"]) == 1
    taken = read_manifest(data.path).taken()
    whole = {(site / path).read_text() for _, path, hash, _ in taken if int(hash[-1], 16) % 2 == 0}
    assert found["mixture"] - found["functions"] == whole <= found["files"]


def test_other_files_are_refused_by_name(site):
    data = corpus_of(site)
    (site / "gamma" / "a.py").write_text("changed = True\n")
    assert re.search(r"^data.path: .*gamma/a.py of gamma 1.0", refused(data))
    (site / "alpha" / "broken.py").unlink()
    assert re.search(r"^data.path: .*alpha/broken.py of alpha 1.0", refused(data))
    data.validation_fraction = 0.2
    assert "data.validation_fraction" in refused(data)
    assert re.search("^data.path: .*manifest", refused(DataConfig(source="packages", path=__file__)))


def test_the_command_makes_a_corpus_and_checks_it(site):
    common = ["--cache-dir", f"{site}/cache"]
    names = ["--packages", "beta", "gamma", "delta"]
    build.main(["--output", f"{site}/made", *names, "--tokenizer-size", "300", *common])
    card = json.loads((site / "made" / "card.json").read_text())
    assert (card["files"], card["files_left_out"], card["functions_left_out"]) == (3, 1, 1)
    again = ["--manifest", f"{site}/made/packages.jsonl.gz", "--output", f"{site}/again", *common]
    build.main(again)
    assert json.loads((site / "again" / "card.json").read_text()) == card
    data = DataConfig(source="packages", path=f"{site}/made/packages.jsonl.gz", cache_dir=f"{site}/cache")
    data.tokenizer = f"{site}/made/tokenizer.json"
    assert load_corpora(data, progress=False).train.vocab_size == 300
    card["units"]["files"]["corpus_hash"] = "other"
    (site / "made" / "card.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match="manifest: .*files"):
        build.main(again)


def test_the_committed_manifest_is_the_card_s():
    folder = build.Path(build.__file__).parent
    card = json.loads((folder / "card.json").read_text())
    assert read_manifest(folder / "packages.jsonl.gz").hash == card["manifest"]
