"""A size in, memory that two processes of one host share, out. No name of it outlives its owner for long.

A segment is a file in /dev/shm, mapped by both ends. Its name is only needed until the other end has opened it: the owner
removes it right then, and the kernel frees the memory when both processes have let go or ended, however they ended. A name
that is left behind by an owner that was killed in between is removed by the next owner: an owner holds a lock on its file as
long as it lives, so a file whose lock is free has none.

`multiprocessing.shared_memory` is not used: its resource tracker unlinks segments under processes that still use them when
one that only attached ends (https://github.com/python/cpython/issues/82300), and its names outlive a killed owner.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from pathlib import Path

import torch

from lockstep.errors import TransportError

FOLDER = Path("/dev/shm")
PREFIX = "lockstep-"


class Segment:
    """Shared memory as a flat uint8 tensor. Mapped until the last view of `flat` is gone."""

    def __init__(self, path: Path, descriptor: int, nbytes: int, *, is_owner: bool):
        """Takes the descriptor over: the mapping has one of its own to the same open file, and so the same lock."""
        self.path = path
        self._is_owner = is_owner
        self.flat = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
        """[nbytes] uint8. Whoever keeps a view of it keeps the mapping."""
        os.close(descriptor)

    @classmethod
    def create(cls, nbytes: int, folder: Path = FOLDER) -> Segment:
        """New memory of `nbytes` > 0, reserved at once: a full /dev/shm is an error here, not a SIGBUS later.

        Raises `TransportError` where there is no room, or no /dev/shm.
        """
        sweep(folder)
        while True:
            path = folder / f"{PREFIX}{secrets.token_hex(8)}"
            descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                if not _lock(descriptor) or not _is_at(path, descriptor):
                    os.close(descriptor)  # somebody swept it before it was locked
                    continue
                os.posix_fallocate(descriptor, 0, nbytes)
                return cls(path, descriptor, nbytes, is_owner=True)
            except OSError as error:
                path.unlink(missing_ok=True)
                os.close(descriptor)
                if error.errno != errno.ENOSPC:
                    raise
                free = os.statvfs(folder)
                raise TransportError(
                    f"shared memory of {nbytes} bytes does not fit into {folder}, which has "
                    f"{free.f_bavail * free.f_frsize} bytes left; make it larger (containers: --shm-size), or use smaller "
                    "slots or another transport"
                ) from error

    @classmethod
    def attach(cls, path: Path, nbytes: int) -> Segment:
        """The other end's memory. Raises `TransportError` where it is not there, or smaller than said."""
        descriptor = _open(path, os.O_RDWR)
        try:
            found = os.fstat(descriptor).st_size
            if found < nbytes:
                raise TransportError(
                    f"{path} has {found} bytes, {nbytes} were announced: it is not this update's memory"
                )
            return cls(path, descriptor, nbytes, is_owner=False)
        except BaseException:
            os.close(descriptor)
            raise

    def unlink(self) -> None:
        """Remove the name (owner only; again does nothing). Whoever has the memory open keeps it."""
        if self._is_owner:
            self.path.unlink(missing_ok=True)
            self._is_owner = False

    def close(self) -> None:
        """Let go: the name now, mapping and lock as soon as no view is left. Again does nothing."""
        self.unlink()
        self.flat = torch.empty(0, dtype=torch.uint8)


def sweep(folder: Path = FOLDER) -> list[Path]:
    """Remove what dead owners of this user left in `folder`. Returns what was removed."""
    removed = []
    for path in sorted(folder.glob(f"{PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except (FileNotFoundError, PermissionError):
            continue  # gone meanwhile, or another user's
        try:
            if _lock(descriptor) and _is_at(path, descriptor):
                path.unlink()
                removed.append(path)
        finally:
            os.close(descriptor)
    return removed


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise TransportError(
            f"shared memory {path} cannot be opened ({error.strerror}): both ends must run on one host, as one user, and see "
            "one /dev/shm (containers: --ipc); otherwise use the transport collective or disk"
        ) from error


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the name still means the file that is open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
