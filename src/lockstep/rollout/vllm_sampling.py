"""A `Sampling` and a draw in, vLLM's sampling parameters out; vLLM's reply in, a `Sample` out.

Everything that shapes the distribution is said in every request, so that no default of a server or a checkpoint is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.errors import EngineMismatch, LockstepError
from lockstep.rollout.vllm_client import Reply
from lockstep.sampling import check_sampling
from lockstep.types import Draw, Prompt, Sample, Sampling

_COLDEST = 0.01
"""vLLM raises a lower temperature, but for 0, to this one and only logs it (sampling_params.py, _MAX_TEMP)."""
_CLAMPED = -9998.0
"""vLLM sends -9999 for what is no finite log-probability."""


def check_for_vllm(sampling: Sampling) -> None:
    """Raises `ValueError` for what is out of range, or what vLLM would change without saying so."""
    check_sampling(sampling)
    if 0 < sampling.temperature < _COLDEST:
        raise ValueError(
            f"vLLM has no temperature between 0 and {_COLDEST}; {sampling.temperature} came: use 0, greedy"
        )


def row_seed(draw: Draw, slot: int, index: int) -> int:
    """Seed of one sample's random numbers, below 2**63: the same for any batch, rank or replica."""
    entropy = [draw.seed % 2**64, draw.step % 2**64, slot, index, *([draw.turn] if draw.turn else [])]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def vllm_params(sampling: Sampling, seed: int, eos_ids: Sequence[int]) -> dict[str, Any]:
    """vLLM's SamplingParams. Greedy keeps all tokens, so that its log-probabilities are those at temperature 1."""
    is_greedy = sampling.temperature == 0
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": 1.0 if is_greedy else sampling.top_p,
        "top_k": 0 if is_greedy else sampling.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": 0,
        "stop_token_ids": list(eos_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def to_sample(
    reply: Reply,
    *,
    prompt: Prompt,
    slot: int,
    index: int,
    version: int,
    eos_ids: frozenset[int],
    decode: Callable[[Sequence[int]], str],
) -> Sample:
    """Raises `EngineMismatch` if the completion does not end at its first EOS, `LockstepError` if it is not finite."""
    ends = [place for place, token in enumerate(reply.ids) if token in eos_ids]
    is_stop = bool(ends)
    if not reply.ids or (reply.finish == "stop" and not is_stop) or (is_stop and ends[0] != len(reply.ids) - 1):
        raise EngineMismatch(
            f"vLLM ended slot {slot}, sample {index} by {reply.finish!r} after {len(reply.ids)} tokens, with EOS tokens at "
            f"{ends[:3]}; a completion must end with its first"
        )
    if min(reply.logprobs) <= _CLAMPED:
        raise LockstepError(
            f"the log-probabilities of slot {slot}, sample {index} are not finite: the weights of version {version} are "
            "damaged or overflow in the engine's dtype"
        )
    return Sample(
        prompt=prompt,
        slot=slot,
        index=index,
        ids=reply.ids,
        logprobs=reply.logprobs,
        text=decode(reply.ids),
        finish="stop" if is_stop else "length",
        policy_version=version,
    )
