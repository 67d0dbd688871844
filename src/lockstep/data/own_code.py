"""A name such as module:function or path/to/file.py:Class in, the object that it names, imported, out."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import ConfigError


def find_own(name: str, *, kind: str, thing: str) -> Callable[..., Any]:
    """Import what a recipe names. `kind` ("reward") begins the errors, `thing` ("function") is what was looked for.

    Raises `ConfigError` where the module or file is missing or does not import, or holds no such callable.
    """
    where, _, attribute = name.rpartition(":")
    label = f"{kind} {name!r}"
    module = _load_file(where, label) if where.endswith(".py") else _load_module(where, label, thing)
    found = vars(module).get(attribute)
    if callable(found):
        return found
    if found is not None:
        raise ConfigError(f"{label}: {attribute} is a {type(found).__name__}, not a {thing}")
    callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(attribute, callables, n=1, cutoff=0.0)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    raise ConfigError(f"{label}: {where} has no {thing} {attribute!r}{hint}")


def _load_module(where: str, label: str, thing: str) -> ModuleType:
    cwd = os.getcwd()
    if cwd not in sys.path and "" not in sys.path:
        sys.path.insert(0, cwd)  # as `python -m` does; a console script has only its own folder there
        importlib.invalidate_caches()
    try:
        with contextlib.chdir(os.curdir):  # come back, whatever the module does
            return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise ConfigError(f"{label}: importing {where} failed: {error}") from error
        raise ConfigError(
            f"{label}: no module {where!r}, neither installed nor in {cwd}; "
            f"give module:{thing} or path/to/file.py:{thing}"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{label}: importing {where} failed: {type(error).__name__}: {error}") from error


def _load_file(where: str, label: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{label}: the file {where!r} does not exist (looked in {Path.cwd()})")
    module_name = f"lockstep_own_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a module up by its name
    try:
        with contextlib.chdir(os.curdir):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError(f"{label}: running {where} failed: {type(error).__name__}: {error}") from error
    return module
