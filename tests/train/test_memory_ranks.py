"""Two ranks, FSDP1 and FSDP2: float16 with one decision about overflows, and state and activations in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from helpers_sharded import randomise_b
from helpers_train import PLAIN, Unsharded, adapt, make_actor, make_items
from lockstep import checkpoint
from lockstep.checkpoint import TrainState
from lockstep.config import LoraSection
from lockstep.dist import World
from lockstep.known_warnings import while_recomputing
from lockstep.model.load import build_empty, find_model
from lockstep.model.lora import inject_lora
from lockstep.sharding.fill import fill
from lockstep.sharding.precision import Precision
from lockstep.sharding.shard import Backend, shard
from lockstep.testing import run_ranks, tiny_llama
from lockstep.train import choices, offload
from lockstep.train.choices import choose_packing
from lockstep.train.step import Actor
from lockstep.types import TrainItem

LORA = LoraSection(rank=3, alpha=6)  # rank 3: two ranks hold 2 and 1 rows of every A
BACKENDS: tuple[Backend, ...] = ("fsdp2", "fsdp1")


def make(folder: str, backend: Backend, dtype: torch.dtype, *, recompute: bool = False, seed: int = 0) -> Any:
    """Collective. As a recipe makes it."""
    files = find_model(folder)
    model = inject_lora(build_empty(files, dtype=dtype, attention="sdpa"), LORA, seed=seed)
    if recompute:
        with while_recomputing():
            model.gradient_checkpointing_enable({"use_reentrant": False})
    sharded = shard(model, backend=backend, mixed_dtypes="split" if backend == "fsdp1" else None)
    fill(sharded, files, attention="sdpa")
    randomise_b(sharded)
    return sharded


def mine(world: World, seed: int = 0) -> list[TrainItem]:
    return [each for each in make_items(4, 3, seed=seed) if each.group % world.size == world.rank]


def local(sharded: Any) -> dict[str, Tensor]:
    return {name: sharded.local_flat(name).clone() for name, _ in sharded.trainable()}


def run_offload(world: World, folder: str, backend: Backend, *, recompute: bool) -> None:
    sides, shapes = [], []
    for kept in (False, True):
        sharded = make(folder, backend, torch.float32, recompute=recompute)
        actor = make_actor(
            sharded, world, packing="packed", micro_batch_tokens=50, offload_optimizer=kept, offload_activations=kept
        )
        judge = offload._is_worth_it
        offload.SMALL_BYTES = 0
        offload._is_worth_it = lambda tensor: judge(tensor) and not shapes.append(tuple(tensor.shape))  # noqa: B023
        norms = [actor.update(mine(world, step), step=step).grad_norm for step in range(2)]
        offload.SMALL_BYTES, offload._is_worth_it = 64 * 2**10, judge
        sides.append((norms, local(sharded)))
        assert bool(shapes) == kept
    (norms, plain), (kept_norms, moved) = sides
    assert norms == kept_norms and min(norms) > 0.01
    assert plain.keys() == moved.keys() and all(torch.equal(plain[name], moved[name]) for name in plain)
    whole = {tensor.shape for tensor in sharded.plan.parameters}
    assert not set(shapes) & (whole | {shape[::-1] for shape in whole}), "a gathered parameter went to the host"
    state = actor.optimizer.torch.state
    assert all(not isinstance(state[param]["exp_avg"], DTensor) for _, param in sharded.trainable())


def overflow_once(actor: Actor, world: World) -> None:
    """Before the next clipping, one element on rank 1 alone is infinite."""
    clip = actor.sharded.clip_grad_norm

    def spoil(max_norm: float) -> float:
        actor.sharded.clip_grad_norm = clip
        grads = [offload.local_of(param.grad) for _, param in actor.sharded.trainable() if param.grad is not None]
        if world.rank == 1:
            next(grad for grad in grads if grad.numel()).view(-1)[0] = torch.inf
        return clip(max_norm)

    actor.sharded.clip_grad_norm = spoil


def run_half(world: World, folder: str, out: str, backend: Backend) -> dict[str, Any]:
    """Four steps, the second one overflowing on one rank; the last two again, from a checkpoint."""
    options = {"packing": "packed", "offload_optimizer": True}
    sharded = make(folder, backend, torch.float16)
    actor = make_actor(sharded, world, **options)
    assert actor.scaler is not None
    first = actor.update(mine(world, 0), step=0)
    before = local(sharded)
    overflow_once(actor, world)
    second = actor.update(mine(world, 1), step=1)
    same = all(torch.equal(value, before[name]) for name, value in local(sharded).items())
    state = TrainState(sharded, actor.optimizer.torch, actor.scaler)
    checkpoint.save(Path(out), state, step=2, keep=1)
    straight = [actor.update(mine(world, step), step=step).grad_norm for step in (2, 3)]
    other = make(folder, backend, torch.float16, seed=5)
    resumed = make_actor(other, world, **options)
    found = checkpoint.newest(Path(out), world)
    assert found is not None
    checkpoint.load(found, TrainState(other, resumed.optimizer.torch, resumed.scaler))
    assert resumed.scaler is not None and resumed.scaler.state() == {"scale": 2.0**15, "good_steps": 0.0}
    again = [resumed.update(mine(world, step), step=step).grad_norm for step in (2, 3)]
    left, right = local(sharded), local(other)
    return {
        "first": (first.grad_norm, first.stats["loss"].mean, first.stats["grad_overflow"].mean),
        "second": (second.mini_batches[0].overflowed, second.num_optimizer_steps, same),
        "norms": (straight, again),
        "equal": left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left),
        "scale": (actor.scaler.state(), resumed.scaler.state()),
    }


def run_precision(world: World, backend: Backend) -> None:  # B47
    """What forward computes in is what was asked for, and float16 brings a scaler with it."""
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = tiny_llama()(input_ids=ids).logits.detach()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sharded: Any = shard(adapt(tiny_llama(), zero_b=True), backend=backend, precision=Precision(param_dtype=dtype))
        with torch.no_grad():
            logits = sharded.module(input_ids=ids).logits
        sharded.settle()
        assert torch.equal(logits, plain) == (dtype == torch.float32), (backend, dtype)
        assert (make_actor(sharded, world).scaler is None) == (dtype != torch.float16)


def run_choice(world: World, folder: str) -> str:
    """Rank 1 alone sees shared prefixes computed wrongly."""
    sharded = make(folder, "fsdp2", torch.float32)
    gap = choices.packing_gap

    def other_gap(module: Any, mode: Any, **how: Any) -> float:
        real = gap(module, mode, **how)
        return float("nan") if world.rank == 1 and mode == "shared_prefix" else real

    choices.packing_gap = other_gap
    return choose_packing("auto", sharded.module, world, sampling=PLAIN, pad_id=0)


def run_all(world: World, folder: str, out: str) -> dict[str, Any]:
    results: dict[str, Any] = {"choice": run_choice(world, folder)}
    for backend in BACKENDS:
        for recompute in (False, True):
            run_offload(world, folder, backend, recompute=recompute)
        run_precision(world, backend)
        results[backend] = run_half(world, folder, f"{out}/{backend}", backend)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return run_ranks(2, run_all, str(folder), str(tmp_path_factory.mktemp("run")))


def test_ranks_fall_back_together(ranks):
    assert [rank["choice"] for rank in ranks] == ["packed", "packed"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_overflow_on_one_rank_is_every_ranks(ranks, backend):
    for rank in ranks:
        assert rank[backend]["second"] == (True, 0, True)
        assert rank[backend]["scale"] == ({"scale": 2.0**15, "good_steps": 2.0},) * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_float16_run_goes_on_to_the_last_bit(ranks, backend):
    for rank in ranks:
        straight, again = rank[backend]["norms"]
        assert straight == again and rank[backend]["equal"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_ranks_have_the_gradient_of_one_process_in_fp32(ranks, backend):
    alone = Unsharded(inject_lora(tiny_llama(), LORA, seed=0))
    with torch.no_grad():
        for index, (name, param) in enumerate(alone.trainable()):
            if "lora_B" in name:
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 + index)) * 0.1)
    expected = make_actor(alone).update(make_items(4, 3), step=0)
    for rank in ranks:
        norm, loss, overflow = rank[backend]["first"]
        # float16 activations have 11 bits.
        assert norm == pytest.approx(expected.grad_norm, rel=5e-3)
        assert loss == pytest.approx(expected.stats["loss"].mean, abs=1e-5)
        assert overflow == 0
    assert expected.grad_norm > 0.05
