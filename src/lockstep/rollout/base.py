"""Contract of what generates: prompts and a `Sampling` in, `Sample`s stamped with the policy version out.

An engine has weights of its own. They come over `lockstep.transport` only, never by sharing a module with the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lockstep.transport.base import Receiver
from lockstep.types import Draw, Prompt, Sample, Sampling


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

        Prompt i has slot `draw.first_slot + i`. Raises `ValueError` for an empty prompt or one that does not fit, and
        `StaleWeights` while there is no complete set of weights to serve.
        """
        ...
