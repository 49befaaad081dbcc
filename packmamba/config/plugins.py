"""What a user adds outside the tree: modules that put their own names into registries when they are imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable

from packmamba.errors import ConfigError, UserError


def import_plugins(plugins: Iterable[str]) -> None:
    """Imports these modules, once a process; those in the current folder are found too.

    Raises:
        ConfigError: naming the module that cannot be imported.
    """
    for plugin in plugins:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(plugin)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"plugins: cannot import '{plugin}' ({reason})") from None
