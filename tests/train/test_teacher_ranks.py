"""A sharded teacher over 1, 2 and 4 ranks, FSDP1 and FSDP2, against one process: equal gradients, and nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from helpers_loop import recipe
from helpers_teacher import KINDS, another_model, make_teacher
from helpers_train import adapt, largest_gap, make_actor, make_items
from helpers_update import alone, make_sharded, share_of, spy, whole
from lockstep.assemble_teacher import empty_teacher, shard_teacher
from lockstep.config import build_config
from lockstep.data.packing import dummy_micro_batch, pack
from lockstep.dist import World
from lockstep.model.load import find_model
from lockstep.sharding.base import ShardedModel
from lockstep.testing import run_ranks, tiny_llama
from lockstep.train.logprobs import token_logprobs
from lockstep.types import Sampling, TrainItem

SAMPLING = Sampling(temperature=0.7, max_new_tokens=16)
Backend = Literal["fsdp2", "fsdp1"]
TEACHERS = ("untied", "tied")  # a head that is a unit of its own, and one in the root
ITEMS = [replace(each, advantage=0.0) for each in make_items(6, 3, seed=4)]
# fp32 sums in another order; gradients are of order 0.01 to 1.
REORDERED = 1e-6


def cases() -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """name -> (teacher, its options, the train section's)."""
    out: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {}
    for tied in TEACHERS:
        out[f"whole, {tied}"] = (tied, {}, {"packing": "shared_prefix", "micro_batch_tokens": 60})
    out["top_k"] = ("untied", KINDS["top_k"], {"packing": "packed", "micro_batch_tokens": 30})
    out["sampled"] = ("tied", KINDS["sampled"], {"packing": "padded", "micro_batch_tokens": 50})
    out["beside rewards"] = ("untied", {"coef": 0.3}, {"algorithm": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01})
    return out


def items_for(train: dict[str, Any]) -> list[TrainItem]:
    return make_items(6, 3, seed=4) if train.get("algorithm") == "grpo" else ITEMS


def uneven(world: World) -> list[TrainItem]:
    """In chunks of 4 tokens: many on rank 0, few on the others, none on the last of several."""
    if world.size > 1 and world.rank == world.size - 1:
        return []
    return ITEMS[:6] if world.rank == 0 else ITEMS[6 + 2 * world.rank : 8 + 2 * world.rank]


def load(world: World, root: str, name: str, backend: Backend) -> ShardedModel:
    """Collective. As a recipe does."""
    teacher = {"path": f"{root}/{name}", "adapter": f"{root}/{name}-adapter"}
    config = build_config(recipe(f"{root}/student", root, sharding={"backend": backend}, teacher=teacher))
    assert config.teacher is not None
    return shard_teacher(config, empty_teacher(config, config.teacher, find_model(config.teacher.path)), world)


def run_cases(world: World, root: str, backend: Backend) -> dict[str, Any]:
    """Learning rate 1e-12: the weights stay where they are."""
    sharded = make_sharded(world, f"{root}/student", backend)
    teachers = {which: load(world, root, which, backend) for which in TEACHERS}
    before = {which: [each.clone() for each in shards(teachers[which])] for which in TEACHERS}
    seen, out = spy(sharded), {}
    for name, (which, options, train) in cases().items():
        teacher = make_teacher(None, SAMPLING, sharded=teachers[which], **options)
        values = {"algorithm": "distill", "lr": 1e-12, **train}
        actor = make_actor(sharded, world, sampling=SAMPLING, teacher=teacher, **values)
        result = actor.update(share_of(items_for(train), world), step=0)
        out[name] = (dict(seen), result)
    out["chunks"] = run_chunks(world, teachers, sharded, seen)
    for which in TEACHERS:
        check_untouched(teachers[which], before[which])
    return out


def shards(sharded: ShardedModel) -> list[Tensor]:
    return [sharded.local_flat(each.name) for each in sharded.plan.parameters]


def check_untouched(sharded: Any, before: list[Tensor]) -> None:
    """Still frozen, still shards (each element on one rank), still the same values."""
    assert sharded.trainable() == []
    assert all(torch.equal(new, old) for new, old in zip(shards(sharded), before, strict=True))
    assert sharded.is_current()
    if sharded.evens_out == "tensor" and sharded.world.size > 1:
        shapes = {each.name: each.shape for each in sharded.plan.parameters}
        live = dict(sharded.module.named_parameters())
        assert all(tuple(param.shape) == shapes[name] for name, param in live.items() if name in shapes)
        assert all(param.to_local().numel() < max(param.numel(), 2) for param in live.values())


def run_chunks(world: World, teachers: dict[str, ShardedModel], sharded: Any, seen: dict[str, Any]) -> dict[str, Any]:
    """Chunks of 4 tokens, as many as a rank's own tokens make: no collective may hang on their number."""
    out = {}
    for which in TEACHERS:
        teacher = make_teacher(None, SAMPLING, sharded=teachers[which])
        batches = pack(uneven(world), mode="packed", max_tokens=8192, pad_id=0)
        batch = batches[0] if batches else dummy_micro_batch(0)
        with teacher.answering(batch) as answer:
            scored = token_logprobs(sharded.module, batch, sampling=SAMPLING, chunk_tokens=4, teacher=answer)
            assert scored.taught is not None and scored.taught.divergence is not None
            loss = scored.taught.divergence.sum() + 0 * scored.logprobs.sum()
            (loss * world.size).backward()
        sharded.clip_grad_norm(1e9)
        out[which] = (dict(seen), loss.item())
        for _, param in sharded.trainable():
            param.grad = None
    return out


def run_all(world: World, root: str) -> dict[str, Any]:
    return {backend: run_cases(world, root, backend) for backend in ("fsdp2", "fsdp1")}


Ranks = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Ranks:
    root = tmp_path_factory.mktemp("models")
    save_models(root)
    return cache(lambda size: run_ranks(size, run_all, str(root)))


def save_models(root: Path) -> None:
    tiny_llama().save_pretrained(root / "student")
    for name in TEACHERS:
        another_model(tie_word_embeddings=name == "tied").save_pretrained(root / name)
        taught(name).save_pretrained(root / f"{name}-adapter")


def taught(name: str) -> Any:
    return adapt(another_model(tie_word_embeddings=name == "tied"), seed=7)


def expected(name: str) -> tuple[dict[str, Tensor], Any]:
    which, options, train = cases()[name]
    student = alone()
    teacher = make_teacher(taught(which).requires_grad_(False), SAMPLING, **options)
    values = {"algorithm": "distill", **train, "packing": "padded", "micro_batch_tokens": 8192}
    result = make_actor(student, sampling=SAMPLING, teacher=teacher, **values).update(items_for(train), step=0)
    return student.clipped, result


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", cases())
def test_a_sharded_teacher_gives_the_update_of_one_process(ranks, name, size):
    gradients, result = expected(name)
    assert max(float(grad.abs().max()) for grad in gradients.values()) > 0.01
    for backend in ("fsdp2", "fsdp1"):
        found = [rank[backend][name] for rank in ranks(size)]
        gap = largest_gap(whole([seen for seen, _ in found], gradients), gradients)
        assert gap < REORDERED, (backend, gap)
        for _, theirs in found:
            assert theirs.stats.keys() == result.stats.keys()
            for key, stat in result.stats.items():
                assert theirs.stats[key].mean == pytest.approx(stat.mean, abs=1e-5), (backend, key)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("which", TEACHERS)
def test_ranks_may_have_other_numbers_of_chunks(ranks, which, size):
    student = alone()
    teacher = make_teacher(taught(which).requires_grad_(False), SAMPLING)
    losses = []
    for rank in range(size):
        batches = pack(uneven(World(rank, size)), mode="padded", max_tokens=8192, pad_id=0)
        for batch in batches:
            with teacher.answering(batch) as answer:
                scored = token_logprobs(student.module, batch, sampling=SAMPLING, teacher=answer)
                scored.taught.divergence.sum().backward()
        losses.append(scored.taught.divergence.sum().item() if batches else 0.0)
    student.clip_grad_norm(1e9)
    for backend in ("fsdp2", "fsdp1"):
        found = [rank[backend]["chunks"][which] for rank in ranks(size)]
        # Sums over tokens, not means: gradients of order 1 to 10.
        assert largest_gap(whole([seen for seen, _ in found], student.clipped), student.clipped) < 2e-5
        assert [loss for _, loss in found] == pytest.approx(losses, rel=1e-5)
