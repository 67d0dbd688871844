"""A size in, memory of one CUDA device that two processes share, out: the device path of the transport `shm`.

The owner's allocation is opened in the other process through a CUDA IPC handle, which torch wraps (`reduce_tensor`,
`rebuild_cuda_tensor` of torch.multiprocessing). Order between the processes is kept by waiting, not by shared events: the
owner waits for its packing before it says that a slot is full, the reader waits for its device before it acknowledges.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from lockstep.errors import TransportError
from lockstep.transport.ends import NUM_SLOTS

_FIELDS = (
    "storage_device", "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad",
    "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required",
)  # fmt: skip
"""The last arguments of `rebuild_cuda_tensor`, in its order (torch 2.6 to 2.13)."""


class DeviceSlots:
    """The owner's end: both slots in one allocation of the caching allocator."""

    def __init__(self, capacity: int, device: torch.device):
        self._capacity = capacity
        self._device = device
        self._flat = torch.empty(NUM_SLOTS * capacity, dtype=torch.uint8, device=device)

    def slot(self, index: int) -> torch.Tensor:
        return self._flat[index * self._capacity : (index + 1) * self._capacity]

    def settle(self) -> None:
        """Packing ran on the current stream of this thread."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """The allocator keeps the memory until the other process has closed it too (torch counts references across them)."""
        self._flat = torch.empty(0, dtype=torch.uint8)

    def describe(self) -> dict[str, Any]:
        """JSON-able: what `OpenedDeviceSlots.open` needs in the other process."""
        rebuild, arguments = reduce_tensor(self._flat)
        if rebuild is not rebuild_cuda_tensor:
            raise TransportError(
                f"torch {torch.__version__} shares memory of {self._device} with {rebuild.__name__}, not by CUDA IPC; "
                "use device='cpu' for this transport (expandable allocator segments need a driver that exports them)"
            )
        handle = {field: _to_json(value) for field, value in zip(_FIELDS, arguments[6:], strict=True)}
        return {"device": str(torch.cuda.get_device_properties(self._device).uuid), "handle": handle}


class OpenedDeviceSlots:
    """The reader's end."""

    def __init__(self, flat: torch.Tensor, capacity: int):
        self._flat = flat
        self._capacity = capacity
        self._device = flat.device

    @classmethod
    def open(cls, payload: dict[str, Any], capacity: int) -> OpenedDeviceSlots:
        """Raises `TransportError` where this process does not see the owner's device."""
        device = _local_device(payload["device"])
        handle = {field: _from_json(payload["handle"][field]) for field in _FIELDS}
        handle["storage_device"] = device
        flat = rebuild_cuda_tensor(
            torch.Tensor, torch.Size([NUM_SLOTS * capacity]), (1,), 0, torch.UntypedStorage, torch.uint8, **handle
        )
        return cls(flat, capacity)

    def slot(self, index: int) -> torch.Tensor:
        return self._flat[index * self._capacity : (index + 1) * self._capacity]

    def settle(self) -> None:
        """The receiver's copies may run on any stream."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._flat = torch.empty(0, dtype=torch.uint8)


def _local_device(uuid: str) -> int:
    """Processes number their devices apart (CUDA_VISIBLE_DEVICES); the uuid is the device's own."""
    found = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in found:
        raise TransportError(
            f"the trainer's weights are on the CUDA device {uuid}, this process sees {found or 'no CUDA device'}; start the "
            "engine on the trainer's device, or use device='cpu' for this transport"
        )
    return found.index(uuid)


def _to_json(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _from_json(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value
