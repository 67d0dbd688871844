"""Environment and `--nproc` in; where the ranks run (here, or started on this host), and what they need to know, out.

- RANK and WORLD_SIZE are set (torchrun, Kubernetes' PyTorchJob, lockstep's own launcher): this process is that rank.
- SLURM_PROCID and SLURM_NTASKS > 1 are set (srun): this process is that rank, and torch's variables are derived.
- neither: `--nproc` ranks on this host; by default one per CUDA device, or one. A single rank runs in this process.

`import_late` is the one place where torch and transformers come in: they cost seconds that `--help`, `--print-config` and
a mistyped option should not.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from lockstep.errors import ConfigError
from lockstep.failures import LAUNCH_DIR

_FIRST_PORT, _NUM_PORTS = 12000, 20000  # below the range (32768 and up) that Linux hands out by itself
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")  # NVIDIA, AMD, WSL
_SPLIT = re.compile(r"(?:\[[^\]]*\]|[^,\[\]])+")  # at the commas outside brackets
_GROUP = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Here:
    """This process is one rank."""

    rank: int
    size: int
    env: Mapping[str, str]
    """What the environment lacks for `dist.start`."""
    warning: str = ""


@dataclass(frozen=True, slots=True)
class StartHere:
    """This process starts the ranks on this host and waits for them."""

    nproc: int


def decide(env: Mapping[str, str], *, nproc: int | None, num_devices: Callable[[], int]) -> Here | StartHere:
    """Where the ranks run. `num_devices` is asked only if nothing else says how many there are. Raises `ConfigError`."""
    if "RANK" in env:
        given = Here(_number(env, "RANK"), _number(env, "WORLD_SIZE"), {})
        if nproc is not None and LAUNCH_DIR not in env:
            raise ConfigError(
                f"--nproc {nproc}: {given.size} ranks are already started (RANK is set); leave --nproc out"
            )
        if not 0 <= given.rank < given.size:
            raise ConfigError(f"RANK is {given.rank} and WORLD_SIZE {given.size}; RANK must be below WORLD_SIZE")
        return given
    if nproc is None and _is_slurm_task(env):
        return slurm_rank(env)
    count = nproc if nproc is not None else max(1, num_devices())
    return Here(0, 1, {}) if count == 1 else StartHere(count)


def slurm_rank(env: Mapping[str, str]) -> Here:
    """One task of srun as a rank: the first host of the step's node list is the master. Raises `ConfigError`."""
    rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS")
    local = _number(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else rank
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", "localhost")
    derived = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "MASTER_ADDR": env.get("MASTER_ADDR") or expand_nodes(nodes)[0],
        "MASTER_PORT": env.get("MASTER_PORT") or str(_port(env)),
    }
    if "SLURM_CPUS_PER_TASK" in env and "OMP_NUM_THREADS" not in env:
        derived["OMP_NUM_THREADS"] = env["SLURM_CPUS_PER_TASK"]
    alone = "SLURM_STEP_ID" not in env and "SLURM_STEPID" not in env
    warning = f"SLURM_NTASKS is {size}, but srun did not start this process; waiting for {size - 1} others. Use srun"
    return Here(rank, size, derived, warning if alone and rank == 0 else "")


def expand_nodes(nodes: str) -> list[str]:
    """SLURM's host list as host names: "n[01-03,07],m1" -> n01 n02 n03 n07 m1. Raises `ConfigError` for anything else."""
    parts = _SPLIT.findall(nodes)
    names = [name for part in parts for name in _expand_one(part)]
    if not names or not all(names) or ",".join(parts) != nodes:
        raise ConfigError(f"node list {nodes!r} cannot be read as host names; set MASTER_ADDR to the first one")
    return names


def import_late(module: str) -> ModuleType:
    """The explicit place for imports that are too slow for the command line (torch 2 s, transformers more)."""
    return importlib.import_module(module)


def count_devices(device: str) -> int:
    """CUDA devices that torch may use. Without a device file torch is not imported to be asked."""
    if device == "cpu" or not any(path for name in _DEVICE_FILES for path in Path("/dev").glob(name)):
        return 0
    return import_late("torch").cuda.device_count()


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    return "SLURM_PROCID" in env and "SLURM_NTASKS" in env and _number(env, "SLURM_NTASKS") > 1


def _port(env: Mapping[str, str]) -> int:
    """The same for every task of a step, and most likely another one for every other step on the same host."""
    job, step = env.get("SLURM_JOB_ID", "0"), env.get("SLURM_STEP_ID", "0")
    if not (job.isdecimal() and step.isdecimal()):
        raise ConfigError(f"SLURM_JOB_ID is {job!r} and SLURM_STEP_ID {step!r}, not numbers; set MASTER_PORT")
    return _FIRST_PORT + (int(job) * 31 + int(step)) % _NUM_PORTS


def _expand_one(name: str) -> Iterator[str]:
    pieces = _GROUP.split(name)  # fixed text at the even places, bracket contents at the odd ones
    choices = [list(_ranges(piece)) if place % 2 else [piece] for place, piece in enumerate(pieces)]
    for combination in itertools.product(*choices):
        yield "".join(combination)


def _ranges(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ConfigError(
                f"node list: [{text}] is not a list of numbers and ranges; set MASTER_ADDR to the first host"
            )
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def _number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not value.isdecimal():
        raise ConfigError(f"the environment variable {name} must be a whole number; it is {value!r}")
    return int(value)
