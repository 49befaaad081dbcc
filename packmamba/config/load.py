"""Read configurations from YAML files and ``key=value`` overrides, and validate them once."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from packmamba.config.schema import MIXER_KEYS, Config, ModelConfig
from packmamba.errors import COMMAND, ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = next(path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir())
"""Shipped configurations: package data of a wheel, or the top of a checkout."""
CONFIGURATION = "configuration.yaml"
"""A run's configuration, in its folder."""
OLD_KEYS: dict[str, tuple[Any, str]] = {
    "experiment": (None, "rename it to output"),
    "trainer.checkpoint_async": (True, "remove it"),
}
"""Removed keys of a run: the value that is ignored, as it was the default, and what to do with another."""
OLD_VALUES: dict[tuple[str, str], str] = {}
"""Removed values, as (key, value): what to do."""
TYPES = {
    "to Integer": "an integer",
    "to Float": "a number",
    "bool": "true or false",
    "to string": "text",
    "List": "a list such as [a,b]",
    "Dict": "keys and values",
    "None": "a value",
    "subclass": "keys and values",
    "container": "keys and values, or a list, as in the defaults",
}
"""Words of OmegaConf's errors: the type that was expected."""

Schema = TypeVar("Schema")


def load_config(path: str | Path | None = None, overrides: Iterable[str] | None = None) -> Config:
    """Load a training configuration; see ``load``."""
    return load(Config, path, overrides or (), "train")


def load(schema: type[Schema], path: Any = None, overrides: Iterable[str] = (), command: str | None = None) -> Schema:
    """Build ``schema`` from its defaults, a YAML file and ``key=value`` overrides, and validate it.

    Args:
        command: the command that the file must be for: train, sweep or bench.

    Raises:
        ConfigError: naming the key.
    """
    return resolve(schema, read_layers(path, overrides, command))


def read_layers(path: Any, overrides: Iterable[str], command: str | None = None) -> list[tuple[DictConfig, str]]:
    """Read a file and overrides; an override that lists names of a mapping's entries selects them: ``arms=[single,padded]``."""
    file = OmegaConf.create() if path is None else read_yaml(path, command)
    return [(file, str(path)), *((_select(file, parse_override(one)), f"'{one}'") for one in overrides)]


def _select(file: DictConfig, override: DictConfig) -> DictConfig:
    for key in map(str, override):
        known, names = file.get(key), override.get(key)
        if isinstance(known, DictConfig) and isinstance(names, ListConfig):
            if unknown := [name for name in names if name not in known]:
                raise ConfigError(f"{key}: expected some of {', '.join(map(str, known))}, got {shown(unknown[0])}")
            file.pop(key)
            override[key] = {name: known[name] for name in names}
    return override


def resolve(schema: type[Schema], layers: Iterable[tuple[DictConfig, str]]) -> Schema:
    """Merge layers, each with its name in errors, over the defaults of ``schema`` and validate the result."""
    config = copy.deepcopy(_defaults(schema))
    for update, origin in layers:
        if isinstance(update.get("model"), str) and isinstance(config.get("model"), DictConfig):
            sizes = {path.stem: path for path in sorted((CONFIGS / "model").glob("*.yaml"))}
            if update.model not in sizes:
                raise ConfigError(
                    f"model: expected a known size, got '{update.model}' in {origin}{suggest(update.model, sizes)}"
                )
            update = OmegaConf.merge(update, {"model": read_yaml(sizes[update.model])})
        for old, (ignored, action) in OLD_KEYS.items() if schema is Config else ():
            section, _, name = old.rpartition(".")
            values = update.get(section) if section else update
            if isinstance(values, DictConfig) and name in values and values.pop(name) != ignored:
                raise ConfigError(f"{old}: expected no such key, got it in {origin}; {action}")
        try:
            config = OmegaConf.unsafe_merge(config, update)
        except ConfigKeyError as error:
            raise ConfigError(
                f"unknown key '{error.full_key}' in {origin}{_nearest_key(error.full_key, config)}"
            ) from None
        except (OmegaConfBaseException, TypeError) as error:
            text, key = str(error).splitlines()[0], getattr(error, "full_key", None) or next(iter(update))
            expected = next((f"expected {kind}" for word, kind in TYPES.items() if word in text), text)
            raise ConfigError(f"{key}: {expected}, got {shown(OmegaConf.select(update, key))} in {origin}") from None
    try:
        return validate(OmegaConf.to_object(config))
    except OmegaConfBaseException as error:  # an interpolation ${...}
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None


@functools.cache
def _defaults(schema: type) -> DictConfig:
    return OmegaConf.structured(schema)


def _nearest_key(key: str, known: DictConfig) -> str:
    """Return a hint: the nearest key of the same section, the same key of another section, or all keys of the section."""
    *sections, name = key.split(".")
    elsewhere = [
        f"{section}.{name}" for section in known if isinstance(known[section], DictConfig) and name in known[section]
    ]
    siblings = OmegaConf.select(known, ".".join(sections)) if sections else known
    hint = suggest(name, siblings, "".join(f"{section}." for section in sections))
    return f"; did you mean '{elsewhere[0]}'?" if elsewhere and "known" in hint else hint


def validate(config: Schema) -> Schema:
    """Import plugins, check each key, then the rules between keys; return the configuration.

    Raises:
        ConfigError: naming the key.
    """
    import_plugins(getattr(config, "plugins", ()))
    sections = list(sections_of(config))
    keys = [(prefix, section, key) for prefix, section in sections for key in dataclasses.fields(section)]
    for prefix, section, key in sorted(keys, key=lambda entry: isinstance(_limits(entry[2]).get("choices"), str)):
        _check(prefix + key.name, getattr(section, key.name), **_limits(key))
    for prefix, section in sections:
        for problem in section.problems() if hasattr(section, "problems") else ():
            raise ConfigError(problem if problem.startswith(prefix) else prefix + problem)
    if isinstance(config, Config):
        _check_together(config)
    return config


def sections_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dataclasses of a configuration, each with the prefix of its keys."""
    yield prefix, config
    for key in dataclasses.fields(config):
        value = getattr(config, key.name)
        inner = (
            {f"{key.name}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key.name: value}
        )
        for name, section in inner.items():
            if dataclasses.is_dataclass(section):
                yield from sections_of(section, f"{prefix}{name}.")


def _limits(key: dataclasses.Field) -> dict[str, Any]:
    return key.metadata.get("limits", {})


def choices_of(choices: Any) -> Any:
    """Return the names that a key may have: as they are given, or the registry at ``module:NAME``."""
    module, _, name = choices.partition(":") if isinstance(choices, str) else ("", "", "")
    return getattr(importlib.import_module(module), name) if module else choices


def _check(
    name: str, value: Any, low: Any = None, above: Any = None, high: Any = None, choices: Any = (), check: Any = None
) -> None:
    """Check a key's value against its limits; see ``schema.key``."""
    bounds = {"at least": low, "above": above, "at most": high}
    expected = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    for one in [] if value is None else value if isinstance(value, list) else [value]:
        if choices and one not in (names := choices_of(choices)):
            hint = OLD_VALUES.get((name, one)) or suggest(str(one), names)
            raise ConfigError(f"{name}: expected one of {', '.join(map(str, names))}, got {shown(one)}{hint}")
        if expected and not (
            one < float("inf")
            and (low is None or one >= low)
            and (above is None or one > above)
            and (high is None or one <= high)
        ):
            raise ConfigError(f"{name}: expected {expected}, got {shown(one)}")
    if value is not None and check is not None and not check[1](value):
        raise ConfigError(f"{name}: expected {check[0]}, got {shown(value)}")


def _check_together(config: Config) -> None:
    """Check the rules between keys of a run."""
    from packmamba.data.packing import STRATEGIES
    from packmamba.nn.mixers import MIXERS
    from packmamba.training.boundary import BOUNDARIES
    from packmamba.training.optimizer import OPTIMIZERS

    data, model, trainer = config.data, config.model, config.trainer
    strategy, mixer, boundary = STRATEGIES[data.strategy], MIXERS[model.mixer], BOUNDARIES[trainer.boundary]
    devices, streamed = trainer.devices * trainer.num_nodes, data.mode == "stream"

    def need(holds: Any, name: str, expected: str) -> None:
        if not holds:
            value = functools.reduce(getattr, name.split("."), config)
            raise ConfigError(f"{name}: expected {expected}, got {shown(value)}")

    for key, given, known in (
        ("model.mixer_options", model.mixer_options, {*options(mixer)} - {*MIXER_KEYS, "recompute", "backend"}),
        ("optimizer.options", config.optimizer.options, options(OPTIMIZERS[config.optimizer.name])),
        ("trainer.boundary_options", trainer.boundary_options, options(boundary)),
        ("evaluation_options", config.evaluation_options, config.evaluations),
    ):
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"unknown key '{key}.{unknown[0]}'{suggest(unknown[0], sorted(known))}")
    for name in MIXER_KEYS:
        unset = name in options(mixer) or getattr(model, name) == getattr(ModelConfig, name)
        need(unset, f"model.{name}", f"no value with model.mixer={model.mixer}")
    keys_and_values = all(isinstance(one, dict) for one in config.evaluation_options.values())
    need(keys_and_values, "evaluation_options", "keys and values of each evaluation")
    need(trainer.evaluate_every is None or config.evaluations, "trainer.evaluate_every", "null without evaluations")

    need(data.unit is None or data.source == "packages", "data.unit", "null, unless data.source=packages")
    need(data.streams == 1 or strategy.splits_documents, "data.streams", "1, unless data.strategy=split")
    need(not (data.cut_at_steps and streamed), "data.cut_at_steps", "false, unless data.mode=matched")
    of_one_length = data.row_length is not None
    need(
        of_one_length or not strategy.needs_row_length,
        "data.row_length",
        f"an integer with data.strategy={data.strategy}",
    )
    need(
        not data.stagger or (streamed and strategy.splits_documents),
        "data.stagger",
        "false, unless data.mode=stream and data.strategy=split",
    )
    need(
        data.shuffle_steps is None or (streamed and strategy.pads and of_one_length and not boundary.continues),
        "data.shuffle_steps",
        "null, unless data.mode=stream, rows have one length and trainer.boundary carries nothing",
    )
    if boundary.continues:
        carries, row, step_rows = f"with trainer.boundary={trainer.boundary}", data.row_length or 1, data.step_rows
        need(strategy.splits_documents, "data.strategy", f"split {carries}")
        need(data.streams % devices == 0, "data.streams", f"a multiple of the {devices} devices {carries}")
        rows = data.batch_rows if data.takes_turns else data.streams // devices
        need(rows >= boundary.least_rows, "data.streams", f"batches of at least {boundary.least_rows} rows {carries}")
        together = row if data.takes_turns else data.streams * row
        need(
            not streamed or data.tokens_per_step % together == 0,
            "data.tokens_per_step",
            f"a multiple of {together} {carries}",
        )
        if data.takes_turns:
            need(
                data.streams % step_rows == 0, "data.streams", f"a multiple of the {step_rows} rows of a step {carries}"
            )
            need(
                step_rows % (data.batch_rows * devices) == 0,
                "data.slots_per_batch",
                f"micro-batches of equally many of the {step_rows} rows of a step on {devices} devices {carries}",
            )

    need(
        trainer.accelerator != "cpu" or trainer.precision != "16-mixed",
        "trainer.precision",
        "bf16-mixed or 32-true on a CPU",
    )
    if trainer.strategy == "fsdp2":
        need(boundary.sharded, "trainer.strategy", f"ddp with trainer.boundary={trainer.boundary}")
        need(trainer.average_snapshots == 1, "trainer.average_snapshots", "1 with trainer.strategy=fsdp2")
        need(
            trainer.precision in ("32-true", "bf16-mixed"),
            "trainer.precision",
            "32-true or bf16-mixed with trainer.strategy=fsdp2",
        )
    if trainer.cuda_graphs:
        for name, value, known in (
            ("trainer.accelerator", trainer.accelerator, ("auto", "gpu", "cuda")),
            ("trainer.strategy", trainer.strategy, ("auto",)),
            ("trainer.devices", trainer.devices * trainer.num_nodes, (1,)),
            ("trainer.precision", trainer.precision, ("32-true", "bf16-mixed", "bf16-true")),
            ("trainer.boundary", trainer.boundary, [name for name, scheme in BOUNDARIES.items() if scheme.graphs]),
            ("ops.backend", config.ops.backend, ("auto", "cuda")),
        ):
            need(value in known, name, f"{' or '.join(map(str, known))} with trainer.cuda_graphs")


def options(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's arguments that have defaults."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is not parameter.empty]


def suggest(name: str, known: Iterable[Any], prefix: str = "") -> str:
    """Return the end of an error about an unknown name: the nearest known one, or all."""
    names = [str(one) for one in known]
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{prefix}{close[0]}'?" if close else f"; known: {', '.join(names) or 'none'}"


def shown(value: Any) -> str:
    """Write a value as in YAML."""
    return json.dumps(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value, default=str)


def import_plugins(plugins: Iterable[str]) -> None:
    """Import modules, from the current folder or installed, that may add to registries."""
    for plugin in plugins:
        sys.path += {os.getcwd()}.difference(sys.path)
        try:
            importlib.import_module(plugin)
        except ImportError as error:
            raise ConfigError(f"plugins: cannot import '{plugin}' ({error})") from None


def read_yaml(path: str | Path, command: str | None = None) -> DictConfig:
    """Read a YAML file of keys and values, for a command if one is named. Raises ConfigError."""
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:  # of the file system, of YAML
        raise ConfigError(f"{path}: expected a YAML file, got {' '.join(str(error).split())}") from None
    if not isinstance(loaded, DictConfig) or not loaded:
        raise ConfigError(f"{path}: expected keys and values, got {'a list' if loaded else 'an empty file'}")
    kind = next((kind for kind, key in {"bench": "bench", "sweep": "arms"}.items() if key in loaded), "train")
    if command not in (None, kind):
        raise ConfigError(f"{path}: expected a file for {command}, got one for {kind}; run {COMMAND} {kind} {path}")
    return loaded


def parse_override(override: str) -> DictConfig:
    """Parse ``a.b=value``; the value is YAML."""
    key, equals, _ = override.partition("=")
    if not equals or not key.strip(" ."):
        raise ConfigError(f"expected key=value, got '{override}'")
    try:
        return OmegaConf.from_dotlist([override])
    except Exception as error:  # of YAML
        raise ConfigError(f"expected key=value, got '{override}': {' '.join(str(error).split())}") from None


def assign(key: str, value: Any) -> tuple[DictConfig, str]:
    """Return a layer for ``resolve`` that sets ``a.b``."""
    update = OmegaConf.create()
    OmegaConf.update(update, key, value)
    return update, f"'{key}={value}'"


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as plain values."""
    return dataclasses.asdict(config)
