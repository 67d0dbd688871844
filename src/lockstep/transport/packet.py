"""A bucket in, flat bytes with a layout out, and back; and a manifest to JSON and back.

A *packet* is what travels at once: whole tensors, one after the other, each at a multiple of 64 bytes. Its *layout* says
in JSON which tensor is where, so that the receiver can check it against its manifest without trusting the sender.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch

from lockstep.errors import TransportError
from lockstep.transport.base import raw_bytes
from lockstep.types import Bucket, Manifest, TensorSpec, WeightKind

ALIGN = 64
"""Bytes. A cache line, and a multiple of every dtype's size: a slice of the packet can be viewed as any of them."""

_DTYPE_NAMES = (
    "float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool",
    "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bits8", "bits16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
"""Every dtype that travels, by name. Left out: quantized ones (their scales are not in their bytes) and sub-byte integers,
which torch cannot copy. Which of these exist depends on the version of torch."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor's place in a packet."""

    spec: TensorSpec
    offset: int
    """In bytes, a multiple of `ALIGN`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor of a packet is."""

    pieces: tuple[Piece, ...]
    nbytes: int
    """Size of the packet, padding included."""


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to what a tensor of this size takes in a packet."""
    return -(-nbytes // ALIGN) * ALIGN


def dtype_name(dtype: torch.dtype) -> str:
    """E.g. "bfloat16". Raises `TransportError` for a dtype that cannot travel."""
    if dtype not in _NAMES:
        raise TransportError(f"{dtype} cannot travel; these can: {sorted(DTYPES)}")
    return _NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name. Raises `TransportError` where this version of torch has none."""
    if name not in DTYPES:
        raise TransportError(
            f"dtype {name!r} is not known to torch {torch.__version__} here; known are {sorted(DTYPES)}"
        )
    return DTYPES[name]


def layout_of(specs: Sequence[TensorSpec]) -> Layout:
    """These tensors one after the other."""
    pieces, offset = [], 0
    for spec in specs:
        pieces.append(Piece(spec, offset))
        offset += aligned(spec.nbytes)
    return Layout(tuple(pieces), offset)


def split_bucket(bucket: Bucket, capacity: int) -> Iterator[tuple[Layout, Bucket]]:
    """The bucket as packets of at most `capacity` bytes: whole tensors, in order; a bucket that fits is one packet.

    Raises `TransportError` for a tensor that is larger than `capacity`.
    """
    specs: list[TensorSpec] = []
    tensors: list[tuple[str, torch.Tensor]] = []
    filled = 0
    for name, tensor in bucket.items():
        dtype_name(tensor.dtype)
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        size = aligned(spec.nbytes)
        if size > capacity:
            raise TransportError(
                f"tensor {name!r} ({tensor.dtype} {list(tensor.shape)}) takes {size} bytes, a packet has {capacity}: "
                "the update's manifest does not list it, or lists a smaller one"
            )
        if specs and filled + size > capacity:
            yield layout_of(specs), Bucket(tuple(tensors))
            specs, tensors, filled = [], [], 0
        specs.append(spec)
        tensors.append((name, tensor))
        filled += size
    if specs:
        yield layout_of(specs), Bucket(tuple(tensors))


def packet_bytes(manifest: Manifest, at_least: int) -> int:
    """Capacity that every packet of this update fits into: `at_least`, or the largest tensor; never more than the update."""
    sizes = [aligned(spec.nbytes) for spec in manifest.specs]
    return max(min(aligned(at_least), sum(sizes)), max(sizes, default=0), ALIGN)


@torch.no_grad()
def pack(bucket: Bucket, layout: Layout, flat: torch.Tensor) -> None:
    """Write the bucket's tensors into `flat` (uint8, on any device), where the layout says. The padding is left as it is."""
    for (_, tensor), piece in zip(bucket.items(), layout.pieces, strict=True):
        flat[piece.offset : piece.offset + piece.spec.nbytes].copy_(raw_bytes(tensor))


def unpack(flat: torch.Tensor, layout: Layout) -> Bucket:
    """The packet's tensors as views of `flat` (uint8): a receiver copies what it keeps. See `layout_from_json` for checks."""
    tensors = []
    for piece in layout.pieces:
        part = flat[piece.offset : piece.offset + piece.spec.nbytes]
        tensors.append((piece.spec.name, part.view(piece.spec.dtype).view(piece.spec.shape)))
    return Bucket(tuple(tensors))


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """JSON-able; `layout_from_json` reads it."""
    return {"nbytes": layout.nbytes, "pieces": [[*_spec_to_json(piece.spec), piece.offset] for piece in layout.pieces]}


def layout_from_json(data: Mapping[str, Any], capacity: int) -> Layout:
    """Raises `TransportError` unless every tensor lies, aligned, inside the packet and the packet inside `capacity` bytes."""
    pieces = tuple(Piece(_spec_from_json(entry[:3]), int(entry[3])) for entry in data["pieces"])
    nbytes = int(data["nbytes"])
    if nbytes > capacity:
        raise TransportError(
            f"a packet of {nbytes} bytes is announced, but only {capacity} bytes came or fit: it is cut short"
        )
    for piece in pieces:
        end = piece.offset + piece.spec.nbytes
        if piece.offset < 0 or piece.offset % ALIGN or end > nbytes:
            raise TransportError(
                f"tensor {piece.spec.name!r} is said to be at bytes {piece.offset}..{end} of a packet of {nbytes}: "
                "the packet's layout is damaged"
            )
    return Layout(pieces, nbytes)


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """JSON-able; `manifest_from_json` reads it."""
    config = manifest.adapter_config
    return {
        "version": manifest.version,
        "kind": manifest.kind,
        "specs": [_spec_to_json(spec) for spec in manifest.specs],
        "adapter_config": None if config is None else dict(config),
    }


def manifest_from_json(data: Mapping[str, Any]) -> Manifest:
    """Raises `TransportError` for what no sender of this version writes."""
    if data["kind"] not in get_args(WeightKind):
        raise TransportError(f"an update of kind {data['kind']!r} came; known kinds are {list(get_args(WeightKind))}")
    return Manifest(
        version=int(data["version"]),
        kind=cast(WeightKind, data["kind"]),
        specs=tuple(_spec_from_json(entry) for entry in data["specs"]),
        adapter_config=data["adapter_config"],
    )


def _spec_to_json(spec: TensorSpec) -> list[Any]:
    return [spec.name, list(spec.shape), dtype_name(spec.dtype)]


def _spec_from_json(entry: Sequence[Any]) -> TensorSpec:
    name, shape, dtype = entry
    if any(int(size) < 0 for size in shape):
        raise TransportError(f"tensor {name!r} is said to have the shape {list(shape)}: sizes are not negative")
    return TensorSpec(str(name), tuple(int(size) for size in shape), dtype_named(dtype))
