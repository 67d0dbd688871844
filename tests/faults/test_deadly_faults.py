"""A rank that is killed, leaves, freezes or falls out of step in a sync: the others end with a name, and new ranks go on."""

import pytest

from lockstep.testing_faults.__main__ import setup_of
from lockstep.testing_faults.deadly import GROUP_TIMEOUT_S, check_deadly
from lockstep.testing_faults.plan import Fault, deadly_faults
from lockstep.testing_faults.reference import make_fault_model

AT_ONCE_S = 3.0
"""A rank whose process ended is missed long before any limit of time (4 s and more) has run out."""
ONE_LIMIT_S = GROUP_TIMEOUT_S + 1.5
"""A frozen rank is waited for once: for 4, 5 or 8 s, and nobody asks it a second time."""
FEW = [
    Fault("trainer", "kill", "sending", 1, 1),
    Fault("trainer", "kill", "bucket", 0, 1),
    Fault("trainer", "kill", "committed", 0),
    Fault("trainer", "raise", "sending", 1, 1),
    Fault("trainer", "freeze", "sending", 1, 1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_fault_model(tmp_path_factory.mktemp("model"))


def check(setup, faults):
    for row in check_deadly(setup, faults):
        ended = {error.partition(":")[0] for rank, error in row.errors.items() if rank != row.rank}
        assert ended == ({"RankMissing"} if setup.num_ranks > 1 else set()), row
        assert row.seconds < (ONE_LIMIT_S if "freeze" in row.fault else AT_ONCE_S), row


@pytest.mark.timeout(300)
def test_the_others_end_with_a_name_and_new_ranks_go_on(folder):
    check(setup_of("shm/adapter/2", folder), FEW)


@pytest.mark.faults
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", ["shm/adapter/2", "collective/merged/2", "disk/adapter/1", "inproc/adapter/2"])
def test_every_deadly_fault(folder, name):
    setup = setup_of(name, folder)
    faults = [fault for fault in deadly_faults(setup) if setup.num_ranks > 1 or fault.act in ("kill", "exit")]
    check(setup, faults)
