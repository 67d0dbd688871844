"""A skeleton with PEFT's wrappers in it in; where each module of the plain base model hangs, under which wrappers, and the
names of its tensors before PEFT came, out.

Everything here follows the structure (which class wraps what, in which attribute) and never the text of a name: a user's
module that is itself called `base_layer` or `modules_to_save` keeps its name.

*wrapper* a module that PEFT put in the place of one of the model's own · *live name* a name in the skeleton ·
*plain name* the same tensor's name in the base model without PEFT.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftMixedModel, PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from lockstep.errors import IncompleteExport


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A PEFT module around a module of the base model."""

    live: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class PlainModule:
    """A module of the plain base model."""

    name: str
    """Path in the plain base model; "" for the model itself."""
    live: str
    """Path in the skeleton."""
    module: nn.Module
    wrappers: tuple[Wrapper, ...]
    """What PEFT put around it, outermost first."""


def walk_plain(model: nn.Module, adapter: str | None) -> Iterator[PlainModule]:
    """Every module of the plain base model, in its own order; a shared module once per name, as in `state_dict`.

    `adapter`: where it holds a trained copy of a module (modules_to_save), the copy stands in the original's place; None: the
    original does everywhere.
    """
    yield from _visit(model, "", "", adapter)


def base_names(model: nn.Module) -> dict[str, str]:
    """Live name -> plain name of every parameter and buffer of the base model, aliases of tied ones too.

    Adapters' tensors are left out, and so are the trained copies of `modules_to_save` (see `saved_copies`).
    """
    return _tensor_names(model, None)


def saved_copies(model: nn.Module) -> dict[str, str]:
    """Live name -> plain name of the trained copies that PEFT keeps of whole modules (`modules_to_save`), of every adapter."""
    base = base_names(model)
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    adapters = dict.fromkeys(adapter for wrapper in wrappers for adapter in wrapper.modules_to_save)
    named = {live: plain for adapter in adapters for live, plain in _tensor_names(model, adapter).items()}
    return {live: plain for live, plain in named.items() if live not in base}


def base_model(model: nn.Module) -> nn.Module:
    """The base inside PEFT's own model classes (with adapter layers in it, if there are any), or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def plain_model(model: nn.Module) -> nn.Module:
    """The base model as a model of its own: new modules over the skeleton's parameters; the skeleton itself without PEFT in it."""
    if not any(inner_of(module, None) for module in model.modules()):
        return model
    return _without_wrappers(model, {})


def adapters_of(model: nn.Module) -> tuple[str, ...]:
    """Names of the adapters that the model has; none where PEFT never touched it."""
    config = getattr(model, "peft_config", None)
    return tuple(config) if isinstance(config, Mapping) else ()


def containers_of(layer: BaseTunerLayer) -> dict[str, Any]:
    """Attribute -> container with one entry per adapter, of everything in which a PEFT layer keeps adapter tensors."""
    found = {name: getattr(layer, name, None) for name in (*layer.adapter_layer_names, *layer.other_param_names)}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, nn.Module) and hasattr(value, "__contains__") and hasattr(value, "__getitem__")
    }


def tensors_of(model: nn.Module, adapters: Collection[str]) -> set[str]:
    """Names, in `model`, of the tensors that belong to these adapters: by where PEFT keeps them, not by what they are called."""
    found: set[str] = set()
    if not adapters:
        return found
    for path, module in model.named_modules(remove_duplicate=False):
        kept = {}
        if isinstance(module, BaseTunerLayer):
            kept = containers_of(module)
        elif isinstance(module, ModulesToSaveWrapper):
            kept = {"modules_to_save": module.modules_to_save}
        for attr, container in kept.items():
            for adapter in adapters:
                if adapter in container:
                    found |= _names_below(container[adapter], join(path, f"{attr}.{adapter}"))
    return found


def adapter_names(model: nn.Module, adapter: str, *, with_base_embeddings: bool = False) -> dict[str, str]:
    """Live name -> name in a PEFT adapter file. `model` is a skeleton: PEFT names stand-ins for its tensors.

    A model that transformers put the adapter on (`model.add_adapter`) gets the prefix that its own `save_pretrained` writes.
    Base embeddings that PEFT would add to the file are left out unless asked for.
    Raises `IncompleteExport` when there is no such adapter, or when PEFT makes something else of a tensor than a name.
    """
    check_adapter(model, adapter)
    if with_base_embeddings and not hasattr(model, "get_input_embeddings"):
        raise IncompleteExport(
            f"{type(model).__name__} does not say which its embeddings are; export the adapter without them"
        )
    stand_ins = {name: torch.empty((index,), device="meta") for index, name in enumerate(model.state_dict())}
    live = {id(stand_in): name for name, stand_in in stand_ins.items()}
    named = get_peft_model_state_dict(
        model, state_dict=dict(stand_ins), adapter_name=adapter, save_embedding_layers=with_base_embeddings
    )
    odd = [name for name, stand_in in named.items() if id(stand_in) not in live]
    if odd:
        raise IncompleteExport(
            f"PEFT computes {odd[0]!r} of adapter {adapter!r} when it saves; such adapters cannot be streamed"
        )
    # peft 0.19 tells adapters apart by text, and takes "default2" for "default" too.
    foreign = tensors_of(model, set(adapters_of(model)) - {adapter})
    is_transformers_own = not isinstance(model, PeftModel) and getattr(model, "_hf_peft_config_loaded", False)
    prefix = "base_model.model." if is_transformers_own else ""
    return {live[id(stand_in)]: prefix + name for name, stand_in in named.items() if live[id(stand_in)] not in foreign}


def check_adapter(model: nn.Module, adapter: str) -> None:
    """Raises `IncompleteExport` when there is no such adapter."""
    if adapter not in adapters_of(model):
        raise IncompleteExport(f"adapter {adapter!r} does not exist; the model has {sorted(adapters_of(model))}")


def check_unmerged(model: nn.Module) -> None:
    """Raises `IncompleteExport` when PEFT has merged an adapter into the live base: that weight is not the base's any more."""
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged_adapters:
            raise IncompleteExport(
                f"{name}: adapters {list(module.merged_adapters)} are merged into the live model's weights, so neither the base nor "
                "another merge can be exported from them; call model.unmerge_adapter() first"
            )


def inner_of(module: nn.Module, adapter: str | None) -> tuple[str, nn.Module] | None:
    """(attribute path, module) of what a PEFT wrapper stands for; None for a module that is not PEFT's."""
    inner: Any = module
    if isinstance(module, PeftModel | PeftMixedModel):
        return "base_model", cast(nn.Module, inner.base_model)
    if isinstance(module, BaseTuner):
        return "model", cast(nn.Module, inner.model)
    if isinstance(module, ModulesToSaveWrapper):
        if adapter is not None and adapter in module.modules_to_save:
            return f"modules_to_save.{adapter}", module.modules_to_save[adapter]
        return "original_module", cast(nn.Module, module._modules["original_module"])
    if isinstance(module, TrainableTokensWrapper):
        return "token_adapter", cast(nn.Module, module._modules["token_adapter"])
    if isinstance(module, BaseTunerLayer):
        base = module._modules.get("base_layer")  # type: ignore[union-attr]
        if base is None:
            raise IncompleteExport(
                f"{type(module).__name__} is a PEFT layer without a base_layer; its base weights have no plain names"
            )
        return "base_layer", base
    if isinstance(module, AuxiliaryTrainingWrapper):
        raise IncompleteExport(f"{type(module).__name__} is a PEFT wrapper that is not known here")
    return None


def _tensor_names(model: nn.Module, adapter: str | None) -> dict[str, str]:
    return {
        join(each.live, attr): join(each.name, attr)
        for each in walk_plain(model, adapter)
        for tensors in (each.module._parameters, each.module._buffers)
        for attr, tensor in tensors.items()
        if tensor is not None
    }


def _visit(module: nn.Module, live: str, name: str, adapter: str | None) -> Iterator[PlainModule]:
    wrappers = []
    while (step := inner_of(module, adapter)) is not None:
        wrappers.append(Wrapper(live, module))
        path, module = step
        live = join(live, path)
    yield PlainModule(name, live, module, tuple(wrappers))
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _visit(child, join(live, child_name), join(name, child_name), adapter)


def _without_wrappers(module: nn.Module, done: dict[int, nn.Module]) -> nn.Module:
    while (step := inner_of(module, None)) is not None:
        module = step[1]
    if id(module) not in done:
        copy = cast(nn.Module, object.__new__(type(module)))
        done[id(module)] = copy
        copy.__dict__.update(module.__dict__)
        copy.__dict__["_modules"] = {
            name: None if child is None else _without_wrappers(child, done) for name, child in module._modules.items()
        }
    return done[id(module)]


def _names_below(entry: Any, path: str) -> set[str]:
    if not isinstance(entry, nn.Module):
        return {path}
    tensors = [*entry.named_parameters(remove_duplicate=False), *entry.named_buffers(remove_duplicate=False)]
    return {join(path, name) for name, _ in tensors}


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
