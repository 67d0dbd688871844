"""A model folder in; a vLLM engine in this very process, behind the same calls as a server, out.

For environments that have vllm beside the trainer's dependencies. The only file besides vLLM's own worker extension that
imports vllm. One process, one engine, one rank: `handle` is refused. vLLM seeds this process's random numbers when it
starts, and on a CPU makes `torch.set_num_threads` do nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]
from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

from lockstep.errors import EngineUnhealthy
from lockstep.rollout.vllm_client import Ask, Reply, read_answer
from lockstep.rollout.vllm_server import EXTENSION, lora_rank


class LocalReplica:
    """A `Replica` in this process. Generating and updating take turns, so there is never anything to pause."""

    def __init__(
        self,
        model: Path,
        *,
        dtype: str = "float32",
        max_model_len: int | None = None,
        max_lora_rank: int | None = 16,
        **args: Any,
    ):
        """`args`: further arguments of `vllm.LLM`. Raises `EngineUnhealthy` if vLLM would start processes of its own."""
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise EngineUnhealthy("set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm is imported, or start a server")
        lora = {"enable_lora": True, "max_lora_rank": lora_rank(max_lora_rank), "max_loras": 2, "max_cpu_loras": 2}
        values = {
            "dtype": dtype,
            "max_model_len": max_model_len,
            "enforce_eager": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": EXTENSION,
            **({} if max_lora_rank is None else lora),
            **args,
        }
        self._llm = LLM(model=str(model), **values)
        self._turn = threading.Lock()
        self._adapters: dict[str, LoRARequest] = {}
        self._next_id = 1

    def call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        with self._turn:
            (answer,) = self._llm.collective_rpc("lockstep_call", args=(method, payload))
        return read_answer(answer)

    def ask(self, asks: Sequence[Ask]) -> list[Reply]:
        known = [ask for ask in asks if ask.model is None or ask.model in self._adapters]
        if len(known) < len(asks) or not asks:
            return [Reply((), (), "abort", ()) for _ in asks]
        with self._turn:
            outputs = self._llm.generate(
                [TokensPrompt(prompt_token_ids=list(ask.prompt_ids), cache_salt=ask.salt) for ask in asks],
                [SamplingParams(**ask.params) for ask in asks],
                lora_request=[None if ask.model is None else self._adapters[ask.model] for ask in asks],
                use_tqdm=False,
            )
        return [_reply(output.outputs[0]) for output in outputs]

    def pause(self, *, abort: bool) -> None:
        return

    def resume(self) -> None:
        return

    def is_paused(self) -> bool:
        return True

    def reset_cache(self) -> None:
        with self._turn:
            if not self._llm.reset_prefix_cache():
                raise EngineUnhealthy("vLLM did not reset its prefix cache")

    def load_adapter(self, name: str, path: str) -> None:
        request = LoRARequest(name, self._next_id, path)
        self._next_id += 1
        with self._turn:
            self._llm.llm_engine.add_lora(request)
        self._adapters[name] = request

    def unload_adapter(self, name: str) -> None:
        del self._adapters[name]

    def adapters(self) -> list[str]:
        return list(self._adapters)

    def set_weights(self, label: str) -> None:
        with self._turn:
            self._llm.llm_engine.set_weight_version(label)

    def is_healthy(self) -> bool:
        return True

    def close(self) -> None:
        """End vLLM's engine; its memory goes with the last reference to this replica."""
        with self._turn:
            self._llm.llm_engine.engine_core.shutdown()


def _reply(output: Any) -> Reply:
    ids = tuple(output.token_ids)
    chosen = [entry[token].logprob for entry, token in zip(output.logprobs or (), ids, strict=True)]
    return Reply(
        ids=ids,
        logprobs=tuple(chosen),
        finish=output.finish_reason,
        weights=tuple(span.version for span in output.weight_versions or ()),
    )
