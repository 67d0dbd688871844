"""One of a run's models, planned, and a rank in; the bytes that it takes there, between steps and at most, out.

What is sharded is counted by `sharding.sizes`, what the optimizer keeps by the optimizer (`train.optim.state_bytes`), what a step of it
makes by a step (`plan_peaks`). Tests hold the figures to runs whose tensors are counted. *device*: where the models are (on a CPU that is
the host's memory too).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config import TrainConfig
from lockstep.model.lora import is_reference_name
from lockstep.plan_peaks import measure_step
from lockstep.sharding.plan import PlannedTensor, ShardingPlan, ShardUnit, is_below
from lockstep.sharding.sizes import (
    Backend,
    gathered_bytes,
    gradient_bytes,
    held_numels,
    shard_bytes,
    whole_gradient_bytes,
)
from lockstep.train.offload import chunks_of
from lockstep.train.optim import state_bytes


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a forward or backward pass has whole on a rank."""

    root: int
    unit: str
    """The largest unit. Empty: all of them (sharding.reshard_after_forward: false)."""
    unit_bytes: int
    """Of it, and of units that it is nested in."""
    next_bytes: int
    """Of the unit that is fetched meanwhile."""

    @property
    def nbytes(self) -> int:
        return self.root + self.unit_bytes + self.next_bytes


NOTHING = Gathered(0, "", 0, 0)
"""Of a model that is whole anyway."""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """One model on one rank, in bytes."""

    role: str
    path: str
    backend: str
    """fsdp1, fsdp2, or whole."""
    parameters: int
    buffers: int
    reference: int = 0
    """Of the parameters, the frozen copy of the adapter that training started from."""
    gradients: int = 0
    """Reduced: this rank's."""
    whole_gradients: int = 0
    """Before that: every rank has all of them while an update goes through several micro-batches."""
    largest_gradient: int = 0
    """Of one unit, whole."""
    optimizer: int = 0
    """On the device."""
    optimizer_host: int = 0
    """In host memory."""
    step: int = 0
    """What a step of the optimizer has on top."""
    gathered: Gathered = NOTHING


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model lies on the ranks."""

    plan: ShardingPlan
    num_ranks: int
    backend: Backend
    reshard_after_forward: bool = True


@dataclass(frozen=True, slots=True)
class OptimizerUse:
    """In bytes, on one rank."""

    device: int = 0
    host: int = 0
    step: int = 0
    """On the device on top, during a step."""


def model_use(
    role: str, path: str, layout: Layout, rank: int, *, train: TrainConfig | None, offloads: bool = False
) -> ModelUse:
    """`train`: what its optimizer is made with, None for a frozen model; `offloads`: is its state in host memory between steps?

    Raises `ModelError` for parameters that the optimizer does not take.
    """
    units = layout.plan.units
    where: tuple[int, Backend] = (layout.num_ranks, layout.backend)
    optimizer = OptimizerUse() if train is None else optimizer_use(layout, rank, train=train, offloads=offloads)
    whole = [whole_gradient_bytes(unit, *where) for unit in units]
    return ModelUse(
        role=role,
        path=path,
        backend=layout.backend,
        parameters=shard_bytes(layout.plan, rank, *where),
        reference=sum(
            numel * each.dtype.itemsize for each, numel in _held(layout, rank) if is_reference_name(each.name)
        ),
        buffers=sum(tensor.nbytes for tensor in layout.plan.buffers),
        gradients=sum(gradient_bytes(unit, rank, *where) for unit in units),
        whole_gradients=sum(whole),
        largest_gradient=max(whole),
        optimizer=optimizer.device,
        optimizer_host=optimizer.host,
        step=optimizer.step,
        gathered=gathered_use(layout),
    )


def optimizer_use(layout: Layout, rank: int, *, train: TrainConfig, offloads: bool) -> OptimizerUse:
    """State of the trainable parameters. Offloaded, a chunk of it is on the device while it is stepped, and the next on its way."""
    trained = [(each, numel) for each, numel in _held(layout, rank) if each.is_trainable]
    per = state_bytes({each.dtype for each, _ in trained}, train=train)
    kept = [per[each.dtype].per_element * numel for each, numel in trained]
    counters = sum(per[each.dtype].per_parameter for each, _ in trained)
    made = measure_step({each.dtype for each, _ in trained}, train=train)
    if not offloads:
        return OptimizerUse(sum(kept), counters, round(made * sum(numel for _, numel in trained)))
    chunks = chunks_of([numel for _, numel in trained])
    moved = [sum(kept[place] for place in chunk) for chunk in chunks]
    stepped = max(sum(trained[place][1] for place in chunk) for chunk in chunks)
    at_once = max(here + after for here, after in zip(moved, [*moved[1:], 0], strict=True))
    return OptimizerUse(0, sum(kept) + counters, at_once + round(made * stepped))


def gathered_use(layout: Layout) -> Gathered:
    """The root stays whole throughout; with it the largest unit (and those around it), and the one that is fetched meanwhile."""
    sizes = {unit.module: gathered_bytes(unit, layout.num_ranks, layout.backend) for unit in layout.plan.units}
    root = sizes.pop("")
    if not layout.reshard_after_forward or not sizes:
        return Gathered(root, "", sum(sizes.values()), 0)
    names = list(sizes)
    first = _first_with_gradient(layout.plan, names)
    found = []
    for place, name in enumerate(names):
        whole = [other for other in names if is_below(f"{name}.", other)]
        # In backward the unit that was before it in forward is fetched; FSDP1 leaves out one that no gradient reaches, and FSDP2
        # fetches in forward too, the one behind it.
        near = names[max(place - 1, first, 0) : place]
        if layout.backend == "fsdp2":
            near = names[max(place - 1, 0) : place] + names[place + 1 : place + 2]
        fetched = max((sizes[other] for other in near if other not in whole), default=0)
        found.append(Gathered(root, name, sum(sizes[other] for other in whole), fetched))
    return max(found, key=lambda each: each.nbytes)


def _first_with_gradient(plan: ShardingPlan, names: Sequence[str]) -> int:
    """Place of the first unit that backward reaches: it trains something, or a unit in it does."""
    training = [unit.module for unit in plan.units if any(tensor.is_trainable for tensor in unit.parameters)]
    reached = (place for place, name in enumerate(names) if any(is_below(f"{other}.", name) for other in training))
    return next(reached, len(names))


def _held(layout: Layout, rank: int) -> list[tuple[PlannedTensor, int]]:
    """Every parameter, and the elements of it that a rank holds."""
    return [pair for unit in layout.plan.units for pair in _held_of(unit, layout, rank)]


def _held_of(unit: ShardUnit, layout: Layout, rank: int) -> Sequence[tuple[PlannedTensor, int]]:
    numels = held_numels(unit, rank, layout.num_ranks, layout.backend)
    return list(zip(unit.parameters, numels, strict=True))
