"""Bytes, or a folder's worth of files, and a path in; the whole thing at that path, or nothing at all, out.

Everything is written under a temporary name beside its target (`.tmp-...`), flushed to the disk, and renamed. A process
that is killed half-way leaves only such a temporary name, which `remove_leftovers` deletes. Errors of the file system
become a `CheckpointError` that names the file and says what to do. A folder with a `FILE_LIST` can be checked later on.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from lockstep.errors import CheckpointError

FILE_LIST = "files.json"
"""In a folder: size and xxh3-128 of every other file in it, under "files"."""
_TEMPORARY = ".tmp-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def atomic_write_text(path: Path, text: str) -> None:
    """Put UTF-8 text at `path`, whole or not at all. Raises `CheckpointError`."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Put bytes at `path`, whole or not at all; an older file stays until the new one is on the disk. Raises `CheckpointError`."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}.{os.getpid()}")
    with explain_os_errors(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _fsync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder; when the block ends, it is at `path`, whole. On an error it is removed.

    For one process. Ranks that write into one folder together use `begin_dir` and `commit_dir` (on rank 0) with their own
    barrier in between. Raises `CheckpointError` for errors of the file system, those of the block included.
    """
    with explain_os_errors(path):
        temporary = begin_dir(path)
        try:
            yield temporary
            commit_dir(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def begin_dir(path: Path) -> Path:
    """An empty folder to fill, always of the same name for the same `path`."""
    with explain_os_errors(path):
        temporary = temporary_dir(path)
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        return temporary


def temporary_dir(path: Path) -> Path:
    """The name that `begin_dir(path)` gives, for ranks that only need to know it."""
    return path.with_name(f"{_TEMPORARY}{path.name}")


def commit_dir(temporary: Path, path: Path) -> None:
    """Flush every file, then rename. What was at `path` is moved aside first and deleted last."""
    with explain_os_errors(path):
        for folder, _, names in os.walk(temporary):
            for name in names:
                _fsync(Path(folder) / name)
            _fsync(Path(folder))
        replaced = path.with_name(f"{_TEMPORARY}old-{path.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        if path.exists():
            path.rename(replaced)
        temporary.rename(path)
        _fsync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Delete what killed processes left under temporary names directly in `folder`; what was deleted."""
    with explain_os_errors(folder):
        found = sorted(folder.glob(f"{_TEMPORARY}*")) if folder.is_dir() else []
        for path in found:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        return found


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file in `folder`, for its `FILE_LIST`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILE_LIST)
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "xxh3": _hash(path)} for path in files}


def find_fault(folder: Path) -> str:
    """What differs from the folder's `FILE_LIST`, in words; "" if every file is as it was written."""
    try:
        files = json.loads((folder / FILE_LIST).read_text(encoding="utf-8"))["files"]
        wanted = {str(name): (int(said["bytes"]), str(said["xxh3"])) for name, said in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it is incomplete: its {FILE_LIST} cannot be read ({type(error).__name__}: {error})"
    for name, (size, digest) in wanted.items():
        path = folder / name
        if not path.is_file():
            return f"it is incomplete: {name} is missing"
        if path.stat().st_size != size:
            return f"it is damaged: {name} has {path.stat().st_size} bytes, {size} were written"
        if _hash(path) != digest:
            return f"it is damaged: the bytes of {name} are not those that were written"
    return ""


def _hash(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            state.update(chunk)
    return state.hexdigest()


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into a `CheckpointError` that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(_explain(error, path)) from error


def _explain(error: OSError, path: Path) -> str:
    where = error.filename or str(path)
    if error.errno in _FULL:
        return (
            f"no space to write {where}: {error.strerror} ({_free_mib(path)} free). Free some, or set run.dir to another "
            "disk; checkpoint.keep and observe.samples_per_step bound what a run keeps"
        )
    if error.errno in _FORBIDDEN:
        return f"{where} cannot be written: {error.strerror}. Make it writable for this user, or set run.dir to another path"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{where} cannot be a folder: {error.strerror}. Something on this path is a file; set run.dir to another path"
    return f"{where} cannot be written: {error.strerror or error}"


def _free_mib(path: Path) -> str:
    for folder in path.parents:
        if folder.is_dir():
            return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB"
    return "unknown"


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
