"""One `RewardConfig` in, a `RewardCall` out: the function, found and checked, and how to call it.

A reward function is one of two kinds, told apart by its parameters' names; both are called by keyword, and both may be
`async def`:

- per sample, when it has a parameter `completion`: `fn(completion: str, answer: str, **args) -> float`. It may also ask
  for `prompt: str` and `sample: Sample`. An async one is started for all samples of the batch at once.
- batched, when it has a parameter `completions`: `fn(completions: list[str], answers: list[str], **args) -> list[float]`,
  one number per completion, in order. It may also ask for `prompts: list[str]` and `samples: list[Sample]`.

It gets those of the four that it names (all four if it takes **kwargs), and the recipe's `args`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.config import RewardConfig
from lockstep.data.extras import import_extra
from lockstep.data.own_code import find_own
from lockstep.data.reward_functions import NAMED_REWARDS
from lockstep.errors import ConfigError
from lockstep.types import Sample

PER_SAMPLE = ("completion", "answer", "prompt", "sample")
BATCHED = ("completions", "answers", "prompts", "samples")


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward function that has been found and checked."""

    function: Callable[..., Any]
    offered: tuple[str, ...]
    """Those of PER_SAMPLE or of BATCHED that the function gets."""
    args: Mapping[str, Any]
    is_batched: bool
    sees: Literal["all", "reply"] = "all"
    """What of a sample of several turns is its completion."""

    def calls(self, samples: Sequence[Sample]) -> list[Callable[[], Any]]:
        """One call for the batch, or one per sample."""
        if not self.is_batched:
            return [self._call(_facts(sample, self.sees)) for sample in samples]
        facts = [_facts(sample, self.sees) for sample in samples]
        return [
            self._call({many: [fact[one] for fact in facts] for one, many in zip(PER_SAMPLE, BATCHED, strict=True)})
        ]

    def _call(self, facts: Mapping[str, Any]) -> Callable[[], Any]:
        chosen = {name: facts[name] for name in self.offered}
        return lambda: self.function(**chosen, **self.args)


def resolve_reward(config: RewardConfig) -> RewardCall:
    """Find the function and check that it can be called. Raises `ConfigError`: unknown name, package or file that is
    missing or does not import, no such function, parameters that are neither of the two kinds, wrong `args`."""
    if ":" in config.name:
        function = find_own(config.name, kind="reward", thing="function")
    else:
        named = NAMED_REWARDS.get(config.name)
        if named is None:
            raise ConfigError(_unknown_name(config.name))
        if named.package:
            import_extra(named.package, needed_by=f"reward {config.name!r}")
        function = named.function
    return _check_call(function, config)


def _facts(sample: Sample, sees: Literal["all", "reply"]) -> dict[str, Any]:
    prompt = sample.prompt
    text = sample.episode.reply if sample.episode is not None and sees == "reply" else sample.text
    return dict(zip(PER_SAMPLE, (text, prompt.answer, prompt.text, sample), strict=True))


def _unknown_name(name: str) -> str:
    near = difflib.get_close_matches(name, NAMED_REWARDS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(NAMED_REWARDS)}"
    return f"reward: unknown name {name!r}; {hint}. One of your own is module:function or path/to/file.py:function"


def _check_call(function: Callable[..., Any], config: RewardConfig) -> RewardCall:
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise ConfigError(f"reward {config.name!r}: its parameters cannot be read; wrap it in a def") from error
    parameters = signature.parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if ("completion" in parameters) == ("completions" in parameters):
        raise ConfigError(
            f"reward {config.name!r}: expected a function with a parameter `completion` (called per sample) or "
            f"`completions` (called with the batch); it is {config.name.rpartition(':')[2]}{signature}"
        )
    is_batched = "completions" in parameters
    offered = tuple(key for key in (BATCHED if is_batched else PER_SAMPLE) if takes_any or key in parameters)
    _check_args(config, offered, signature, takes_any)
    return RewardCall(function, offered, dict(config.args), is_batched, config.sees)


def _check_args(config: RewardConfig, offered: Sequence[str], signature: inspect.Signature, takes_any: bool) -> None:
    where = f"reward {config.name!r}"
    for key in config.args:
        if key in offered:
            raise ConfigError(f"{where}: args must not hold {key!r}, which the samples fill")
        if not takes_any and key not in signature.parameters:
            options = [name for name in signature.parameters if name not in offered]
            near = difflib.get_close_matches(key, options, n=1, cutoff=0.0)
            hint = f"the nearest is {near[0]!r}" if near else "it takes none"
            raise ConfigError(f"{where}: unknown args key {key!r}; {hint}")
    try:
        signature.bind(**dict.fromkeys(offered), **config.args)
    except TypeError as error:
        raise ConfigError(f"{where}: cannot be called with {[*offered, *config.args]}: {error}; set `args`") from error
