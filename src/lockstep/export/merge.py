"""A base weight's elements and an adapter's tensors in; the elements of the merged weight out, to the bit what PEFT would make.

*rows* way: a range of W's elements is merged where it lies, before it travels: the delta is computed on the whole rows
(columns, where PEFT transposes it) that cover the range. A row of B @ A depends on no other row, except that the CPU's matrix
product takes another kernel for fewer than a handful of them, so at least `MIN_ROWS` are computed where the matrix has them.
*scratch* way: whole tensors are put into a copy of the PEFT module and PEFT's own `merge()` runs there.

The rounding is that of peft.tuners.lora 0.21 on a CPU, on every device: factors of 16 bits are multiplied in fp32, the delta
rounded to their dtype; a linear layer's sum is taken in the wider dtype and rounded once to the base's, embeddings and experts
round the delta to the base's dtype first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from lockstep.errors import IncompleteExport
from lockstep.sharding.skeleton import skeleton as plain_copy
from lockstep.types import TensorSpec

MIN_ROWS = 16
"""Slices of fewer rows than this are not sure to round like the whole product (measured: 1 to 3 rows differ on MKL)."""

_CHUNK_ELEMENTS = 1 << 19
"""A delta is computed for about this many elements at a time: what merging needs beside its result. Twice as many are slower:
each temporary is then 4 MiB, which a C library gives back to the system and faults in again."""

Kind = Literal["linear", "conv1d", "embedding", "experts"]


@dataclass(frozen=True, slots=True)
class RowsMerge:
    """A weight that is merged range by range: W + scaling * delta(A, B)."""

    base: str
    """Live name of W."""
    a: str
    """Live name of A: [rank, in] (experts: [rank * experts, in])."""
    b: str
    """Live name of B: [out, rank] (experts: [out, rank * experts])."""
    kind: Kind
    """linear: W is [out, in]; conv1d and embedding: [in, out]; experts: [experts, out, in], or [experts, in, out]."""
    scaling: float
    """The layer's own, as PEFT computed it."""
    shape: tuple[int, ...]
    """Of W."""
    rank: int
    """Of the adapter (experts: of one expert's)."""
    base_dtype: torch.dtype
    lora_dtype: torch.dtype
    is_transposed: bool = False
    """experts only: W is [experts, in, out]."""


@dataclass(frozen=True, slots=True)
class ScratchMerge:
    """A PEFT module that is merged whole, by PEFT itself, on a copy."""

    module: str
    """Clean name of the PEFT module."""
    adapter: str
    inputs: tuple[str, ...]
    """Live names of every tensor that the copy is filled with."""
    outputs: tuple[str, ...]
    """Live names of the base tensors that may change."""
    reason: str
    """Why not by rows."""
    dequantised: TensorSpec | None = None
    """A quantised base: the weight (under its live name) that its own `dequantize` makes, before the adapter is merged into it."""
    dropped: tuple[str, ...] = ()
    """Live names of the quantised base's tensors that the plain weight has no use for (scales and the like)."""


def merge_window(merge: RowsMerge, *, start: int, stop: int) -> tuple[int, int]:
    """Which rows of B ("linear") a range of W's elements needs, half open; empty for an empty range.

    For the other kinds the whole of B is needed, whatever the range.
    """
    if stop <= start:
        return (0, 0)
    if merge.kind != "linear":
        return (0, merge.shape[-1])
    width = merge.shape[1]
    return _widen(start // width, -(-stop // width), 0, merge.shape[0])


def merge_elements(
    merge: RowsMerge, base: torch.Tensor, *, start: int, a: torch.Tensor, b: torch.Tensor, first_row: int = 0
) -> torch.Tensor:
    """A new tensor: elements [start, start + len(base)) of the merged weight, row-major, in the base's dtype.

    base: those elements of W, 1-D; it is only read. a: the whole of A. b: the whole of B, or for "linear" rows of it from
    `first_row` on: those of the range, and `MIN_ROWS` in all where B has so many. Beside the result it needs about
    `_CHUNK_ELEMENTS` elements (experts: one expert's delta). Raises `ValueError` when B's rows are not enough.
    """
    merged = torch.empty_like(base)
    merge_into(merged, merge, base, start=start, a=a, b=b, first_row=first_row)
    return merged


def merge_into(
    out: torch.Tensor,
    merge: RowsMerge,
    base: torch.Tensor,
    *,
    start: int,
    a: torch.Tensor,
    b: torch.Tensor,
    first_row: int = 0,
) -> None:
    """`merge_elements`, written to `out` [len(base)], whose dtype may be another: rounded to the base's dtype, then to that."""
    if not base.numel():
        return
    with torch.autocast(base.device.type, enabled=False):  # which would round the product to 16 bits
        _add_delta(out, merge, base.detach(), start=start, a=a, b=b, first_row=first_row)


def _add_delta(
    out: torch.Tensor,
    merge: RowsMerge,
    base: torch.Tensor,
    *,
    start: int,
    a: torch.Tensor,
    b: torch.Tensor,
    first_row: int,
) -> None:
    stop = start + base.numel()
    row = merged_row_elements(merge)  # elements per row of W (experts: per expert)
    rows = merge.shape[0]
    low_row, high_row = (first_row, first_row + b.shape[0]) if merge.kind == "linear" else (0, rows)
    is_covered = low_row <= start // row and -(-stop // row) <= high_row
    if not is_covered or high_row - low_row < min(MIN_ROWS, rows):
        need = merge_window(merge, start=start, stop=stop)
        raise ValueError(
            f"{merge.base}: elements {start} to {stop} need rows {need[0]} to {need[1]} of {merge.b}, "
            f"rows {low_row} to {high_row} came; gather what merge_window names"
        )
    step = 1 if merge.kind == "experts" else max(MIN_ROWS, _CHUNK_ELEMENTS // row)
    for first in range(start // row, -(-stop // row), step):
        last = min(first + step, -(-stop // row))
        window = (first, last) if merge.kind == "experts" else _widen(first, last, low_row, high_row)
        delta = _delta(merge, a, b, window, first_row).reshape(-1)
        low, high = max(start, first * row), min(stop, last * row)
        part = delta[low - window[0] * row : high - window[0] * row]
        was = base[low - start : high - start]
        # The sum is rounded to the base's dtype before anything else, as in PEFT's `weight += delta`.
        out[low - start : high - start].copy_(_sum(was, part).to(base.dtype))


def _sum(was: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """In the wider dtype; `delta` may be overwritten. An addition of two dtypes is several times slower than a cast and one of
    equal dtypes, on a CPU."""
    wider = torch.promote_types(was.dtype, delta.dtype)
    return delta.add_(was.to(wider)) if delta.dtype is wider else delta.to(wider).add_(was)


def merged_row_elements(merge: RowsMerge) -> int:
    """Elements of W per index of its first dimension."""
    return merge.shape[1] * merge.shape[2] if merge.kind == "experts" else merge.shape[1]


def _widen(first: int, last: int, low: int, high: int) -> tuple[int, int]:
    """At least MIN_ROWS rows around [first, last), where there are that many in [low, high)."""
    last = max(last, min(high, first + MIN_ROWS))
    return max(low, min(first, last - MIN_ROWS)), last


def _delta(merge: RowsMerge, a: torch.Tensor, b: torch.Tensor, window: tuple[int, int], first_row: int) -> torch.Tensor:
    """Rows `window` of the delta as PEFT would add it to W, [rows, ...]."""
    if merge.kind == "experts":
        return _expert_delta(merge, a, b, window)
    lora_dtype = b.dtype
    wide = lora_dtype in (torch.float16, torch.bfloat16)
    if merge.kind == "linear":
        b = b[window[0] - first_row : window[1] - first_row]
    else:
        a = a[:, window[0] : window[1]]
    if wide:
        a, b = a.float(), b.float()
    delta = (b @ a).mul_(merge.scaling)
    delta = (delta if merge.kind == "linear" else delta.T).to(lora_dtype)
    return delta.to(merge.base_dtype) if merge.kind == "embedding" else delta


def _expert_delta(merge: RowsMerge, a: torch.Tensor, b: torch.Tensor, window: tuple[int, int]) -> torch.Tensor:
    """peft.tuners.lora.ParamWrapper.get_delta_weight for some of the experts: [experts, out, in] or [experts, in, out]."""
    experts = merge.shape[0]
    a = a.reshape(experts, -1, a.shape[-1])[window[0] : window[1]]  # [experts, rank, in]
    b = b.reshape(b.shape[0], -1, experts)[..., window[0] : window[1]]  # [out, rank, experts]
    into = "e i o" if merge.is_transposed else "e o i"
    return (torch.einsum(f"o r e, e r i -> {into}", b, a) * merge.scaling).to(merge.base_dtype)


@torch.no_grad()
def merge_scratch(
    model: nn.Module, merge: ScratchMerge, values: Mapping[str, torch.Tensor], *, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """The merged whole tensors by live name, where the inputs were. `model` is the skeleton; it stays as it is.

    values: the tensors that `merge.inputs` names, whole. Base weights among them may be merged in place: they belong to the
    callee from here on. PEFT's rounding depends on the device, so values are merged on the CPU ("meta": a trial
    without values). Bounded by the module's own size.
    Raises `IncompleteExport` when a value is missing or of another shape.
    """
    copy = plain_copy(model.get_submodule(merge.module) if merge.module else model, {})
    for name in merge.inputs:
        if name not in values:
            raise IncompleteExport(f"merging {merge.module} needs {name!r}, which did not come")
        _put(copy, _relative(name, merge.module), values[name].detach().to(device), name)
    home = values[merge.outputs[0]].device
    outputs = {name: _relative(name, merge.module) for name in merge.outputs}
    before = {name: _owner(copy, relative) for name, relative in outputs.items()}
    with torch.autocast("cpu", enabled=False):
        plain = None
        if merge.dequantised is not None:
            plain = _dequantise(copy, before[merge.outputs[0]][0])
        if isinstance(copy, BaseTunerLayer) or hasattr(copy, "unload_and_optionally_merge_module"):
            _peft_merge(copy, merge.adapter)
    if plain is not None:
        return {merge.outputs[0]: plain.weight.detach().to(home)}  # type: ignore[union-attr,operator]
    # Some of PEFT's layers hang the trained module in the base's place (LNTuning); others unwrap it (attention's projections).
    merged = {}
    for name, (module, attr) in before.items():
        now = _registered(copy, outputs[name].rpartition(".")[0])
        merged[name] = getattr(module if now is None else now, attr).detach().to(home)
    return merged


def _dequantise(copy: nn.Module, base: nn.Module) -> nn.Module:
    """A linear layer with the weight that `base` says it stands for, hung where `base` hung."""
    weight: torch.Tensor = base.dequantize()  # type: ignore[operator]
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(weight.detach(), requires_grad=False)
    plain.register_parameter("bias", base._parameters.get("bias"))
    if isinstance(copy, LoraLayer):
        copy.base_layer = plain
        # PEFT's layers over quantised bases would quantise the sum again.
        copy.__class__ = LoraLinear  # type: ignore[assignment]
    return plain


def _peft_merge(module: nn.Module, adapter: str) -> None:
    if hasattr(module, "unload_and_optionally_merge_module"):
        module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=[adapter])  # type: ignore[operator]
    else:
        cast(BaseTunerLayer, module).merge(safe_merge=False, adapter_names=[adapter])


def _relative(name: str, module: str) -> str:
    return name.removeprefix(f"{module}.") if module else name


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attr = name.rpartition(".")
    return root.get_submodule(path), attr


def _registered(root: nn.Module, path: str) -> nn.Module | None:
    """The module of this path, if it is still there; by the registrations alone, since PEFT's attention computes its attributes."""
    module: nn.Module | None = root
    for key in path.split(".") if path else ():
        module = module._modules.get(key) if module is not None else None
    return module


def _put(root: nn.Module, name: str, value: torch.Tensor, live: str) -> None:
    module, attr = _owner(root, name)
    old = getattr(module, attr)
    if old.shape != value.shape:
        raise IncompleteExport(f"{live}: the model's is {list(old.shape)}, what came is {list(value.shape)}")
    if attr in module._parameters:
        module._parameters[attr] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[attr] = value
