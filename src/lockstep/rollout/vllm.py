"""Prompts in, samples out, from one or several vLLM engines: servers that lockstep starts, servers that run, or in process.

How an update travels: the trainer's rank 0 calls `begin`, `receive`, `commit` here; a `Fanout` calls an outlet per replica
(shared memory, or files), all at once, which carries buckets into vLLM's worker process, where `VllmReceiver` takes them. What
starts and ends there is called over HTTP (`/collective_rpc`). Every reply says which weights made each token; it is compared with
what the engine should serve.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from lockstep.errors import ConfigError, LockstepError, StaleWeights, TransportError
from lockstep.rollout.base import Abilities, SharedEngine, check_prompts
from lockstep.rollout.vllm_client import ADAPTER_PREFIX, Ask, HttpReplica, RpcControl
from lockstep.rollout.vllm_fleet import Fleet
from lockstep.rollout.vllm_gate import Gate
from lockstep.rollout.vllm_sampling import check_for_vllm, row_seed, to_sample, vllm_params
from lockstep.sampling import draw_rows
from lockstep.transport.collective import CollectiveOutlet
from lockstep.transport.disk import DiskOutlet
from lockstep.transport.ends import Outlet
from lockstep.transport.fanout import Fanout
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
        self._fanout = Fanout(self._outlets) if self._outlets else None

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
        served = self.fleet.served
        if all(each.adapter_dtype is not None for each in served):
            kinds.add("adapter")
        return Abilities(
            frozenset(kinds),
            served[0].dtype,
            keeps_prefixes=True,
            max_len=min(each.max_model_len for each in served),
            adapter_dtype=served[0].adapter_dtype,
        )

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
            for prompt, own in zip(prompts, draw_rows(draw, len(prompts), num_samples), strict=True)
            for slot, index in own
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
        fanout = self._updating()
        if self._manifest is not None:
            raise TransportError(
                f"version {manifest.version} cannot begin: the update to version {self._manifest.version} is open; "
                "commit or abort it first"
            )
        if manifest.kind != "adapter":
            self._stop_generating(manifest)
        self._manifest = manifest
        try:
            fanout.begin(manifest)
        except BaseException as error:
            self.abort(f"begin: {type(error).__name__}: {error}")
            raise

    def receive(self, bucket: Bucket) -> None:
        """See `Receiver.receive`. Buckets go to all replicas; their transports work side by side."""
        self._updating().receive(bucket)

    def commit(self, digest: str) -> None:
        """See `Receiver.commit`. A failed commit ends the update as an abort does.

        An adapter is served once vLLM has loaded it under its new name and its slots were compared with what was sent. Where some
        replicas serve the update and others do not, `generate` refuses until a next one has reached all.
        """
        fanout = self._updating()
        manifest = self._manifest
        if manifest is None:
            raise TransportError("commit came without a begin: no update is open; call begin with its manifest first")
        try:
            fanout.commit(digest)
            if manifest.kind == "adapter":
                self._serve_adapter(fanout, manifest.version)
        except BaseException as error:
            self.abort(f"commit: {type(error).__name__}: {error}")
            raise
        self._manifest = None
        self._start_generating()

    def abort(self, reason: str) -> None:
        """See `Receiver.abort`. Does not raise where a replica is gone: that is what the next call will say.

        A replica that left a call unanswered is not asked again here (but for `transport.base.ABORT_S`): a hanging engine costs
        one limit of time. It counts as torn until it has been restarted or updated.
        """
        manifest, self._manifest = self._manifest, None
        if manifest is None:
            return
        fanout = self._updating()
        try:
            fanout.abort(reason)
        except LockstepError as error:
            log.warning("not every replica could be told of the abort of version %s: %s", manifest.version, error)
        try:
            lost = fanout.lost
            self.fleet.go_on(lost=[index for index, name in enumerate(self._outlets) if name in lost])
        except LockstepError as error:
            log.warning("after the abort of version %s the engine does not answer: %s", manifest.version, error)
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
            self._outlets[_name(index)].control = RpcControl(self.fleet.replicas[index], self._transport)
        self._gate.open()

    def close(self) -> None:
        """See `Engine.close`. Servers that lockstep did not start keep running, with what they serve."""
        for outlet in self._outlets.values():
            outlet.close()
        if self._fanout is not None:
            self._fanout.close()
        self._outlets, self._fanout = {}, None
        self.fleet.close()

    def _updating(self) -> Fanout:
        if self._fanout is None:
            raise TransportError("this rank only generates; the rank that started or connected the engine updates it")
        return self._fanout

    def _make_outlets(self, folder: Path | None, host: str) -> dict[str, Outlet]:
        """By name, in the order of the replicas."""
        if self._transport is None:
            return {}
        controls = {_name(i): RpcControl(replica, self._transport) for i, replica in enumerate(self.fleet.replicas)}
        if self._transport == "shm":
            return {name: ShmOutlet(control) for name, control in controls.items()}
        if self._transport == "collective":
            token = self.fleet.token
            return {name: CollectiveOutlet(control, host=host, token=token) for name, control in controls.items()}
        if folder is None:
            raise ConfigError("the transport disk needs a folder that trainer and engine both see")
        return {name: DiskOutlet(control, folder / name.replace(" ", "-")) for name, control in controls.items()}

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
        except BaseException:
            self._gate.open()
            raise

    def _start_generating(self) -> None:
        self.fleet.go_on()
        self._gate.open()

    def _serve_adapter(self, fanout: Fanout, version: int) -> None:
        """All replicas load it before the first one serves it."""
        adapter = f"{ADAPTER_PREFIX}{version}-{secrets.token_hex(4)}"
        replicas = dict(zip(self._outlets, self.fleet.replicas, strict=True))

        def load(name: str) -> None:
            replicas[name].load_adapter(adapter, replicas[name].call("stage", {})["path"])

        def serve(name: str) -> None:
            unread = replicas[name].call("serve", {"name": adapter})["not_read_back"]
            if unread:
                log.info("%s: %d tensors of the adapter are not read back, first %s", name, len(unread), unread[:3])

        fanout.each("loading the adapter", load)
        fanout.each("serving the adapter", serve)


def _name(index: int) -> str:
    return f"replica {index}"
