"""The environment section of a recipe and its tokenizer in; what episodes are played with, found and checked, out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lockstep.config import EnvironmentConfig, PromptConfig
from lockstep.environments.find import EnvironmentKind, find_environment
from lockstep.environments.observations import Observations
from lockstep.errors import ConfigError
from lockstep.logs import ON_EVERY_RANK
from lockstep.types import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stage:
    """What episodes are played with, found and checked before any model is loaded."""

    config: EnvironmentConfig
    kind: EnvironmentKind
    observations: Observations
    tokenizer: PreTrainedTokenizerBase
    prompt: PromptConfig

    @classmethod
    def of(
        cls, config: EnvironmentConfig | None, *, tokenizer: PreTrainedTokenizerBase, prompt: PromptConfig
    ) -> Stage | None:
        """None for None. Raises `ConfigError` for an environment that cannot be made, or a chat template that cannot go on."""
        if config is None:
            return None
        observations = Observations(
            tokenizer, max_tokens=config.max_observation_tokens, special_tokens=prompt.special_tokens
        )
        return cls(config, find_environment(config), observations, tokenizer, prompt)

    def check_room(self, prompts: Sequence[Prompt], *, key: str, max_new_tokens: int) -> None:
        """Warns of prompts (at least one) behind which `environment.max_tokens` leaves no room; `key` is the limit of a reply.

        Raises `ConfigError` where it leaves none behind any. What `reset` opens with is not known yet, and looked at in the run.
        """
        limit, needed = self.config.max_tokens, self.least_behind(max_new_tokens)
        lengths = [1] if self.kind.may_open else [len(prompt.ids) for prompt in prompts]
        num_short = sum(length + needed > limit for length in lengths) if limit is not None else 0
        if num_short == len(lengths):
            what = (
                "whatever a prompt is" if self.kind.may_open else f"behind the shortest prompt ({min(lengths)} tokens)"
            )
            raise ConfigError(
                f"environment.max_tokens is {limit}, and {what} it takes {min(lengths) + needed} to be sure of "
                f"{self._turns_wanted(key, max_new_tokens)}: raise it, or lower {key}"
            )
        if num_short:
            log.warning(
                "%d of %d prompts leave no room in environment.max_tokens %d for %s: their episodes end with the first reply",
                num_short, len(lengths), limit, self._turns_wanted(key, max_new_tokens), extra=ON_EVERY_RANK,
            )  # fmt: skip

    def least_behind(self, max_new_tokens: int) -> int:
        """Tokens that a prompt needs behind it: for a reply; if there may be two, for a short one, what it is told, and another."""
        return max_new_tokens if self.config.max_turns == 1 else self.observations.shortest + max_new_tokens

    def _turns_wanted(self, key: str, max_new_tokens: int) -> str:
        reply = f"a reply ({key} {max_new_tokens})"
        return reply if self.config.max_turns == 1 else f"a short reply, an observation and {reply}"
