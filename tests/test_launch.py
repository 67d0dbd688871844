"""Environments and node lists in, placements out: torchrun, SLURM, and ranks of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch import Here, StartHere, count_devices, decide, expand_nodes, import_late, slurm_rank

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
}


def no_devices() -> int:
    return 0


def never() -> int:
    raise AssertionError("the devices were counted though the number of ranks was given")


def test_one_rank_runs_here_and_several_are_started():
    assert decide({}, nproc=None, num_devices=no_devices) == Here(0, 1, {})
    assert decide({}, nproc=1, num_devices=never) == Here(0, 1, {})
    assert decide({}, nproc=2, num_devices=never) == StartHere(2)
    assert decide({}, nproc=None, num_devices=lambda: 4) == StartHere(4)
    assert decide({}, nproc=None, num_devices=lambda: 1) == Here(0, 1, {})


def test_torchrun_ranks_run_here():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert decide(env, nproc=None, num_devices=never) == Here(5, 8, {})


def test_torchrun_inside_slurm_is_torchrun():
    place = decide({**SLURM, "RANK": "0", "WORLD_SIZE": "2"}, nproc=None, num_devices=never)
    assert place == Here(0, 2, {})


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "0"}, "WORLD_SIZE must be a whole number; it is ''"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number; it is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be below WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK must be below WORLD_SIZE"),
        ({**SLURM, "SLURM_NTASKS": "many"}, "SLURM_NTASKS must be a whole number"),
        ({**SLURM, "SLURM_LOCALID": ""}, "SLURM_LOCALID must be a whole number"),
        ({**SLURM, "SLURM_JOB_ID": "a"}, "SLURM_JOB_ID is 'a'"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-"}, "cannot be read as host names"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-x]"}, "not a list of numbers and ranges"),
    ],
)
def test_bad_environments(env: dict[str, str], said: str):
    with pytest.raises(ConfigError) as caught:
        decide(env, nproc=None, num_devices=never)
    assert said in str(caught.value)


def test_nproc_beside_ranks_that_are_already_started():
    with pytest.raises(ConfigError, match="--nproc 2: 4 ranks are already started"):
        decide({"RANK": "0", "WORLD_SIZE": "4"}, nproc=2, num_devices=never)
    own = {"RANK": "0", "WORLD_SIZE": "4", "LOCKSTEP_LAUNCH_DIR": "/tmp/x"}
    assert decide(own, nproc=4, num_devices=never) == Here(0, 4, {})


def test_slurm_task_becomes_a_rank():
    place = decide(SLURM, nproc=None, num_devices=never)
    assert isinstance(place, Here)
    assert (place.rank, place.size, place.warning) == (3, 8, "")
    assert place.env == {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": place.env["MASTER_PORT"],
    }


def test_slurm_ports_agree_within_a_step_and_differ_between_steps():
    ports = {slurm_rank({**SLURM, "SLURM_PROCID": str(rank)}).env["MASTER_PORT"] for rank in range(8)}
    assert len(ports) == 1
    assert 12000 <= int(ports.pop()) < 32000
    others = {slurm_rank({**SLURM, "SLURM_JOB_ID": str(job)}).env["MASTER_PORT"] for job in range(4700, 4720)}
    steps = {slurm_rank({**SLURM, "SLURM_STEP_ID": str(step)}).env["MASTER_PORT"] for step in range(20)}
    assert len(others) == len(steps) == 20


def test_slurm_takes_what_is_set_already_and_the_step_s_own_nodes():
    env = {**SLURM, "SLURM_STEP_NODELIST": "gpu09", "MASTER_PORT": "5", "SLURM_CPUS_PER_TASK": "6"}
    place = slurm_rank(env)
    assert place.env["MASTER_ADDR"] == "gpu09"
    assert place.env["MASTER_PORT"] == "5"
    assert place.env["OMP_NUM_THREADS"] == "6"
    assert slurm_rank({**env, "MASTER_ADDR": "head"}).env["MASTER_ADDR"] == "head"
    assert "OMP_NUM_THREADS" not in slurm_rank({**env, "OMP_NUM_THREADS": "2"}).env


def test_slurm_without_srun_says_what_it_waits_for_once():
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert "Use srun" in slurm_rank({**batch, "SLURM_PROCID": "0"}).warning
    assert slurm_rank(batch).warning == ""


def test_slurm_job_of_one_task_starts_its_own_ranks():
    one = {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert decide(one, nproc=None, num_devices=lambda: 2) == StartHere(2)
    assert decide(SLURM, nproc=2, num_devices=never) == StartHere(2)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("localhost", ["localhost"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("a1,b[2-3],c-4", ["a1", "b2", "b3", "c-4"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("n[5],m", ["n5", "m"]),
        ("host.example.org", ["host.example.org"]),
    ],
)
def test_node_lists(nodes: str, expected: list[str]):
    assert expand_nodes(nodes) == expected


@pytest.mark.parametrize("nodes", ["", ",", "n[", "n[a-b]", "n[1-2-3]", "n[]"])
def test_bad_node_lists(nodes: str):
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        expand_nodes(nodes)


def test_devices_are_counted_by_torch_only_where_there_can_be_any():
    assert count_devices("cpu") == 0
    has_files = any(path for name in ("nvidia[0-9]*", "kfd", "dxg") for path in Path("/dev").glob(name))
    assert count_devices("auto") == (import_late("torch").cuda.device_count() if has_files else 0)
