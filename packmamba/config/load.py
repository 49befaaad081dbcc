"""Configurations from YAML files and ``key=value`` overrides; unknown keys are errors."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from packmamba.config.schema import Config
from packmamba.errors import ConfigError

MODEL_DIRECTORY = Path(__file__).resolve().parents[2] / "configs" / "model"


def load_config(path: str | Path | None = None, overrides: list[str] | None = None) -> Config:
    """Defaults, then the YAML file, then ``key=value`` overrides, checked against the dataclasses.

    ``model`` may be the name of a file in configs/model (``model=130m``). Raises ConfigError naming the key.
    """
    config = OmegaConf.structured(Config)
    if path is not None:
        loaded = read_yaml(path)
        check_command("train", path, loaded)
        config = _merge(config, loaded, str(path))
    for override in overrides or []:
        config = _merge(config, parse_override(override), f"'{override}'")
    resolved = OmegaConf.to_object(config)
    assert isinstance(resolved, Config)
    return resolved


def check_command(command: str, path: str | Path, loaded: DictConfig) -> None:
    """ConfigError if the file is one for another command."""
    keys = {"bench": {"bench"}, "sweep": {"arms"}, "train": {"data", "model", "optimizer", "trainer"}}
    meant = next((name for name, some in keys.items() if some & set(loaded)), command)
    if meant != command:
        raise ConfigError(f"{path} is for another command: python run.py {meant} {path}")


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as plain values, for records and hashes."""
    return dataclasses.asdict(config)


def read_yaml(path: str | Path) -> DictConfig:
    """One YAML file as a mapping; ConfigError if it is missing or not YAML."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist")
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(f"config file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if isinstance(loaded, ListConfig):
        raise ConfigError(f"config file {path} must hold keys and values, not a list")
    assert isinstance(loaded, DictConfig)
    return loaded


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
    if isinstance(update.get("model"), str):
        name = update.model
        path = MODEL_DIRECTORY / f"{name}.yaml"
        if not path.is_file():
            known = sorted(p.stem for p in MODEL_DIRECTORY.glob("*.yaml"))
            raise ConfigError(f"model '{name}' in {origin} is unknown; known sizes: {', '.join(known)}")
        update = OmegaConf.merge(update, {"model": read_yaml(path)})  # type: ignore[assignment]
    _check_keys(update, config, origin, "")
    try:
        merged = OmegaConf.merge(config, update)
    except OmegaConfBaseException as error:
        raise wrong_value(error, origin) from None
    assert isinstance(merged, DictConfig)
    return merged


def wrong_value(error: OmegaConfBaseException, origin: str | Path) -> ConfigError:
    """What a value of the wrong type is refused with."""
    text = str(error).splitlines()[0]
    for kind, words in (
        ("ListConfig", "expected a list, such as [a,b]"),
        ("DictConfig", "expected keys and their values"),
    ):
        if kind in text:
            text = words
    return ConfigError(f"{getattr(error, 'full_key', None) or '?'} in {origin}: {text}")


def _check_keys(update: DictConfig, known: DictConfig, origin: str, prefix: str) -> None:
    for key in map(str, update):
        name = f"{prefix}{key}"
        if key not in known:
            raise ConfigError(f"unknown key '{name}' in {origin}{suggest(key, known, prefix)}")
        section = known.get(key)
        if isinstance(section, DictConfig):
            value = update.get(key)
            if not isinstance(value, DictConfig):
                raise ConfigError(f"'{name}' in {origin} is a section of keys, got '{value}'")
            _check_keys(value, section, origin, f"{name}.")


def suggest(name: str, known: Iterable[Any], prefix: str = "") -> str:
    """How a refusal of an unknown name goes on: with the nearest known one, or all of them."""
    names = [str(k) for k in known]
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{prefix}{close[0]}'?" if close else f"; known: {', '.join(names)}"
