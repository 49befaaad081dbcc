"""Configuration: a dataclass per section, YAML files and ``key=value``, validated once."""

from packmamba.errors import ConfigError, require

require("omegaconf", "filelock")
from packmamba.config.load import (
    CONFIGS,
    CONFIGURATION,
    import_plugins,
    load,
    load_config,
    need,
    parse_override,
    read_yaml,
    resolve,
    suggest,
    to_dict,
    validate,
)
from packmamba.config.schema import AUTO, Config, DataConfig, OptimizerConfig, TrainerConfig, key, options, registry
