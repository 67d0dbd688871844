"""A sharded model and what to export in, an `ExportPlan` out: what travels, in which groups, and what becomes of it.

No communication, no values read. Everything that an export cannot do is refused here, by name, before any collective. A plan is
made once and kept with the sharded model for as long as the model's parameters and its PEFT state are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch

from lockstep.errors import IncompleteExport
from lockstep.export.courier import FACTORS, PACKED
from lockstep.export.hub import HubTensor, hub_plan
from lockstep.export.merge import MIN_ROWS, RowsMerge
from lockstep.export.merge_plan import Merges, plan_merges, refuse_fake_quantised
from lockstep.export.peft_state import PeftState, changes_the_base, check_as_configured
from lockstep.export.schedule import Extent, group
from lockstep.export.what import (
    AdapterExport,
    Delivery,
    Export,
    ExportPlan,
    Factors,
    FullExport,
    MergedExport,
    Travel,
    fingerprint_of,
)
from lockstep.model.lora import adapter_config_json
from lockstep.model.peft_tree import adapter_names
from lockstep.sharding.base import Ranges, ShardedModel
from lockstep.sharding.plan import PlannedTensor
from lockstep.types import TensorSpec, WeightKind


@dataclasses.dataclass(slots=True)
class _Kept:
    """Plans of one sharded model, by what was asked for."""

    state: PeftState
    plans: dict[tuple[Export, int, torch.dtype | None], ExportPlan]


_KEPT: WeakKeyDictionary[ShardedModel, _Kept] = WeakKeyDictionary()


def plan_export(
    sharded: ShardedModel, what: Export, *, bucket_bytes: int, dtype: torch.dtype | None = None
) -> ExportPlan:
    """Not collective. `dtype` is what floats arrive in; None keeps each tensor's own.

    Raises `IncompleteExport`, naming the tensor or layer, for what cannot be exported, for a model that `fill` has not given
    all its values, and when the model's parameters are no longer those that were sharded or attached.
    """
    if not sharded.is_current():
        raise IncompleteExport(
            "the model's parameters are not those that were sharded or attached (something was added, such as an adapter, or a "
            "parameter replaced, or its dtype or shape changed); call lockstep.attach(model) again, on every rank"
        )
    empty = sharded.unfilled()
    if empty:
        raise IncompleteExport(
            f"{len(empty)} tensors have no values yet, first {empty[0]!r}: call lockstep.fill, or attach again after giving them "
            "values otherwise"
        )
    kept = _KEPT.get(sharded)
    if kept is None:
        kept = _KEPT[sharded] = _Kept(PeftState(sharded.module, sharded.skeleton), {})
    if kept.state.refresh():
        kept.plans.clear()
    key = (what, bucket_bytes, dtype)
    if key not in kept.plans:
        kept.plans[key] = _Planner(sharded, bucket_bytes, dtype).plan(what, kept.state)
    return kept.plans[key]


class _Planner:
    """Collects travels and deliveries of one plan."""

    def __init__(self, sharded: ShardedModel, bucket_bytes: int, dtype: torch.dtype | None):
        self._sharded = sharded
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._planned: dict[str, PlannedTensor] = {}
        self._position: dict[str, tuple[int, int]] = {}
        self._buffers = {tensor.name for tensor in sharded.plan.buffers}
        for index, unit in enumerate(sharded.plan.units):
            for place, tensor in enumerate([*unit.parameters, *unit.buffers]):
                for name in (tensor.name, *tensor.aliases):
                    self._planned[name] = tensor
                    self._position[name] = (index, place)
        self._travels: list[Travel] = []
        self._extents: list[Extent] = []

    def plan(self, what: Export, state: PeftState) -> ExportPlan:
        skeleton = self._sharded.skeleton
        refuse_fake_quantised(skeleton)
        match what:
            case AdapterExport(adapter, base_embeddings):
                name = state.adapter(adapter)
                check_as_configured(skeleton, name)
                names = adapter_names(skeleton, name, with_base_embeddings=base_embeddings)
                tensors = [self._as_it_is(live, file) for live, file in names.items()]
                plan = self._finish("adapter", name, tensors, Merges(), _of_another_base(state, name))
                return dataclasses.replace(plan, adapter_config=adapter_config_json(skeleton, name))
            case MergedExport(adapter, untie, dequantize):
                name = state.adapter(adapter)
                merges = plan_merges(skeleton, name, dequantize=dequantize)
                hub = hub_plan(skeleton, adapter=name, untie=untie, merges=merges)
                return self._finish("merged", name, hub.tensors, merges, hub.notes)
            case FullExport():
                hub = hub_plan(skeleton, adapter=None)
                return self._finish("full", None, hub.tensors, Merges(), hub.notes + _left_out(state))

    def _finish(
        self, kind: WeightKind, adapter: str | None, hub: Sequence[HubTensor], merges: Merges, notes: tuple[str, ...]
    ) -> ExportPlan:
        deliveries = [self._delivery(tensors, merges) for tensors in self._in_order(hub, merges)]
        units = [self._position[self._travels[each.travels[0]].source][0] for each in deliveries]
        groups = group(
            [each.travels for each in deliveries],
            self._extents,
            units if self._sharded.evens_out == "unit" else None,
            group_bytes=max(self._bucket_bytes // PACKED, 1),
        )
        factors = self._factors(deliveries, groups)
        plan = ExportPlan(
            kind,
            adapter,
            tuple(self._travels),
            tuple(self._extents),
            tuple(deliveries),
            tuple(groups),
            factors,
            self._bucket_bytes,
            notes,
        )
        return dataclasses.replace(plan, fingerprint=fingerprint_of(plan.lines()))

    def _in_order(self, hub: Iterable[HubTensor], merges: Merges) -> list[list[HubTensor]]:
        """Checkpoint tensors that must be made together, in the order in which their sources lie in the model."""
        scratch = {name: merge.inputs for merge in merges.scratch for name in merge.outputs}
        together: dict[str, list[HubTensor]] = {}
        for tensor in hub:
            needed = [name for source in tensor.sources for name in scratch.get(source, (source,))]
            together.setdefault(min(needed, key=self._position.__getitem__), []).append(tensor)
        return [together[key] for key in sorted(together, key=self._position.__getitem__)]

    def _delivery(self, tensors: Sequence[HubTensor], merges: Merges) -> Delivery:
        sources = list(dict.fromkeys(source for tensor in tensors for source in tensor.sources))
        scratch = tuple(merge for merge in merges.scratch if not set(merge.outputs).isdisjoint(sources))
        made = {name for merge in scratch for name in merge.outputs}
        rows = {name: merges.rows[name] for name in sources if name in merges.rows and name not in made}
        late = tuple(merge for merge in rows.values() if self._sharded.shard_dim(self._name(merge.base)))
        raw = [name for merge in scratch for name in merge.inputs]
        raw += [name for merge in late for name in (merge.base, merge.a, merge.b)]
        travels = [self._travel(name, wire=False) for name in dict.fromkeys(raw)]
        travels += [
            self._travel(name, wire=True, merge=rows.get(name)) for name in sources if name not in {*made, *raw}
        ]
        outputs = tuple(
            dataclasses.replace(spec, dtype=self._wire(spec.dtype)) for each in tensors for spec in each.outputs
        )
        is_plain = len(tensors) == 1 and tensors[0].is_plain and not scratch and not late
        return Delivery(
            tuple(travels),
            outputs,
            scratch,
            late,
            () if is_plain else tuple(tensors),
            is_as_sent=is_plain and self._is_as_sent(travels[0], outputs[0]),
        )

    def _is_as_sent(self, travel: int, output: TensorSpec) -> bool:
        sent = self._travels[travel]
        shape = (
            (*sent.shape[1 : sent.shard_dim + 1], sent.shape[0], *sent.shape[sent.shard_dim + 1 :])
            if sent.shard_dim
            else sent.shape
        )
        return sent.dtype is output.dtype and tuple(shape) == output.shape

    def _travel(self, name: str, *, wire: bool, merge: RowsMerge | None = None) -> int:
        """Note one travel; its place. `wire`: cast before it travels, since nothing is computed with it afterwards."""
        tensor = self._planned[name]
        dtype = self._wire(tensor.dtype) if wire else tensor.dtype
        if tensor.name in self._buffers:
            ranges: Ranges = ((0, tensor.numel), *[(tensor.numel, tensor.numel)] * (self._sharded.world.size - 1))
            travel = Travel(name, tensor.name, tensor.shape, dtype, is_buffer=True)
        else:
            ranges, dim = self._sharded.ranges(tensor.name), self._sharded.shard_dim(tensor.name)
            shape = (tensor.shape[dim], *tensor.shape[:dim], *tensor.shape[dim + 1 :]) if dim else tensor.shape
            travel = Travel(name, tensor.name, shape, dtype, dim, merge=merge)
        self._travels.append(travel)
        self._extents.append(Extent(ranges, dtype.itemsize))
        return len(self._travels) - 1

    def _factors(self, deliveries: Sequence[Delivery], groups: Sequence[tuple[int, ...]]) -> tuple[Factors, ...]:
        """Batches of factors, each gathered before the first group that needs one of them."""
        batches: list[Factors] = []
        room = 0
        for index, places in enumerate(groups):
            merges = [self._travels[t].merge for place in places for t in deliveries[place].travels]
            names = dict.fromkeys(name for merge in merges if merge for name in self._whole_factors(merge))
            nbytes = sum(self._planned[name].nbytes for name in names)
            if not names:
                continue
            if not batches or nbytes > room:
                batches.append(Factors(index, ()))
                room = self._bucket_bytes // FACTORS
            travels = tuple(self._travel(name, wire=False) for name in names)
            batches[-1] = dataclasses.replace(batches[-1], travels=batches[-1].travels + travels)
            room -= nbytes
        return tuple(batches)

    def _whole_factors(self, merge: RowsMerge) -> tuple[str, ...]:
        """A always; B only where the ranks' rows of B are not just those of their rows of W, or too few to round alike."""
        return (merge.a,) if self._has_own_rows(merge) else (merge.a, merge.b)

    def _has_own_rows(self, merge: RowsMerge) -> bool:
        rows, width = merge.shape[0], self._planned[merge.base].numel // merge.shape[0]
        of_w, of_b = self._sharded.ranges(self._name(merge.base)), self._sharded.ranges(self._name(merge.b))
        held = [(stop - start) // width for start, stop in of_w if stop > start]
        return (
            merge.kind == "linear"
            and self._sharded.shard_dim(self._name(merge.b)) == 0
            and all(bound % width == 0 for pair in of_w for bound in pair)
            and of_b == tuple((start // width * merge.rank, stop // width * merge.rank) for start, stop in of_w)
            and min(held) >= min(MIN_ROWS, rows)
        )

    def _name(self, name: str) -> str:
        return self._planned[name].name

    def _wire(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def _as_it_is(self, live: str, name: str) -> HubTensor:
        tensor = self._planned[live]
        return HubTensor((live,), (name,), (TensorSpec(name, tensor.shape, tensor.dtype),), True)


def _left_out(state: PeftState) -> tuple[str, ...]:
    """A full export of a model with adapters is its base: right for an engine that loads adapters, and not the policy."""
    if not state.configs:
        return ()
    changing = sorted(name for name, config in state.configs.items() if changes_the_base(config))
    as_changed = (
        f"adapters {changing} changed base weights when PEFT put them in ({_inits(state, changing)}): these are the weights as they "
        "are since then, not those of the original checkpoint",
    )
    return (
        f"adapters {sorted(state.configs)} are not in a full export: these are the base's weights; MergedExport folds one in",
        *(as_changed if changing else ()),
    )


def _of_another_base(state: PeftState, adapter: str) -> tuple[str, ...]:
    if not changes_the_base(state.configs[adapter]):
        return ()
    return (
        f"adapter {adapter!r} changed base weights when PEFT put it in ({_inits(state, [adapter])}): it belongs to that changed base, "
        "which FullExport carries, and not to the original checkpoint",
    )


def _inits(state: PeftState, adapters: Sequence[str]) -> str:
    inits = sorted({str(getattr(state.configs[adapter], "init_lora_weights", None)) for adapter in adapters})
    return f"init_lora_weights {', '.join(inits)}"
