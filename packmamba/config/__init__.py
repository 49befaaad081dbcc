"""Configuration: a dataclass per section, YAML files and ``key=value``, validated once."""

from packmamba.errors import ConfigError, extra, need, refusing, require, suggest

require("omegaconf", "filelock")
from packmamba.config.load import CONFIGS, CONFIGURATION, import_plugins, load_config, resolve, to_dict, validate
from packmamba.config.schema import Config, DataConfig, OptimizerConfig, TrainerConfig, key, options, registry
