"""A fault in; ordinary objects (a sharded model, an engine, a control) that suffer it at its point, once, out.

Nothing of the code under test is changed: it is handed these wrappers instead of what they wrap.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.testing_faults.plan import Fault
from lockstep.transport.base import Control
from lockstep.transport.ends import Outlet
from lockstep.types import Bucket, Draw, Manifest, Prompt, Sample, Sampling

STALL_S = 0.03
"""A pause that everybody waits out."""


class InjectedFault(RuntimeError):
    """What a rank, or an engine, is made to raise."""


class Trap:
    """This rank's part of the scenario that runs now."""

    def __init__(self, rank: int, *, on_end: Callable[[], None] = lambda: None):
        """`on_end` is called right before this rank raises, is killed, leaves or freezes."""
        self._rank, self._on_end = rank, on_end
        self._fault: Fault | None = None
        self._seen: dict[str, int] = {}
        self.fired = False

    def arm(self, fault: Fault | None) -> None:
        """From now on this one, and no other."""
        self._fault, self._seen, self.fired = fault, {}, False

    def strikes(self, place: str, point: str) -> Fault | None:
        """The fault, if it is of this place and point, and this is the passage at which it strikes."""
        fault = self._fault
        if fault is None or (fault.place, fault.point, fault.rank) != (place, point, self._rank):
            return None
        passage = self._seen[point] = self._seen.get(point, -1) + 1
        if passage != fault.at or self.fired:
            return None
        self.fired = True
        return fault

    def passes(self, point: str) -> None:
        """A point of the trainer: raises, pauses, or does not return."""
        fault = self.strikes("trainer", point)
        if fault is None:
            return
        if fault.act == "stall":
            threading.Event().wait(STALL_S)
            return
        self._on_end()
        if fault.act == "raise":
            raise InjectedFault(f"injected at {point}")
        if fault.act == "exit":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL if fault.act == "kill" else signal.SIGSTOP)


class WatchedModel:
    """A `ShardedModel` that passes points where some of its attributes are looked at. All else is that of the model."""

    def __init__(self, inner: Any, trap: Trap, points: dict[str, str]):
        """`points`: attribute -> point."""
        self._inner, self._trap, self._points = inner, trap, points

    def __getattr__(self, name: str) -> Any:
        point = self._points.get(name)
        if point is not None:
            self._trap.passes(point)
        return getattr(self._inner, name)


class WatchedEngine:
    """An `Engine` between the driver of an update and its transport: buckets are damaged here, and ranks hurt."""

    def __init__(self, inner: Any, trap: Trap):
        self.inner = inner
        self._trap = trap
        self._held: Bucket | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, manifest: Manifest) -> None:
        self._held = None
        self._trap.passes("begin")
        self.inner.begin(manifest)

    def receive(self, bucket: Bucket) -> None:
        self._trap.passes("bucket")
        fault = self._trap.strikes("bucket", "bucket")
        for each in [bucket] if fault is None else self._damaged(bucket, fault):
            self.inner.receive(each)
        if fault is None and self._held is not None:
            held, self._held = self._held, None
            self.inner.receive(held)

    def commit(self, digest: str) -> None:
        self._trap.passes("commit")
        self.inner.commit(digest)
        self._trap.passes("committed")

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, draw: Draw) -> list[Sample]:
        self._trap.passes("probe")
        return self.inner.generate(prompts, sampling, num_samples=num_samples, draw=draw)

    def _damaged(self, bucket: Bucket, fault: Fault) -> list[Bucket]:
        draw = random.Random(fault.seed)
        tensors = list(bucket.tensors)
        index = draw.randrange(len(tensors))
        name, tensor = tensors[index]
        match fault.act:
            case "lose":
                return []
            case "repeat":
                return [bucket, bucket]
            case "reorder":
                self._held = Bucket(tuple((name, tensor.clone()) for name, tensor in tensors))
                return []
            case "drop":
                del tensors[index]
            case "truncate":
                tensors[index] = (name, tensor[: len(tensor) - 1].clone())
            case "flip":
                tensor = tensor.clone()
                flip_bit(tensor.view(torch.uint8).reshape(-1), draw)
                tensors[index] = (name, tensor)
        return [Bucket(tuple(tensors))]


class WatchedControl:
    """A `Control` under a transport: packets are damaged here, after they were packed and before the engine reads them."""

    def __init__(self, inner: Control, trap: Trap):
        self._inner, self._trap = inner, trap
        self.outlet: Outlet | None = None
        """The transport's end that calls; set once it is made."""

    def call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        if method == "commit" and hasattr(self.outlet, "_files"):
            self._damage_files(Path(self.outlet._path))  # type: ignore[union-attr]
        fault = self._trap.strikes("packet", "packet") if method == "receive" else None
        if fault is None:
            return self._inner.call(method, payload)
        if fault.act == "lose":
            return {}
        if fault.act == "repeat":
            self._inner.call(method, payload)
        elif fault.act == "truncate":
            payload["layout"]["nbytes"] -= 64
        else:
            self._flip(payload, fault)
        return self._inner.call(method, payload)

    def _flip(self, payload: dict[str, Any], fault: Fault) -> None:
        outlet: Any = self.outlet
        if "slot" in payload:
            flip_bit(_first_tensor(outlet._slots.slot(payload["slot"]), payload["layout"]), random.Random(fault.seed))
        else:  # these bytes are on their way already: the next packet's are damaged
            outlet._wire = _FlippingWire(outlet._wire, fault)

    def _damage_files(self, folder: Path) -> None:
        """The files of an update are packets that the engine reads one after the other."""
        for path in sorted(folder.glob("bucket-*")):
            fault = self._trap.strikes("packet", "packet")
            if fault is None:
                continue
            if fault.act == "lose":
                path.unlink()
            elif fault.act == "truncate":
                os.truncate(path, path.stat().st_size - 8)
            else:
                content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
                header = 8 + int.from_bytes(content[:8].numpy().tobytes(), "little")
                flip_bit(content[header:], random.Random(fault.seed))
                path.write_bytes(content.numpy().tobytes())


class _FlippingWire:
    """Damages the next packet, then is as good as what it wraps."""

    def __init__(self, inner: Any, fault: Fault):
        self._inner, self._fault = inner, fault
        self._is_due = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, flat: torch.Tensor, stop: threading.Event) -> None:
        if self._is_due:
            self._is_due = False
            flip_bit(flat[:64], random.Random(self._fault.seed))
        self._inner.send(flat, stop)


def flip_bit(flat: torch.Tensor, draw: random.Random) -> None:
    """Change one bit of flat bytes, in place."""
    flat[draw.randrange(flat.numel())] ^= 1 << draw.randrange(8)


def _first_tensor(flat: torch.Tensor, layout: dict[str, Any]) -> torch.Tensor:
    """64 bytes that are surely a tensor's: every one of the harness's is longer."""
    start = layout["pieces"][0][3]
    return flat[start : start + 64]
