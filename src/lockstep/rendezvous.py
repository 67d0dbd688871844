"""Environment variables in, the store that all ranks meet in out; or an error that names the place that cannot be one."""

from __future__ import annotations

import datetime
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from lockstep.errors import LockstepError

_GRACE_S = 2.0
"""For a store to raise its own, better error first: TCPStore waits a second longer than it is told."""


def whole_number(name: str, default: int) -> int:
    """An environment variable. Raises `LockstepError` for what is no whole number."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise LockstepError(f"the environment variable {name} must be a whole number; it is {value!r}")
    return int(value)


def meet(rank: int, size: int, timeout_s: float) -> dist.Store:
    """The store that the ranks meet in. Raises `LockstepError` naming the place that is taken, unreachable or unusable."""
    path = os.environ.get("LOCKSTEP_STORE")
    if path:
        return _shared_file(Path(path), size, timeout_s)
    if size == 1 and "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), whole_number("MASTER_PORT", 29500)
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = datetime.timedelta(seconds=timeout_s)
    hint = (
        f"Check that all {size} ranks were started with this address; if another job uses the port, set MASTER_PORT to a "
        "free one"
    )
    what = f"rank {rank}: rendezvous at {host}:{port}"
    return _within(timeout_s, lambda: dist.TCPStore(host, port, size, is_host, timeout=timeout), what, hint)


def _shared_file(path: Path, size: int, timeout_s: float) -> dist.Store:
    """Looks at the file first: torch 2.13's FileStore tries for minutes, holding the interpreter's lock, where it cannot open
    a file or where the bytes there are not a store's."""
    if not path.parent.is_dir() or path.is_dir() or (path.exists() and not _may_be_store(path)):
        raise LockstepError(f"LOCKSTEP_STORE is {str(path)!r}; it must be a new file in a folder that exists")
    try:
        store = dist.FileStore(str(path), size)
    except RuntimeError as error:
        raise LockstepError(f"LOCKSTEP_STORE: ranks cannot meet in {path}: {error}; name a new file") from error
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def _may_be_store(path: Path) -> bool:
    """A store's file is empty, or starts with the length of a key: four bytes, the lowest first."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(4), "little") < 1 << 16


def _within(timeout_s: float, make: Callable[[], dist.Store], what: str, hint: str) -> dist.Store:
    """What `make` returns. torch 2.13's TCPStore outlasts its own timeout where something listens and never answers, so
    a thread of its own waits for it; it is left behind when it does not return."""
    outcome: queue.SimpleQueue[dist.Store | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put(make())
        except Exception as error:  # handed to the waiting thread, which raises it
            outcome.put(error)

    threading.Thread(target=run, daemon=True, name="rendezvous").start()
    try:
        made = outcome.get(timeout=timeout_s + _GRACE_S)
    except queue.Empty:
        raise LockstepError(f"{what} did not answer within {timeout_s:.0f} s. {hint}") from None
    if isinstance(made, Exception):
        raise LockstepError(f"{what} failed: {str(made).rstrip('.')}. {hint}") from made
    return made
