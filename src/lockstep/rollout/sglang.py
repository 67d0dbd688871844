"""Prompts in, samples out, from an SGLang server over HTTP; updates go to it over a folder that both see.

An update is staged as files and read back before the server hears of it, so the old version stays served until the
commit. Adapters: each goes under a name of its own, which no cache knows, and the old one is unloaded once its requests
have ended. Whole weights: requests are drained, the server is paused, loads the folder, flushes its cache and goes on.
What the server then holds cannot be read back over its API: the label that it reports and the canary prove it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.errors import EngineDied, EngineMismatch, EngineUnhealthy, StaleWeights, TransportError
from lockstep.rollout.base import Abilities, SharedEngine, check_prompts
from lockstep.rollout.hf import Decoder
from lockstep.rollout.http import EngineRefused, HttpClient
from lockstep.rollout.process import EngineProcess
from lockstep.rollout.sglang_api import (
    Completion,
    check_adapter,
    check_distribution,
    check_server,
    check_success,
    generate_request,
    read_answers,
    row_seed,
    sampling_params,
)
from lockstep.rollout.sglang_server import SglangServer
from lockstep.rollout.staged import StagedUpdate
from lockstep.sampling import check_sampling, draw_rows
from lockstep.types import Bucket, Draw, Manifest, Prompt, Sample, Sampling, WeightKind

_GREEDY = Sampling(temperature=0, max_new_tokens=1)
_ADAPTER, _WEIGHTS = "lockstep-adapter", "lockstep-weights"
"""How labels begin: <kind>-<version>-<nonce>. The server reports the one it serves to every rank."""


class SglangEngine(SharedEngine):
    """An `Engine` (see `lockstep.rollout.base`) around one SGLang server, its own or somebody else's.

    `folder` holds staged updates and must be seen by the server under the same path. Refuses samplings whose logprobs
    SGLang would not give (`sglang_api.check_distribution`).
    """

    def __init__(
        self,
        client: HttpClient,
        *,
        tokenizer: Decoder,
        eos_ids: Sequence[int],
        dtype: str,
        folder: Path | None,
        model_path: Path | None = None,
        model_max_len: int | None = None,
        timeout_s: float = 600.0,
        owned: tuple[SglangServer, EngineProcess] | None = None,
    ):
        """Prefer `start`, `connect`, `attach`. `owned`: the server behind `client`, where lockstep started it.

        `folder`: None on a rank that only generates. `model_path`: the checkpoint whose config.json goes next to whole
        weights. `timeout_s`: of drains and updates. Raises `EngineMismatch` for a server whose samples would not be what
        `Engine` promises.
        """
        self._client, self._owned = client, owned
        self._tokenizer, self._eos_ids, self._dtype = tokenizer, tuple(sorted(set(eos_ids))), dtype
        self._folder, self._model_path = None if folder is None else Path(folder).absolute(), model_path
        self._max_len, self._timeout_s = model_max_len, timeout_s
        self._turn = threading.Condition()
        self._running: dict[str | None, int] = {}
        self._is_draining = False
        self._retired: list[str] = []
        self._update: StagedUpdate | None = None
        self._version = 0
        self._adapter: str | None = None
        self._stale: str | None = None
        self._meet()

    @classmethod
    def start(cls, server: SglangServer, *, tokenizer: Decoder, eos_ids: Sequence[int]) -> SglangEngine:
        """A server of its own. See `SglangServer.start` for what it raises."""
        process = server.start()
        try:
            return cls(
                server.client(process), tokenizer=tokenizer, eos_ids=eos_ids, dtype=server.dtype,
                folder=server.run_dir / "updates", model_path=server.model, model_max_len=server.model_max_len,
                timeout_s=server.request_timeout_s, owned=(server, process),
            )  # fmt: skip
        except BaseException:
            process.stop()
            raise

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        token: str | None,
        tokenizer: Decoder,
        eos_ids: Sequence[int],
        dtype: str,
        folder: Path | None,
        model_path: Path | None = None,
        request_timeout_s: float = 600.0,
        model_max_len: int | None = None,
    ) -> SglangEngine:
        """A server that runs already, and sees `folder` under the same path. `folder`: None for a rank that only generates."""
        return cls(
            HttpClient(url, token=token, timeout_s=request_timeout_s), tokenizer=tokenizer, eos_ids=eos_ids, dtype=dtype,
            folder=folder, model_path=model_path, model_max_len=model_max_len, timeout_s=request_timeout_s,
        )  # fmt: skip

    @classmethod
    def attach(cls, handle: Mapping[str, Any], *, tokenizer: Decoder, eos_ids: Sequence[int]) -> SglangEngine:
        """Another rank's view of an engine, from its `handle`: it generates, and hears of updates through `saw`."""
        return cls.connect(**handle, tokenizer=tokenizer, eos_ids=eos_ids, folder=None)

    def handle(self) -> dict[str, Any]:
        """See `SharedEngine.handle`."""
        return {
            "url": self._client.base_url,
            "token": self._client.token,
            "dtype": self._dtype,
            "request_timeout_s": self._timeout_s,
            "model_max_len": self._max_len,
        }

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def abilities(self) -> Abilities:
        """Either adapters or whole weights: where SGLang has wrapped its layers for LoRA, its loader knows their names
        no more, and goes on without them. Adapters are copied into buffers of the model's dtype."""
        kinds: tuple[WeightKind, ...] = ("adapter",) if self._takes_adapters else ("merged", "full")
        return Abilities(
            frozenset(kinds), self._dtype, keeps_prefixes=True, max_len=self._max_len, adapter_dtype=self._dtype
        )

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end every completion, whatever a call's sampling adds. The server adds its checkpoint's own."""
        return self._eos_ids

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, draw: Draw) -> list[Sample]:
        """See `Engine.generate`. Waits while whole weights are being loaded. Raises `EngineMismatch` for top-p and top-k."""
        check_sampling(sampling)
        check_distribution(sampling)
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1; {num_samples} came")
        check_prompts(prompts, sampling, self._max_len)
        wanted = zip(prompts, draw_rows(draw, len(prompts), num_samples), strict=True)
        rows = sorted(((row, prompt) for prompt, own in wanted for row in own), key=lambda pair: pair[0])
        if not rows:
            return []
        ids = [prompt.ids for _, prompt in rows]
        seeds = [row_seed(draw, slot, index) for (slot, index), _ in rows]
        with self._serving() as (version, adapter, label):
            done = self._ask(ids, seeds, sampling, adapter, label)
        return [
            self._sample(prompt, slot, index, completion, version)
            for ((slot, index), prompt), completion in zip(rows, done, strict=True)
        ]

    def begin(self, manifest: Manifest) -> None:
        """See `Receiver.begin`. The old version stays served until the commit, whatever the kind."""
        if self._update is not None:
            raise TransportError(
                f"version {manifest.version} cannot begin: the update to version {self._update.manifest.version} is "
                "open; commit or abort it first"
            )
        if self._folder is None:
            raise TransportError("this rank only generates; the rank that started or connected the engine updates it")
        if manifest.kind not in self.abilities.kinds:
            how = "without --enable-lora" if self._takes_adapters else "with --enable-lora"
            raise TransportError(
                f"this SGLang takes {sorted(self.abilities.kinds)} updates, {manifest.kind!r} came; start it {how}, or "
                "change sync.mode"
            )
        if manifest.kind == "adapter":
            check_adapter(manifest)
        kind = _ADAPTER if manifest.kind == "adapter" else _WEIGHTS
        label = f"{kind}-{manifest.version}-{secrets.token_hex(4)}"
        self._update = StagedUpdate(manifest, self._folder / label, model_path=self._model_path)

    def receive(self, bucket: Bucket) -> None:
        """See `Receiver.receive`. Memory: an adapter whole, of whole weights one bucket."""
        self._open_update("receive").receive(bucket)

    def commit(self, digest: str) -> None:
        """See `Receiver.commit`. A failed commit ends the update as an abort does.

        The digest is compared with what is read back from the files that the server is then told to load.
        """
        update = self._open_update("commit")
        self._update = None
        try:
            update.seal(digest)
            if update.manifest.kind == "adapter":
                self._serve_adapter(update)
            else:
                self._serve_weights(update)
        finally:
            update.remove()

    def abort(self, reason: str) -> None:
        """See `Receiver.abort`. Nothing to do where no update is open, e.g. after a failed commit."""
        update, self._update = self._update, None
        if update is not None:
            update.remove()

    def saw(self, version: int) -> None:
        """On a rank that did not push: from now on ask for what the server now serves, which must be this version."""
        label = self._reported_label()
        kind, _, rest = label.partition(f"-{version}-")
        if kind not in (_ADAPTER, _WEIGHTS) or not rest:
            raise StaleWeights(f"version {version} was committed, but the server reports {label!r}")
        with self._turn:
            self._version, self._label, self._stale = version, label, None
            self._adapter = label if kind == _ADAPTER else None

    def restart(self) -> None:
        """See `SharedEngine.restart`. Nothing is served until a complete update came, unless version 0 was."""
        if self._owned is None:
            raise EngineDied(
                "the SGLang server is gone, and lockstep did not start it; start it again, then the run with --resume"
            )
        server, process = self._owned
        lost = self._version
        self.abort("restart")
        server.restart(process)
        self._client.close()
        self._client = server.client(process)
        with self._turn:
            self._adapter, self._version, self._retired = None, 0, []
            self._meet()
            if lost:
                self._stale = f"the server was restarted and lost version {lost}; send it a complete update"

    def close(self) -> None:
        """Stop the server if lockstep started it, and close the connections."""
        self.abort("close")
        self._client.close()
        if self._owned is not None:
            self._owned[1].stop()

    def _meet(self) -> None:
        """Learn what the server is and which weights it has."""
        model_info, server_info = self._client.get("/model_info"), self._client.get("/server_info")
        check_server(model_info, server_info, sent={*sampling_params(_GREEDY, ()), "sampling_seed"})
        self._takes_adapters = bool(server_info.get("enable_lora"))
        self._label = str(model_info["weight_version"])
        if self._label.startswith(_WEIGHTS):
            self._stale = f"the server holds weights of an earlier update ({self._label}); send it a complete one"

    def _reported_label(self) -> str:
        return str(self._client.get("/model_info")["weight_version"])

    def _open_update(self, call: str) -> StagedUpdate:
        if self._update is None:
            raise TransportError(f"{call} came without a begin: no update is open; call begin with its manifest first")
        return self._update

    @contextmanager
    def _serving(self) -> Iterator[tuple[int, str | None, str]]:
        """(version, adapter, label) that stay loaded inside the block. Waits for a drain to end."""
        with self._turn:
            if not self._turn.wait_for(lambda: not self._is_draining, self._timeout_s):
                raise EngineUnhealthy(f"an update has held generation up for more than {self._timeout_s:g} s")
            if self._stale is not None:
                raise StaleWeights(self._stale)
            served = (self._version, self._adapter, self._label)
            self._running[served[1]] = self._running.get(served[1], 0) + 1
        try:
            yield served
        finally:
            with self._turn:
                self._running[served[1]] -= 1
                self._turn.notify_all()

    def _ask(
        self, ids: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, adapter: str | None, label: str
    ) -> list[Completion]:
        params = sampling_params(sampling, sorted({*self._eos_ids, *sampling.eos_ids}))
        body = generate_request(ids, seeds, params, adapter)
        answers = self._client.post("/generate", body, repeatable=True)
        # An adapter's name says which one it is; the label may be a newer one's when the request ends.
        return read_answers(answers, len(ids), weight_version=label if adapter is None else None)

    def _sample(self, prompt: Prompt, slot: int, index: int, done: Completion, version: int) -> Sample:
        text = self._tokenizer.decode(list(done.ids), skip_special_tokens=True)
        return Sample(
            prompt=prompt, slot=slot, index=index, ids=done.ids, logprobs=done.logprobs, text=text,
            finish=done.finish, policy_version=version,
        )  # fmt: skip

    def _serve_adapter(self, update: StagedUpdate) -> None:
        """Load it under its own name, hear from it, then switch. Whatever fails, the old one is still served."""
        self._unload_retired()
        name = update.path.name
        with self._turn:
            self._retired.append(name)  # until it is served: one whose load failed or came late must not stay
        body = {"lora_name": name, "lora_path": str(update.path), "pinned": False}
        check_success(self._post("/load_lora_adapter", body, "load the adapter"), "load the adapter")
        self._ask([(0,)], [0], _GREEDY, name, self._label)
        body = {"new_version": name, "abort_all_requests": False}
        check_success(self._post("/update_weight_version", body, "take the label"), "take the label")
        with self._turn:
            self._retired.remove(name)
            if self._adapter is not None:
                self._retired.append(self._adapter)
            self._adapter = self._label = name
            self._version, self._stale = update.manifest.version, None
        self._unload_retired()

    def _unload_retired(self) -> None:
        """Drop adapters that no request uses any more; those in use wait for the next update."""
        with self._turn:
            free = [name for name in self._retired if not self._running.get(name)]
            self._retired = [name for name in self._retired if name not in free]
        for name in free:
            try:
                self._client.post("/unload_lora_adapter", {"lora_name": name}, timeout_s=self._timeout_s)
            except EngineRefused:
                continue  # it never got there: the load failed, or a reload or restart dropped it

    def _serve_weights(self, update: StagedUpdate) -> None:
        """Drain, pause, load, flush, go on. If it fails half-way nothing is served until a complete update."""
        version = update.manifest.version
        with self._drained():
            self._stale = (
                f"loading version {version} into the server failed half-way; send it a complete merged or full update"
            )
            self._post("/pause_generation", {"mode": "abort"}, "pause")
            body = {
                "model_path": str(update.path), "abort_all_requests": False, "weight_version": update.path.name,
                "flush_cache": True,
            }  # fmt: skip
            check_success(self._post("/update_weights_from_disk", body, "load the weights"), "load the weights")
            self._post("/flush_cache", None, "flush its cache, so old keys and values would mix with new weights")
            self._post("/continue_generation", {}, "go on after the pause")
            label = self._reported_label()
            if label != update.path.name:
                raise EngineMismatch(f"SGLang reports weights {label!r} after it loaded {update.path.name!r}")
            self._ask([(0,)], [0], _GREEDY, None, label)
            with self._turn:
                self._adapter, self._label, self._version, self._stale = None, label, version, None

    def _post(self, path: str, body: Mapping[str, Any] | None, what: str) -> Any:
        try:
            return self._client.post(path, body, timeout_s=self._timeout_s)
        except EngineRefused as error:
            raise TransportError(f"SGLang did not {what}: {error}") from error

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """No request of this engine runs inside the block; new ones wait for its end."""
        with self._turn:
            self._is_draining = True
        try:
            with self._turn:
                if not self._turn.wait_for(lambda: not any(self._running.values()), self._timeout_s):
                    raise EngineUnhealthy(
                        f"{sum(self._running.values())} requests did not end within {self._timeout_s:g} s "
                        "(engine.request_timeout_s), so the weights cannot be replaced"
                    )
            yield
        finally:
            with self._turn:
                self._is_draining = False
                self._turn.notify_all()
