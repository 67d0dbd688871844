"""Prompts and an engine in, samples that are whole episodes out: reply, observation, reply, .. until somebody ends it.

    prompts -> generate (the group's shared prompt) -> environment.step -> observation ids behind the reply -> generate -> ...

A sample's ids are what the policy sampled and what it was shown, concatenated in that order and never tokenised again; its
`loss_mask` tells the two apart. An `Episodes` stands in for the engine's `generate` where the recipe has an environment: in the
loop and in the evaluation. Every rank makes the same number of generate calls, some of them with no prompt.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import numbers
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, NoReturn

from lockstep.data.plain_text import is_unicode, texts_in
from lockstep.data.prompts import encode_opening
from lockstep.data.time_limit import CallFailed, CallLoop, CallTimedOut, call_all
from lockstep.dist import World, all_or_none, any_rank
from lockstep.environments.base import Message, Reply, Turn
from lockstep.environments.observations import Observation
from lockstep.environments.stage import Stage
from lockstep.errors import DataError, EpisodeError, StaleWeights, said_by
from lockstep.rollout.base import Generate
from lockstep.sampling import slot_seed
from lockstep.types import Draw, Episode, Prompt, Sample, Sampling

log = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 600


@dataclass(slots=True)
class _Episode:
    """One sample under way."""

    prompt: Prompt
    slot: int
    index: int
    environment: Any = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    info: list[Mapping[str, Any]] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    ended: Literal["done", "max_turns", "cut", "room"] | None = None

    def hears(self, reply: Sample) -> Reply:
        self.ids += reply.ids
        self.logprobs += reply.logprobs
        self.mask += [True] * len(reply.ids)
        self.messages.append({"role": "assistant", "content": reply.text})
        self.versions.add(reply.policy_version)
        return Reply(reply.text, reply.ids, reply.finish, turn=len(self.rewards))

    def reads(self, observation: Observation) -> None:
        self.ids += observation.ids
        self.logprobs += [0.0] * len(observation.ids)
        self.mask += [False] * len(observation.ids)
        self.messages += observation.messages

    def so_far(self) -> Prompt:
        """What the next turn goes on from."""
        return replace(self.prompt, ids=(*self.prompt.ids, *self.ids))

    def sample(self, decode: Callable[[Sequence[int]], str]) -> Sample:
        assert self.ended is not None
        (version,) = self.versions
        return Sample(
            prompt=self.prompt,
            slot=self.slot,
            index=self.index,
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            text=decode(self.ids),
            finish="length" if self.ended in ("cut", "room") else "stop",
            policy_version=version,
            loss_mask=tuple(self.mask),
            episode=Episode(tuple(self.messages), tuple(self.rewards), self.ended, tuple(self.info)),
        )


class Episodes:
    """A `Generate` (rollout/base.py): called as an engine is, its samples are episodes."""

    def __init__(self, stage: Stage, generate: Generate, *, world: World, max_len: int | None):
        """`generate`: collective, one reply per sample wanted. `max_len`: tokens that engine and model can take; None: any."""
        self._stage, self._generate, self._world = stage, generate, world
        limits = [limit for limit in (stage.config.max_tokens, max_len) if limit is not None]
        self._max_tokens = min(limits, default=None)
        self._has_warned = False
        self._loop = CallLoop()

    def close(self) -> None:
        """Ends the event loop that asynchronous environments have had."""
        self._loop.close()

    def __call__(self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, draw: Draw) -> list[Sample]:
        """Collective. An episode for each sample, ordered by slot, then index; `sampling.max_new_tokens` bounds one reply.

        What a turn draws is named by (seed, step, slot, index, turn) alone. Raises, on every rank, `EpisodeError` for an
        environment that raises, hangs or answers with no `Turn` (a `LockstepError` on the ranks that are not to blame).
        """
        with self._closing([]) as episodes:
            with all_or_none(self._world, "environment"):
                opened = self._open(episodes, prompts, num_samples, draw)
                self._look_for_room(opened, sampling)
            replies = self._generate(opened, sampling, num_samples=num_samples, draw=draw)
            going = episodes
            for turn in count(1):
                with all_or_none(self._world, "environment"):
                    going = self._step(going, replies, room=sampling.max_new_tokens)
                if not any_rank(bool(going), self._world):
                    break
                rows = tuple((each.slot, each.index) for each in going)
                more = replace(draw, turn=turn, rows=rows)
                replies = self._generate([each.so_far() for each in going], sampling, num_samples=1, draw=more)
        return [each.sample(self._decode) for each in episodes]

    def _open(self, episodes: list[_Episode], prompts: Sequence[Prompt], num_samples: int, draw: Draw) -> list[Prompt]:
        """Fill `episodes`, each environment reset; the prompts to begin with. What it has made is in the list also if it raises."""
        for slot, prompt in enumerate(prompts, start=draw.first_slot):
            episodes += [_Episode(prompt, slot, index) for index in range(num_samples)]
        openings = self._call(episodes, [self._beginning(each, draw) for each in episodes], "reset")
        opened = []
        for start in range(0, len(episodes), num_samples):
            group = episodes[start : start + num_samples]
            prompt = self._opened(group, openings[start : start + num_samples])
            for each in group:
                each.prompt = prompt
            opened.append(prompt)
        return opened

    def _look_for_room(self, opened: Sequence[Prompt], sampling: Sampling) -> None:
        """Says once where prompts leave no room for what comes behind them."""
        needed, limit = self._stage.least_behind(sampling.max_new_tokens), self._max_tokens
        short = [prompt for prompt in opened if limit is not None and len(prompt.ids) + needed > limit]
        if short and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%d of %d openings of a step leave no room for %d tokens behind them (environment.max_tokens, or the limit of model "
                "and engine, is %s): these episodes end with the first reply. %s has %d tokens",
                len(short), len(opened), needed, limit, short[0].uid, len(short[0].ids),
            )  # fmt: skip

    def _beginning(self, episode: _Episode, draw: Draw) -> Callable[[], Any]:
        kind = self._stage.kind
        options = {"seed": slot_seed(draw, episode.slot)} if kind.takes_seed else {}

        def begin() -> Any:
            episode.environment = kind.new()
            reset = getattr(episode.environment, "reset", None)
            # A copy: what one sample's environment does to its row is not for the others, nor for the next epoch.
            return None if reset is None else reset(copy.deepcopy(episode.prompt.row), **options)

        return begin

    def _opened(self, group: Sequence[_Episode], openings: Sequence[Any]) -> Prompt:
        """The group's prompt: the row's own, or what `reset` has put in its place."""
        opening = None if openings[0] is None else self._own_messages(openings[0], "reset", group[0])
        odd = next((i for i, opening in enumerate(openings) if opening != openings[0]), None)
        if odd is not None:
            self._fail(
                f"reset gave sample {odd} of a group other messages than sample 0, and they share one prompt; expected the "
                "same for the same row and seed",
                group[odd],
            )
        if opening is None:
            return group[0].prompt
        try:
            stage = self._stage
            return encode_opening(
                opening, group[0].prompt, prompt=stage.prompt, tokenizer=stage.tokenizer, plain=stage.observations.plain
            )
        except DataError as error:
            self._fail(f"reset: its messages are no prompt: {error}", group[0], cause=error)

    def _step(self, going: Sequence[_Episode], replies: Sequence[Sample], *, room: int) -> list[_Episode]:
        """The environments answer. Returns the episodes that go on, their observations put behind their replies."""
        by_row = {(reply.slot, reply.index): reply for reply in replies}
        heard = [each.hears(by_row[each.slot, each.index]) for each in going]
        calls = [_calling(each.environment.step, reply) for each, reply in zip(going, heard, strict=True)]
        turns = self._call(going, calls, "step")
        for each, reply, turn in zip(going, heard, turns, strict=True):
            self._check_turn(turn, each)
            each.rewards.append(float(turn.reward))
            each.info.append(_copied(turn.info))
            if len(each.versions) > 1:
                raise StaleWeights(
                    f"slot {each.slot}, sample {each.index}: its turns were sampled with versions {sorted(each.versions)}; "
                    "expected one. Look at the engine's log: who else sends it weights?"
                )
            self._go_on_or_end(each, reply, turn, room)
        return [each for each in going if each.ended is None]

    def _go_on_or_end(self, episode: _Episode, reply: Reply, turn: Turn, room: int) -> None:
        """What ends an episode leaves nothing behind its last reply: nobody would read it."""
        if reply.finish == "length":
            episode.ended = "cut"
        elif turn.done:
            episode.ended = "done"
        elif len(episode.rewards) == self._stage.config.max_turns:
            episode.ended = "max_turns"
        else:
            messages = self._own_messages(turn.messages, "step", episode)
            try:
                observation = self._stage.observations.encode(messages, last_id=reply.ids[-1])
            except EpisodeError as error:
                self._fail(str(error), episode, cause=error)
            needed = len(episode.prompt.ids) + len(episode.ids) + len(observation.ids) + room
            if self._max_tokens is not None and needed > self._max_tokens:
                episode.ended = "room"
            else:
                episode.reads(observation)

    def _check_turn(self, turn: Any, episode: _Episode) -> None:
        if not isinstance(turn, Turn):
            self._fail(f"step: expected a lockstep.environments.Turn; {_shown(turn)} came", episode)
        if not isinstance(turn.reward, numbers.Real) or not abs(turn.reward) <= sys.float_info.max:
            self._fail(f"step: expected a finite number as the turn's reward; {_shown(turn.reward)} came", episode)
        if type(turn.done).__name__ not in ("bool", "bool_"):  # numpy's too
            self._fail(f"step: expected True or False as the turn's done; {_shown(turn.done)} came", episode)
        if not isinstance(turn.info, Mapping):
            self._fail(f"step: expected a mapping as the turn's info; {_shown(turn.info)} came", episode)

    def _own_messages(self, messages: Any, method: str, episode: _Episode) -> Sequence[Message]:
        """Checked, and copied: what an environment does to them later is not in the sample."""
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
            self._fail(
                f"{method}: expected a list of at least one message; {_shown(messages)} came. A turn that is not done has to "
                "say something, which the policy then answers",
                episode,
            )
        for message in messages:
            is_one = isinstance(message, Mapping) and all(
                isinstance(message.get(key), str) for key in ("role", "content")
            )
            if not is_one:
                self._fail(
                    f'{method}: a message must be {{"role": text, "content": text}}; {_shown(message)} came',
                    episode,
                )
        try:
            own = copy.deepcopy([dict(message) for message in messages])
            halved = next((text for text in texts_in(own) if not is_unicode(text)), None)
        except Exception as error:  # what cannot be copied, or holds itself
            self._fail(
                f"{method}: messages of plain values are expected; {_shown(messages)} came", episode, cause=error
            )
        if halved is not None:
            self._fail(
                f"{method}: a message holds half of a surrogate pair, which no tokenizer takes (text that was cut by UTF-16 "
                f"units?): {_clip(ascii(halved))} came",
                episode,
            )
        return own

    def _call(self, episodes: Sequence[_Episode], calls: Sequence[Callable[[], Any]], method: str) -> list[Any]:
        """One call per episode, within the time limit."""
        limit = self._stage.config.timeout_s
        try:
            with contextlib.chdir(os.curdir):  # come back: a run's paths may be relative
                return call_all(calls, limit, loop=self._loop)
        except CallTimedOut as late:
            self._fail(
                f"{method} took longer than environment.timeout_s {limit:g} s for {len(calls)} samples; make it faster or raise "
                "the limit. It was at this one",
                episodes[late.index],
            )
        except CallFailed as failed:
            error = failed.__cause__ or failed
            self._fail(f"{method} raised {_clip(said_by(error))}", episodes[failed.index], cause=error)

    @contextlib.contextmanager
    def _closing(self, episodes: list[_Episode]) -> Iterator[list[_Episode]]:
        """Collective, unless it raises. Every environment is closed; an error in doing so does not hide one that came before."""
        try:
            yield episodes
        except BaseException:
            try:
                self._close(episodes)
            except EpisodeError as error:
                log.warning("after another error: %s", error)
            raise
        with all_or_none(self._world, "closing environments"):
            self._close(episodes)

    def _close(self, episodes: Sequence[_Episode]) -> None:
        made = [each for each in episodes if hasattr(each.environment, "close")]
        self._call(made, [each.environment.close for each in made], "close")

    def _fail(self, what: str, episode: _Episode, *, cause: BaseException | None = None) -> NoReturn:
        said = "".join(f"\n  {message['role']}: {_shown(message['content'])}" for message in episode.messages)
        raise EpisodeError(
            f"environment {self._stage.kind.name!r}: {what}; the episode (slot {episode.slot}, sample {episode.index}):"
            f"\n  prompt {episode.prompt.uid}: {_shown(episode.prompt.text)}{said}"
        ) from cause

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._stage.tokenizer.decode(list(ids), skip_special_tokens=True))


def _calling(step: Callable[[Reply], Any], reply: Reply) -> Callable[[], Any]:
    return lambda: step(reply)


def _copied(info: Mapping[str, Any]) -> dict[str, Any]:
    """What an environment does to it later is not in the sample; unless it holds what cannot be copied, such as a lock."""
    try:
        return copy.deepcopy(dict(info))
    except Exception:  # it is for people to read: shown as well as it can be
        return dict(info)


def _shown(value: Any) -> str:
    try:
        return _clip(repr(value))
    except Exception:  # its error is not the one to be told of
        return f"a {type(value).__name__} that cannot be shown"


def _clip(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... ({len(text) - _SHOWN_CHARACTERS} more characters)"
