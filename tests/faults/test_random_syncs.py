"""Random syncs with faults: a few hundred always, 2,000 with `make test-faults`; every failure names its seed."""

import pytest

from lockstep.testing_faults.__main__ import SETUPS, setup_of
from lockstep.testing_faults.plan import LATEST, fault_of
from lockstep.testing_faults.reference import make_fault_model
from lockstep.testing_faults.session import LIMIT_S, check_scenarios

SEED = 20261
FEW = {
    "inproc/adapter/2": 70,
    "shm/adapter/1": 60,
    "shm/merged/2": 40,
    "disk/adapter/1": 40,
    "collective/adapter/1": 40,
}
MANY = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_fault_model(tmp_path_factory.mktemp("model"))


def check(folder: str, name: str, seed: int, count: int) -> None:
    setup = setup_of(name, folder)
    by_rank = check_scenarios(setup, seed, 0, count, timeout_s=1500)
    assert [len(rows) for rows in by_rank] == [count] * setup.num_ranks
    rows = [row for rows in by_rank for row in rows]
    assert {"served", "refused"} <= {row.outcome for row in rows}
    assert max(row.seconds for row in rows) <= LIMIT_S


@pytest.mark.parametrize("name", FEW)
@pytest.mark.timeout(300)
def test_a_few_random_syncs(folder, name):
    check(folder, name, SEED, FEW[name])


@pytest.mark.faults
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.timeout(1600)
def test_many_random_syncs(folder, name):
    assert MANY * len(SETUPS) >= 2000
    check(folder, name, SEED + 1, MANY)


def test_a_scenario_is_named_by_seed_and_number():
    setup = setup_of("collective/merged/2", "")
    faults = [fault_of(setup, 5, number) for number in range(400)]
    assert faults == [fault_of(setup, 5, number) for number in range(400)]
    assert faults != [fault_of(setup, 6, number) for number in range(400)]
    assert {fault.outcome for fault in faults} == {"served", "restarted", "refused"}
    assert {fault.place for fault in faults} == {"trainer", "bucket", "packet", "engine"}
    assert max(fault.at for fault in faults) == LATEST and {fault.rank for fault in faults} == {0, 1}
