"""A sharded model whose base is on meta and its checkpoint's files in; every rank's own elements, read from the files, out.

No rank holds the whole model, nor more of a tensor than the rows that cover its own elements (all of one tensor, where a
conversion of transformers needs all of it). Names that are stored otherwise (fused experts, other prefixes) are mapped as
transformers maps them; only where its conversion does not work tensor by tensor does each rank load the whole checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lockstep.dist import World, agree, all_or_none
from lockstep.errors import ModelError
from lockstep.model.contents import content_lines
from lockstep.model.elements import Reader
from lockstep.model.load import ModelFiles, build_empty, find_model, find_weights
from lockstep.model.peft_tree import base_model, base_names, saved_copies
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.buffers import LiveTensors, send_buffers
from lockstep.sharding.plan import PlannedTensor

log = logging.getLogger(__name__)

_COMPARED_AT_ONCE = 1 << 22
"""Elements of each of two stored tensors that are in memory while the two are compared."""


def fill(
    sharded: ShardedModel,
    source: ModelFiles | str | Path,
    *,
    attention: str = "sdpa",
    strict: bool = False,
    keep: Collection[str] = (),
) -> None:
    """Collective. Give the base model its checkpoint's values, on every rank, before or after an adapter was put in.

    `source`: a folder with safetensors files, or what `find_model` found there. Every base parameter is read, whether it has
    values or not; of `modules_to_save`, the kept original always and the trained copy if it was on meta. Adapters that have
    values are left alone. Values are cast to the model's dtypes, tensor by tensor. Persistent buffers come from the files;
    all others are rank 0's (made by the model's constructor if rank 0's are on meta too), so that all ranks have the same.

    A stored tensor that nothing in the model is made of is a warning with its name, and a `ModelError` with `strict` (a model
    that was stripped of a part leaves that part's tensors unused). Raises `ModelError` on every rank when a tensor is
    missing, misshapen or of a dtype that cannot be cast, for an adapter without values, and where the files hold other values
    under each name of a tied tensor.

    `keep`: plain names of base parameters that have their values already and are not looked for in the files (a new head).
    `RanksDisagree` when ranks have other plans, or files that are not the same: copies with other values, dtypes, sizes or
    layout (folders may differ). Compared are all headers, all bytes of small files and tensors, and 16 KiB of every large
    tensor (`model.contents`); what differs only in between is not seen, nor is another config.json.
    `attention` is used only where the model must be built (missing buffers) or loaded whole.
    """
    if isinstance(sharded, nn.Module):
        raise TypeError(f"fill takes what lockstep.shard(model) returns; a {type(sharded).__name__} came")
    world = sharded.world
    # Values written beside what a forward left gathered would not be seen by the next one (pytorch#131965).
    sharded.settle()
    with ExitStack() as opened, torch.no_grad():
        with all_or_none(world, "opening the checkpoint"):
            files = source if isinstance(source, ModelFiles) else find_weights(source)
            reading = _plan_reading(sharded, files, opened, attention=attention, keep=keep)
            _tell(reading, world, strict=strict)
        agree(
            world, phase="fill", fingerprint="\n".join(reading.lines(sharded)), describe=lambda: reading.lines(sharded)
        )
        with all_or_none(world, "reading the checkpoint"):
            _read(sharded, reading)
            fixed = _buffers_of_rank0(sharded, reading, attention) if world.is_main else {}
        sharded.copy_to_replicas()
        send_buffers(sharded, [tensor.name for tensor in reading.fixed], fixed)
    with all_or_none(world, "checking that every tensor has a value"):
        _check_nothing_left(sharded)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What is read from where: pure names, the same on every rank, and the open files."""

    files: ModelFiles
    reader: Reader
    parameters: tuple[tuple[PlannedTensor, str], ...]
    """What is read, with its plain name; in the order of the files."""
    buffers: tuple[tuple[PlannedTensor, str], ...]
    fixed: tuple[PlannedTensor, ...]
    """Buffers that are not in the files."""
    plain: dict[str, str]
    """Plain name of every base tensor, by clean name."""
    tied: tuple[tuple[PlannedTensor, tuple[str, ...]], ...]
    """Tensors that the files hold under several plain names, and those names: the first is read."""
    contents: list[str]
    """What this rank's files hold (`content_lines`)."""

    def lines(self, sharded: ShardedModel) -> list[str]:
        """What ranks compare before they read: the plan, and which tensors come from where."""
        read = sorted(f"from the files: {plain}" for _, plain in (*self.parameters, *self.buffers))
        fixed = (f"from rank 0: buffer {tensor.name}" for tensor in self.fixed)
        return [*sharded.plan.lines(), *read, *fixed, *self.contents]


def _plan_reading(
    sharded: ShardedModel, files: ModelFiles, opened: ExitStack, *, attention: str, keep: Collection[str]
) -> _Reading:
    """Raises `ModelError` for what is missing or does not fit, before anything is read."""
    base, copies = base_names(sharded.skeleton), saved_copies(sharded.skeleton)
    persistent = sharded.skeleton.state_dict().keys()
    parameters = [pair for pair in _parameters_to_read(sharded, base, copies) if not set(pair[1]) & set(keep)]
    buffers = [tensor for tensor in sharded.plan.buffers if tensor.name in persistent and tensor.name in base]
    every = [*parameters, *((tensor, [base[tensor.name]]) for tensor in buffers)]
    wanted = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor, names in every for name in names
    }
    model = base_model(sharded.skeleton)
    reader = opened.enter_context(Reader(files, model, wanted, attention=attention))
    found = reader.matched.sources
    # Of tied names the files hold one or several: the first that is there.
    there = [(tensor, tuple(name for name in names if name in found) or (names[0],)) for tensor, names in parameters]
    chosen = [(tensor, names[0]) for tensor, names in there]
    tied = tuple((tensor, names) for tensor, names in there if len(names) > 1)
    stored = [(tensor, base[tensor.name]) for tensor in buffers if base[tensor.name] in found]
    for name in (*(name for _, names in there for name in names), *(name for _, name in stored)):
        reader.check(name)
    chosen.sort(key=lambda pair: reader.place(pair[1]))
    in_files = {tensor.name for tensor, _ in stored}
    fixed = tuple(tensor for tensor in sharded.plan.buffers if tensor.name not in in_files)
    contents = content_lines(files.weights) if sharded.world.size > 1 else []
    return _Reading(files, reader, tuple(chosen), tuple(stored), fixed, base, tied, contents)


def _parameters_to_read(
    sharded: ShardedModel, base: dict[str, str], copies: dict[str, str]
) -> list[tuple[PlannedTensor, list[str]]]:
    """(parameter, plain names that it may be stored under). Raises `ModelError` for adapters without values."""
    out: list[tuple[PlannedTensor, list[str]]] = []
    unfilled = set(sharded.unfilled())
    empty: list[str] = []
    for tensor in sharded.plan.parameters:
        names = (tensor.name, *tensor.aliases)
        own = [base[name] for name in names if name in base]
        if own:
            out.append((tensor, own))
        elif tensor.name in unfilled:
            copied = [copies[name] for name in names if name in copies]
            if copied:
                out.append((tensor, copied))
            else:
                empty.append(tensor.name)
    if empty:
        raise ModelError(
            f"{len(empty)} adapter tensors have no values and are in no base checkpoint, first {empty[0]!r}: initialise the adapter "
            "on real memory, with one seed on every rank, before sharding (inject_lora does), or on rank 0 and shard from there"
        )
    return out


def _tell(reading: _Reading, world: World, *, strict: bool) -> None:
    """Warn about (or refuse) what is not used, and about tensors that only a whole load can give."""
    known = set(reading.plain.values())
    unused = [name for name in reading.reader.matched.unused if name not in known]
    if unused and strict:
        raise ModelError(
            f"{len(unused)} tensors of {reading.files.path} are part of nothing in the model, first {unused[:3]}; give the "
            "checkpoint of this model, or strict=False if a part of the model was left out on purpose"
        )
    if unused and world.is_main:
        log.warning("%d stored tensors are part of nothing in the model, first %s", len(unused), unused[:3])
    unbuilt = reading.reader.unbuilt()
    if unbuilt and world.is_main:
        name, why = next(iter(unbuilt.items()))
        log.warning(
            "%d tensors, the first %r, cannot be converted one by one (%s); each rank reads the whole checkpoint through "
            "transformers",
            len(unbuilt),
            name,
            why.reason,
        )


def _read(sharded: ShardedModel, reading: _Reading) -> None:
    """Not collective: this rank's elements of every parameter, one after the other, and whole buffers."""
    for tensor, names in reading.tied:
        for other in names[1:]:
            _check_tied(sharded, reading, tensor, names[0], other)
    for tensor, plain in reading.parameters:
        start, stop = sharded.ranges(tensor.name)[sharded.world.rank]
        # No name for the values: it would keep them while the next ones are read.
        sharded.write_local(tensor.name, reading.reader.read(plain, start, stop, dim=sharded.shard_dim(tensor.name)))
    live = LiveTensors(sharded.module)
    for tensor, plain in reading.buffers:
        live.write_buffer(tensor, reading.reader.read_tensor(plain), sharded.world.device)


def _check_tied(sharded: ShardedModel, reading: _Reading, tensor: PlannedTensor, first: str, other: str) -> None:
    """This rank's elements of one tensor, as stored under two names. Raises `ModelError` where they differ in the model's dtype.

    transformers unties what is stored with other values (since 5.0), so that its model would not be this one.
    """
    begin, end = sharded.ranges(tensor.name)[sharded.world.rank]
    for start in range(begin, end, _COMPARED_AT_ONCE):
        stop = min(start + _COMPARED_AT_ONCE, end)
        one, two = (
            reading.reader.read(name, start, stop, dim=sharded.shard_dim(tensor.name)) for name in (first, other)
        )
        # Bits too: NaN is equal to nothing.
        if not torch.equal(one, two) and not torch.equal(one.view(torch.uint8), two.view(torch.uint8)):
            raise ModelError(
                f"{reading.files.path}: the checkpoint stores other values under {other!r} than under {first!r}, which are one "
                "tensor in the model; load it with tie_word_embeddings=False (and build the model so), or remove the one that "
                "is not meant from the files"
            )


def _buffers_of_rank0(sharded: ShardedModel, reading: _Reading, attention: str) -> dict[str, torch.Tensor]:
    """Rank 0's values of the buffers that no file holds. Not collective.

    Raises `ModelError` for one that is on meta and that the constructor of the checkpoint's model does not make either.
    """
    out = {tensor.name: sharded.buffer(tensor.name) for tensor in reading.fixed}
    empty = [tensor for tensor in reading.fixed if out[tensor.name].is_meta]
    if not empty:
        return out
    built = _constructed(reading.files, empty[0].dtype, attention)
    for tensor in empty:
        made = built.get(reading.plain.get(tensor.name, ""))
        if made is None or tuple(made.shape) != tensor.shape:
            came = "nothing" if made is None else f"shape {list(made.shape)}"
            raise ModelError(
                f"buffer {tensor.name!r} {list(tensor.shape)} is on meta and in no file, and the constructor of the checkpoint's "
                f"model makes {came} for it: build the model with real buffers (build_empty does)"
            )
        out[tensor.name] = made.to(tensor.dtype)
    return out


def _constructed(files: ModelFiles, dtype: torch.dtype, attention: str) -> dict[str, torch.Tensor]:
    """Buffers that the constructor of the checkpoint's model makes; none for a folder without a configuration."""
    if files.config is None:
        if not (files.path / "config.json").is_file():
            return {}
        files = find_model(str(files.path))
    return dict(build_empty(files, dtype=dtype, attention=attention).named_buffers())


def _check_nothing_left(sharded: ShardedModel) -> None:
    left = sharded.unfilled()
    if left:
        raise ModelError(f"{len(left)} tensors got no value from the checkpoint, the first {left[0]!r}")
