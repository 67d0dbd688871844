"""A config, the policy's checkpoint and tokenizer in; the teacher that the recipe asks for, frozen, sharded and filled, out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.config import Config, TeacherConfig
from lockstep.dist import World
from lockstep.engines import DTYPES
from lockstep.errors import ModelError
from lockstep.model.load import ModelFiles, build_empty, find_model, load_tokenizer
from lockstep.model.lora import Where, inject_frozen_lora
from lockstep.shard_model import frozen_sharding
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.fill import fill
from lockstep.sharding.plan import plan_sharding
from lockstep.sharding.shard import shard
from lockstep.train.choices import choose_packing
from lockstep.train.teacher import Teacher, check_same_tokens
from lockstep.types import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class EmptyTeacher:
    """A frozen model whose base is on meta, and where its weights are."""

    files: ModelFiles
    model: Any
    """Plain, or a PEFT model with the adapter's own values."""


def build_teacher(config: Config, files: ModelFiles, tokenizer: PreTrainedTokenizerBase) -> EmptyTeacher | None:
    """Not collective; reads no weights but the adapter's. None where the recipe has no teacher. `files` and `tokenizer`: the
    policy's.

    Raises `ModelError` for a tokenizer that is not the policy's, naming the first difference, and for an adapter that does not fit.
    """
    teacher = config.teacher
    if teacher is None:
        return None
    found = find_model(teacher.path, "teacher.path")
    check_teacher(teacher, files, tokenizer, found=found, theirs=load_tokenizer(found))
    return empty_teacher(config, teacher, found)


def check_teacher(
    teacher: TeacherConfig,
    files: ModelFiles,
    tokenizer: PreTrainedTokenizerBase,
    *,
    found: ModelFiles,
    theirs: PreTrainedTokenizerBase,
) -> None:
    """`files` and `tokenizer`: the policy's; `found` and `theirs`: its own. Raises `ModelError` as `build_teacher`."""
    rows = min(num_rows(files), num_rows(found))
    check_same_tokens(tokenizer, theirs, rows=rows, path=teacher.path)


def empty_teacher(config: Config, teacher: TeacherConfig, files: ModelFiles, *, device: Where = "cpu") -> EmptyTeacher:
    """Not collective. `files`: its own. `device` meta: the adapter without values, to be planned with."""
    dtype = DTYPES[teacher.dtype or config.model.dtype]
    model: Any = build_empty(files, dtype=dtype, attention=config.model.attention)
    if teacher.adapter:
        model = inject_frozen_lora(model, teacher.adapter, dtype=dtype, files=files, device=device)
    return EmptyTeacher(files, model.requires_grad_(False))


def make_teacher(
    config: Config, empty: EmptyTeacher | None, policy: ModelFiles, world: World, *, sampling: Sampling, pad_id: int
) -> Teacher | None:
    """Collective. `empty`: what `build_teacher` made. `config.train.packing` is decided.

    Raises `ModelError`, on every rank, for a teacher that cannot score in the layout that the policy is trained in.
    """
    if config.teacher is None or empty is None:
        return None
    sharded = shard_teacher(config, empty, world)
    try:
        choose_packing(config.train.packing, sharded.module, world, sampling=sampling, pad_id=pad_id)
    except ModelError as error:
        raise ModelError(
            f"teacher.path {config.teacher.path!r} cannot score what the policy is trained on: {error}"
        ) from error
    sharded.settle()
    return Teacher(sharded, config.teacher, sampling=sampling, vocabulary=num_rows(policy))


def shard_teacher(config: Config, empty: EmptyTeacher, world: World) -> ShardedModel:
    """Collective. As the policy is made: sharded, then filled; no rank holds the whole. All of it is frozen."""
    how = frozen_sharding(config, world.size)
    sharded = shard(
        empty.model,
        plan_sharding(empty.model, how.policy),
        backend=how.backend,
        reshard_after_forward=how.reshard_after_forward,
        mixed_dtypes=how.mixed_dtypes,
        timeout_s=config.dist.agree_timeout_s,
    )
    fill(sharded, empty.files, attention=config.model.attention)
    return sharded


def num_rows(files: ModelFiles) -> int:
    """Of the head."""
    return files.config.get_text_config(decoder=True).vocab_size
