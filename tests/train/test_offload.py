"""State and activations in host memory: the same numbers to the last bit, and nothing that should not be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from helpers_train import Unsharded, adapt, largest_gap, make_actor, make_items
from lockstep.config import TrainConfig
from lockstep.testing import tiny_llama
from lockstep.train import offload
from lockstep.train.offload import HostState
from lockstep.train.optim import MasterAdamW, Optimizer


def parameters(dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(7, 3), (64, 5), (2,), (0, 4), (33, 9)]
    return [(str(n), nn.Parameter(torch.randn(shape, generator=draw).to(dtype))) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_with_state_on_the_host_are_the_same_to_the_last_bit(dtype, chunk_bytes):
    sides = []
    for kept in (False, True):
        named = parameters(dtype)
        optimizer = Optimizer(named, train=TrainConfig(lr=1e-2, weight_decay=0.1, offload_optimizer=kept), num_steps=10)
        if kept:
            optimizer._host = HostState(optimizer.torch, chunk_bytes=chunk_bytes)
        for step in range(4):
            draw = torch.Generator().manual_seed(step)
            for _, param in named:
                param.grad = torch.randn(param.shape, generator=draw).to(dtype)
            grads = [param.grad for _, param in named]
            optimizer.step(1e-2 / (step + 1))
            assert all(param.grad is grad for (_, param), grad in zip(named, grads, strict=True))
        sides.append((named, optimizer.torch))
    (plain, first), (kept, second) = sides
    assert isinstance(second, MasterAdamW) == (dtype == torch.bfloat16)
    for (_, left), (_, right) in zip(plain, kept, strict=True):
        assert torch.equal(left, right)
        assert first.state[left].keys() == second.state[right].keys() >= {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(first.state[left][name], second.state[right][name]) for name in first.state[left])
    assert not torch.equal(plain[0][1], parameters(dtype)[0][1])


def test_the_state_is_on_the_device_only_while_its_chunk_is_stepped(monkeypatch):
    """Here both are the CPU: what torch steps is a copy, and what is there afterwards is another one."""
    named = parameters(torch.float32)
    optimizer = Optimizer(named, train=TrainConfig(offload_optimizer=True), num_steps=10)
    host = HostState(optimizer.torch, chunk_bytes=1000)
    optimizer._host = host
    stepped: list[list[Tensor]] = []
    step = optimizer.torch.step

    def watch() -> None:
        step()
        live = [param for _, param in named if param.grad is not None]
        stepped.append([optimizer.torch.state[param]["exp_avg"] for param in live])

    monkeypatch.setattr(optimizer.torch, "step", watch)
    for _ in range(2):
        stepped.clear()
        for _, param in named:
            param.grad = torch.ones_like(param)
        optimizer.step(1e-2)
        assert [len(each) for each in stepped] == [1, 1, 2, 1]
        used = {id(tensor) for each in stepped for tensor in each}
        kept = [optimizer.torch.state[param] for _, param in named]
        assert all(id(state["exp_avg"]) not in used and state["exp_avg"].device.type == "cpu" for state in kept)


@contextmanager
def moved(monkeypatch: pytest.MonkeyPatch, *, small: int = 0) -> Iterator[list[tuple[int, int]]]:
    """(number of elements, storage) of what goes to the host inside."""
    moves: list[tuple[int, int]] = []
    judge = offload._is_worth_it

    def watch(tensor: Tensor) -> bool:
        verdict = judge(tensor)
        if verdict:
            moves.append((tensor.numel(), tensor.untyped_storage().data_ptr()))
        return verdict

    with monkeypatch.context() as patch:
        patch.setattr(offload, "SMALL_BYTES", small)
        patch.setattr(offload, "_is_worth_it", watch)
        yield moves


# The name that every transformers >= 5.0 has; the newer one came during 5.x.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packing", ["padded", "shared_prefix"])
def test_activations_on_the_host_change_no_bit_of_a_gradient_and_parameters_stay(monkeypatch, packing, checkpointing):
    items = make_items(3, 3, seed=1)
    gradients = []
    for kept in (False, True):
        sharded = Unsharded(adapt(tiny_llama()))
        if checkpointing:
            sharded.module.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
        actor = make_actor(sharded, packing=packing, micro_batch_tokens=70, offload_activations=kept)
        with moved(monkeypatch) as moves:
            actor.update(items, step=0)
        assert bool(moves) == kept
        gradients.append(sharded.clipped)
    assert largest_gap(*gradients) == 0.0
    assert max(float(grad.abs().max()) for grad in gradients[0].values()) > 0.01
    weights = {parameter.untyped_storage().data_ptr() for parameter in sharded.module.parameters()}
    assert not {storage for _, storage in moves} & weights


# As above.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_with_recomputing_only_what_enters_a_layer_is_left_to_move(monkeypatch):
    numels = []
    for checkpointing in (False, True):
        sharded = Unsharded(adapt(tiny_llama()))
        if checkpointing:
            sharded.module.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
        actor = make_actor(sharded, offload_activations=True)
        with moved(monkeypatch) as moves:
            actor.update(make_items(3, 3), step=0)
        numels.append(sum(numel for numel, _ in moves))
    assert 0 < numels[1] < 0.5 * numels[0]


def test_small_tensors_stay(monkeypatch):
    actor = make_actor(Unsharded(adapt(tiny_llama())), offload_activations=True)
    with moved(monkeypatch, small=offload.SMALL_BYTES) as moves:
        actor.update(make_items(3, 3), step=0)
    assert not moves
