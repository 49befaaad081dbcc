"""Configuration: one dataclass per section, YAML files and ``key=value`` overrides, unknown keys are errors."""

from packmamba.config.check import check, describe
from packmamba.config.load import (
    CONFIGS,
    MODEL_DIRECTORY,
    check_command,
    load,
    load_config,
    parse_override,
    read_yaml,
    resolve,
    suggest,
    to_dict,
)
from packmamba.config.plugins import import_plugins
from packmamba.config.rules import (
    Holds,
    above,
    at_least,
    between,
    chosen,
    each,
    key,
    named,
    one_of,
    options,
    some,
    unique,
    unknown_options,
)
from packmamba.config.schema import Config, DataConfig, ModelConfig, OpsConfig, OptimizerConfig, TrainerConfig
from packmamba.errors import ConfigError

__all__ = [
    "CONFIGS",
    "MODEL_DIRECTORY",
    "Config",
    "ConfigError",
    "DataConfig",
    "Holds",
    "ModelConfig",
    "OpsConfig",
    "OptimizerConfig",
    "TrainerConfig",
    "above",
    "at_least",
    "between",
    "check",
    "check_command",
    "chosen",
    "describe",
    "each",
    "import_plugins",
    "key",
    "load",
    "load_config",
    "named",
    "one_of",
    "options",
    "parse_override",
    "read_yaml",
    "resolve",
    "some",
    "suggest",
    "to_dict",
    "unique",
    "unknown_options",
]
