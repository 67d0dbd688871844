"""A store and a rank in, a process group of a transport's own that moves flat bytes from rank 0 to the others, out.

Made from torch's group classes directly: `init_process_group` and `new_group` would need, and change, the one default
group of a process, which belongs to the trainer or to the engine.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from lockstep.errors import LockstepError, TransportError
from lockstep.transport.hosts import listen

_LOOK_S = 0.05
"""How often a wait looks whether it is to end."""
_NCCL_MARGIN = 4
"""NCCL's own watchdog ends the whole process at its time limit; it gets this many times ours, so ours comes first."""

AFTER_ACK_S = 5.0
"""How long the end of sending may lag behind the acknowledgement that everything was read."""

Backend = Literal["gloo", "nccl"]


class Wire(Protocol):
    """One end of the group."""

    def send(self, flat: torch.Tensor, stop: threading.Event) -> None:
        """Rank 0: `flat` (uint8) to all others. Returns when it may be overwritten; raises `TransportError`."""
        ...

    def receive(self, flat: torch.Tensor) -> None:
        """The others: fill `flat`. Raises `TransportError` when rank 0 is gone or nothing comes in time."""
        ...

    def close(self) -> None:
        """Leave the group. What waits at the other ends fails; what waits at this one ends within its time limit."""
        ...


class GlooWire:
    """Messages, not a broadcast: gloo's collectives copy a packet inside and take twice as long (docs/architecture.md)."""

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float, host: str):
        gloo: Any = ProcessGroupGloo  # torch's type stubs lack most of it
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=host)]
        self._group: Any = ProcessGroupGloo(store, rank, size, options)
        self._size = size

    def send(self, flat: torch.Tensor, stop: threading.Event) -> None:
        """torch offers no way to end a message that waits: `stop` is not looked at, a peer that is gone ends it."""
        group = self._opened()
        try:
            for work in [group.send([flat], rank, 0) for rank in range(1, self._size)]:
                work.wait()
        except RuntimeError as error:
            raise TransportError(f"gloo could not send {flat.numel()} bytes: {_first_line(error)}") from error

    def receive(self, flat: torch.Tensor) -> None:
        try:
            self._opened().recv([flat], 0, 0).wait()
        except RuntimeError as error:
            raise TransportError(f"gloo could not receive {flat.numel()} bytes: {_first_line(error)}") from error

    def close(self) -> None:
        """The group's last reference closes its connections, which is what the others notice."""
        self._group = None

    def _opened(self) -> Any:
        if self._group is None:
            raise TransportError("the process group has been closed; begin the update again")
        return self._group


class NcclWire:
    """One broadcast per packet. Waits by polling, so that a peer that is gone is left by aborting the communicator.

    A failed broadcast counts as completed for torch, without a public way to ask; its bytes then fail the digest.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float, device: torch.device):
        nccl: Any = dist.ProcessGroupNCCL  # CPU builds of torch have none
        options = nccl.Options()
        options._timeout = timedelta(seconds=_NCCL_MARGIN * timeout_s)
        torch.cuda.set_device(device)
        self._group: Any = nccl(store, rank, size, options)
        self._timeout_s = timeout_s
        self._device = device

    def send(self, flat: torch.Tensor, stop: threading.Event) -> None:
        self._broadcast(flat, stop)

    def receive(self, flat: torch.Tensor) -> None:
        self._broadcast(flat, threading.Event())

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None

    def _broadcast(self, flat: torch.Tensor, stop: threading.Event) -> None:
        if self._group is None:
            raise TransportError("the process group has been closed; begin the update again")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.asyncOp = True
        ends = time.monotonic() + self._timeout_s
        with torch.cuda.device(self._device):
            work = self._group.broadcast([flat], options)
        while not work.is_completed():
            if time.monotonic() > ends or stop.is_set():
                self.close()
                why = "was stopped" if stop.is_set() else f"took longer than {self._timeout_s:g} s"
                raise TransportError(f"NCCL's broadcast of {flat.numel()} bytes {why}; the communicator is aborted")
            stop.wait(0.0005)
        work.wait()  # it is done: this only orders the caller's stream after it


def make_wire(
    backend: Backend, store: Store, rank: int, size: int, *, timeout_s: float, host: str, device: torch.device
) -> Wire:
    """Collective over the wire's ranks. `host`: this end's own address, for gloo. Raises `TransportError`."""
    try:
        if backend == "nccl":
            return NcclWire(store, rank, size, timeout_s=timeout_s, device=device)
        return GlooWire(store, rank, size, timeout_s=timeout_s, host=host)
    except RuntimeError as error:
        raise TransportError(
            f"rank {rank} of {size} could not join the {backend} group of the transport: {_first_line(error)}"
        ) from error


def host_store(host: str, timeout_s: float) -> TCPStore:
    """A store on a free port of `host`. It listens on that address only; left to itself, torch listens on all."""
    listening = listen(host)
    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )


def reach_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The store that `host_store` made elsewhere. Raises `TransportError` where it does not answer."""
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransportError(
            f"the trainer's store at {host}:{port} does not answer: {_first_line(error)}; the engine's host must reach it"
        ) from error


def wait_for_workers(store: PrefixStore, num_workers: int, timeout_s: float, call: Future[None]) -> None:
    """Return when every worker has come to the store. Raises the error of `call`, which sends for them, where it fails first.

    Without this, a refusal would be noticed only when the forming of the group has timed out.
    """
    ends = time.monotonic() + timeout_s
    keys = [arrival_key(rank) for rank in range(1, 1 + num_workers)]
    while True:
        if call.done():
            call.result()
        with suppress(RuntimeError):  # a wait that times out; looked at again, until the limit
            store.wait(keys, timedelta(seconds=_LOOK_S))
            return
        if time.monotonic() > ends:
            missing = [rank for rank, key in enumerate(keys, start=1) if not store.check([key])]
            raise TransportError(
                f"workers {missing} of the engine did not come to the trainer's store in {timeout_s:g} s"
            )


def arrival_key(rank: int) -> str:
    """What a worker sets in the store before it joins."""
    return f"here/{rank}"


class Sending:
    """One packet on its way, in a thread of its own: gloo cannot end a message, so one may have to be left behind."""

    def __init__(self, wire: Wire, flat: torch.Tensor):
        self._stop = threading.Event()
        self._done = threading.Event()
        self._error: Exception | None = None
        self._nbytes = flat.numel()
        threading.Thread(target=self._run, args=(wire, flat), name="lockstep-send", daemon=True).start()

    def finish(self) -> None:
        """After the acknowledgement. Raises `TransportError` where it failed, or does not end now (`AFTER_ACK_S`)."""
        if not self._done.wait(AFTER_ACK_S):
            self._stop.set()
            raise TransportError(
                f"the engine's side acknowledged a packet of {self._nbytes} bytes that is still being sent {AFTER_ACK_S:g} s "
                "later: what answered did not read it from this group"
            )
        if self._error is not None:
            raise TransportError(f"a packet was not sent: {self._error}") from self._error

    def give_up(self) -> Exception | None:
        """Do not wait for it any more. Returns its error where it has failed already."""
        self._stop.set()
        return self._error

    def _run(self, wire: Wire, flat: torch.Tensor) -> None:
        try:
            wire.send(flat, self._stop)
        except LockstepError as error:
            self._error = error
        finally:
            self._done.set()


def _first_line(error: Exception) -> str:
    """Without gloo's advice to look at its own logs."""
    return str(error).strip().splitlines()[0].partition(" This is typically")[0]
