"""What `lockstep plan` says of an export is what the export of a really sharded model then does."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model

import lockstep
from helpers_models import tiny_qwen3_moe
from lockstep.dist import World
from lockstep.export.cost import export_costs
from lockstep.sharding.skeleton import skeleton
from lockstep.testing import run_ranks, tiny_llama

EXPERTS = dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])


def models(backend: str):
    """Merged by rows, by PEFT, and (FSDP1 cannot run them) fused experts."""
    yield get_peft_model(tiny_llama(), LoraConfig(r=8, target_modules=["q_proj", "down_proj"]))
    yield get_peft_model(tiny_llama(), LoraConfig(r=8, target_modules=["q_proj"], use_dora=True))
    if backend == "fsdp1":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of its own regular expressions for experts
        yield get_peft_model(tiny_qwen3_moe(), LoraConfig(r=4, **EXPERTS))


def check_traffic(world: World) -> None:
    for backend in ("fsdp2", "fsdp1"):
        for model in models(backend):
            torch.manual_seed(0)
            outline = skeleton(model, {})
            plan = lockstep.plan_sharding(outline)
            sharded = lockstep.shard(model, backend=backend)
            for bucket_bytes, dtype in ((1 << 20, None), (40_000, torch.bfloat16)):
                options = dict(bucket_bytes=bucket_bytes, wire_dtype=dtype)
                costs = export_costs(outline, plan, world_size=world.size, backend=backend, **options)
                assert len(costs) == 6 and not any(cost.refused for cost in costs)
                for cost in costs:
                    check_one(world, sharded, cost, bucket_bytes=bucket_bytes, dtype=dtype)


def check_one(world: World, sharded, cost, **options) -> None:
    what = {"adapter": lockstep.AdapterExport(), "merged": lockstep.MergedExport(), "full": lockstep.FullExport()}
    with lockstep.export_weights(sharded, what[cost.kind], to="all" if cost.to == "all" else 0, **options) as stream:
        nbytes = sum(bucket.nbytes for bucket in stream)
    moved = stream.traffic
    received: list = [None] * world.size
    torch.distributed.all_gather_object(received, moved.bytes_received)
    # The plan counts payload; a part's segments start at multiples of 16 bytes, and a window's end may cut one more.
    slack = 15 * (len(stream.plan.travels) + moved.num_exchanges)
    assert 0 <= max(received) - cost.received_max <= slack, (received, cost)
    assert 0 <= sum(received) - cost.received_total <= slack * world.size, (received, cost)
    assert moved.num_exchanges == cost.num_exchanges, cost
    assert (nbytes, len(stream.plan.specs)) == (
        (cost.nbytes if world.is_main or cost.to == "all" else 0),
        cost.num_tensors,
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_figures_of_the_plan_are_those_of_the_run(num_ranks):
    run_ranks(num_ranks, check_traffic, timeout_s=110)
