"""A model's skeleton in; which of its tensors are the base model's, and the names they had before PEFT came, out.

*live name* what the skeleton says, e.g. `base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight`;
*plain name* the same tensor's name in the model without PEFT: `model.layers.0.self_attn.q_proj.weight`.

The rewriting follows PEFT's own classes, not the text of a name: a model may have a module called `base_layer` itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

_Kind = Literal["base", "copy"]


def base_names(skeleton: nn.Module) -> dict[str, str]:
    """Live name -> plain name of every parameter and buffer of the base model, aliases of tied ones too. Pure.

    Adapters' tensors are left out, and so are the trained copies of `modules_to_save` (see `saved_copies`).
    """
    return {live: plain for live, plain, kind in _walk(skeleton, "", "") if kind == "base"}


def saved_copies(skeleton: nn.Module) -> dict[str, str]:
    """Live name -> plain name of the trained copies that PEFT keeps of whole modules (`modules_to_save`). Pure.

    Several adapters may each have a copy under one plain name.
    """
    return {live: plain for live, plain, kind in _walk(skeleton, "", "") if kind == "copy"}


def base_model(skeleton: nn.Module) -> nn.Module:
    """The base inside PEFT's own model classes (with adapter layers in it, if there are any), or the model itself."""
    return skeleton.get_base_model() if isinstance(skeleton, PeftModel) else skeleton


def _walk(module: nn.Module, live: str, plain: str, kind: _Kind = "base") -> Iterator[tuple[str, str, _Kind]]:
    """(live name, plain name, kind) of the tensors below `module`, in the model's order. Prefixes end with a dot, or are empty."""
    if isinstance(module, BaseTunerLayer):
        inner: dict[str, _Kind] = {"base_layer": kind}
    elif isinstance(module, AuxiliaryTrainingWrapper):
        inner = {"original_module": kind, "token_adapter": kind, "modules_to_save": "copy"}
    elif isinstance(module, PeftModel):
        inner = {"base_model": kind}
    elif isinstance(module, BaseTuner):
        inner = {"model": kind}
    else:
        for name in [*module._parameters, *module._buffers]:
            if module._parameters.get(name, module._buffers.get(name)) is not None:
                yield live + name, plain + name, kind
        for name, child in module._modules.items():
            if child is not None:
                yield from _walk(child, f"{live}{name}.", f"{plain}{name}.", kind)
        return
    for name, child in module._modules.items():
        if child is None or name not in inner:
            continue
        if name == "modules_to_save":
            for adapter, copy in child.named_children():
                yield from _walk(copy, f"{live}{name}.{adapter}.", plain, "copy")
        else:
            yield from _walk(child, f"{live}{name}.", plain, inner[name])
