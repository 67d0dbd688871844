"""Contract of what generates: prompts and a `Sampling` in, `Sample`s stamped with the policy version out.

An engine has weights of its own. They come over `lockstep.transport` only, never by sharing a module with the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.transport.base import Receiver
from lockstep.types import Draw, Prompt, Sample, Sampling, WeightKind


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an engine can be sent."""

    kinds: frozenset[WeightKind]
    """Kinds of update that it takes."""
    dtype: str
    """What it computes with, e.g. "float32"."""
    keeps_prefixes: bool
    """Does it keep keys and values of prompts between calls? The canary's probe is then long enough to be found there."""
    max_len: int | None = None
    """Longest prompt and completion together, in tokens; None: not known."""
    adapter_dtype: str | None = None
    """What it keeps adapters in: they are rounded to it before they travel. None: in what they come in."""


class Generate(Protocol):
    """Collective: samples for this rank's prompts, which may be none, as `Engine.generate` gives them."""

    def __call__(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, draw: Draw
    ) -> list[Sample]: ...


class Engine(Receiver, Protocol):
    """A rollout engine. It is also the receiving end of a weight update (`begin`, `receive`, `commit`, `abort`).

    Whatever the implementation:
    - a sample's ids are those that were drawn, up to and including the first EOS token; they are never re-tokenised;
    - its logprobs are those of the drawn tokens under the distribution that `sampling` describes
      (`lockstep.sampling.sampling_logprobs`), at temperature 1 for greedy sampling;
    - nothing is filled in from a checkpoint's generation_config, but for its EOS ids;
    - what row (slot, index) of a step draws is named by `draw` alone, not by the batch, rank or order it came in;
    - every sample carries the version of the one set of weights that made it, and there is never a mixture of two.
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights that are served: that of the last commit, 0 for the checkpoint's own."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, draw: Draw) -> list[Sample]:
        """`num_samples` completions of each prompt, ordered by slot, then index. Not collective: ranks call it apart.

        Prompt i has slot `draw.first_slot + i`, or its one sample is `draw.rows[i]` (`sampling.draw_rows`). Raises
        `ValueError` for an empty prompt or one that does not fit, and `StaleWeights` while there is no complete set of
        weights to serve.
        """
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end every completion, whatever a call's sampling adds."""
        ...

    @property
    def abilities(self) -> Abilities: ...

    @property
    def is_shared(self) -> bool:
        """One engine for all ranks (a `SharedEngine`): rank 0 pushes weights to it, the others hold a handle to generate with."""
        ...

    def close(self) -> None:
        """Let go of it; end what was started for it. Twice is as good as once."""
        ...


class SharedEngine(Engine, Protocol):
    """An engine outside the trainer's processes. Rank 0 has the engine itself; the other ranks connect by its `handle`.

    Calls raise `EngineDied` or `EngineUnhealthy` when it is gone or does not answer. After a `restart` it has the
    checkpoint's own weights, says so by its `policy_version` (0), and needs a complete update.
    """

    def handle(self) -> dict[str, Any]:
        """What another rank needs to connect, as JSON. New after a restart. Holds the token, if there is one: never log it."""
        ...

    def saw(self, version: int) -> None:
        """On a rank that did not push: the engine serves this version from now on."""
        ...

    def restart(self) -> None:
        """On rank 0: stop what is left of it, start it again, wait until it is healthy.

        Raises `EngineDied` once the limit of restarts is reached, and for an engine that somebody else started.
        """
        ...


def check_prompts(prompts: Sequence[Prompt], sampling: Sampling, max_len: int | None) -> None:
    """Raises `ValueError` for a prompt that is empty, or whose completion might not fit in `max_len` positions (None: any length)."""
    for prompt in prompts:
        if not prompt.ids:
            raise ValueError(f"prompt {prompt.uid!r} has no tokens; a completion needs at least one to start from")
        if max_len is not None and len(prompt.ids) + sampling.max_new_tokens > max_len:
            raise ValueError(
                f"prompt {prompt.uid!r} has {len(prompt.ids)} tokens and may get {sampling.max_new_tokens} new ones, but the "
                f"model has {max_len} positions; shorten the prompt or lower rollout.max_new_tokens"
            )
