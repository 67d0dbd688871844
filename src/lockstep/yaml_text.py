"""YAML text in, plain values out, and back: YAML 1.2's core schema, with repeated keys refused.

PyYAML reads YAML 1.1, in which `lr: 1e-4` is text, `on` and `no` are booleans, `010` is eight and `1:30` is ninety, and
lets the last of two equal keys win. In a recipe each of these is a trap, so scalars are resolved as YAML 1.2 says
(https://yaml.org/spec/1.2.2/#103-core-schema) and a repeated key is an error with its line.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_MERGE = "tag:yaml.org,2002:merge"
_CORE = (  # tag, pattern, first characters that can start such a scalar ("" stands for the empty scalar)
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    (_MERGE, re.compile(r"^(?:<<)$"), ["<"]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own class attribute; emptied of YAML 1.1's rules

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if key.value in seen:
                message = f"the key {key.value!r} is given twice; keep one"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_core_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would not read back as text."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML writes these line breaks into plain and single-quoted scalars and reads them back as a space.
        style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _tag, _pattern, _first in _CORE:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_core_int)


def read_yaml(text: str) -> Any:
    """One YAML document as None, bool, int, float, str, list or dict. Raises `yaml.YAMLError` with line and column."""
    return yaml.load(text, Loader=_Loader)


def write_yaml(value: Any, *, inline: bool = False) -> str:
    """Text that `read_yaml` gives back as an equal value. `inline`: on one line, as in `[1, 2]`."""
    style: dict[str, Any] = {"default_flow_style": True, "width": float("inf")} if inline else {}
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)
    return text.removesuffix("\n").removesuffix("\n...") if inline else text
