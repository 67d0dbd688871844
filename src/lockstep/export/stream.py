"""A sharded model and an export plan in, a stream of buckets (checkpoint name, whole tensor) out, on all ranks or on one.

The live model is only read. One bucket is gathered at a time: live bytes are at most the bucket (or its one large tensor)
per receiving rank, the padded parts of it that travelled, and the LoRA factors of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

import torch

from lockstep.dist import agree, exchange_lines, gather_bytes
from lockstep.errors import IncompleteExport, RankMissing
from lockstep.export.merge import MIN_ROWS, merge_rows
from lockstep.export.plan import Export, ExportPlan, ExportTensor, plan_export
from lockstep.sharding.base import Destination, Piece, Ranges, ShardedModel, gather_flat
from lockstep.types import Bucket, Manifest


class WeightStream:
    """Use as a context manager and iterate once. Collective: every rank iterates, also ranks that receive nothing.

    A rank that leaves early, or whose consumer raises, takes part in what is left and then every rank ends: the others with
    `IncompleteExport` that repeats the message. The model trains on either way.
    """

    def __init__(self, sharded: ShardedModel, plan: ExportPlan, *, to: Destination):
        self.plan = plan
        self._sharded = sharded
        self._to: Destination = to
        self._buckets = self._gather_all()
        self._is_open = False
        self._is_torn = False

    def manifest(self, version: int) -> Manifest:
        return self.plan.manifest(version)

    def __enter__(self) -> WeightStream:
        """Collective: ranks agree on the plan."""
        world = self._sharded.world
        agree(
            world,
            phase="export",
            fingerprint=f"{self.plan.fingerprint()} to {self._to}",
            describe=lambda: [f"to {self._to}", *self.plan.lines()],
        )
        self._sharded.settle()
        self._is_open = True
        return self

    def __iter__(self) -> Iterator[Bucket]:
        if not self._is_open:
            raise RuntimeError("a weight stream is iterated inside its `with` block")
        return self._buckets

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Collective, unless a rank is already known to be missing, or this one failed inside a gather.

        The latter cannot take part any more: it leaves at once, and the others are told when its connection closes.
        """
        self._is_open = False
        if isinstance(error, RankMissing) or self._is_torn:
            return
        for _ in self._buckets:
            continue
        self._compare_endings("" if error is None else f"{type(error).__name__}: {error}")

    def _compare_endings(self, mine: str) -> None:
        world = self._sharded.world
        flags = gather_bytes(world, bytes([bool(mine)]), phase="end of export", timeout_s=world.timeout_s)
        if not any(flag[0] for flag in flags):
            return
        endings = (
            exchange_lines(world, [mine], phase="end of export", timeout_s=world.timeout_s)
            if world.size > 1
            else [[mine]]
        )
        for rank, ending in enumerate(endings):
            if ending != [""] and not mine:
                raise IncompleteExport(f"the export ended on every rank: rank {rank}'s consumer raised {ending[0]}")

    def _gather_all(self) -> Iterator[Bucket]:
        for index, tensors in enumerate(self.plan.buckets):
            with torch.no_grad(), torch.profiler.record_function(f"export::bucket {index}"):
                self._is_torn = True
                bucket = self._gather(tensors)
                self._is_torn = False
            if bucket is not None:
                yield bucket

    def _gather(self, tensors: Sequence[ExportTensor]) -> Bucket | None:
        world = self._sharded.world
        factors = self._gather_factors(tensors)
        pieces = [Piece(self._local(tensor, factors), self._ranges(tensor), tensor.spec.shape) for tensor in tensors]
        whole = gather_flat(pieces, world, to=self._to, phase=f"export of {tensors[0].spec.name}")
        if whole is None:
            return None
        for tensor, value in zip(tensors, whole, strict=True):
            if tuple(value.shape) != tensor.spec.shape or value.dtype != tensor.spec.dtype:
                raise IncompleteExport(
                    f"{tensor.spec.name}: planned {tensor.spec}, gathered {value.dtype} {list(value.shape)}"
                )
        return Bucket(tuple((tensor.spec.name, value) for tensor, value in zip(tensors, whole, strict=True)))

    def _ranges(self, tensor: ExportTensor) -> Ranges:
        if not tensor.is_buffer:
            return self._sharded.ranges(tensor.source)
        numel = tensor.spec.nbytes // tensor.spec.dtype.itemsize
        return ((0, numel), *[(numel, numel)] * (self._sharded.world.size - 1))

    def _local(self, tensor: ExportTensor, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        """This rank's elements as they travel: merged if the plan says so, cast last (rounded once)."""
        if tensor.is_buffer:
            value = self._sharded.module.get_buffer(tensor.source).reshape(-1)
            return value.to(tensor.spec.dtype) if self._sharded.world.is_main else value.to(tensor.spec.dtype)[:0]
        local = self._sharded.local_flat(tensor.source)
        if tensor.factors is not None and local.numel():
            local = self._merge(tensor, local, factors)
        return local.to(tensor.spec.dtype)

    def _merge(self, tensor: ExportTensor, local: torch.Tensor, whole: dict[str, torch.Tensor]) -> torch.Tensor:
        assert tensor.factors is not None
        width = tensor.spec.shape[1]
        start, stop = (bound // width for bound in self._sharded.ranges(tensor.source)[self._sharded.world.rank])
        gathered_b = whole.get(tensor.factors.b)
        b = (
            self._sharded.local_flat(tensor.factors.b).reshape(-1, tensor.factors.rank)
            if gathered_b is None
            else gathered_b
        )
        rows = slice(None) if gathered_b is None else slice(start, stop)
        return merge_rows(
            local.reshape(stop - start, width), b, whole[tensor.factors.a], tensor.factors.scaling, rows=rows
        ).reshape(-1)

    def _gather_factors(self, tensors: Sequence[ExportTensor]) -> dict[str, torch.Tensor]:
        """A of every merged layer, whole, on every rank; B too where a rank has too few rows to round alike."""
        wanted: dict[str, tuple[int, int]] = {}
        for tensor in tensors:
            if tensor.factors is None:
                continue
            rows, width = tensor.spec.shape
            wanted[tensor.factors.a] = (tensor.factors.rank, width)
            held = [(stop - start) // width for start, stop in self._sharded.ranges(tensor.source)]
            if min(count for count in held if count) < min(MIN_ROWS, rows):
                wanted[tensor.factors.b] = (rows, tensor.factors.rank)
        if not wanted:
            return {}
        pieces = [
            Piece(self._sharded.local_flat(name), self._sharded.ranges(name), shape) for name, shape in wanted.items()
        ]
        whole = gather_flat(pieces, self._sharded.world, to="all", phase="export of LoRA factors")
        assert whole is not None
        return dict(zip(wanted, whole, strict=True))


def export_weights(
    sharded: ShardedModel,
    what: Export,
    *,
    bucket_bytes: int = 64 << 20,
    to: Destination = "all",
    dtype: torch.dtype | None = None,
) -> WeightStream:
    """Stream the adapter or the merged weights of a sharded model; see `WeightStream`. Collective from `__enter__` on.

    Refusals (`IncompleteExport`) come before any collective, on every rank alike. `dtype` is what floats travel in.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, {bucket_bytes} came")
    return WeightStream(sharded, plan_export(sharded, what, bucket_bytes=bucket_bytes, dtype=dtype), to=to)
