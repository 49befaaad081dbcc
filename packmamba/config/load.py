"""Read configurations from YAML files and ``key=value`` overrides, and validate them once."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from packmamba.config.schema import (
    BOUNDARIES,
    MIXER_KEYS,
    MIXERS,
    OPTIMIZERS,
    STRATEGIES,
    Config,
    ModelConfig,
    options,
    registry,
)
from packmamba.errors import COMMAND, ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = next(
    path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir()
)  # a wheel's, a checkout's
CONFIGURATION = "configuration.yaml"  # in a run's folder
OLD_KEYS: dict[str, tuple[Any, str]] = {
    "experiment": (None, "rename it to output"),
    "data.bad_lines": ("error", "remove it, and mend the lines"),
    "data.streaming": (False, "remove it"),
    "data.corpus_seed": (0, "remove it"),
    "trainer.checkpoint_async": (True, "remove it"),
    "data.mode": (None, "rename it to data.batching"),
    "data.slots_per_batch": (None, "rename it to data.max_tokens_per_batch"),
}
"""Removed keys of a run: the old default, which is ignored, and what to do with another value."""
OLD_VALUES: dict[str, dict[str, str]] = {
    "strategy": {
        "in_order": "next_fit",
        "best_fit": "best_fit_decreasing",
        "histogram": "spfhp",
        "split": "concat_split",
    },
    "overlong": {"pieces": "split"},
    "boundary": {"foreign": "state_passing", "noise": "fitted_noise", "foreign_heads": "state_passing_within_row"},
}
"""Renamed values of keys: the value today."""
TYPES = {"Integer": "an integer", "Float": "a number", "bool": "true or false", "to string": "text", "None": "a value"}
TYPES |= {
    "List": "a list such as [a,b]",
    "Dict": "keys and values",
    "": "keys and values, or a list, as in the defaults",
}
Schema = TypeVar("Schema")


def load_config(path: str | Path | None = None, overrides: Iterable[str] | None = None) -> Config:
    """Load a training configuration; see ``load``."""
    return load(Config, path, overrides or (), "train")


def load(schema: type[Schema], path: Any = None, overrides: Iterable[str] = (), command: str | None = None) -> Schema:
    """Build ``schema`` from its defaults, a YAML file for ``command`` and ``key=value`` overrides, and validate it.

    Raises ConfigError naming the key.
    """
    return resolve(schema, read_layers(path, overrides, command))


def read_layers(path: Any, overrides: Iterable[str], command: str | None = None) -> list[tuple[DictConfig, str]]:
    """Read a file and overrides; an override that lists names of a mapping's entries selects them: ``arms=[single,padded]``."""
    file = OmegaConf.create() if path is None else read_yaml(path, command)
    layers = [(parse_override(override), f"'{override}'") for override in overrides]
    for layer, origin in layers:
        for key in map(str, list(layer)):
            known, names = file.get(key), layer.get(key)
            if isinstance(known, DictConfig) and isinstance(names, ListConfig):
                if unknown := [name for name in names if name not in known]:
                    raise ConfigError(
                        f"{key}: expected some of {', '.join(map(str, known))}, got '{unknown[0]}' in {origin}"
                    )
                layer[key] = {name: known[name] for name in names}
                file.pop(key)
    return [(file, str(path)), *layers]


def resolve(schema: type[Schema], layers: Iterable[tuple[Any, str]]) -> Schema:
    """Merge layers, each with its name in errors, over the defaults of ``schema`` and validate the result."""
    config: Any = copy.deepcopy(_defaults(schema))  # type: ignore[arg-type]
    for update, origin in layers:
        if isinstance(name := update.get("model"), str) and isinstance(config.get("model"), DictConfig):
            sizes = {path.stem: path for path in sorted((CONFIGS / "model").glob("*.yaml"))}
            if name not in sizes:
                raise ConfigError(f"model: expected a size, got '{name}' in {origin}{suggest(name, sizes)}")
            update = OmegaConf.merge(update, {"model": read_yaml(sizes[name])})
        for old, (ignored, action) in OLD_KEYS.items() if schema is Config else ():
            section, _, name = old.rpartition(".")
            keys = update.get(section) if section else update
            if isinstance(keys, DictConfig) and name in keys and keys.pop(name) != ignored:
                raise ConfigError(f"{old}: expected no such key, got it in {origin}; {action}")
        try:
            config = OmegaConf.unsafe_merge(config, update)
        except ConfigKeyError as error:
            section, _, name = str(error.full_key).rpartition(".")
            every = [prefix + key.name for prefix, one in sections_of(schema()) for key in dataclasses.fields(one)]
            others = [key for key in every if key.rpartition(".")[2] == name]
            hint = f"; did you mean '{others[0]}'?" if others else ""
            hint = hint or suggest(str(error.full_key), [key for key in every if key.rpartition(".")[0] == section])
            raise ConfigError(f"unknown key '{error.full_key}' in {origin}{hint}") from None
        except (OmegaConfBaseException, TypeError) as error:
            key = getattr(error, "full_key", None) or next(iter(update))
            expected = next(kind for word, kind in TYPES.items() if word in str(error).splitlines()[0])
            got = shown(OmegaConf.select(update, key))
            raise ConfigError(f"{key}: expected {expected}, got {got} in {origin}") from None
    try:
        values: Any = OmegaConf.to_object(config)
        return validate(values)
    except OmegaConfBaseException as error:  # an interpolation ${...}
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None


@functools.cache
def _defaults(schema: type) -> DictConfig:
    return OmegaConf.structured(schema)


def validate(config: Schema) -> Schema:
    """Import plugins, check each key, then the rules between keys; return the configuration.

    Raises ConfigError naming the key.
    """
    import_plugins(getattr(config, "plugins", ()))
    for prefix, section in sections_of(config):
        for key in dataclasses.fields(section):
            _check(prefix + key.name, getattr(section, key.name), **key.metadata.get("limits", {}))
        for problem in section.problems() if hasattr(section, "problems") else ():
            raise ConfigError(problem if problem.startswith(prefix) else prefix + problem)
    if isinstance(config, Config):
        _check_rules(config)
    return config


def sections_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dataclasses of a configuration, also in mappings, each with the prefix of its keys, the outermost last."""
    for key in dataclasses.fields(config):
        value = getattr(config, key.name)
        for name, section in value.items() if isinstance(value, dict) else [("", value)]:
            if dataclasses.is_dataclass(section):
                yield from sections_of(section, prefix + key.name + (name and f".{name}") + ".")
    yield prefix, config


def choices_of(choices: Any) -> Any:
    """Return a key's valid names, which may be those of a registry."""
    return registry(choices) if isinstance(choices, str) else choices


def _check(
    name: str, value: Any, low: Any = None, above: Any = None, high: Any = None, choices: Any = (), check: Any = None
) -> None:
    """Check a key's value against its limits; see ``schema.key``."""
    bounds = {"at least": low, "above": above, "at most": high}
    expected = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    for one in [] if value is None else value if isinstance(value, list) else [value]:
        if choices and one not in (names := choices_of(choices)):
            renamed = OLD_VALUES.get(name.rpartition(".")[2], {}).get(one)
            hint = f"; it is {renamed} now" if renamed else suggest(str(one), names).partition("; known")[0]
            raise ConfigError(f"{name}: expected one of {', '.join(map(str, names))}, got {shown(one)}{hint}")
        low_enough = (low is None or one >= low) and (above is None or one > above)
        if expected and not (low_enough and one < float("inf") and (high is None or one <= high)):
            raise ConfigError(f"{name}: expected {expected}, got {shown(one)}")
    if value is not None and check is not None and not check[1](value):
        raise ConfigError(f"{name}: expected {check[0]}, got {shown(value)}")


def _check_rules(config: Config) -> None:
    """Check the rules between keys of a run."""
    data, model, trainer, evaluations = config.data, config.model, config.trainer, config.evaluations
    strategy, mixer = registry(STRATEGIES)[data.strategy], registry(MIXERS)[model.mixer]
    boundaries, optimizers = registry(BOUNDARIES), registry(OPTIMIZERS)
    boundary = boundaries[trainer.boundary]
    splits, streamed, length = strategy.splits_documents, data.batching == "stream", data.row_length

    def need(holds: Any, name: str, expected: str) -> None:
        if not holds:
            value = functools.reduce(getattr, name.split("."), config)
            raise ConfigError(f"{name}: expected {expected}, got {shown(value)}")

    for key, given, known in (
        ("model.mixer_options", model.mixer_options, {*options(mixer)} - {*MIXER_KEYS, "recompute", "backend"}),
        ("optimizer.options", config.optimizer.options, options(optimizers[config.optimizer.name])),
        ("trainer.boundary_options", trainer.boundary_options, options(boundary)),
        ("evaluation_options", config.evaluation_options, evaluations),
    ):
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"unknown key '{key}.{unknown[0]}'{suggest(unknown[0], sorted(known))}")
    for name in set(MIXER_KEYS).difference(options(mixer)):
        need(getattr(model, name) == getattr(ModelConfig, name), f"model.{name}", f"no value with mixer {model.mixer}")
    mappings = all(isinstance(one, dict) for one in config.evaluation_options.values())
    need(mappings, "evaluation_options", "keys and values of each evaluation")
    need(trainer.evaluate_every is None or evaluations, "trainer.evaluate_every", "null without evaluations")
    need(data.unit is None or data.source == "packages", "data.unit", "null, unless data.source=packages")
    need(data.streams == 1 or splits, "data.streams", "1, unless data.strategy=concat_split")
    need(length or not strategy.needs_row_length, "data.row_length", f"an integer with strategy {data.strategy}")
    need(not data.stagger or (streamed and splits), "data.stagger", "false, unless mode is stream, strategy split")
    in_order = streamed and strategy.pads and length and not boundary.continues
    need(
        data.shuffle_steps is None or in_order,
        "data.shuffle_steps",
        "null, unless mode is stream, rows of one length, no carry",
    )
    if boundary.continues:
        devices, turns, carries = (
            trainer.devices * trainer.num_nodes,
            data.takes_turns,
            f"with trainer.boundary={trainer.boundary}",
        )
        need(splits, "data.strategy", f"concat_split {carries}")
        need(data.streams % devices == 0, "data.streams", f"a multiple of the {devices} devices {carries}")
        rows = data.batch_rows if turns else data.streams // devices
        need(
            rows >= boundary.least_rows,
            "data.streams",
            f"at least {boundary.least_rows} rows a batch {carries}, not {rows}",
        )
        tokens = (length or 1) * (1 if turns else data.streams)
        need(
            not streamed or data.tokens_per_step % tokens == 0,
            "data.tokens_per_step",
            f"a multiple of {tokens} {carries}",
        )
        need(
            not turns or data.streams % data.step_rows == 0,
            "data.streams",
            f"a multiple of {data.step_rows}, a step's rows",
        )
        alike = not turns or data.step_rows % (data.batch_rows * devices) == 0
        need(alike, "data.max_tokens_per_batch", f"micro-batches of equally many of a step's {data.step_rows} rows")
    on_cpu, sharded, precision = trainer.accelerator == "cpu", trainer.strategy == "fsdp2", trainer.precision
    need(not on_cpu or precision != "16-mixed", "trainer.precision", "bf16-mixed or 32-true on a CPU")
    need(not sharded or boundary.sharded, "trainer.strategy", f"ddp with trainer.boundary={trainer.boundary}")
    need(not sharded or trainer.average_snapshots == 1, "trainer.average_snapshots", "1 with trainer.strategy=fsdp2")
    need(not sharded or precision in ("32-true", "bf16-mixed"), "trainer.precision", "32-true or bf16-mixed with fsdp2")
    for name, value, allowed in (
        ("trainer.accelerator", trainer.accelerator, ("auto", "gpu", "cuda")),
        ("trainer.strategy", trainer.strategy, ("auto",)),
        ("trainer.devices", trainer.devices, (1,)),
        ("trainer.num_nodes", trainer.num_nodes, (1,)),
        ("trainer.precision", precision, ("32-true", "bf16-mixed", "bf16-true")),
        ("trainer.boundary", trainer.boundary, [name for name, scheme in boundaries.items() if scheme.graphs]),
        ("ops.backend", config.ops.backend, ("auto", "cuda")),
    ):
        need(
            not trainer.cuda_graphs or value in allowed,
            name,
            f"{' or '.join(map(str, allowed))} with trainer.cuda_graphs",
        )


def suggest(name: str, known: Iterable[Any], prefix: str = "") -> str:
    """Return the end of an error about an unknown name: the nearest known one, or all."""
    names = [str(one) for one in known]
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"; did you mean '{prefix}{close[0]}'?" if close else f"; known: {', '.join(names) or 'none'}"


def shown(value: Any) -> str:
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
    kind = "bench" if "bench" in loaded else "sweep" if "arms" in loaded else "train"
    if command not in (None, kind):
        raise ConfigError(f"{path}: expected a file for {command}, got one for {kind}; run {COMMAND} {kind} {path}")
    return loaded


def parse_override(override: str) -> DictConfig:
    """Parse ``a.b=value``; the value is YAML."""
    try:
        if override.partition("=")[0].strip(" .") and "=" in override:
            return OmegaConf.from_dotlist([override])
    except Exception:  # of YAML
        pass
    raise ConfigError(f"expected key=value with a YAML value, got '{override}'")


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)
