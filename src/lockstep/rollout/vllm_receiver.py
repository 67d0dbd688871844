"""A manifest and buckets in; vLLM serves exactly them, or still what it served before, or is marked as torn, out.

Runs inside vLLM's worker process. *adapter* updates are staged beside the old one (`lockstep.rollout.vllm_lora`) and served
from the moment that vLLM's front end loads them under a new name. *merged* and *full* updates go through vLLM's own
`load_weights` into its parameters bucket by bucket, and are then read back from there.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.errors import TransportError
from lockstep.rollout.vllm_lora import AdapterHost, AdapterUpdate, Helper
from lockstep.rollout.vllm_params import describe_base, find_places, packed_parameters
from lockstep.transport.base import Ledger, digest_of, tensor_line
from lockstep.types import Bucket, Manifest, WeightKind


class Worker(Protocol):
    """What is used of vLLM's worker."""

    model_runner: Any
    vllm_config: Any


class VllmReceiver:
    """The `Receiver` of one vLLM worker. vLLM calls it between two steps of its engine, never during one."""

    def __init__(self, worker: Worker, *, read_config: Callable[[dict[str, Any]], Helper]):
        """`read_config`: vLLM's own reading of a PEFT configuration.

        Raises `TransportError` for an engine of several workers, whose shards cannot be read back.
        """
        self._worker = worker
        world = worker.vllm_config.parallel_config.world_size
        if world != 1:
            raise TransportError(
                f"this vLLM runs on {world} workers (tensor or pipeline parallel); updates are read back on engines of one "
                "worker only: start replicas instead"
            )
        self.instance = uuid.uuid4().hex
        """Names this life of the worker: a restarted one has another."""
        manager = worker.model_runner.lora_manager if worker.vllm_config.lora_config else None
        self._adapters = None if manager is None else AdapterHost(manager, read_config)
        self._update: AdapterUpdate | InPlaceUpdate | None = None
        self._ready: AdapterUpdate | None = None
        self._version = 0
        self._kind: WeightKind | None = None
        self._base_version = 0
        self._label = "default"
        self._base_is_merged = False
        self._serving: str | None = None
        self._stale: str | None = None
        self._not_read_back: tuple[str, ...] = ()

    @property
    def _model(self) -> nn.Module:
        return self._worker.model_runner.model

    def begin(self, manifest: Manifest) -> None:
        """See `Receiver.begin`. Kind adapter: the old version stays served. Others: the engine must be paused by now."""
        if self._update is not None:
            raise TransportError(
                f"version {manifest.version} cannot begin: the update to version {self._update.manifest.version} is open"
            )
        self._ready = None
        if manifest.kind == "adapter":
            self._check_base_takes_adapters(manifest)
            if self._adapters is None:
                raise TransportError(
                    "this vLLM was started without --enable-lora; use sync.mode=merged, or start it with"
                )
            self._update = AdapterUpdate(self._adapters, manifest)
            return
        self._update = InPlaceUpdate(self._model, manifest)
        self._serving, self._label = None, "lockstep:torn"
        self._base_is_merged = manifest.kind == "merged"
        self._stale = (
            f"the engine's weights are being overwritten with version {manifest.version}, which is not committed; "
            "finish that update, or send a complete one"
        )

    def receive(self, bucket: Bucket) -> None:
        self._open_update("receive").receive(bucket)

    def commit(self, digest: str) -> None:
        """See `Receiver.commit`. An adapter is then staged and proven whole, and served after the call "serve"."""
        update = self._open_update("commit")
        self._update = None
        update.commit(digest)
        if isinstance(update, AdapterUpdate):
            self._ready = update
            return
        if self._adapters is not None:
            self._adapters.clear()
        self._version = self._base_version = update.manifest.version
        self._kind, self._stale, self._not_read_back = update.manifest.kind, None, update.places.elsewhere
        self._label = f"lockstep:{self._version}:{uuid.uuid4().hex[:8]}"

    def abort(self, reason: str) -> None:
        """See `Receiver.abort`. Nothing to do where no update is open, e.g. after a failed commit."""
        self._ready = None
        if self._update is None:
            return
        if self._stale is not None:
            self._stale = (
                f"the update to version {self._update.manifest.version} was aborted after it had begun to overwrite "
                f"the engine's weights ({reason}); send a complete merged or full update"
            )
        self._update = None

    def handle(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The calls that are no transport's: "describe", "stage" and "serve" (both adapter only; see `VllmEngine`)."""
        match method:
            case "describe":
                return self.describe()
            case "stage":
                return {"path": self._ready_adapter().stage()}
            case "serve":
                return self._serve(payload["name"])
        raise TransportError(f"vLLM's worker has no call {method!r}")

    def describe(self) -> dict[str, Any]:
        """JSON-able: what this engine is and what it serves."""
        config = self._worker.vllm_config
        return {
            "instance": self.instance,
            "pid": os.getpid(),
            "version": self._version,
            "kind": self._kind,
            "base_version": self._base_version,
            "label": self._label,
            "serving": self._serving,
            "stale": self._stale,
            "not_read_back": list(self._not_read_back),
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "max_model_len": config.model_config.max_model_len,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": self._worker.model_runner.device.type,
            "lora": None if self._adapters is None else self._adapters.describe(),
            **describe_base(self._model),
        }

    def _serve(self, name: str) -> dict[str, Any]:
        """vLLM's front end has loaded the staged adapter as `name`: check the slots that vLLM multiplies with."""
        update = self._ready_adapter()
        assert self._adapters is not None
        self._not_read_back = self._adapters.check_served(update)
        self._ready = None
        self._version, self._kind, self._serving = update.manifest.version, "adapter", name
        return {"version": self._version, "not_read_back": list(self._not_read_back)}

    def _ready_adapter(self) -> AdapterUpdate:
        if self._ready is None:
            raise TransportError("no committed adapter is waiting to be served; send it again")
        return self._ready

    def _open_update(self, call: str) -> AdapterUpdate | InPlaceUpdate:
        if self._update is None:
            raise TransportError(f"{call} came without a begin: no update is open; call begin with its manifest first")
        return self._update

    def _check_base_takes_adapters(self, manifest: Manifest) -> None:
        if self._stale is not None:
            raise TransportError(f"an adapter (version {manifest.version}) needs whole base weights, but {self._stale}")
        if self._base_is_merged:
            raise TransportError(
                f"an adapter (version {manifest.version}) would be applied twice: the engine's base holds the merged "
                f"weights of version {self._base_version}; keep to merged updates, or send the base with a full one first"
            )


class InPlaceUpdate:
    """Written into vLLM's own parameters as it comes: what was there is gone with the first bucket."""

    def __init__(self, model: nn.Module, manifest: Manifest):
        """Raises `TransportError`, with nothing overwritten, for an update that cannot be served whole."""
        self.manifest = manifest
        self._model = model
        packed = packed_parameters(model)
        if packed:
            raise TransportError(
                f"{len(packed)} of vLLM's parameters were packed when they were loaded, first {packed[:3]}: they cannot be "
                "written. Start this server with lockstep's worker extension, or with another linear backend"
            )
        self.places = find_places(model, manifest.specs)
        if self.places.untouched and not self.places.elsewhere:
            raise TransportError(
                f"the manifest of version {manifest.version} (kind {manifest.kind}) leaves out {len(self.places.untouched)} "
                f"of the engine's parameters, first {list(self.places.untouched[:3])}"
            )
        self._ledger = Ledger(manifest)
        self._arrived: dict[str, str] = {}
        self._loaded: set[str] = set()

    @torch.no_grad()
    def receive(self, bucket: Bucket) -> None:
        """Hand the bucket to vLLM's loader; a tensor of unknown place alone, so that its loss would be seen."""
        known: list[tuple[str, Tensor]] = []
        for name, tensor in bucket.items():
            self._ledger.check(name, tensor)
            if name in self.places.views:
                known.append((name, tensor))
                continue
            loaded = self._load([(name, tensor)])
            if not loaded:
                raise TransportError(
                    f"vLLM's loader put tensor {name!r} nowhere: {type(self._model).__name__} has no use for it; leave it "
                    "out, or use sync.mode=adapter"
                )
            self._arrived[name] = tensor_line(name, tensor)
        if known:
            self._load(known)

    @torch.no_grad()
    def commit(self, digest: str) -> None:
        """Completeness, then the digest of what is read back from vLLM's parameters."""
        self._ledger.check_complete()
        lost = [name for name in self.places.untouched if name not in self._loaded]
        if lost:
            raise TransportError(
                f"version {self.manifest.version}: vLLM's loader wrote nothing to {len(lost)} of its parameters, first "
                f"{lost[:3]}; the update is refused"
            )
        lines = list(self._arrived.values())
        lines += [tensor_line(name, view) for name, view in self.places.views.items()]
        found = digest_of(lines)
        if found != digest:
            raise TransportError(
                f"version {self.manifest.version}: vLLM's parameters hold other bytes (digest {found[:12]}) than were sent "
                f"(digest {digest[:12]}); the update is refused, send it again"
            )

    def _load(self, tensors: list[tuple[str, Tensor]]) -> set[str]:
        try:
            loaded = self._model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
        except (AssertionError, KeyError, ValueError, RuntimeError) as error:
            names = [name for name, _ in tensors[:3]]
            raise TransportError(
                f"vLLM's loader refuses {len(tensors)} tensors, first {names}: {type(error).__name__}: {error}"
            ) from error
        names = {".".join(part for part in name.split(".") if part != "base_layer") for name in loaded or ()}
        self._loaded |= names
        return names
