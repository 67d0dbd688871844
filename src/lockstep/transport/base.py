"""Contract between whoever has weights and whoever serves them: `begin(manifest) -> receive(bucket)* -> commit(digest) | abort`.

In: a manifest (version, names, shapes, dtypes) and buckets of whole tensors under checkpoint names.
Out: the receiver serves exactly those tensors as that version, or still what it served before, or refuses to generate.

The digest is over bytes, names, shapes and dtypes, and does not depend on the order of arrival: xxh3-128 per tensor (about
10 GB/s here; it guards against accidents, not against an adversary), then SHA-256 over the sorted lines.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable
from typing import Any, Protocol, cast

import torch
import xxhash

from lockstep.errors import TransportError
from lockstep.types import Bucket, Manifest, TensorSpec

ABORT_S = 5.0
"""Limit of the call that tells an engine of an abort. It comes after a failure, often of an engine that does not answer any more:
that must not cost another whole limit. One that misses the call is told by the next begin, or by its connection's end."""


class Receiver(Protocol):
    """The engine's end. Calls come in the order begin, receive*, then commit or abort."""

    def begin(self, manifest: Manifest) -> None:
        """Stop generating; prepare for exactly the tensors that the manifest lists. Raises `TransportError` if it cannot serve them."""
        ...

    def receive(self, bucket: Bucket) -> None:
        """Take some tensors. What is kept is copied. Raises `TransportError` for unknown, repeated or mis-shaped tensors."""
        ...

    def commit(self, digest: str) -> None:
        """Check completeness and the digest of what will be served, then serve it as the manifest's version."""
        ...

    def abort(self, reason: str) -> None:
        """Forget the update. Serves the old version where it still has it; otherwise refuses to generate until the next commit."""
        ...


class Control(Protocol):
    """One round trip to the engine's side: how a transport's outlet (the trainer's end) reaches its `Inlet`."""

    def call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """The inlet's answer. Both ways JSON-able. Ends within the control's own limit of time, or within `payload["limit_s"]`
        seconds where a call brings that and it is less.

        Raises `TransportError` with the other side's own words (the error's class and message) where the inlet raised,
        `EngineDied` where the other side is gone and `EngineSilent` where it does not answer in time.
        """
        ...


class Inlet(Protocol):
    """The engine's end of a transport: turns the calls of a `Control` back into calls of its `Receiver`."""

    def handle(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Methods are those of `Receiver`, plus the transport's own. Raises what the receiver raises."""
        ...


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in row-major order as flat uint8, on its own device. May alias it; copies what is strided.

    Raises `TransportError` for a tensor without plain bytes (meta, sparse, quantized).
    """
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TransportError(
            f"a {tensor.dtype} tensor {list(tensor.shape)} ({tensor.layout}, on {tensor.device}) has no bytes to send; "
            "updates carry dense tensors with values: make it one before the export"
        )
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel() < 2:  # contiguous whatever its stride is, but not to `view`
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def tensor_line(name: str, tensor: torch.Tensor) -> str:
    """One tensor's part of the digest: name (quoted), dtype, shape and the xxh3-128 of its bytes in row-major order."""
    flat = raw_bytes(tensor).cpu().numpy()
    return f"{json.dumps(name)} {tensor.dtype} {list(tensor.shape)} {xxhash.xxh3_128_hexdigest(cast(bytes, flat))}"


def digest_of(lines: Iterable[str]) -> str:
    """Digest of a set of `tensor_line`s, whatever their order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


class Ledger:
    """What a receiver has taken of one update: refuses what the manifest does not list, knows what is missing."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self._expected = {spec.name: spec for spec in manifest.specs}
        if len(self._expected) != len(manifest.specs):
            raise TransportError(f"manifest of version {manifest.version} lists a tensor twice")
        self._seen: set[str] = set()

    def check(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        """Raises `TransportError` unless the tensor is one that the manifest lists, for the first time, as listed."""
        spec = self._expected.get(name)
        if spec is None:
            near = difflib.get_close_matches(name, self._expected, n=1, cutoff=0.0)
            raise TransportError(
                f"unknown tensor {name!r} in version {self.manifest.version}; the nearest expected name is {near}"
            )
        if name in self._seen:
            raise TransportError(f"tensor {name!r} came twice in version {self.manifest.version}")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise TransportError(
                f"tensor {name!r}: manifest says {spec.dtype} {list(spec.shape)}, {tensor.dtype} {list(tensor.shape)} came"
            )
        self._seen.add(name)
        return spec

    def check_complete(self) -> None:
        """Raises `TransportError` naming what never came."""
        missing = [name for name in self._expected if name not in self._seen]
        if missing:
            raise TransportError(
                f"version {self.manifest.version} is incomplete: {len(missing)} of {len(self._expected)} tensors never came, "
                f"first {missing[:3]}"
            )
