"""A skeleton and an adapter's name in; how each base weight that the adapter changes is merged out, or a refusal by name.

Pure: nothing is read but classes, shapes and PEFT's bookkeeping. What can be merged range by range is a `RowsMerge`; everything
else for which PEFT has a `merge()` is a `ScratchMerge`, tried once here on tensors without values, so that what PEFT itself
refuses is refused before any collective.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from peft.tuners.lora import Conv2d, Embedding, Linear, LoraLayer, ParamWrapper
from peft.tuners.lora.layer import Conv1d, Conv3d
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from lockstep.errors import IncompleteExport
from lockstep.export.merge import RowsMerge, ScratchMerge, merge_scratch
from lockstep.export.peft_state import kind_of
from lockstep.model.fake_quant import why_not_lora
from lockstep.model.lora import scaling_of
from lockstep.model.peft_tree import (
    PlainModule,
    Wrapper,
    adapters_of,
    check_adapter,
    check_unmerged,
    containers_of,
    inner_of,
    join,
    tensors_of,
    walk_plain,
)
from lockstep.sharding.skeleton import skeleton as plain_copy
from lockstep.types import TensorSpec

_OVER_PLAIN_WEIGHTS = tuple(f"peft.tuners.lora.{name}" for name in ("layer", "tp_layer", "te"))
"""Where PEFT keeps its LoRA layers over weights as they are; those of its other modules are made for quantised ones."""


@dataclass(frozen=True, slots=True)
class Merges:
    """How an adapter gets into the base."""

    rows: Mapping[str, RowsMerge] = field(default_factory=dict)
    """By live name of W."""
    scratch: tuple[ScratchMerge, ...] = ()

    def of(self, live: str) -> RowsMerge | ScratchMerge | None:
        """What changes the base tensor of this live name."""
        return self.rows.get(live) or next((merge for merge in self.scratch if live in merge.outputs), None)


def plan_merges(model: nn.Module, adapter: str, *, dequantize: bool = False) -> Merges:
    """Every merge of `adapter`, in the model's order. `model` is a skeleton.

    `dequantize`: linear layers over quantised weights, with the adapter or without, become plain ones, by their own
    `dequantize()` from the tensors that are registered on them.
    Raises `IncompleteExport`, naming the module, for what cannot be merged: no such adapter, an adapter merged into the live
    model already, quantised bases otherwise, fake-quantised ones (QAT), a LoRA bias over a layer without bias, and whatever
    PEFT refuses.
    """
    check_adapter(model, adapter)
    check_unmerged(model)
    refuse_fake_quantised(model)
    _refuse_kind(model, adapter)
    others = frozenset(adapters_of(model)) - {adapter}
    rows: dict[str, RowsMerge] = {}
    scratch: dict[str, ScratchMerge] = {}
    whole: list[str] = []
    for module in walk_plain(model, adapter):
        carriers = list(_carriers(module, adapter))
        if dequantize and _quantised(carriers[0].module if carriers else module.module, module.module):
            merge = _dequantising_merge(module, carriers, adapter, others=others)
            scratch.setdefault(merge.module, merge)
            whole.append(merge.module)
            continue
        for wrapper in carriers:
            if any(wrapper.live == name or wrapper.live.startswith(f"{name}.") for name in whole):
                continue  # PEFT merges what is inside such a module along with it
            _refuse(module, wrapper, adapter)
            merge = _rows_merge(module, wrapper, adapter)
            if isinstance(merge, RowsMerge):
                rows.setdefault(merge.base, merge)
            else:
                scratch.setdefault(wrapper.live, _scratch_merge(module, wrapper, adapter, reason=merge, others=others))
                if not isinstance(wrapper.module, ParamWrapper):
                    whole.append(wrapper.live)
    _check_once(rows, scratch)
    if not rows and not scratch and not _saves_modules(model, adapter):
        raise IncompleteExport(
            f"adapter {adapter!r} has no layer that is merged into a base weight; export the adapter"
        )
    _try(model, scratch)
    return Merges(rows, tuple(scratch.values()))


def _refuse_kind(model: nn.Module, adapter: str) -> None:
    """Adapters that act beside the base's weights: a merged export would be the bare base."""
    kind = kind_of(model, adapter)
    if kind.is_prompt or kind.is_adaption_prompt or kind.name in ("XLORA", "SHADOW"):
        instead = "save the adapter with save_pretrained" if kind.is_prompt else "export the adapter"
        raise IncompleteExport(
            f"adapter {adapter!r} is {kind.name}, which PEFT cannot merge into the base's weights: a merged export would be the "
            f"bare base; {instead}"
        )


def _saves_modules(model: nn.Module, adapter: str) -> bool:
    wrappers = (module for module in model.modules() if isinstance(module, ModulesToSaveWrapper))
    return any(adapter in wrapper.modules_to_save for wrapper in wrappers)


def _dequantising_merge(
    module: PlainModule, carriers: list[Wrapper], adapter: str, *, others: frozenset[str]
) -> ScratchMerge:
    """Raises `IncompleteExport` when the base has no `dequantize()`, or it needs more than the registered tensors."""
    wrapper = carriers[0] if carriers else Wrapper(module.live, module.module)
    base, why = module.module, _quantised(wrapper.module, module.module)
    layer = wrapper.module
    is_plain_lora = (
        isinstance(layer, LoraLayer) and not layer.lora_variant.get(adapter) and not layer.lora_bias.get(adapter)
    )
    if len(carriers) > 1 or (carriers and not is_plain_lora) or "weight" not in base._parameters:
        raise IncompleteExport(f"{module.name}: {why}; only plain LoRA over a `weight` is merged after dequantising")
    merge = _scratch_merge(module, wrapper, adapter, reason=why, others=others)
    weight = join(module.live, "weight")
    made = plain_copy(base, {})
    try:
        value = made.dequantize()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise IncompleteExport(
            f"{module.name}: {why}, and {type(base).__name__} cannot dequantise itself from its registered tensors: {error}. "
            "Export the adapter, or load the base unquantised"
        ) from error
    own = [name for name, _ in (*base.named_parameters(), *base.named_buffers()) if name not in ("weight", "bias")]
    return replace(
        merge,
        outputs=(weight,),
        dequantised=TensorSpec(weight, tuple(value.shape), value.dtype),
        dropped=tuple(join(module.live, name) for name in own),
    )


def _carriers(module: PlainModule, adapter: str) -> Iterator[Wrapper]:
    """The wrappers around a module through which the adapter changes its weights, outermost first."""
    inside_tokens = False
    for wrapper in module.wrappers:
        if isinstance(wrapper.module, TrainableTokensWrapper):
            inside_tokens = True
            if adapter in wrapper.module.token_adapter.trainable_tokens_delta:
                yield wrapper
            continue
        layer = wrapper.module if isinstance(wrapper.module, BaseTunerLayer) and not inside_tokens else None
        if layer is not None and any(adapter in container for container in containers_of(layer).values()):
            yield wrapper


def _rows_merge(module: PlainModule, wrapper: Wrapper, adapter: str) -> RowsMerge | str:
    """The merge by rows, or why there is none."""
    layer = wrapper.module
    if not isinstance(layer, LoraLayer) or type(layer) not in (Linear, Embedding, ParamWrapper):
        return f"{type(layer).__name__} is merged by PEFT only"
    variant = layer.lora_variant.get(adapter)
    if variant is not None:
        return f"the adapter is a {type(variant).__name__}"
    if layer.lora_bias.get(adapter, False):
        return "the adapter has a LoRA bias"
    attr = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
    weight = module.module._parameters.get(attr)
    if weight is None:
        return f"{attr} is not a parameter of {type(module.module).__name__}"
    return _rows_of(module, wrapper, adapter, attr=attr, weight=weight)


def _rows_of(
    module: PlainModule, wrapper: Wrapper, adapter: str, *, attr: str, weight: nn.Parameter
) -> RowsMerge | str:
    layer: Any = wrapper.module
    names = ("lora_embedding_A", "lora_embedding_B") if type(layer) is Embedding else ("lora_A", "lora_B")
    live = [join(wrapper.live, f"{name}.{adapter}") for name in names]
    a, b = (getattr(layer, name)[adapter] for name in names)
    if type(layer) is not Embedding:
        live, (a, b) = [f"{name}.weight" for name in live], (a.weight, b.weight)
    rank, shape = layer.r[adapter], tuple(weight.shape)
    if type(layer) is ParamWrapper:
        kind, is_transposed = "experts", not layer._did_swap_in_out_features
        expected = (shape[0], a.shape[1], b.shape[0]) if is_transposed else (shape[0], b.shape[0], a.shape[1])
        fits = len(shape) == 3 and shape[0] > 1 and layer.num_experts == shape[0]
        fits = fits and a.shape[0] == b.shape[1] == shape[0] * rank
    else:
        is_transposed = type(layer) is Embedding or bool(layer.fan_in_fan_out)
        kind = "embedding" if type(layer) is Embedding else "conv1d" if is_transposed else "linear"
        expected = (a.shape[1], b.shape[0]) if is_transposed else (b.shape[0], a.shape[1])
        fits, is_transposed = a.shape[0] == b.shape[1] == rank, False
    if not fits or shape != expected:
        return f"A {list(a.shape)} and B {list(b.shape)} do not fit {attr} {list(shape)} as a plain product"
    base = join(module.live, attr)
    return RowsMerge(
        base=base,
        a=live[0],
        b=live[1],
        kind=kind,
        scaling=scaling_of(layer, adapter),
        shape=shape,
        rank=rank,
        base_dtype=weight.dtype,
        lora_dtype=b.dtype,
        is_transposed=is_transposed,
    )


def _scratch_merge(
    module: PlainModule, wrapper: Wrapper, adapter: str, *, reason: str, others: frozenset[str]
) -> ScratchMerge:
    """Inputs: every tensor below the wrapper that is not another adapter's. Outputs: the base module's parameters.

    Of one parameter's wrapper, only what it merges itself: wrappers of other parameters of the module may lie inside it.
    """
    if isinstance(wrapper.module, ParamWrapper):
        own = [wrapper.module.lora_A[adapter], wrapper.module.lora_B[adapter]]
        kept = {id(param) for layer in own for param in layer.parameters()}
        names = [name for name, param in wrapper.module.named_parameters() if id(param) in kept]
        base = join(module.live, wrapper.module.parameter_name)
        inputs = (*(join(wrapper.live, name) for name in names), base)
        return ScratchMerge(wrapper.live, adapter, inputs, (base,), reason)
    skipped = tensors_of(wrapper.module, others)
    tensors = [name for name, _ in wrapper.module.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in wrapper.module.named_buffers(remove_duplicate=False)]
    inputs = tuple(join(wrapper.live, name) for name in tensors if name not in skipped)
    known = _changed(wrapper.module, adapter)
    outputs = tuple(
        join(plain.live, name)
        for plain in _inside(module, adapter)
        for name, param in plain.module._parameters.items()
        if param is not None and (known is None or (plain.module is module.module and name in known))
    )
    return ScratchMerge(wrapper.live, adapter, inputs, outputs, reason)


def _inside(module: PlainModule, adapter: str) -> Iterator[PlainModule]:
    for plain in walk_plain(module.module, adapter):
        yield PlainModule(plain.name, join(module.live, plain.live) if plain.live else module.live, plain.module, ())


def _changed(layer: nn.Module, adapter: str) -> tuple[str, ...] | None:
    """The base module's own parameters that a merge of this layer writes; None: not known, so it may be any below it."""
    if isinstance(layer, TrainableTokensWrapper | TrainableTokensLayer | Embedding):
        return ("weight",)
    if type(layer) in (Linear, Conv1d, Conv2d, Conv3d):
        return ("weight", "bias") if cast(LoraLayer, layer).lora_bias.get(adapter, False) else ("weight",)
    return (layer.parameter_name,) if type(layer) is ParamWrapper else None


def _refuse(module: PlainModule, wrapper: Wrapper, adapter: str) -> None:
    layer, base = wrapper.module, module.module
    why = _quantised(layer, base)
    if why:
        raise IncompleteExport(
            f"{module.name}: {why}, so merging would round it again; export the adapter, load the base unquantised, or pass "
            "MergedExport(dequantize=True)"
        )
    has_bias = getattr(base, "bias", None) is not None
    if isinstance(layer, LoraLayer) and layer.lora_bias.get(adapter, False) and not has_bias:
        raise IncompleteExport(
            f"{module.name}: the adapter has a LoRA bias and the layer has no bias to merge it into; export the adapter, or train "
            "with lora_bias=False"
        )
    if not hasattr(layer, "merge") and not hasattr(layer, "unload_and_optionally_merge_module"):
        raise IncompleteExport(f"{module.name}: PEFT cannot merge a {type(layer).__name__}; export the adapter")


def _quantised(layer: nn.Module, base: nn.Module) -> str:
    """Why a base counts as quantised; "" if it does not."""
    home = type(layer).__module__
    if home.startswith("peft.tuners.lora.") and home not in _OVER_PLAIN_WEIGHTS:
        return f"its base is quantised (PEFT wraps it in {home}.{type(layer).__name__})"
    for name, param in base.named_parameters(recurse=False):
        if not (param.dtype.is_floating_point or param.dtype.is_complex) or param.dtype.itemsize < 2:
            return f"its base is quantised ({name} is {param.dtype})"
        if type(param) not in (nn.Parameter, torch.Tensor):
            return f"its base is quantised ({name} is a {type(param).__name__})"
    packed = [name for name in ("qweight", "W_q") if hasattr(base, name)]
    return f"its base is quantised ({type(base).__name__} has {packed[0]})" if packed else ""


def refuse_fake_quantised(model: nn.Module) -> None:
    """Raises `IncompleteExport` when the model trains an adapter with QAT."""
    why = why_not_lora(model)
    if why:
        raise IncompleteExport(why)


def _check_once(rows: Mapping[str, RowsMerge], scratch: Mapping[str, ScratchMerge]) -> None:
    seen = dict.fromkeys(rows, "rows")
    for merge in scratch.values():
        for name in merge.outputs:
            if name in seen:
                raise IncompleteExport(
                    f"{name} is changed by two PEFT modules ({merge.module} is one): which merges first is not defined; export the "
                    "adapter"
                )
            seen[name] = merge.module


def _try(model: nn.Module, scratch: Mapping[str, ScratchMerge]) -> None:
    """Run each kind of scratch merge once without values: what PEFT refuses, it refuses now.

    A layer with tensors that are not registered (FourierFT's indices) is tried with memory, since those are on meta here and
    will be then: a trial on meta alone would not miss their values.
    """
    done = set()
    for merge in scratch.values():
        wrapper = model.get_submodule(merge.module)
        inner = inner_of(wrapper, merge.adapter)
        kind = (type(wrapper), type(inner[1]) if inner else None, merge.reason, len(merge.outputs))
        if kind in done:
            continue
        done.add(kind)
        device = "cpu" if _has_loose_tensors(wrapper) else "meta"
        values = {name: torch.zeros_like(_tensor(model, name), device=device) for name in merge.inputs}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                merge_scratch(model, merge, values, device=device)
        except (NotImplementedError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise IncompleteExport(
                f"{merge.module}: PEFT cannot merge this ({merge.reason}): {error}; export the adapter instead"
            ) from error


def _has_loose_tensors(layer: nn.Module) -> bool:
    values = (value for module in layer.modules() for value in module.__dict__.values())
    items = (item for value in values for item in (value.values() if type(value) is dict else (value,)))
    tensors = {id(item) for item in items if isinstance(item, torch.Tensor)}
    return not tensors <= {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    path, _, attr = name.rpartition(".")
    return torch.empty_like(getattr(model.get_submodule(path), attr), device="meta")
