"""Every public name is there, and importing the package alone loads neither torch nor transformers."""

import subprocess
import sys

import pytest

import lockstep

NAMES = [name for name in dir(lockstep) if not name.startswith("_")]


def test_the_weight_path_is_public():
    assert {"plan_sharding", "shard", "attach", "fill", "export_weights", "strip", "errors"} <= set(NAMES)
    assert {"AdapterExport", "MergedExport", "FullExport", "LayerClasses", "MinParams", "Modules"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_names_lead_somewhere(name):
    assert getattr(lockstep, name) is not None


def test_an_unknown_name_tells_the_known_ones():
    with pytest.raises(AttributeError, match="export_weights"):
        lockstep.export_weight  # noqa: B018


def test_the_package_itself_is_light():
    code = "import sys, lockstep; print([name for name in ('torch', 'transformers', 'peft') if name in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
