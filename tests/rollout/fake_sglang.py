"""A fake SGLang: every request is checked against the documented routes, fields and types; unknown ones are refused.

Sources: SGLang's documentation ("SGLang for RL Systems", "Sampling Parameters", "LoRA Serving", "Native APIs") and the
request classes of its `managers/io_struct.py`, as of SGLang 0.5.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lockstep.testing_engines.model import Generated, ServedModel
from lockstep.testing_engines.server import Answer, Body, FakeServer, Route
from lockstep.types import Sampling


class SamplingParams(Body):
    max_new_tokens: int = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None


class Generate(Body):
    input_ids: list[list[int]] | list[int]
    sampling_params: list[SamplingParams] | SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    lora_path: list[str | None] | str | None = None
    rid: list[str] | str | None = None


class LoadAdapter(Body):
    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadAdapter(Body):
    lora_name: str


class LoadWeights(Body):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    flush_cache: bool = True


class Pause(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Nothing(Body):
    pass


class SetVersion(Body):
    new_version: str
    abort_all_requests: bool = True


class FakeSglang(FakeServer):
    """Serves `model`. The switches are what a real server's flags and environment decide."""

    def __init__(self, model: ServedModel, *, token: str | None = None, port: int = 0):
        super().__init__(token=token, port=port)
        self.model = model
        self.weight_version = "default"
        self.server_info: dict[str, Any] = {
            "enable_deterministic_inference": True,
            "speculative_algorithm": None,
            "enable_lora": False,
        }
        self.preferred: dict[str, Any] | None = None
        self.ignores_load = False
        """An update is answered with success, and changes nothing."""
        self._loads = 0
        self._cache_keys: dict[str, str] = {}
        self.add(
            Route("GET", "/health_generate", None, lambda body, query: Answer("")),
            Route("GET", "/model_info", None, self._model_info),
            Route("GET", "/server_info", None, lambda body, query: Answer(self.server_info)),
            Route("POST", "/generate", Generate, self._generate),
            Route("POST", "/load_lora_adapter", LoadAdapter, self._load_adapter),
            Route("POST", "/unload_lora_adapter", UnloadAdapter, self._unload_adapter),
            Route("POST", "/update_weights_from_disk", LoadWeights, self._load_weights),
            Route("POST", "/update_weight_version", SetVersion, self._set_version),
            Route("POST", "/flush_cache", None, self._flush),
            Route("POST", "/pause_generation", Pause, self._pause),
            Route("POST", "/continue_generation", Nothing, self._resume),
        )

    def _model_info(self, body: None, query: Mapping[str, str]) -> Answer:
        info = {"model_path": "tiny", "is_generation": True, "preferred_sampling_params": self.preferred}
        return Answer({**info, "weight_version": self.weight_version})

    def _generate(self, body: Generate, query: Mapping[str, str]) -> Answer:
        many = bool(body.input_ids) and isinstance(body.input_ids[0], list)
        prompts: Any = body.input_ids if many else [body.input_ids]
        params = (
            body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params] * len(prompts)
        )
        adapters = body.lora_path if isinstance(body.lora_path, list) else [body.lora_path] * len(prompts)
        if not len(prompts) == len(params) == len(adapters):
            return Answer({"error": {"message": "lists of one request differ in length"}}, 400)
        unknown = {name for name in adapters if name is not None} - set(self.model.adapters)
        if unknown:
            return Answer({"error": {"message": f"these LoRA adapters are not loaded: {sorted(unknown)}"}}, 400)
        made = [self._one(*row, body) for row in zip(prompts, params, adapters, strict=True)]
        return Answer(made if many else made[0])

    def _one(self, ids: list[int], params: SamplingParams, adapter: str | None, body: Generate) -> dict[str, Any]:
        sampling = Sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            max_new_tokens=params.max_new_tokens,
            eos_ids=tuple(params.stop_token_ids or ()),
        )
        key = self._cache_keys.get(adapter or "", "")
        done = self.model.generate(ids, sampling, seed=params.sampling_seed or 0, adapter=adapter, cache_key=key)
        meta = {"id": "0", "finish_reason": _reason(done), "prompt_tokens": len(ids), "cached_tokens": done.cached}
        meta |= {"completion_tokens": len(done.ids), "weight_version": self.weight_version, "e2e_latency": 0.1}
        if body.return_logprob:
            pairs = zip(done.logprobs, done.ids, strict=True)
            meta |= {"input_token_logprobs": [], "output_token_logprobs": [[lp, token, None] for lp, token in pairs]}
        trimmed = done.ids[:-1] if done.finish == "stop" and not params.no_stop_trim else done.ids
        return {"text": " ".join(map(str, trimmed)), "output_ids": list(done.ids), "meta_info": meta}

    def _load_adapter(self, body: LoadAdapter, query: Mapping[str, str]) -> Answer:
        if not self.server_info["enable_lora"]:
            return Answer({"success": False, "error_message": "LoRA is not enabled"}, 400)
        if body.lora_name in self.model.adapters:
            return Answer({"success": False, "error_message": f"{body.lora_name} is already loaded"}, 400)
        try:
            self.model.add_adapter(body.lora_name, Path(body.lora_path))
        except (OSError, ValueError) as error:
            return Answer({"success": False, "error_message": str(error)}, 400)
        self._loads += 1
        self._cache_keys[body.lora_name] = str(self._loads)  # the server names each load anew
        return Answer({"success": True, "error_message": None, "loaded_adapters": sorted(self.model.adapters)})

    def _unload_adapter(self, body: UnloadAdapter, query: Mapping[str, str]) -> Answer:
        if body.lora_name not in self.model.adapters:
            return Answer({"success": False, "error_message": f"{body.lora_name} is not loaded"}, 400)
        del self.model.adapters[body.lora_name]
        return Answer({"success": True, "loaded_adapters": sorted(self.model.adapters)})

    def _load_weights(self, body: LoadWeights, query: Mapping[str, str]) -> Answer:
        try:
            if not self.ignores_load and not self.server_info["enable_lora"]:  # wrapped layers: no name is found
                self.model.load_folder(Path(body.model_path))
        except (OSError, KeyError) as error:
            return Answer({"success": False, "message": f"failed to load: {error}", "num_paused_requests": 0}, 400)
        if body.flush_cache and not self.model.reset_cache():
            return Answer({"success": False, "message": "cache flush failed after the update"}, 400)
        if body.weight_version is not None and not self.ignores_load:
            self.weight_version = body.weight_version
        return Answer({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    def _set_version(self, body: SetVersion, query: Mapping[str, str]) -> Answer:
        self.weight_version = body.new_version
        return Answer({"success": True, "message": "updated", "new_version": body.new_version})

    def _flush(self, body: None, query: Mapping[str, str]) -> Answer:
        done = self.model.reset_cache()
        return Answer("Cache flushed.\n" if done else "Flush cache failed.\n", 200 if done else 400)

    def _pause(self, body: Pause, query: Mapping[str, str]) -> Answer:
        self.model.pause("abort" if body.mode == "abort" else "keep")
        return Answer({"message": "Generation paused successfully.", "status": "ok"})

    def _resume(self, body: Nothing, query: Mapping[str, str]) -> Answer:
        self.model.resume()
        return Answer({"message": "Generation continued successfully.", "status": "ok"})


def _reason(done: Generated) -> dict[str, Any]:
    if done.finish == "stop":
        return {"type": "stop", "matched": done.ids[-1]}
    if done.finish == "length":
        return {"type": "length", "length": len(done.ids)}
    return {"type": "abort", "message": "Aborted"}
