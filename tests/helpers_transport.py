"""Tensors of every kind, buckets and controls in; transports between two ends of one or two processes out."""

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from lockstep.transport.base import Receiver, digest_of, tensor_line
from lockstep.transport.channel import knock, serve
from lockstep.transport.collective import CollectiveInlet, CollectiveOutlet
from lockstep.transport.disk import DiskInlet, DiskOutlet
from lockstep.transport.ends import Outlet, ReceiverInlet
from lockstep.transport.keeper import Keeper
from lockstep.transport.packet import DTYPES
from lockstep.transport.shm import ShmInlet, ShmOutlet
from lockstep.types import Bucket, Manifest, TensorSpec

KINDS = ("shm", "disk", "collective")
INLETS = {"shm": ShmInlet, "disk": DiskInlet, "collective": CollectiveInlet}

with warnings.catch_warnings():
    # torch warns of complex32 once per process, wherever the first such tensor is made.
    warnings.simplefilter("ignore", UserWarning)
    torch.empty(0, dtype=torch.complex32)


class Loop:
    """A control to an inlet in this process. Everything goes through JSON, as it would over a wire."""

    def __init__(self, inlet: Any):
        self.inlet = inlet
        self.calls: list[str] = []
        self.heal = lambda: None
        """Undoes the fault that a test has put in."""

    def call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(method)
        return json.loads(json.dumps(self.inlet.handle(method, json.loads(json.dumps(payload)))))


@dataclass
class Ends:
    """Both ends of a transport in this process."""

    outlet: Outlet
    control: Loop
    inlet: ReceiverInlet
    keeper: Keeper
    kind: str
    folder: Path


@contextmanager
def ends(kind: str, folder, *, receiver: Receiver | None = None, slot_bytes: int = 4096) -> Iterator[Ends]:
    """`folder`: for the transport `disk` and for the segments of `shm`, whose leaks are then seen."""
    keeper = receiver or Keeper()
    inlet = INLETS[kind](keeper)
    control = Loop(inlet)
    outlet = make_outlet(kind, control, folder, slot_bytes=slot_bytes)
    try:
        yield Ends(outlet, control, inlet, keeper, kind, folder)
    finally:
        outlet.close()
        inlet.close()


def make_outlet(kind: str, control, folder, *, slot_bytes: int = 4096, timeout_s: float = 20.0) -> Outlet:
    if kind == "shm":
        return ShmOutlet(control, slot_bytes=slot_bytes, folder=folder)
    if kind == "disk":
        return DiskOutlet(control, folder / "updates")
    return CollectiveOutlet(control, slot_bytes=slot_bytes, timeout_s=timeout_s)


def random_tensors(seed: int, num: int = 6, *, prefix: str = "layer") -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"{prefix}.{i}.weight", torch.randn(7, 3 + i, generator=generator)) for i in range(num)]


def manifest_of(tensors, version: int = 1, kind: str = "full") -> Manifest:
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
    return Manifest(version, kind, specs, {"r": 4} if kind == "adapter" else None)


def buckets_of(tensors, per_bucket: int = 2) -> list[Bucket]:
    return [Bucket(tuple(tensors[i : i + per_bucket])) for i in range(0, len(tensors), per_bucket)]


def held(keeper: Keeper) -> str:
    """Digest of what the keeper holds now, computed afresh."""
    return digest_of(tensor_line(name, tensor) for name, tensor in keeper.tensors.items())


def from_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern that the dtype has, NaNs with their payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, high, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1) if tensor.ndim else tensor,
    "every second": lambda tensor: tensor[::2] if tensor.ndim else tensor,
    "inner": lambda tensor: tensor[..., 1:] if tensor.ndim else tensor,
    "expanded": lambda tensor: tensor[None].expand(3, *tensor.shape),
    "conjugated": lambda tensor: tensor.conj() if tensor.dtype in (torch.complex64, torch.complex128) else tensor,
}


@st.composite
def tensors(draw) -> torch.Tensor:
    """Any dtype that travels, 0 to 3 dimensions, empty ones included, any strides."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    view = VIEWS[draw(st.sampled_from(sorted(VIEWS)))]
    return view(from_bytes(dtype, shape, draw(st.integers(0, 999))))


NAMES = st.one_of(
    st.sampled_from(
        ["__metadata__", "", "a b", "a\nb", "'\"\\", "módel.层.weight", "../up", "base_model.model.x.lora_A.weight"]
    ),
    st.text(st.characters(codec="utf-8"), max_size=12),
)


@st.composite
def updates(draw) -> tuple[list[tuple[str, torch.Tensor]], list[Bucket]]:
    """Named tensors, and the same cut into buckets of any sizes."""
    named = list(draw(st.dictionaries(NAMES, tensors(), max_size=8)).items())
    cuts = sorted({0, len(named), *draw(st.lists(st.integers(0, len(named)), max_size=4))})
    return named, [Bucket(tuple(named[a:b])) for a, b in itertools.pairwise(cuts)]


class Reporting:
    """An inlet that also tells what its keeper holds, to another process."""

    def __init__(self, inlet: ReceiverInlet, keeper: Keeper):
        self._inlet, self._keeper = inlet, keeper

    def handle(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        if method == "held":
            return {"version": self._keeper.version, "digest": held(self._keeper), "aborts": self._keeper.aborts}
        return self._inlet.handle(method, payload)


def serve_kinds(address, key: bytes, kinds: list[str]) -> None:
    """An engine's process: one connection after the other, a keeper behind each."""
    for kind in kinds:
        keeper = Keeper()
        inlet = INLETS[kind](keeper)
        try:
            serve(Reporting(inlet, keeper), knock(address, key))
        finally:
            inlet.close()
