"""The environment section of a recipe in; a checked way to make its instances out."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config import EnvironmentConfig
from lockstep.data.own_code import find_own
from lockstep.environments.base import Environment
from lockstep.environments.calculator import Calculator
from lockstep.errors import ConfigError

NAMED_ENVIRONMENTS: Mapping[str, type] = {"calculator": Calculator}


@dataclass(frozen=True, slots=True)
class EnvironmentKind:
    """A class that has been found and checked."""

    name: str
    make: Callable[..., Any]
    args: Mapping[str, Any]
    takes_seed: bool
    """Has its `reset` a parameter `seed`?"""
    may_open: bool = True
    """Has it a `reset` of its own, which may give another prompt than the row's?"""

    def new(self) -> Any:
        """An instance, with arguments of its own: samples share nothing. Raises what the class raises."""
        return self.make(**copy.deepcopy(dict(self.args)))


def find_environment(config: EnvironmentConfig) -> EnvironmentKind:
    """Raises `ConfigError`: unknown name, module or file that is missing or does not import, not a class, an abstract one, no
    `step`, `args` that it does not take."""
    label = f"environment {config.name!r}"
    if ":" in config.name:
        found = find_own(config.name, kind="environment", thing="class")
    elif config.name in NAMED_ENVIRONMENTS:
        found = NAMED_ENVIRONMENTS[config.name]
    else:
        near = difflib.get_close_matches(config.name, NAMED_ENVIRONMENTS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known is {', '.join(NAMED_ENVIRONMENTS)}"
        raise ConfigError(
            f"environment.name: unknown {config.name!r}; {hint}. One of your own is module:Class or path/to/file.py:Class"
        )
    if not isinstance(found, type):
        raise ConfigError(f"{label}: expected a class, one instance of which is made per sample; {found!r} came")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))  # type: ignore[attr-defined]
        raise ConfigError(f"{label}: {found.__name__} is abstract; expected a class that has its own {missing}")
    _check_method(found, "step", 1, label)
    if hasattr(found, "reset"):
        _check_method(found, "reset", 1, label)
    try:
        inspect.signature(found).bind(**config.args)
    except TypeError as error:
        raise ConfigError(f"{label} cannot be made with args {sorted(config.args)}: {error}") from error
    reset = getattr(found, "reset", Environment.reset)
    takes_seed = "seed" in inspect.signature(reset).parameters
    return EnvironmentKind(config.name, found, dict(config.args), takes_seed, may_open=reset is not Environment.reset)


def _check_method(found: type, method: str, num_arguments: int, label: str) -> None:
    function = getattr(found, method, None)
    if not callable(function) or function is Environment.step:
        raise ConfigError(
            f"{label}: {found.__name__} has no method {method}; expected step(self, reply) -> Turn, and if it is to know the "
            "row reset(self, row)"
        )
    signature = inspect.signature(function)
    extra = {"seed": 0} if "seed" in signature.parameters else {}
    try:
        signature.bind(*[None] * (num_arguments + 1), **extra)
    except TypeError as error:
        wanted = {"step": "(self, reply)", "reset": "(self, row)"}[method]
        raise ConfigError(f"{label}: expected {method}{wanted}; it is {method}{signature} ({error})") from error
