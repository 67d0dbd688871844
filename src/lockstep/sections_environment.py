"""The options of an environment, with which the policy talks in turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from lockstep.sections_base import PositiveFloat, PositiveInt, Section


class EnvironmentConfig(Section):
    """The other side of the conversation; null where a sample is one reply."""

    name: str = Field(description="calculator, or a class of one's own: module:Class or path/to/file.py:Class")
    args: Mapping[str, Any] = Field(
        default_factory=dict, description="keyword arguments that each instance is made with"
    )
    max_turns: PositiveInt = Field(default=4, description="replies of the policy in one sample, at most")
    max_tokens: PositiveInt | None = Field(
        default=None,
        description="longest sample, prompt and observations included, in tokens; none: what engine and model can take",
    )
    max_observation_tokens: PositiveInt = Field(
        default=256, description="longest observation, in tokens of the chat template; a longer one is cut"
    )
    timeout_s: PositiveFloat = Field(
        default=60.0,
        description="limit for one turn of all samples of a rank (seconds); beyond it the run stops and shows the episode",
    )


def check_environment(
    environment: EnvironmentConfig | None, *, rewards: Mapping[str, str], prompt_format: str, wait_s: float
) -> None:
    """What ties it to other sections. `rewards`: key in the recipe -> the reward's name; `wait_s`: how long a rank waits for
    another one. Raises `ValueError`."""
    named = [key for key, name in rewards.items() if name == "environment"]
    if environment is None and named:
        raise ValueError(
            f"{named[0]}.name is environment, the sum of what an environment gives, and there is none; give the section environment"
        )
    if environment is not None and environment.timeout_s > wait_s:
        raise ValueError(
            f"environment.timeout_s is {environment.timeout_s:g}, and ranks wait for one another dist.timeout_s {wait_s:g} seconds: "
            "the others would give a slow turn up first; lower it, or raise dist.timeout_s"
        )
    if environment is not None and prompt_format != "chat":
        raise ValueError(
            "an environment talks through the tokenizer's chat template: with the section environment data.prompt.format must be "
            f"chat; it is {prompt_format}"
        )
