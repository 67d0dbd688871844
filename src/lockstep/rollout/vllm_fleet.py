"""vLLM engines in, started or found running; what each of them serves, checked, out.

*replica*: one vLLM engine; all of them are to serve the same weights. *label*: what vLLM records as the weight version of a
token; it names the base's weights. An adapter is addressed by a name of its own per update.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from lockstep.errors import (
    ConfigError,
    EngineDied,
    EngineMismatch,
    EngineSilent,
    EngineUnhealthy,
    LockstepError,
    StaleWeights,
)
from lockstep.rollout.http import EngineRefused
from lockstep.rollout.vllm_client import ADAPTER_PREFIX, Ask, HttpReplica, Replica, Reply
from lockstep.rollout.vllm_sampling import vllm_params
from lockstep.rollout.vllm_server import TESTED, OwnedServer, VllmServer
from lockstep.types import Sampling

log = logging.getLogger(__name__)

TORN = "lockstep:torn"
"""Label while weights are being overwritten: a token that carries it is refused, whoever let the engine go on."""
_POLL_S = 0.2
_PROBE_IDS = (1, 2, 3, 4)
_EXACT = 1e-6
_HOW_TO_START = (
    "start it as docs/vllm.md says: VLLM_SERVER_DEV_MODE=1 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, "
    "--worker-extension-cls lockstep.rollout.vllm_worker.LockstepWorker, --enable-scale-out, and the right token"
)


@dataclass(frozen=True, slots=True)
class Served:
    """What one replica serves."""

    instance: str
    """Names this life of its worker."""
    version: int
    adapter: str | None
    """Name under which the served adapter is known; None is the base."""
    label: str
    """Weight version that vLLM records for the base."""
    stale: str | None
    """Why there is no complete set of weights, where there is none."""
    max_model_len: int
    """In tokens."""
    dtype: str
    adapter_dtype: str | None
    """What it keeps LoRA in; None where it takes no adapters."""

    @property
    def salt(self) -> str:
        """Differs whenever weights do: what the prefix cache holds of others is never reused."""
        return f"{self.instance}:{self.label}:{self.adapter}"


class Fleet:
    """The replicas of one engine and what they serve. Calls may come from several threads, but for `restart` and `close`."""

    def __init__(self, replicas: Sequence[Replica], servers: Sequence[OwnedServer] = ()):
        """Checks each replica. `servers`: those behind the replicas, where lockstep started them."""
        self.replicas = list(replicas)
        self._servers = list(servers)
        self._threads = ThreadPoolExecutor(
            max_workers=max(1, len(self.replicas)), thread_name_prefix="lockstep-replica"
        )
        self.served = [check_replica(replica) for replica in self.replicas]

    @classmethod
    def start(cls, server: VllmServer, num_replicas: int) -> Fleet:
        """Start servers and wait until they answer. Raises `EngineDied` with the last words of one that does not start."""
        owned: list[OwnedServer] = []
        try:
            for index in range(num_replicas):
                path = server.log_path
                if num_replicas > 1:
                    path = path.with_name(f"{path.stem}-{index}{path.suffix}")
                owned.append(OwnedServer(replace(server, log_path=path)))
            with ThreadPoolExecutor(max_workers=num_replicas) as threads:
                return cls(list(threads.map(OwnedServer.start, owned)), owned)
        except BaseException:
            for one in owned:
                one.close()
            raise

    @classmethod
    def connect(cls, urls: Sequence[str], *, model: str | None, token: str | None, request_timeout_s: float) -> Fleet:
        """Servers that run already. `model`: name of their base; None asks for it.

        Raises `EngineUnhealthy` or `EngineMismatch` saying with which arguments the server has to be started.
        """
        replicas: list[HttpReplica] = []
        try:
            for url in urls:
                replicas.append(HttpReplica(url, model=model or "", token=token, request_timeout_s=request_timeout_s))
                _check_server(replicas[-1], has_model=model is not None)
            return cls(replicas)
        except BaseException:
            for replica in replicas:
                replica.close()
            raise

    @property
    def token(self) -> str | None:
        """What the servers require; None for a vLLM in this process."""
        return next((replica.token for replica in self.replicas if isinstance(replica, HttpReplica)), None)

    def refresh(self) -> None:
        """Ask all replicas what they serve."""
        self.served = [describe(replica) for replica in self.replicas]

    def wait_whole(self, limit_s: float) -> None:
        """Refresh until no replica is being overwritten, `limit_s` seconds at most; `agreed` says what is then the matter."""
        deadline = time.monotonic() + limit_s
        self.refresh()
        while any(served.stale for served in self.served) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self.refresh()

    def agreed(self) -> list[Served]:
        """What the replicas serve. Raises `StaleWeights` where one is torn, or they serve different versions."""
        served = list(self.served)
        for state in served:
            if state.stale is not None:
                raise StaleWeights(state.stale)
        versions = [state.version for state in served]
        if len(set(versions)) > 1:
            raise StaleWeights(
                f"the replicas serve different versions {versions}; push the current weights before generating"
            )
        return served

    def ask(self, shares: Sequence[Sequence[Ask]]) -> list[list[Reply]]:
        """One share per replica, side by side."""
        return list(self._threads.map(lambda replica, share: replica.ask(share), self.replicas, shares))

    def stop_generating(self, *, abort: bool) -> None:
        """All replicas, for all clients: abort what runs, or wait for it; what comes later waits there.

        Where one fails, the others go on: nothing was overwritten yet.
        """

        def stop(index: int) -> None:
            self.replicas[index].pause(abort=abort)
            self.replicas[index].set_weights(TORN)

        errors = self._each(stop, range(len(self.replicas)))
        if not errors:
            return
        failure = next(iter(errors.values()))
        try:
            self.go_on(lost=[i for i, error in errors.items() if isinstance(error, EngineDied | EngineSilent)])
        except LockstepError as other:
            failure.add_note(f"then, on going on with what was served: {other}")
        raise failure

    def go_on(self, *, lost: Collection[int] = ()) -> None:
        """Refresh; forget adapters that are not served; let every replica that is whole go on. All at once.

        One that is torn stays paused, for whoever else asks it. `lost`: replicas that are known not to answer; they are not asked, and
        count as torn. Raises the first error, once all have been seen to; what fails counts as torn.
        """
        errors = self._each(self._go_on, [index for index in range(len(self.replicas)) if index not in lost])
        for index in {*lost, *errors}:
            why = errors.get(index, "it left a call unanswered")
            self.served[index] = replace(self.served[index], stale=f"replica {index} may serve anything: {why}")
        if errors:
            raise next(iter(errors.values()))

    def _go_on(self, index: int) -> None:
        replica = self.replicas[index]
        served = self.served[index] = describe(replica)
        for name in replica.adapters():
            if name != served.adapter and name.startswith(ADAPTER_PREFIX):
                replica.unload_adapter(name)
        if served.stale is None:
            if replica.is_paused():
                replica.reset_cache()
            replica.set_weights(served.label)
            replica.resume()

    def _each(self, act: Callable[[int], None], indices: Sequence[int]) -> dict[int, Exception]:
        """At once, all waited for; errors by replica. Threads of its own: those of `ask` are taken by the very requests that an
        update may abort."""
        if not indices:
            return {}
        with ThreadPoolExecutor(max_workers=len(indices)) as threads:
            flights = {index: threads.submit(act, index) for index in indices}
            errors = {index: flight.exception() for index, flight in flights.items()}
        return {index: error for index, error in errors.items() if isinstance(error, Exception)}

    def is_healthy(self) -> bool:
        """Whether all replicas answer."""
        return all(replica.is_healthy() for replica in self.replicas)

    def restart(self) -> list[int]:
        """Start again the replicas that do not answer, or all of them if all do. Returns which.

        Raises `EngineDied` where the limit of restarts is reached, or where lockstep did not start them.
        """
        if not self._servers:
            raise EngineDied(
                "the vLLM server is gone or hangs, and lockstep did not start it: start it again, then the run with --resume"
            )
        gone = [index for index, replica in enumerate(self.replicas) if not replica.is_healthy()]
        gone = gone or list(range(len(self.replicas)))
        for index in gone:
            self.replicas[index].close()
            self.replicas[index] = self._servers[index].restart()
            self.served[index] = check_replica(self.replicas[index])
        return gone

    def handle(self) -> dict[str, Any]:
        """JSON-able: what `Fleet.connect` needs elsewhere. Raises `ConfigError` for a vLLM in this process."""
        replicas = [replica for replica in self.replicas if isinstance(replica, HttpReplica)]
        if len(replicas) != len(self.replicas):
            raise ConfigError("a vLLM in this process serves this rank only; start a server for several ranks")
        return {
            "urls": [replica.url for replica in replicas],
            "model": replicas[0].model,
            "token": replicas[0].token,
        }

    def close(self) -> None:
        """Let go of the replicas; end the servers that lockstep started. Twice is as good as once."""
        for replica in self.replicas:
            replica.close()
        for server in self._servers:
            server.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def describe(replica: Replica) -> Served:
    """Ask one replica what it serves."""
    facts = replica.call("describe", {})
    return Served(
        instance=facts["instance"],
        version=facts["version"],
        adapter=facts["serving"],
        label=facts["label"],
        stale=facts["stale"],
        max_model_len=facts["max_model_len"],
        dtype=facts["dtype"],
        adapter_dtype=None if facts["lora"] is None else facts["lora"]["dtype"],
    )


def check_replica(replica: Replica) -> Served:
    """What it serves, after a probe of what it calls log-probabilities. A torn one is not probed.

    Of one token that is kept (top_k 1) the processed log-probability is 0; a raw one is below, for any model that has doubts.
    Raises `EngineMismatch`.
    """
    served = describe(replica)
    if served.stale is not None:
        return served
    one = Sampling(temperature=1.0, top_k=1, max_new_tokens=4)
    (reply,) = replica.ask([Ask(_PROBE_IDS, vllm_params(one, 0, ()), served.adapter, served.salt)])
    if max(abs(value) for value in reply.logprobs) > _EXACT:
        raise EngineMismatch(
            f"vLLM's log-probabilities are not those of the distribution it samples from: with top_k=1 they are "
            f"{reply.logprobs}, not 0; start it with --logprobs-mode processed_logprobs"
        )
    return served


def _check_server(replica: HttpReplica, *, has_model: bool) -> None:
    try:
        version = replica.client.get("/version")["version"]
        if not version.startswith(TESTED.rpartition(".")[0]):
            log.warning("vLLM %s runs at %s; lockstep was tested with %s", version, replica.url, TESTED)
        if not has_model:
            cards = replica.client.get("/v1/models")["data"]
            replica.model = next(card["id"] for card in cards if not card.get("parent"))
        describe(replica)
    except EngineRefused as error:
        raise EngineUnhealthy(f"{replica.url} refuses what lockstep needs ({error}): {_HOW_TO_START}") from error
    except EngineUnhealthy as error:
        if "/collective_rpc answered" not in str(error):
            raise
        raise EngineUnhealthy(f"{replica.url} has no lockstep in its worker ({error}): {_HOW_TO_START}") from error
