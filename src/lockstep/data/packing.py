"""Train items in, micro-batches out: token tensors plus, for each completion token, which position predicts it.

Nothing is ever inferred from a token's value (pad may equal EOS): lengths, masks and indices say it all. An item's observation
tokens (outside its `loss_mask`) are fed and attended to like any other, but nothing predicts them: they are not among the N.

Glossary: *block* tokens that attend to each other only: one item, or a prompt with several of its completions ·
*branch* a block's prompt (0) or one of its completions (1, 2, ..) · *row* one or several blocks behind each other.
Shapes: B rows, T tokens of the longest row, N completion tokens that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.data.masks import num_read, sampled
from lockstep.errors import ModelError
from lockstep.types import TrainItem

Packing = Literal["padded", "packed", "shared_prefix"]

ROW_TOKENS = (512, 768, 1024)
"""Short blocks share a row up to the first of these: attention is dense within a row, so longer rows cost more than they save. Where
a block is longer than that, the others and its own length are tried too: its micro-batch is that wide anyway."""
ATTENTION_TAU = 2048.0
"""Row length at which dense attention costs as much as the linear layers: measured on a CPU at hidden size 576, and
longer for wider models; taking it too short only computes some prompts twice."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward and backward pass needs. The N completion tokens are in the order of items, then position."""

    mode: Packing
    input_ids: Tensor
    """[B, T] int64, right-padded."""
    position_ids: Tensor
    """[B, T] int64; every block starts at 0, every completion goes on from its prompt."""
    block_ids: Tensor
    """[B, T] int64: which of the row's blocks a token belongs to; -1 for padding."""
    branch_ids: Tensor
    """[B, T] int64: 0 for prompts (and for everything outside shared_prefix), j for a block's j-th completion."""
    items: tuple[int, ...]
    """Indices of the items in here, ascending: concatenating their per-token values gives [N] arrays."""
    predictors: Tensor
    """[N] int64: row * T + column of the position whose logits predict the token."""
    targets: Tensor
    """[N] int64: the token."""
    item_ids: Tensor
    """[N] int64: index of the token's item in the sequence that was packed."""

    @property
    def num_tokens(self) -> int:
        return self.targets.numel()

    @property
    def padded_tokens(self) -> int:
        return self.input_ids.numel()

    def attention_mask(self) -> Tensor | None:
        """[B, T] bool (padded), None (packed) or [B, 1, T, T] bool (shared_prefix); True means attend.

        Packed rows carry no mask: transformers finds the blocks itself where position_ids restart (it needs
        `use_cache=False` and no mask: `masking_utils.find_packed_sequence_indices`). The 4-D mask is made here and
        not kept, so it lives for one pass: B * T * T bytes.
        """
        if self.mode == "packed":
            return None
        if self.mode == "padded":
            return self.block_ids >= 0
        length = self.input_ids.shape[1]
        query, key = (slice(None), slice(None), None), (slice(None), None, slice(None))
        same_block = self.block_ids[query] == self.block_ids[key]
        visible = (self.branch_ids[key] == 0) | (self.branch_ids[query] == self.branch_ids[key])
        causal = torch.ones(length, length, dtype=torch.bool, device=self.input_ids.device).tril()
        return (same_block & visible & causal)[:, None]

    def to(self, device: torch.device) -> MicroBatch:
        if self.input_ids.device == device:
            return self
        return MicroBatch(
            mode=self.mode,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            block_ids=self.block_ids.to(device),
            branch_ids=self.branch_ids.to(device),
            items=self.items,
            predictors=self.predictors.to(device),
            targets=self.targets.to(device),
            item_ids=self.item_ids.to(device),
        )


def pack(items: Sequence[TrainItem], *, mode: Packing, max_tokens: int, pad_id: int) -> list[MicroBatch]:
    """Lay items out in the fewest micro-batches of at most `max_tokens` tokens each, padding included. Deterministic.

    A block longer than `max_tokens` gets a micro-batch of its own. Items without a sampled token are left out: they have
    nothing to train on. The largest micro-batch comes first, so that a lack of memory shows at once.

    - padded: a row per item, whole sequences; the plain reference.
    - packed: blocks behind each other. A completion's last sampled token predicts nothing and is not fed, nor is what follows it.
    - shared_prefix: items of one group with equal prompts share one copy of the prompt; otherwise as packed. A group is
      split where the dense attention of one long block would cost more than computing the prompt again.

    Raises `ValueError` for an item with a completion but no prompt token: nothing would predict its first token.
    """
    live = [index for index, item in enumerate(items) if item.num_sampled]
    for index in live:
        if not items[index].prompt_ids:
            raise ValueError(
                f"item {index}: the prompt is empty; expected at least one token, which predicts the first of ids"
            )
    blocks = [block for group in _groups(items, live, mode) for block in _split_group(items, group, mode, max_tokens)]
    layouts = [[[block] for block in blocks]] if mode == "padded" else _ways_to_fill(blocks, max_tokens)
    parts = min((_split_rows(rows, max_tokens) for rows in layouts), key=_cost)
    return [_build(items, part, mode, pad_id) for part in parts]


def dummy_micro_batch(pad_id: int) -> MicroBatch:
    """A pass for a rank that has run out of micro-batches: all the model's collectives, no completion token, loss 0."""
    none = torch.empty(0, dtype=torch.int64)
    ids = torch.full((1, 2), pad_id, dtype=torch.int64)
    zeros = torch.zeros_like(ids)
    return MicroBatch("packed", ids, torch.arange(2)[None], zeros, zeros, (), none, none, none)


def check_packing_supported(config: Any, mode: Packing) -> None:
    """Raise `ModelError` where a transformers config says that `mode` would compute something else than `padded` does.

    Right-padded rows are right for every causal model. Packed rows need attention that sees the blocks; shared prefixes
    need, beyond that, that a mask given as a whole is the only thing that limits attention. A config cannot tell
    everything: `train.logprobs.probe_packing` asks the model itself.
    """
    reason = why_not(config, mode)
    if reason:
        advice = "packed or padded" if reason.startswith("flash") else "padded"
        raise ModelError(f"train.packing: {mode} cannot be used with {config.model_type}: {reason}; use {advice}")


def why_not(config: Any, mode: Packing) -> str:
    """What a transformers config says against `mode`; empty where it says nothing."""
    return "" if mode == "padded" else _refusal(config.get_text_config(), mode)


_STATE_FIELDS = ("state_size", "ssm_state_size", "mamba_d_state", "lru_width", "rescale_every", "chunkwise_kernel")


def _refusal(text: Any, mode: Packing) -> str:
    kernel = text._attn_implementation
    layer_types = set(getattr(text, "layer_types", None) or ())
    masked = {"full_attention", "sliding_attention", "chunked_attention"}
    if text.is_encoder_decoder:
        return "an encoder-decoder has no single sequence to pack"
    if layer_types - masked or (not layer_types and any(hasattr(text, name) for name in _STATE_FIELDS)):
        return "recurrent or sparse layers carry one item's state into the next"
    if text.model_type in ("bloom", "mpt") or getattr(text, "alibi", False):
        return "its ALiBi bias ignores position_ids"
    if text.model_type == "openai-gpt":
        return "its attention makes its own causal mask and takes no other"
    if mode == "packed":
        return ""
    if kernel not in ("sdpa", "eager", "flex_attention"):
        return f"{kernel.removesuffix('_2')} attention (model.attention) cannot take a 4-D mask"
    windowed = layer_types - {"full_attention"} or (not layer_types and getattr(text, "sliding_window", None))
    if windowed or any(getattr(text, name, None) for name in ("attention_chunk_size", "attention_types")):
        return "sliding-window or chunked layers would use the 4-D mask without their window"
    return ""


@dataclass(frozen=True, slots=True)
class _Block:
    items: tuple[int, ...]
    length: int
    """Tokens that are fed."""


def _groups(items: Sequence[TrainItem], live: Sequence[int], mode: Packing) -> list[list[int]]:
    """Items that may share a prompt, in order of first appearance."""
    if mode != "shared_prefix":
        return [[index] for index in live]
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for index in live:
        groups.setdefault((items[index].group, items[index].prompt_ids), []).append(index)
    return list(groups.values())


def _split_group(items: Sequence[TrainItem], group: list[int], mode: Packing, max_tokens: int) -> list[_Block]:
    """Cut a group into blocks of k completions, with the k that costs least among those that fit `max_tokens`."""
    prompt = len(items[group[0]].prompt_ids)

    def cut(k: int) -> list[_Block]:
        parts = [tuple(group[start : start + k]) for start in range(0, len(group), k)]
        return [_Block(part, prompt + sum(_fed(items[i], mode) for i in part)) for part in parts]

    def cost(blocks: list[_Block]) -> float:
        too_long = any(block.length > max_tokens for block in blocks)
        return float("inf") if too_long else sum(_row_cost(block.length) for block in blocks)

    return min((cut(k) for k in range(1, len(group) + 1)), key=cost)


def _fed(item: TrainItem, mode: Packing) -> int:
    """Completion tokens that go into the model: the last sampled one predicts nothing, so only the plain layout feeds it."""
    read = num_read(item.loss_mask, len(item.ids))
    return read if mode == "padded" else read - 1


def _ways_to_fill(blocks: Sequence[_Block], max_tokens: int) -> list[list[list[_Block]]]:
    longest = max((block.length for block in blocks), default=0)
    lengths = (longest,) if longest <= ROW_TOKENS[0] else (*ROW_TOKENS, longest)
    return [_fill_rows(blocks, length) for length in dict.fromkeys(min(length, max_tokens) for length in lengths)]


def _row_cost(length: int) -> float:
    """In tokens through the linear layers."""
    return length + length**2 / ATTENTION_TAU


def _cost(parts: Sequence[Sequence[Sequence[_Block]]]) -> tuple[int, float]:
    """Micro-batches first: each gathers every unit."""
    return len(parts), sum(len(rows) * _row_cost(max(map(_length, rows))) for rows in parts)


def _fill_rows(blocks: Sequence[_Block], capacity: int) -> list[list[_Block]]:
    """First-fit decreasing: rows of up to `capacity` tokens; a longer block has one of its own."""
    rows: list[list[_Block]] = []
    for block in sorted(blocks, key=lambda block: (-block.length, block.items)):
        row = next((row for row in rows if _length(row) + block.length <= capacity), None)
        if row is None:
            rows.append([block])
        else:
            row.append(block)
    return rows


def _length(row: Iterable[_Block]) -> int:
    return sum(block.length for block in row)


def _split_rows(rows: list[list[_Block]], max_tokens: int) -> list[list[list[_Block]]]:
    """Cut rows, sorted by length, into runs of count * longest <= max_tokens.

    From the short end, greedily: no cut of the sorted rows has fewer runs, and short rows are not padded to long ones
    for want of company.
    """
    parts: list[list[list[_Block]]] = []
    for row in sorted(rows, key=lambda row: (_length(row), row[0].items)):
        if parts and (len(parts[-1]) + 1) * _length(row) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [part[::-1] for part in reversed(parts)]


@dataclass(slots=True)
class _Row:
    """A row under construction: parallel lists, one entry per token."""

    ids: list[int]
    positions: list[int]
    blocks: list[int]
    branches: list[int]

    def extend(self, ids: Sequence[int], *, start: int, block: int, branch: int) -> int:
        """Append tokens at positions start, start + 1, ..; returns the first one's column."""
        column = len(self.ids)
        self.ids.extend(ids)
        self.positions.extend(range(start, start + len(ids)))
        self.blocks.extend([block] * len(ids))
        self.branches.extend([branch] * len(ids))
        return column


def _build(items: Sequence[TrainItem], rows: Sequence[Sequence[_Block]], mode: Packing, pad_id: int) -> MicroBatch:
    width = max(_length(row) for row in rows)
    built = [_Row([], [], [], []) for _ in rows]
    predictors: dict[int, list[int]] = {}
    for number, (row, out) in enumerate(zip(rows, built, strict=True)):
        for block_id, block in enumerate(row):
            for index, columns in _append_block(items, block, mode, out, block_id):
                predictors[index] = [number * width + column for column in columns]
        padding = width - len(out.ids)
        # Padding is a block of its own that starts at position 0: packed detection then keeps it away from the rest.
        out.extend([pad_id] * padding, start=0, block=-1, branch=0)
    order = tuple(sorted(predictors))
    return MicroBatch(
        mode=mode,
        input_ids=torch.tensor([row.ids for row in built]),
        position_ids=torch.tensor([row.positions for row in built]),
        block_ids=torch.tensor([row.blocks for row in built]),
        branch_ids=torch.tensor([row.branches for row in built]),
        items=order,
        predictors=torch.tensor([position for index in order for position in predictors[index]]),
        targets=torch.tensor([token for index in order for token in sampled(items[index].ids, items[index].loss_mask)]),
        item_ids=torch.tensor([index for index in order for _ in range(items[index].num_sampled)]),
    )


def _append_block(
    items: Sequence[TrainItem], block: _Block, mode: Packing, out: _Row, block_id: int
) -> list[tuple[int, list[int]]]:
    """Write a block's tokens; returns, for each item, the columns that predict its sampled tokens.

    The prompt's last token predicts every completion's first one: prompt of 3, completion of 2 -> columns 2 and 3. The
    mask is of the predicted tokens, not of the predicting ones (CASES B94).
    """
    prompt_ids = items[block.items[0]].prompt_ids
    last = out.extend(prompt_ids, start=0, block=block_id, branch=0) + len(prompt_ids) - 1
    predictors = []
    for branch, index in enumerate(block.items, start=1):
        ids = items[index].ids
        fed = ids[: _fed(items[index], mode)]
        first = out.extend(fed, start=len(prompt_ids), block=block_id, branch=branch if mode == "shared_prefix" else 0)
        before = [last, *range(first, first + len(ids) - 1)]
        predictors.append((index, list(sampled(before, items[index].loss_mask))))
    return predictors
