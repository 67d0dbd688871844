"""One update in, the same update of several receivers (replicas of an engine), out.

What happens when one fails is what an operator expects of a version number: *all replicas serve it, or the sync has failed.*

- Before the commits, an error of one aborts all: each serves its old version, or refuses (as its kind of update allows).
- A commit that fails on some while others succeed cannot be taken back. The sync fails, its error says who has the update, and
  the ones that missed the version are *stale*: `stale` names them and why, and nothing may be sampled from them. The
  next update goes to all of them again, and a successful commit makes a replica whole.
- An error says by its class what is to be done: `EngineDied` or `EngineUnhealthy` where a replica is gone or does not answer (it
  is started again), `TransportError` otherwise. Of a single receiver it is that receiver's own error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from lockstep.errors import EngineDied, EngineSilent, EngineUnhealthy, TransportError
from lockstep.transport.base import Receiver
from lockstep.types import Bucket, Manifest


class Fanout:
    """A `Receiver` in front of others, by name. Every call goes to all of them at once; all are waited for."""

    def __init__(self, receivers: Mapping[str, Receiver]):
        if not receivers:
            raise ValueError("a fan-out needs at least one receiver; none came")
        self._receivers = dict(receivers)
        self._pool = ThreadPoolExecutor(max_workers=len(receivers), thread_name_prefix="lockstep-fanout")
        self._stale: dict[str, str] = {}
        self._lost: set[str] = set()
        self._version = 0
        self._has_settled = True

    @property
    def stale(self) -> Mapping[str, str]:
        """Replicas that must not serve, and why: they missed a version that others have."""
        return dict(self._stale)

    @property
    def lost(self) -> frozenset[str]:
        """Replicas that were gone or did not answer since the last begin: to ask them again costs a limit of time."""
        return frozenset(self._lost)

    def begin(self, manifest: Manifest) -> None:
        """See `Receiver.begin`. A refusal of one aborts those that had begun."""
        self._version, self._has_settled = manifest.version, False
        self._lost.clear()
        errors = self._all(lambda name: self._receivers[name].begin(manifest))
        if errors:
            failure = self._failure("begin", errors)
            self._abort(self._receivers.keys() - errors.keys(), "another replica refused to begin", failure)
            raise failure

    def receive(self, bucket: Bucket) -> None:
        """See `Receiver.receive`."""
        self.each("a bucket", lambda name: self._receivers[name].receive(bucket))

    def commit(self, digest: str) -> None:
        """See `Receiver.commit`. Where some fail and others do not, the failed ones are `stale` from then on."""
        errors = self._all(lambda name: self._receivers[name].commit(digest))
        self._has_settled = True
        for name in self._receivers.keys() - errors.keys():
            self._stale.pop(name, None)
        if not errors:
            return
        committed = [name for name in self._receivers if name not in errors]
        if committed:
            for name, error in errors.items():
                self._stale[name] = f"missed version {self._version}: {type(error).__name__}: {error}"
        failure = self._failure("the commit", errors, f"; those that committed it: {committed or 'none'}")
        self._abort(errors.keys(), "its commit failed", failure)
        raise failure

    def abort(self, reason: str) -> None:
        """See `Receiver.abort`. Nothing to do after a commit: each replica has ended its own."""
        if self._has_settled:
            return
        self._has_settled = True
        self.each("the abort", lambda name: self._receivers[name].abort(reason))

    def each(self, what: str, act: Callable[[str], None]) -> None:
        """`act` for every replica's name at once; all are waited for. Raises one error for all that failed (`what` names the act)."""
        errors = self._all(act)
        if errors:
            raise self._failure(what, errors)

    def close(self) -> None:
        """End the threads. The receivers are the caller's."""
        self._pool.shutdown(wait=True)

    def _abort(self, names: Collection[str], reason: str, failure: Exception) -> None:
        """Abort some because of `failure`, which is told what goes wrong on the way."""
        self._has_settled = True
        for name, error in self._all(lambda name: self._receivers[name].abort(reason), only=names).items():
            failure.add_note(f"{name} could not be told to abort: {type(error).__name__}: {error}")

    def _all(self, act: Callable[[str], None], only: Collection[str] | None = None) -> dict[str, Exception]:
        """Errors by replica, in the replicas' order."""
        chosen = [name for name in self._receivers if only is None or name in only]
        if len(chosen) == 1:  # no need of a thread, and an engine in this process is called from the one it knows
            found = {name: _raised(act, name) for name in chosen}
        else:
            flights = {name: self._pool.submit(_raised, act, name) for name in chosen}
            found = {name: flight.result() for name, flight in flights.items()}
        for name, error in found.items():
            if isinstance(error, EngineDied | EngineSilent):
                self._lost.add(name)
        return {name: error for name, error in found.items() if error is not None}

    def _failure(self, what: str, errors: Mapping[str, Exception], more: str = "") -> Exception:
        """One error that names every replica that failed; the first replica's own error is its cause."""
        first = next(iter(errors.values()))
        if len(self._receivers) == 1:
            return first
        told = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in errors.items())
        kinds = [kind for kind in (EngineDied, EngineUnhealthy) if any(isinstance(e, kind) for e in errors.values())]
        failure = (kinds or [TransportError])[0](
            f"version {self._version}: {what} failed on {len(errors)} of {len(self._receivers)} replicas: {told}{more}"
        )
        failure.__cause__ = first
        return failure


def _raised(act: Callable[[str], None], name: str) -> Exception | None:
    try:
        act(name)
    except Exception as error:
        return error
    return None
