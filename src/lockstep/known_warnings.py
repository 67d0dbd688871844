"""Warnings of libraries that are known to be harmless, silenced where they arise, each with its reason and its end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def while_injecting() -> Iterator[None]:
    """PEFT 0.21 asks transformers 5.24 for an attribute that was renamed (`is_gradient_checkpointing`); gone with a newer PEFT."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield


@contextmanager
def while_recomputing() -> Iterator[None]:
    """transformers 5.24 renamed `gradient_checkpointing_enable`; older 5.x know only the old name, which works on both."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="`gradient_checkpointing_enable` is deprecated", category=FutureWarning
        )
        yield


@contextmanager
def while_planning() -> Iterator[None]:
    """PEFT 0.21 writes rank and alpha patterns of its own for fused experts, and then warns of those that match no module."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"The following (rank|alpha)_pattern keys did not match", category=RuntimeWarning
        )
        yield
