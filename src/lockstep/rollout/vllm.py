"""Prompts in, samples out, from one or several vLLM engines: servers that lockstep starts, servers that run, or in process.

How an update travels: the trainer's rank 0 calls `begin`, `receive`, `commit` here; an outlet per replica (shared memory, or
files) carries buckets into vLLM's worker process, where `VllmReceiver` takes them. What starts and ends there is called over
HTTP (`/collective_rpc`). Every reply says which weights made each token; it is compared with what the engine should serve.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from lockstep.errors import ConfigError, LockstepError, StaleWeights, TransportError
from lockstep.rollout.base import Abilities, SharedEngine, check_prompts
from lockstep.rollout.vllm_client import ADAPTER_PREFIX, Ask, HttpReplica, RpcControl
from lockstep.rollout.vllm_fleet import Fleet
from lockstep.rollout.vllm_gate import Gate
from lockstep.rollout.vllm_sampling import check_for_vllm, row_seed, to_sample, vllm_params
from lockstep.transport.collective import CollectiveOutlet
from lockstep.transport.disk import DiskOutlet
from lockstep.transport.ends import Outlet
from lockstep.transport.hosts import LOOPBACK
from lockstep.transport.shm import ShmOutlet
from lockstep.types import Bucket, Draw, Manifest, Prompt, Sample, Sampling

log = logging.getLogger(__name__)

OnUpdate = Literal["drain", "pause"]
TransportName = Literal["shm", "disk", "collective"]
_TRIES = 8
"""How often a sample is drawn again because an update aborted it."""


class Decoder(Protocol):
    """The part of a transformers tokenizer that the engine uses."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Row:
    """One sample to draw."""

    prompt: Prompt
    slot: int
    index: int


class VllmEngine(SharedEngine):
    """An `Engine` around vLLM; one serves all ranks. `VllmEngine(Fleet.start(...))` owns its servers; use `close`."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        tokenizer: Decoder,
        eos_ids: Iterable[int],
        on_update: OnUpdate = "drain",
        transport: TransportName | None = "shm",
        folder: Path | None = None,
        host: str = LOOPBACK,
        request_timeout_s: float = 600.0,
    ):
        """`on_update`: what happens to running requests when weights are overwritten; see docs/vllm.md. `transport`: None on a
        rank that only generates. `folder`: for "disk", where files go. `host`: for "collective", the address of
        this host that the engines reach. `request_timeout_s`: limit of one completion."""
        self.fleet = fleet
        self._decode: Callable[[Sequence[int]], str] = lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
        self._eos_ids = tuple(sorted(set(eos_ids)))
        self._on_update = on_update
        self._timeout_s = request_timeout_s
        self._gate = Gate()
        self._manifest: Manifest | None = None
        self._transport = transport
        self._outlets = self._make_outlets(folder, host)

    @classmethod
    def attach(cls, handle: Mapping[str, Any], *, tokenizer: Decoder) -> VllmEngine:
        """Another rank's view of an engine, from its `handle`: it generates, and hears of updates through `saw`."""
        fleet = Fleet.connect(
            handle["urls"],
            model=handle["model"],
            token=handle["token"],
            request_timeout_s=handle["request_timeout_s"],
        )
        return cls(
            fleet,
            tokenizer=tokenizer,
            eos_ids=handle["eos_ids"],
            on_update=handle["on_update"],
            transport=None,
            request_timeout_s=handle["request_timeout_s"],
        )

    def handle(self) -> dict[str, Any]:
        """JSON-able: what `attach` needs. New after a restart. Holds the token; it is for the run's own ranks."""
        return {
            **self.fleet.handle(),
            "eos_ids": list(self._eos_ids),
            "on_update": self._on_update,
            "request_timeout_s": self._timeout_s,
        }

    @property
    def is_shared(self) -> bool:
        """Whether it is a server: a vLLM in this process serves this rank only."""
        return all(isinstance(replica, HttpReplica) for replica in self.fleet.replicas)

    @property
    def abilities(self) -> Abilities:
        """Adapters where every replica was started with LoRA; prefixes are kept, each under the weights that made them."""
        kinds: set[Any] = {"merged", "full"}
        if all(served.takes_adapters for served in self.fleet.served):
            kinds.add("adapter")
        return Abilities(kinds=frozenset(kinds), dtype=self.fleet.served[0].dtype, keeps_prefixes=True)

    @property
    def policy_version(self) -> int:
        """See `Engine`. 0 as long as one replica was restarted and has not been updated since."""
        return min(served.version for served in self.fleet.served)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end every completion, whatever a call's sampling adds."""
        return self._eos_ids

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, draw: Draw) -> list[Sample]:
        """See `Engine.generate`. Samples that an update aborts (on_update: pause) are drawn again, whole, by the new weights."""
        check_for_vllm(sampling)
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1; {num_samples} came")
        check_prompts(prompts, sampling, min(served.max_model_len for served in self.fleet.served))
        rows = [
            _Row(prompt, slot, index)
            for slot, prompt in enumerate(prompts, start=draw.first_slot)
            for index in range(num_samples)
        ]
        done: dict[tuple[int, int], Sample] = {}
        with self._gate.inside():
            for _ in range(_TRIES):
                rows = self._round(rows, sampling, draw, done)
                if not rows:
                    return [done[key] for key in sorted(done)]
                self._gate.wait_open(self._timeout_s)
                self.fleet.wait_whole(self._timeout_s)
        raise StaleWeights(
            f"{len(rows)} samples, first slot {rows[0].slot}, were aborted or made by other weights than the engine said it "
            f"serves, {_TRIES} times in a row: somebody else updates it, or updates come faster than completions; set "
            "engine.on_update to drain"
        )

    def begin(self, manifest: Manifest) -> None:
        """See `Receiver.begin`. Kind adapter: everything goes on. Others: generating stops first (on_update), everywhere."""
        if not self._outlets:
            raise TransportError("this rank only generates; the rank that started or connected the engine updates it")
        if self._manifest is not None:
            raise TransportError(
                f"version {manifest.version} cannot begin: the update to version {self._manifest.version} is open; "
                "commit or abort it first"
            )
        if manifest.kind != "adapter":
            self._stop_generating(manifest)
        self._manifest = manifest
        try:
            for outlet in self._outlets:
                outlet.begin(manifest)
        except BaseException as error:
            self.abort(f"begin: {type(error).__name__}: {error}")
            raise

    def receive(self, bucket: Bucket) -> None:
        """See `Receiver.receive`. Buckets go to all replicas; their transports work side by side."""
        for outlet in self._outlets:
            outlet.receive(bucket)

    def commit(self, digest: str) -> None:
        """See `Receiver.commit`. A failed commit ends the update as an abort does.

        An adapter is served once vLLM has loaded it under its new name and its slots were compared with what was sent.
        """
        manifest = self._manifest
        if manifest is None:
            raise TransportError("commit came without a begin: no update is open; call begin with its manifest first")
        try:
            for outlet in self._outlets:
                outlet.commit(digest)
            if manifest.kind == "adapter":
                self._serve_adapter(manifest.version)
        except BaseException as error:
            self.abort(f"commit: {type(error).__name__}: {error}")
            raise
        self._manifest = None
        self._start_generating()

    def abort(self, reason: str) -> None:
        """See `Receiver.abort`. Does not raise where a replica is gone: that is what the next call will say."""
        manifest, self._manifest = self._manifest, None
        if manifest is None:
            return
        for outlet in self._outlets:
            outlet.abort(reason, raise_errors=False)
        try:
            self._start_generating()
        except LockstepError as error:
            log.warning("after the abort of version %s the engine does not answer: %s", manifest.version, error)
            self.fleet.served = [
                replace(served, stale=f"{served.stale or reason}; then: {error}") for served in self.fleet.served
            ]
        finally:
            self._gate.open()

    def saw(self, version: int) -> None:
        """On ranks that only generate, after a commit on the rank that updates. Raises `StaleWeights` if it is not so."""
        self.fleet.refresh()
        found = [served.version for served in self.fleet.served]
        if set(found) != {version}:
            raise StaleWeights(f"the engine should serve version {version} by now; its replicas serve {found}")

    def is_alive(self) -> bool:
        """Whether all replicas answer."""
        return self.fleet.is_healthy()

    def restart(self) -> None:
        """See `SharedEngine.restart`. Restarts the replicas that do not answer; all of them, if all do."""
        self.abort("the engine is being restarted")
        for index in self.fleet.restart():
            assert self._transport is not None
            self._outlets[index].control = RpcControl(self.fleet.replicas[index], self._transport)
        self._gate.open()

    def close(self) -> None:
        """See `Engine.close`. Servers that lockstep did not start keep running, with what they serve."""
        for outlet in self._outlets:
            outlet.close()
        self._outlets = []
        self.fleet.close()

    def _make_outlets(self, folder: Path | None, host: str) -> list[Outlet]:
        if self._transport is None:
            return []
        controls = [RpcControl(replica, self._transport) for replica in self.fleet.replicas]
        if self._transport == "shm":
            return [ShmOutlet(control) for control in controls]
        if self._transport == "collective":
            return [CollectiveOutlet(control, host=host, token=self.fleet.token) for control in controls]
        if folder is None:
            raise ConfigError("the transport disk needs a folder that trainer and engine both see")
        return [DiskOutlet(control, folder / f"replica-{index}") for index, control in enumerate(controls)]

    def _round(
        self, rows: Sequence[_Row], sampling: Sampling, draw: Draw, done: dict[tuple[int, int], Sample]
    ) -> list[_Row]:
        """Draw the rows, each slot on its replica. Puts samples into `done`; returns the rows that an update got in the way of."""
        served = self.fleet.agreed()
        eos = tuple(sorted({*self._eos_ids, *sampling.eos_ids}))
        shares = [[row for row in rows if row.slot % len(served) == index] for index in range(len(served))]
        asks = [
            [
                Ask(
                    row.prompt.ids,
                    vllm_params(sampling, row_seed(draw, row.slot, row.index), eos),
                    state.adapter,
                    state.salt,
                )
                for row in share
            ]
            for state, share in zip(served, shares, strict=True)
        ]
        again: list[_Row] = []
        for state, share, replies in zip(served, shares, self.fleet.ask(asks), strict=True):
            for row, reply in zip(share, replies, strict=True):
                if reply.finish == "abort" or reply.weights != (state.label,):
                    again.append(row)
                    continue
                done[row.slot, row.index] = to_sample(
                    reply,
                    prompt=row.prompt,
                    slot=row.slot,
                    index=row.index,
                    version=state.version,
                    eos_ids=frozenset(eos),
                    decode=self._decode,
                )
        return again

    def _stop_generating(self, manifest: Manifest) -> None:
        why = (
            f"the engine's weights are being overwritten with version {manifest.version}, which is not committed; "
            "finish that update, or send a complete one"
        )
        self._gate.close(why, drain_s=self._timeout_s if self._on_update == "drain" else None)
        try:
            self.fleet.stop_generating(abort=self._on_update == "pause")
        except BaseException as error:
            try:
                self.fleet.go_on()  # nothing was overwritten yet: replicas that are paused by now must not stay so
            except LockstepError as other:
                log.warning("after a failed begin of version %s (%s): %s", manifest.version, error, other)
            self._gate.open()
            raise

    def _start_generating(self) -> None:
        self.fleet.go_on()
        self._gate.open()

    def _serve_adapter(self, version: int) -> None:
        """All replicas load it before the first one serves it."""
        name = f"{ADAPTER_PREFIX}{version}-{secrets.token_hex(4)}"
        for replica in self.fleet.replicas:
            replica.load_adapter(name, replica.call("stage", {})["path"])
        for replica in self.fleet.replicas:
            unread = replica.call("serve", {"name": name})["not_read_back"]
            if unread:
                log.info(
                    "%d tensors of the adapter could not be read back from vLLM, first %s", len(unread), unread[:3]
                )
