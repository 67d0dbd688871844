"""A transformers configuration, flat or of several stages, in; the numbers of its text model out.

Multi-stage models keep them below `text_config`, or `thinker_config.text_config`, and the outer one has none or other ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedConfig

from lockstep.errors import ModelError


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The text model's own numbers."""

    config: PreTrainedConfig
    """Where they were found: a part of the configuration that was given, not a copy."""
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tie_word_embeddings: bool
    """Of the class that holds the text model's head: the configuration around the text configuration, if it says."""


def text_config(config: PreTrainedConfig) -> TextConfig:
    """Find the text model in a configuration. Raises `ModelError` where there is none, or more than one."""
    try:
        text = config.get_text_config()
        return TextConfig(
            config=text,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            num_layers=text.num_hidden_layers,
            num_heads=text.num_attention_heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            tie_word_embeddings=_is_tied(config, text),
        )
    except (ValueError, AttributeError) as error:
        raise ModelError(
            f"{type(config).__name__} has no single text model with hidden_size, vocab_size and heads: {error}; "
            "give the text stage's configuration"
        ) from error


def _is_tied(config: PreTrainedConfig, text: PreTrainedConfig) -> bool:
    """The class with the head is built from the configuration right around the text's, so its flag is the one that acts."""
    around = next((part for part in _parts(config) if any(each is text for each in vars(part).values())), text)
    for part in (around, text):
        flag = getattr(part, "tie_word_embeddings", None)
        if flag is not None:
            return bool(flag)
    return False


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)
