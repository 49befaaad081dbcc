"""Configuration: one dataclass per section, YAML files and ``key=value`` overrides, unknown keys are errors."""

from packmamba.config.load import (
    MODEL_DIRECTORY,
    check_command,
    load_config,
    parse_override,
    read_yaml,
    suggest,
    to_dict,
    wrong_value,
)
from packmamba.config.schema import Config, DataConfig, ModelConfig, OpsConfig, OptimizerConfig, TrainerConfig
from packmamba.errors import ConfigError

__all__ = [
    "MODEL_DIRECTORY",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "OpsConfig",
    "OptimizerConfig",
    "TrainerConfig",
    "check_command",
    "load_config",
    "parse_override",
    "read_yaml",
    "suggest",
    "to_dict",
    "wrong_value",
]
