"""Two ranks under FSDP2 against one process without: equal gradients whatever each rank brings, and nobody hangs."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers_sharded import randomise_b, shard_folder
from helpers_train import (
    Unsharded,
    adapt,
    item,
    known_peft_warnings,
    largest_gap,
    make_actor,
    make_items,
    whole_gradients,
)
from lockstep.config import LoraSection
from lockstep.data.packing import pack
from lockstep.dist import World
from lockstep.errors import LockstepError
from lockstep.model.lora import inject_lora
from lockstep.testing import run_ranks, tiny_llama
from lockstep.train.logprobs import token_logprobs
from lockstep.train.losses import policy_loss
from lockstep.types import Sampling, TrainItem

LORA = LoraSection(rank=3, alpha=6)  # rank 3: two ranks hold 2 and 1 rows of every A
LORA_ON_HEAD = LoraSection(rank=3, alpha=6, targets=("q_proj", "lm_head"))
# fp32 sums in another order: items are split over ranks and micro-batches. Gradients are of order 0.01 to 0.1.
REORDERED = 1e-6


def uneven() -> tuple[list[TrainItem], list[TrainItem]]:
    """Rank 0: five long samples, several micro-batches. Rank 1: two short ones."""
    long, short = make_items(5, 1, seed=1, longest=16), make_items(1, 2, seed=2, longest=2)
    return long, short


def two_and_six() -> tuple[list[TrainItem], list[TrainItem]]:
    return [item([1, 2, 3], [4, 5], advantage=0.5)], [item([6, 7], [8, 9, 10, 11, 12, 13], advantage=-1.0)]


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "uneven": (uneven, {"micro_batch_tokens": 24}),
    "uneven, whole steps in one pass": (uneven, {}),
    "two and six tokens": (two_and_six, {}),
    "one rank has nothing": (lambda: (make_items(2, 3), []), {"micro_batch_tokens": 24}),
    "the other rank has nothing": (lambda: ([], make_items(2, 3)), {}),
    "one rank has only empty completions": (lambda: ([item([1, 2], [])], make_items(2, 2)), {}),
    "shared prefixes, reference": (
        lambda: (make_items(2, 3), make_items(1, 4, seed=9)),
        {"packing": "shared_prefix", "kl_coef": 0.2},
    ),
    "packed, reference, one rank has nothing": (lambda: (make_items(2, 3), []), {"packing": "packed", "kl_coef": 0.2}),
    "dr_grpo": (uneven, {"algorithm": "dr_grpo"}),
}


def spy_on_gradients(sharded: Any) -> dict[str, Tensor]:
    clip, seen = sharded.clip_grad_norm, {}

    def clip_and_keep(max_norm: float) -> float:
        seen.clear()
        seen.update(whole_gradients(sharded))
        return clip(max_norm)

    sharded.clip_grad_norm = clip_and_keep
    return seen


def portable(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Values that outlive the process that made them: a queue passes tensors as handles to the sender's memory."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def from_rank(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def count_forwards(sharded: Any) -> list[int]:
    counts = [0]

    def count(*_: object) -> None:
        counts[0] += 1

    sharded.module.register_forward_pre_hook(count)
    return counts


def run_cases(world: World, folder: str) -> dict[str, Any]:
    """Every case from the same weights: learning rate 1e-12 leaves them where they are, to one part in 1e10."""
    sharded = shard_folder(world, folder, LORA)
    randomise_b(sharded)
    gradients, forwards, out = spy_on_gradients(sharded), count_forwards(sharded), {}
    for name, (build, options) in CASES.items():
        forwards[0] = 0
        result = make_actor(sharded, world, **{"lr": 1e-12, **options}).update(build()[world.rank], step=0)
        out[name] = (
            portable(gradients),
            result.stats,
            result.grad_norm,
            result.num_tokens,
            forwards[0],
            result.mismatch.metrics(),
        )
    return out


def run_refusals(world: World, folder: str) -> dict[str, Any]:
    """What must stop, or be skipped by, both ranks alike; then an update that works: nothing is left half done."""
    sharded = shard_folder(world, folder, LORA)
    actor = make_actor(sharded, world)
    said = {}
    for name, mine in {
        "nan": [item([1, 2], [3], advantage=float("nan"))] if world.rank else make_items(1, 2),
        "bad item": [TrainItem((1, 2), (3, 4), (-1.0,), 1.0, 0)] if world.rank else make_items(1, 2),
    }.items():
        try:
            actor.update(mine, step=3)
        except (LockstepError, ValueError) as error:
            said[name] = str(error)
    said["nothing anywhere"] = actor.update([], step=3).stats["skipped"].mean
    said["afterwards"] = actor.update(make_items(1, 2, seed=world.rank), step=3).grad_norm
    return said


def run_curve(world: World, folder: str) -> list[float]:
    sharded = shard_folder(world, folder, LORA)
    actor = make_actor(sharded, world, packing="shared_prefix", kl_coef=0.05, max_grad_norm=100.0)
    losses = []
    for step in range(5):
        items = make_items(4, 3, seed=step)
        mine = [each for each in items if each.group % world.size == world.rank]
        losses.append(actor.update(mine, step=step).stats["loss"].mean)
    return losses


def run_head(world: World, folder: str) -> tuple[dict[str, np.ndarray], list[float]]:
    """A LoRA on a tied, sharded head, in chunks: the head's weights belong to the root, which is gathered twice."""
    sharded = shard_folder(world, folder, LORA_ON_HEAD)
    randomise_b(sharded)
    items = [each for each in make_items(4, 2) if each.group % 2 == world.rank]
    (batch,) = pack(items, mode="packed", max_tokens=8192, pad_id=0)
    scored = token_logprobs(sharded.module, batch, sampling=Sampling(), chunk_tokens=4)
    advantages = torch.tensor([items[i].advantage for i in batch.item_ids])
    sums = policy_loss(scored.logprobs, scored.logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2)
    (sums.loss_sum * world.size).backward()
    return portable(whole_gradients(sharded)), scored.logprobs.tolist()


def run_from_adapter(world: World, folder: str, adapter: str) -> list[float]:
    """KL to the reference over three updates of a run that starts from a trained adapter."""
    sharded = shard_folder(world, folder, LoraSection(init_from=adapter))
    actor = make_actor(sharded, world, kl_coef=0.1)
    items = [each for each in make_items(2, 3) if each.group == world.rank]
    return [actor.update(items, step=step).stats["kl_ref"].mean for step in range(3)]


def run_all(world: World, folder: str, tied_folder: str, adapter: str) -> dict[str, Any]:
    return {
        "from adapter": run_from_adapter(world, folder, adapter),
        "cases": run_cases(world, folder),
        "refusals": run_refusals(world, folder),
        "curve": run_curve(world, folder),
        "head": run_head(world, tied_folder),
    }


class _Alone(Unsharded):
    """The same model in one process, with what `randomise_b` needs."""

    def __init__(self, folder_model: Any, lora: LoraSection):
        with known_peft_warnings():
            super().__init__(inject_lora(folder_model, lora, seed=0))

    def randomise_b(self) -> _Alone:
        with torch.no_grad():
            for index, (name, param) in enumerate(self.trainable()):
                if "lora_B" in name:
                    param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 + index)) * 0.1)
        return self


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as root:
        plain, tied, adapter = (f"{root}/{name}" for name in ("plain", "tied", "adapter"))
        tiny_llama().save_pretrained(plain)
        tiny_llama(tie_word_embeddings=True).save_pretrained(tied)
        adapt(tiny_llama()).save_pretrained(adapter)
        return run_ranks(2, run_all, plain, tied, adapter)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_gradient_of_one_on_the_union(ranks, name):  # B34, B40(1), B89, B90
    build, options = CASES[name]
    alone = _Alone(tiny_llama(), LORA).randomise_b()
    expected = make_actor(alone, **{**options, "micro_batch_tokens": 8192}).update(
        [each for part in build() for each in part], step=0
    )
    assert max(float(grad.abs().max()) for grad in alone.clipped.values()) > 0.01
    for rank in ranks:
        gradients, stats, grad_norm, num_tokens, _, mismatch = rank["cases"][name]
        assert largest_gap(from_rank(gradients), alone.clipped) < REORDERED
        assert num_tokens == expected.num_tokens
        assert grad_norm == pytest.approx(expected.grad_norm, abs=REORDERED)
        assert stats.keys() == expected.stats.keys()
        for key in stats:
            assert stats[key].mean == pytest.approx(expected.stats[key].mean, abs=1e-5), key  # logprobs agree to 1e-5
        assert mismatch == pytest.approx(expected.mismatch.metrics(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_both_ranks_make_equally_many_passes(ranks, name):  # B34
    forwards = [rank["cases"][name][4] for rank in ranks]
    assert forwards[0] == forwards[1] > 0
    if name == "uneven":
        assert forwards[0] > 1


def test_what_one_rank_cannot_do_no_rank_does(ranks):  # B40
    for rank in ranks:
        assert "step 3: the gradient norm is nan" in rank["refusals"]["nan"]
        assert "expected a rollout logprob for each of its 2" in rank["refusals"]["bad item"]
        assert rank["refusals"]["nothing anywhere"] == 1.0
        assert rank["refusals"]["afterwards"] > 0
    assert "rank 1 failed" in ranks[0]["refusals"]["bad item"]
    assert ranks[0]["refusals"]["afterwards"] == ranks[1]["refusals"]["afterwards"]


def test_the_reference_of_a_run_from_an_adapter_is_that_adapter(ranks):  # B83
    for rank in ranks:
        first, *later = rank["from adapter"]
        assert first == 0.0
        assert min(later) > 1e-5


def test_five_steps_on_two_ranks_have_the_losses_of_five_steps_on_one(ranks):
    alone = run_curve_alone()
    for rank in ranks:
        # Adam divides by the gradient's size, so a rounding difference of a near-zero gradient moves a weight by up to
        # lr; 1e-4 on the loss is what the run promises, and what five such steps stay within.
        assert rank["curve"] == pytest.approx(alone, abs=1e-4)
    assert ranks[0]["curve"] == ranks[1]["curve"]


def run_curve_alone() -> list[float]:
    actor = make_actor(_Alone(tiny_llama(), LORA), packing="shared_prefix", kl_coef=0.05, max_grad_norm=100.0)
    return [actor.update(make_items(4, 3, seed=step), step=step).stats["loss"].mean for step in range(5)]


def test_a_sharded_tied_head_with_a_lora_is_scored_in_chunks(ranks):
    alone = _Alone(tiny_llama(tie_word_embeddings=True), LORA_ON_HEAD).randomise_b()
    items = make_items(4, 2)
    (batch,) = pack(items, mode="packed", max_tokens=8192, pad_id=0)
    scored = token_logprobs(alone.module, batch, sampling=Sampling())
    advantages = torch.tensor([items[i].advantage for i in batch.item_ids])
    policy_loss(scored.logprobs, scored.logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2).loss_sum.backward()
    expected = whole_gradients(alone)
    assert any("lm_head" in name for name in expected)
    for index, rank in enumerate(ranks):
        gradients, logprobs = rank["head"]
        # Sums over tokens, not means: gradients of order 1, each with fp32's 1e-7 over a few dozen terms.
        assert largest_gap(from_rank(gradients), expected) < 1e-5
        mine = [
            value
            for value, i in zip(scored.logprobs.tolist(), batch.item_ids, strict=True)
            if items[i].group % 2 == index
        ]
        assert logprobs == pytest.approx(mine, abs=1e-5)
