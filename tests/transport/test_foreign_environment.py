"""An engine's environment imports its end of a transport: it has torch, numpy, safetensors and xxhash, and nothing else of ours."""

import ast
import sys
from pathlib import Path

import pytest

from lockstep import transport

FILES = sorted(Path(transport.__path__[0]).glob("*.py"))
ALLOWED = {"torch", "numpy", "safetensors", "xxhash", *sys.stdlib_module_names}
OURS = ("lockstep.types", "lockstep.errors", "lockstep.transport.")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_what_every_engine_has_is_imported(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    foreign = {name for name in found if name.split(".")[0] not in ALLOWED and not name.startswith(OURS)}
    assert not foreign, f"{path.name} imports {sorted(foreign)}"
