"""The device path as far as it can be seen without a device: what it sends is what torch's rebuilding takes."""

import inspect
import json

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from lockstep.errors import TransportError
from lockstep.transport import cuda_ipc
from lockstep.transport.cuda_ipc import DeviceSlots, OpenedDeviceSlots


class FakeDevice:
    """Stands in for torch.cuda: one device, memory on the CPU."""

    uuid = "GPU-7"

    def __init__(self, monkeypatch):
        self.waits: list[str] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: self.waits.append("device"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self)

    def synchronize(self):
        self.waits.append("stream")


def test_the_fields_are_those_that_torch_rebuilds_from():
    assert tuple(inspect.signature(rebuild_cuda_tensor).parameters)[6:] == cuda_ipc._FIELDS


def test_handles_pass_through_json_and_each_end_waits_for_its_own_work(monkeypatch):
    fake, rebuilt = FakeDevice(monkeypatch), {}
    sent = (3, b"\x00\xffhandle", 1 << 20, 512, False, b"counter\xfe", 4, b"event\x80", True)

    def rebuild(cls, size, stride, offset, storage, dtype, **fields):
        rebuilt.update(fields, size=tuple(size), dtype=dtype)
        return torch.zeros(size, dtype=dtype)

    monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(cuda_ipc, "reduce_tensor", lambda flat: (rebuild, (None,) * 6 + sent))
    mine = DeviceSlots(128, torch.device("cpu"))
    theirs = OpenedDeviceSlots.open(json.loads(json.dumps(mine.describe())), 128)
    assert rebuilt == {
        **dict(zip(cuda_ipc._FIELDS, sent, strict=True)), "storage_device": 0, "size": (256,), "dtype": torch.uint8
    }  # fmt: skip
    assert mine.slot(1).data_ptr() - mine.slot(0).data_ptr() == 128 and theirs.slot(1).numel() == 128
    mine.settle()
    theirs.settle()
    assert fake.waits == ["stream", "device"]
    mine.close()
    theirs.close()


def test_memory_that_torch_shares_otherwise_is_refused(monkeypatch):
    FakeDevice(monkeypatch)
    monkeypatch.setattr(cuda_ipc, "reduce_tensor", lambda flat: (json.dumps, ()))
    with pytest.raises(TransportError, match="with dumps, not by CUDA IPC"):
        DeviceSlots(128, torch.device("cpu")).describe()
