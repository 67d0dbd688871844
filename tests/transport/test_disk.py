"""Files and a marker: nothing unmarked is read, torn writes are named, old updates go, the files are plain safetensors."""

import json

import pytest
import torch
from safetensors.torch import load_file

from helpers_transport import Loop, buckets_of, ends, held, manifest_of, random_tensors
from lockstep.errors import TransportError
from lockstep.transport.disk import MARKER, DiskInlet, DiskOutlet
from lockstep.transport.inproc import push
from lockstep.transport.keeper import Keeper

OLD, NEW = random_tensors(1), random_tensors(2)


@pytest.fixture
def side(tmp_path):
    with ends("disk", tmp_path) as made:
        push(buckets_of(OLD), made.outlet, manifest_of(OLD, 1))
        yield made


def updates(side):
    return sorted(path for path in (side.folder / "updates").iterdir() if path.is_dir())


def _cut(folder):
    file = folder / "bucket-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _flip(folder):
    file = folder / "bucket-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


def _break_header(folder):
    file = folder / "bucket-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[9:40] = b"\x00" * 31
    file.write_bytes(data)


def _lose_file(folder):
    (folder / "bucket-00001.safetensors").unlink()


def _lose_marker(folder):
    (folder / MARKER).unlink()


def _cut_marker(folder):
    (folder / MARKER).write_text((folder / MARKER).read_text()[:20])


def _change_marker(folder):
    content = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps({**content, "version": 1}))


def _forget_file(folder):
    content = json.loads((folder / MARKER).read_text())
    content["files"].popitem()
    (folder / MARKER).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, r"bucket-00001.safetensors has \d+, \d+ bytes were written: a torn write"),
        (_flip, "the digest of what arrived is"),
        (_break_header, r"bucket-00001.safetensors cannot be read \("),
        (_lose_file, r"bucket-00001.safetensors is not there, \d+ bytes were written"),
        (_lose_marker, f"has no readable {MARKER}"),
        (_cut_marker, f"has no readable {MARKER}"),
        (_change_marker, "is of version and digest"),
        (_forget_file, "1 of 3 packets were lost"),
    ],
)
def test_what_was_not_written_whole_is_not_served(side, damage, words):
    class Damaging:
        def call(self, method, payload):
            if method == "commit":
                damage(side.outlet._path)
            return side.control.call(method, payload)

    control, side.outlet.control = side.outlet.control, Damaging()
    with pytest.raises(TransportError, match=words):
        push(buckets_of(NEW), side.outlet, manifest_of(NEW, 2))
    assert side.keeper.version == 1 and held(side.keeper) == side.keeper.digest
    assert [path.name.split("-")[1] for path in updates(side)] == ["1"], "the failed update is removed"
    side.outlet.control = control
    done = push(buckets_of(NEW), side.outlet, manifest_of(NEW, 3))
    assert held(side.keeper) == done.digest


def test_files_are_read_by_anybody_who_reads_safetensors(side):
    (folder,) = updates(side)
    found = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    assert found.keys() == dict(OLD).keys()
    for name, tensor in OLD:
        assert torch.equal(found[name], tensor)


def test_old_updates_go_and_the_newest_stay(tmp_path):
    outlet = DiskOutlet(Loop(DiskInlet(Keeper())), tmp_path, keep=2)
    for version in (1, 2, 3, 4):
        push(buckets_of(OLD), outlet, manifest_of(OLD, version))
    assert sorted(path.name.split("-")[1] for path in tmp_path.glob("version-*")) == ["3", "4"]
    outlet.close()


def test_what_a_dead_trainer_left_is_removed_and_its_last_commit_stays(tmp_path):
    dead = DiskOutlet(Loop(DiskInlet(Keeper())), tmp_path)
    push(buckets_of(OLD), dead, manifest_of(OLD, 1))
    dead.begin(manifest_of(NEW, 2))
    dead.receive(buckets_of(NEW)[0])
    (tmp_path / "notes.txt").write_text("somebody's")
    dead._release()  # what the end of its process does
    second = DiskOutlet(Loop(DiskInlet(Keeper())), tmp_path)
    assert [path.name.split("-")[1] for path in tmp_path.glob("version-*")] == ["1"]
    assert (tmp_path / "notes.txt").exists()
    second.close()


def test_two_outlets_do_not_share_a_folder(tmp_path):
    """Each would remove what the other one's engine is about to read."""
    first = DiskOutlet(Loop(DiskInlet(Keeper())), tmp_path)
    with pytest.raises(TransportError, match="is in use by another outlet"):
        DiskOutlet(Loop(DiskInlet(Keeper())), tmp_path)
    first.close()
    DiskOutlet(Loop(DiskInlet(Keeper())), tmp_path).close()
    with pytest.raises(ValueError, match="keep must be at least 1"):
        DiskOutlet(Loop(DiskInlet(Keeper())), tmp_path, keep=0)


def test_an_engine_that_does_not_see_the_folder_says_so(side, monkeypatch):
    forward = side.control.call

    def elsewhere(method, payload):
        return forward(method, {**payload, "path": "/nowhere"} if method == "begin" else payload)

    monkeypatch.setattr(side.control, "call", elsewhere)
    with pytest.raises(TransportError, match="/nowhere is not there: both ends must see the folder"):
        push(buckets_of(NEW), side.outlet, manifest_of(NEW, 2))
    assert side.keeper.aborts, "the receiver, which had begun, was told"
