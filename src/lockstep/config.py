"""Recipe file + `key.sub=value` overrides in, one frozen `Config` out. Checked here, and nowhere else again.

`load_config` is the only way in. Unknown keys are refused with the nearest known one; values of a wrong type say which
key, what was expected and what came. The options themselves stand in sections.py, and are found here too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lockstep.errors import ConfigError
from lockstep.sections import (
    CanaryConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DataSource,
    DistConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    ObserveConfig,
    PromptConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ShardingConfig,
    SyncConfig,
)
from lockstep.sections_base import LoraSection, Section, is_section
from lockstep.sections_critic import CriticConfig
from lockstep.sections_environment import EnvironmentConfig
from lockstep.sections_teacher import TeacherConfig
from lockstep.sections_train import CORRECTION_BOUNDS, TrainConfig, correction_bounds, without_effect
from lockstep.yaml_text import read_yaml, write_yaml

__all__ = [
    "CORRECTION_BOUNDS",
    "CanaryConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "DataSource",
    "DistConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "LoraSection",
    "ModelConfig",
    "ObserveConfig",
    "Option",
    "PromptConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "ShardingConfig",
    "SyncConfig",
    "TeacherConfig",
    "TrainConfig",
    "build_config",
    "correction_bounds",
    "describe_options",
    "dump_config",
    "load_config",
    "without_effect",
]


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML recipe, put `key.sub=value` overrides (values are YAML) on top, check everything.

    Raises `ConfigError` naming the key, what was expected and what came.
    """
    path = Path(recipe)
    tree = _read_recipe(path)
    for override in overrides:
        _apply(tree, override)
    run = tree["run"] = {} if tree.get("run") is None else tree["run"]
    if isinstance(run, dict) and not run.get("dir"):
        run["dir"] = str(Path("runs") / path.stem)
    return build_config(tree, source=str(path))


def _read_recipe(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigError(
            f"recipe {str(path)!r} is a folder; give the path of a YAML file, such as {path / 'config.yaml'}"
        )
    try:
        tree = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        here = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
        raise ConfigError(f"recipe {str(path)!r} does not exist{here}; give the path of a YAML file") from error
    except OSError as error:
        raise ConfigError(
            f"recipe {str(path)!r} cannot be read: {error.strerror}; give the path of a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not a YAML recipe: {error}") from error
    if not isinstance(tree, dict):
        what = "nothing" if tree is None else f"a {type(tree).__name__}"
        raise ConfigError(f"{path} must hold sections such as `model:` and `data:`; it holds {what}")
    return tree


def build_config(tree: Mapping[str, Any], *, source: str = "config") -> Config:
    """Check a nested mapping. Raises `ConfigError` with every fault found, a line each."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        found = error.errors()
        lines = list(dict.fromkeys(_say(item) for item in found if not _is_echo(item, found)))
        raise ConfigError(f"{source}:" + ("\n  ".join(["", *lines]) if len(lines) > 1 else f" {lines[0]}")) from error


def dump_config(config: Config) -> str:
    """The resolved config as YAML; `load_config` reads it back to an equal value."""
    return write_yaml(config.model_dump(mode="json"))


@dataclass(frozen=True, slots=True)
class Option:
    """What `--help` says of one option."""

    key: str
    """Dotted; "[]" stands for an entry's number in a list of sections, as in reward[].name."""
    type: str
    default: str
    """As YAML; "required" where there is none."""
    meaning: str


def describe_options() -> list[Option]:
    """Every option, in the order of the tree."""
    return list(_walk(Config, ""))


def _walk(section: type[BaseModel], prefix: str) -> Iterator[Option]:
    for name, info in section.model_fields.items():
        inner = _section_of(info.annotation)
        if inner is RewardConfig and not _is_list(info.annotation):
            default = info.get_default()
            yield Option(
                f"{prefix}{name}",
                "a reward's name, or its options as in reward",
                default.name if default else "null",
                info.description or "",
            )
        elif inner is None:
            yield Option(f"{prefix}{name}", _type_name(info.annotation), _default_of(info), info.description or "")
        else:
            yield from _walk(inner, f"{prefix}{name}[]." if _is_list(info.annotation) else f"{prefix}{name}.")


def _default_of(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    return write_yaml(list(value) if isinstance(value, tuple) else value, inline=True)


def _is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is tuple


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if is_section(candidate):
            return candidate
    return None


def _type_name(annotation: Any) -> str:
    """In the words of YAML: "list of int", "one of a, b", "number or null"."""
    args = get_args(annotation)
    if annotation is None or annotation is type(None):
        return "null"
    if not args:
        return {"str": "text", "bool": "true or false"}.get(annotation.__name__, str(annotation.__name__))
    if hasattr(annotation, "__metadata__"):
        return _type_name(args[0])
    origin = getattr(annotation, "__origin__", None)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in args)
    if origin is tuple:
        count = "list of" if args[-1] is ... else f"list of {len(args)}"
        return f"{count} {_type_name(args[0])}"
    if origin is Mapping:
        return "mapping"
    return " or ".join(_type_name(arg) for arg in args)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, raw = override.partition("=")
    parts = key.split(".")
    if not separator or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form key.sub=value, e.g. train.lr=1e-4")
    node: Any = tree
    for part in parts[:-1]:
        node = _step(node, part, override)
    if isinstance(node, list):
        node[_index(node, parts[-1], override)] = _override_value(key, raw, override)
    else:
        node[parts[-1]] = _override_value(key, raw, override)


def _override_value(key: str, raw: str, override: str) -> Any:
    """YAML, except that text options take the word as it is (`{prompt} =`, `007`) unless quoted or null."""
    types = {option.key: option.type for option in describe_options()}
    kind = types.get(_generic(key), "")
    try:
        value = read_yaml(raw) if raw else ""
    except yaml.YAMLError as error:
        if kind.startswith("text"):
            return raw
        raise ConfigError(f"override {override!r}: {raw!r} is not a YAML value: {error}") from error
    is_null = value is None and kind == "text or null"
    return raw if kind in ("text", "text or null") and not isinstance(value, str) and not is_null else value


def _step(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        inner = node[_index(node, part, override)]
    else:
        inner = node.get(part)
        if inner is None:
            inner = node[part] = {}
    if not isinstance(inner, dict | list):
        raise ConfigError(f"override {override!r}: {part!r} is the value {inner!r} in the recipe, not a section")
    return inner


def _index(node: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(node):
        raise ConfigError(
            f"override {override!r}: {part!r} must be an index of a list with {len(node)} entries (0 is the first)"
        )
    return int(part)


def _is_echo(item: Any, found: Sequence[Any]) -> bool:
    """pydantic also counts a list as too short when its only entry is wrong; that entry's own finding is enough."""
    where = item["loc"]
    return item["type"] == "too_short" and any(
        other is not item and other["loc"][: len(where)] == where for other in found
    )


def _say(item: Any) -> str:
    """One of pydantic's findings as a line that names the key as the recipe spells it."""
    loc, kind, came = ".".join(str(part) for part in item["loc"]), item["type"], f"{item['input']!r} came"
    if kind == "extra_forbidden":
        return f"unknown key {loc!r}; {_nearest(loc)}"
    if kind == "missing":
        return f"{loc!r} is required and missing"
    if kind == "value_error":
        return (f"{loc}: " if loc else "") + item["msg"].removeprefix("Value error, ")
    if kind == "too_short":
        return f"{loc}: expected at least {item['ctx']['min_length']} entry; {came}"
    if kind in ("model_type", "model_attributes_type"):
        return f"{loc}: expected a section with keys below it; {came}"
    option = _option_at(item["loc"])
    if option is None and kind == "tuple_type":
        return f"{loc}: expected a list of sections, each starting with `-`; {came}"
    if option is None or not kind.endswith(("_type", "_parsing")):
        return f"{loc}: {item['msg'][0].lower()}{item['msg'][1:]}; {came}"
    return f"{option.key}: expected {option.type}; {came}"


def _option_at(loc: Sequence[str | int]) -> Option | None:
    """The option that a finding is about: pydantic appends list indices and the branch of a union to its key."""
    options = {option.key: option for option in describe_options()}
    for end in range(len(loc), 0, -1):
        key = ".".join(str(part) for part in loc[:end])
        if _generic(key) in options:
            return replace(options[_generic(key)], key=key)
    return None


def _nearest(loc: str) -> str:
    """The same name in another section, else the nearest name beside it, else the nearest anywhere."""
    known = [option.key for option in describe_options()]
    known += sorted({key.rsplit(".", depth)[0] for key in known for depth in range(1, key.count(".") + 1)})
    parent, _, last = _generic(loc).rpartition(".")
    elsewhere = [key for key in known if key.rpartition(".")[2] == last]
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    near = elsewhere or [siblings[name] for name in difflib.get_close_matches(last, siblings, n=1, cutoff=0.5)]
    if near:
        return f"did you mean {near[0]!r}?"
    near = difflib.get_close_matches(_generic(loc), known, n=1, cutoff=0.3)
    return f"the nearest known key is {near[0]!r}" if near else f"known here: {', '.join(sorted(siblings))}"


def _generic(key: str) -> str:
    """reward.0.name -> reward[].name, as `describe_options` spells it."""
    return ".".join("" if part.isdigit() else part for part in key.split(".")).replace("..", "[].")
