"""Reading configurations: YAML files, overrides, shipped files, plugins."""

import sys

import pytest

from packmamba.config import CONFIGS, ConfigError, load_config
from packmamba.data.packing import STRATEGIES
from packmamba.training.sweep import load_sweep


def test_overrides_come_after_the_file(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("name: mine\noptimizer: {lr: 1e-3, betas: [0.9, 0.99]}\ndata: {streams: 1, row_length: 512}\n")
    config = load_config(file, ["optimizer.lr=3e-4", "data.row_length=256"])
    assert (config.name, config.optimizer.lr, config.data.row_length) == ("mine", 3e-4, 256)
    assert config.optimizer.betas == [0.9, 0.99]


def test_a_model_is_named_by_its_size():
    assert (load_config(None, ["model=1.4b", "model.n_layer=2"]).model.d_model) == 2048
    with pytest.raises(ConfigError, match="^model: .*did you mean '130m'"):
        load_config(None, ["model=130n"])


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(file):
    if "arms:" in file.read_text():
        load_sweep(file)
    elif file.parent.name != "model":
        load_config(file)
    else:
        load_config(None, [f"model={file.stem}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected a YAML file"),
        ("", "expected keys and values, got an empty file"),
        ("- a\n", "expected keys and values, got a list"),
        ("a: [1\n", "expected a YAML file"),
        ("arms: {a: {}}\n", "expected a file for train, got one for sweep"),
        ("trainer: {max_steps: many}\n", r"^trainer.max_steps: expected an integer, got \"many\" in .*train.yaml"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    file = tmp_path / "train.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.lr=3", "'data.lr' .*did you mean 'optimizer.lr'"),
        ("lr=3", "'lr' .*did you mean 'optimizer.lr'"),
        ("trainr.max_steps=3", "'trainr' .*did you mean 'trainer'"),
        ("data.row_lenght=3", "'data.row_lenght' .*did you mean 'data.row_length'"),
        ("experiment=runs/mine", "'experiment' .*rename it to output"),
        ("data.slots_per_batch=9", "'data.slots_per_batch' .*rename it to data.max_tokens_per_batch"),
        ("max_steps", "expected key=value"),
        ("=3", "expected key=value"),
        ("data.path=[a", "expected key=value"),
        ("data.path=${nowhere}", "^data.path: "),
    ],
)
def test_a_wrong_key_is_named(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [override])


def test_plugins_are_imported_before_names_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = "from packmamba.data.packing import STRATEGIES\nSTRATEGIES['mine'] = STRATEGIES['greedy']\n"
    (tmp_path / "my_strategy.py").write_text(code)
    monkeypatch.setattr("packmamba.data.packing.STRATEGIES", dict(STRATEGIES))
    assert load_config(None, ["plugins=[my_strategy]", "data.strategy=mine"]).plugins == ["my_strategy"]
    with pytest.raises(ConfigError, match="^plugins: cannot import 'no_such_module'"):
        load_config(None, ["plugins=[no_such_module]"])
