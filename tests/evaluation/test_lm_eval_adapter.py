"""lm-evaluation-harness says the same of our class and of its own for transformers, offline, on a
random checkpoint.
"""

from __future__ import annotations

import json
import random

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from lm_eval.api.instance import Instance  # noqa: E402

from packmamba import MambaLM  # noqa: E402
from packmamba.data.tokenizer import write_template, write_tokenizer  # noqa: E402
from packmamba.errors import ConfigError  # noqa: E402
from packmamba.evaluation.lm_eval_adapter import PackMambaLM  # noqa: E402
from packmamba.lab import cli  # noqa: E402
from packmamba.lab.fit import fit  # noqa: E402
from packmamba.lab.records import read_records  # noqa: E402
from packmamba.lab.run_id import run_folder  # noqa: E402
from runs import tiny_config  # noqa: E402

pytestmark = pytest.mark.extras
WORDS = "the a cat dog sees likes green small house tree and runs under over old new bird".split()


def task(output_type, target, *metrics, **options):
    """Describe a task whose text is the question, unless the options say otherwise."""
    fields = {"output_type": output_type, "doc_to_text": "{{question}}", "doc_to_target": target}
    return fields | {"metric_list": [{"metric": metric} for metric in metrics]} | options


FIRST = {"function": "take_first"}
FILTERS = [{"name": "whole", "filter": [FIRST]}]
FILTERS += [{"name": "cat", "filter": [{"function": "regex", "regex_pattern": "(cat)"}, FIRST]}]
UNTIL = {"until": ["cat", "\n"], "max_gen_toks": 12, "do_sample": False}
TASKS = {
    "choices": task("multiple_choice", "{{answer}}", "acc", "acc_norm", doc_to_choice="{{choices}}"),
    "rolling": task("loglikelihood_rolling", "{{question}}", "word_perplexity", "bits_per_byte", doc_to_text=""),
    "generation": task("generate_until", "{{choices[0]}}", "exact_match", generation_kwargs=UNTIL, filter_list=FILTERS),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    vocabulary = {word: i for i, word in enumerate(["<|end|>", "?", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"eos_token": "<|end|>", "unk_token": "?", "pad_token": "<|end|>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    config = transformers.MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, initializer_range=0.5)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = 0
    transformers.MambaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    from lm_eval.tasks import TaskManager  # seconds, which a run without these tests need not spend

    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(0)
    sentence = lambda most: " ".join(rng.choices(WORDS, k=rng.randint(1, most)))
    lines = [{"question": sentence(20), "choices": [sentence(4) for _ in range(4)], "answer": 1} for _ in range(10)]
    empty = {"question": "", "choices": [sentence(3) for _ in range(4)], "answer": 1}
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in [*lines, empty][: 11 if name == "choices" else 10]))
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": f"ours_{name}", **files, **task}))
    (folder / "group.yaml").write_text(json.dumps({"group": "ours", "task": [f"ours_{name}" for name in TASKS]}))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(model, tasks, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    names = [f"ours_{name}" for name in TASKS]
    return lm_eval.simple_evaluate(model, tasks=names, task_manager=tasks, bootstrap_iters=0, log_samples=True)


def test_every_log_likelihood_is_the_hf_class_s(checkpoint, tasks, monkeypatch, tmp_path):
    from lm_eval.models.huggingface import HFLM

    theirs = evaluate(HFLM(str(checkpoint), batch_size=1, device="cpu"), tasks, monkeypatch, tmp_path)
    ours = evaluate(PackMambaLM(str(checkpoint), max_slots=256, device="cpu"), tasks, monkeypatch, tmp_path)
    compared = 0
    for name, samples in theirs["samples"].items():
        for expected, found in zip(samples, ours["samples"][name]):
            for a, b in zip(expected["filtered_resps"], found["filtered_resps"]):
                if isinstance(a, str):
                    assert a == b
                elif isinstance(a, float):
                    assert abs(a - b) < 1e-3
                else:
                    assert abs(a[0] - b[0]) < 1e-3 and a[1] == b[1]
                compared += 1
    assert compared == 11 * 4 + 10 + 2 * 10
    whole = [sample for sample in ours["samples"]["ours_generation"] if sample["filter"] == "whole"]
    generated = [len(sample["filtered_resps"][0].split()) for sample in whole]
    assert min(generated) < 5 < max(generated), "a stop string ends some"
    for name, values in theirs["results"].items():
        for metric, value in values.items():
            if isinstance(value, float):
                assert ours["results"][name][metric] == pytest.approx(value, rel=1e-4, abs=1e-3), (name, metric)


def test_arguments_of_generation(checkpoint):
    model = PackMambaLM(str(checkpoint), device="cpu")

    def generate(**options):
        return model.generate_until([Instance("generate_until", {}, ("the cat", options), 0)])

    assert generate(max_new_tokens=3) == generate(max_gen_toks=3) != generate(max_gen_toks=9)
    for greedy in ({"temperature": None}, {"temperature": 9.0, "do_sample": 0}, {"do_sample": False, "until": None}):
        assert generate(max_gen_toks=9, **greedy) == generate(max_gen_toks=9)
    with pytest.raises(ValueError, match="generation_kwargs: .*num_beams"):
        generate(num_beams=3)
    spaces, none = (model.loglikelihood([Instance("loglikelihood", {}, (of, " cat"), 0)]) for of in ("  ", ""))
    assert spaces == none, "the harness moves spaces into the continuation"


def test_a_stop_string_may_be_a_special_token(checkpoint, monkeypatch):
    def generate(*_, stop, **__):
        return [next(tokens for tokens in ([2], [2, 1], [2, 1, 3]) if stop(tokens) or len(tokens) == 3)]

    monkeypatch.setattr("packmamba.evaluation.lm_eval_adapter.generate", generate)
    model, options = PackMambaLM(str(checkpoint), device="cpu"), {"until": ["?"]}
    assert model.generate_until([Instance("generate_until", {}, ("the cat", options), 0)]) == [WORDS[0]]


def test_errors_name_the_argument(tmp_path):
    model = MambaLM(vocab_size=32, d_model=8, n_layer=1)
    with pytest.raises(ValueError, match="tokenizer"):
        PackMambaLM(model)
    with pytest.raises(ValueError, match="tokenizer"):
        PackMambaLM(model, tokenizer=str(tmp_path))
    with pytest.raises(ValueError, match="model_args: .*dtpye"):
        PackMambaLM(model, dtpye="float64")


def test_rolling_scores_begin_once(tmp_path, monkeypatch):
    """The tokenizer of a run's folder adds a begin token by itself."""
    write_tokenizer(tmp_path, "bytes", "<s>", "</s>")
    write_template(tmp_path, "<s>", 256)
    adapter = PackMambaLM(MambaLM(vocab_size=258, d_model=8, n_layer=1), str(tmp_path))
    assert adapter.tok_encode("ab") == [256, 97, 98]
    asked = []
    monkeypatch.setattr(adapter, "_loglikelihood_tokens", lambda keyless: asked.extend(keyless) or [(0.0, True)])
    adapter.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("ab",), 0)])
    assert asked == [(None, [256], [97, 98])]


def test_the_command_line_names_filters_and_refuses_groups(checkpoint, tasks, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    command = ["eval", str(checkpoint), f"include_path={tasks.include_path}", f"output={tmp_path}/out", "device=cpu"]
    assert cli.main([*command, "tasks=[ours_generation]"]) == 0
    (record,) = read_records(tmp_path / "out")
    assert {"exact_match,whole", "exact_match,cat"} < record["metrics"].keys()
    assert cli.main([*command, "tasks=[ours_generation]"]) == 0
    assert len(read_records(tmp_path / "out")) == 2, "a user's own task may have changed"
    assert cli.main([*command, "tasks=[ours]"]) == 2
    assert "tasks: expected tasks and no group of them, got 'ours'" in capsys.readouterr().err


def test_tasks_are_evaluated_in_training_too_without_changing_it(tasks, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    options = {"ours_choices": {"include_path": tasks.include_path, "limit": 6}}
    keys = ["evaluations=[ours_choices]", f"evaluation_options={json.dumps(options)}", "trainer.evaluate_every=3"]
    config = tiny_config(tmp_path, *keys, "data.end_token=</s>", "seed=7")
    record = fit(config, progress=False)
    assert torch.initial_seed() == 7, "the harness seeds all generators, the run's stay"
    points = record["curves"]["evaluations"]
    assert [point["step"] for point in points] == [3, 6]
    keys = [f"include_path={tasks.include_path}", "limit=6", "tasks=[ours_choices]", f"output={tmp_path}/out"]
    assert cli.main(["eval", str(run_folder(config)), *keys, "device=cpu"]) == 0
    (alone,) = read_records(tmp_path / "out")
    for name, value in alone["metrics"].items():
        assert record["metrics"][f"ours_choices.{name}"] == points[-1][f"ours_choices.{name}"] == value


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["evaluations=[perplexty]"], "evaluations: .*did you mean 'perplexity'"),
        (["evaluations=[arc_easy]", "evaluation_options.arc_easy.limt=3"], "evaluation_options.arc_easy: .*'limt'"),
        (["evaluations=[arc_easy]", "evaluation_options.arc_easy.limit=few"], "arc_easy.limit: .*'few'"),
        (["evaluations=[arc_easy]", "evaluation_options.arc_easy.include_path=no"], "include_path: expected a folder"),
        (["evaluations=[lost]", "data.end_token=</s>", "evaluation_options.lost.include_path={lost}"], "read 'lost': "),
        (["evaluations=[arc_easy]", "data.end_token=null"], "data.end_token: .*arc_easy"),
        (["evaluations=[arc_easy]", "data.source=synthetic", "data.path=null"], "evaluations: .*no text"),
    ],
)
def test_wrong_names_and_options_of_tasks_are_refused(tmp_path, words, expected):
    """Before a corpus is read; the documents of the task lost are nowhere."""
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "none.jsonl")}}}
    lost = {"task": "lost", **files, "test_split": "test", **TASKS["choices"]}
    (tmp_path / "lost.yaml").write_text(json.dumps(lost))
    words = [word.format(lost=tmp_path) if "{lost}" in word else word for word in words]
    with pytest.raises(ConfigError, match=expected):
        fit(tiny_config(tmp_path, *words), progress=False)
