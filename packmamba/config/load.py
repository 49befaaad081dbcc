"""Read and validate configurations."""

import copy
import dataclasses
import difflib
import functools
import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import attrgetter, ge, gt, le
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from torch.utils._pytree import tree_map

from packmamba.config.schema import (
    BOUNDARIES,
    MIXER_KEYS,
    MIXERS,
    OPTIMIZERS,
    STRATEGIES,
    Config,
    options,
    registry,
)
from packmamba.errors import COMMAND, ConfigError, expect
from packmamba.records import RENAMED

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = next(
    filter(Path.is_dir, (PACKAGE / "configs", PACKAGE.parent / "configs"))
)  # a wheel's, a checkout's
CONFIGURATION = "configuration.yaml"
OLD_KEYS = {f"data.{old}": f"data.{new}" for old, new in RENAMED["data"].items()}
OLD_KEYS |= {"experiment": "output", "only": "arms=[...] and grid.seed=[...]"}
TYPES = {
    "Integer": "an integer",
    "Float": "a number",
    "bool": "true or false",
    "to string": "text",
    "None": "a value",
}
TYPES |= {"List": "a list such as [a,b]", "": "keys and values, as in the defaults"}
BOUNDS = {"low": ("at least", ge), "above": ("above", gt), "high": ("at most", le)}
ON_GPU = ("auto", "gpu", "cuda")
Schema = TypeVar("Schema")
to_dict = dataclasses.asdict
need = functools.partial(expect, kind=ConfigError)
structured: Any = functools.cache(OmegaConf.structured)


def load(
    schema: type[Schema],
    path: Any = None,
    overrides: Iterable[str] = (),
    command: str | None = None,
) -> Schema:
    return resolve(schema, read_layers(path, overrides, command))


load_config = functools.partial(load, Config, command="train")


def read_layers(
    path: Any, overrides: Iterable[str], command: str | None = None
) -> list[tuple[DictConfig, str]]:
    """Read a file and overrides; ``arms=[single,padded]`` selects entries of a mapping."""
    file = OmegaConf.create() if path is None else read_yaml(path, command)
    layers = [(parse_override(override), f"'{override}'") for override in overrides]
    for layer, origin in layers:
        for key in map(str, list(layer)):
            known, names = file.get(key), layer.get(key)
            if isinstance(known, DictConfig) and isinstance(names, ListConfig):
                for name in names:
                    need(
                        name in known,
                        key,
                        f"some of {', '.join(map(str, known))}",
                        f"'{name}' in {origin}",
                    )
                layer[key] = {name: known[name] for name in names}
                file.pop(key)
    return [(file, str(path)), *layers]


def resolve(schema: type[Schema], layers: Iterable[tuple[Any, str]]) -> Schema:
    """Merge layers and their origins over the defaults of ``schema``; validate."""
    config, named = copy.deepcopy(structured(schema)), False
    for layer, origin in layers:
        plain = tree_map(lambda one: one.tolist() if hasattr(one, "tolist") else one, layer)
        update: Any = OmegaConf.create(plain, flags={"allow_objects": True})
        named |= OmegaConf.select(update, "model.d_state") == 16 and not origin.endswith(
            CONFIGURATION
        )
        if isinstance(name := update.get("model"), str) and isinstance(
            config.get("model"), DictConfig
        ):
            sizes = {path.stem: path for path in sorted((CONFIGS / "model").glob("*.yaml"))}
            need(name in sizes, "model", "a size", f"'{name}' in {origin}{suggest(name, sizes)}")
            update = OmegaConf.merge(update, {"model": read_yaml(sizes[name])})
        try:
            config = OmegaConf.unsafe_merge(config, update)
        except ConfigKeyError as error:
            key = str(error.full_key)
            old = origin.endswith(CONFIGURATION) and key not in OLD_KEYS
            hint = "; an older version's key: remove it" if old else _instead(key, schema())
            raise ConfigError(f"unknown key '{key}' in {origin}{hint}") from None
        except (OmegaConfBaseException, TypeError) as error:
            lists = [one for one in update if isinstance(update._get_node(one), ListConfig)]
            key = getattr(error, "full_key", None) or [*lists, *update][0]
            expected = next(
                kind for word, kind in TYPES.items() if word in str(error).splitlines()[0]
            )
            got = OmegaConf.select(update, key)
            whole = expected == "an integer" and isinstance(got, float) and got.is_integer()
            hint = f"; write {int(got)}" if whole else ""
            raise ConfigError(
                f"{key}: expected {expected}, got {shown(got)} in {origin}{hint}"
            ) from None
    own = named and config.model.mixer != "mamba1"
    need(
        not own, "model.d_state", "another number than 16, which stands for the mixer's default", 16
    )
    try:
        return validate(OmegaConf.to_object(config))  # type: ignore[return-value]
    except OmegaConfBaseException as error:  # an interpolation ${...}
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None


def _instead(key: str, config: Any) -> str:
    """Return a hint at a key's new name, other section, or nearest name."""
    if key in OLD_KEYS:
        return f"; rename it to {OLD_KEYS[key]}"
    section, _, name = key.rpartition(".")
    known = [
        (prefix, field.name)
        for prefix, one in sections_of(config)
        for field in dataclasses.fields(one)
    ]
    same = [prefix + other for prefix, other in known if other == name]
    near = [prefix + other for prefix, other in known if prefix.rstrip(".") == section]
    return suggest(key, same or near, 0 if same else 0.6)


def validate(config: Schema) -> Schema:
    import_plugins(getattr(config, "plugins", ()))
    for prefix, section in sections_of(config):
        for key in dataclasses.fields(section):
            _, null, meaning = key.metadata.get("help", "").rstrip(".").partition("; null")
            remedy = f"; set null{meaning}" if null else ""
            _check(
                prefix + key.name,
                getattr(section, key.name),
                remedy,
                **key.metadata.get("limits", {}),
            )
    if isinstance(config, Config):
        _check_rules(config)
    return config


def sections_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dataclasses inside with their prefix, the outermost last."""
    for key in dataclasses.fields(config):
        value = getattr(config, key.name)
        for name, section in value.items() if isinstance(value, dict) else [("", value)]:
            if dataclasses.is_dataclass(section):
                yield from sections_of(section, prefix + key.name + (name and f".{name}") + ".")
    yield prefix, config


def _check(
    name: str, value: Any, remedy: str, choices: Any = (), check: Any = None, **bounds: Any
) -> None:
    expected = " and ".join(f"{BOUNDS[bound][0]} {limit}" for bound, limit in bounds.items())
    for one in [] if value is None else value if isinstance(value, list) else [value]:
        if choices and one not in (names := registry(choices)):
            renamed = RENAMED.get(name.rpartition(".")[2], {}).get(one)
            hint = f"; write {renamed}" if renamed else suggest(one, names).partition("; known")[0]
            raise ConfigError(
                f"{name}: expected one of {', '.join(map(str, names))}, got {shown(one)}{hint}"
            )
        for bound, limit in bounds.items():
            need(
                one < float("inf") and BOUNDS[bound][1](one, limit),
                name,
                expected,
                shown(one) + remedy,
            )
    if value is not None and check is not None:
        need(check[1](value), name, check[0], shown(value))


def _check_rules(config: Config) -> None:
    data, model, trainer, evaluations = (
        config.data,
        config.model,
        config.trainer,
        config.evaluations,
    )
    strategy, boundary = registry(STRATEGIES)[data.strategy], registry(BOUNDARIES)[trainer.boundary]
    need(hasattr(strategy, "pads"), "data.strategy", "a packing.Strategy(function)", repr(strategy))
    of_mixer = options(registry(MIXERS)[model.mixer])
    stream, splits = data.batching == "stream", strategy.splits_documents

    def rule(holds: Any, name: str, expected: str) -> None:
        need(holds, name, expected, shown(attrgetter(name)(config)))

    for key, given, known in (
        (
            "model.mixer_options",
            model.mixer_options,
            {*of_mixer} - {*MIXER_KEYS, "recompute", "backend"},
        ),
        (
            "optimizer.options",
            config.optimizer.options,
            options(registry(OPTIMIZERS)[config.optimizer.name]),
        ),
        ("trainer.boundary_options", trainer.boundary_options, options(boundary)),
        ("evaluation_options", config.evaluation_options, evaluations),
    ):
        for name in [name for name in given if name not in known]:
            raise ConfigError(f"unknown key '{key}.{name}'{suggest(name, sorted(known))}")
    mappings = all(isinstance(given, dict) for given in config.evaluation_options.values())
    rule(mappings, "evaluation_options", "keys and values of each evaluation")
    rule(
        data.row_length or not strategy.needs_row_length,
        "data.row_length",
        f"an integer with {data.strategy}",
    )
    precision, sharded = trainer.precision, trainer.strategy == "fsdp2"
    one = (
        trainer.devices * trainer.num_nodes == 1
        and trainer.strategy == "auto"
        and trainer.accelerator in ON_GPU
    )
    graphs = (
        one
        and precision in ("32-true", "bf16-mixed", "bf16-true")
        and config.ops.backend in ("auto", "cuda")
    )
    shuffles = stream and strategy.pads and data.row_length and not boundary.continues
    only: dict[str, tuple[Any, str]] = {  # keys at their defaults, unless
        "data.unit": (data.source == "packages", "data.source=packages"),
        "data.streams": (splits, "data.strategy=concat_split"),
        "data.stagger": (stream and splits, "in streams of concat_split"),
        "data.shuffle_steps": (shuffles, "batching=stream without carry"),
        "trainer.evaluate_every": (evaluations and not sharded, "with evaluations, without fsdp2"),
        "trainer.average_snapshots": (not sharded, "without fsdp2"),
        "trainer.cuda_graphs": (
            graphs,
            "on one GPU, in 32-true or bfloat16, with ops.backend auto or cuda",
        ),
        **{f"model.{name}": (name in of_mixer, "with another mixer") for name in MIXER_KEYS},
    }
    for name, (allowed, where) in only.items():
        default = attrgetter(name)(Config())
        rule(
            allowed or attrgetter(name)(config) == default,
            name,
            f"{shown(default)}, unless {where}",
        )
    if boundary.continues:
        devices, turns, carries = (
            trainer.devices * trainer.num_nodes,
            data.takes_turns,
            f"with {trainer.boundary}",
        )
        rows = data.batch_rows if turns else data.streams // devices
        tokens = (data.row_length or 1) * (1 if turns else data.streams)
        rule(splits, "data.strategy", f"concat_split {carries}")
        rule(
            data.streams % devices == 0,
            "data.streams",
            f"a multiple of the {devices} devices {carries}",
        )
        rule(
            rows >= boundary.least_rows,
            "data.streams",
            f"at least {boundary.least_rows} rows a batch {carries}",
        )
        rule(
            not stream or data.tokens_per_step % tokens == 0,
            "data.tokens_per_step",
            f"a multiple of {tokens}",
        )
        if turns:
            rule(
                data.streams % data.step_rows == 0,
                "data.streams",
                f"a multiple of a step's {data.step_rows} rows",
            )
            alike = data.step_rows % (data.batch_rows * devices) == 0
            rule(
                alike,
                "data.max_tokens_per_batch",
                f"equal batches of a step's {data.step_rows} rows",
            )
    rule(
        not sharded or boundary.sharded,
        "trainer.strategy",
        f"ddp with trainer.boundary={trainer.boundary}",
    )
    rule(
        not sharded or precision in ("32-true", "bf16-mixed"),
        "trainer.precision",
        "32-true or bf16-mixed with fsdp2",
    )


def suggest(name: str, known: Iterable[Any], cutoff: float = 0.6) -> str:
    names = [str(one) for one in known]
    close = difflib.get_close_matches(str(name), names, 1, cutoff)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(names) or 'none'}"


def shown(value: Any) -> str:
    return json.dumps(
        OmegaConf.to_container(value) if OmegaConf.is_config(value) else value, default=str
    )


def import_plugins(plugins: Iterable[str]) -> None:
    for plugin in plugins:
        sys.path += {os.getcwd()}.difference(sys.path)
        try:
            importlib.import_module(plugin)
        except (ImportError, SyntaxError) as error:
            raise ConfigError(f"plugins: cannot import '{plugin}' ({error})") from None


def read_yaml(path: str | Path, command: str | None = None) -> DictConfig:
    """Read a YAML file for a command; a shipped one from any folder."""
    file = Path(path) if Path(path).exists() else CONFIGS.parent / path
    need(
        file.is_file(),
        str(path),
        "a YAML file",
        "a folder" if file.is_dir() else "none; see configs/",
    )
    try:
        loaded: Any = OmegaConf.load(file)
    except Exception as error:
        tabs = hasattr(error, "problem_mark") and "\n\t" in "\n" + file.read_text(errors="replace")
        hint = "; indent by spaces, not tabs" if tabs else ""
        raise ConfigError(f"{path}: expected a YAML file, got {error}{hint}") from None
    holds = loaded and isinstance(loaded, DictConfig)
    need(holds, str(path), "keys and values", "a list" if loaded else "an empty file")
    kind = "bench" if "bench" in loaded else "sweep" if "arms" in loaded else "train"
    got = f"one for {kind}; run {COMMAND} {kind} {path}"
    need(command in (None, kind), str(path), f"a file for {command}", got)
    return loaded


def parse_override(override: str) -> DictConfig:
    with suppress(Exception):
        if override.partition("=")[0].strip(" .") and "=" in override:
            return OmegaConf.from_dotlist([override])
    raise ConfigError(f"expected key=value with a YAML value, got '{override}'")
