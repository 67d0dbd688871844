"""Buckets and a manifest in, one proven update of a receiver in the same process out.

The sender's digest is computed from what it hands over, the receiver's from what it will serve; `commit` compares them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.errors import LockstepError
from lockstep.transport.base import Receiver, digest_of, tensor_line
from lockstep.types import Bucket, Manifest


@dataclass(frozen=True, slots=True)
class Pushed:
    """What one update moved."""

    version: int
    digest: str
    nbytes: int


def push(buckets: Iterable[Bucket], receiver: Receiver, manifest: Manifest) -> Pushed:
    """begin, receive every bucket, commit; on any error abort and raise it, with a note where the abort fails too.

    Not collective: each rank feeds its own receiver.
    """
    lines: list[str] = []
    nbytes = 0
    receiver.begin(manifest)
    try:
        for bucket in buckets:
            lines += [tensor_line(name, tensor) for name, tensor in bucket.items()]
            nbytes += bucket.nbytes
            receiver.receive(bucket)
        digest = digest_of(lines)
        receiver.commit(digest)
    except BaseException as error:
        try:
            receiver.abort(f"{type(error).__name__}: {error}")
        except LockstepError as second:
            error.add_note(f"the receiver could not be told: {type(second).__name__}: {second}")
        raise
    return Pushed(manifest.version, digest, nbytes)
