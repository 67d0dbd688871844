"""What every transport promises, on every transport: the same bits, the same digest, one transaction, every fault named."""

import json
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers_transport import KINDS, buckets_of, ends, held, manifest_of, random_tensors, updates
from lockstep.errors import TransportError
from lockstep.transport import wire
from lockstep.transport.inproc import push
from lockstep.transport.keeper import Keeper
from lockstep.types import Bucket, Manifest


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """Both ends of each transport, kept over all examples: one update after the other, as in a run."""
    with ExitStack() as stack:
        yield [stack.enter_context(ends(kind, tmp_path_factory.mktemp(kind), slot_bytes=256)) for kind in KINDS]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(updates(), st.integers(0, 1 << 40))
def test_the_same_bits_arrive_over_every_transport(every, update, version):
    """Against a receiver in the same process. What was sent is overwritten right after it was handed over (CASES B25)."""
    named, buckets = update
    manifest = manifest_of(named, version)
    reference = Keeper()
    expected = push(buckets, reference, manifest)
    for side in every:
        assert push(_wiped_after(buckets), side.outlet, manifest) == expected
        assert (side.keeper.version, side.keeper.digest) == (version, expected.digest)
        assert held(side.keeper) == expected.digest == held(reference)
        assert list(side.keeper.tensors) == [name for name, _ in named]


def _wiped_after(buckets):
    """The buckets; the memory of each is overwritten as soon as the receiver has returned, and restored in the end."""
    before = []
    try:
        for bucket in buckets:
            yield bucket
            for _, tensor in bucket.items():
                storage = tensor.untyped_storage()
                before.append((storage, storage.clone()))
                storage.fill_(1)
    finally:
        for storage, content in before:
            storage.copy_(content)


@pytest.fixture(params=KINDS)
def side(request, tmp_path):
    with ends(request.param, tmp_path, slot_bytes=256) as made:
        push(buckets_of(OLD), made.outlet, manifest_of(OLD, 1))
        yield made
        made.outlet.close()
        assert not list(tmp_path.glob("lockstep-*")), "shared memory is left behind"


OLD, NEW = random_tensors(1), random_tensors(2)


def refused(side, error=TransportError, match: str | None = None, *, version: int = 2, buckets=None) -> str:
    """An update that fails as named; the old version is still what is held, and the next update works."""
    with pytest.raises(error, match=match) as caught:
        push(buckets_of(NEW) if buckets is None else buckets, side.outlet, manifest_of(NEW, version))
    assert side.keeper.version == 1 and held(side.keeper) == side.keeper.digest
    side.control.heal()
    done = push(buckets_of(NEW), side.outlet, manifest_of(NEW, version + 1))
    assert (side.keeper.version, held(side.keeper)) == (version + 1, done.digest)
    return str(caught.value)


def _calls(side, change: Callable):
    """From now on `change(forward, method, payload, number of this method's calls)` stands in for the control's call."""
    counts: dict[str, int] = {}
    forward = side.control.call

    def call(method, payload):
        counts[method] = counts.get(method, 0) + 1
        return change(forward, method, json.loads(json.dumps(payload)), counts[method])

    side.outlet.control = Control(call)
    side.control.heal = lambda: setattr(side.outlet, "control", side.control)


class Control:
    def __init__(self, call: Callable):
        self.call = call


def _lose(forward, method, payload, number):
    return {} if (method, number) == ("receive", 2) else forward(method, payload)


def _repeat(forward, method, payload, number):
    if (method, number) == ("receive", 2):
        forward(method, payload)
    return forward(method, payload)


def _truncate(forward, method, payload, number):
    if (method, number) == ("receive", 2):
        payload["layout"]["nbytes"] -= 64
    return forward(method, payload)


def _announce_more(forward, method, payload, number):
    if (method, number) == ("receive", 2):
        payload["layout"]["nbytes"] += 1 << 20
    return forward(method, payload)


def _rename(forward, method, payload, number):
    if (method, number) == ("receive", 2):
        payload["layout"]["pieces"][0][0] += "x"
    return forward(method, payload)


def _late(forward, method, payload, number):
    if (method, number) == ("receive", 2):
        payload["update"] = "0" * 32
    return forward(method, payload)


@pytest.mark.parametrize("side", ["shm", "collective"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_lose, r"1 of \d+ packets were lost on the way, first \[1\]|acknowledged a packet .* did not read it"),
        (_repeat, "packet 1 came twice"),
        (_truncate, "layout is damaged"),
        (_announce_more, "cut short"),
        (_rename, r"unknown tensor 'layer.*x'.* nearest expected name"),
        (_late, "it is late, or its begin was refused"),
    ],
)
def test_damaged_calls_are_named_and_the_old_version_stays(side, fault, words, monkeypatch):
    monkeypatch.setattr(wire, "AFTER_ACK_S", 0.5)
    _calls(side, fault)
    refused(side, match=words)


@pytest.mark.parametrize("seq", [0, 2])
def test_one_flipped_bit_is_refused_at_the_commit(side, monkeypatch, seq):
    deliver = side.inlet._deliver

    def flip(number, bucket):
        if number == seq:
            tensor = bucket.tensors[-1][1]
            tensor.view(torch.uint8).reshape(-1)[5] ^= 1
        deliver(number, bucket)

    monkeypatch.setattr(side.inlet, "_deliver", flip)
    side.control.heal = monkeypatch.undo
    refused(side, match="the digest of what arrived is")


def test_the_order_of_packets_does_not_matter(side, monkeypatch):
    """Both halves arrive swapped, in copies, as if two calls had overtaken each other."""
    waiting, deliver = [], side.inlet._deliver
    before_commit = side.inlet._before_commit

    def keep(seq, bucket):
        waiting.insert(0, (seq, Bucket(tuple((name, tensor.clone()) for name, tensor in bucket.items()))))

    def deliver_all(payload):
        before_commit(payload)
        for seq, bucket in waiting:
            deliver(seq, bucket)

    monkeypatch.setattr(side.inlet, "_deliver", keep)
    monkeypatch.setattr(side.inlet, "_before_commit", deliver_all)
    done = push(buckets_of(NEW), side.outlet, manifest_of(NEW, 2))
    assert len(waiting) >= 3
    assert (side.keeper.version, held(side.keeper)) == (2, done.digest)


def test_an_incomplete_update_names_what_never_came(side):
    refused(side, match="2 of 6 tensors never came, first", buckets=buckets_of(NEW)[:-1])


def test_a_tensor_sent_twice_is_named(side):
    refused(side, match="'layer.0.weight' came twice", buckets=[*buckets_of(NEW), *buckets_of(NEW)[:1]])


def test_a_tensor_of_another_shape_is_named(side):
    wrong = [(name, tensor[:-1]) for name, tensor in NEW]
    refused(side, match=r"manifest says torch.float32 \[7, 3\], torch.float32 \[6, 3\] came", buckets=buckets_of(wrong))


def test_a_consumer_that_raises_ends_the_update_on_both_sides(side):
    def broken():
        yield from buckets_of(NEW)[:2]
        raise KeyError("the export failed")

    refused(side, KeyError, "the export failed", buckets=broken())
    assert "KeyError: 'the export failed'" in side.keeper.aborts[0]


@pytest.mark.parametrize("method", ["begin", "receive", "commit"])
def test_the_receivers_own_words_arrive(side, monkeypatch, method):
    def refuse(_):
        raise ValueError(f"no {method} today")

    monkeypatch.setattr(side.keeper, method, refuse)
    side.control.heal = monkeypatch.undo
    refused(side, ValueError, f"no {method} today")


def test_calls_out_of_order_are_named(side):
    for call, words in (
        (lambda: side.outlet.receive(buckets_of(NEW)[0]), "a bucket came without a begin"),
        (lambda: side.outlet.commit("x"), "commit came without a begin"),
    ):
        with pytest.raises(TransportError, match=words):
            call()
    side.outlet.abort("nothing is open")
    side.outlet.begin(manifest_of(NEW, 5))
    with pytest.raises(TransportError, match="another update is open"):
        side.outlet.begin(manifest_of(NEW, 6))
    side.outlet.abort("the test is done")
    assert side.keeper.aborts == ["the test is done"]
    refused(side, match="never came", buckets=[])


def test_a_trainer_that_comes_back_supersedes_what_its_predecessor_left_open(side, tmp_path):
    side.outlet.begin(manifest_of(NEW, 2))
    side.outlet.receive(buckets_of(NEW)[0])
    side.outlet._wait()
    (tmp_path / "second").mkdir()
    with ends(side.kind, tmp_path / "second", receiver=side.keeper) as second:
        second.control.inlet = side.inlet
        done = push(buckets_of(NEW), second.outlet, manifest_of(NEW, 3))
        assert (side.keeper.version, held(side.keeper)) == (3, done.digest)
        assert side.keeper.aborts == ["version 3 begins"]
        side.outlet.abort("too late, and of another update")
        assert side.keeper.version == 3


def test_an_engine_that_only_says_yes_is_found_out(side):
    """CASES B28: an engine that takes a payload and delivers it nowhere."""
    _calls(side, lambda forward, method, payload, number: {} if method == "commit" else forward(method, payload))
    assert "it does not say that it serves this update" in refused(side)


def test_a_step_that_changes_only_the_adapter_changes_what_is_held(side):
    """CASES B28: what arrives is the new adapter, not the old one or the base under its names."""
    names = ["base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight"]
    a, b = torch.ones(2, 8), torch.zeros(8, 2)
    for version in (2, 3):
        tensors = list(zip(names, (a, b), strict=True))
        push(buckets_of(tensors), side.outlet, manifest_of(tensors, version, "adapter"))
        got = side.keeper.tensors
        assert torch.equal(got[names[1]] @ got[names[0]], b @ a)
        assert float((b @ a).sum()) == {2: 0.0, 3: 64.0}[version]
        b += 0.5  # the optimizer's step


class Sleeper(Keeper):
    """CASES B29: deep sleep loses the weights; it takes no update before it is awake."""

    is_asleep = False

    def sleep(self) -> None:
        self.is_asleep, self.tensors = True, {}

    def begin(self, manifest: Manifest) -> None:
        if self.is_asleep:
            raise TransportError("the engine is asleep: wake it before an update")
        super().begin(manifest)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sleeping_engine_refuses_and_gets_everything_when_awake(kind, tmp_path):
    sleeper = Sleeper()
    with ends(kind, tmp_path, receiver=sleeper) as side:
        push(buckets_of(OLD), side.outlet, manifest_of(OLD, 1))
        sleeper.sleep()
        with pytest.raises(TransportError, match="the engine is asleep: wake it"):
            push(buckets_of(NEW), side.outlet, manifest_of(NEW, 2))
        sleeper.is_asleep = False
        push(buckets_of(NEW), side.outlet, manifest_of(NEW, 2))
        for name, tensor in NEW:
            assert torch.equal(sleeper.tensors[name], tensor)


def test_an_update_of_nothing_is_an_update(side):
    done = push([], side.outlet, manifest_of([], 9))
    assert (side.keeper.version, side.keeper.digest, done.nbytes) == (9, done.digest, 0)


def test_what_is_kept_is_the_receivers_own(side):
    """Writing into every slot after the update changes nothing that was kept."""
    slots = []
    deliver = side.inlet._deliver

    def watch(seq, bucket):
        slots.extend(tensor for _, tensor in bucket.items())
        deliver(seq, bucket)

    side.inlet._deliver = watch
    done = push(buckets_of(NEW), side.outlet, manifest_of(NEW, 2))
    for view in slots:
        view.fill_(-1)
    assert held(side.keeper) == done.digest
