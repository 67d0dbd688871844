"""A word-level tokenizer with a chat template, and samples of given texts, for the tests of data/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from lockstep.types import Prompt, Sample

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<s>", "</s>", "<pad>", "<unk>", "<system>", "<user>", "<assistant>", "<tool>")


def tiny_tokenizer(*, chat: bool = True, adds_bos_and_eos: bool = False) -> PreTrainedTokenizerFast:
    """Splits at white space; knows single letters, numbers up to 99 and + - = ?"""
    words = [*SPECIAL, *map(str, range(100)), *"abcdefghijklmnopqrstuvwxyz", *"+-=?"]
    vocabulary = {word: index for index, word in enumerate(words)}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    if adds_bos_and_eos:
        ids = [("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
        core.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def sample_of(
    text: str, answer: str = "64", *, question: str = "23 + 41", index: int = 0, row: Mapping[str, Any] | None = None
) -> Sample:
    """A sample with this completion; ids and logprobs do not matter to a reward."""
    prompt = Prompt(uid="train-7", ids=(1, 2), text=question, answer=answer, row=row or {})
    return Sample(
        prompt=prompt, slot=0, index=index, ids=(3,), logprobs=(-0.5,), text=text, finish="stop", policy_version=0
    )
