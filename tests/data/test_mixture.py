"""Mixtures: shares of tokens by weight, passes without repeats, each source tokenized once, errors
by entry.
"""

import pickle

import numpy as np
import pytest

from packmamba.config import ConfigError, DataConfig, load_config
from packmamba.data.batch import make_batch
from packmamba.data.schedule import StepSchedule
from packmamba.data.sources import parts_of
from packmamba.data.token_store import load_corpora
from written import refused, write_lines, write_rows

SIZES = {"short": (300, 5), "long": (40, 200), "few": (8, 30)}


@pytest.fixture
def sources(tmp_path):
    """Three files of JSON lines: documents of one letter each, by source, numbered."""
    for letter, (name, (count, length)) in zip("abc", SIZES.items()):
        write_lines(tmp_path / f"{name}.jsonl", [f"{letter * length}{i}" for i in range(count)])
    return tmp_path


def mixed(folder, weights, **keys):
    paths = {str(folder / f"{name}.jsonl"): weight for name, weight in weights.items()}
    entries = [{"source": "jsonl", "path": path, "weight": weight} for path, weight in paths.items()]
    keys = {"validation_fraction": 0.1, "row_length": 256, "tokens_per_step": 2000} | keys
    return DataConfig(sources=entries, cache_dir=str(folder / "cache"), **keys)


def tokens_of(corpus, documents):
    """Count the tokens of documents by part."""
    return np.bincount(corpus.groups[documents], weights=corpus.lengths[documents], minlength=len(corpus.parts))


def test_weights_are_shares_of_tokens(sources):
    weights = {"short": 1, "long": 3, "few": 0.5}
    corpus = load_corpora(mixed(sources, weights), progress=False).train
    size = len(corpus)
    drawn = np.concatenate([corpus.window(0, number, size) for number in range(50)])
    shares = tokens_of(corpus, drawn) / corpus.lengths[drawn].sum()
    assert shares == pytest.approx(np.array([1, 3, 0.5]) / 4.5, rel=0.02)
    passes = corpus.passes(float(corpus.lengths[drawn].sum()))
    for part, name in enumerate(weights):
        times = np.unique(drawn[corpus.groups[drawn] == part], return_counts=True)[1]
        assert times.max() - times.min() <= 1, "a document comes again once all have come"
        assert times.mean() == pytest.approx(passes[name], rel=0.05)


@pytest.mark.parametrize("keys", [{"strategy": "concat_split"}, {"cut_documents": 32}], ids=["rows", "documents"])
def test_weights_hold_where_documents_are_cut_before_truncate(sources, keys):
    data = mixed(sources, {"short": 1, "long": 1}, row_length=64, overlong="truncate", **keys)
    corpus = load_corpora(data, progress=False).train
    drawn = np.concatenate([corpus.window(0, number, 100) for number in range(50)])
    assert tokens_of(corpus, drawn) / corpus.lengths[drawn].sum() == pytest.approx([0.5, 0.5], rel=0.03)


def test_a_window_is_a_function_of_its_number(sources):
    corpus = load_corpora(mixed(sources, {"short": 1, "long": 1}), progress=False).train
    again = pickle.loads(pickle.dumps(corpus))
    for number in (7, 0, 3):
        assert (corpus.window(1, number, 100) == again.window(1, number, 100)).all()
    assert not np.array_equal(corpus.window(1, 0, 100), corpus.window(2, 0, 100))


@pytest.mark.parametrize("keys", [{}, {"row_length": 64, "overlong": "truncate"}], ids=["whole", "truncated"])
@pytest.mark.parametrize("batching", ["matched", "stream"])
def test_every_step_has_the_mixture(sources, batching, keys):
    data = mixed(sources, {"short": 1, "long": 1}, batching=batching, **keys)
    corpus = load_corpora(data, progress=False).train
    schedule = StepSchedule(corpus, data, seed=0)
    tokens = np.zeros(2)
    for step in range(12):
        plan = schedule.step(step)
        batch = make_batch(corpus, plan.rows, np.concatenate(plan.micro_batches))
        tokens += np.bincount(batch.source, weights=batch.layout.lengths, minlength=2)
        letter = batch.tokens.flatten()[batch.layout.starts.long() + batch.layout.lengths.long() // 2]
        for part, name in enumerate("ab"):
            assert (batch.source[letter == ord(name)] == part).all()
        assert (letter == ord("a")).any() and (letter == ord("b")).any()
    assert tokens[0] / tokens.sum() == pytest.approx(0.5, abs=0.15)
    drawn = np.concatenate([corpus.window(0, number, 100) for number in range(4)])
    of_long = drawn[corpus.groups[drawn] == 1]
    trained_on = np.minimum(corpus.lengths[drawn], data.row_length).sum()
    assert corpus.passes(float(trained_on))["long"] == pytest.approx(len(of_long) / 36, rel=0.1)


def test_arms_of_a_sweep_read_the_same_documents(sources):
    steps = []
    for strategy in ("padded", "greedy", "best_fit_decreasing"):
        data = mixed(sources, {"short": 2, "long": 1}, strategy=strategy, cut_at_steps=False)
        corpus = load_corpora(data, progress=False).train
        schedule = StepSchedule(corpus, data, seed=3)
        steps.append([sorted(schedule.step(step).rows.document.tolist()) for step in range(5)])
    assert steps[0] == steps[1] == steps[2]


def test_a_source_is_tokenized_once(sources):
    first = load_corpora(mixed(sources, {"short": 1, "long": 1}), progress=False)
    made = sorted((sources / "cache").glob("[!.]*"))
    other = load_corpora(mixed(sources, {"short": 5, "long": 1}), progress=False)
    assert sorted((sources / "cache").glob("[!.]*")) == made
    assert len(made) == 2 and first.corpus_hash != other.corpus_hash


def test_prompts_and_texts_mix(sources):
    write_rows(sources / "pairs.jsonl", [{"prompt": "p" * 9, "completion": str(i)} for i in range(99)])
    data = mixed(sources, {"pairs": 1, "long": 1})
    corpus = load_corpora(data, progress=False).train
    plan = StepSchedule(corpus, data, seed=0).step(0)
    batch = make_batch(corpus, plan.rows, np.concatenate(plan.micro_batches))
    trained = batch.targets[batch.loss_mask]
    assert (trained == ord("b")).any() and not (trained == ord("p")).any()
    with pytest.warns(UserWarning, match=f"{len(corpus.parts[0].lengths)} documents lose the end of their answers"):
        StepSchedule(corpus, mixed(sources, {"pairs": 1, "long": 1}, row_length=8, overlong="truncate"), seed=0)


NUMBER = r"data.sources\[0\].weight: expected a number above 0, got "


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"source": "text", "path": "a"}, f"{NUMBER}None"),
        ({"source": "text", "path": "a", "wieght": 1}, r"data.sources\[0\]: expected weight, .* did you mean 'weight'"),
        ({"source": "text", "path": "a", "weight": "1"}, f"{NUMBER}'1'"),
        ({"source": "text", "path": "a", "weight": 0}, f"{NUMBER}0"),
        ({"source": "tex", "path": "a", "weight": 1}, r"data.sources\[0\]: source: expected one of"),
        ({"sourc": "text", "weight": 1}, r"data.sources\[0\]: expected weight, name, source, .* got 'sourc'"),
        ("text", r"data.sources\[0\]: expected keys and values"),
        (
            {"source": "jsonl", "path": "a", "weight": 1, "split": "test"},
            "expected keys that source=jsonl reads, got split",
        ),
    ],
)
def test_an_entry_that_is_wrong_is_named(entry, message):
    with pytest.raises(ConfigError, match=message):
        parts_of(DataConfig(sources=[entry]))


def test_two_sources_have_two_names():
    entries = [{"source": "text", "path": f"{name}/a", "weight": 1} for name in "xy"]
    with pytest.raises(ConfigError, match="data.sources: expected a name of its own .* 'a' twice"):
        parts_of(DataConfig(sources=entries))
    assert [part.name for part in parts_of(DataConfig(sources=[entries[0], entries[1] | {"name": "b"}]))] == ["a", "b"]


def test_from_the_command_line():
    words = ["data.sources=[{source: text, path: a, weight: 3}, {source: jsonl, path: b, weight: 1}]"]
    assert [(part.name, part.weight) for part in parts_of(load_config(None, words).data)] == [("a", 3), ("b", 1)]
    with pytest.raises(ConfigError, match="data.path"):
        load_config(None, [*words, "data.path=c"])


def test_a_source_that_cannot_be_read_is_named(sources):
    error = refused(mixed(sources, {"short": 1, "missing": 1}))
    assert error.startswith("data.sources[1]: data.path: ") and "missing.jsonl" in error
