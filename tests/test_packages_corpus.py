"""The corpus of installed packages: near-copies, the split, the manifest, and that it is refused where files differ."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from packmamba.cli import main
from packmamba.config import ConfigError, DataConfig
from packmamba.data.corpus import load_corpora
from packmamba.data.duplicates import clusters, shingles, signature
from packmamba.data.manifest import Manifest, as_bits, read_manifest, which_bits
from packmamba.data.python_files import ALONE, in_parallel
from packmamba.data.recipe import make_manifest, validation_packages
from packmamba.data.sources.packages import compare
from packmamba.errors import UserError


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


@pytest.mark.parametrize("text", ["", " \n\t", "one", "a b c d", "a b c d e", "f(x)==[1,2]\n" * 3, "größe = π + 1 # ä"])
def test_shingles_are_the_runs_of_five_tokens(text):
    assert len(shingles(text.encode())) == len(runs_of_five(text))


def test_white_space_is_nothing_and_everything_else_counts():
    assert (shingles(b"def f(x):\n    return x") == shingles(b"def  f( x ) : return\tx")).all()
    assert not np.intersect1d(shingles(b"def f(x): return x"), shingles(b"def f(y): return y"))[1:].size


@pytest.mark.parametrize("replaced", [0, 40, 120, 250, 400])
def test_signatures_estimate_the_jaccard_similarity(replaced):
    rng = np.random.default_rng(replaced)
    first = words(rng, 400)
    second = " ".join(first[replaced:] + words(rng, replaced))
    estimate = (signature(" ".join(first).encode()) == signature(second.encode())).mean()
    assert estimate == pytest.approx(jaccard(" ".join(first), second), abs=0.12)  # four standard deviations


def test_clusters_are_those_of_all_pairs():
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(30):
        base = words(rng, 200)
        texts += [" ".join(base[cut:] + words(rng, cut)) for cut in (0, 10, 150)]
        texts.append(" ".join(base))
    signatures = np.stack([signature(text.encode()) for text in texts])
    found = clusters(signatures)
    expected = np.arange(len(texts))
    for i in range(len(texts)):  # joined pair by pair
        for j in range(i):
            if (signatures[i] == signatures[j]).mean() >= 0.5:
                expected[expected == expected[i]] = expected[j]
    assert (found == np.array([np.flatnonzero(expected == e)[0] for e in expected])).all()
    assert len(np.unique(found)) == 60  # of each four, three are near-copies


def test_validation_is_many_small_packages():
    rng = np.random.default_rng(1)
    sizes = {f"package{i}": int(size) for i, size in enumerate(rng.lognormal(10, 2, 300))}
    total = sum(sizes.values())
    held = validation_packages(sizes, 0.1, seed=0)
    assert 0.1 * total <= sum(sizes[name] for name in held) <= 0.125 * total
    assert max(sizes[name] for name in held) <= 0.025 * total
    assert held != validation_packages(sizes, 0.1, seed=1)
    assert held == validation_packages(dict(reversed(sizes.items())), 0.1, seed=0)


def test_bits():
    for taken in ([], [True], [False, True, True], [False] * 9):
        assert which_bits(as_bits(taken)) == taken


# --- made-up packages


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
    """Four packages of which two hold a near-copy of the other two's file, all hold the same method, one has odd files."""
    rng = np.random.default_rng(3)
    contents = {
        name: MODULE.format(doc=f'"""{" ".join(words(rng, 150))}"""', name=f"of_{name}", body=" + ".join(words(rng, 9)))
        for name in ("alpha", "beta")
    }
    contents["gamma"] = contents["alpha"].replace("of_alpha", "of_gamma") + "\n# vendored\n"
    contents["delta"] = contents["beta"]
    for name, text in contents.items():
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
    importlib.invalidate_caches()
    return tmp_path


def made(site, *names, **options) -> tuple[Manifest, DataConfig]:
    manifest = make_manifest(names or ["alpha", "beta", "gamma", "delta"], progress=False, **options)
    manifest.write(site / "packages.jsonl.gz")
    data = DataConfig(
        source="packages", path=str(site / "packages.jsonl.gz"), cache_dir=str(site / "cache"), begin_token=None,
        end_token=None,
    )  # fmt: skip
    return manifest, data


def documents(data):
    corpora = load_corpora(data, progress=False)
    return {
        corpus.split: [
            (corpus.group(i), corpus.document(i).astype(np.uint8).tobytes().decode()) for i in range(len(corpus))
        ]
        for corpus in (corpora.train, corpora.validation)
    }


@pytest.mark.slow
def test_of_near_copies_one_stays_whatever_the_split(site):
    for seed in range(4):
        manifest, data = made(site, seed=seed)
        files = {f"{package.name}/{file.path}": file for package, file in manifest.taken}
        assert sorted(files) == ["alpha/alpha/broken.py", "beta/beta/a.py", "gamma/gamma/a.py"] or sorted(files) == [
            "alpha/alpha/broken.py", "delta/delta/a.py", "gamma/gamma/a.py",
        ]  # fmt: skip
        found = documents(data)
        assert found["train"] and found["validation"]
        for _, a in found["train"]:
            assert all(jaccard(a, b) < 0.5 for _, b in found["validation"])
        held = {package.name for package in manifest.packages if package.split == "validation"}
        assert {group for group, _ in found["validation"]} <= held
        assert not {group for group, _ in found["train"]} & held


def test_functions_stand_once(site):
    _, data = made(site, "beta", "gamma", "delta")
    data.unit = "functions"
    found = documents(data)
    texts = [text for split in found.values() for _, text in split]
    assert len(texts) == 3  # of_gamma, of_beta, and the method that all share once
    assert sum("def shared" in text for text in texts) == 1


def test_a_mixture_has_some_files_whole_and_the_functions_of_the_others(site):
    manifest, data = made(site, "beta", "gamma", "delta")
    files = documents(data)
    data.unit = "functions"
    functions = documents(data)
    data.unit = "mixture"
    mixture = [text for split in documents(data).values() for _, text in split]
    whole = {(site / file.path).read_text() for _, file in manifest.taken if file.whole}
    assert set(mixture) - {text for split in functions.values() for _, text in split} == whole
    assert whole <= {text for split in files.values() for _, text in split}


@pytest.mark.slow
def test_a_manifest_is_the_same_again_and_reads_as_written(site):
    first, data = made(site)
    content = Path(data.path).read_bytes()
    again, _ = made(site)
    assert Path(data.path).read_bytes() == content
    assert read_manifest(data.path) == first == again
    assert first.hash == again.hash != make_manifest(["alpha", "beta"], progress=False).hash


@pytest.mark.slow
def test_other_files_are_refused_by_name(site):
    manifest, data = made(site)
    assert compare(manifest).same
    (site / "gamma" / "a.py").write_text("changed = True\n")
    assert compare(manifest).different == ["gamma: gamma/a.py"]
    with pytest.raises(ConfigError, match=r"1 files differ \(first gamma: gamma/a.py\): .* not comparable"):
        load_corpora(data, progress=False)
    (site / "beta-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: beta\nVersion: 1.1\n")
    (site / "alpha" / "broken.py").unlink()
    found = compare(manifest)
    assert (found.versions, found.missing) == (["beta 1.0 (here 1.1)"], ["alpha: alpha/broken.py"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"path": None}, "needs data.path, a manifest"),
        ({"path": "nowhere.gz"}, "'nowhere.gz' is no file"),
        ({"path": __file__}, "is not a manifest of packages"),
        ({"validation_fraction": 0.2}, "says what is validation"),
        ({"source": "stdlib", "path": None, "unit": "files"}, "only data.source=packages has units"),
    ],
)
def test_refusals(site, settings, said):
    _, data = made(site)
    with pytest.raises(ConfigError, match=said):
        load_corpora(DataConfig(**{**vars(data), **settings}), progress=False)


@pytest.mark.slow
def test_the_command_makes_a_corpus_and_takes_it_again(site, capsys):
    common = [f"cache_dir={site}/cache"]
    names = "packages=[beta,gamma,delta]"
    assert main(["corpus", f"output={site}/made", names, "tokenizer_size=300", *common]) == 0
    card = json.loads((site / "made" / "card.json").read_text())
    assert (card["files"], card["files_left_out"], card["functions_left_out"]) == (3, 1, 1)
    assert card["units"]["files"]["train"]["documents"] + card["units"]["files"]["validation"]["documents"] == 2
    again = [f"manifest={site}/made/packages.jsonl.gz", f"output={site}/again", *common]
    assert main(["corpus", *again]) == 0
    assert json.loads((site / "again" / "card.json").read_text()) == card
    data = DataConfig(source="packages", path=f"{site}/made/packages.jsonl.gz", cache_dir=f"{site}/cache")
    data.tokenizer = f"{site}/made/tokenizer.json"
    assert load_corpora(data, progress=False).train.vocab_size == 300
    (site / "gamma" / "a.py").write_text("changed = True\n")
    assert main(["corpus", *again]) == 2
    assert "not comparable" in capsys.readouterr().err


@pytest.mark.slow
def test_losses_are_summed_by_package(site):
    from packmamba.evaluation.language_modeling import long_context, perplexity
    from packmamba.evaluation.registry import EvalContext
    from packmamba.nn import MambaLM

    _, data = made(site, "alpha", "beta", "gamma", validation_fraction=0.9)
    validation = load_corpora(data, progress=False).validation
    model = MambaLM(vocab_size=256, d_model=8, n_layer=1)
    found = perplexity(model, EvalContext(data, None))
    points = found.curves["by_group"]
    assert list(dict.fromkeys(validation.group_names[point["group"]] for point in points)) == validation.group_names
    by_start = {row["start"]: row for row in found.curves["by_position"]}
    for start, row in by_start.items():
        here = [point for point in points if point["start"] == start]
        assert sum(point["targets"] for point in here) == row["count"]
        assert sum(point["nats"] for point in here) == pytest.approx(row["loss"] * row["count"])
    assert sum(point["nats"] for point in points) / sum(point["targets"] for point in points) == pytest.approx(
        found.metrics["loss"]
    )
    gains = long_context(model, EvalContext(data, None, options={"window": 20, "most": 4, "context": 20}))
    (point,) = [p for p in gains.curves["by_group"] if p["group"] == 0 and p["windows"] == 4]
    own = [item["gain"] for item in gains.items if item["group"] == 0 and item["windows"] == 4]
    assert point["gain"] == pytest.approx(sum(own)) and point["documents"] == len(own) >= 1


def test_a_script_without_a_guard_makes_a_corpus_and_runs_once(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import os\n"
        "os.sched_getaffinity = lambda _: {0, 1}\n"
        "from packmamba.data.python_files import ALONE, functions_of, in_parallel\n"
        "found = list(in_parallel(functions_of, [b'def f(): pass'] * ALONE))\n"
        "print(len(found), found[-1], __name__)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("500 ['def f(): pass'] __main__\n", 0), done.stderr[-300:]


def dies(job):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_reads_packages_and_is_killed_is_one_sentence(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(UserError, match="a process that reads packages was killed, perhaps because memory ran out"):
        list(in_parallel(dies, range(ALONE)))
