"""Faults of weight updates, for tests of one's own: setups and seeds in, rows of findings out (docs/faults.md).

    from lockstep.testing_faults import Setup, check_scenarios, make_fault_model
    check_scenarios(Setup("shm", "adapter", make_fault_model(folder), num_ranks=2), seed=1, first=0, count=100)

`inject.py` has what wraps an engine, a control and a sharded model of one's own.
"""

from lockstep.testing_faults.deadly import check_deadly
from lockstep.testing_faults.plan import Fault, Setup, deadly_faults, fault_of
from lockstep.testing_faults.reference import make_fault_model
from lockstep.testing_faults.session import HarnessError, check_scenarios

__all__ = [
    "Fault",
    "HarnessError",
    "Setup",
    "check_deadly",
    "check_scenarios",
    "deadly_faults",
    "fault_of",
    "make_fault_model",
]
