"""The examples for people with their own trainer run as their first lines say, and export what they promise."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
LIBRARIES = {
    "attach_plain_fsdp": "torch",
    "attach_accelerate": "accelerate",
    "attach_trl": "trl",
    "attach_verl": "verl",
}
# trl and verl are not lockstep's dependencies: their examples are run where they are installed.
INSTALLED = [name for name, library in LIBRARIES.items() if importlib.util.find_spec(library) is not None]


@pytest.mark.parametrize("name", INSTALLED)
def test_the_example_exports_the_adapter_on_both_ranks(name: str):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / f"{name}.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # LoRA on 7 linear layers of 2 decoder layers: A and B. They go to rank 0.
    assert re.search(r"rank 0\b.*\b28 (adapter )?tensors", done.stdout), done.stdout
    assert re.search(r"rank 1\b.*\b0 (adapter )?tensors", done.stdout), done.stdout
