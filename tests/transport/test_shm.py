"""Shared memory: two slots that overlap, a stated size, no name left after the begin; the device path on a GPU."""

import multiprocessing as mp
import threading

import pytest
import torch

from helpers_transport import buckets_of, ends, held, manifest_of, random_tensors, serve_kinds
from lockstep.errors import TransportError
from lockstep.transport import shm
from lockstep.transport.channel import ConnectionControl, Door
from lockstep.transport.cuda_ipc import OpenedDeviceSlots
from lockstep.transport.inproc import push
from lockstep.transport.keeper import Keeper

LIMIT_S = 30.0
TENSORS = random_tensors(3, 8)


class Slow(Keeper):
    """Reads its first bucket only when it is let."""

    def __init__(self):
        super().__init__()
        self.has_bucket, self.may_go_on = threading.Event(), threading.Event()

    def receive(self, bucket):
        self.has_bucket.set()
        assert self.may_go_on.wait(LIMIT_S)
        super().receive(bucket)


def test_a_bucket_is_packed_while_the_one_before_is_read(tmp_path, monkeypatch):
    slow, second_is_packed, num_packed = Slow(), threading.Event(), []
    pack = shm.pack

    def watch(*args):
        pack(*args)
        num_packed.append(1)
        if len(num_packed) == 2:
            second_is_packed.set()

    monkeypatch.setattr(shm, "pack", watch)
    done = []
    with ends("shm", tmp_path, receiver=slow, slot_bytes=400) as side:
        sender = threading.Thread(
            target=lambda: done.append(push(buckets_of(TENSORS), side.outlet, manifest_of(TENSORS)))
        )
        sender.start()
        assert slow.has_bucket.wait(LIMIT_S)
        assert second_is_packed.wait(LIMIT_S), "packing waits for the reader"
        assert len(num_packed) == 2, "the third bucket needs the slot that is being read"
        slow.may_go_on.set()
        sender.join(LIMIT_S)
    assert held(slow) == done[0].digest


@pytest.mark.parametrize(("slot_bytes", "capacity"), [(1, 320), (400, 448), (1 << 30, 1728)])
def test_memory_is_two_slots_of_a_stated_size_and_has_no_name(tmp_path, slot_bytes, capacity):
    """The largest tensor takes 320 bytes, all of them 1728; see `packet_bytes`."""
    with ends("shm", tmp_path, slot_bytes=slot_bytes) as side:
        side.outlet.begin(manifest_of(TENSORS))
        assert not list(tmp_path.iterdir()), "the name is gone when begin returns: a killed trainer leaves nothing"
        assert side.outlet._slots.segment.flat.numel() == 2 * capacity
        assert side.inlet._slots.segment.flat.numel() == 2 * capacity
        side.outlet.abort("enough")
        assert side.outlet._slots is None and side.inlet._slots is None


def test_slots_are_kept_for_updates_that_fit_and_dropped_by_ones_that_fail(tmp_path):
    """Fresh pages cost more than copying. Who does not have them any more (a restarted engine) gets new ones."""
    small, calls = TENSORS[:2], []
    with ends("shm", tmp_path, slot_bytes=400) as side:
        for named in (TENSORS, small, TENSORS):
            push(buckets_of(named), side.outlet, manifest_of(named))
            calls.append(side.control.calls.count("attach"))
        with pytest.raises(TransportError, match="never came"):
            push([], side.outlet, manifest_of(TENSORS))
        assert side.outlet._slots is None and side.inlet._slots is None
        push(buckets_of(small), side.outlet, manifest_of(small))
        push(buckets_of(TENSORS), side.outlet, manifest_of(TENSORS))
        calls.append(side.control.calls.count("attach"))
        side.control.inlet = shm.ShmInlet(Keeper())
        done = push(buckets_of(TENSORS), side.outlet, manifest_of(TENSORS))
        assert held(side.control.inlet.receiver) == done.digest
        calls.append(side.control.calls.count("attach"))
        side.control.inlet.close()
    assert calls == [1, 1, 1, 3, 4]
    assert side.outlet._slots is None and side.inlet._slots is None, "close lets go"


def test_a_begin_that_is_refused_leaves_no_memory(tmp_path, monkeypatch):
    with ends("shm", tmp_path) as side:
        monkeypatch.setattr(side.keeper, "begin", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            side.outlet.begin(manifest_of(TENSORS))
        assert not list(tmp_path.iterdir()) and side.outlet._slots is None


def test_an_engine_without_the_trainers_device_is_told_so():
    with pytest.raises(TransportError, match="the trainer's weights are on the CUDA device GPU-0, this process sees"):
        OpenedDeviceSlots.open({"device": "GPU-0", "handle": {}}, 64)


@pytest.mark.gpu
def test_device_slots_deliver_bit_identically():
    """Over CUDA IPC into another process: twice, with slots that are used many times."""
    named = [(name, tensor.cuda()) for name, tensor in random_tensors(5, 40)]
    with Door() as door:
        process = mp.get_context("spawn").Process(
            target=serve_kinds, args=(door.address, door.key, ["shm"]), daemon=True
        )
        process.start()
        try:
            control = ConnectionControl(door.admit(60.0, process.is_alive), timeout_s=60.0, is_alive=process.is_alive)
            outlet = shm.ShmOutlet(control, slot_bytes=1024, device="cuda")
            for version in (1, 2):
                expected = push(buckets_of(named), Keeper(), manifest_of(named, version))
                assert push(buckets_of(named), outlet, manifest_of(named, version)) == expected
                assert control.call("held", {})["digest"] == expected.digest
            outlet.close()
            torch.cuda.ipc_collect()
        finally:
            process.kill()
            process.join(LIMIT_S)
