"""NCCL's wire against a fake group (no GPU here): it ends in time, aborts what it leaves, and always before NCCL's watchdog."""

import threading
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch

from lockstep.errors import TransportError
from lockstep.transport.wire import NcclWire, Sending


class FakeGroup:
    """A group whose broadcast is done after `polls` looks; never, if None."""

    polls: int | None = 3

    class Options:
        _timeout = timedelta()

    def __init__(self, store, rank, size, options):
        self.options, self.aborted, self.waited = options, 0, 0

    def broadcast(self, tensors, options):
        assert options.asyncOp and options.rootRank == 0
        self.left = self.polls
        return self

    def is_completed(self):
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0

    def wait(self):
        self.waited += 1

    def abort(self):
        self.aborted += 1


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())

    def wire(polls, timeout_s):
        monkeypatch.setattr(FakeGroup, "polls", polls)
        made = NcclWire(torch.distributed.HashStore(), 0, 2, timeout_s=timeout_s, device=torch.device("cpu"))
        return made, made._group

    return wire


PACKET = torch.zeros(64, dtype=torch.uint8)


def test_a_broadcast_that_completes(make):
    wire, group = make(3, 5.0)
    wire.send(PACKET, threading.Event())
    wire.receive(PACKET)
    assert (group.waited, group.aborted) == (2, 0)
    assert group.options._timeout == timedelta(seconds=20), "NCCL's watchdog, which ends the process, comes later"
    wire.close()
    assert group.aborted == 1


def test_a_peer_that_does_not_come_is_left_in_time(make):
    wire, group = make(None, 0.2)
    with pytest.raises(TransportError, match=r"took longer than 0.2 s; the communicator is aborted"):
        wire.receive(PACKET)
    assert group.aborted == 1
    with pytest.raises(TransportError, match="has been closed"):
        wire.send(PACKET, threading.Event())


def test_a_call_that_fails_stops_the_broadcast(make):
    wire, group = make(None, 30.0)
    began = time.monotonic()
    sending = Sending(wire, PACKET)
    assert sending.give_up() is None
    assert sending._done.wait(10.0)
    assert time.monotonic() - began < 10 and group.aborted == 1
    with pytest.raises(TransportError, match="a packet was not sent: NCCL's broadcast of 64 bytes was stopped"):
        sending.finish()
