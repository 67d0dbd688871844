"""One running vLLM server and calls in, its answers over HTTP out: the part of `VllmEngine` that knows vLLM's routes.

Written against vLLM 0.32 and its routes for reinforcement learning (VLLM_SERVER_DEV_MODE=1). Token ids travel over
/inference/v1/generate (--enable-scale-out), whose answers say which weight version made each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lockstep.errors import EngineDied, EngineUnhealthy, TransportError
from lockstep.rollout.http import EngineRefused, HttpClient

HEALTH_S = 5.0
ADAPTER_PREFIX = "lockstep-"
"""Begins the names of adapters that lockstep loads; others are left alone."""
BASE_MODEL = "base"
"""Name under which a server that lockstep starts serves its base (--served-model-name)."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion to draw."""

    prompt_ids: tuple[int, ...]
    params: dict[str, Any]
    """vLLM's SamplingParams, complete."""
    model: str | None
    """Name of the adapter; None is the base."""
    salt: str
    """Keeps what vLLM's prefix cache holds of other weights away."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What was drawn."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    weights: tuple[str, ...]
    """Weight versions of the base that made the tokens, in order, as vLLM recorded them; one where nothing changed."""


class Replica(Protocol):
    """One vLLM engine, over HTTP or in this process."""

    def call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """`LockstepWorker.lockstep_call`; limited as `Control.call` is. Raises what the worker raised, as `TransportError`."""
        ...

    def ask(self, asks: Sequence[Ask]) -> list[Reply]:
        """Draw all of them; one for an adapter that is not known any more is answered as aborted. Threads may call this."""
        ...

    def pause(self, *, abort: bool) -> None:
        """Stop taking requests; abort those that run, or wait for them. Nothing is computed until `resume`."""
        ...

    def resume(self) -> None: ...

    def reset_cache(self) -> None:
        """Drop the prefix cache. Raises `EngineUnhealthy` if vLLM does not."""
        ...

    def load_adapter(self, name: str, path: str) -> None:
        """Make the staged adapter known as `name`."""
        ...

    def unload_adapter(self, name: str) -> None: ...

    def adapters(self) -> list[str]:
        """Names of the adapters that are known."""
        ...

    def set_weights(self, label: str) -> None:
        """What vLLM records from now on as the weight version of each token."""
        ...

    def is_paused(self) -> bool: ...

    def is_healthy(self) -> bool:
        """Whether it answers, quickly."""
        ...

    def close(self) -> None: ...


class HttpReplica:
    """A `Replica` that is a server."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        token: str | None = None,
        request_timeout_s: float = 600.0,
        max_in_flight: int = 64,
        died: Callable[[float], EngineDied | None] | None = None,
    ):
        """`model`: name of the server's base. `max_in_flight`: requests that this client keeps running at once. `died`: see
        `HttpClient`."""
        self.url = url
        self.token = token
        self.model = model
        self.client = HttpClient(
            url, token=token, timeout_s=request_timeout_s, max_connections=max_in_flight + 4, died=died
        )
        self._timeout_s = request_timeout_s
        self._threads = ThreadPoolExecutor(max_workers=max_in_flight, thread_name_prefix="lockstep-vllm")

    def call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        limit_s = min(self._timeout_s, payload.get("limit_s", self._timeout_s))
        body = {"method": "lockstep_call", "args": [method, payload], "timeout": limit_s}
        (answer,) = self.client.post("/collective_rpc", body, timeout_s=limit_s)["results"]
        return read_answer(answer)

    def ask(self, asks: Sequence[Ask]) -> list[Reply]:
        return list(self._threads.map(self._ask, asks))

    def pause(self, *, abort: bool) -> None:
        self.client.post(f"/pause?mode={'abort' if abort else 'wait'}", repeatable=True)

    def resume(self) -> None:
        self.client.post("/resume", repeatable=True)

    def reset_cache(self) -> None:
        if self.client.post("/reset_prefix_cache", repeatable=True) != {"success": True}:
            raise EngineUnhealthy("vLLM did not reset its prefix cache: blocks are still in use, though it is paused")

    def load_adapter(self, name: str, path: str) -> None:
        self.client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> None:
        self.client.post("/v1/unload_lora_adapter", {"lora_name": name})

    def adapters(self) -> list[str]:
        return [card["id"] for card in self.client.get("/v1/models")["data"] if card.get("parent")]

    def set_weights(self, label: str) -> None:
        self.client.post("/update_weight_version", {"new_version": label}, repeatable=True)

    def is_paused(self) -> bool:
        return bool(self.client.get("/is_paused")["is_paused"])

    def is_healthy(self) -> bool:
        try:
            self.client.get("/health", timeout_s=HEALTH_S)
        except (EngineUnhealthy, EngineDied):
            return False
        return True

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.client.close()

    def _ask(self, ask: Ask) -> Reply:
        body = {
            "token_ids": list(ask.prompt_ids),
            "sampling_params": ask.params,
            "model": ask.model or self.model,
            "cache_salt": ask.salt,
        }
        try:
            answer = self.client.post("/inference/v1/generate", body, timeout_s=self._timeout_s)
        except EngineRefused as error:
            if error.status != 404 or ask.model is None:
                raise
            return Reply((), (), "abort", ())  # the adapter was replaced since this was asked for: ask for the new one
        (choice,) = answer["choices"]
        ids = tuple(choice["token_ids"] or ())
        content = (choice["logprobs"] or {}).get("content") or []
        if choice["finish_reason"] not in ("stop", "length", "abort"):
            raise EngineUnhealthy(f"vLLM ended a completion with {choice['finish_reason']!r}: {str(answer)[:300]}")
        if choice["finish_reason"] != "abort" and [entry["token_id"] for entry in content] != list(ids):
            raise EngineUnhealthy(f"vLLM's log-probabilities are of other tokens than it drew: {str(answer)[:300]}")
        return Reply(
            ids=ids,
            logprobs=tuple(entry["logprob"] for entry in content),
            finish=choice["finish_reason"],
            weights=tuple(span["version"] for span in choice["weight_versions"] or ()),
        )


class RpcControl:
    """A `Control` of one transport: its calls travel as "shm.begin", "shm.receive" and so on."""

    def __init__(self, replica: Replica, transport: str):
        self._replica = replica
        self._transport = transport

    def call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        return self._replica.call(f"{self._transport}.{method}", payload)


def read_answer(answer: Any) -> dict[str, Any]:
    """The result of a `lockstep_call`. Raises `TransportError` with the worker's own words."""
    if not isinstance(answer, dict) or not {"ok", "error"} & answer.keys():
        raise TransportError(f"what answers in vLLM's worker is not lockstep's extension: {str(answer)[:300]}")
    if "error" in answer:
        kind = answer["error"]
        raise TransportError(answer["message"] if kind == "TransportError" else f"{kind}: {answer['message']}")
    return answer["ok"]
