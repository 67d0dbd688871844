"""What the harness found: ranks out of step, samples after a failed sync, another version under an old name. And the harness can fail."""

import json
import time

import pytest
import torch

from lockstep.dist import agree, gather_texts
from lockstep.errors import EngineDied, LockstepError, RanksDisagree, StaleWeights
from lockstep.rollout import hf_weights
from lockstep.testing import run_ranks
from lockstep.testing_faults.engine import EngineHost
from lockstep.testing_faults.plan import Fault, Setup
from lockstep.testing_faults.reference import DRAW, PROBES, SAMPLING, make_fault_model, write_version
from lockstep.testing_faults.session import HarnessError, Session

KILLED = Fault("engine", "kill", "generate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_fault_model(tmp_path_factory.mktemp("model"))


def generate(session):
    return session.serving.generate(PROBES, SAMPLING, num_samples=1, draw=DRAW)


def check_out_of_step(world):
    """Rank 1 has failed and says so; rank 0 agrees on an export. Both are told at once, and then agree on something else."""
    began = time.monotonic()
    with pytest.raises(RanksDisagree) as caught:
        if world.rank == 1:
            gather_texts(world, "other ValueError: out of disk " + "x" * 500, phase="sync")
        else:
            agree(world, phase="export", fingerprint="plan", describe=lambda: ["plan"])
    agree(world, phase="next", fingerprint="same", describe=lambda: [])
    assert gather_texts(world, f"rank {world.rank}", phase="then") == ["rank 0", "rank 1"]
    world.is_torn = True
    with pytest.raises(LockstepError, match="after it had failed inside an exchange of tensors"):
        gather_texts(world, "", phase="last")
    return str(caught.value), time.monotonic() - began


def test_a_rank_that_failed_meets_one_that_goes_on():
    (left, took), (right, _) = run_ranks(2, check_out_of_step)
    for said in (left, right):
        assert "rank 0 has 'agreement 1: export'" in said and "where it says 'other ValueError: out of disk" in said
    assert took < 5


def check_lost_engine(world, folder, desk):
    """An engine that is lost while the trainer has moved on is not given the new weights under the old version's name."""
    session = Session(world, Setup("shm", "adapter", folder), desk=desk)
    session.next_version()
    with pytest.raises(StaleWeights, match="no version is known to be served"):
        generate(session)
    session.clean_sync()
    engine = session.serving.engine
    engine.arm(KILLED)
    session.check_serving()  # unmoved: started again, sent again, and the samples are right
    write_version(session.sharded, 2)
    engine.arm(KILLED)
    with pytest.raises(StaleWeights, match="the trainer's weights are no longer those"):
        generate(session)
    with pytest.raises(StaleWeights, match="no version is known to be served"):
        generate(session)
    session.next_version()
    session.clean_sync()
    assert engine.num_restarts == 2
    engine.inner._max_restarts = 2
    engine.arm(KILLED)
    with pytest.raises(EngineDied, match=r"started again 2 times(.|\n)*It had failed with"):
        generate(session)
    session.close()


def test_an_engine_that_is_lost_gets_the_version_that_it_had_or_nothing(folder):
    with EngineHost() as host:
        run_ranks(1, check_lost_engine, folder, host.desk)


def check_sabotage(world, folder):
    """Engines and checks that are broken on purpose; each must be found."""
    session = Session(world, Setup("inproc", "adapter", folder))
    session.next_version()
    session.clean_sync()
    assert session.look() == "serves +0"
    engine = session.serving.engine.inner
    said = []

    def found(act) -> None:
        with pytest.raises(HarnessError) as caught:
            act()
        said.append(str(caught.value))

    engine._version = 0  # new weights under an old name
    found(session.look)
    engine._version = 1
    parameter = next(value for name, value in engine._adapter._parameters.items() if "lora_B" in name)
    with torch.no_grad():
        parameter.zero_()  # one torn tensor
    found(session.look)
    hf_weights._check_digest = lambda *_: None
    session.serving._canary = None  # it would see the damage
    flip = Fault("bucket", "flip", "bucket", 0, 1, 3)
    found(lambda: session.run(0, flip))
    found(lambda: session.run(1, Fault("trainer", "stall", "begin", at=9)))
    return json.dumps(said)


def test_the_harness_finds_what_is_broken_on_purpose(folder):
    said = json.loads(run_ranks(1, check_sabotage, folder)[0])
    assert "says that it serves version 0" in said[0] and "says that it serves version 1" in said[1]
    assert "'refused' was due; rank 0 came to 'served'" in said[2] and "the fault never struck" in said[3]
