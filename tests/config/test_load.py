"""Reading configurations: YAML files, overrides, plugins; each error names its key, in one line."""

import sys

import pytest

from packmamba.config import CONFIGS, Config, ConfigError, load_config, validate
from packmamba.data.packing import STRATEGIES
from packmamba.training.lit_module import make_model


def test_overrides_come_after_the_file(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("name: mine\noptimizer: {lr: 1e-3, betas: [0.9, 0.99]}\ndata: {streams: 1, row_length: 512}\n")
    config = load_config(file, ["optimizer.lr=3e-4", "data.row_length=256"])
    assert (config.name, config.optimizer.lr, config.data.row_length) == ("mine", 3e-4, 256)
    assert config.optimizer.betas == [0.9, 0.99]


def test_a_run_is_named_without_seed_and_id(tmp_path):
    for name in ("base-seed0-1a", "other-seed0-2b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "configuration.yaml").touch()
    config = load_config(None, [f"trainer.init_from={tmp_path}/base"])
    assert config.trainer.init_from == f"{tmp_path}/base-seed0-1a"


def test_a_model_is_named_by_its_size():
    assert (load_config(None, ["model=1.4b", "model.n_layer=2"]).model.d_model) == 2048
    with pytest.raises(ConfigError, match="^model: .*did you mean '130m'"):
        load_config(None, ["model=130n"])


def test_fine_tuning_needs_a_checkpoint_whose_tokenizer_it_takes():
    file = CONFIGS / "fine_tune.yaml"
    with pytest.raises(ConfigError, match="^model.pretrained: expected a value"):
        load_config(file)
    assert load_config(file, ["model.pretrained=my/model"]).data.tokenizer == "my/model"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected a YAML file"),
        ("", "expected keys and values, got an empty file"),
        ("- a\n", "expected keys and values, got a list"),
        ("a: [1\n", "expected a YAML file"),
        ("a:\n\tb: 1\n", "expected a YAML file, .*; indent by spaces, not tabs$"),
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
        ("max_steps", "expected key=value"),
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
    code = "from packmamba.data.packing import STRATEGIES\nSTRATEGIES.update(mine=STRATEGIES['greedy'], plain=print)\n"
    (tmp_path / "my_strategy.py").write_text(code)
    monkeypatch.setattr("packmamba.data.packing.STRATEGIES", dict(STRATEGIES))
    assert load_config(None, ["plugins=[my_strategy]", "data.strategy=mine"]).plugins == ["my_strategy"]
    with pytest.raises(ConfigError, match="^data.strategy: expected a packing.Strategy"):
        load_config(None, ["plugins=[my_strategy]", "data.strategy=plain"])
    (tmp_path / "broken.py").write_text("def")
    for plugin in ("no_such_module", "broken"):
        with pytest.raises(ConfigError, match=f"^plugins: cannot import '{plugin}'"):
            load_config(None, [f"plugins=[{plugin}]"])


CARRY = ["trainer.boundary=carry", "data.strategy=concat_split"]
CARRIES = " ".join(CARRY)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [*CARRY, "data.streams=4"],
        [*CARRY, "data.streams=8", "data.batching=stream", "data.row_length=1024", "data.tokens_per_step=4096"],
        ["data.strategy=padded", "data.row_length=null"],
        ["trainer.loggers=[csv,lightning.pytorch.loggers.CometLogger]", "trainer.callbacks=[mine.Callback]"],
        ["trainer.cuda_graphs=true", "trainer.precision=bf16-mixed"],
        ["evaluations=[perplexity,mqar]", "evaluation_options.mqar.num_pairs=4", "trainer.evaluate_every=5"],
        ["optimizer.grad_clip=null", "trainer.leakcheck_every=null", "model.dt_rank=8"],
    ],
)
def test_valid(overrides):
    config = load_config(None, overrides)
    assert validate(config) is config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("trainer.max_steps=1e3", "trainer.max_steps: expected an integer, got 1000.0 in .*; write 1000$"),
        ("data.row_length=-1", "^data.row_length: expected at least 1, got -1; set null: the longest"),
        ("trainer.max_steps=null", "trainer.max_steps: expected a value, got null"),
        ("optimizer.lr=fast", "optimizer.lr: expected a number"),
        ("optimizer.lr=.nan", "optimizer.lr: expected above 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas: expected two numbers"),
        ("optimizer.final_lr_fraction=1.5", "optimizer.final_lr_fraction: expected at least 0 and at most 1"),
        ("trainer.deterministic=maybe", "trainer.deterministic: expected true or false"),
        ("trainer.loggers=csv", "trainer.loggers: expected a list"),
        ("trainer.precision=bf16", "trainer.precision: .*bf16-mixed"),
        ("model.dt_rank=some", "model.dt_rank: expected auto or an integer"),
        ("model.mixer_options.d_stat=3", "'model.mixer_options.d_stat'"),
        ("data=3", "data: expected keys and values"),
        ("data.task_options=[3]", "data: expected keys and values"),
        ("data.strategy=greedly", "data.strategy: .*did you mean 'greedy'"),
        ("data.streams=2", "data.streams: expected 1, unless data.strategy=concat_split"),
        ("data.row_length=null", "data.row_length: expected an integer"),
        ("data.stagger=true", "data.stagger: "),
        ("data.shuffle_steps=3", "data.shuffle_steps: "),
        ("data.source=text data.subset=a", "data.subset: expected null, unless data.source=huggingface"),
        ("data.source=text data.loss_on=all", 'data.loss_on: expected "completion", unless data.source=jsonl'),
        ("data.validation_fraction=0", "data.validation_fraction: "),
        ("data.streaming=true data.overlong=error", "data.overlong: "),
        ("data.overlong=truncate data.cut_documents=2048", "data.cut_documents: expected at most data.row_length"),
        ('data.streaming=true data.sources=[{"source":"jsonl","path":"a","weight":1}]', "data.streaming: "),
        ("optimizer.name=muon trainer.strategy=fsdp2 trainer.devices=2", "optimizer.name: expected adamw with fsdp2"),
        ("trainer.boundary=carry", "data.strategy: expected concat_split"),
        (f"{CARRIES} data.streams=3 trainer.devices=2", "data.streams: .*2 devices"),
        ("trainer.boundary=state_passing data.strategy=concat_split", "data.streams: expected at least 2 rows a batch"),
        (f"{CARRIES} data.batching=stream data.row_length=96", "data.tokens_per_step: "),
        ("evaluations=[mqar] evaluation_options.passkey.length=3", "'evaluation_options.passkey'"),
        ("evaluations=[mqar] evaluation_options.mqar=3", "evaluation_options: expected keys and values"),
        ("trainer.evaluate_every=3", "trainer.evaluate_every: expected null, unless with evaluations"),
        ("trainer.cuda_graphs=true trainer.devices=2", "trainer.cuda_graphs: expected false, unless on one GPU"),
        ("trainer.context_parallel=2", "trainer.context_parallel: expected 1, unless on multiples of as many devices"),
        ("trainer.context_parallel=2 trainer.devices=2 trainer.boundary=leak", "trainer.context_parallel: expected 1"),
        ("trainer.context_parallel=2 trainer.devices=2 trainer.mean_over=rows", "trainer.context_parallel: expected 1"),
        ("trainer.samples=2 trainer.strategy=fsdp2 trainer.devices=2", "trainer.samples: expected 0"),
        ("ops.backend=gpu", "ops.backend: expected one of auto"),
        (
            "ops.backend=mamba_ssm model.mixer=mamba2",
            "ops.backend: expected auto, reference, cpu or cuda with model.mixer",
        ),
    ],
)
def test_invalid(overrides, message):
    with pytest.raises(ConfigError, match=f"^(unknown key )?{message}") as caught:
        load_config(None, overrides.split())
    assert "\n" not in str(caught.value)


def test_a_configuration_built_in_code_is_checked():
    config = Config()
    config.trainer.max_steps = 0
    with pytest.raises(ConfigError, match="^trainer.max_steps: "):
        validate(config)


@pytest.mark.parametrize(("mixer", "default"), [("mamba1", 16), ("mamba2", 128), ("mamba3", 128)])
def test_states_are_the_mixers_default_unless_they_are_given(mixer, default):
    for states, expected in ((None, default), (16, 16), (8, 8)):
        keys = [f"model.mixer={mixer}", "model.d_model=64", *([] if states is None else [f"model.d_state={states}"])]
        assert make_model(load_config(None, keys), vocab_size=10).backbone.layers[0].mixer.d_state == expected
