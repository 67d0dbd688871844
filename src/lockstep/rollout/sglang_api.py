"""What lockstep says to SGLang's HTTP server, and what it makes of the answers. Pure: nothing here opens a connection.

Written against SGLang's documentation ("SGLang for RL Systems", "Sampling Parameters", "LoRA Serving") and the request
classes in its `managers/io_struct.py`; see docs/sglang.md for the version and for what could not be tried.

Of which distribution SGLang's output logprobs are (its `layers/sampler.py`; since pull request 5961, May 2025): logits
divided by the temperature, all tokens kept. Top-k and top-p act on the draw but not on the logprobs, so they are refused
here: a trainer would divide by the probability of a token under a distribution that it was not drawn from. Greedy
requests have logprobs at temperature 1. With SGLANG_RETURN_ORIGINAL_LOGPROB set they are those at temperature 1 always.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lockstep.errors import EngineMismatch, EngineUnhealthy, StaleWeights, TransportError
from lockstep.types import Draw, Manifest, Sampling

_ADAPTER_FIELDS = {"r", "lora_alpha", "target_modules"}
"""What SGLang reads of an adapter's configuration. Anything that changes the result and is not here is refused."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of /generate."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]


def check_server(model_info: Mapping[str, Any], server_info: Mapping[str, Any], *, sent: set[str]) -> None:
    """Raises `EngineMismatch` for a server whose samples would not be what lockstep's `Engine` promises.

    `model_info`, `server_info`: answers of the routes of these names. `sent`: the sampling parameters that lockstep sets.
    """
    if not server_info.get("enable_deterministic_inference"):
        raise EngineMismatch(
            "SGLang ignores sampling_seed without --enable-deterministic-inference, so a resumed run would draw other "
            "samples; start the server with that flag"
        )
    if server_info.get("speculative_algorithm"):
        raise EngineMismatch(
            f"SGLang decodes speculatively ({server_info['speculative_algorithm']}); lockstep has not established what "
            "its logprobs are of then: start the server without it"
        )
    preferred = set(model_info.get("preferred_sampling_params") or {}) - sent
    if preferred:
        raise EngineMismatch(
            f"SGLang's --preferred-sampling-params sets {sorted(preferred)}, which the recipe does not know of; "
            "start the server without it"
        )


def check_distribution(sampling: Sampling) -> None:
    """Raises `EngineMismatch` where SGLang's logprobs would not be those of the distribution that it draws from."""
    if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
        raise EngineMismatch(
            f"SGLang's logprobs leave top-p and top-k out, and the recipe samples with top_p={sampling.top_p:g}, "
            f"top_k={sampling.top_k}; set rollout.top_p: 1 and rollout.top_k: 0, or use another engine"
        )


def check_adapter(manifest: Manifest) -> None:
    """Raises `TransportError` for an adapter that SGLang would serve as another one: it scales by lora_alpha / r only."""
    config = dict(manifest.adapter_config or {})
    if config.get("peft_type") != "LORA" or _ADAPTER_FIELDS - set(config):
        raise TransportError(
            f"an adapter for SGLang is of peft_type LORA and has {sorted(_ADAPTER_FIELDS)}; "
            f"{config.get('peft_type')!r} with {sorted(config)} came"
        )
    others = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform")
    wrong = {name: config[name] for name in others if config.get(name)}
    if config.get("bias", "none") != "none":
        wrong["bias"] = config["bias"]
    if wrong:
        raise TransportError(f"SGLang does not read {wrong} of an adapter's configuration; use sync.mode: merged")


def row_seed(draw: Draw, slot: int, index: int) -> int:
    """31 bits that name the draws of one row, whatever batch it is in."""
    entropy = [draw.seed, draw.step, slot, index, *([draw.turn] if draw.turn else [])]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)


def sampling_params(sampling: Sampling, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Every parameter that shapes the distribution, so that nothing is filled in by the server."""
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": False,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }


def generate_request(
    prompts: Sequence[Sequence[int]], seeds: Sequence[int], params: Mapping[str, Any], adapter: str | None
) -> dict[str, Any]:
    """Body of one /generate for a batch: prompt i with seed i. `adapter`: a loaded adapter's name; None is the base."""
    body: dict[str, Any] = {
        "input_ids": [list(ids) for ids in prompts],
        "sampling_params": [{**params, "sampling_seed": seed} for seed in seeds],
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }
    return body if adapter is None else {**body, "lora_path": [adapter] * len(prompts)}


def read_answers(answers: Any, count: int, *, weight_version: str | None) -> list[Completion]:
    """Completions of a batch, in its order. `weight_version`: the label that each must carry; None does not look.

    Raises `EngineUnhealthy` for answers that are cut short or not of the documented form, `StaleWeights` for ones of
    other weights.
    """
    if not isinstance(answers, list) or len(answers) != count:
        raise EngineUnhealthy(f"SGLang was asked for {count} completions and answered with {_short(answers)}")
    return [_read(answer, weight_version) for answer in answers]


def check_success(answer: Any, what: str) -> None:
    """Raises `TransportError` with SGLang's own words unless it says that an update succeeded."""
    if not isinstance(answer, dict) or answer.get("success") is not True:
        words = answer.get("message") or answer.get("error_message") if isinstance(answer, dict) else answer
        raise TransportError(f"SGLang did not {what}: {_short(words)}")


def _read(answer: Any, weight_version: str | None) -> Completion:
    try:
        meta = answer["meta_info"]
        pairs = [(int(token), float(logprob)) for logprob, token, *_ in meta["output_token_logprobs"]]
        reason = meta["finish_reason"]["type"]
        count, version = meta["completion_tokens"], meta["weight_version"]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineUnhealthy(
            f"SGLang's answer has not the documented form ({type(error).__name__}: {error}): {_short(answer)}"
        ) from error
    if reason not in ("stop", "length"):
        raise EngineUnhealthy(
            f"SGLang ended a completion after {len(pairs)} tokens with {reason!r} ({_short(meta['finish_reason'])}); "
            "somebody else aborts or pauses requests on this server, or it ran out of room"
        )
    if not pairs or len(pairs) != count or not all(math.isfinite(logprob) for _, logprob in pairs):
        raise EngineUnhealthy(
            f"SGLang counts {count} tokens and gave {len(pairs)} logprobs, finite: "
            f"{all(math.isfinite(logprob) for _, logprob in pairs)}"
        )
    if weight_version is not None and version != weight_version:
        raise StaleWeights(
            f"SGLang answered with weights {version!r}, not {weight_version!r}; somebody else updates this server"
        )
    return Completion(tuple(token for token, _ in pairs), tuple(logprob for _, logprob in pairs), reason)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else text[:300] + " ..."
