"""A fake vLLM 0.32 with lockstep's extension: its routes, their checks, and its traps, each of which can be switched.

The transports' ends that run in vLLM's worker are the real ones; the receiver behind them is this file's, around a tiny
model, since lockstep's own needs vLLM's classes. Every request is checked; unknown routes and fields are refused.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field

from lockstep.errors import LockstepError, TransportError
from lockstep.testing_engines.model import ServedModel
from lockstep.testing_engines.server import Answer, Body, FakeServer, Route
from lockstep.transport.base import Ledger, digest_of, tensor_line
from lockstep.transport.disk import DiskInlet
from lockstep.transport.shm import ShmInlet
from lockstep.types import Bucket, Manifest, Sampling

BASE = "base"
MAX_LORAS = 2
_INLETS = {"shm": ShmInlet, "disk": DiskInlet}


class Params(Body):
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True


class Generate(Body):
    token_ids: list[int]
    sampling_params: Params
    model: str | None = None
    cache_salt: str | None = None
    stream: bool = False


class Rpc(Body):
    method: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: float | None = None


class LoadAdapter(Body):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapter(Body):
    lora_name: str
    lora_int_id: int | None = None


class SetVersion(Body):
    new_version: str


@dataclass(slots=True)
class VllmFlags:
    """How the server was started, and what it does wrong."""

    has_dev_mode: bool = True
    """VLLM_SERVER_DEV_MODE=1; without it the routes for updates are missing."""
    has_scale_out: bool = True
    """--enable-scale-out; without it /inference/v1/generate is refused."""
    has_extension: bool = True
    """--worker-extension-cls; without it the worker knows no lockstep_call."""
    has_lora: bool = True
    is_packed: bool = False
    """Weights are packed for the CPU: they cannot be written."""
    ignores_salt: bool = False
    """The prefix cache does not look at cache_salt."""
    drops_last_adapter: bool = False
    """An adapter is loaded, but requests that name it go to the base."""


class FakeReceiver:
    """The receiver in vLLM's worker: what `lockstep.rollout.vllm_receiver` does, on a `ServedModel`."""

    def __init__(self, model: ServedModel, flags: VllmFlags):
        self.model, self.flags = model, flags
        self.instance = uuid.uuid4().hex
        self.staged: dict[str, tuple[Mapping[str, Any], dict[str, torch.Tensor]]] = {}
        self.manifest: Manifest | None = None
        self.ledger: Ledger | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.ready: tuple[Manifest, dict[str, torch.Tensor]] | None = None
        self.version, self.label, self.is_merged = 0, "default", False
        self.serving: str | None = None
        self.stale: str | None = None

    def begin(self, manifest: Manifest) -> None:
        self.ready = None
        if manifest.kind == "adapter":
            if self.stale is not None or self.is_merged:
                raise TransportError(f"an adapter needs the checkpoint's base; {self.stale or 'this one is merged'}")
        else:
            if self.flags.is_packed:
                raise TransportError("2 of vLLM's parameters were packed when they were loaded: they cannot be written")
            self.stale = f"version {manifest.version} is being written and not committed"
            self.serving, self.label, self.is_merged = None, "lockstep:torn", manifest.kind == "merged"
        self.manifest, self.ledger, self.tensors = manifest, Ledger(manifest), {}

    def receive(self, bucket: Bucket) -> None:
        assert self.ledger is not None and self.manifest is not None
        for name, tensor in bucket.items():
            self.ledger.check(name, tensor)
        if self.manifest.kind == "adapter":
            self.tensors |= {name: tensor.clone() for name, tensor in bucket.items()}
        else:
            self.model.load(dict(bucket.items()))

    def commit(self, digest: str) -> None:
        assert self.ledger is not None and self.manifest is not None
        manifest, self.manifest = self.manifest, None
        self.ledger.check_complete()
        held = self.tensors if manifest.kind == "adapter" else self.model.weights()
        if digest_of(tensor_line(spec.name, held[spec.name]) for spec in manifest.specs) != digest:
            raise TransportError(f"version {manifest.version}: other bytes than were sent")
        if manifest.kind == "adapter":
            self.ready = (manifest, self.tensors)
            return
        self.version, self.stale, self.label = (
            manifest.version,
            None,
            f"lockstep:{manifest.version}:{uuid.uuid4().hex[:8]}",
        )

    def abort(self, reason: str) -> None:
        self.manifest = self.ready = None

    def handle(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        if method == "describe":
            return self._describe()
        assert self.ready is not None, "no adapter is ready"
        manifest, tensors = self.ready
        if method == "stage":
            path = f"lockstep:{uuid.uuid4().hex}"
            self.staged[path] = (dict(manifest.adapter_config or {}), tensors)
            return {"path": path}
        self.version, self.serving, self.ready = manifest.version, payload["name"], None
        return {"version": self.version, "not_read_back": []}

    def _describe(self) -> dict[str, Any]:
        lora = {"max_rank": 16, "max_loras": 2, "dtype": "float32"} if self.flags.has_lora else None
        positions = self.model.model.config.max_position_embeddings
        facts = {"instance": self.instance, "version": self.version, "label": self.label, "serving": self.serving}
        return {**facts, "stale": self.stale, "max_model_len": positions, "dtype": "float32", "lora": lora}


class FakeVllm(FakeServer):
    """Serves `model`, with lockstep's extension in its worker."""

    def __init__(self, model: ServedModel, *, token: str | None = None, port: int = 0):
        super().__init__(token=token, port=port)
        self.model = model
        self.flags = VllmFlags()
        self.version = "0.32.0"
        self.receiver = FakeReceiver(model, self.flags)
        self.inlets = {name: make(self.receiver) for name, make in _INLETS.items()}
        self.paths: dict[str, str] = {}
        """Adapters that the front end knows: name -> path."""
        self.is_paused = False
        self.add(
            Route("GET", "/health", None, lambda body, query: Answer(""), is_open=True),
            Route("GET", "/version", None, lambda body, query: Answer({"version": self.version})),
            Route("GET", "/v1/models", None, self._models),
            Route("POST", "/inference/v1/generate", Generate, self._generate),
            Route("POST", "/v1/load_lora_adapter", LoadAdapter, self._load_adapter),
            Route("POST", "/v1/unload_lora_adapter", UnloadAdapter, self._unload_adapter),
            Route("POST", "/collective_rpc", Rpc, self._rpc),
            Route("POST", "/pause", None, self._pause),
            Route("POST", "/resume", None, self._resume),
            Route("GET", "/is_paused", None, lambda body, query: self._dev(Answer({"is_paused": self.is_paused}))),
            Route("POST", "/reset_prefix_cache", None, self._reset),
            Route("POST", "/update_weight_version", SetVersion, self._set_version),
        )

    def reload(self, tensors: dict[str, torch.Tensor]) -> None:
        """What vLLM's own reload_weights does when somebody calls it: adapters drop out of the worker, caches stay."""
        self.model.load(tensors)

    def _dev(self, answer: Answer) -> Answer:
        return answer if self.flags.has_dev_mode else Answer({"detail": "Not Found"}, 404)

    def _models(self, body: None, query: Mapping[str, str]) -> Answer:
        cards = [{"id": BASE, "parent": None}, *({"id": name, "parent": BASE} for name in self.paths)]
        return Answer({"object": "list", "data": cards})

    def _generate(self, body: Generate, query: Mapping[str, str]) -> Answer:
        if not self.flags.has_scale_out:
            return Answer({"error": {"message": "scale-out endpoints are disabled"}}, 403)
        adapter = None if body.model in (None, BASE) else body.model
        if adapter is not None and adapter not in self.paths:
            return Answer({"error": {"message": f"The model `{adapter}` does not exist."}}, 404)
        if adapter is not None and adapter not in self.model.adapters:
            self._fill(adapter)  # the slot was evicted or dropped: the worker reads the adapter's path again
        params = body.sampling_params
        sampling = Sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_new_tokens=params.max_tokens or 16,
            eos_ids=tuple(params.stop_token_ids or ()),
        )
        key = f"{adapter}|{'' if self.flags.ignores_salt else body.cache_salt}"
        served = None if self.flags.drops_last_adapter else adapter
        done = self.model.generate(body.token_ids, sampling, seed=params.seed or 0, adapter=served, cache_key=key)
        pairs = zip(done.ids, done.logprobs, strict=True)
        content = [
            {"token": f"token_id:{token}", "token_id": token, "logprob": lp, "top_logprobs": []} for token, lp in pairs
        ]
        choice = {"index": 0, "finish_reason": done.finish, "token_ids": list(done.ids)}
        choice |= {"logprobs": {"content": content}, "weight_versions": [{"version": label} for label in done.labels]}
        return Answer({"request_id": "0", "choices": [choice], "prompt_logprobs": None})

    def _load_adapter(self, body: LoadAdapter, query: Mapping[str, str]) -> Answer:
        if not self.flags.has_lora:
            return Answer({"detail": "Not Found"}, 404)
        if body.lora_name in self.paths and not body.load_inplace:
            return Answer({"error": {"message": f"The lora adapter '{body.lora_name}' has already been loaded."}}, 400)
        self.paths[body.lora_name] = body.lora_path
        self._fill(body.lora_name)
        return Answer(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    def _fill(self, name: str) -> None:
        config, tensors = self.receiver.staged[self.paths[name]]
        self.model.put_adapter(name, config, tensors)
        for old in list(self.model.adapters)[:-MAX_LORAS]:
            del self.model.adapters[old]

    def _unload_adapter(self, body: UnloadAdapter, query: Mapping[str, str]) -> Answer:
        if body.lora_name not in self.paths:
            return Answer({"error": {"message": f"The lora adapter '{body.lora_name}' cannot be found."}}, 404)
        del self.paths[
            body.lora_name
        ]  # of the front end only: requests under way go on, slots empty when they are needed
        return Answer(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _rpc(self, body: Rpc, query: Mapping[str, str]) -> Answer:
        if not self.flags.has_dev_mode:
            return Answer({"detail": "Not Found"}, 404)
        if body.method != "lockstep_call" or not self.flags.has_extension:
            return Answer({"error": {"message": f"'Worker' object has no attribute '{body.method}'"}}, 500)
        return Answer({"results": [self._call(*body.args)]})

    def _call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        transport, _, call = method.rpartition(".")
        end = self.inlets[transport] if transport else self.receiver
        try:
            return {"ok": end.handle(call, payload)}
        except Exception as error:
            ours = isinstance(error, LockstepError)
            return {"error": type(error).__name__, "message": str(error), "is_ours": ours}

    def _pause(self, body: None, query: Mapping[str, str]) -> Answer:
        mode = query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep") or not self.flags.has_dev_mode:
            return Answer({"error": f"invalid mode {mode!r}"}, 400)
        self.is_paused = True
        self.model.pause(mode)
        return Answer({"status": "paused"})

    def _resume(self, body: None, query: Mapping[str, str]) -> Answer:
        self.is_paused = False
        self.model.resume()
        return self._dev(Answer({"status": "resumed"}))

    def _reset(self, body: None, query: Mapping[str, str]) -> Answer:
        return self._dev(Answer({"success": self.model.reset_cache()}))

    def _set_version(self, body: SetVersion, query: Mapping[str, str]) -> Answer:
        self.model.label = body.new_version
        return self._dev(Answer({"success": True, "new_version": body.new_version}))
