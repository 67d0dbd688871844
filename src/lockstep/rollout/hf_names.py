"""The engine's model in; its own tensors under the names of its hub checkpoint, each a view that can be written in place, out.

transformers keeps some weights in another form than their checkpoint has (fused experts: one 3-D parameter for what the files
hold per expert). Its own conversion says which elements become which checkpoint tensor: it is run once on element numbers
instead of values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lockstep.errors import TransportError


def checkpoint_tensors(model: PreTrainedModel, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and persistent buffers (`live`: the model's `state_dict` without an adapter) by checkpoint name; tied ones under
    each of their names.

    Raises `TransportError` for a conversion whose results are not runs of one tensor's elements: they cannot be written in place.
    """
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in live.items()}
    names = {id(tensor): name for name, tensor in empty.items()}
    out: dict[str, Tensor] = {}
    converted = revert_weight_conversion(model, dict(empty))
    for name, tensor in converted.items():
        if id(tensor) in names:
            out[name] = live[names.pop(id(tensor))]
    for name in names.values():
        out |= _parts(model, name, live[name])
    odd = set(converted) ^ set(out)
    if odd:
        raise TransportError(
            f"{type(model).__name__}: transformers makes the checkpoint's {sorted(odd)[0]!r} of several tensors at once; such a model "
            "takes adapter updates only"
        )
    return out


def _parts(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The checkpoint tensors that are made of one live tensor, as views of it."""
    numbers = torch.arange(tensor.numel(), dtype=torch.int64).reshape(tensor.shape)
    return {key: _view(name, tensor, part) for key, part in revert_weight_conversion(model, {name: numbers}).items()}


def _view(name: str, tensor: Tensor, numbers: Tensor) -> Tensor:
    flat = numbers.reshape(-1)
    first = int(flat[0]) if flat.numel() else 0
    if not torch.equal(flat, torch.arange(first, first + flat.numel(), dtype=flat.dtype)):
        raise TransportError(
            f"{name}: its checkpoint tensors are not runs of its elements, so they cannot be written in place; such a model takes "
            "adapter updates only"
        )
    return tensor.detach().reshape(-1)[first : first + flat.numel()].view(numbers.shape)


def same_tensors(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names, those of one tied tensor together."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.data_ptr() if tensor.numel() else name, []).append(name)
    return list(groups.values())
