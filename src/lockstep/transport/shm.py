"""Buckets in, the same tensors in another process of the same host, out: through shared memory, host's or a CUDA device's.

Memory: two slots, each as large as `slot_bytes` or the largest tensor of the update, whichever is larger, and no larger
than the update. The outlet packs bucket n + 1 into one while the engine reads bucket n from the other; each is
acknowledged by the answer to its "receive". The memory lives for one update, its name only for the begin (`segment`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from lockstep.transport.base import Control, Receiver
from lockstep.transport.cuda_ipc import DeviceSlots, OpenedDeviceSlots
from lockstep.transport.ends import NUM_SLOTS, SLOT_BYTES, Outlet, ReceiverInlet
from lockstep.transport.packet import layout_from_json, layout_to_json, pack, packet_bytes, split_bucket, unpack
from lockstep.transport.segment import FOLDER, Segment
from lockstep.types import Bucket, Manifest


class Slots(Protocol):
    """Memory of one update, at either end: `NUM_SLOTS` flat uint8 tensors."""

    def slot(self, index: int) -> torch.Tensor:
        """[capacity] uint8."""
        ...

    def settle(self) -> None:
        """Return when everything that this process has enqueued on the memory's device is done."""
        ...

    def close(self) -> None: ...


class HostSlots:
    """Slots in POSIX shared memory. Nothing is ever enqueued: copies are done when they return."""

    def __init__(self, segment: Segment, capacity: int):
        self.segment = segment
        self._capacity = capacity

    def slot(self, index: int) -> torch.Tensor:
        return self.segment.flat[index * self._capacity : (index + 1) * self._capacity]

    def settle(self) -> None:
        return

    def close(self) -> None:
        self.segment.close()


class ShmOutlet(Outlet):
    """The trainer's end. `device`: where the slots are; a CUDA device for an engine that has the same one (CUDA IPC).

    Raises, from `begin`, `TransportError` where /dev/shm has no room for the slots.
    """

    def __init__(
        self,
        control: Control,
        *,
        slot_bytes: int = SLOT_BYTES,
        device: torch.device | str = "cpu",
        folder: Path = FOLDER,
    ):
        super().__init__(control)
        self._slot_bytes = slot_bytes
        self._device = torch.device(device)
        self._folder = folder
        self._slots: Slots | None = None
        self._capacity = 0

    def _open(self, manifest: Manifest, payload: dict[str, Any]) -> None:
        self._capacity = packet_bytes(manifest, self._slot_bytes)
        if self._device.type == "cuda":
            device_slots = DeviceSlots(self._capacity, self._device)
            self._slots = device_slots
            self.control.call("begin", {**payload, "capacity": self._capacity, **device_slots.describe()})
            return
        segment = Segment.create(NUM_SLOTS * self._capacity, self._folder)
        self._slots = HostSlots(segment, self._capacity)
        try:
            self.control.call("begin", {**payload, "capacity": self._capacity, "segment": str(segment.path)})
        finally:
            segment.unlink()

    def _send(self, bucket: Bucket) -> None:
        assert self._slots is not None
        for layout, part in split_bucket(bucket, self._capacity):
            seq = self._next_seq()
            pack(part, layout, self._slots.slot(seq % NUM_SLOTS))
            self._slots.settle()
            payload = {"update": self._update, "seq": seq, "slot": seq % NUM_SLOTS, "layout": layout_to_json(layout)}
            self._start(partial(_call, self.control, payload))

    def _free(self, *, is_committed: bool) -> None:
        if self._slots is not None:
            self._slots.close()
            self._slots = None


class ShmInlet(ReceiverInlet):
    """The engine's end. The receiver is handed views of a slot, which the next bucket but one overwrites."""

    def __init__(self, receiver: Receiver):
        super().__init__(receiver)
        self._slots: Slots | None = None
        self._capacity = 0

    def _open(self, manifest: Manifest, payload: dict[str, Any]) -> dict[str, Any]:
        self._capacity = payload["capacity"]
        if "segment" in payload:
            segment = Segment.attach(Path(payload["segment"]), NUM_SLOTS * self._capacity)
            self._slots = HostSlots(segment, self._capacity)
        else:
            self._slots = OpenedDeviceSlots.open(payload, self._capacity)
        return {}

    def _other(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        if method != "receive":
            return super()._other(method, payload)
        assert self._slots is not None
        layout = layout_from_json(payload["layout"], self._capacity)
        self._deliver(payload["seq"], unpack(self._slots.slot(payload["slot"]), layout))
        self._slots.settle()
        return {}

    def _free(self) -> None:
        if self._slots is not None:
            self._slots.close()
            self._slots = None


def _call(control: Control, payload: dict[str, Any]) -> None:
    control.call("receive", payload)
