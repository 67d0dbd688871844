"""A plain model and its `ShardingPlan` in, the model sharded over all ranks by FSDP1 or FSDP2, unit by unit as planned, out.

Decided first, as data (`Layout`), and refused by name where it cannot be; agreed on by all ranks; only then wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import DistConfig
from lockstep.dist import World, start
from lockstep.errors import ModelError
from lockstep.model.dtype import Rule, apply_dtypes, keep_in_fp32, plan_dtypes
from lockstep.model.fake_quant import why_not_lora
from lockstep.names import clean_name, is_adapter_name
from lockstep.sharding.attach import agree_or_raise, peft_lines
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.fsdp1 import DRIFTING, is_wrapped_by_fsdp1, wrap_fsdp1
from lockstep.sharding.fsdp2 import is_wrapped_by_fsdp2, wrap_fsdp2
from lockstep.sharding.live import LiveModel, parameter_slots
from lockstep.sharding.plan import ShardingPlan, nearest_unit, plan_sharding, split_units
from lockstep.sharding.precision import Precision
from lockstep.sharding.values import send_from_rank0, take_values
from lockstep.worlds import current_world

Backend = Literal["fsdp1", "fsdp2"]

# PEFT's layers that read their parts' weights without calling them: nothing in them can be a unit of its own.
_READS_WITHOUT_CALLING = frozenset({"ParamWrapper", "TrainableTokensLayer"})


@dataclass(frozen=True, slots=True)
class Wrapping:
    """How the units are wrapped."""

    backend: Backend
    precision: Precision
    reshard_after_forward: bool
    use_orig_params: bool
    """FSDP1 only."""
    cpu_offload: bool


def shard(
    model: nn.Module,
    plan: ShardingPlan | None = None,
    *,
    backend: Backend = "fsdp2",
    mesh: DeviceMesh | None = None,
    precision: Precision | None = None,
    reshard_after_forward: bool = True,
    use_orig_params: bool = True,
    cpu_offload: bool = False,
    mixed_dtypes: Rule | None = None,
    timeout_s: float = 60.0,
) -> ShardedModel:
    """Collective over the mesh (all ranks without one). Wrap the plan's units, the root last; the model itself is changed.

    `mesh`: one axis shards; of two, the second shards and the first holds replicas. `precision`: what units are computed and
    reduced in. `mixed_dtypes`: see `lockstep.model.dtype`. With `use_orig_params=False` (FSDP1) trainable modules become units
    of their own, since a flat parameter is trainable as a whole.

    Values: equal on every rank (compared), or real on rank 0 and on meta elsewhere (sent), or on meta everywhere (then `fill`
    follows). Without a process group this process is the only rank, or joins those that the environment names.
    Raises before anything is wrapped: `ModelError` naming what cannot be, `RanksDisagree` naming the first difference,
    `RankMissing`.
    """
    _check_words("backend", backend, get_args(Backend))
    _check_words("mixed_dtypes", mixed_dtypes, (None, *get_args(Rule)))
    _refuse_wrapped(model)
    plan = plan or plan_sharding(model)
    wrapping = Wrapping(backend, precision or Precision(), reshard_after_forward, use_orig_params, cpu_offload)
    world = _world(model, mesh, timeout_s)
    failure: ModelError | None = None
    ignored: tuple[str, ...] = ()
    lines = [f"{wrapping} on {'all ranks' if mesh is None else mesh.mesh.tolist()}", *plan.lines(), *peft_lines(model)]
    try:
        _refuse(model, plan, wrapping, world.device)
        _refuse_mesh(wrapping, mesh)
        dtypes = plan_dtypes(plan, backend=backend, rule=mixed_dtypes, keep=keep_in_fp32(model))
        _refuse_uncalled(model, dtypes.units)
        plan, ignored = split_units(plan, dtypes.units), dtypes.ignored
        if backend == "fsdp1" and not use_orig_params:
            plan = split_trainable(model, plan)
        lines += [f"dtypes {dtypes}", *plan.lines()]
    except ModelError as error:
        failure, lines, dtypes = error, [f"refused here: {error}"], None
    agree_or_raise(world, lines, failure, phase="shard", timeout_s=timeout_s)
    assert dtypes is not None
    apply_dtypes(model, dtypes)
    values = take_values(model, plan, world)
    sharded = cast(ShardedModel, _wrap(model, plan, wrapping, world, mesh=mesh, ignored=ignored))
    send_from_rank0(sharded, values)
    sharded.copy_to_replicas()
    return sharded


def _wrap(
    model: nn.Module,
    plan: ShardingPlan,
    wrapping: Wrapping,
    world: World,
    *,
    mesh: DeviceMesh | None,
    ignored: tuple[str, ...],
) -> LiveModel:
    # Submodules before what contains them: FSDP gives a module's parameters to the first call that covers them.
    units = sorted(plan.units, key=lambda unit: -unit.module.count(".") if unit.module else 1)
    if wrapping.backend == "fsdp2":
        return wrap_fsdp2(
            model,
            [unit.module for unit in units],
            world,
            mesh=mesh,
            precision=wrapping.precision,
            reshard_after_forward=wrapping.reshard_after_forward,
            cpu_offload=wrapping.cpu_offload,
        )
    return wrap_fsdp1(
        model,
        units,
        world,
        mesh=mesh,
        precision=wrapping.precision,
        reshard_after_forward=wrapping.reshard_after_forward,
        use_orig_params=wrapping.use_orig_params,
        cpu_offload=wrapping.cpu_offload,
        ignored=ignored,
    )


def _world(model: nn.Module, mesh: DeviceMesh | None, timeout_s: float) -> World:
    if not dist.is_initialized():
        return start("auto", DistConfig(agree_timeout_s=timeout_s))
    device = torch.device("cpu")
    if (mesh.device_type if mesh is not None else "cuda") == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if mesh is None:
        return current_world(device=device, timeout_s=timeout_s)
    if mesh.ndim > 2:
        raise ValueError(f"mesh: one axis (shard) or two (replicate, shard) are expected, {mesh.ndim} came")
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    return current_world(
        ranks=ranks, group=mesh.get_group() if mesh.ndim == 1 else None, device=device, timeout_s=timeout_s
    )


def _refuse_mesh(wrapping: Wrapping, mesh: DeviceMesh | None) -> None:
    if wrapping.backend == "fsdp1" and mesh is not None and mesh.ndim == 2 and mesh.mesh.shape[1] == 1 < mesh.size():
        raise ModelError(f"the mesh {mesh.mesh.tolist()} has replicas and nothing to shard over; {DRIFTING}")


def _check_words(what: str, word: object, known: Sequence[object]) -> None:
    """A misspelt word must not stand for the last of several branches."""
    if word not in known:
        raise ValueError(f"{what} must be one of {list(known)}; {word!r} came")


def _refuse_wrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard takes a model (a torch module); a {type(model).__name__} came")
    inside = [name for name, each in model.named_modules() if is_wrapped_by_fsdp1(each) or is_wrapped_by_fsdp2(each)]
    if inside:
        raise ModelError(f"{inside[0] or 'the model'} is sharded already; use attach")


def _refuse(model: nn.Module, plan: ShardingPlan, wrapping: Wrapping, device: torch.device) -> None:
    """Raises `ModelError` for what this backend cannot wrap, before any rank talks to another."""
    wrapping.precision.check(wrapping.backend)
    if wrapping.cpu_offload and wrapping.backend == "fsdp1" and device.type == "cpu":
        raise ModelError(
            "cpu_offload: FSDP1 pins the memory of what it offloads, which needs an accelerator, and this rank runs on the CPU, "
            "where parameters are anyway; leave cpu_offload out, or use FSDP2"
        )
    why = why_not_lora(model)
    if why:
        raise ModelError(why)
    wrapper = next((name for name, each in model.named_modules() if type(each).__name__ == "ParamWrapper"), None)
    if wrapper is not None and wrapping.backend == "fsdp1":
        raise ModelError(
            f"{wrapper}: PEFT's LoRA of parameters (target_parameters) replaces them in every forward pass, and FSDP1's views "
            "of its flat parameter do not allow that: use backend='fsdp2'"
        )
    live = {name: cast(nn.Parameter, owner._parameters[attr]) for name, (owner, attr) in parameter_slots(model)}
    planned = {name for tensor in plan.parameters for name in (tensor.name, *tensor.aliases)}
    if planned != set(live):
        odd = sorted(planned ^ set(live))[0]
        raise ModelError(f"the plan and the model differ in {odd!r}: make the plan anew, of this model (plan_sharding)")
    for name, param in live.items():
        if not param.is_contiguous():
            raise ModelError(
                f"{name} is not contiguous (shape {list(param.shape)}, strides {list(param.stride())}), and FSDP takes only "
                "contiguous parameters; PEFT makes such ones for ensure_weight_tying: leave that out, or untie the model"
            )
    _refuse_shared(plan)


def _refuse_uncalled(model: nn.Module, units: Sequence[str]) -> None:
    modules = {clean_name(name): each for name, each in model.named_modules()}
    for unit in units:
        odd = _reader(modules, unit.rpartition(".")[0])
        if odd is not None:
            raise ModelError(
                f"{unit} has another dtype than its unit, and cannot be one of its own: {odd} ({type(modules[odd]).__name__}) "
                "reads its parts' weights without calling them; use one dtype (mixed_dtypes='align')"
            )


def _refuse_shared(plan: ShardingPlan, hint: str = "") -> None:
    """A parameter under two units would be sharded with one of them and missing in the other."""
    units = {unit.module for unit in plan.units}
    for unit in plan.units:
        for tensor in unit.parameters:
            owners = {name: nearest_unit(name, units) for name in (tensor.name, *tensor.aliases)}
            other = next((name for name, owner in owners.items() if owner != unit.module), None)
            if other is not None:
                raise ModelError(
                    f"{tensor.name} of unit {unit.module or '(root)'} is tied to {other} of unit "
                    f"{owners[other] or '(root)'}: a tied parameter needs one unit that holds all its users{hint}"
                )


def split_trainable(model: nn.Module, plan: ShardingPlan) -> ShardingPlan:
    """For flat parameters that are trainable as a whole: the plan with further units, so that no unit has both kinds.

    The trainable leaf modules become units. Where adapters hang bare in a PEFT layer (LoRA of an embedding), that layer does,
    and the frozen module in it. Raises `ModelError` naming what has no module of its own.
    """
    modules = {clean_name(name): each for name, each in reversed(list(model.named_modules(remove_duplicate=False)))}
    for unit in plan.units:
        if len({tensor.is_trainable for tensor in unit.parameters}) < 2:
            continue
        for tensor in unit.parameters:
            if tensor.is_trainable:
                for module in _to_split(plan, modules, tensor.name):
                    plan = split_units(plan, [module])
    _refuse_shared(plan, ": use use_orig_params=True, or FSDP2, where trainable and frozen parameters share a unit")
    return plan


def _to_split(plan: ShardingPlan, modules: dict[str, nn.Module], name: str) -> Iterator[str]:
    """Modules that must become units for this trainable parameter to be apart from frozen ones."""
    home = name.rpartition(".")[0]
    unit = next(unit for unit in plan.units if any(tensor.name == name for tensor in unit.parameters))
    if all(tensor.is_trainable for tensor in unit.parameters):
        return
    odd = _reader(modules, home)
    if odd is not None:
        raise ModelError(
            f"{name}: {odd} ({type(modules[odd]).__name__}) reads its parts' weights without calling them, so they cannot be "
            "units of their own, as FSDP1 with use_orig_params=False needs; use use_orig_params=True, or FSDP2"
        )
    trains_alone = all(tensor.is_trainable for tensor in unit.parameters if tensor.name.startswith(f"{home}."))
    if trains_alone and home != unit.module and not isinstance(modules[home], nn.ParameterDict):
        yield home
        return
    layer = next(f for f in _above(home) if not isinstance(modules[f], nn.ParameterDict | nn.ModuleDict))
    if is_adapter_name(name):
        frozen = [
            tensor for tensor in unit.parameters if tensor.name.startswith(f"{layer}.") and not tensor.is_trainable
        ]
        homes = {tensor.name.rpartition(".")[0] for tensor in frozen}
        if layer not in homes and not any(tensor.aliases for tensor in frozen):
            yield from sorted(homes)
            if layer != unit.module:
                yield layer
            return
    raise ModelError(
        f"{name} is trainable, the rest of {layer or 'the root'} is frozen, and it has no module of its own to be a unit "
        "(an embedding's LoRA on a tied weight, a trained bias): FSDP1 with use_orig_params=False cannot take that; use "
        "use_orig_params=True, or FSDP2"
    )


def _reader(modules: dict[str, nn.Module], name: str) -> str | None:
    """The innermost module around this one, or it itself, that reads its parts' weights without calling them; None if none does."""
    return next((above for above in _above(name) if type(modules[above]).__name__ in _READS_WITHOUT_CALLING), None)


def _above(name: str) -> Iterator[str]:
    """The name, and those of the modules around it, inside out; the root's is empty."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
