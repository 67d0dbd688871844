"""What an environment is: a row in, an opening out (`reset`); a reply of the policy in, what comes of it out (`step`).

Plain Python, written by whoever has a task; nothing here imports torch. Glossary: *reply* what the policy samples in one go ·
*observation* the messages with which the environment answers it · *turn* a reply and what came of it · *episode* all turns
of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = Mapping[str, Any]
"""As chat templates take them: {"role": "tool" or "user", "content": text}, and whatever else the template knows. A special
token that it spells out is text (`data.prompt.special_tokens`)."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy said in one turn."""

    text: str
    """Decoded, without special tokens."""
    ids: tuple[int, ...]
    """Exactly as sampled."""
    finish: Literal["stop", "length"]
    """"length": cut at max_new_tokens; the episode ends with it, and only the reward of this step still counts."""
    turn: int
    """0 for the first."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What comes of a reply."""

    messages: Sequence[Message] = ()
    """The observation, which the policy answers next. At least one message unless `done`; not read when the episode ends."""
    reward: float = 0.0
    """The sample's turns are summed: what the reward `environment` of a recipe is."""
    done: bool = False
    """The episode is over."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """For people: goes to the sample log."""


class Environment:
    """One sample's environment: made with the recipe's `args`, reset once, stepped once per reply, closed.

    A class with these methods need not inherit from this one. Each may be `async def`; those of a step's samples then run at
    the same time, each in a task of its own, in an event loop that lasts as long as the run. What it raises ends the run, and
    shows the episode.
    """

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        """Begin with a row of the data. None: the conversation begins with the row's question, as the recipe puts it.

        Messages in return are the whole opening instead (no `data.prompt.template` is put around them). They must be the
        same for all samples of a row in a step, since these share one prompt: whatever is random in them has to come from a
        parameter `seed`, which is given where `reset` has one, equal for these samples, another in every step.
        """
        return None

    def step(self, reply: Reply) -> Turn:
        """Answer the policy's reply."""
        raise NotImplementedError(f"{type(self).__name__} has no step(self, reply: Reply) -> Turn; write one")

    def close(self) -> None:
        """The episode is over, or the run is: let go of what it holds."""
