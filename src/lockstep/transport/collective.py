"""Buckets in, the same tensors in processes of other hosts, out: over a process group made for this, gloo's or NCCL's.

The group is apart from the trainer's and the engine's own (which `torch.distributed` keeps in globals): rank 0 is the
outlet, the others are the engine's workers. It stays from update to update, is dropped by whichever end meets an error,
and is formed again by the next begin. Each packet is a call of the control and, at the same time, one message or
broadcast: where one of the two fails, the other is ended (see `_transfer`).

Memory: two packets at the outlet, one at each inlet; a packet is `slot_bytes`, or the largest tensor. Ports: the store
listens on a free port of `host`, gloo on the address that reaches it; both on loopback unless told otherwise.
"""

from __future__ import annotations

import hashlib
import hmac
import uuid
from functools import partial
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from lockstep.errors import LockstepError, TransportError
from lockstep.transport.base import Control, Receiver
from lockstep.transport.ends import NUM_SLOTS, SLOT_BYTES, Outlet, ReceiverInlet
from lockstep.transport.hosts import LOOPBACK, address_towards, check_secret
from lockstep.transport.packet import layout_from_json, layout_to_json, pack, packet_bytes, split_bucket, unpack
from lockstep.transport.wire import (
    Backend,
    Sending,
    Wire,
    arrival_key,
    host_store,
    make_wire,
    reach_store,
    wait_for_workers,
)
from lockstep.types import Bucket, Manifest


class CollectiveOutlet(Outlet):
    """The trainer's end: one per engine. `num_receivers`: the engine's workers that a call of `control` reaches.

    `host`: an address of this host that the workers reach; other than loopback it needs the `token` that the inlets have.
    `timeout_s`: limit of forming the group and of one packet. `device`: where packets are packed; a CUDA device for nccl.
    """

    def __init__(
        self,
        control: Control,
        *,
        backend: Backend = "gloo",
        device: torch.device | str = "cpu",
        num_receivers: int = 1,
        slot_bytes: int = SLOT_BYTES,
        timeout_s: float = 60.0,
        host: str = LOOPBACK,
        token: str | None = None,
    ):
        super().__init__(control)
        check_secret(host, token)
        self._backend: Backend = backend
        self._device = torch.device(device)
        self._num_receivers = num_receivers
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._host = host
        self._token = token
        self._store: TCPStore | None = None
        self._wire: Wire | None = None
        self._group = ""
        self._slots: list[torch.Tensor] = []

    @property
    def group(self) -> str:
        """Id of the group that is formed; "" where the next begin forms one."""
        return self._group

    def close(self) -> None:
        super().close()
        self._drop()
        self._store = None

    def _open(self, manifest: Manifest, payload: dict[str, Any]) -> None:
        capacity = packet_bytes(manifest, self._slot_bytes)
        self._slots = [torch.empty(capacity, dtype=torch.uint8, device=self._device) for _ in range(NUM_SLOTS)]
        answer = self.control.call("begin", {**payload, "capacity": capacity})
        if self._wire is None or answer.get("group") != self._group:
            self._drop()
            self._form(payload["update"])

    def _form(self, update: str) -> None:
        """Make the group: the workers are called to the store, and come; a refusal ends the wait for them at once."""
        if self._store is None:
            self._store = host_store(self._host, self._timeout_s)
        group = uuid.uuid4().hex
        call = {
            "update": update,
            "group": group,
            "host": self._host,
            "port": self._store.port,
            "backend": self._backend,
            "size": 1 + self._num_receivers,
            "timeout_s": self._timeout_s,
        }
        store = PrefixStore(_prefix(group, self._token), self._store)
        self._start(partial(_call, self.control, "join", call))
        assert self._in_flight is not None
        wait_for_workers(store, self._num_receivers, self._timeout_s, self._in_flight)
        wire = make_wire(
            self._backend, store, 0, call["size"], timeout_s=self._timeout_s, host=self._host, device=self._device
        )
        self._wait()
        self._wire, self._group = wire, group

    def _send(self, bucket: Bucket) -> None:
        for layout, part in split_bucket(bucket, self._slots[0].numel()):
            seq = self._next_seq()
            flat = self._slots[seq % NUM_SLOTS][: layout.nbytes]
            pack(part, layout, flat)
            if flat.is_cuda:
                torch.cuda.current_stream(flat.device).synchronize()
            payload = {"update": self._update, "seq": seq, "layout": layout_to_json(layout)}
            self._start(partial(self._transfer, flat, payload))

    def _transfer(self, flat: torch.Tensor, payload: dict[str, Any]) -> None:
        """One packet: the call and the bytes at once. Raises the call's error first: it has the engine's own words."""
        assert self._wire is not None
        sending = Sending(self._wire, flat)
        try:
            self.control.call("receive", payload)
        except BaseException as error:
            failure = sending.give_up()
            if failure is not None:
                error.add_note(f"the packet's bytes: {failure}")
            self._drop()
            raise
        try:
            sending.finish()
        except LockstepError:
            self._drop()
            raise

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire, self._group = None, ""

    def _free(self, *, is_committed: bool) -> None:
        self._slots = []
        if not is_committed:
            self._drop()


class CollectiveInlet(ReceiverInlet):
    """One worker's end. `rank`: 1 .. num_receivers, its number among the engine's workers, plus 1."""

    def __init__(
        self, receiver: Receiver, *, rank: int = 1, device: torch.device | str = "cpu", token: str | None = None
    ):
        super().__init__(receiver)
        self._rank = rank
        self._device = torch.device(device)
        self._token = token
        self._wire: Wire | None = None
        self._group = ""
        self._flat = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        super().close()
        self._drop()

    def _open(self, manifest: Manifest, payload: dict[str, Any]) -> dict[str, Any]:
        self._flat = torch.empty(payload["capacity"], dtype=torch.uint8, device=self._device)
        return {"group": self._group}

    def _other(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        if method not in ("join", "receive"):
            return super()._other(method, payload)
        try:
            return self._join(payload) if method == "join" else self._receive(payload)
        except BaseException:
            self._drop()  # the outlet, where it waits for this end, is released by it
            raise

    def _join(self, payload: dict[str, Any]) -> dict[str, Any]:
        self._drop()
        host, port, timeout_s = payload["host"], payload["port"], payload["timeout_s"]
        check_secret(host, self._token)
        store = PrefixStore(_prefix(payload["group"], self._token), reach_store(host, port, timeout_s))
        store.set(arrival_key(self._rank), "yes")
        mine = address_towards(host, port)
        self._wire = make_wire(
            payload["backend"],
            store,
            self._rank,
            payload["size"],
            timeout_s=timeout_s,
            host=mine,
            device=self._device,
        )
        self._group = payload["group"]
        return {}

    def _receive(self, payload: dict[str, Any]) -> dict[str, Any]:
        if self._wire is None:
            raise TransportError("a packet is announced, but the process group is gone; begin forms it again")
        self._expect(payload["seq"])
        layout = layout_from_json(payload["layout"], self._flat.numel())
        flat = self._flat[: layout.nbytes]
        self._wire.receive(flat)
        self._deliver(payload["seq"], unpack(flat, layout))
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        return {}

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire, self._group = None, ""

    def _free(self, *, is_committed: bool) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)


def _prefix(group: str, token: str | None) -> str:
    """Where the group's ranks meet in the store: found only by who has the token. The token itself never travels."""
    return hmac.new((token or "").encode(), group.encode(), hashlib.sha256).hexdigest()


def _call(control: Control, method: str, payload: dict[str, Any]) -> None:
    control.call(method, payload)
