"""Nothing in; a C library that gives large blocks of host memory back as soon as they are free."""

from __future__ import annotations

import ctypes
import os
import sys

MMAP_THRESHOLD = 8 << 20
"""Bytes. Blocks from here on are mapped one by one, so freeing one returns it to the system."""
_M_MMAP_THRESHOLD = -3
"""glibc's `malloc.h`."""


def return_large_blocks() -> bool:
    """Hold glibc's threshold for mapped blocks where it is, for this process; False where there is nothing to set.

    By itself glibc raises it, to 32 MiB, as soon as such a block is freed. Activations then come from the heap, which shrinks
    only from its end: on a CPU a training process grows by gigabytes over a few steps and keeps them. Lower thresholds hold less
    and cost time in page faults: docs/numerics.md has the figures. A setting in the environment (MALLOC_MMAP_THRESHOLD_) is left
    alone.
    """
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD) == 1
