"""Puts tests/ on the path, so that rank functions of one test file can be imported by the processes it starts; leaves no process group."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_is_left() -> Iterator[None]:
    """FSDP2 makes a group of one where there is none, for a model that is sharded in pytest's own process: it would be in the
    way of the next file's whole runs, which start their own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
