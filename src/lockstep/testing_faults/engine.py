"""An address in, samples out: an `HFEngine` in a process of its own, which fails on request, and the trainer's end of it.

The engine's process listens at a `Door`; every rank connects by the handle. It ends with whoever started it.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from lockstep.errors import EngineDied, StaleWeights, TransportError
from lockstep.model.load import find_model, load_whole
from lockstep.rollout import hf_weights
from lockstep.rollout.base import Abilities
from lockstep.rollout.hf import HFEngine
from lockstep.testing import fork_server
from lockstep.testing_faults.inject import STALL_S, InjectedFault, Trap, WatchedControl
from lockstep.testing_faults.plan import Fault
from lockstep.transport.base import Inlet
from lockstep.transport.channel import ConnectionControl, Door, knock, serve
from lockstep.transport.collective import CollectiveInlet, CollectiveOutlet
from lockstep.transport.disk import DiskInlet, DiskOutlet
from lockstep.transport.ends import Outlet, ReceiverInlet
from lockstep.transport.shm import ShmInlet, ShmOutlet
from lockstep.types import Bucket, Draw, Manifest, Prompt, Sample, Sampling

_INLETS: dict[str, Callable[..., ReceiverInlet]] = {"shm": ShmInlet, "disk": DiskInlet, "collective": CollectiveInlet}
_FOREVER_S = 60.0
_SLOT_BYTES = 1024
_START_S = 60.0
"""How long a new engine's process may take until it listens; an idle machine needs a tenth of a second."""


class Numbers:
    """Token 7 is the text "7"."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(str(int(token)) for token in token_ids)


def make_engine(folder: str) -> HFEngine:
    """The embedded engine on the harness's model, which no token ends."""
    model = load_whole(find_model(folder), dtype=torch.float32, attention="sdpa", device=torch.device("cpu"))
    return HFEngine(model, tokenizer=Numbers(), eos_ids=(), device="cpu", cache_tokens=4096)


class _Doomed:
    """The engine's `Receiver`, which may be about to fail."""

    def __init__(self, engine: HFEngine):
        self._engine = engine
        self._fault: Fault | None = None
        self._passages = 0

    def arm(self, fault: Fault | None) -> None:
        self._fault, self._passages = fault, 0

    def passes(self, point: str) -> None:
        fault = self._fault
        if fault is None or fault.point != point:
            return
        self._passages += 1
        if self._passages <= fault.at:
            return
        self._fault = None
        if fault.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.act == "raise":
            raise InjectedFault(f"injected into the engine at {point}")
        else:
            threading.Event().wait(STALL_S if fault.act == "late" else _FOREVER_S)

    def begin(self, manifest: Manifest) -> None:
        self.passes("begin")
        self._engine.begin(manifest)

    def receive(self, bucket: Bucket) -> None:
        self.passes("bucket")
        self._engine.receive(bucket)

    def commit(self, digest: str) -> None:
        self.passes("commit")
        self._engine.commit(digest)
        self.passes("committed")

    def abort(self, reason: str) -> None:
        self._engine.abort(reason)


class _Desk(Inlet):
    """Everything that the engine's process is asked. One call at a time, whichever rank it comes from."""

    def __init__(self, engine: HFEngine, doomed: _Doomed, inlet: ReceiverInlet):
        self._engine, self._doomed, self._inlet = engine, doomed, inlet
        self._lock = threading.Lock()

    def handle(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if method == "arm":
                self._doomed.arm(Fault(**payload["fault"]) if payload["fault"] else None)
                return {}
            if method == "generate":
                self._doomed.passes("generate")
                return self._generate(payload)
            return self._inlet.handle(method, payload)

    def ends(self) -> None:
        """The trainer's end is gone: what it left open is aborted."""
        with self._lock:
            self._inlet.close()

    def _generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        prompts = [Prompt(uid, tuple(ids), "", "") for uid, ids in payload["prompts"]]
        sampling, draw = Sampling(**payload["sampling"]), Draw(**payload["draw"])
        samples = self._engine.generate(prompts, sampling, num_samples=payload["num_samples"], draw=draw)
        rows = [[each.slot, each.index, each.ids, each.logprobs, each.finish] for each in samples]
        return {"version": self._engine.policy_version, "rows": rows}


def _engine_main(folder: str, transport: str, started: Connection) -> None:
    """The engine's process. `started`: where the handle goes; the other end closes when whoever started it ends."""
    torch.set_num_threads(1)
    engine = make_engine(folder)
    doomed = _Doomed(engine)
    check = hf_weights._check_digest

    def check_after_a_fault(*args: Any) -> None:
        doomed.passes("in commit")
        check(*args)

    hf_weights._check_digest = check_after_a_fault
    desk = _Desk(engine, doomed, _INLETS[transport](doomed))
    with Door() as door:
        threading.Thread(target=_end_with, args=(started,), daemon=True).start()
        started.send({"address": door.address, "key": door.key.hex(), "transport": transport})
        while True:
            threading.Thread(target=_serve, args=(desk, door.admit(1e6)), daemon=True).start()


def _serve(desk: _Desk, connection: Connection) -> None:
    pushes = connection.recv_bytes() == b"push"
    serve(desk, connection)
    if pushes:
        desk.ends()


def _end_with(started: Connection) -> None:
    try:
        started.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)


class EngineHost:
    """Starts engines for ranks, in the process that started the ranks: its fork server has everything imported.

    Use it in a `with` around the ranks and give them `desk`; engines that are left at the end are killed.
    """

    def __init__(self) -> None:
        self._mine, self.desk = mp.Pipe()
        self._children: dict[int, tuple[Any, Connection]] = {}
        self._thread = threading.Thread(target=self._serve, name="lockstep-engine-host", daemon=True)

    def __enter__(self) -> EngineHost:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.desk.send(None)
        self._thread.join()
        for pid in list(self._children):
            self.kill(pid)
        self._mine.close()
        self.desk.close()

    def start(self, folder: str, transport: str) -> dict[str, Any]:
        """The handle of a new engine. Raises `EngineDied` where it does not come up."""
        mine, theirs = mp.Pipe()
        process = fork_server().Process(target=_engine_main, args=(folder, transport, theirs), daemon=True)
        process.start()
        theirs.close()
        self._children[cast(int, process.pid)] = process, mine
        try:
            if mine.poll(_START_S):
                return {**mine.recv(), "pid": process.pid}
        except EOFError:
            pass
        self.kill(cast(int, process.pid))
        raise EngineDied(f"the harness's engine did not come up within {_START_S:g} s; see its output above")

    def kill(self, pid: int) -> None:
        """Returns when it is gone."""
        process, pipe = self._children.pop(pid)
        process.kill()
        process.join()
        pipe.close()

    def _serve(self) -> None:
        while (request := self._mine.recv()) is not None:
            if request["replaces"]:
                self.kill(request["replaces"])
            try:
                self._mine.send(self.start(request["folder"], request["transport"]))
            except EngineDied as error:
                self._mine.send({"died": str(error)})


def ask_for_engine(desk: Connection, folder: str, transport: str, *, replaces: int = 0) -> dict[str, Any]:
    """From a rank: the handle of a new engine of the `EngineHost` behind `desk`, once the one of pid `replaces` is gone."""
    desk.send({"folder": folder, "transport": transport, "replaces": replaces})
    answer = desk.recv()
    if "died" in answer:
        raise EngineDied(answer["died"])
    return answer


class RemoteEngine:
    """A `SharedEngine`: rank 0's end pushes over a transport, the others' ends only generate."""

    is_shared = True
    eos_ids = ()

    def __init__(
        self,
        handle: dict[str, Any],
        *,
        timeout_s: float,
        trap: Trap | None = None,
        desk: Connection | None = None,
        folder: str = "",
        max_restarts: int = 10_000,
    ):
        """`trap`: this end pushes. `desk` and the model's `folder`: where it can be started again."""
        self._timeout_s, self._trap, self._desk, self._folder = timeout_s, trap, desk, folder
        self._max_restarts = max_restarts
        self.num_restarts = 0
        self.starting_s = 0.0
        """Seconds that new engines took until they listened, all together."""
        self._updates: tempfile.TemporaryDirectory[str] | None = None
        self._connect(handle)

    @property
    def abilities(self) -> Abilities:
        return Abilities(frozenset({"adapter", "merged", "full"}), "float32", keeps_prefixes=False)

    @property
    def policy_version(self) -> int:
        return self._version

    def handle(self) -> dict[str, Any]:
        return self._handle

    def saw(self, version: int) -> None:
        self._version = version

    def restart(self) -> None:
        if self._desk is None or self.num_restarts >= self._max_restarts:
            limit = 0 if self._desk is None else self._max_restarts
            raise EngineDied(f"the engine was started again {self.num_restarts} times, of {limit} that are allowed")
        self.num_restarts += 1
        self._disconnect()
        transport, pid = self._handle["transport"], self._handle["pid"]
        began = time.monotonic()
        handle = ask_for_engine(self._desk, self._folder, transport, replaces=pid)
        self.starting_s += time.monotonic() - began
        self._connect(handle)

    def close(self) -> None:
        self._disconnect()
        if self._updates is not None:
            self._updates.cleanup()
            self._updates = None

    def arm(self, fault: Fault | None) -> None:
        """Tell the engine's process how it will fail next."""
        self._control.call("arm", {"fault": None if fault is None else asdict(fault)})

    def begin(self, manifest: Manifest) -> None:
        self._pushing().begin(manifest)

    def receive(self, bucket: Bucket) -> None:
        self._pushing().receive(bucket)

    def commit(self, digest: str) -> None:
        self._pushing().commit(digest)

    def abort(self, reason: str) -> None:
        self._pushing().abort(reason)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, draw: Draw) -> list[Sample]:
        payload = {
            "prompts": [[prompt.uid, prompt.ids] for prompt in prompts],
            "sampling": asdict(sampling),
            "num_samples": num_samples,
            "draw": asdict(draw),
        }
        try:
            answer = self._control.call("generate", payload)
        except TransportError as error:
            if f"{StaleWeights.__name__}: " in str(error):
                raise StaleWeights(str(error)) from error
            raise
        self._version = answer["version"]
        return [
            Sample(
                prompts[slot - draw.first_slot], slot, index, tuple(ids), tuple(logprobs), "", finish, answer["version"]
            )
            for slot, index, ids, logprobs, finish in answer["rows"]
        ]

    def _pushing(self) -> Outlet:
        assert self._outlet is not None, "only the rank with the trap pushes"
        return self._outlet

    def _connect(self, handle: dict[str, Any]) -> None:
        self._handle, self._version = handle, 0
        try:
            connection = knock(handle["address"], bytes.fromhex(handle["key"]))
            connection.send_bytes(b"push" if self._trap is not None else b"look")
        except (OSError, EOFError) as error:
            raise EngineDied(f"nobody listens at {handle['address']}: {error}") from error
        self._control = ConnectionControl(connection, timeout_s=self._timeout_s)
        self._outlet = None if self._trap is None else self._make_outlet(self._trap)

    def _make_outlet(self, trap: Trap) -> Outlet:
        control = WatchedControl(self._control, trap)
        match self._handle["transport"]:
            case "shm":
                outlet: Outlet = ShmOutlet(control, slot_bytes=_SLOT_BYTES)
            case "disk":
                self._updates = self._updates or tempfile.TemporaryDirectory(prefix="lockstep-faults-")
                outlet = DiskOutlet(control, self._updates.name)
            case _:
                outlet = CollectiveOutlet(control, slot_bytes=_SLOT_BYTES, timeout_s=2 * self._timeout_s)
        control.outlet = outlet
        return outlet

    def _disconnect(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
        self._control.close()
