"""Ranks that agree go on; ranks that differ, die, stall or go elsewhere end in a named error on every rank."""

import os
import socket
import threading

import pytest
import torch
import torch.distributed as dist

from lockstep.config import DistConfig
from lockstep.dist import (
    World,
    agree,
    all_or_none,
    any_rank,
    data_phase,
    gather_texts,
    lost_ranks_named,
    max_over_ranks,
    start,
    sum_over_ranks,
    sum_stats,
)
from lockstep.errors import DataError, LockstepError, RankMissing, RanksDisagree
from lockstep.testing import collect_ranks, run_ranks
from lockstep.types import Stat


def say(world: World, phase: str, lines: list[str], **kwargs) -> None:
    agree(world, phase=phase, fingerprint="\n".join(lines), describe=lambda: lines, **kwargs)


def check_agreement(world: World) -> None:
    say(world, "plan", ["a float32 [2]", "b float32 [3]"])
    with pytest.raises(
        RanksDisagree, match=r"first at entry 2: rank 0 has 'b float32 \[3\]', rank 1 has 'b bfloat16 \[3\]'"
    ):
        say(world, "plan", ["a float32 [2]", "b float32 [3]" if world.rank == 0 else "b bfloat16 [3]"])
    with pytest.raises(RanksDisagree, match="its list ends here"):
        say(world, "plan", ["a", "b"][: 2 - world.rank])
    with pytest.raises(RanksDisagree, match=r"rank 0 has 'agreement 4: export', rank 1 has 'agreement 4: checkpoint'"):
        say(world, "export" if world.rank == 0 else "checkpoint", ["a"])
    say(world, "plan", ["still usable"])
    with pytest.raises(
        RanksDisagree, match=r"rank 0 has '[.]{3}a{60}ba{99}[.]{3}', rank 1 has '[.]{3}a{60}ca{99}[.]{3}'$"
    ):
        say(world, "plan", ["a" * 3000 + ("b" if world.rank == 0 else "c") + "a" * 3000])
    with pytest.raises(RanksDisagree, match=r"rank 0 has 'a{150}', rank 1 has '[.]{3}a{60}b{60}'$"):
        say(world, "plan", ["a" * 150 + "b" * 60 * world.rank])


def check_sums(world: World) -> None:
    assert sum_over_ranks([1.0, world.rank], world) == [2.0, 1.0]
    assert max_over_ranks([world.rank, -world.rank], world) == [1.0, 0.0]
    assert any_rank(world.rank == 1, world)
    assert not any_rank(False, world)
    assert gather_texts(world, f"rank {world.rank}\n" * world.rank, phase="texts") == ["", "rank 1\n"]
    total = sum_stats({"reward": Stat(world.rank, 1 + world.rank)}, world)["reward"]
    assert (total.total, total.count, total.mean) == (1.0, 3.0, 1 / 3)
    with pytest.raises(RanksDisagree, match="kl"):
        sum_stats({"kl": Stat(0, 1)} if world.rank else {"reward": Stat(0, 1)}, world)


def check_all_or_none(world: World) -> None:
    with all_or_none(world, "reading"):
        pass
    expected = DataError if world.rank == 1 else LockstepError
    with pytest.raises(expected, match="no such column"), all_or_none(world, "reading"):
        if world.rank == 1:
            raise DataError("no such column")
    assert sum_over_ranks([1.0], world) == [2.0]


def check_two_ranks(world: World) -> None:
    check_agreement(world)
    check_sums(world)
    check_all_or_none(world)


def test_agreement_sums_and_shared_failure():
    run_ranks(2, check_two_ranks)


def dies(world: World) -> None:
    say(world, "plan", ["a"])
    if world.rank == 1:
        os._exit(3)
    with pytest.raises(RankMissing, match=r"rank 0 waited in 'export' for rank 1 \(last seen in 'plan'\)"):
        say(world, "export", ["a"], timeout_s=5)


def stalls(world: World) -> None:
    say(world, "plan", ["a"])
    if world.rank == 1:
        threading.Event().wait(6)
        return
    with pytest.raises(RankMissing, match=r"rank 1 \(last seen in 'plan'\).*limit 2 s"):
        say(world, "export", ["a"], timeout_s=2)


def test_a_rank_that_dies_is_named():
    outcomes = collect_ranks(2, dies, timeout_s=60)
    assert outcomes[0] == (True, None), outcomes[0][1]
    assert not outcomes[1][0]


def test_a_rank_that_stalls_is_named():
    assert run_ranks(2, stalls, timeout_s=60) == [None, None]


def loses_peer_in_data_phase(world: World) -> None:
    if world.rank == 1:
        os._exit(3)
    with pytest.raises(RankMissing, match="rank 1"), data_phase(world, "update"):
        dist.all_reduce(torch.ones(1))


def test_a_lost_peer_in_a_data_collective_is_named():
    assert collect_ranks(2, loses_peer_in_data_phase, timeout_s=60)[0] == (True, None)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def as_rank(monkeypatch, rank: int, **variables: str) -> None:
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **variables}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, "address already in use.* set MASTER_PORT to a free one"),
        (1, "rank 1: rendezvous at 127.0.0.1:[0-9]+ did not answer within 1 s"),
    ],
)
def test_a_port_of_somebody_else_is_named(monkeypatch, listener, rank, said):
    as_rank(monkeypatch, rank, MASTER_PORT=str(listener.getsockname()[1]))
    with pytest.raises(LockstepError, match=said):
        start("cpu", DistConfig(timeout_s=1))


def test_a_rank_that_never_comes_ends_the_wait(monkeypatch):
    as_rank(monkeypatch, 0, MASTER_PORT="0")  # 0: whichever port is free
    with pytest.raises(LockstepError, match=r"1/2 clients joined\. Check that all 2 ranks were started"):
        start("cpu", DistConfig(timeout_s=1))


@pytest.mark.parametrize("place", ["no/such/folder/store", "", "notes.txt"])
def test_a_store_that_cannot_be_one_is_refused(monkeypatch, tmp_path, place):
    (tmp_path / "notes.txt").write_text("left by somebody")
    as_rank(monkeypatch, 0, LOCKSTEP_STORE=str(tmp_path / place))
    with pytest.raises(LockstepError, match=r"LOCKSTEP_STORE is .*must be a new file in a folder that exists"):
        start("cpu", DistConfig(timeout_s=1))


def test_a_port_that_is_no_number_is_named(monkeypatch):
    as_rank(monkeypatch, 0, MASTER_PORT="29x")
    with pytest.raises(LockstepError, match="MASTER_PORT must be a whole number; it is '29x'"):
        start("cpu", DistConfig(timeout_s=1))


def dies_in_a_block(world: World) -> None:
    if world.rank == 0:
        named = r"rank 0 waited in 'rollout' for rank 1 \(last seen in 'rollout'\)"
        with pytest.raises(RankMissing, match=named), all_or_none(world, "rollout"):
            pass
        return
    with all_or_none(world, "rollout"):
        os._exit(3)


def dies_outside_of_any_phase(world: World) -> None:
    say(world, "plan", ["a"])
    if world.rank == 1:
        os._exit(3)
    # Neither the rank that waits nor one that announced as much is said to be late.
    with (
        pytest.raises(RankMissing, match=r"rank 0 waited in 'plan' for a rank that came too, .* one of: rank 1 "),
        lost_ranks_named(world),
    ):
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_dies_between_collectives_is_named_with_its_phase():
    for check in (dies_in_a_block, dies_outside_of_any_phase):
        outcome = collect_ranks(2, check, timeout_s=60)[0]
        assert outcome == (True, None), outcome[1]


def test_one_rank_needs_no_group():
    world = World()
    say(world, "plan", ["a"])
    assert sum_over_ranks([2.0], world) == [2.0]
    with pytest.raises(DataError), all_or_none(world, "reading"):
        raise DataError("x")
