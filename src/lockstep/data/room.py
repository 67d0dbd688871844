"""Token sequences and the models that are to read them in; an error where one is longer than a model has positions for.

Beyond its last position a model with learned positions ends in an index error (on a GPU in an assertion that takes the process
along), and one with rotary positions computes something it has never been trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.errors import ConfigError
from lockstep.types import Prompt, TrainItem


def positions_of(config: Any) -> int | None:
    """Tokens that a model of this transformers config has positions for; None where the config does not say.

    YaRN (arXiv 2309.00071) may be switched on in a config whose `max_position_embeddings` stays what it was (Qwen's model cards do
    so): its factor counts, as in vLLM.
    """
    text = config.get_text_config(decoder=True)
    told: int | None = getattr(text, "max_position_embeddings", None)
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    if told is None or rope.get("rope_type") != "yarn":
        return told
    return max(told, int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or told)))


def least(limits: Iterable[int | None]) -> int | None:
    """The smallest of those that are known."""
    return min((limit for limit in limits if limit is not None), default=None)


def check_room(prompts: Sequence[Prompt], *, key: str, max_new_tokens: int, limits: Mapping[str, int | None]) -> None:
    """Raises `ConfigError` for a prompt that leaves no room for its completion. `key`: the option that `max_new_tokens` is of;
    `limits`: positions of the models that read both, by option."""
    for name, limit in limits.items():
        for prompt in prompts:
            if limit is not None and len(prompt.ids) + max_new_tokens > limit:
                left = limit - max_new_tokens
                drop = f", or data.prompt.max_tokens to {left}, which drops longer prompts" if left > 0 else ""
                raise ConfigError(
                    f"prompt {prompt.uid!r} has {len(prompt.ids)} tokens and may get {max_new_tokens} new ones ({key}), and the model of "
                    f"{name} has {limit} positions; lower {key}{drop}"
                )


def check_fits(items: Sequence[TrainItem], limit: int | None) -> None:
    """Raises `ValueError` for an item with more than `limit` tokens (None: any number)."""
    for index, item in enumerate(items):
        if limit is not None and len(item.prompt_ids) + len(item.ids) > limit:
            raise ValueError(
                f"item {index}: its prompt of {len(item.prompt_ids)} and completion of {len(item.ids)} tokens are more than the {limit} "
                "positions that the model has; cut it, or leave it out"
            )
