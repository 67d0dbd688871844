"""Rows in, `Prompt`s out: the question in its template, as token ids that generation continues."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lockstep.config import DataSource, PromptConfig
from lockstep.errors import DataError
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
    alone decides about special tokens. A question that is a list of messages is kept as a conversation: the template
    goes around its last user message, and a system message of its own takes the place of `prompt.system`.
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
    texts = [
        _render(row[source.prompt_column], prompt, tokenizer=tokenizer, uid=uid)
        for uid, row in zip(uids, rows, strict=True)
    ]
    encoded = _encode(texts, prompt, tokenizer)
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
    messages: Sequence[Mapping[str, Any]], row: Prompt, *, prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase
) -> Prompt:
    """`row` with these messages as the whole conversation so far; no `data.prompt.template` is put around them.

    Raises `DataError` as `encode_prompts` does, and for more than `data.prompt.max_tokens` tokens.
    """
    text = _render(list(messages), prompt.model_copy(update={"template": "{prompt}"}), tokenizer=tokenizer, uid=row.uid)
    (ids,) = _encode([text], prompt, tokenizer)
    _fits(ids, prompt.model_copy(update={"on_too_long": "error"}), row.uid)  # raises where they do not
    return replace(row, ids=tuple(ids), text=text)


def _count_dropped(num_rows: int, num_kept: int, prompt: PromptConfig, name: str) -> int:
    num_dropped = num_rows - num_kept
    if num_dropped:
        limit = prompt.max_tokens
        logger.warning("%s: dropped %d of %d prompts, longer than %d tokens", name, num_dropped, num_rows, limit)
    return num_dropped


def _render(question: Any, prompt: PromptConfig, *, tokenizer: PreTrainedTokenizerBase, uid: str) -> str:
    if prompt.format == "chat":
        messages = _conversation(question, prompt, uid)
        try:
            return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except TemplateError as error:
            raise DataError(f"{uid}: the tokenizer's chat template refuses the messages {messages}: {error}") from error
    if not isinstance(question, str):
        raise DataError(
            f"{uid}: with data.prompt.format text the question must be text; {type(question).__name__} came "
            "(a list of chat messages needs format: chat)"
        )
    return prompt.template.replace("{prompt}", question)


def _conversation(question: Any, prompt: PromptConfig, uid: str) -> list[dict[str, Any]]:
    """The messages that the chat template gets, in a list of our own."""
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
    last = messages[users[-1]]
    last["content"] = prompt.template.replace("{prompt}", last["content"])
    if prompt.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": prompt.system})
    return messages


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
