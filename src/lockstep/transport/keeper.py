"""An update in, the same tensors kept under its version, out: the smallest complete `Receiver`, as a reference for real ones.

Tests, benchmarks and fake engines are built on it. It serves the old version until a commit has succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lockstep.errors import TransportError
from lockstep.transport.base import Ledger, digest_of, tensor_line
from lockstep.types import Bucket, Manifest


class Keeper:
    """Keeps a copy of what the last committed update carried."""

    def __init__(self) -> None:
        self.version = 0
        self.digest = ""
        self.tensors: Mapping[str, torch.Tensor] = {}
        self.aborts: list[str] = []
        """Reasons of all aborts, in order."""
        self._ledger: Ledger | None = None
        self._staged: dict[str, torch.Tensor] = {}

    def begin(self, manifest: Manifest) -> None:
        if self._ledger is not None:
            raise TransportError(f"version {manifest.version} cannot begin: another update is open; abort it first")
        self._ledger, self._staged = Ledger(manifest), {}

    def receive(self, bucket: Bucket) -> None:
        for name, tensor in bucket.items():
            self._open("receive").check(name, tensor)
            self._staged[name] = tensor.detach().clone(memory_format=torch.contiguous_format)

    def commit(self, digest: str) -> None:
        ledger = self._open("commit")
        ledger.check_complete()
        found = digest_of(tensor_line(name, tensor) for name, tensor in self._staged.items())
        if found != digest:
            raise TransportError(
                f"version {ledger.manifest.version}: the digest of what arrived is {found}, {digest} was sent: bytes changed on "
                "the way; send the update again"
            )
        self.version, self.digest, self.tensors = ledger.manifest.version, found, self._staged
        self._ledger, self._staged = None, {}

    def abort(self, reason: str) -> None:
        """Nothing to forget where no update is open."""
        if self._ledger is not None:
            self.aborts.append(reason)
        self._ledger, self._staged = None, {}

    def _open(self, call: str) -> Ledger:
        if self._ledger is None:
            raise TransportError(f"{call} came without a begin: no update is open")
        return self._ledger
