"""Rows in, `Prompt`s out: the question in its template, as token ids that generation continues."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from lockstep.config import DataSource, PromptConfig
from lockstep.data.plain_text import Marked, PlainText, is_unicode, texts_in
from lockstep.errors import DataError
from lockstep.logs import ON_EVERY_RANK
from lockstep.types import Prompt

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one data set, in its order."""

    prompts: tuple[Prompt, ...]
    num_dropped: int
    """Rows left out because their prompt is longer than `max_tokens`."""


def encode_prompts(
    rows: Sequence[Row],
    *,
    source: DataSource,
    prompt: PromptConfig,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    template: str | None = None,
) -> PromptSet:
    """Encode every row; row i becomes the prompt with uid "{name}-{i}". `template` stands in for `prompt.template`.

    format "chat": through the tokenizer's chat template, up to where the assistant's answer begins; the chat template
    alone decides about special tokens, and those that a row spells out are text (`prompt.special_tokens`; a warning counts
    the rows). A question that is a list of messages is kept as a conversation: the template goes around its last user
    message, and a system message of its own takes the place of `prompt.system`.
    format "text": the text as it is. No special tokens, except the BOS token where the tokenizer itself puts one first;
    an EOS token that it would append is left away, since it would end the text.

    Raises `DataError` for a tokenizer without chat template, a malformed conversation, a prompt without tokens or (with
    on_too_long "error") with too many, and where no prompt is left.
    """
    if prompt.format == "chat" and not tokenizer.chat_template:
        raise DataError(
            f"data.prompt.format is chat, but the tokenizer {tokenizer.name_or_path!r} has no chat template; "
            "use format: text, or a tokenizer that has one"
        )
    if template is not None:
        prompt = prompt.model_copy(update={"template": template})
    uids = [f"{name}-{index}" for index in range(len(rows))]
    plain = _plain_text(prompt, tokenizer)
    rendered = [
        _render(row[source.prompt_column], prompt, tokenizer=tokenizer, uid=uid, plain=plain)
        for uid, row in zip(uids, rows, strict=True)
    ]
    _warn_of_special_tokens(rendered, prompt, name)
    texts = [each.text for each in rendered]
    encoded = _encode(texts, prompt, tokenizer)
    for index, each in enumerate(rendered):
        if each.ids is not None:
            encoded[index] = each.ids
    kept = [
        Prompt(uid=uid, ids=tuple(ids), text=text, answer=_answer(row, source), row=row)
        for uid, ids, text, row in zip(uids, encoded, texts, rows, strict=True)
        if _fits(ids, prompt, uid)
    ]
    if not kept:
        raise DataError(
            f"{name}: all {len(rows)} prompts are longer than data.prompt.max_tokens {prompt.max_tokens}; "
            f"the shortest has {min(map(len, encoded))} tokens; raise the limit or shorten the questions"
        )
    return PromptSet(prompts=tuple(kept), num_dropped=_count_dropped(len(rows), len(kept), prompt, name))


def encode_opening(
    messages: Sequence[Mapping[str, Any]],
    row: Prompt,
    *,
    prompt: PromptConfig,
    tokenizer: PreTrainedTokenizerBase,
    plain: PlainText,
) -> Prompt:
    """`row` with these messages as the whole conversation so far; no `data.prompt.template` is put around them.

    Raises `DataError` as `encode_prompts` does, and for more than `data.prompt.max_tokens` tokens.
    """
    prompt = prompt.model_copy(update={"template": "{prompt}"})
    rendered = _render(list(messages), prompt, tokenizer=tokenizer, uid=row.uid, plain=plain)
    ids = rendered.ids or _encode([rendered.text], prompt, tokenizer)[0]
    if not _fits(ids, prompt.model_copy(update={"on_too_long": "drop"}), row.uid):
        raise DataError(
            f"{row.uid}: they have {len(ids)} tokens, data.prompt.max_tokens is {prompt.max_tokens}; raise it, or say less"
        )
    return replace(row, ids=tuple(ids), text=rendered.text)


def _count_dropped(num_rows: int, num_kept: int, prompt: PromptConfig, name: str) -> int:
    num_dropped = num_rows - num_kept
    if num_dropped:
        limit = prompt.max_tokens
        logger.warning(
            "%s: dropped %d of %d prompts, longer than %d tokens",
            name,
            num_dropped,
            num_rows,
            limit,
            extra=ON_EVERY_RANK,
        )
    return num_dropped


@dataclass(frozen=True, slots=True)
class _Rendered:
    text: str
    ids: list[int] | None = None
    """None: those that the tokenizer has for the text."""
    spelled: frozenset[str] = frozenset()
    """Special tokens that the row spells out."""


def _plain_text(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> PlainText | None:
    """None for format text, where special tokens are the text's own affair."""
    return PlainText(tokenizer, keeps_tokens=prompt.special_tokens == "token") if prompt.format == "chat" else None


def _warn_of_special_tokens(rendered: Sequence[_Rendered], prompt: PromptConfig, name: str) -> None:
    counts = Counter(token for each in rendered for token in each.spelled)
    if not counts:
        return
    which = ", ".join(f"{token} in {num}" for token, num in sorted(counts.items(), key=lambda one: (-one[1], one[0])))
    if prompt.special_tokens == "text":
        how = (
            "they are made ordinary text, which opens and closes no turn (data.prompt.special_tokens: token keeps them)"
        )
    else:
        how = "they are these tokens to the model, as data.prompt.special_tokens: token says; text would make them ordinary"
    num_rows = sum(bool(each.spelled) for each in rendered)
    logger.warning(
        "%s: %d of %d rows spell out special tokens (%s); %s",
        name,
        num_rows,
        len(rendered),
        which,
        how,
        extra=ON_EVERY_RANK,
    )


def _render(
    question: Any, prompt: PromptConfig, *, tokenizer: PreTrainedTokenizerBase, uid: str, plain: PlainText | None
) -> _Rendered:
    halved = next((text for text in texts_in(question) if not is_unicode(text)), None)
    if halved is not None:
        raise DataError(
            f"{uid}: the question holds half of a surrogate pair, which no tokenizer takes (text that was cut by UTF-16 units?): "
            f"{ascii(halved)[:600]} came; mend or remove the row"
        )
    if plain is not None:
        marked = _conversation(question, prompt, uid, plain)
        try:
            text = str(tokenizer.apply_chat_template(marked.messages, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # what a template's raise_exception raises, and what its expressions do
            messages = marked.clean(str(marked.messages))
            raise DataError(f"{uid}: the tokenizer's chat template refuses the messages {messages}: {error}") from error
        ids = None if marked.mark is None else plain.encode(text, marked.mark)
        return _Rendered(marked.clean(text), ids, marked.spelled)
    if not isinstance(question, str):
        raise DataError(
            f"{uid}: with data.prompt.format text the question must be text; {type(question).__name__} came "
            "(a list of chat messages needs format: chat)"
        )
    return _Rendered(prompt.template.replace("{prompt}", question))


def _conversation(question: Any, prompt: PromptConfig, uid: str, plain: PlainText) -> Marked:
    """The messages that the chat template gets. What the recipe puts around the row's is not marked."""
    if isinstance(question, str):
        messages = [{"role": "user", "content": question}]
    elif isinstance(question, list) and question:
        messages = [_message(message, uid) for message in question]
    else:
        raise DataError(f"{uid}: expected a question as text or as a list of chat messages; {question!r} came")
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users or messages[-1]["role"] == "assistant":
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"{uid}: a conversation must hold a user message and not end with the assistant's; {roles} came"
        )
    marked = plain.mark(messages)
    last = marked.messages[users[-1]]
    last["content"] = prompt.template.replace("{prompt}", last["content"])
    if prompt.system is not None and messages[0]["role"] != "system":
        marked.messages.insert(0, {"role": "system", "content": prompt.system})
    return marked


def _message(message: Any, uid: str) -> dict[str, Any]:
    """A copy without empty fields: Arrow gives every message the fields that any message of the file has."""
    if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise DataError(f'{uid}: a chat message must be {{"role": text, "content": text}}; {message!r} came')
    return {key: value for key, value in message.items() if value is not None}


def _encode(texts: list[str], prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    encoded = cast(list[list[int]], tokenizer(texts, add_special_tokens=False)["input_ids"])
    bos = tokenizer.bos_token_id
    if prompt.format == "chat" or not isinstance(bos, int):
        return encoded
    if tokenizer("a")["input_ids"][:1] != [bos]:
        return encoded
    return [[bos, *ids] if ids[:1] != [bos] else ids for ids in encoded]


def _fits(ids: Sequence[int], prompt: PromptConfig, uid: str) -> bool:
    if not ids:
        raise DataError(f"{uid}: the prompt has no tokens, so there is nothing to continue; fill or remove the row")
    if len(ids) <= prompt.max_tokens:
        return True
    if prompt.on_too_long == "error":
        raise DataError(
            f"{uid}: the prompt has {len(ids)} tokens, data.prompt.max_tokens is {prompt.max_tokens}; "
            "raise the limit, shorten the row, or set on_too_long: drop"
        )
    return False


def _answer(row: Row, source: DataSource) -> str:
    """The answer as text; lists and mappings as JSON."""
    if not source.answer_column:
        return ""
    answer = row[source.answer_column]
    return json.dumps(answer, ensure_ascii=False) if isinstance(answer, list | dict) else str(answer)
