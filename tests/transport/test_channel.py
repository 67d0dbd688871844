"""Calls between two processes: answered, refused in the other side's words, timed out, or ended with the process; keys; hosts."""

import multiprocessing as mp
import os
import signal
import socket
import threading
import time

import pytest

from helpers_transport import KINDS, buckets_of, make_outlet, manifest_of, random_tensors, serve_kinds
from lockstep.errors import EngineDied, EngineUnhealthy, TransportError
from lockstep.transport import ends
from lockstep.transport.channel import ConnectionControl, Door, knock, serve
from lockstep.transport.inproc import push
from lockstep.transport.keeper import Keeper
from lockstep.transport.segment import FOLDER, PREFIX
from lockstep.transport.shm import ShmInlet, ShmOutlet

OLD, NEW = random_tensors(1), random_tensors(2, 8)
LIMIT_S = 30.0


def test_every_transport_between_two_processes(tmp_path):
    """Commit, a refused commit, commit again; what is held is asked for afterwards. Then the engine stalls, and is killed."""
    before = set(FOLDER.glob(f"{PREFIX}*"))
    with Door() as door:
        kinds = [*KINDS, "shm", "collective"]
        process = mp.get_context("spawn").Process(target=serve_kinds, args=(door.address, door.key, kinds), daemon=True)
        process.start()
        try:
            for kind in KINDS:
                _updates(kind, door, process, tmp_path / kind)
            _stalls(door, process)
            _dies(door, process)
        finally:
            process.kill()
            process.join(LIMIT_S)
    assert set(FOLDER.glob(f"{PREFIX}*")) <= before, "shared memory is left behind"


def _updates(kind, door, process, folder):
    control = ConnectionControl(door.admit(LIMIT_S, process.is_alive), timeout_s=LIMIT_S, is_alive=process.is_alive)
    folder.mkdir()
    outlet = make_outlet(kind, control, folder, slot_bytes=256)
    first = push(buckets_of(OLD), outlet, manifest_of(OLD, 1))
    with pytest.raises(TransportError, match=r"refused commit: TransportError: version 2 is incomplete: 2 of 8"):
        push(buckets_of(NEW)[:-1], outlet, manifest_of(NEW, 2))
    told = control.call("held", {})
    assert (told["version"], told["digest"], len(told["aborts"])) == (1, first.digest, 1)
    second = push(buckets_of(NEW), outlet, manifest_of(NEW, 3))
    told = control.call("held", {})
    assert (told["version"], told["digest"]) == (3, second.digest)
    with pytest.raises(TransportError, match=r"dance came for update None, but none is open"):
        control.call("dance", {"update": None})
    outlet.close()
    control.close()


def _stalls(door, process):
    """A stopped engine is told from a dead one, and its late answer is not taken for the next call's."""
    control = ConnectionControl(door.admit(LIMIT_S, process.is_alive), timeout_s=LIMIT_S, is_alive=process.is_alive)
    outlet = ShmOutlet(control, slot_bytes=256)
    push(buckets_of(OLD), outlet, manifest_of(OLD, 1))
    os.kill(process.pid, signal.SIGSTOP)
    control._timeout_s = 0.5
    began = time.monotonic()
    with pytest.raises(EngineUnhealthy, match=r"did not answer begin within 0.5 s"):
        push(buckets_of(NEW), outlet, manifest_of(NEW, 2))
    assert time.monotonic() - began < 10
    os.kill(process.pid, signal.SIGCONT)
    control._timeout_s = LIMIT_S
    done = push(buckets_of(NEW), outlet, manifest_of(NEW, 3))
    assert control.call("held", {})["digest"] == done.digest
    outlet.close()
    control.close()


def _dies(door, process):
    """Killed between two buckets: the next call says so, and the update ends within seconds."""
    control = ConnectionControl(
        door.admit(LIMIT_S, process.is_alive),
        timeout_s=LIMIT_S,
        is_alive=process.is_alive,
        last_words=lambda: "Its last words: out of memory",
    )
    outlet = make_outlet("collective", control, None, slot_bytes=256)

    def killing():
        buckets = buckets_of(NEW)
        yield from buckets[:2]
        process.kill()
        process.join(LIMIT_S)
        yield from buckets[2:]

    began = time.monotonic()
    with pytest.raises(EngineDied, match="Its last words: out of memory") as caught:
        push(killing(), outlet, manifest_of(NEW, 2))
    assert time.monotonic() - began < 10
    assert caught.value.__notes__, "the failed abort and the packet's bytes are mentioned"
    assert outlet.group == "", "the next begin forms a new group"
    outlet.close()
    control.close()


def local(handle):
    """A control and what ends it; the inlet, a function here, is served by a thread."""
    mine, theirs = mp.Pipe()
    inlet = type("Inlet", (), {"handle": staticmethod(handle)})()
    thread = threading.Thread(target=serve, args=(inlet, theirs))
    thread.start()
    control = ConnectionControl(mine, timeout_s=LIMIT_S)

    def end():
        control.close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()

    return control, end


def test_errors_arrive_in_the_other_sides_words_and_the_channel_goes_on():
    def handle(method, payload):
        if method == "bad":
            raise KeyError("no such tensor")
        return {"sum": sum(payload["numbers"])}

    control, end = local(handle)
    assert control.call("add", {"numbers": [1, 2]}) == {"sum": 3}
    with pytest.raises(TransportError, match=r"refused bad: KeyError: 'no such tensor'"):
        control.call("bad", {})
    assert control.call("add", {"numbers": [3, 4]}) == {"sum": 7}
    end()


def test_a_trainer_that_is_gone_leaves_no_update_open():
    keeper, (mine, theirs) = Keeper(), mp.Pipe()
    thread = threading.Thread(target=serve, args=(ShmInlet(keeper), theirs))
    thread.start()
    outlet = ShmOutlet(ConnectionControl(mine, timeout_s=LIMIT_S), slot_bytes=256)
    push(buckets_of(OLD), outlet, manifest_of(OLD, 1))
    outlet.begin(manifest_of(NEW, 2))
    outlet.receive(buckets_of(NEW)[0])
    outlet._wait()
    mine.close()
    thread.join(LIMIT_S)
    assert keeper.aborts == ["the trainer's end is gone"] and keeper.version == 1
    with pytest.raises(EngineDied, match="closed the connection during abort"):
        outlet.abort("nobody hears it")
    outlet.close()


def test_an_abort_has_a_limit_of_its_own(monkeypatch):
    """The engine answers a begin and then nothing any more; a call costs the control's limit, the abort less."""
    monkeypatch.setattr(ends, "ABORT_S", 0.1)
    hung = threading.Event()

    class Hanging(Keeper):
        def abort(self, reason):
            hung.wait(LIMIT_S)

    with Door() as door:
        connection, admitted = _admit_while(door, lambda: knock(door.address, door.key))
    serving = threading.Thread(target=serve, args=(ShmInlet(Hanging()), connection))
    serving.start()
    outlet = ShmOutlet(ConnectionControl(admitted, timeout_s=LIMIT_S))
    outlet.begin(manifest_of(OLD, 1))
    began = time.monotonic()
    with pytest.raises(EngineUnhealthy, match=r"did not answer abort within 0\.1 s"):
        outlet.abort("enough")
    assert time.monotonic() - began < 5
    hung.set()
    outlet.close()
    admitted.close()
    serving.join(LIMIT_S)


def test_only_who_has_the_key_gets_in():
    with Door() as door, pytest.raises(mp.AuthenticationError):
        _admit_while(door, lambda: knock(door.address, b"wrong key of sixteen bytes"))


def test_a_silent_or_wrong_peer_does_not_keep_the_engine_out():
    """Neither a port scan that says nothing (until the time limit) nor one that talks nonsense."""
    with Door("127.0.0.1") as door:
        scan = socket.create_connection(door.address)
        scan.sendall(b"GET / HTTP/1.1\r\n\r\n")
        scan.close()
        connection, admitted = _admit_while(door, lambda: knock(door.address, door.key))
        admitted.send_bytes(b"hello")
        assert connection.recv_bytes() == b"hello"
        connection.close()
        admitted.close()
        silent = socket.create_connection(door.address)
        with pytest.raises(EngineUnhealthy, match=r"no engine connected .* within 0.6 s"):
            door.admit(0.6)
        silent.close()


def _admit_while(door, act):
    """What `act` returns in this thread, and what the door admitted meanwhile in another one."""
    found = []

    def admit():
        try:
            found.append(door.admit(2.0))
        except EngineUnhealthy as error:
            found.append(error)

    thread = threading.Thread(target=admit)
    thread.start()
    try:
        result = act()
    finally:
        thread.join(LIMIT_S)
    return result, found[0]


def test_waiting_for_an_engine_ends():
    with Door() as door:
        with pytest.raises(EngineUnhealthy, match=r"no engine connected .* within 0.3 s"):
            door.admit(0.3)
        with pytest.raises(EngineDied, match="ended before it connected"):
            door.admit(LIMIT_S, lambda: False)


def test_other_hosts_need_a_key():
    for key in (None, b"short"):
        with pytest.raises(
            ValueError, match=r"0.0.0.0 is reachable from other hosts: give a secret of at least 16 bytes"
        ):
            Door("0.0.0.0", key=key)
    with Door("127.0.0.1") as door:
        assert door.address[0] == "127.0.0.1" and len(door.key) == 32
    with Door("0.0.0.0", key=b"a secret of sixteen bytes") as door:
        assert door.key == b"a secret of sixteen bytes"
