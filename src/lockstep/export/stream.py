"""A sharded model and what to export in, a stream of buckets (checkpoint name, whole tensor) out, on all ranks or on one.

The live model is only read. At most `bucket_bytes` plus the largest tensor are held at a time on a rank that receives
(FSDP1: plus the largest unit instead, since a unit's bytes lie evenly on the ranks and a tensor's do not), and about
`bucket_bytes / 8` on one that does not. Layers that PEFT itself merges (see docs) take what its merge takes on top.

Small tensors of one bucket lie side by side in one piece of memory, of at most `bucket_bytes / 8`, which goes with the last
of them: clone what is to outlive the others.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
from torch import nn

from lockstep.dist import agree, exchange_lines, gather_bytes
from lockstep.errors import IncompleteExport, RankMissing
from lockstep.export.courier import PACKED, Courier
from lockstep.export.exchange import Traffic
from lockstep.export.hub import to_hub
from lockstep.export.merge import merge_elements, merge_scratch
from lockstep.export.plan import plan_export
from lockstep.export.what import AdapterExport, Delivery, Export, ExportPlan, FullExport, MergedExport
from lockstep.logs import ON_EVERY_RANK
from lockstep.sharding.base import Destination, ShardedModel
from lockstep.types import Bucket, Manifest

log = logging.getLogger(__name__)


class WeightStream:
    """Use as a context manager and iterate once. Collective: every rank iterates, also ranks that receive nothing.

    A rank that leaves early, or whose consumer raises, takes part in what is left and then every rank ends: the others with
    `IncompleteExport` that repeats the message. The model trains on either way.
    """

    def __init__(self, sharded: ShardedModel, plan: ExportPlan, *, to: Destination):
        self.plan = plan
        self._sharded = sharded
        self._to: Destination = to
        self._courier = Courier(sharded, plan, to)
        self._arrivals = self._courier.arrivals()
        self._buckets = self._gather_all()
        self._is_open = False
        self._is_used = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What a receiver has to know beyond the tensors (weights that are no longer tied)."""
        return self.plan.notes

    @property
    def traffic(self) -> Traffic:
        """Exchanges and bytes of this rank so far, the factors' included."""
        return self._courier.traffic

    def manifest(self, version: int) -> Manifest:
        return self.plan.manifest(version)

    def __enter__(self) -> WeightStream:
        """Collective: ranks agree on the plan. Raises `RuntimeError`, at once and on this rank, for a stream that was used before
        (it would give nothing) and while another is open (ranks that receive nothing never come here)."""
        world = self._sharded.world
        if self._is_used:
            raise RuntimeError("a weight stream is used once; call export_weights again")
        if world.is_exporting:
            raise RuntimeError(
                "another weight stream of these ranks is open: finish the other stream first, then open this one"
            )
        self._is_used = True
        agree(
            world,
            phase="export",
            fingerprint=f"{self.plan.fingerprint} to {self._to}",
            describe=lambda: [f"to {self._to}", *self.plan.lines()],
        )
        self._is_open = world.is_exporting = True
        try:
            self._sharded.settle()
        except BaseException as error:  # the others are in the exchanges already: take part, and tell them
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __iter__(self) -> Iterator[Bucket]:
        self._check_open()
        return self._buckets

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Collective, unless a rank is already known to be missing, or this one failed inside an exchange.

        The latter cannot take part any more: it leaves at once, and the others are told when its connection closes.
        """
        self._is_open = self._sharded.world.is_exporting = False
        self._sharded.world.is_torn |= self._courier.is_torn
        if isinstance(error, RankMissing) or self._courier.is_torn:
            return
        for arrived in self._arrivals:
            self._courier.drop(arrived)
        self._courier.close()
        self._compare_endings("" if error is None else f"{type(error).__name__}: {error}")

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError(
                "a weight stream gives its buckets inside its `with` block only, and what it had not given is gone"
            )

    def _compare_endings(self, mine: str) -> None:
        world = self._sharded.world
        flags = gather_bytes(world, bytes([bool(mine)]), phase="end of export", timeout_s=world.timeout_s)
        if not any(flag[0] for flag in flags) or world.size == 1:
            return
        endings = exchange_lines(world, [mine], phase="end of export", timeout_s=world.timeout_s)
        for rank, ending in enumerate(endings):
            if ending != [""] and not mine:
                raise IncompleteExport(f"the export ended on every rank: rank {rank}'s consumer raised {ending[0]}")

    def _gather_all(self) -> Iterator[Bucket]:
        self._check_open()
        waiting = self._waiting()
        missing = [len(each.travels) for each in self.plan.deliveries]
        for arrived in self._arrivals:
            if not self._courier.receives:
                continue
            for travel in arrived:
                missing[waiting[travel]] -= 1
            whole = dict.fromkeys(waiting[travel] for travel in arrived if not missing[waiting[travel]])
            yield from self._buckets_of([self.plan.deliveries[index] for index in whole])

    def _waiting(self) -> dict[int, int]:
        """Travel -> which delivery waits for it."""
        derived = self.plan.derived
        if "waiting" not in derived:
            derived["waiting"] = {
                travel: index for index, each in enumerate(self.plan.deliveries) for travel in each.travels
            }
        return derived["waiting"]

    def _buckets_of(self, deliveries: Sequence[Delivery]) -> Iterator[Bucket]:
        """Of what came whole with one window: one bucket, or several where a whole FSDP1 unit ends.

        Nothing that was yielded is held here, so that it is gone once the consumer lets go of it.
        """
        limit = self.plan.bucket_bytes // PACKED
        made: list[tuple[str, torch.Tensor]] = []
        held = 0
        for delivery in deliveries:
            nbytes = delivery.nbytes
            if made and held + nbytes > limit:
                yield _emptied(made)
                self._check_open()
                held = 0
            made += self._as_sent(delivery) if delivery.is_as_sent else self._finish(delivery)
            held += nbytes
        if made:
            yield _emptied(made)
            self._check_open()

    def _as_sent(self, delivery: Delivery) -> list[tuple[str, torch.Tensor]]:
        return [(delivery.outputs[0].name, self._courier.take(delivery.travels[0]))]

    @torch.no_grad()
    def _finish(self, delivery: Delivery) -> list[tuple[str, torch.Tensor]]:
        """Checkpoint tensors of a delivery that has arrived."""
        values = {self.plan.travels[travel].source: self._courier.take(travel) for travel in delivery.travels}
        if not delivery.hub:
            return self._checked(delivery, [(delivery.outputs[0].name, value) for value in values.values()])
        skeleton = self._sharded.skeleton
        for merge in delivery.scratch:
            inputs = {name: values.pop(name) for name in merge.inputs}
            with torch.profiler.record_function(f"export::merge {merge.module}"):
                values.update(merge_scratch(skeleton, merge, inputs))
        for merge in delivery.late:
            base, a, b = (values.pop(name) for name in (merge.base, merge.a, merge.b))
            values[merge.base] = merge_elements(merge, base.reshape(-1), start=0, a=a, b=b).reshape(merge.shape)
        out = []
        for tensor in delivery.hub:
            out += to_hub(skeleton, tensor, [values[source] for source in tensor.sources])
        return self._checked(delivery, out)

    def _checked(self, delivery: Delivery, made: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Cast to the wire dtype; raises `IncompleteExport` if what came out is not what the plan promised."""
        out = []
        for spec, (name, value) in zip(delivery.outputs, made, strict=True):
            value = value if value.dtype == spec.dtype else value.to(spec.dtype)
            if name != spec.name or tuple(value.shape) != spec.shape:
                raise IncompleteExport(f"planned {spec}, made {name!r} {value.dtype} {list(value.shape)}")
            out.append((name, value))
        return out


def _emptied(made: list[tuple[str, torch.Tensor]]) -> Bucket:
    bucket = Bucket(tuple(made))
    made.clear()
    return bucket


def export_weights(
    sharded: ShardedModel,
    what: Export,
    *,
    bucket_bytes: int = 64 << 20,
    to: Destination = "all",
    dtype: torch.dtype | None = None,
) -> WeightStream:
    """Stream the adapter, the merged or the full weights of a sharded model; see `WeightStream`. Collective from `__enter__` on.

    `bucket_bytes` is what the export may hold beyond the largest tensor; `to=0` sends to rank 0 alone; `dtype` is what floats
    arrive in (rounded once, after merging; None: each tensor's own). Refusals (`IncompleteExport`) come before any collective,
    on every rank alike.
    """
    if isinstance(sharded, nn.Module):
        raise TypeError(
            f"export_weights takes what lockstep.attach(model) or lockstep.shard(model) returns; a {type(sharded).__name__} came"
        )
    if not isinstance(what, AdapterExport | MergedExport | FullExport):
        raise TypeError(f"what must be an AdapterExport, a MergedExport or a FullExport; {what!r} came")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, {bucket_bytes} came")
    if to not in ("all", 0) or isinstance(to, bool):
        raise ValueError(f'to must be "all" or 0, {to!r} came')
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating torch.dtype or None, {dtype!r} came")
    plan = plan_export(sharded, what, bucket_bytes=bucket_bytes, dtype=dtype)
    for note in plan.notes:
        _tell(note)
    return WeightStream(sharded, plan, to=to)


@functools.cache
def _tell(note: str) -> None:
    """Once in a process: an export may be made every step."""
    log.warning(note, extra=ON_EVERY_RANK)
