"""What can be exported, and what an export's plan says: frozen values, no code that decides.

Glossary: *travel* a live tensor that ranks send, as a whole after all of them have sent their elements · *delivery* travels
that are needed together, and the tensors with checkpoint names that become of them · *group* deliveries whose collectives
are cut together (`schedule.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.export.hub import HubTensor
from lockstep.export.merge import RowsMerge, ScratchMerge
from lockstep.export.schedule import Extent
from lockstep.types import Manifest, TensorSpec, WeightKind


@dataclass(frozen=True, slots=True)
class AdapterExport:
    """The adapter's own tensors, under the names of a PEFT adapter file."""

    adapter: str | None = None
    """None: the active one."""
    base_embeddings: bool = False
    """Take the base weights of adapted embeddings along, as PEFT's own saving may; engines refuse them (PEFT PR #2879)."""


@dataclass(frozen=True, slots=True)
class MergedExport:
    """Every base weight with the adapter folded in, as PEFT would, under the hub checkpoint's names."""

    adapter: str | None = None
    """None: the active one."""
    untie: bool = False
    """Where the adapter is on one side of a tied weight: export both sides, each as PEFT's forward computes it, and say so in
    `notes`. Otherwise that is refused."""
    dequantize: bool = False
    """Merge into a quantised base in its dequantised form. Otherwise that is refused."""


@dataclass(frozen=True, slots=True)
class FullExport:
    """Every weight of the base model as it is, under the hub checkpoint's names. What adapters hold is not in it."""


Export = AdapterExport | MergedExport | FullExport


@dataclass(frozen=True, slots=True)
class Travel:
    """One live tensor on its way."""

    source: str
    """Live name that asked for it."""
    name: str
    """The name that the sharding plan has for the same tensor (another one where weights are tied)."""
    shape: tuple[int, ...]
    """As it travels: with the dimension that is dealt out in front."""
    dtype: torch.dtype
    """On the wire."""
    shard_dim: int = 0
    """Goes back from the front to this place on arrival."""
    is_buffer: bool = False
    merge: RowsMerge | None = None
    """What every rank adds to its own elements before it sends them."""

    def line(self) -> str:
        what = f" + {self.merge.scaling} * {self.merge.kind} {self.merge.b} @ {self.merge.a}" if self.merge else ""
        return f"{self.source} {self.dtype} {list(self.shape)} dim {self.shard_dim}{what}"


@dataclass(frozen=True, slots=True)
class Delivery:
    """Travels in, finished tensors out."""

    travels: tuple[int, ...]
    """Places in `ExportPlan.travels`."""
    outputs: tuple[TensorSpec, ...]
    """What is handed over."""
    scratch: tuple[ScratchMerge, ...] = ()
    """Merges made by PEFT itself on what has arrived, first."""
    late: tuple[RowsMerge, ...] = ()
    """Merges that could not be made before the weight travelled, since ranks hold columns of it; made on arrival as well."""
    hub: tuple[HubTensor, ...] = ()
    """Then, how checkpoint tensors are made of it; empty: the one travel is the one output."""
    is_as_sent: bool = False
    """The one travel is the one output to the bit: its shape and its dtype are on the wire what they are planned to be."""
    nbytes: int = field(init=False)
    """Of what is handed over."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(spec.nbytes for spec in self.outputs))

    def lines(self) -> list[str]:
        merged = [f"  merge {merge.module}: {merge.reason}" for merge in self.scratch]
        merged += [f"  merge {merge.base} on arrival: ranks hold columns of it" for merge in self.late]
        return [*merged, *(f"  gives {spec.name} {spec.dtype} {list(spec.shape)}" for spec in self.outputs)]


@dataclass(frozen=True, slots=True)
class Factors:
    """LoRA factors that every rank gathers whole before it merges its elements of some groups."""

    before_group: int
    travels: tuple[int, ...]
    """Places in `ExportPlan.travels`."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What one export carries and in which order: the same on every rank, and compared before anything is sent."""

    kind: WeightKind
    adapter: str | None
    travels: tuple[Travel, ...]
    extents: tuple[Extent, ...]
    deliveries: tuple[Delivery, ...]
    groups: tuple[tuple[int, ...], ...]
    """Places of deliveries."""
    factors: tuple[Factors, ...]
    bucket_bytes: int
    notes: tuple[str, ...] = ()
    """What the receiver has to know beyond the tensors."""
    adapter_config: dict[str, object] | None = None
    """PEFT's configuration, for an adapter."""
    fingerprint: str = ""
    """SHA-256 over `lines()`."""
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What follows from the plan and was computed once: windows, sizes of groups."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for delivery in self.deliveries for spec in delivery.outputs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are handed over."""
        return sum(spec.nbytes for spec in self.specs)

    def lines(self) -> list[str]:
        """What ranks compare, and what a disagreement quotes."""
        out = [f"export {self.kind} of adapter {self.adapter}, buckets of {self.bucket_bytes} bytes"]
        for index, places in enumerate(self.groups):
            out.append(f"group {index}")
            out += self._lines_of(places)
        for batch in self.factors:
            out += [f"factors before group {batch.before_group}: {self.travels[each].line()}" for each in batch.travels]
        return out

    def _lines_of(self, places: Sequence[int]) -> list[str]:
        out = []
        for delivery in (self.deliveries[place] for place in places):
            out += [f"  {self.travels[travel].line()} on {self.extents[travel].ranges}" for travel in delivery.travels]
            out += delivery.lines()
        return out

    def manifest(self, version: int) -> Manifest:
        return Manifest(version, self.kind, self.specs, self.adapter_config)


def fingerprint_of(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
