"""Test that each error of a configuration names its key, in one line."""

import pytest

from packmamba.config import Config, ConfigError, load_config, validate

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
        ("trainer.max_steps=1e3", "trainer.max_steps: expected an integer, got 1000.0"),
        ("trainer.max_steps=null", "trainer.max_steps: expected a value, got null"),
        ("optimizer.lr=fast", "optimizer.lr: expected a number"),
        ("optimizer.lr=.nan", "optimizer.lr: expected above 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas: expected two numbers"),
        ("optimizer.final_lr_fraction=1.5", "optimizer.final_lr_fraction: expected at least 0 and at most 1"),
        ("trainer.deterministic=maybe", "trainer.deterministic: expected true or false"),
        ("trainer.loggers=csv", "trainer.loggers: expected a list"),
        ("trainer.precision=bf16", "trainer.precision: .*did you mean 'bf16-true'"),
        ("model.dt_rank=some", "model.dt_rank: expected auto or an integer"),
        ("model.mixer_options.d_stat=3", "'model.mixer_options.d_stat'"),
        ("data=3", "data: expected keys and values"),
        ("data.task_options=[3]", "data: expected keys and values"),
        ("data.strategy=greedly", "data.strategy: .*did you mean 'greedy'"),
        ("data.strategy=best_fit", "data.strategy: .*it is best_fit_decreasing now"),
        ("data.overlong=pieces", "data.overlong: .*it is split now"),
        ("trainer.boundary=noise", "trainer.boundary: .*it is fitted_noise now"),
        ("data.streams=2", "data.streams: expected 1, unless data.strategy=concat_split"),
        ("data.row_length=null", "data.row_length: expected an integer"),
        ("data.stagger=true", "data.stagger: "),
        ("data.shuffle_steps=3", "data.shuffle_steps: "),
        ("data.unit=files", "data.unit: expected null"),
        ("data.validation_fraction=0", "data.validation_fraction: "),
        ("trainer.boundary=carry", "data.strategy: expected concat_split"),
        (f"{CARRIES} data.streams=3 trainer.devices=2", "data.streams: .*2 devices"),
        ("trainer.boundary=state_passing data.strategy=concat_split", "data.streams: expected at least 2 rows a batch"),
        (f"{CARRIES} data.batching=stream data.row_length=96", "data.tokens_per_step: "),
        ("evaluations=[mqar] evaluation_options.passkey.length=3", "'evaluation_options.passkey'"),
        ("evaluations=[mqar] evaluation_options.mqar=3", "evaluation_options: expected keys and values"),
        ("trainer.evaluate_every=3", "trainer.evaluate_every: expected null, unless with evaluations"),
        ("trainer.strategy=fsdp2 trainer.average_snapshots=2", "trainer.average_snapshots: expected 1"),
        ("trainer.cuda_graphs=true trainer.devices=2", "trainer.cuda_graphs: expected false, unless on one GPU"),
        ("ops.backend=gpu", "ops.backend: expected one of auto"),
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
