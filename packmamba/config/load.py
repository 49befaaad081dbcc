"""Configurations from YAML files and ``key=value`` overrides; unknown keys are errors."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from packmamba.config.check import check
from packmamba.config.rules import shown
from packmamba.config.schema import Config
from packmamba.errors import COMMAND, ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
"""The configurations that come with PackMamba: package data of an installed wheel, or the top of a checkout."""
MODEL_DIRECTORY = CONFIGS / "model"
CONFIGURATION = "configuration.yaml"
"""A run's resolved configuration, beside its model."""
A_LIST, KEYS = "expected a list, such as [a,b]", "expected keys and their values"


Schema = TypeVar("Schema")


def load(
    schema: type[Schema], path: str | Path | None = None, overrides: Iterable[str] = (), command: str | None = None
) -> Schema:
    """The dataclass ``schema`` from its defaults, then a YAML file, then ``key=value`` overrides, all rules checked.

    Where the schema has a section ``model``, this may be the name of a file in configs/model (``model=130m``).

    Args:
        command: what ``path`` is a file for: train, sweep or bench.

    Raises:
        ConfigError: naming the key: unknown, of the wrong type, or against a rule; or a plugin that cannot be imported.
    """
    layers = []
    if path is not None:
        loaded = read_yaml(path)
        if command is not None:
            check_command(command, path, loaded)
        layers.append((loaded, str(path)))
    return resolve(schema, [*layers, *((parse_override(override), f"'{override}'") for override in overrides)])


def resolve(schema: type[Schema], layers: Iterable[tuple[DictConfig, str]]) -> Schema:
    """The dataclass ``schema`` from its defaults, then each layer, named in errors by where it comes from; see ``load``."""
    config = copy.deepcopy(_defaults(schema))  # type: ignore[arg-type]
    for update, origin in layers:
        config = _merge(config, update, origin)
    try:
        values = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # of ${...}
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    return check(cast(Schema, values))


@functools.cache
def _defaults(schema: type) -> DictConfig:
    """To be copied: making it takes longer than all else here."""
    return OmegaConf.structured(schema)


def load_config(path: str | Path | None = None, overrides: Iterable[str] | None = None) -> Config:
    """A training configuration; see ``load``."""
    return load(Config, path, overrides or (), "train")


def check_command(command: str, path: str | Path, loaded: DictConfig) -> None:
    """ConfigError if the file is one for another command."""
    keys = {"bench": {"bench"}, "sweep": {"arms"}, "train": {"data", "model", "optimizer", "trainer"}}
    meant = next((name for name, some in keys.items() if some & set(loaded)), command)
    if meant != command:
        raise ConfigError(f"{path} is for another command: {COMMAND} {meant} {path}")


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as plain values, for records and hashes."""
    return dataclasses.asdict(config)


def read_yaml(path: str | Path) -> DictConfig:
    """One YAML file as a mapping; ConfigError if it is missing or not YAML."""
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; expected a YAML file")
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist")
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(f"config file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if isinstance(loaded, ListConfig):
        raise ConfigError(f"config file {path} must hold keys and values, not a list")
    if not loaded:
        raise ConfigError(f"config file {path} is empty; expected keys and values")
    assert isinstance(loaded, DictConfig)
    return loaded


def assign(key: str, value: Any) -> tuple[DictConfig, str]:
    """``a.b`` and its value, taken as it is, as a layer of ``resolve``."""
    if not key.strip(" ."):
        raise ConfigError(f"expected a key for {value!r}, got '{key}'")
    update = OmegaConf.create()
    OmegaConf.update(update, key, value)
    return update, f"'{key}={value}'"


def parse_override(override: str) -> DictConfig:
    """``a.b=value`` as a nested mapping; the value is read as YAML."""
    key, equals, _ = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"expected key=value, got '{override}'")
    try:
        return OmegaConf.from_dotlist([override])
    except Exception as error:
        raise ConfigError(f"cannot read '{override}': {' '.join(str(error).split())}") from None


def _merge(config: DictConfig, update: DictConfig, origin: str) -> DictConfig:
    if isinstance(update.get("model"), str) and isinstance(config.get("model"), DictConfig):
        name = update.model
        known = sorted(path.stem for path in MODEL_DIRECTORY.glob("*.yaml"))
        if name not in known:
            raise ConfigError(f"model '{name}' in {origin} is unknown; known sizes: {', '.join(known)}")
        update = OmegaConf.merge(update, {"model": read_yaml(MODEL_DIRECTORY / f"{name}.yaml")})  # type: ignore[assignment]
    _check_keys(update, config, origin, "")
    try:
        merged = OmegaConf.unsafe_merge(config, update)  # into the first, which is our own
    except (OmegaConfBaseException, TypeError) as error:
        if not getattr(error, "full_key", None):  # of a list where keys are expected, or keys where a list is
            raise ConfigError(_wrong_container(config, update, origin)) from None
        assert isinstance(error, OmegaConfBaseException)
        raise _wrong_value(error, origin) from None
    assert isinstance(merged, DictConfig)
    return merged


def _wrong_value(error: OmegaConfBaseException, origin: str | Path) -> ConfigError:
    """What a value of the wrong type is refused with."""
    text = str(error).splitlines()[0]
    if "not a ListConfig" in text or "List[" in text:
        text = A_LIST
    elif "not a DictConfig" in text or "Dict[" in text:
        text = KEYS
    elif "ListConfig" in text or "DictConfig" in text:
        text = f"expected one value, got {'a list' if 'ListConfig' in text else 'keys and values'}"
    elif "'None'" in text or "is not Optional" in text:
        text = "expected a value, got null"
    return ConfigError(f"{error.full_key} in {origin}: {text}")


def _wrong_container(known: DictConfig, update: DictConfig, origin: str, prefix: str = "") -> str:
    """The refusal of the first list where keys are expected, or the other way round."""
    for key in map(str, update):
        have, given = known.get(key), update.get(key)
        if isinstance(have, ListConfig) and isinstance(given, DictConfig):
            return f"{prefix}{key} in {origin}: {A_LIST}"
        if isinstance(have, DictConfig) and isinstance(given, ListConfig):
            return f"{prefix}{key} in {origin}: {KEYS}"
        if isinstance(have, DictConfig) and isinstance(given, DictConfig):
            if found := _wrong_container(have, given, origin, f"{prefix}{key}."):
                return found
    return "" if prefix else f"{origin}: a list stands where keys are expected, or keys where a list is"


def _check_keys(update: DictConfig, known: DictConfig, origin: str, prefix: str) -> None:
    """Refuses unknown keys and gives those with old names their new ones."""
    keys = {key.name: key for key in dataclasses.fields(cast(Any, OmegaConf.get_type(known)))}
    types, values = get_type_hints(OmegaConf.get_type(known)), OmegaConf.to_container(update, resolve=False)
    assert isinstance(values, dict)
    old_names = {key.metadata["old_name"]: name for name, key in keys.items() if key.metadata.get("old_name")}
    for given in map(str, list(update)):
        key = old_names.get(given, given)
        name = f"{prefix}{key}"
        if key not in keys:
            elsewhere = [f"'{s}.{key}'" for s, t in types.items() if key in getattr(t, "__dataclass_fields__", ())]
            hint = suggest(key, keys, prefix)
            if elsewhere and "did you mean" not in hint:
                hint = f"; did you mean {' or '.join(elsewhere)}?"
            raise ConfigError(f"unknown key '{name}' in {origin}{hint}")
        if key != given:
            update[key] = update.pop(given)
        value = values[given]
        if value == "???":  # OmegaConf's word for a value that is still to come
            raise ConfigError(f"{name} in {origin}: expected a value, got ???")
        if types[key] is bool and type(value) in (int, float) and value not in (0, 1):
            raise ConfigError(f"{name} in {origin}: expected true or false, got {value}")
        if dataclasses.is_dataclass(types[key]):
            if not isinstance(value, dict):
                raise ConfigError(f"'{name}' in {origin} is a section of keys, got {shown(value)}")
            _check_keys(update.get(key), known.get(key), origin, f"{name}.")


def suggest(name: str, known: Iterable[Any], prefix: str = "") -> str:
    """How a refusal of an unknown name goes on: with the nearest known one, or all of them."""
    names = [str(k) for k in known]
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{prefix}{close[0]}'?" if close else f"; known: {', '.join(names)}"
