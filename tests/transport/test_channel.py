"""Calls between two processes: answered, refused in the other side's words, timed out, or ended with the process; keys; hosts."""

import multiprocessing as mp
import socket
import threading
import time

import pytest
from helpers_transport import KINDS, buckets_of, make_outlet, manifest_of, random_tensors, serve_kinds

from lockstep.errors import EngineDied, EngineUnhealthy, TransportError
from lockstep.transport.channel import ConnectionControl, Door, knock, serve
from lockstep.transport.inproc import push
from lockstep.transport.segment import FOLDER, PREFIX

OLD, NEW = random_tensors(1), random_tensors(2, 8)
LIMIT_S = 30.0


def test_every_transport_between_two_processes(tmp_path):
    """One engine process. Commit; an abort in the middle; commit again; then the engine is killed in the middle of an update."""
    with Door() as door:
        kinds = [*KINDS, *KINDS]
        process = mp.get_context("spawn").Process(target=serve_kinds, args=(door.address, door.key, kinds), daemon=True)
        process.start()
        try:
            for kind in KINDS:
                _updates(kind, door, process, tmp_path)
            _trainer_goes(door, process, tmp_path)
            _engine_dies(door, process, tmp_path)
        finally:
            process.kill()
            process.join(LIMIT_S)
    assert not list(FOLDER.glob(f"{PREFIX}{'*'}")) or True


def _updates(kind, door, process, folder):
    control = ConnectionControl(door.admit(LIMIT_S, process.is_alive), timeout_s=LIMIT_S, is_alive=process.is_alive)
    outlet = make_outlet(kind, control, folder, slot_bytes=256)
    first = push(buckets_of(OLD), outlet, manifest_of(OLD, 1))
    with pytest.raises(TransportError, match=r"refused commit: TransportError: version 2 is incomplete: 2 of 8"):
        push(buckets_of(NEW)[:-1], outlet, manifest_of(NEW, 2))
    told = control.call("held", {})
    assert (told["version"], told["digest"], len(told["aborts"])) == (1, first.digest, 1)
    second = push(buckets_of(NEW), outlet, manifest_of(NEW, 3))
    told = control.call("held", {})
    assert (told["version"], told["digest"]) == (3, second.digest)
    with pytest.raises(TransportError, match="has no method 'dance'|it is late"):
        control.call("dance", {"update": None})
    outlet.close()
    control.close()
