"""A model and a micro-batch in; the arguments of the model's forward out, in the form that its attention kernel takes.

What every kernel is told: `input_ids`, `position_ids`, and who attends to whom. Packed rows carry no mask: transformers finds the
blocks where positions restart. How it does that depends on the kernel and on the kind of positions:

| | padded | packed | shared prefixes |
|---|---|---|---|
| sdpa | [B, T] mask | positions of [B, T] | [B, 1, T, T] mask |
| eager | the same | the same | the same, as numbers to add |
| flash_attention_2 | the same | one row [1, B * T] | not possible |
| flex_attention | the same | positions of [B, T] | a BlockMask, made from a rule: no [T, T] exists |

Multimodal (3-D, "mrope") positions: of text all three are the same, and transformers makes them from [B, T]. Where it must find
packed blocks, it wants the text's own positions before them: [4, B, T].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

from lockstep.data.packing import MicroBatch


def model_inputs(lm: PreTrainedModel, batch: MicroBatch) -> dict[str, Any]:
    """Arguments for `lm` (plain, PEFT or FSDP-wrapped). Not collective."""
    text = lm.config.get_text_config()
    kernel = str(text._attn_implementation)
    ids, positions = batch.input_ids, batch.position_ids
    if batch.mode == "packed" and kernel.startswith("flash"):
        # Flash attention looks for packed sequences in a single row only; blocks start at 0, so rows can be chained.
        ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
    if batch.mode == "packed":
        positions = _with_axes(positions, text)
    return {"input_ids": ids, "position_ids": positions, "attention_mask": _mask(batch, kernel), "use_cache": False}


def visible(batch: MicroBatch, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Does the token in column `query` of `row` attend to the one in column `key`? As `MicroBatch.attention_mask`, element by element.

    The row, query and key are index tensors that broadcast; flex attention calls it with numbers under `vmap`.
    """
    same_block = batch.block_ids[row, query] == batch.block_ids[row, key]
    shown = (batch.branch_ids[row, key] == 0) | (batch.branch_ids[row, query] == batch.branch_ids[row, key])
    return same_block & shown & (key <= query)


def _with_axes(positions_BT: Tensor, text: Any) -> Tensor:
    """[1 + axes, B, T] for a model whose positions have several axes, else as it is."""
    axes = len((getattr(text, "rope_parameters", None) or {}).get("mrope_section", ()))
    return positions_BT.expand(1 + axes, *positions_BT.shape) if axes else positions_BT


@cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    """Made at its first use: asking for it imports torch's compiler, which takes seconds."""
    return torch.compile(create_block_mask)


def _mask(batch: MicroBatch, kernel: str) -> Tensor | BlockMask | None:
    if batch.mode == "shared_prefix" and kernel == "flex_attention":
        rows, length = batch.input_ids.shape
        device = batch.input_ids.device
        # Not compiled, a [T, T] is made on the way; on a CPU, where nothing trains with it, compiling takes longer than that.
        make = create_block_mask if device.type == "cpu" else _compiled_block_mask()
        return make(
            lambda row, _head, query, key: visible(batch, row, query, key), rows, None, length, length, device=device
        )
    mask = batch.attention_mask()
    if mask is not None and mask.ndim == 4 and kernel == "eager":
        # Eager attention adds a 4-D mask to the scores: a boolean one would add 1 where it should allow (no error).
        return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return mask
