"""An exception that ends a rank in; what its user is told, once for all ranks, and the exit code, out.

Errors that lockstep raises on purpose (`LockstepError`) are told as a message; any other exception keeps its traceback,
and LOCKSTEP_TRACEBACK=1 shows every one. Exit codes: 2 what was given is wrong (recipe, data, model), 1 the run failed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lockstep.errors import ConfigError, DataError, LockstepError, ModelError, RankMissing

LAUNCH_DIR = "LOCKSTEP_LAUNCH_DIR"
"""Environment variable: folder in which ranks of lockstep's own launch leave their failures for the launcher to tell."""
EXIT_INPUT, EXIT_FAILED, EXIT_INTERRUPTED = 2, 1, 130


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended."""

    rank: int
    kind: str
    """Class of the exception; a signal's name for a rank that was killed."""
    message: str
    trace: str
    is_expected: bool
    """The message is enough: it was raised on purpose."""
    exit_code: int
    at: float
    """time.monotonic() when it was seen; comparable between processes of one host."""


def describe(error: Exception, rank: int) -> Failure:
    expected = isinstance(error, LockstepError)
    code = EXIT_INPUT if isinstance(error, ConfigError | DataError | ModelError) else EXIT_FAILED
    trace = "".join(traceback.format_exception(error))
    return Failure(rank, type(error).__name__, str(error), trace, expected, code, time.monotonic())


def deliver(failure: Failure, env: Mapping[str, str]) -> None:
    """Tell the user, or leave it to whoever started the ranks, so that N ranks with one error tell it once.

    lockstep's own launcher collects the failures. Under torchrun the ranks of a host share a folder, and the first to
    claim a message there tells it. Elsewhere (srun) every rank tells its own, but only rank 0 more than its first line.
    """
    if LAUNCH_DIR in env:
        leave(failure, Path(env[LAUNCH_DIR]))
    elif (shared := _torchrun_dir(env)) is not None:
        if _claim(shared, failure):
            tell([failure])
    elif failure.rank == 0:
        tell([failure])
    else:
        tell([replace(failure, message=failure.message.partition("\n")[0], is_expected=True)])


@contextmanager
def at_work(env: Mapping[str, str]) -> Iterator[None]:
    """Leaves a mark for lockstep's own launcher while the block runs: a rank that ends inside it did not finish, whatever
    its exit code says (code of the user's may call os._exit)."""
    if LAUNCH_DIR not in env:
        yield
        return
    mark = _mark(Path(env[LAUNCH_DIR]), env["RANK"])
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def left_at_work(folder: Path, rank: int) -> bool:
    """Did this rank, which has ended, end inside `at_work`?"""
    return _mark(folder, str(rank)).exists()


def _mark(folder: Path, rank: str) -> Path:
    return folder / f"at-work-{rank}"


def leave(failure: Failure, folder: Path) -> None:
    temporary = folder / f".failure-{failure.rank}"
    temporary.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    temporary.rename(folder / f"failure-{failure.rank}.json")


def collect(folder: Path) -> list[Failure]:
    """What the ranks left, in rank order."""
    paths = sorted(folder.glob("failure-*.json"))
    return sorted((Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in paths), key=lambda f: f.rank)


def tell(failures: Sequence[Failure]) -> Failure:
    """Write to stderr what went wrong first, and return it; what others suffered from a killed rank is one line more."""
    first, *others = _causes_first(failures)
    same = [failure.rank for failure in failures if failure.message == first.message]
    lines = [_say(first, is_everywhere=0 in same)]
    if _was_killed(first):
        lines += [_aside(failure) for failure in others if failure.message != first.message][:1]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return first


def _causes_first(failures: Sequence[Failure]) -> list[Failure]:
    """A killed rank, then whoever failed first; an error that only reports another rank's comes last."""

    def is_consequence(failure: Failure) -> bool:
        quoted = (other.message for other in failures if other.message and other.message != failure.message)
        return failure.kind == RankMissing.__name__ or any(message in failure.message for message in quoted)

    return sorted(failures, key=lambda failure: (not _was_killed(failure), is_consequence(failure), failure.at))


def _was_killed(failure: Failure) -> bool:
    return failure.kind.startswith("SIG")


def _say(failure: Failure, *, is_everywhere: bool) -> str:
    where = "" if is_everywhere else f" on rank {failure.rank}"
    if failure.is_expected and not os.environ.get("LOCKSTEP_TRACEBACK"):
        return f"lockstep: error{where}: {failure.message}"
    return f"lockstep: error{where}:\n{failure.trace or failure.message}".rstrip()


def _aside(failure: Failure) -> str:
    return f"  (rank {failure.rank} then ended with {failure.kind}: {failure.message.partition(chr(10))[0]})"


def _torchrun_dir(env: Mapping[str, str]) -> Path | None:
    """The folder that torchrun made for this host's ranks of this attempt, and deletes by itself."""
    error_file = Path(env.get("TORCHELASTIC_ERROR_FILE", ""))
    return error_file.parent.parent if error_file.parent.parent.name.startswith("attempt_") else None


def _claim(folder: Path, failure: Failure) -> bool:
    name = "told-" + hashlib.sha256(f"{failure.kind} {failure.message}".encode()).hexdigest()[:16]
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
