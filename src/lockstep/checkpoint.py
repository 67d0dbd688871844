"""A training state in, `checkpoints/step-N/` out, and back: whole and verified, or not there at all.

```
step-000010/
  adapter/     PEFT folder: plain PeftModel.from_pretrained loads it
  critic/      where there is one: a PEFT folder for token classification, its head included, or value_head.safetensors
  state/       torch.distributed.checkpoint: what is trained and its optimizers, readable on any number of ranks by either FSDP
  files.json   step, policy version, and size + xxh3-128 of every other file: what makes the checkpoint complete
```
Random numbers, data order and learning rate are functions of (seed, step), so the step number is all that resuming
needs beside these tensors.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor

from lockstep.checkpoint_parts import Part, read_parts, stored_numels, write_parts
from lockstep.dist import World, agree, all_or_none, gather_texts, sum_over_ranks
from lockstep.errors import CheckpointError, ModelError
from lockstep.export.stream import export_weights
from lockstep.export.what import AdapterExport
from lockstep.files import (
    FILE_LIST,
    atomic_write_text,
    begin_dir,
    commit_dir,
    describe_files,
    explain_os_errors,
    find_fault,
    temporary_dir,
)
from lockstep.model.lora import is_reference_name
from lockstep.names import clean_name, is_adapter_name
from lockstep.sharding.base import ShardedModel
from lockstep.train.loss_scale import LossScaler
from lockstep.train.optim import MasterAdamW

log = logging.getLogger(__name__)

_PREFIX = "step-"


@dataclass(frozen=True, slots=True)
class TrainState:
    """What is saved: live objects, filled in place by `load`."""

    sharded: ShardedModel
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None = None
    """Over a float16 base. The same on every rank, so it stands in `files.json`."""
    critic: CriticState | None = None

    def halves(self) -> dict[str, TrainState | CriticState]:
        """By how the names of their tensors begin in `state/`."""
        return {"": self} if self.critic is None else {"": self, "critic.": self.critic}


@dataclass(frozen=True, slots=True)
class CriticState:
    """A critic's half of it: a value model with LoRA, or a value head alone."""

    sharded: ShardedModel
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint."""

    path: Path
    step: int


def save(folder: Path, state: TrainState, *, step: int, keep: int, extra: dict[str, Any] | None = None) -> Path:
    """Collective. Write `folder/step-N` under a temporary name, then rename; then delete all but the newest `keep`.

    Raises `CheckpointError` on every rank when one cannot write; what was there before stays.
    """
    world = state.sharded.world
    target = folder / f"{_PREFIX}{step:06d}"
    draft = temporary_dir(target)
    with all_or_none(world, "starting a checkpoint"):
        if world.is_main:
            begin_dir(target)
    _save_adapter(draft / "adapter", state.sharded)
    if state.critic is not None:
        _save_critic(draft / "critic", state.critic.sharded)
    try:
        with explain_os_errors(draft):
            write_parts(draft / "state", _parts(state), world.control)
    except CheckpointException as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(f"cannot write {draft / 'state'}: {_first_cause(error)}") from error
    with all_or_none(world, "finishing a checkpoint"):
        if world.is_main:
            meta = {"step": step, "world_size": world.size, **(extra or {}), "files": describe_files(draft)}
            if state.scaler is not None:
                meta["loss_scaler"] = state.scaler.state()
            atomic_write_text(draft / FILE_LIST, json.dumps(meta, indent=1))
            commit_dir(draft, target)
            _delete_old(folder, keep, upto=step)
    return target


def newest(folder: Path, world: World) -> Found | None:
    """Collective. The newest checkpoint whose every file is as it was written; damaged ones are named and passed over.

    None if there are none at all. Raises `CheckpointError` on every rank if there are some and none is whole: to start
    anew would write over what the run has done.
    """
    choice = ""
    with all_or_none(world, "looking for a checkpoint"):
        if world.is_main:
            choice = _newest_whole(folder)
    name = gather_texts(world, choice, phase="choice of a checkpoint")[0]
    return Found(folder / name, int(name.removeprefix(_PREFIX))) if name else None


def load(found: Found, state: TrainState) -> dict[str, Any]:
    """Collective. Put a checkpoint's tensors into live models and optimizers, on any number of ranks; its `files.json`.

    The adapter's elements of this rank are held twice meanwhile. Raises `CheckpointError` naming a tensor that only one of the
    two has, or that has another size there.
    """
    world = state.sharded.world
    for half in state.halves().values():
        half.sharded.settle()  # values written beside what a forward left gathered would not be seen by the next one
    stored = stored_numels(found.path / "state")
    parts = _parts(state, wanted=set(stored))
    lines = [f"{name} {part.elements.dtype} {list(part.shape)}" for name, part in parts.items()]
    agree(world, phase="load of a checkpoint", fingerprint="\n".join(lines), describe=lambda: lines)
    odd = sorted(set(stored) ^ set(parts)) or [name for name, part in parts.items() if part.numel != stored[name]]
    if odd:
        here = list(parts[odd[0]].shape) if odd[0] in parts else "not there"
        raise CheckpointError(
            f"{found.path} is of another model or optimizer: {odd[0]!r} has {stored.get(odd[0], 'no')} elements there and is {here} "
            "here"
        )
    try:
        read_parts(found.path / "state", parts, world.control)
    except CheckpointException as error:
        raise CheckpointError(f"cannot read {found.path / 'state'}: {_first_cause(error)}") from error
    for prefix, half in state.halves().items():
        for name, _ in half.sharded.trainable():
            half.sharded.write_local(name, parts[f"{prefix}adapter.{name}"].elements)
        for name, key in _references(half.sharded, prefix):
            if key in parts:
                half.sharded.write_local(name, parts[key].elements)
        half.sharded.copy_to_replicas()
    meta = json.loads((found.path / FILE_LIST).read_text())
    if state.scaler is not None and "loss_scaler" in meta:  # not there after steps in another dtype
        state.scaler.load(meta["loss_scaler"])
    return meta


def save_adapter_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Write a PEFT folder. Not collective. Refuses what would load without an error and do nothing: a name that PEFT does not
    look for (wrapper segments, no `base_model.model.`), a LoRA matrix that is empty or only a slice of one.
    """
    for name, tensor in tensors.items():
        if clean_name(name) != name or not name.startswith("base_model.model."):
            raise CheckpointError(f"{name!r} is not a name of a PEFT file: the adapter would load and do nothing")
        if tensor.numel() == 0 or (is_adapter_name(name) and name.endswith(".weight") and tensor.ndim < 2):
            raise CheckpointError(f"{name} is {list(tensor.shape)}, not a whole LoRA matrix: refusing to write it")
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            folder / "adapter_model.safetensors",
            {"format": "pt"},
        )
        atomic_write_text(folder / "adapter_config.json", json.dumps(config, indent=2, sort_keys=True))


def read_adapter_folder(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and configuration of a PEFT folder. Not collective. Raises `ModelError` if it is not one."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        return load_file(folder / "adapter_model.safetensors"), config
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"{folder} is not a PEFT folder (adapter_config.json + adapter_model.safetensors): {error}"
        ) from error


def _save_adapter(folder: Path, sharded: ShardedModel) -> None:
    tensors, config = _adapter_of(sharded)
    with all_or_none(sharded.world, "writing the adapter"):
        if sharded.world.is_main:
            save_adapter_folder(folder, tensors, config)


def _adapter_of(sharded: ShardedModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Collective. Tensors (on rank 0) and configuration of a PEFT folder."""
    tensors: dict[str, torch.Tensor] = {}
    with export_weights(sharded, AdapterExport(), to=0) as stream:
        for bucket in stream:
            tensors.update(bucket.items())
    return tensors, dict(stream.plan.adapter_config or {})


def _save_critic(folder: Path, sharded: ShardedModel) -> None:
    """Collective. PEFT keeps a head that is trained whole under its own name, as the adapter's other tensors."""
    head = {name: _whole(sharded, name) for name, _ in sharded.trainable() if not is_adapter_name(name)}
    has_adapter = len(head) < len(sharded.trainable())
    tensors, config = _adapter_of(sharded) if has_adapter else ({}, {})
    with all_or_none(sharded.world, "writing the critic"):
        if sharded.world.is_main and has_adapter:
            save_adapter_folder(folder, tensors | head, config | {"task_type": "TOKEN_CLS"})
        elif sharded.world.is_main:
            with explain_os_errors(folder):
                folder.mkdir(parents=True)
                save_file(head, folder / "value_head.safetensors", {"format": "pt"})


def _whole(sharded: ShardedModel, name: str) -> torch.Tensor:
    """Collective. A small trained tensor, gathered as a sum of what each rank holds of it (float64: exact)."""
    planned = next(tensor for tensor in sharded.plan.parameters if tensor.name == name)
    start, stop = sharded.ranges(name)[sharded.world.rank]
    mine = [0.0] * planned.numel
    mine[start:stop] = sharded.local_flat(name).tolist()
    return torch.tensor(sum_over_ranks(mine, sharded.world), dtype=planned.dtype).reshape(planned.shape)


def _parts(state: TrainState, wanted: set[str] | None = None) -> dict[str, Part]:
    """Of all halves, by name."""
    halves = state.halves().items()
    return {name: part for prefix, half in halves for name, part in _parts_of(half, prefix, wanted).items()}


def _parts_of(state: TrainState | CriticState, prefix: str, wanted: set[str] | None) -> dict[str, Part]:
    """This rank's elements by name. For loading (`wanted` given), the adapter's are copies, to be written back, and optimizer
    state that does not exist yet is made, as zeros.

    A parameter that never had a step has no optimizer state: it is neither saved nor expected (transformers #25849). The frozen
    copy of the adapter that training started from is saved, and expected where it was: its folder may be gone by now.
    """
    out: dict[str, Part] = {}
    is_master = isinstance(state.optimizer, MasterAdamW)
    names = ("step", "exp_avg", "exp_avg_sq", *(("master",) if is_master else ()))
    shapes = {tensor.name: tensor.shape for tensor in state.sharded.plan.parameters}
    for name, param in state.sharded.trainable():
        start, stop = _range_of(state.sharded, name, param)
        mine = state.sharded.local_flat(name)
        out[f"{prefix}adapter.{name}"] = Part(mine if wanted is None else mine.clone(), start, shapes[name])
        slots = state.optimizer.state.get(param, {})
        for slot in names:
            key = f"{prefix}optimizer.{name}.{slot}"
            if wanted is not None and key in wanted and slot not in slots:
                state.optimizer.state[param][slot] = _empty_slot(
                    slot, param, torch.float32 if is_master else param.dtype
                )
                slots = state.optimizer.state[param]
            if slot in slots and slot != "step":
                out[key] = Part(_flat(slots[slot]), start, shapes[name])
            elif slot in slots:
                # Of a rank that holds none of the elements it may be behind: there the parameter has no gradient (FSDP1).
                out[key] = Part(_flat(slots[slot])[: 1 if wanted is not None or stop > start else 0], 0, ())
    for name, key in _references(state.sharded, prefix):
        if wanted is None or key in wanted:
            mine = state.sharded.local_flat(name)
            start = state.sharded.ranges(name)[state.sharded.world.rank][0]
            out[key] = Part(mine if wanted is None else mine.clone(), start, shapes[name])
    return out


def _references(sharded: ShardedModel, prefix: str) -> list[tuple[str, str]]:
    """(live name, name in the checkpoint) of the reference's tensors."""
    names = (tensor.name for tensor in sharded.plan.parameters)
    return [(name, f"{prefix}reference.{name}") for name in names if is_reference_name(name)]


def _range_of(sharded: ShardedModel, name: str, param: torch.Tensor) -> tuple[int, int]:
    """This rank's elements of a trained parameter. Raises `CheckpointError` where they are not just what the parameter holds."""
    start, stop = sharded.ranges(name)[sharded.world.rank]
    held = (param.to_local() if isinstance(param, DTensor) else param).numel()
    if sharded.shard_dim(name) or held != stop - start:
        raise CheckpointError(
            f"{name}: this rank trains {held} elements in one parameter, of which {stop - start} are its own, along dimension "
            f"{sharded.shard_dim(name)}. A checkpoint needs parameters that are dealt out by rows, each for itself (FSDP2, or FSDP1 "
            "with use_orig_params=True), without replicas"
        )
    return start, stop


def _flat(slot: torch.Tensor) -> torch.Tensor:
    """A view of this rank's elements of an optimizer's state."""
    return (slot.to_local() if isinstance(slot, DTensor) else slot).detach().view(-1)


def _empty_slot(slot: str, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if slot == "step":
        return torch.zeros((), dtype=torch.float32)
    return torch.zeros_like(param.detach(), dtype=dtype)


def _candidates(folder: Path) -> Iterator[Path]:
    """Newest first."""
    numbered = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    return iter(sorted(numbered, key=lambda path: int(path.name.removeprefix(_PREFIX)), reverse=True))


def _newest_whole(folder: Path) -> str:
    """The name of the newest whole checkpoint, or "" where there is none; says what is wrong with those passed over."""
    faults = []
    for path in _candidates(folder):
        fault = find_fault(path)
        if not fault:
            return path.name
        log.warning("passing over checkpoint %s: %s", path, fault)
        faults.append(f"{path.name}: {fault}")
    if faults:
        raise CheckpointError(
            f"no checkpoint in {folder} can be resumed: {'; '.join(faults)}. Put back a copy of one; to train from the "
            "start, delete them or set run.dir to another path"
        )
    log.warning("%s holds no checkpoint yet: the run starts from its first step", folder)
    return ""


def _delete_old(folder: Path, keep: int, *, upto: int) -> None:
    """Keep the newest `keep` up to step `upto`; a folder is renamed before it is deleted, so that none is ever half there.

    Later ones are damaged ones that a resume passed over: they take no sound one's place, and go when their step is made anew.
    """
    steps = {path: int(path.name.removeprefix(_PREFIX)) for path in _candidates(folder)}
    for path in [path for path, step in steps.items() if step <= upto][keep:]:
        doomed = temporary_dir(path)
        path.rename(doomed)
        shutil.rmtree(doomed)


def _first_cause(error: CheckpointException) -> str:
    rank, failure = next(iter(error.failures.items()))
    cause = failure[0] if isinstance(failure, tuple) else failure
    return f"rank {rank}: {type(cause).__name__}: {cause}"
