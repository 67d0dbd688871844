"""Chat messages whose texts may spell out special tokens in; ids in which only the chat template's own are special, out.

A tokenizer takes `<|im_end|>` for the end of a turn wherever it stands, also in a tool's output or in a question about chat
templates. So each place in a message that spells out such a token is marked with a word that occurs nowhere else, one
character into the token; the messages go through the chat template; the rendered text is cut at the marks, and its parts are
tokenised apart. No part holds the whole token, so none becomes it: that holds for any tokenizer, whatever it does with the
flag "special". A text that spells none out is tokenised as ever.

Glossary: *control token* a special token, or another added one with which the template frames messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

_MARK = "qzcutw"
"""No beginning of it is an end of it, so what stands around a mark cannot be taken for a part of it. Lower-case letters pass
through JSON and trimming."""
_DUMMIES = (
    ({"role": "system", "content": "a"}, {"role": "user", "content": "b"}),
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}),
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "tool", "content": "c"}),
)
"""What a template frames; it may refuse one or the other."""


@dataclass(frozen=True, slots=True)
class Marked:
    """Messages for the chat template."""

    messages: list[dict[str, Any]]
    """A copy; the texts hold marks where they spell out a control token."""
    mark: str | None
    """None: no text does."""
    spelled: frozenset[str]
    """The control tokens that the texts spell out."""

    def clean(self, text: str) -> str:
        """A text that was made of the messages, without the marks."""
        return text if self.mark is None else text.replace(self.mark, "")


class PlainText:
    """A tokenizer's control tokens, and how texts are kept from spelling them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, keeps_tokens: bool = False):
        """`keeps_tokens`: mark nothing, only tell what is spelled out. A token of one character cannot be cut and stays one."""
        self._tokenizer, self._keeps_tokens = tokenizer, keeps_tokens
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        framing = {token.content for token in added if not token.special} & set(_framing(tokenizer))
        self.tokens = tuple(sorted((token for token in special | framing if len(token) > 1), key=_longest_first))
        self._pattern = _one_of(self.tokens)
        self._normalize = _normalizer(tokenizer)
        normalized = (token.content for token in added if token.normalized and token.content in self.tokens)
        self._normalized = _one_of(sorted({self._normalize(token) for token in normalized}, key=_longest_first))
        self._line = self._ids("\n")

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> Marked:
        """Every text in the messages, also those inside tool calls (a tool's arguments have keys of its own), and roles."""
        copied = cast(list[dict[str, Any]], _mapped(list(messages), lambda text: text))
        spelled = frozenset(token for text in texts_in(copied) for token in self._spelled(text))
        if not spelled or self._keeps_tokens:
            return Marked(copied, None, spelled)
        mark, shown = _MARK, repr(copied)
        while mark in shown:
            mark = "q" + mark
        marked = _mapped(copied, lambda text: mark.join(self._cut(text)))
        return Marked(cast(list[dict[str, Any]], marked), mark, spelled)

    def encode(self, text: str, mark: str | None) -> list[int]:
        """Ids of a rendered text that may hold marks. No special tokens are added."""
        first, *rest = [text] if mark is None else text.split(mark)
        return self._ids(first) + [token for part in rest for token in self._behind(part)]

    def _spelled(self, text: str) -> Iterator[str]:
        yield from self._pattern.findall(text)
        if self._normalized.search(self._normalize(text)):
            yield from self._normalized.findall(self._normalize(text))

    def _cut(self, text: str) -> list[str]:
        """The text in parts none of which holds a control token."""
        places, found = [0], self._pattern.search(text)
        while found:
            places.append(found.start() + 1)
            found = self._pattern.search(text, found.start() + 1)
        parts = [text[start:end] for start, end in zip(places, [*places[1:], len(text)], strict=True)]
        # A normalizer that makes a control token of other characters (full-width ones, capitals) leaves no place to cut at.
        return [
            piece for part in parts for piece in (part if self._normalized.search(self._normalize(part)) else [part])
        ]

    def _ids(self, text: str) -> list[int]:
        return cast(list[int], self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _behind(self, part: str) -> list[int]:
        """Ids of a text that another one precedes: some tokenizers put a space before what they take for a beginning."""
        ids = self._ids("\n" + part)
        return ids[len(self._line) :] if self._line and ids[: len(self._line)] == self._line else self._ids(part)


def _framing(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Those of the added tokens that the template puts around messages; words and white space are no frames."""
    shown = []
    for messages in _DUMMIES if tokenizer.chat_template else ():
        try:
            shown.append(str(tokenizer.apply_chat_template([dict(each) for each in messages], tokenize=False)))
        except Exception:  # it has no such role, and says so as it likes; what it does have is in the others
            continue
    for token in cast(Mapping[str, int], tokenizer.added_tokens_encoder):
        if re.search(r"[^\w\s]", token) and any(token in text for text in shown):
            yield token


def _normalizer(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], str]:
    """What a text goes through before added tokens without the flag "special" are looked for."""
    normalizer = cast(Any, tokenizer).backend_tokenizer.normalizer if tokenizer.is_fast else None
    return str if normalizer is None else normalizer.normalize_str


def _longest_first(token: str) -> tuple[int, str]:
    return -len(token), token


def _one_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")  # (?!) is found nowhere


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a message, or in what is made of messages; also keys, but for plain words, which templates ask for by name."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if _is_text(key):
                yield key
            yield from texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def is_unicode(text: str) -> bool:
    """False for half of a surrogate pair (text that was cut by UTF-16 units), which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_text(key: Any) -> bool:
    return isinstance(key, str) and not key.isidentifier()


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with every text changed (`texts_in`)."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if _is_text(key) else key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(each, change) for each in value]
    return value
