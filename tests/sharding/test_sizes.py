"""Planned shard sizes are those of a really sharded model, to the byte; a head of its own unit scores tokens as before."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from helpers_models import tiny_gpt2, tiny_qwen3_moe
from lockstep.data.packing import pack
from lockstep.sharding.plan import MinParams, Modules, PlannedTensor, ShardingPlan, ShardUnit, plan_sharding
from lockstep.sharding.sizes import held_numels, shard_bytes
from lockstep.testing import run_ranks, tiny_llama
from lockstep.train.logprobs import token_logprobs
from lockstep.types import Sampling, TrainItem

ODD = dict(hidden_size=20, intermediate_size=33, vocab_size=65, num_attention_heads=2, num_key_value_heads=1)


def lora(model, **config):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=3, init_lora_weights=False, **config))


MODELS = {
    "uneven rows": lambda: lora(tiny_llama(**ODD), target_modules="all-linear"),
    "tied": lambda: lora(tiny_llama(**ODD, tie_word_embeddings=True), target_modules=["q_proj"]),
    "Conv1D and positions": tiny_gpt2,
    "experts": lambda: lora(
        tiny_qwen3_moe(), target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]
    ),
    "bfloat16": lambda: tiny_llama(**ODD).bfloat16(),
}
POLICIES = (None, MinParams(500), Modules(("**.layers.*", "**.mlp")))


def wrap_fsdp2(world, model, plan):
    mesh = init_device_mesh("cpu", (world.size,))
    for unit in deepest_first(plan):
        fully_shard(model.get_submodule(unit.module), mesh=mesh)
    return model


def wrap_fsdp1(world, model, plan):
    def wrap(module):
        return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))

    for unit in deepest_first(plan):
        if unit.module:
            parent, _, leaf = unit.module.rpartition(".")
            model.get_submodule(parent)._modules[leaf] = wrap(model.get_submodule(unit.module))
    return wrap(model)


def deepest_first(plan):
    return sorted(plan.units, key=lambda unit: -unit.module.count(".") if unit.module else 1)


def check_sizes(world):
    told = 0
    for name, make in MODELS.items():
        for policy in POLICIES:
            if isinstance(policy, Modules) and name == "Conv1D and positions":
                continue
            plan = plan_sharding(make(), policy)
            model = wrap_fsdp2(world, make(), plan)
            real = {param: param.to_local() for param in model.parameters()}
            assert sum(local.nbytes for local in real.values()) == shard_bytes(plan, world.rank, world.size, "fsdp2")
            held = [count for unit in plan.units for count in held_numels(unit, world.rank, world.size, "fsdp2")]
            by_name = {key: param.to_local().numel() for key, param in model.named_parameters()}
            assert held == [by_name[tensor.name] for tensor in plan.parameters]
            told += check_fsdp1_sizes(world, make, plan)
    return told


def check_fsdp1_sizes(world, make, plan):
    model = wrap_fsdp1(world, make(), plan)
    handles = {
        module._handle.flat_param: module._handle
        for module in FullyShardedDataParallel.fsdp_modules(model)
        if module._handle
    }
    real = sum(flat.numel() * flat.element_size() for flat in handles)
    assert real == shard_bytes(plan, world.rank, world.size, "fsdp1"), plan.lines()
    held = sum(sum(held_numels(unit, world.rank, world.size, "fsdp1")) for unit in plan.units)
    mine = sum(info.numel_in_shard or 0 for flat in handles for info in flat._shard_param_infos if info.in_shard)
    assert held == mine
    return real


@pytest.mark.parametrize("size", [2, 4])
def test_shards_have_the_planned_bytes(size):
    told = run_ranks(size, check_sizes, timeout_s=240)
    assert len(set(told)) == 1 and told[0] > 0


def test_shares_add_up_to_the_tensor_at_every_size():
    plan = plan_sharding(MODELS["uneven rows"]())
    for size in (1, 2, 3, 5, 8, 200):
        for backend in ("fsdp1", "fsdp2"):
            for unit in plan.units:
                shares = [held_numels(unit, rank, size, backend) for rank in range(size)]
                assert [sum(each) for each in zip(*shares, strict=True)] == [tensor.numel for tensor in unit.parameters]
            held = [shard_bytes(plan, rank, size, backend) for rank in range(size)]
            assert max(held) == held[0]  # what `lockstep plan` shows of a unit is the first rank's
    assert sum(shard_bytes(plan, rank, 3, "fsdp2") for rank in range(3)) == sum(unit.nbytes for unit in plan.units)


def test_payloads_are_whole_on_each_rank_of_fsdp1_and_scalars_on_one_of_fsdp2():
    payload = PlannedTensor("a", (10, 2), torch.uint8, is_trainable=False)
    scale = PlannedTensor("b", (), torch.float32, is_trainable=False)
    plan = ShardingPlan((ShardUnit("", (payload, scale), ()),))
    assert [shard_bytes(plan, rank, 4, "fsdp1") for rank in range(4)] == [24] * 4
    assert [shard_bytes(plan, rank, 4, "fsdp2") for rank in range(4)] == [10, 6, 6, 2]
    assert [held_numels(plan.units[0], rank, 4, "fsdp1") for rank in (0, 1)] == [[20, 1], [0, 0]]


def score(model, chunk_tokens):
    items = [TrainItem(tuple(range(3, 9)), tuple(range(10, 17)), (), 1.0, group) for group in range(2)]
    (batch,) = pack(items, mode="padded", max_tokens=1000, pad_id=0)
    return token_logprobs(model, batch, sampling=Sampling(), chunk_tokens=chunk_tokens).logprobs


def check_head_unit(world):
    for targets in (["q_proj"], ["q_proj", "embed_tokens", "lm_head"]):
        for chunk_tokens in (1000, 4):
            reference = lora(tiny_llama(), target_modules=targets)
            expected = score(reference, chunk_tokens)
            expected.sum().backward()
            wanted = {name: param.grad for name, param in reference.named_parameters() if param.requires_grad}
            for wrap in (wrap_fsdp1, wrap_fsdp2):
                model = lora(tiny_llama(), target_modules=targets)
                wrapped = wrap(world, model, plan_sharding(model))
                for _ in range(2):
                    wrapped.zero_grad()
                    scored = score(wrapped, chunk_tokens)
                    scored.sum().backward()
                assert torch.equal(scored, expected)
                compare_gradients(wrapped, wanted)


def compare_gradients(wrapped, wanted):
    seen = 0
    is_fsdp1 = isinstance(wrapped, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True) if is_fsdp1 else torch.no_grad():
        for name, param in wrapped.named_parameters():
            key = name.replace("_fsdp_wrapped_module.", "")
            if key in wanted:
                grad = param.grad if is_fsdp1 else param.grad.full_tensor()
                torch.testing.assert_close(
                    grad, wanted[key], rtol=0, atol=1e-6
                )  # summed over two equal ranks, then halved
                seen += 1
    assert seen == len(wanted) > 0


def test_a_head_of_its_own_unit_is_gathered_where_logprobs_call_it():
    """The trainer puts its own forward on the head: the unit's hooks still fire, also when backward recomputes a chunk."""
    run_ranks(2, check_head_unit, timeout_s=240)


def test_a_module_without_parameters_is_no_unit():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert [unit.module for unit in plan_sharding(model, Modules(("*",))).units] == ["0", "2", ""]
