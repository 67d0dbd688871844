"""Several replicas: all serve a version or the sync has failed; who missed one is named, and must not serve."""

import pytest

from helpers_transport import buckets_of, held, manifest_of, random_tensors
from lockstep.errors import TransportError
from lockstep.transport.fanout import Fanout
from lockstep.transport.inproc import push
from lockstep.transport.keeper import Keeper

OLD, NEW = random_tensors(1), random_tensors(2)


@pytest.fixture
def replicas():
    made = {name: Keeper() for name in ("a", "b", "c")}
    fanout = Fanout(made)
    push(buckets_of(OLD), fanout, manifest_of(OLD, 1))
    yield fanout, made
    fanout.close()


def versions(made):
    return {name: keeper.version for name, keeper in made.items()}


def broken(_):
    raise RuntimeError("out of memory")


def test_all_serve_the_same(replicas):
    fanout, made = replicas
    done = push(buckets_of(NEW), fanout, manifest_of(NEW, 2))
    assert {held(keeper) for keeper in made.values()} == {done.digest}
    assert versions(made) == {"a": 2, "b": 2, "c": 2} and not fanout.stale


@pytest.mark.parametrize("method", ["begin", "receive"])
def test_before_the_commit_one_that_fails_stops_all(replicas, monkeypatch, method):
    fanout, made = replicas
    monkeypatch.setattr(made["b"], method, broken)
    with pytest.raises(TransportError, match="failed on 1 of 3 replicas: b: RuntimeError: out of memory") as caught:
        push(buckets_of(NEW), fanout, manifest_of(NEW, 2))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert versions(made) == {"a": 1, "b": 1, "c": 1} and not fanout.stale
    assert [len(made[name].aborts) for name in "ac"] == [1, 1], "each is told once"
    monkeypatch.undo()
    push(buckets_of(NEW), fanout, manifest_of(NEW, 3))
    assert versions(made) == {"a": 3, "b": 3, "c": 3}


def test_one_that_misses_a_commit_is_stale_until_the_next(replicas, monkeypatch):
    fanout, made = replicas
    monkeypatch.setattr(made["b"], "commit", broken)
    words = r"version 2: the commit failed on 1 of 3 replicas: b: .*; those that committed it: \['a', 'c'\]"
    with pytest.raises(TransportError, match=words):
        push(buckets_of(NEW), fanout, manifest_of(NEW, 2))
    assert versions(made) == {"a": 2, "b": 1, "c": 2}
    assert dict(fanout.stale) == {"b": "missed version 2: RuntimeError: out of memory"}
    assert made["b"].aborts == ["its commit failed"] and not made["a"].aborts
    monkeypatch.undo()
    push(buckets_of(NEW), fanout, manifest_of(NEW, 3))
    assert versions(made) == {"a": 3, "b": 3, "c": 3} and not fanout.stale


def test_a_commit_that_all_refuse_makes_none_stale(replicas):
    fanout, made = replicas
    with pytest.raises(TransportError, match=r"failed on 3 of 3 replicas: .*those that committed it: none"):
        push(buckets_of(NEW)[:-1], fanout, manifest_of(NEW, 2))
    assert versions(made) == {"a": 1, "b": 1, "c": 1} and not fanout.stale


def test_an_abort_that_fails_too_is_noted(replicas, monkeypatch):
    fanout, made = replicas
    monkeypatch.setattr(made["b"], "receive", broken)
    monkeypatch.setattr(made["b"], "abort", broken)
    with pytest.raises(TransportError, match="a bucket failed on 1 of 3 replicas") as caught:
        push(buckets_of(NEW), fanout, manifest_of(NEW, 2))
    assert "the abort failed on 1 of 3 replicas: b" in caught.value.__notes__[0]
    assert made["a"].aborts and made["c"].aborts


def test_a_fanout_of_nobody_is_refused():
    with pytest.raises(ValueError, match="needs at least one receiver"):
        Fanout({})
