"""A group of the transport's own: kept, dropped and formed again; never the default one; nobody waits for who does not come."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from helpers_transport import Loop, buckets_of, ends, held, manifest_of, random_tensors
from lockstep.errors import TransportError
from lockstep.transport.collective import CollectiveInlet, CollectiveOutlet
from lockstep.transport.inproc import push
from lockstep.transport.keeper import Keeper
from lockstep.transport.wire import host_store, make_wire, reach_store

OLD, NEW = random_tensors(1), random_tensors(2)


@pytest.fixture
def side(tmp_path):
    with ends("collective", tmp_path, slot_bytes=256) as made:
        yield made


def test_the_group_is_formed_once_and_is_not_the_default_one(side):
    for version in (1, 2, 3):
        push(buckets_of(NEW), side.outlet, manifest_of(NEW, version))
    assert side.control.calls.count("join") == 1
    assert not dist.is_initialized()


def test_after_a_failure_the_next_update_forms_the_group_again(side):
    push(buckets_of(OLD), side.outlet, manifest_of(OLD, 1))
    group = side.outlet.group
    with pytest.raises(TransportError, match="never came"):
        push(buckets_of(NEW)[:-1], side.outlet, manifest_of(NEW, 2))
    done = push(buckets_of(NEW), side.outlet, manifest_of(NEW, 3))
    assert held(side.keeper) == done.digest
    assert side.control.calls.count("join") == 2 and side.outlet.group != group


def test_an_engine_that_has_lost_the_group_gets_a_new_one(side):
    """It was restarted: another inlet, with no group."""
    push(buckets_of(OLD), side.outlet, manifest_of(OLD, 1))
    fresh = Keeper()
    side.control.inlet = CollectiveInlet(fresh)
    done = push(buckets_of(NEW), side.outlet, manifest_of(NEW, 2))
    assert held(fresh) == done.digest
    side.control.inlet.close()


def test_a_refused_join_ends_the_wait_at_once(side, monkeypatch):
    """The trainer's limit for forming the group is 20 s here."""

    def refuse(_):
        raise ValueError("no network card")

    monkeypatch.setattr(side.inlet, "_join", refuse)
    began = time.monotonic()
    with pytest.raises(ValueError, match="no network card"):
        push(buckets_of(NEW), side.outlet, manifest_of(NEW, 1))
    assert time.monotonic() - began < 5
    monkeypatch.undo()
    push(buckets_of(NEW), side.outlet, manifest_of(NEW, 2))


def test_an_engine_that_does_not_come_is_named_in_time():
    outlet = CollectiveOutlet(Loop(CollectiveInlet(Keeper(), token="b" * 16)), timeout_s=1.0, token="a" * 16)
    began = time.monotonic()
    with pytest.raises(
        TransportError, match=r"workers \[1\] of the engine did not come to the trainer's store in 1 s|join"
    ):
        push(buckets_of(NEW), outlet, manifest_of(NEW, 1))
    assert time.monotonic() - began < 10, "ends with another token meet nowhere, and say so in time"
    outlet.close()


def test_the_store_listens_on_loopback_only():
    store = host_store("127.0.0.1", 5.0)
    socket.create_connection(("127.0.0.1", store.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)


def test_other_hosts_need_a_token_at_both_ends(side):
    with pytest.raises(ValueError, match=r"0.0.0.0 is reachable from other hosts: give a secret"):
        CollectiveOutlet(side.control, host="0.0.0.0")
    CollectiveOutlet(side.control, host="0.0.0.0", token="t" * 16).close()
    with pytest.raises(ValueError, match=r"8.8.8.8 is reachable from other hosts: give a secret"):
        side.inlet._join({"host": "8.8.8.8", "port": 1, "timeout_s": 1.0, "group": "x"})


class Workers:
    """A control that reaches several workers of one engine, as vLLM's collective_rpc does."""

    def __init__(self, inlets):
        self._inlets = inlets
        self._pool = ThreadPoolExecutor(len(inlets))

    def call(self, method, payload):
        answers = list(self._pool.map(lambda inlet: inlet.handle(method, payload), self._inlets))
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    def close(self):
        self._pool.shutdown()


def test_one_outlet_serves_all_workers_of_an_engine():
    keepers = [Keeper(), Keeper(), Keeper()]
    inlets = [CollectiveInlet(keeper, rank=rank) for rank, keeper in enumerate(keepers, start=1)]
    control = Workers(inlets)
    outlet = CollectiveOutlet(control, num_receivers=3, slot_bytes=256, timeout_s=20.0)
    for version in (1, 2):
        done = push(buckets_of(NEW), outlet, manifest_of(NEW, version))
        assert [held(keeper) for keeper in keepers] == [done.digest] * 3
    outlet.close()
    for inlet in inlets:
        inlet.close()
    control.close()


def test_a_receiver_that_is_gone_ends_the_sending(tmp_path):
    """The call is swallowed, and the engine leaves the group: the packet's failure ends the update in time."""

    class Swallowing(Loop):
        def call(self, method, payload):
            if method == "receive":
                self.inlet._drop()
                return {}
            return super().call(method, payload)

    outlet = CollectiveOutlet(Swallowing(CollectiveInlet(Keeper())), slot_bytes=256, timeout_s=20.0)
    began = time.monotonic()
    with pytest.raises(TransportError, match=r"gloo could not send|did not read it from this group|were lost"):
        push(buckets_of(NEW), outlet, manifest_of(NEW, 1))
    assert time.monotonic() - began < 10
    outlet.close()


def test_a_sender_that_is_gone_ends_the_receiving():
    """The engine waits for a packet while the trainer leaves the group."""
    store = host_store("127.0.0.1", 20.0)
    made, limits = {}, {"timeout_s": 20.0, "host": "127.0.0.1", "device": "cpu"}
    joining = threading.Thread(target=lambda: made.update(sender=make_wire("gloo", store, 0, 2, **limits)))
    joining.start()
    receiver = make_wire("gloo", reach_store("127.0.0.1", store.port, 20.0), 1, 2, **limits)
    joining.join(20.0)
    timer = threading.Timer(0.2, made["sender"].close)
    timer.start()
    began = time.monotonic()
    with pytest.raises(TransportError, match="gloo could not receive 64 bytes"):
        receiver.receive(random_tensors(0)[0][1].new_zeros(64).byte())
    assert time.monotonic() - began < 10
    timer.join()


def test_a_packet_that_the_engine_refuses_to_read_is_not_left_waiting(tmp_path, monkeypatch):
    """The inlet leaves the group, which ends the trainer's message: gloo alone would hold it for its 20 s."""
    big = [("w", random_tensors(0)[0][1].new_ones(4 << 20))]
    with ends("collective", tmp_path) as side:
        push(buckets_of(OLD), side.outlet, manifest_of(OLD, 1))
        monkeypatch.setattr(side.inlet, "_expect", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            push(buckets_of(big), side.outlet, manifest_of(big, 2))
        for thread in threading.enumerate():
            if thread.name == "lockstep-send":
                thread.join(8.0)
                assert not thread.is_alive()
