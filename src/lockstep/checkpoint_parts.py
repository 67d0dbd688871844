"""This rank's elements of named tensors in, files of torch.distributed.checkpoint out; and back, on any number of ranks.

A tensor is stored as the row of its elements (row-major), each rank's stretch of it as one chunk. So the files do not know how
ranks held the tensor: what FSDP1's flat parameters wrote, FSDP2's rows read. Nothing is gathered: every rank writes and reads
its own elements, and loading reads only the files that hold some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of one tensor that this rank holds."""

    elements: torch.Tensor
    """1-D, contiguous: read by `write_parts`, overwritten by `read_parts`. May be empty."""
    start: int
    """Where they begin in the whole tensor's row of elements."""
    shape: tuple[int, ...]
    """Of the whole tensor; its number of elements is what is stored."""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size((self.start,)), torch.Size((self.elements.numel(),)))


def write_parts(folder: Path, parts: Mapping[str, Part], group: dist.ProcessGroup | None) -> None:
    """Collective over `group`. Raises `CheckpointException` where a rank cannot write, or its part overlaps another's.

    What several ranks have alike (same place, same length) is written once.
    """
    dcp.save(
        cast(Any, dict(parts)), storage_writer=dcp.FileSystemWriter(folder), planner=_Writing(), process_group=group
    )


def read_parts(folder: Path, parts: Mapping[str, Part], group: dist.ProcessGroup | None) -> None:
    """Collective over `group`. Overwrite `elements` of every part. Raises `CheckpointException`; names and sizes must be there."""
    dcp.load(
        cast(Any, dict(parts)), storage_reader=dcp.FileSystemReader(folder), planner=_Reading(), process_group=group
    )


def stored_numels(folder: Path) -> dict[str, int]:
    """Name -> number of elements of everything stored there. Not collective."""
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: each.size.numel() for name, each in found.items() if isinstance(each, TensorStorageMetadata)}


class _Writing(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, part) for name, part in self._parts.items() if part.elements.numel()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._parts[index.fqn].elements

    @property
    def _parts(self) -> dict[str, Part]:
        return cast(dict[str, Part], self.state_dict)


class _Reading(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        stored = cast(Any, self.metadata).state_dict_metadata
        items = []
        for name, part in self.state_dict.items():
            if part.elements.numel():
                items += create_read_items_for_chunk_list(name, stored[name], [part.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].elements


def _write_item(name: str, part: Part) -> WriteItem:
    what = TensorWriteData(
        chunk=part.chunk, properties=TensorProperties(dtype=part.elements.dtype), size=torch.Size((part.numel,))
    )
    return WriteItem(MetadataIndex(name, part.chunk.offsets), WriteItemType.SHARD, tensor_data=what)
