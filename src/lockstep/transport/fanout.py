"""One update in, the same update of several receivers (replicas of an engine), out.

What happens when one fails is what an operator expects of a version number: *all replicas serve it, or the sync has failed.*

- Before the commits, an error of one aborts all: each serves its old version, or refuses (as its kind of update allows).
- A commit that fails on some while others succeed cannot be taken back. The sync fails, its error says who serves what, and
  the ones that missed the version are *stale*: `stale` names them and why, and whoever sends prompts leaves them out. The
  next update goes to all of them again, and a successful commit makes a replica whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from lockstep.errors import TransportError
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
        self._version = 0
        self._has_settled = True

    @property
    def stale(self) -> Mapping[str, str]:
        """Replicas that must not serve, and why: they missed a version that others have."""
        return dict(self._stale)

    def begin(self, manifest: Manifest) -> None:
        """See `Receiver.begin`. A refusal of one aborts those that had begun."""
        self._version, self._has_settled = manifest.version, False
        errors = self._all(lambda receiver: receiver.begin(manifest))
        if errors:
            failure = self._failure("begin", errors)
            self._abort(self._receivers.keys() - errors.keys(), "another replica refused to begin", failure)
            raise failure

    def receive(self, bucket: Bucket) -> None:
        """See `Receiver.receive`."""
        errors = self._all(lambda receiver: receiver.receive(bucket))
        if errors:
            raise self._failure("a bucket", errors)

    def commit(self, digest: str) -> None:
        """See `Receiver.commit`. Where some fail and others do not, the failed ones are `stale` from then on."""
        errors = self._all(lambda receiver: receiver.commit(digest))
        self._has_settled = True
        for name in self._receivers.keys() - errors.keys():
            self._stale.pop(name, None)
        if not errors:
            return
        committed = [name for name in self._receivers if name not in errors]
        if committed:
            for name, error in errors.items():
                self._stale[name] = f"missed version {self._version}: {type(error).__name__}: {error}"
        failure = self._failure("the commit", errors, f"; those that serve it: {committed or 'none'}")
        self._abort(errors.keys(), "its commit failed", failure)
        raise failure

    def abort(self, reason: str) -> None:
        """See `Receiver.abort`. Nothing to do after a commit: each replica has ended its own."""
        if self._has_settled:
            return
        self._has_settled = True
        errors = self._all(lambda receiver: receiver.abort(reason))
        if errors:
            raise self._failure("the abort", errors)

    def close(self) -> None:
        """End the threads. The receivers are the caller's."""
        self._pool.shutdown(wait=True)

    def _abort(self, names: Collection[str], reason: str, failure: TransportError) -> None:
        """Abort some because of `failure`, which is told what goes wrong on the way."""
        self._has_settled = True
        for name, error in self._all(lambda receiver: receiver.abort(reason), only=names).items():
            failure.add_note(f"{name} could not be told to abort: {type(error).__name__}: {error}")

    def _all(self, act: Callable[[Receiver], None], only: Collection[str] | None = None) -> dict[str, Exception]:
        """Errors by replica, in the replicas' order."""
        chosen = [name for name in self._receivers if only is None or name in only]
        flights = {name: self._pool.submit(act, self._receivers[name]) for name in chosen}
        found = {name: flight.exception() for name, flight in flights.items()}
        for error in found.values():
            if error is not None and not isinstance(error, Exception):
                raise error
        return {name: error for name, error in found.items() if isinstance(error, Exception)}

    def _failure(self, what: str, errors: Mapping[str, Exception], more: str = "") -> TransportError:
        """One error that names every replica that failed; the first replica's own error is its cause."""
        told = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in errors.items())
        failure = TransportError(
            f"version {self._version}: {what} failed on {len(errors)} of {len(self._receivers)} replicas: {told}{more}"
        )
        failure.__cause__ = next(iter(errors.values()))
        return failure
