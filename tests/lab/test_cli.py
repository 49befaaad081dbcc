"""Each command at tiny size, help, exit statuses and typos."""

import os
import shlex
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from tqdm import tqdm

import run
from made_records import throughput, training
from packmamba import MambaLM
from packmamba.config import load_config
from packmamba.errors import UserError
from packmamba.lab import cli
from packmamba.lab.records import append_record, read_records, write_sweep
from packmamba.lab.sweep import load_sweep
from processes import ROOT
from runs import tiny_config, write_config

BYTES = ["data.begin_token=<s>", "data.end_token=</s>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(folder):
    """Folders of two runs of the same documents, in rows that leak and without packing."""
    runs = {}
    for name, keys in {"leaks": ["trainer.boundary=leak_conv"], "single": ["data.strategy=single"]}.items():
        file = write_config(folder / f"{name}.yaml", tiny_config(folder, f"name={name}", *keys, *BYTES))
        assert cli.main(["train", str(file), "trainer.max_steps=2", "trainer.loggers=[]"]) == 0
        (runs[name],) = (folder / "runs").glob(f"{name}-seed0-*")
    return runs


def test_train_says_what_it_begins_with_and_repeats_nothing(folder, trained, tmp_path, capsys):
    command = ["train", str(folder / "single.yaml"), "name=again", "optimizer.schedule_steps=4", "trainer.loggers=[]"]
    assert cli.main([*command, "trainer.max_steps=2"]) == 0
    shown = capsys.readouterr()
    assert "Loading" in shown.out and "48 documents with 794 tokens; validation on 12 of 12 held out" in shown.err
    assert "parameters; backend cpu; 2 steps, 0.22 epochs; run" in shown.err and "from step" not in shown.err
    assert cli.main([*command, "trainer.max_steps=4"]) == 0 and "from step 2\n" in capsys.readouterr().err
    assert cli.main([*command, "trainer.max_steps=4"]) == 0
    shown = capsys.readouterr().err
    assert "already done" in shown and "its weights" not in shown
    assert cli.main([*command, "trainer.max_steps=2"]) == 0
    assert "its weights are of step 4\n" in capsys.readouterr().err
    assert cli.main(["export", f"{folder}/runs/again", str(tmp_path / "a")]) == 0, "the newest run of this name"
    assert cli.main([*command, "name=refused", "data.overlong=error", "data.cut_at_steps=false"]) == 2
    assert "data.row_length" in capsys.readouterr().err and not list((folder / "runs").glob("refused*"))


def test_shipped_configurations_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: configs/train.yaml\narms: {a: {}}\n")
    assert load_sweep("mine.yaml")[1][0].data.overlong == load_config("configs/train.yaml").data.overlong == "split"


def test_tokenize_then_train(tmp_path, monkeypatch, capsys):
    """Training documents of every source make the same file each time, which gives back any text."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for word in ("ab", "cd"):
        text = f"{word}{word} <|im_end|>"
        lines = [f'{{"split": "{split}", "text": "{text}{split}"}}\n' for split in ("train", "validation")]
        (tmp_path / f"{word}.jsonl").write_text("".join(lines * 3))
    sources = "data.sources=[{source: splits, path: ab.jsonl, weight: 1}, {source: splits, path: cd.jsonl, weight: 2}]"
    keys = [sources, "vocab_size=300", "special_tokens=[<|im_end|>]", "data.chat_template=chatml"]
    statuses = [cli.main(["tokenize", *keys, f"output={name}"]) for name in "aba"]
    shown = capsys.readouterr()
    assert statuses == [0, 0, 2] and "output: expected a new or empty folder" in shown.err
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained("a")
    learned = tokenizer.get_vocab().keys()
    assert {"abab", "cdcd", "train"} < learned and not {"validation", "im", "im_end"} & learned
    assert tokenizer.decode(tokenizer.encode("abab \t\0é𝄞 <s")) == "abab \t\0é𝄞 <s"
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [2] and "<|im_end|>" in tokenizer.chat_template
    tiny = "model.d_model=8 data.row_length=16 data.tokens_per_step=16 trainer.max_steps=1 trainer.loggers=[]".split()
    assert cli.main([*shlex.split(shown.out.rpartition("run.py ")[2]), *tiny]) == 0, "the command that it printed"


def test_report_of_runs_trained_apart(trained, tmp_path, capsys, undrawn):
    folders = [str(path) for path in trained.values()]
    assert cli.main(["report", *folders, "baseline=single", f"output={tmp_path}/both"]) == 0
    assert "single" in capsys.readouterr().out and (tmp_path / "both/report.html").is_file()
    assert cli.main(["report", *folders, "baseline=singel"]) == 2
    assert "baseline" in capsys.readouterr().err
    for made in [throughput("padded", 9.0), *(training(arm, n) for arm in ("padded", "single") for n in (0, 1))]:
        append_record(tmp_path / "records.jsonl", made)
    write_sweep(tmp_path, "mine", {"padded": [0, 1, 2], "single": [0, 1]}, baseline="padded", margin=1.0)
    for baseline, is_ruled in (("single", False), ("padded", True)):
        assert cli.main(["report", str(tmp_path), f"baseline={baseline}"]) == 0
        shown = capsys.readouterr().out
        assert "2 of 3, 1 missing" in shown and ("verdict" in shown) == is_ruled


def test_eval(trained, tmp_path, capsys):
    command = ["eval", str(trained["single"]), "tasks=[perplexity,parity]", "examples=3"]
    assert cli.main(command) == 0 and cli.main(command) == 0
    records = read_records(trained["single"] / "evaluation")
    assert len(records) == 2, "a finished evaluation is not repeated"
    losses = {record["config"]["evaluation"]["name"]: record["metrics"] for record in records}
    expected = read_records(trained["single"])[0]["metrics"]["val_loss"]
    assert losses["perplexity"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert len(list((trained["single"] / "evaluation/items").iterdir())) == 2
    other = shutil.copytree(trained["single"], tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text().replace("{", '{"norm_epsilon": 0.1,', 1))
    assert cli.main(["eval", str(other), *command[2:], f"output={trained['single']}/evaluation"]) == 0
    assert len(read_records(trained["single"] / "evaluation")) == 4, "the same weights, another model"
    for key, named in (("options.mqar.num_pairs=3", "options.mqar"), ("limit=3", "limit: expected null")):
        assert cli.main([*command, key]) == 2 and named in capsys.readouterr().err


def test_generate_and_export(trained, tmp_path, capsys):
    run = str(trained["single"])
    assert cli.main(["generate", run, "a = b", "max_new_tokens=5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("a = b") and cli.main(["generate", run, "a = b", "max_new_tokens=5", "device=cpu"]) == 0
    assert capsys.readouterr().out == text
    assert cli.main(["export", run, str(tmp_path / "exported")]) == 0
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= set(os.listdir(tmp_path / "exported"))
    assert cli.main(["export", run]) == 0 and (trained["single"] / "huggingface/config.json").is_file()
    assert cli.main(["export", str(tmp_path / "exported"), str(tmp_path / "again")]) == 0
    folders = trained["single"], tmp_path / "exported", tmp_path / "again"
    for file, part in (("tokenizer.json", '"TemplateProcessing"'), ("tokenizer_config.json", '"bos_token"')):
        kept = [(folder / file).read_text() for folder in folders]
        assert part in kept[0] and kept[0] == kept[1] == kept[2]
    assert cli.main(["generate", run, "a", "top_p=0.5"]) == 2


def test_leakcheck(trained, tmp_path, capsys):
    """A run is checked with its boundary scheme, a published checkpoint with zero states."""
    assert cli.main(["leakcheck", str(trained["leaks"])]) == 1
    assert "trainer.boundary=leak_conv" in capsys.readouterr().out
    assert cli.main(["leakcheck", str(trained["single"]), "lengths=[3,4]", "dtype=float64"]) == 0
    torch.manual_seed(0)
    MambaLM(40, 16, 2).save_pretrained(tmp_path / "theirs", format="huggingface")
    assert cli.main(["leakcheck", str(tmp_path / "theirs")]) == 1
    assert cli.main(["leakcheck", str(tmp_path / "theirs"), "boundaries=seq_idx", "patch=true"]) == 0


GPT2 = 'state_spaces {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}'


@pytest.mark.parametrize(
    ("format", "word", "begins"),
    [
        ("huggingface", "device=nowhere", "device: "),
        ("huggingface", "device=cpu", "FOLDER/model.safetensors: expected a file of weights"),
        ("huggingface", "boundaries=typo", "boundaries: expected position_ids"),
        (GPT2, "patch=true", "model: expected MambaForCausalLM"),
        (GPT2, "device=cpu", "FOLDER/pytorch_model.bin: expected a file of weights"),
        (GPT2[:-1], "device=cpu", "FOLDER/config.json: expected JSON"),
        ("state_spaces", "patch=true", "patch=true: expected a Hugging Face checkpoint"),
        ("state_spaces", "boundaries=seq_idx", "boundaries=seq_idx: expected a Hugging Face checkpoint"),
    ],
)
def test_leakcheck_refuses_in_one_line(format, word, begins, tmp_path, capsys):
    """The weights are what git leaves without git-lfs; keys are checked before they are read."""
    format, _, published = format.partition(" ")
    MambaLM(40, 16, 1).save_pretrained(tmp_path, format=format)
    if published:
        (tmp_path / "config.json").write_text(published)
    weights = next(file for file in tmp_path.iterdir() if file.name != "config.json")
    weights.write_text("version https://git-lfs.github.com/spec/v1")
    assert cli.main(["leakcheck", str(tmp_path), word]) == 2
    line = capsys.readouterr().err.splitlines()[-1].replace(str(tmp_path), "FOLDER")
    assert line.startswith(f"packmamba: error: {begins}")


def test_leakcheck_says_how_to_install_transformers(tmp_path, capsys, monkeypatch):
    MambaLM(40, 16, 1).save_pretrained(tmp_path, format="huggingface")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["leakcheck", str(tmp_path)]) == 2
    assert "transformers; pip install 'packmamba[integrations]'" in capsys.readouterr().err


def test_kernels(capsys):
    assert cli.main(["kernels"]) == 0
    output = capsys.readouterr().out
    assert torch.__version__ in output and "On cpu, ops.backend=auto runs cpu" in output


def test_help_and_version(capsys):
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == "packmamba 0.1.0\n"
    assert cli.main(["--help"]) == 0 and cli.main([]) == 2
    output = capsys.readouterr().out
    assert all(f"\n  {command}" in output for command in cli.COMMANDS)
    for command in cli.COMMANDS:
        assert cli.main([command, "--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"\n  {key}=" in output for key in ("data.strategy", "optimizer.lr", "tasks")) and "leak_conv" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "did you mean 'train'?"),
        (["train", "--lr=3"], "keys have no dashes"),
        (["train", "a.yaml", "b.yaml"], "expected a YAML file, and key=value"),
        (["train", "nowhere.yaml"], "nowhere.yaml: expected a YAML file, got none; see configs/"),
        (["train", "configs"], "configs: expected a YAML file, got a folder"),
        (["train", "configs/demo.yaml"], "run.py sweep configs/demo.yaml"),
        (["train", "data.source=text", "data.path=/nowhere"], "data.path"),
        (["tokenize", "vocab_size=257"], "vocab_size: expected at least 258"),
        (["tokenize", "data.source=synthetic"], "data.source: expected documents of text"),
        (["sweep"], "expected a YAML file"),
        (["sweep", "configs/demo.yaml", "jobz=2"], "did you mean 'jobs'?"),
        (["eval", "nowhere"], "nowhere"),
        (["generate", "nowhere"], "expected the folder of a run or checkpoint, and a text"),
        (["report", "nowhere"], "expected a folder or an experiment"),
        (["report", "configs"], "configs: expected a folder with record.json"),
        (["leakcheck", "configs"], "configs"),
        (["bench", "packign"], "did you mean 'packing'?"),
        (["kernels", "bild"], "expected nothing, or build"),
    ],
)
def test_an_error_is_one_line(words, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert run.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("run.py: error: ") and message in error and error.count("\n") == 1


@pytest.mark.slow
def test_an_error_comes_before_weights_and_slow_imports(tmp_path):
    """A wrong word is answered at once: no file of weights is there, and nothing slow beside
    PyTorch is imported.
    """
    MambaLM(40, 16, 1).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    folder = str(tmp_path)
    wrong = {
        ("eval", folder, "tasks=[]"): "tasks: ",
        ("train", "data.sourse=text"): "unknown key 'data.sourse'",
        ("train", "data.source=texts"): "data.source: ",
        ("train", "trainer.boundary=resett"): "trainer.boundary: ",
        ("eval", folder, "taskz=[parity]"): "unknown key 'taskz'",
        ("eval", folder, "tasks=[parity]", "options.parity.lenth=3"): "options.parity: ",
        ("eval", folder, "tasks=[parity]", "device=nowhere"): "device: ",
        ("eval", f"{folder}/nowhere"): "nowhere: ",
        ("generate", folder, "a", "top_q=1"): "unknown key 'top_q'",
        ("generate", folder, "a"): f"{folder}: expected a model of text",
        ("generate", f"{folder}/nowhere", "a"): "nowhere: ",
        ("export", folder, folder): f"{folder}: expected a new or empty folder",
        ("export", folder, "dtype=float64"): "export: expected no keys",
        ("export", f"{folder}/nowhere"): "nowhere: ",
        ("leakcheck", folder, "lenghts=[3]"): "unknown key 'lenghts'",
        ("leakcheck", f"{folder}/nowhere"): "nowhere: ",
    }
    slow = {"lightning", "torchmetrics", "lm_eval", "transformers", "datasets", "pandas", "scipy", "matplotlib"}
    code = f"import sys; from packmamba.lab import cli; print(*[cli.main([*words]) for words in {[*wrong]}])"
    code += f"; print({slow} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    for line, message in zip(done.stderr.splitlines(), wrong.values(), strict=True):
        assert message in line
    assert done.stdout.endswith("2 " * (len(wrong) - 1) + "2\nset()\n")


@pytest.mark.slow
def test_an_unknown_task_is_named_before_weights_are_read(tmp_path, capsys):
    """With lm-evaluation-harness, which takes seconds to import, or without."""
    MambaLM(40, 16, 1).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    for task, message in (("arc_eas", "tasks: "), ("mqarr", "did you mean 'mqar'?")):
        assert cli.main(["eval", str(tmp_path), f"tasks=[{task}]"]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_an_error_does_not_stand_on_the_line_of_a_bar(monkeypatch, capsys):
    bars = []

    def fail(words):
        bars.append(tqdm([1, 2], file=sys.stderr))
        raise UserError("wrong")

    monkeypatch.setitem(cli.COMMANDS, "kernels", (fail, "", None))
    assert cli.main(["kernels"]) == 2
    assert capsys.readouterr().err.endswith("\npackmamba: error: wrong\n")


@pytest.mark.slow
def test_interrupted_and_unread(monkeypatch, capsys):
    for raised, status, message in (
        (KeyboardInterrupt, 130, "the same command resumes"),
        (OSError(28, "No space left on device", "x"), 1, "x: expected space"),
        (OSError(13, "Permission denied", "x"), 2, "Permission denied: 'x'"),
        (ModuleNotFoundError("No module named 'datasets'", name="datasets"), 2, "'datasets'"),
        (RuntimeError("CUDA out of memory"), 2, "reduce data.max_tokens_per_batch"),
    ):
        monkeypatch.setitem(cli.COMMANDS, "kernels", (Mock(side_effect=raised), "", None))
        assert cli.main(["kernels"]) == status and message in capsys.readouterr().err
    code = "from packmamba.lab import cli; cli.main(['train', '--help'])"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b"", "as of | head"
