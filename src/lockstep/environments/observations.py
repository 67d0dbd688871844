"""An environment's messages in; the token ids that stand between the policy's reply and its next one, out.

What the policy sampled is never decoded and encoded again: only what the chat template adds *behind* a reply is tokenised,
once, as the difference that the messages make to a conversation of dummies. That holds what closes the assistant's turn (less
the end-of-turn token, where the policy sampled it), the messages, and the opening of the assistant's next turn. A special token
that a message spells out is text (data/plain_text.py): what a tool says cannot close its turn and speak as the policy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lockstep.data.plain_text import PlainText
from lockstep.environments.base import Message
from lockstep.errors import ConfigError, EpisodeError

log = logging.getLogger(__name__)

_REPLY = "xqreplyqx"
"""What the dummy assistant says: a word that no template writes by itself."""
_SAID = "xqsaidqx"
_OPENING = ({"role": "user", "content": "a"}, {"role": "assistant", "content": _REPLY})
_LONGER = ({"role": "user", "content": "b"}, {"role": "assistant", "content": "c"})
_CUT = "..."


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy gets to read."""

    ids: tuple[int, ...]
    messages: tuple[Message, ...]
    """As they were put into the template: the role perhaps another, a long content cut."""


class Observations:
    """The chat template's way to answer a reply."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        special_tokens: Literal["text", "token"] = "text",
    ):
        """`special_tokens`: what one becomes that a message spells out.

        Raises `ConfigError` for a tokenizer without a chat template, and for a template that cannot be continued.
        """
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self.plain = PlainText(tokenizer, keeps_tokens=special_tokens == "token")
        self._max_characters = (max_tokens + 1) * max(map(len, tokenizer.get_vocab()))
        """A longer text has more than `max_tokens` tokens, if each of its characters is in one."""
        self._as_user: set[str] = set()
        """Roles that the template does not know."""
        self._known: set[str] = set()
        if not tokenizer.chat_template:
            raise ConfigError(
                f"an environment's messages go through a chat template, and the tokenizer {tokenizer.name_or_path!r} has "
                "none; use a tokenizer that has one, or leave the section environment out"
            )
        shortest = [{"role": "user", "content": ""}]
        self._check(shortest)
        self.shortest = len(self._encode(shortest, last_id=-1))
        """Tokens of an observation that says nothing; one fewer where the policy ends its own turn."""
        if self.shortest > max_tokens:
            raise ConfigError(
                f"environment.max_observation_tokens is {max_tokens}, and the chat template alone takes {self.shortest}; raise it"
            )

    def encode(self, messages: Sequence[Message], *, last_id: int) -> Observation:
        """`last_id`: the reply's last token. Where it is what the template ends an assistant's turn with, it is not repeated.

        Raises `EpisodeError` for messages that the template refuses or leaves out.
        """
        shown = [self._clipped(self._known_role(message)) for message in messages]
        ids = self._encode(shown, last_id=last_id)
        if len(ids) > self._max_tokens:
            shown = self._cut(shown, last_id=last_id)
            ids = self._encode(shown, last_id=last_id)
        return Observation(tuple(ids), tuple(shown))

    def _known_role(self, message: Message) -> Message:
        """The message; as a user's, where the template has no words for its role. Says so once."""
        role = message["role"]
        if role not in self._known | self._as_user:
            try:
                self._check([{**message, "content": _SAID}])
                self._known.add(role)
            except ConfigError as error:
                if role != "tool":
                    raise EpisodeError(f"a message of role {role!r} cannot be put behind a reply: {error}") from error
                log.warning("the chat template has no role 'tool' (%s): a tool's messages are shown as a user's", error)
                self._as_user.add(role)
        return {"role": "user", "content": message["content"]} if role in self._as_user else message

    def _clipped(self, message: Message) -> Message:
        """Megabytes of which most would be cut away again are not tokenised first."""
        if len(message["content"]) <= self._max_characters:
            return message
        return {**message, "content": message["content"][: self._max_characters] + _CUT}

    def _check(self, messages: Sequence[Message]) -> None:
        """Raises `ConfigError` where the messages do not appear, or what they add depends on what was said before."""
        try:
            added = self._added(messages, _OPENING)
            later = self._added(messages, (*_LONGER, *_OPENING))
        except TemplateError as error:
            raise ConfigError(f"the chat template refuses it: {error}") from error
        if not all(message["content"] in added for message in messages):
            raise ConfigError("the chat template leaves it out")
        if added != later:
            raise ConfigError(
                f"the chat template shows it in another way later in a conversation: {added!r}, then {later!r}"
            )

    def _added(self, messages: Sequence[Message], history: Sequence[Message]) -> str:
        """What the messages, and the opening of the next reply, add behind the last reply of `history`."""
        conversation = [dict(message) for message in (*history, *messages)]
        try:
            text = str(self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False))
        except TemplateError:
            raise
        except Exception as error:  # Python's, in the template's expressions
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        before, found, added = text.partition(_REPLY)
        if not found:
            raise ConfigError(f"the chat template does not show what the assistant said: {before!r}")
        return added

    def _encode(self, messages: Sequence[Message], *, last_id: int) -> list[int]:
        marked = self.plain.mark(messages)
        try:
            text = self._added(marked.messages, _OPENING)
        except TemplateError as error:
            raise EpisodeError(
                f"the chat template refuses the messages {list(messages)} behind a reply: {error}; several may have to be one"
            ) from error
        ids = self.plain.encode(text, marked.mark)
        if last_id in ids:
            place = ids.index(last_id)
            if not str(self._tokenizer.decode(ids[:place])).strip():
                return ids[place + 1 :]
        return ids

    def _cut(self, messages: list[Message], *, last_id: int) -> list[Message]:
        """The longest message shortened, at its end, by as little as makes all of them fit; if need be the next longest too."""

        def fits(shown: Sequence[Message]) -> bool:
            return len(self._encode(shown, last_id=last_id)) <= self._max_tokens

        lengths = [len(message["content"]) for message in messages]
        longest_first = sorted(range(len(messages)), key=lambda number: -lengths[number])
        if not fits([{**message, "content": ""} for message in messages]):
            longest_first = []  # hundreds of messages need not be cut one after the other to see that
        for number in longest_first:
            low, high = 0, lengths[number]  # so many characters fit, or none do; so many do not
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(_shortened(messages, number, middle)) else (low, middle)
            messages = _shortened(messages, number, low)
            if fits(messages):
                return messages
        raise EpisodeError(
            f"an observation of {len(messages)} messages does not fit environment.max_observation_tokens {self._max_tokens} "
            "however short they are; send fewer, or raise it"
        )


def _shortened(messages: Sequence[Message], number: int, length: int) -> list[Message]:
    short = {**messages[number], "content": messages[number]["content"][:length] + _CUT}
    return [*messages[:number], short, *messages[number + 1 :]]
