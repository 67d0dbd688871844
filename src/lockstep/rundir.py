"""A config in, its run directory out: new or resumed, locked, proven writable, and never another recipe's.

```
config.yaml      the resolved recipe           metrics.jsonl  one line per step     summary.json  what came out
checkpoints/     step-000010/ ...              eval.jsonl     one line per scoring  tensorboard/  event files
samples/         step-000010.jsonl ...
```
`files.py` has the atomic writes that everything in here is put down with; they can be imported from here too.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from lockstep.config import Config, build_config, dump_config
from lockstep.errors import CheckpointError, ConfigError
from lockstep.files import (
    atomic_dir,
    atomic_write_bytes,
    atomic_write_text,
    begin_dir,
    commit_dir,
    explain_os_errors,
    find_fault,
    remove_leftovers,
    temporary_dir,
)
from lockstep.yaml_text import read_yaml

__all__ = [
    "RunDir",
    "atomic_dir",
    "atomic_write_bytes",
    "atomic_write_text",
    "begin_dir",
    "commit_dir",
    "newest_adapter",
    "open_run_dir",
    "temporary_dir",
]

log = logging.getLogger(__name__)

MAY_CHANGE = ("run.num_steps", "run.max_train_seconds", "checkpoint.", "observe.", "eval.", "dist.", "sharding.")
"""Options that a resumed run may give anew. run.dir may differ too: a directory can be moved or named another way."""

_LOCK_WAIT_S = 3.0  # a killed run's ranks are gone, and its lock with them, within a moment
_PROBE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run, and on rank 0 the lock that keeps other runs out while it is open."""

    path: Path
    lock: int | None = None
    """File descriptor of the locked lock file; None on the other ranks."""

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evals(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def close(self) -> None:
        """Let other runs in. A process that ends, however it ends, does the same."""
        if self.lock is not None:
            os.close(self.lock)  # the lock goes with the file's last descriptor

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_run_dir(config: Config, *, resume: bool, is_main: bool = True) -> RunDir:
    """The directory `config.run.dir`: made and checked by rank 0 (`is_main`); other ranks get the paths only.

    Not collective. Call it before anything expensive. Raises `CheckpointError` when the directory cannot be written, is in
    use, holds a run and `resume` is false, or holds none, or another recipe's, and `resume` is true.
    """
    run = RunDir(Path(config.run.dir).expanduser())
    if not is_main:
        return run
    if resume and not run.config.is_file():
        raise CheckpointError(
            f"nothing to resume: {run.path} holds no config.yaml; leave --resume out to start a run there"
        )
    with explain_os_errors(run.path):
        run.path.mkdir(parents=True, exist_ok=True)
        run = RunDir(run.path, _lock(run.path))
    try:
        _prepare(run, config, resume=resume)
    except BaseException:
        run.close()
        raise
    return run


def newest_adapter(run_dir: Path) -> Path:
    """The adapter folder of the newest whole checkpoint; damaged ones are named. Raises `CheckpointError` if there is none."""
    found = {
        int(path.parts[-3].removeprefix("step-")): path.parent
        for path in (run_dir / "checkpoints").glob("step-*/adapter/adapter_config.json")
        if path.parts[-3].removeprefix("step-").isdecimal()
    }
    if not found:
        raise CheckpointError(f"{run_dir} holds no checkpoint yet; train first, or give --adapter DIR, or --base")
    for step in sorted(found, reverse=True):
        fault = find_fault(found[step].parent)
        if not fault:
            return found[step]
        log.warning("passing over checkpoint %s: %s", found[step].parent, fault)
    raise CheckpointError(f"no checkpoint in {run_dir / 'checkpoints'} is whole; give --adapter DIR, or --base")


def _prepare(run: RunDir, config: Config, *, resume: bool) -> None:
    if resume:
        _check_same_recipe(run, config)
    else:
        _check_vacant(run)
    for folder in (run.path, run.samples, run.checkpoints):
        for path in remove_leftovers(folder):
            log.info("removed %s, which an interrupted run left unfinished", path)
    _probe(run.path)
    with explain_os_errors(run.path):
        run.samples.mkdir(exist_ok=True)
        run.checkpoints.mkdir(exist_ok=True)
    atomic_write_text(run.config, dump_config(config))


def _lock(folder: Path) -> int:
    """Take the directory's lock, or say who has it. Waits a moment: a killed run's ranks may be about to go."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline, tick = time.monotonic() + _LOCK_WAIT_S, threading.Event()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < deadline:
                tick.wait(0.05)
                continue
            owner = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
            os.close(handle)
            raise CheckpointError(
                f"{folder} is in use by {owner}; wait for it, stop it, or set run.dir to another path"
            ) from error
        except OSError as error:
            log.warning(
                "%s: this file system has no locks (%s); nothing keeps two runs apart here", folder, error.strerror
            )
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return handle


def _probe(folder: Path) -> None:
    """Write and flush for real: permissions, quotas and full disks show up now and not after the first step."""
    probe = folder / "probe"
    atomic_write_bytes(probe, bytes(_PROBE_BYTES))
    with explain_os_errors(probe):
        probe.unlink()


def _check_vacant(run: RunDir) -> None:
    """A start that failed before its first step leaves only a config.yaml; that is no run, and is written over."""
    traces = [run.summary, run.metrics, *run.samples.glob("step-*"), *run.checkpoints.glob("step-*")]
    held = [path for path in traces if path.is_dir() or (path.exists() and path.stat().st_size > 0)]
    if held:
        raise CheckpointError(
            f"{run.path} already holds a run ({held[0].relative_to(run.path)}); go on with it by --resume, "
            "or set run.dir to another path"
        )
    if run.config.exists():
        _read_config(run)


def _check_same_recipe(run: RunDir, config: Config) -> None:
    there, here = _flatten(_read_config(run).model_dump(mode="json")), _flatten(config.model_dump(mode="json"))
    _say_if_schedule_moves(there, here)
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key) and not _may_change(key)]
    if keys:
        listed = "; ".join(f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in keys[:4])
        more = f" (and {len(keys) - 4} more)" if len(keys) > 4 else ""
        allowed = ", ".join(name + "*" if name.endswith(".") else name for name in MAY_CHANGE)
        raise CheckpointError(
            f"{run.path} holds another recipe's run: {listed}{more}. With --resume only {allowed} may change; "
            "undo the change, or start a new run in another run.dir"
        )


def _say_if_schedule_moves(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """The learning rate is a function of the step and of run.num_steps, unless it is constant."""
    steps, schedule = (there["run.num_steps"], here["run.num_steps"]), here["train.schedule"]
    if steps[0] != steps[1] and schedule != "constant":
        log.warning(
            "run.num_steps was %d and is %d: the %s schedule now ends there, so the learning rate goes on as in a run of %d "
            "steps and not from where it was",
            *steps,
            schedule,
            steps[1],
        )


def _may_change(key: str) -> bool:
    return key == "run.dir" or any(key == name or (name.endswith(".") and key.startswith(name)) for name in MAY_CHANGE)


def _read_config(run: RunDir) -> Config:
    try:
        tree = read_yaml(run.config.read_text(encoding="utf-8"))
        return build_config(tree if isinstance(tree, dict) else {}, source=str(run.config))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ConfigError) as error:
        raise CheckpointError(
            f"{run.config} is not a recipe of this lockstep version: {error}. Set run.dir to another path"
        ) from error


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"reward": [{"name": "x"}]} -> {"reward.0.name": "x"}."""
    return dict(_leaves(tree, prefix))


def _leaves(tree: Any, key: str) -> Iterator[tuple[str, Any]]:
    inner = tree if isinstance(tree, Mapping) else dict(enumerate(tree)) if isinstance(tree, list) else None
    if not inner:
        yield key, tree
    else:
        for name, value in inner.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
