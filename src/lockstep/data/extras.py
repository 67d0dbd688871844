"""The name of an optional package in, the imported module out, or an error that says how to install it."""

from __future__ import annotations

import importlib
from types import ModuleType

from lockstep.errors import ConfigError


def import_extra(module: str, *, needed_by: str) -> ModuleType:
    """Import a package of the extra `demo`. Raises `ConfigError` where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        raise ConfigError(
            f"{needed_by} needs the package {package}, which is not installed; `pip install lockstep-rl[demo]`"
        ) from error
