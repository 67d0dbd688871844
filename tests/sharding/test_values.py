"""What only rank 0 holds reaches every rank's shards, in small messages; what ranks hold alike is compared, and a difference is named."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers_models import tiny_gemma3, tiny_gemma4
from lockstep.config import LoraSection
from lockstep.dist import World
from lockstep.errors import RanksDisagree
from lockstep.model.lora import inject_lora
from lockstep.sharding import values as values_module
from lockstep.sharding.fsdp2 import FSDP2Model, shard_fsdp2
from lockstep.sharding.plan import plan_sharding
from lockstep.sharding.shard import shard as wrap
from lockstep.sharding.values import Values, send_from_rank0, take_values
from lockstep.testing import run_ranks, tiny_llama

IDS = torch.arange(1, 12)[None]


def tied_llama() -> nn.Module:
    return tiny_llama(tie_word_embeddings=True, num_hidden_layers=3, vocab_size=65)


def with_lora(model: nn.Module, seed: int = 0) -> nn.Module:
    return inject_lora(model, LoraSection(rank=2, targets="all-linear"), seed=seed)  # type: ignore[arg-type]


def on_meta(model: nn.Module) -> nn.Module:
    """As `to("meta")`, ties kept."""
    model = model.to("meta")
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model


class WithBuffers(nn.Module):
    """Buffers of dtypes that do not line up in a message, beside a layer with odd sizes (CASES B54)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.register_buffer("nothing", torch.empty(0))
        self.layer = nn.Linear(7, 5)


def sharded_by(world: World, model: nn.Module) -> tuple[FSDP2Model, Values]:
    """The path of `shard`: plan, take, wrap, send."""
    plan = plan_sharding(model)
    values = take_values(model, plan, world)
    sent = Values(values.parameters, values.buffers, dict(values.tensors))
    sharded = shard_fsdp2(model, plan, world, reshard_after_forward=True)
    send_from_rank0(sharded, values)
    assert not values.tensors
    return sharded, sent


def check_equals(sharded: FSDP2Model, plain: nn.Module) -> None:
    """Every parameter, buffer and tie of the one-process model, to the bit."""
    wanted = {**dict(plain.named_parameters(remove_duplicate=False)), **dict(plain.named_buffers())}
    for tensor in sharded.plan.parameters:
        param = sharded.module.get_parameter(tensor.name)
        assert all(sharded.module.get_parameter(alias) is param for alias in tensor.aliases)
        whole, (start, stop) = wanted[tensor.name].detach(), sharded.ranges(tensor.name)[sharded.world.rank]
        assert torch.equal(sharded.local_flat(tensor.name), whole.reshape(-1)[start:stop]), tensor.name
        assert param.requires_grad == tensor.is_trainable
    for tensor in sharded.plan.buffers:
        value = sharded.buffer(tensor.name)
        assert value.dtype == wanted[tensor.name].dtype and torch.equal(value, wanted[tensor.name]), tensor.name


def check_meta_elsewhere(world: World) -> None:
    for make in (tied_llama, tiny_gemma3, tiny_gemma4, WithBuffers):
        model, plain = make(), make()
        if not world.is_main:
            on_meta(model)
        sharded, sent = sharded_by(world, model)
        assert bool(sent.parameters) == (world.size > 1) and bool(sent.buffers) == (world.size > 1)
        assert bool(sent.tensors) == (world.is_main and world.size > 1)
        check_equals(sharded, plain)
        if make is not WithBuffers:
            with torch.no_grad():
                assert torch.equal(sharded.module(input_ids=IDS).logits, plain(input_ids=IDS).logits)
            sharded.settle()


def check_fsdp1(world: World) -> None:
    """Ranges that begin within a row; tensors that one rank holds alone."""
    for keeps_originals in (True, False):
        model, plain = tied_llama(), tied_llama()
        if not world.is_main:
            buffers = dict(model.named_buffers())
            on_meta(model)
            for name, buffer in buffers.items():
                path, _, attr = name.rpartition(".")
                model.get_submodule(path)._buffers[attr] = buffer
        sharded = wrap(model, backend="fsdp1", use_orig_params=keeps_originals)
        wanted = dict(plain.named_parameters())
        for tensor in sharded.plan.parameters:
            start, stop = sharded.ranges(tensor.name)[world.rank]
            whole = wanted[tensor.name].detach().reshape(-1)
            assert torch.equal(sharded.local_flat(tensor.name), whole[start:stop]), tensor.name
        with torch.no_grad():
            assert torch.equal(sharded.module(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def check_adapter_real_everywhere(world: World) -> None:
    """The base on rank 0 only, the adapter on every rank from one seed: only the base travels."""
    model, plain = with_lora(tied_llama()), with_lora(tied_llama())
    if not world.is_main:
        kept = {name: param for name, param in model.named_parameters() if param.requires_grad}
        on_meta(model)
        for name, param in kept.items():
            path, _, attr = name.rpartition(".")
            model.get_submodule(path)._parameters[attr] = param
    sharded, sent = sharded_by(world, model)
    assert not any("lora" in name for name in sent.parameters)
    check_equals(sharded, plain)


def check_real_everywhere(world: World) -> None:
    sharded, sent = sharded_by(world, with_lora(tied_llama()))
    assert sent == Values((), (), {})
    check_equals(sharded, with_lora(tied_llama()))


def check_step(world: World) -> None:
    """Head and embedding are one tensor before and after steps, which are those of one process (CASES B56)."""
    model, plain = tied_llama(), tied_llama()
    if not world.is_main:
        on_meta(model)
    sharded, _ = sharded_by(world, model)
    for each, params in ((plain, list(plain.parameters())), (sharded.module, [p for _, p in sharded.trainable()])):
        each.train()
        optimizer = torch.optim.SGD(params, lr=0.1)
        for _ in range(2):
            each(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    sharded.settle()
    head = sharded.module.get_parameter("lm_head.weight")
    assert head is sharded.module.get_parameter("model.embed_tokens.weight")
    # Gradients are averaged over ranks: other order of rounding.
    torch.testing.assert_close(head.full_tensor(), plain.get_parameter("lm_head.weight").detach(), atol=1e-6, rtol=1e-5)  # type: ignore[attr-defined]


@contextmanager
def counting_messages(sizes: list[int]):
    """Bytes of every point-to-point message of this rank."""
    send, recv = dist.send, dist.recv
    dist.send = lambda tensor, *args, **kwargs: (sizes.append(tensor.nbytes), send(tensor, *args, **kwargs))[1]
    dist.recv = lambda tensor, *args, **kwargs: (sizes.append(tensor.nbytes), recv(tensor, *args, **kwargs))[1]
    try:
        yield
    finally:
        dist.send, dist.recv = send, recv


def check_messages(world: World) -> None:
    """Windows smaller than a tensor: each rank gets its own elements and no more, in messages of at most a window."""
    model, plain = tied_llama(), tied_llama()
    if not world.is_main:
        on_meta(model)
    sizes: list[int] = []
    whole, values_module.WINDOW_BYTES = values_module.WINDOW_BYTES, 1000
    try:
        with counting_messages(sizes):
            sharded, _ = sharded_by(world, model)
    finally:
        values_module.WINDOW_BYTES = whole
    check_equals(sharded, plain)
    held = [
        sum(sharded.ranges(t.name)[rank][1] - sharded.ranges(t.name)[rank][0] for t in sharded.plan.parameters)
        for rank in range(world.size)
    ]
    assert sum(sizes) == 4 * (sum(held[1:]) if world.is_main else held[world.rank])
    assert max(sizes) <= 1000 < max(t.nbytes for t in sharded.plan.parameters)


def check_refused(world: World) -> None:
    # An adapter made without a common seed would be cut from different ranks' values.
    unseeded = with_lora(tied_llama(), seed=world.rank)
    with pytest.raises(
        RanksDisagree, match=r"q_proj.lora_A.default.weight .* has other values on rank 1 .* than on rank 0"
    ):
        take_values(unseeded, plan_sharding(unseeded), world)
    # Only another rank than 0 has values.
    model = on_meta(tied_llama()) if world.rank != 1 else tied_llama()
    with pytest.raises(RanksDisagree, match=r"q_proj.weight has values on rank 1 and is on meta on rank 0"):
        take_values(model, plan_sharding(model), world)
    # Buffers differ.
    model = tied_llama()
    if world.rank == 1:
        model.model.rotary_emb.inv_freq.mul_(2)  # type: ignore[union-attr]
    with pytest.raises(RanksDisagree, match=r"inv_freq .* has other values on rank 1"):
        take_values(model, plan_sharding(model), world)
    # Other models.
    model = tiny_llama(num_hidden_layers=2 + world.rank)
    with pytest.raises(RanksDisagree, match="values before sharding"):
        take_values(model, plan_sharding(model), world)


def check_some_are_real(world: World) -> None:
    """Ranks 0 and 2 have values, 1 and 3 have none: rank 2's are compared, and all get rank 0's."""
    model, plain = tied_llama(), tied_llama()
    if world.rank % 2:
        on_meta(model)
    sharded, sent = sharded_by(world, model)
    assert sent.parameters and bool(sent.tensors) == world.is_main
    check_equals(sharded, plain)


def check_all(world: World) -> None:
    check_meta_elsewhere(world)
    check_fsdp1(world)
    check_adapter_real_everywhere(world)
    check_real_everywhere(world)
    check_step(world)
    if world.size > 1:
        check_messages(world)
        check_refused(world)
    if world.size == 4:
        check_some_are_real(world)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_values_of_rank_0_reach_every_shard(num_ranks):
    run_ranks(num_ranks, check_all, timeout_s=240)
