"""Shared memory of two processes: no room is an error, nothing is left behind, the living are never swept away."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from lockstep.errors import TransportError
from lockstep.transport.segment import FOLDER, PREFIX, Segment, sweep

OWNER = """
import sys
from pathlib import Path
from lockstep.transport.segment import Segment
segment = Segment.create(4096, Path(sys.argv[1]))
segment.flat.fill_(7)
print(segment.path, flush=True)
sys.stdin.read()
"""


def owner(folder):
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", OWNER, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return process, process.stdout.readline().strip()


def end(process, number=signal.SIGKILL):
    process.send_signal(number)
    process.wait(timeout=30)
    process.stdin.close()
    process.stdout.close()


def test_both_ends_see_the_same_bytes_and_the_name_goes_first(tmp_path):
    mine = Segment.create(1000, tmp_path)
    theirs = Segment.attach(mine.path, 1000)
    theirs.unlink()  # the name is the owner's
    assert mine.path.exists()
    mine.unlink()
    assert not mine.path.exists()
    mine.flat.copy_(torch.arange(1000) % 251)
    view = theirs.flat[500:]
    mine.close()
    theirs.close()
    assert torch.equal(view, (torch.arange(500, 1000) % 251).to(torch.uint8)), "a view keeps the memory"


def test_what_a_killed_owner_left_is_swept_and_what_lives_is_not(tmp_path):
    """An owner that is killed before the other end has opened its memory; this is what leaks elsewhere (cpython #82300)."""
    process, path = owner(tmp_path)
    try:
        assert sweep(tmp_path) == []
        reader = Segment.attach(path, 4096)
    finally:
        end(process)
    assert [str(found) for found in sweep(tmp_path)] == [path]
    assert list(tmp_path.iterdir()) == []
    assert int(reader.flat[4095]) == 7, "whoever has it open reads on"


def test_creating_sweeps_and_leaves_other_files_alone(tmp_path):
    process, path = owner(tmp_path)
    end(process)
    (tmp_path / "somebody-else").write_text("x")
    mine = Segment.create(64, tmp_path)
    assert not os.path.exists(path)
    assert {found.name for found in tmp_path.iterdir()} == {"somebody-else", mine.path.name}
    mine.close()


def test_no_room_is_an_error_before_anything_is_written():
    if not FOLDER.is_dir():
        pytest.fail("this system has no /dev/shm")
    free = os.statvfs(FOLDER).f_bavail * os.statvfs(FOLDER).f_frsize
    before = set(FOLDER.glob(f"{PREFIX}*"))
    with pytest.raises(TransportError, match=r"does not fit into /dev/shm, which has \d+ bytes left"):
        Segment.create(free + (1 << 30))
    assert set(FOLDER.glob(f"{PREFIX}*")) <= before


def test_memory_that_is_not_there_or_too_small_is_named(tmp_path):
    with pytest.raises(TransportError, match="both ends must run on one host"):
        Segment.attach(tmp_path / "lockstep-none", 64)
    mine = Segment.create(64, tmp_path)
    with pytest.raises(TransportError, match="has 64 bytes, 128 were announced"):
        Segment.attach(mine.path, 128)
    mine.close()


def test_a_sweep_between_creating_and_locking_costs_another_try(tmp_path, monkeypatch):
    """The file of an owner that has not locked it yet looks like a dead one's."""
    from lockstep.transport import segment  # noqa: PLC0415

    lock, swept = segment._lock, []

    def sweep_first(descriptor):
        if not swept:
            swept.extend(tmp_path.iterdir())
            for path in swept:
                path.unlink()
        return lock(descriptor)

    monkeypatch.setattr(segment, "_lock", sweep_first)
    mine = Segment.create(64, tmp_path)
    assert swept and mine.path not in swept and mine.path.exists()
    mine.close()
