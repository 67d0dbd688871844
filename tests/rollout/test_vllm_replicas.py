"""Two replicas of one engine, one of which fails in some phase of an update: never is one asked for the new version and the other
for the old one, the error says which it was, and a hanging one costs one limit of time."""

import threading
from types import SimpleNamespace

import pytest

from helpers_fake_vllm import FakeReplica, adapter, checkpoint
from lockstep.errors import EngineDied, EngineSilent, EngineUnhealthy, LockstepError, StaleWeights, TransportError
from lockstep.rollout.vllm import VllmEngine
from lockstep.rollout.vllm_fleet import Fleet
from lockstep.transport.base import ABORT_S
from lockstep.transport.inproc import push
from lockstep.types import Bucket, Draw, Manifest, Prompt, Sampling, TensorSpec

LIMIT_S = 600.0
TOKENIZER = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
PROMPTS = [Prompt(f"p{index}", (1, 2, index), "", "") for index in range(4)]
PHASES = {
    "adapter": ["shm.begin", "shm.receive", "shm.commit", "stage", "load", "serve"],
    "merged": ["pause", "shm.begin", "shm.receive", "shm.commit"],
}
CASES = [(kind, phase) for kind, phases in PHASES.items() for phase in phases]


class Failing(FakeReplica):
    """Fails at one phase, once: an error of its worker, a process that is gone, or no answer within the limit."""

    at: str = ""
    how: str = ""
    is_hung: bool = False
    waited_s: float = 0.0
    """What its caller would have waited for it, all together."""

    def arm(self, at: str, how: str) -> None:
        self.at, self.how = at, how

    def passes(self, phase: str, limit_s: float = LIMIT_S) -> None:
        if phase == self.at:
            self.at = ""
            if self.how == "raise":
                raise TransportError(f"injected at {phase}")
            self.is_hung = True
        if self.is_hung:
            if self.how == "die":
                raise EngineDied(f"injected: gone at {phase}")
            self.waited_s += limit_s  # the test need not wait
            raise EngineSilent(f"injected: no answer to {phase} within {limit_s:g} s")

    def call(self, method, payload):
        self.passes(method, min(LIMIT_S, payload.get("limit_s", LIMIT_S)))
        return super().call(method, payload)

    def load_adapter(self, name, path):
        self.passes("load")
        super().load_adapter(name, path)

    def pause(self, *, abort):
        self.passes("pause")
        super().pause(abort=abort)

    def adapters(self):
        self.passes("adapters")
        return super().adapters()

    def is_healthy(self):
        return not self.is_hung


class Server:
    """Stands in for `OwnedServer`."""

    def restart(self):
        return FakeReplica()

    def close(self):
        pass


def two_replicas():
    good, bad = FakeReplica(), Failing()
    engine = VllmEngine(Fleet([good, bad], [Server(), Server()]), tokenizer=TOKENIZER, eos_ids=(), request_timeout_s=5)
    return engine, good, bad


def send(engine, version, kind):
    tensors, config = adapter(seed=version) if kind == "adapter" else (checkpoint(version), None)
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    buckets = [Bucket((item,)) for item in tensors.items()]
    return push(buckets, engine, Manifest(version, kind, specs, config))


def versions_asked(engine) -> set[int]:
    """Versions of the samples; none where the engine refuses."""
    try:
        samples = engine.generate(PROMPTS, Sampling(max_new_tokens=2), num_samples=1, draw=Draw(1, 2))
    except StaleWeights:
        return set()
    return {sample.policy_version for sample in samples}


@pytest.mark.parametrize(("kind", "phase"), CASES)
@pytest.mark.parametrize(("how", "error"), [("raise", TransportError), ("die", EngineDied), ("hang", EngineUnhealthy)])
def test_both_serve_a_version_or_the_sync_has_failed(kind, phase, how, error):
    engine, _, bad = two_replicas()
    send(engine, 1, kind)
    assert versions_asked(engine) == {1}
    bad.arm(phase, how)
    with pytest.raises(error) as caught:
        send(engine, 2, kind)
    assert bad.waited_s <= LIMIT_S + ABORT_S, "a hanging replica costs one limit, and that of the abort"
    assert "injected" in str(caught.value) and (
        phase == "pause" or "on 1 of 2 replicas: replica 1: " in str(caught.value)
    )
    assert versions_asked(engine) <= {1}, "only a version that both serve, or nothing"
    if how == "raise" and kind == "adapter" and phase != "serve":
        assert versions_asked(engine) == {1}, "the old one is there still"
    if how != "raise":
        engine.restart()
        assert engine.fleet.replicas[1] is not bad
    send(engine, 3, kind)
    assert versions_asked(engine) == {3} and [each.version for each in engine.fleet.served] == [3, 3]
    engine.close()


@pytest.mark.parametrize("how", ["raise", "die", "hang"])
@pytest.mark.parametrize("kind", PHASES)
def test_an_abort_that_one_of_them_does_not_take_in(kind, how):
    """The trainer gives up, and one replica cannot be told: it is superseded by the next begin, or was started again."""
    engine, _, bad = two_replicas()
    send(engine, 1, kind)

    def broken_off():
        yield Bucket((next(iter((adapter(seed=2)[0] if kind == "adapter" else checkpoint(2)).items())),))
        bad.arm("shm.abort", how)
        raise LockstepError("the export failed")

    tensors, config = adapter(seed=2) if kind == "adapter" else (checkpoint(2), None)
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    with pytest.raises(LockstepError, match="the export failed"):
        push(broken_off(), engine, Manifest(2, kind, specs, config))
    assert bad.waited_s <= ABORT_S
    assert versions_asked(engine) <= {1}
    if how != "raise":
        engine.restart()
    send(engine, 3, kind)
    assert versions_asked(engine) == {3}
    engine.close()


def test_updates_of_several_replicas_are_side_by_side():
    """Each replica's begin waits until the other's has come."""
    meet = threading.Barrier(2)

    class Waiting(FakeReplica):
        def call(self, method, payload):
            if method == "shm.begin":
                meet.wait(10)
            return super().call(method, payload)

    engine = VllmEngine(Fleet([Waiting(), Waiting()]), tokenizer=TOKENIZER, eos_ids=())
    send(engine, 1, "adapter")
    assert versions_asked(engine) == {1}
    engine.close()
