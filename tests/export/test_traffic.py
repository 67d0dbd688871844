"""What an export moves, counted at torch's own functions: as few exchanges as planned, only what is needed, and as reported.

An exchange is one window: at most one message from every rank to every rank that receives. There is one for each bucket that is
yielded, unless a tensor is larger than a window (it takes several), FSDP1's units end (one window completes several buckets'
worth), or LoRA factors are gathered ahead.
"""

from __future__ import annotations

import pytest

import lockstep
from helpers_export import BACKENDS, EXPORTS, Wire, counted_wire, sharded_llama
from helpers_matrix import collect, difference
from lockstep.dist import World
from lockstep.export import courier
from lockstep.export.exchange import Collective
from lockstep.export.stream import WeightStream
from lockstep.export.what import Export
from lockstep.sharding.base import Destination, ShardedModel
from lockstep.testing import run_ranks

AGREEMENT = ["control all_gather"] * 2
"""One on the plan, one on how every rank's consumer ended."""


def counted(sharded: ShardedModel, what: Export, **options) -> tuple[WeightStream, Wire, int]:
    """(the stream, what it moved, number of buckets)."""
    with counted_wire(sharded.world.control) as wire, lockstep.export_weights(sharded, what, **options) as stream:
        num_buckets = sum(1 for _ in stream)
    return stream, wire, num_buckets


def held_nbytes(stream: WeightStream, rank: int, travels: set[int]) -> int:
    return sum(stream.plan.extents[travel].nbytes_on(rank) for travel in travels)


def check_traffic(world: World) -> None:
    for backend in BACKENDS:
        sharded = sharded_llama(backend)
        for kind, what in EXPORTS.items():
            for to in ("all", 0):
                for bucket_bytes in (4096, 1 << 20):
                    stream, wire, num_buckets = counted(sharded, what, to=to, bucket_bytes=bucket_bytes)
                    case = (backend, kind, to, bucket_bytes)
                    check_reported(world, stream, wire, case)
                    check_needed(world, stream, wire, to, case)
                    if bucket_bytes == 1 << 20 and (to == "all" or world.is_main):
                        num_factors = len(stream.plan.factors)
                        assert stream.traffic.num_exchanges == num_buckets + num_factors, (
                            case,
                            stream.traffic,
                            num_buckets,
                        )


def check_reported(world: World, stream: WeightStream, wire: Wire, case: tuple) -> None:
    assert wire.control_calls == (AGREEMENT if world.size > 1 else []), (case, wire.control_calls)
    assert (stream.traffic.bytes_sent, stream.traffic.bytes_received) == (wire.sent, wire.received), (case, wire)
    assert set(wire.data_calls) <= {"isend", "irecv"}, (case, set(wire.data_calls))
    # At most one message to and one from every other rank in an exchange.
    assert len(wire.data_calls) <= 2 * (world.size - 1) * stream.traffic.num_exchanges, (case, len(wire.data_calls))


def check_needed(world: World, stream: WeightStream, wire: Wire, to: Destination, case: tuple) -> None:
    """To the byte, but for what aligns segments in a message (less than 16 for each of them)."""
    others, ranks = world.size - 1, range(world.size)
    factors = {travel for batch in stream.plan.factors for travel in batch.travels}
    main = {travel for each in stream.plan.deliveries for travel in each.travels}
    receives = to == "all" or world.is_main
    sent = others * held_nbytes(stream, world.rank, factors)
    sent += (others if to == "all" else 0 if world.is_main else 1) * held_nbytes(stream, world.rank, main)
    received = sum(held_nbytes(stream, rank, factors) for rank in ranks if rank != world.rank)
    if receives:
        received += sum(held_nbytes(stream, rank, main) for rank in ranks if rank != world.rank)
    slack = 16 * len(stream.plan.travels) * max(others, 1) * 2 if others else 0
    assert 0 <= wire.sent - sent <= slack, (case, wire.sent, sent)
    assert 0 <= wire.received - received <= slack, (case, wire.received, received)
    if not receives and not factors:
        assert wire.received == 0, case


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_as_little_as_planned_and_as_reported(num_ranks):
    run_ranks(num_ranks, check_traffic)


def check_collective(world: World) -> None:
    """What NCCL uses, forced onto gloo: the same values, counted alike."""
    for backend, lora in (("fsdp2", {}), ("fsdp1", {}), ("fsdp2", dict(use_dora=True))):
        sharded = sharded_llama(backend, lora=lora, model=dict(vocab_size=65))
        for what in EXPORTS.values():
            for options in (dict(bucket_bytes=4096), dict(bucket_bytes=4096, to=0), dict()):
                wanted = collect(sharded, what, **options)
                original, courier.make_exchange = courier.make_exchange, Collective
                try:
                    came = collect(sharded, what, **options)
                    stream, wire, _ = counted(sharded, what, **options)
                finally:
                    courier.make_exchange = original
                assert not difference(came, wanted), (backend, what, options, difference(came, wanted))
                assert len(wire.data_calls) == stream.traffic.num_exchanges, (backend, what, options)
                assert set(wire.data_calls) <= {"all_gather_into_tensor", "all_gather_single", "gather"}
                assert (stream.traffic.bytes_sent, stream.traffic.bytes_received) == (wire.sent, wire.received)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_collectives_bring_what_messages_bring(num_ranks):
    run_ranks(num_ranks, check_collective)
