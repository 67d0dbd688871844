"""Prompts and a budget in, the order of the work out: which prompts are computed together, and what is computed once.

Pure; nothing here touches a tensor. Glossary: *group* a distinct prompt and all samples wanted of it, over all slots
that hold the same prompt · *batch* groups that are decoded together · *chunk* groups of a batch whose prompts go
through the model in one forward pass · *shared* leading tokens that all prompts of a batch begin with, computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to make."""

    slot: int
    index: int


@dataclass(frozen=True, slots=True)
class Group:
    """A distinct prompt and the samples wanted of it."""

    ids: Ids
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups that are decoded together, the shortest prompt first."""

    chunks: tuple[tuple[Group, ...], ...]
    shared: int
    """Number of leading tokens that all prompts have in common and that are computed once; 0: none."""

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(group for chunk in self.chunks for group in chunk)

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for group in self.groups for row in group.rows)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a batch may cost."""

    cache_tokens: int
    """Bound of rows x (padded prompt + new tokens) of one batch."""
    max_new_tokens: int
    forward_tokens: int
    """One more forward pass costs as much as so many more tokens in a pass; decides padding against splitting."""
    prefill_tokens: int = 8192
    """Bound of the tokens in one forward pass over prompts (a longer prompt passes alone): bounds the activations."""
    share_prefix: bool = True
    """Whether prompts may share computed leading tokens: the attention must not mind padding in between."""


def plan_batches(prompts: Sequence[Ids], *, rows: Sequence[Sequence[tuple[int, int]]], budget: Budget) -> list[Batch]:
    """Cover the (slot, index) `rows` of each prompt by few, little padded batches within the budget.

    Raises `ValueError` if a single row does not fit.
    """
    groups = _groups(prompts, rows)
    return [_batch(part, budget) for part in _fill(groups, budget)]


def _groups(prompts: Sequence[Ids], rows: Sequence[Sequence[tuple[int, int]]]) -> list[Group]:
    wanted: dict[Ids, list[Row]] = {}
    for ids, own in zip(prompts, rows, strict=True):
        wanted.setdefault(ids, []).extend(Row(slot, index) for slot, index in own)
    return [Group(ids, tuple(wanted[ids])) for ids in sorted(wanted, key=len)]


def _fill(groups: Sequence[Group], budget: Budget) -> Iterator[list[Group]]:
    """Consecutive groups until the next, which is the longest so far, would make the batch too big."""
    part: list[Group] = []
    num_rows = 0
    for group in groups:
        fits = budget.cache_tokens // (len(group.ids) + budget.max_new_tokens)
        if fits < 1:
            raise ValueError(
                f"a prompt of {len(group.ids)} tokens with {budget.max_new_tokens} new ones needs more than the "
                f"{budget.cache_tokens} tokens of cache that a batch may fill; raise rollout.batch_tokens"
            )
        for piece in _pieces(group, fits):
            if part and num_rows + len(piece.rows) > fits:
                yield part
                part, num_rows = [], 0
            part.append(piece)
            num_rows += len(piece.rows)
    if part:
        yield part


def _pieces(group: Group, limit: int) -> list[Group]:
    """The group in as few, as equal pieces as the limit of rows allows: usually the group itself."""
    num_pieces = -(-len(group.rows) // limit)
    size = -(-len(group.rows) // num_pieces)
    return [Group(group.ids, group.rows[start : start + size]) for start in range(0, len(group.rows), size)]


def _batch(groups: list[Group], budget: Budget) -> Batch:
    shared = _common_prefix([group.ids for group in groups]) if budget.share_prefix else 0
    if (len(groups) - 1) * shared <= budget.forward_tokens:
        shared = 0
    return Batch(chunks=tuple(_chunks(groups, shared, budget)), shared=shared)


def _common_prefix(prompts: Sequence[Ids]) -> int:
    """Tokens that all prompts begin with, short of any prompt's last: that one's logits start its completions."""
    columns = zip(*(ids[:-1] for ids in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _chunks(groups: Sequence[Group], shared: int, budget: Budget) -> Iterator[tuple[Group, ...]]:
    """A longer prompt joins while padding the others to its length costs less than a forward pass of its own."""
    chunk: list[Group] = []
    for group in groups:
        width = len(group.ids) - shared
        padding = sum(width - (len(other.ids) - shared) for other in chunk)
        too_wide = (len(chunk) + 1) * width > budget.prefill_tokens
        if chunk and (padding > budget.forward_tokens or too_wide):
            yield tuple(chunk)
            chunk = []
        chunk.append(group)
    yield tuple(chunk)
