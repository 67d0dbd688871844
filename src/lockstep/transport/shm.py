"""Buckets in, the same tensors in another process of the same host, out: through shared memory, host's or a CUDA device's.

Memory: two slots, each as large as `slot_bytes` or the largest tensor of the update, whichever is larger, and no larger
than the update. The outlet packs bucket n + 1 into one while the engine reads bucket n from the other; each is
acknowledged by the answer to its "receive". Both ends keep the slots for the next update that fits into them (touching
fresh pages costs more than copying), until `close` or an update that fails. Their name lives for the begin only (`segment`).
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
        self._name = ""

    def close(self) -> None:
        super().close()
        self._let_go()

    def _open(self, manifest: Manifest, payload: dict[str, Any]) -> None:
        needed = packet_bytes(manifest, self._slot_bytes)
        if self._capacity < needed:
            self._let_go()
        answer = self.control.call("begin", {**payload, "slots": self._name})
        if self._slots is None or answer.get("slots") != self._name:
            self._let_go()
            self._make_slots(needed, payload["update"])

    def _make_slots(self, capacity: int, update: str) -> None:
        """New memory, opened by the engine: it has been restarted, or none of this size has been needed before."""
        call = {"update": update, "slots": update, "capacity": capacity}
        if self._device.type == "cuda":
            device_slots = DeviceSlots(capacity, self._device)
            self._slots = device_slots
            self.control.call("attach", {**call, **device_slots.describe()})
        else:
            segment = Segment.create(NUM_SLOTS * capacity, self._folder)
            self._slots = HostSlots(segment, capacity)
            try:
                self.control.call("attach", {**call, "segment": str(segment.path)})
            finally:
                segment.unlink()
        self._capacity, self._name = capacity, update

    def _send(self, bucket: Bucket) -> None:
        assert self._slots is not None
        for layout, part in split_bucket(bucket, self._capacity):
            seq = self._next_seq()
            pack(part, layout, self._slots.slot(seq % NUM_SLOTS))
            self._slots.settle()
            payload = {"update": self._update, "seq": seq, "slot": seq % NUM_SLOTS, "layout": layout_to_json(layout)}
            self._start(partial(_call, self.control, payload))

    def _free(self, *, is_committed: bool) -> None:
        if not is_committed:
            self._let_go()

    def _let_go(self) -> None:
        if self._slots is not None:
            self._slots.close()
        self._slots, self._capacity, self._name = None, 0, ""


class ShmInlet(ReceiverInlet):
    """The engine's end. The receiver is handed views of a slot, which the next bucket but one overwrites."""

    def __init__(self, receiver: Receiver):
        super().__init__(receiver)
        self._slots: Slots | None = None
        self._capacity = 0
        self._name = ""

    def close(self) -> None:
        super().close()
        self._let_go()

    def _open(self, manifest: Manifest, payload: dict[str, Any]) -> dict[str, Any]:
        if payload["slots"] != self._name:
            self._let_go()
        return {"slots": self._name}

    def _other(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        if method == "attach":
            return self._attach(payload)
        if method != "receive" or self._slots is None:
            return super()._other(method, payload)
        layout = layout_from_json(payload["layout"], self._capacity)
        self._deliver(payload["seq"], unpack(self._slots.slot(payload["slot"]), layout))
        self._slots.settle()
        return {}

    def _attach(self, payload: dict[str, Any]) -> dict[str, Any]:
        self._let_go()
        capacity = payload["capacity"]
        if "segment" in payload:
            segment = Segment.attach(Path(payload["segment"]), NUM_SLOTS * capacity)
            self._slots = HostSlots(segment, capacity)
        else:
            self._slots = OpenedDeviceSlots.open(payload, capacity)
        self._capacity, self._name = capacity, payload["slots"]
        return {}

    def _free(self, *, is_committed: bool) -> None:
        if not is_committed:
            self._let_go()

    def _let_go(self) -> None:
        if self._slots is not None:
            self._slots.close()
        self._slots, self._capacity, self._name = None, 0, ""


def _call(control: Control, payload: dict[str, Any]) -> None:
    control.call("receive", payload)
