"""Writes that are cut short by a full disk, an error or a kill: the target is whole, old or absent, and nothing is left over."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.errors import CheckpointError
from lockstep.files import (
    atomic_dir,
    atomic_write_bytes,
    atomic_write_text,
    begin_dir,
    commit_dir,
    remove_leftovers,
    temporary_dir,
)


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """A disk that takes no file beyond `nbytes`: the kernel writes a part, then refuses, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_replaces_whole_files(tmp_path: Path):
    path = tmp_path / "a.txt"
    atomic_write_text(path, "größer")
    atomic_write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.txt"]


def test_a_disk_that_fills_up_leaves_the_old_file_and_says_so(tmp_path: Path):
    path = tmp_path / "a.bin"
    atomic_write_bytes(path, b"old")
    with at_most(1000), pytest.raises(CheckpointError, match=r"no space to write .*a\.bin.* MiB free.*run\.dir"):
        atomic_write_bytes(path, bytes(4000))
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_enospc_at_the_flush_counts_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"no space to write .*a\.txt: No space left on device"):
        atomic_write_text(tmp_path / "a.txt", "x")
    assert names(tmp_path) == []


def test_path_through_a_file_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="Something on this path is a file"):
        atomic_write_text(tmp_path / "file" / "below.txt", "x")


def test_dir_appears_whole(tmp_path: Path):
    target = tmp_path / "step-1"
    with atomic_dir(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("1")
        assert not target.exists()
    assert (target / "sub" / "a").read_text() == "1"
    assert names(tmp_path) == ["step-1"]


def test_dir_replaces_an_older_one_and_survives_an_error_in_the_block(tmp_path: Path):
    target = tmp_path / "step-1"
    for text in ("one", "two"):
        with atomic_dir(target) as folder:
            (folder / text).write_text(text)
    assert names(target) == ["two"]
    with pytest.raises(ZeroDivisionError), atomic_dir(target) as folder:
        (folder / "three").write_text("x")
        raise ZeroDivisionError
    assert names(target) == ["two"]
    assert names(tmp_path) == ["step-1"]


def test_full_disk_inside_the_block_is_explained(tmp_path: Path):
    with (
        at_most(1000),
        pytest.raises(CheckpointError, match="no space to write"),
        atomic_dir(tmp_path / "step-1") as folder,
    ):
        (folder / "big").write_bytes(bytes(5000))
    assert names(tmp_path) == []


def test_ranks_find_the_same_temporary_dir(tmp_path: Path):
    target = tmp_path / "step-1"
    (temporary_dir(target)).mkdir()
    (temporary_dir(target) / "of a killed run").write_text("x")
    folder = begin_dir(target)
    assert folder == temporary_dir(target)
    assert names(folder) == []
    (folder / "a").write_text("1")
    commit_dir(folder, target)
    assert names(tmp_path) == ["step-1"]


WRITE_THEN_DIE = """
import os, signal, sys
from pathlib import Path
from lockstep.files import atomic_dir
with atomic_dir(Path(sys.argv[1]) / "step-1") as folder:
    (folder / "a").write_text("1")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(30)
def test_a_kill_leaves_only_what_remove_leftovers_takes(tmp_path: Path):
    (tmp_path / "keep").write_text("x")
    ended = subprocess.run([sys.executable, "-c", WRITE_THEN_DIE, str(tmp_path)], timeout=20, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "step-1").exists()
    (tmp_path / ".tmp-x.json.123").write_text("half")
    (tmp_path / ".tmp-link").symlink_to(tmp_path)
    removed = remove_leftovers(tmp_path)
    assert [path.name for path in removed] == [".tmp-link", ".tmp-step-1", ".tmp-x.json.123"]
    assert names(tmp_path) == ["keep"]
    assert remove_leftovers(tmp_path / "absent") == []
