"""Exports never write to the live model: shards, PEFT's state and every later number are those of a run without exports.

Consumers that fail, leave, or keep everything, ranks that die and process groups that break are part of that.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lockstep
from helpers_export import BACKENDS, EXPORTS, shard_lines, sharded_llama
from helpers_matrix import collect, difference
from lockstep.dist import World
from lockstep.errors import IncompleteExport, RankMissing
from lockstep.export import stream as stream_module
from lockstep.export.what import Export
from lockstep.sharding.base import ShardedModel
from lockstep.testing import collect_ranks, run_ranks

ONE_LAYER = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=24, vocab_size=32)
TOKENS = torch.arange(1, 9)[None]


def peft_state(sharded: ShardedModel) -> list[str]:
    """What a merge, a switch of adapters or a walk with `eval()` would leave behind."""
    lines = []
    for name, module in sharded.module.named_modules():
        lines.append(f"{name} training {module.training}")
        if isinstance(module, BaseTunerLayer):
            lines.append(f"{name} {module.merged_adapters} {module.active_adapters} {module.disable_adapters}")
    return lines + [f"{name} {param.requires_grad}" for name, param in sharded.module.named_parameters()]


def state(sharded: ShardedModel) -> list[str]:
    return shard_lines(sharded) + peft_state(sharded)


def check_many(world: World, num_exports: int) -> None:
    """Shared out between backends and adapters that are merged by rows (LoRA) and by PEFT (DoRA); kinds take turns."""
    kinds = list(EXPORTS.values())
    for backend in BACKENDS:
        for lora in ({}, dict(use_dora=True)):
            sharded = sharded_llama(backend, lora=lora, model=ONE_LAYER)
            before = state(sharded)
            first = [collect(sharded, what) for what in kinds]
            for index in range(3, num_exports // 6):
                last = collect(sharded, kinds[index % 3], bucket_bytes=(512, 1 << 20)[index % 2])
                if index + 3 >= num_exports // 6:
                    assert not difference(last, first[index % 3])
            assert state(sharded) == before, (backend, lora)


@pytest.mark.parametrize(("num_ranks", "num_exports"), [(1, 600), (2, 420)])
def test_a_thousand_exports(num_ranks, num_exports):
    run_ranks(num_ranks, check_many, num_exports)


def raises(world: World, sharded: ShardedModel) -> None:
    expected = ZeroDivisionError if world.rank == world.size - 1 else IncompleteExport
    with (
        pytest.raises(expected, match="on purpose"),
        lockstep.export_weights(sharded, lockstep.MergedExport(), bucket_bytes=2048) as stream,
    ):
        for _ in stream:
            if world.rank == world.size - 1:
                raise ZeroDivisionError("on purpose")


def fails_to_make_a_tensor(world: World, sharded: ShardedModel) -> None:
    """Not in an exchange: what came is turned into checkpoint tensors, and that fails on one rank."""
    failing = world.rank == world.size - 1
    original = stream_module.merge_scratch
    if failing:
        stream_module.merge_scratch = lambda *args: 1 // 0
    try:
        expected = ZeroDivisionError if failing else IncompleteExport
        with pytest.raises(expected, match="by zero"):
            collect(sharded, lockstep.MergedExport(), bucket_bytes=2048)
    finally:
        stream_module.merge_scratch = original


def breaks(world: World, sharded: ShardedModel) -> None:
    with lockstep.export_weights(sharded, lockstep.MergedExport(), bucket_bytes=2048) as stream:
        for _ in stream:
            if world.rank == 0:
                break


def never_iterates(world: World, sharded: ShardedModel) -> None:
    with lockstep.export_weights(sharded, lockstep.AdapterExport(), bucket_bytes=2048) as stream:
        if world.rank:
            list(stream)


def iterates_afterwards(world: World, sharded: ShardedModel) -> None:
    """CASES B25: a lazy iterator that outlives its block must not hand out something else, or end as if it were whole."""
    with lockstep.export_weights(sharded, lockstep.MergedExport(), bucket_bytes=2048) as stream:
        untouched = iter(stream)
    for late in (stream, untouched):
        with pytest.raises(RuntimeError, match="inside its `with` block"):
            next(iter(late))
    with lockstep.export_weights(sharded, lockstep.MergedExport(), bucket_bytes=2048) as stream:
        begun = iter(stream)
        next(begun)
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        next(begun)
    never_opened = lockstep.export_weights(sharded, lockstep.FullExport())
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        iter(never_opened)


CONSUMERS = (raises, fails_to_make_a_tensor, breaks, never_iterates, iterates_afterwards)


def check_consumers(world: World) -> None:
    for backend in BACKENDS:
        # The embedding's DoRA is merged by PEFT, on the scratch way, everything else by rows.
        sharded = sharded_llama(backend, lora=dict(use_dora=True), model=ONE_LAYER)
        before = state(sharded)
        whole = collect(sharded, lockstep.MergedExport())
        for consumer in CONSUMERS:
            consumer(world, sharded)
            assert state(sharded) == before, (backend, consumer.__name__)
            assert not difference(collect(sharded, lockstep.MergedExport()), whole), (backend, consumer.__name__)


def check_held(world: World) -> None:
    """Everything that was yielded is kept while the model trains, inside the block and beyond it (CASES E3: one rank too)."""
    for backend in BACKENDS:
        sharded = sharded_llama(backend, model=ONE_LAYER)
        for what in EXPORTS.values():
            held, copies = {}, {}
            with lockstep.export_weights(sharded, what, bucket_bytes=2048) as stream:
                for index, bucket in enumerate(stream):
                    held.update(bucket.items())
                    copies.update((name, tensor.clone()) for name, tensor in bucket.items())
                    if index == 0:
                        assert torch.is_grad_enabled()
            live = {sharded.local_flat(tensor.name).untyped_storage().data_ptr() for tensor in sharded.plan.parameters}
            assert live.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in held.values()), (backend, what)
            train_step(sharded)
            assert not difference(held, copies), (backend, what)
            if not isinstance(what, lockstep.FullExport):
                assert difference(collect(sharded, what), copies), "the step changed nothing"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_consumers_that_fail_leave_or_keep(num_ranks):
    run_ranks(num_ranks, check_consumers_and_held)


def check_consumers_and_held(world: World) -> None:
    check_consumers(world)
    check_held(world)


def train_step(sharded: ShardedModel) -> None:
    sharded.module(input_ids=TOKENS).logits.square().mean().backward()
    torch.optim.SGD([param for _, param in sharded.trainable()], lr=1.0).step()
    sharded.module.zero_grad()


def dies(world: World, backend: str, to: str | int) -> float:
    """The last rank is killed when it has its first bucket (or, receiving nothing, has sent its first window)."""
    last = world.size - 1
    sharded = sharded_llama(backend, model=dict(num_hidden_layers=4))
    before = shard_lines(sharded)
    if world.rank == last:
        sends = [0]
        original = sharded.local_flat

        def counting(name: str) -> torch.Tensor:
            sends[0] += 1
            if sends[0] == 25:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(name)

        sharded.local_flat = counting
    began = time.monotonic()
    phase = "export of base_model" if to == "all" or world.is_main else "(export of base_model|end of export)"
    named = rf"rank {world.rank} waited in '{phase}.*' for rank {last} \(last seen in 'export'\)"
    with pytest.raises(RankMissing, match=named):
        collect(sharded, lockstep.MergedExport(), bucket_bytes=8192, to=to)
    took = time.monotonic() - began
    assert shard_lines(sharded) == before
    if world.is_main:
        # The others, who get nothing from the dead rank, notice when this one leaves, as a job that failed does.
        dist.destroy_process_group()
    return took


@pytest.mark.parametrize(("num_ranks", "backend", "to"), [(2, "fsdp1", "all"), (4, "fsdp2", "all"), (4, "fsdp2", 0)])
def test_a_rank_that_is_killed_is_named_by_all_others(num_ranks, backend, to):
    *others, killed = collect_ranks(num_ranks, dies, backend, to, timeout_s=100)
    assert not killed[0] and "-9" in killed[1], killed
    for ok, took in others:
        assert ok, took
        assert took < 30  # nobody waits for the limit of 60 s


def breaks_the_group(world: World) -> None:
    sharded = sharded_llama("fsdp2", model=dict(num_hidden_layers=4))
    before = shard_lines(sharded)
    expected, said = (RankMissing, "for rank 1") if world.is_main else (ValueError, "process group")
    with (
        pytest.raises(expected, match=said),
        lockstep.export_weights(sharded, lockstep.FullExport(), bucket_bytes=4096) as stream,
    ):
        for _ in stream:
            if world.rank == 1 and dist.is_initialized():
                dist.destroy_process_group()
    assert shard_lines(sharded) == before


def test_a_process_group_that_breaks_midway_leaves_the_shards():
    run_ranks(2, breaks_the_group)


def trajectory(sharded: ShardedModel, export: Callable[[], None]) -> Iterator[object]:
    """Numbers of a short run, with `export` called wherever that could matter."""
    module = sharded.module
    optimizer = torch.optim.AdamW([param for _, param in sharded.trainable()], lr=0.1)
    export()  # before the first forward
    for step in range(2):
        module.eval()
        with torch.no_grad():
            yield module(input_ids=TOKENS + step).logits.clone()
        export()  # a forward without backward leaves the root gathered (CASES B59)
        module.train(step == 0)
        loss = module(input_ids=TOKENS + step).logits.square().mean()
        export()  # between forward and backward
        yield loss.detach().clone()
        loss.backward()
        export()
        yield from [param.grad.to_local().clone() if hasattr(param.grad, "to_local") else param.grad.clone()
                    for _, param in sharded.trainable() if param.grad is not None]  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        export()
        yield from shard_lines(sharded)
        with sharded.adapter_off(), torch.no_grad():
            yield module(input_ids=TOKENS).logits.clone()
    yield from peft_state(sharded)


def check_numbers(world: World) -> None:
    """Bit-equal to a run without exports."""
    for backend in BACKENDS:
        for options in (dict(), dict(reshard_after_forward=False), dict(checkpointing=True)):
            with_checkpointing = options.pop("checkpointing", False)
            runs = []
            for exports in (False, True):
                sharded = sharded_llama(backend, **options)
                if with_checkpointing:
                    apply_activation_checkpointing(
                        sharded.module, check_fn=lambda module: isinstance(module, LlamaDecoderLayer)
                    )
                    sharded = lockstep.attach(sharded.module)

                kinds = itertools.cycle(EXPORTS.values())

                def export(
                    sharded: ShardedModel = sharded, exports: bool = exports, kinds: Iterator[Export] = kinds
                ) -> None:
                    if exports:
                        collect(sharded, next(kinds), bucket_bytes=8192)

                runs.append(list(trajectory(sharded, export)))
            case = (backend, options, with_checkpointing)
            assert len(runs[0]) == len(runs[1]) > 20, case
            for index, (without, with_exports) in enumerate(zip(*runs, strict=True)):
                same = (
                    torch.equal(without, with_exports) if isinstance(without, torch.Tensor) else without == with_exports
                )
                assert same, (case, index)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_gives_the_same_numbers_with_exports_in_between(num_ranks):
    run_ranks(num_ranks, check_numbers)
