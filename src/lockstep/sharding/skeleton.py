"""A live model in whatever wrapping, and its parameters' whole shapes in; a plain copy of it on the meta device out.

The copy has the model's own classes, its PEFT bookkeeping (ranks, scales, active adapters) and its ties, and none of FSDP's
wrappers and classes, none of activation checkpointing's and torch.compile's, no hooks and no values. Whatever has to be
asked of PEFT or transformers (names, shapes, what is merged into what) is asked of the copy: nothing it does can reach the
live model, and it looks the same whoever sharded the model, and how.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import ModelError
from lockstep.names import clean_name

Slot = tuple[int, str]
"""Where a parameter hangs: `id` of the live module, and the attribute's name."""

_WRAPPERS: dict[type[nn.Module], str] = {
    FullyShardedDataParallel: "_fsdp_wrapped_module",
    ActivationWrapper: "_checkpoint_wrapped_module",
    OptimizedModule: "_orig_mod",
    DistributedDataParallel: "module",
}
"""Class of a wrapper -> its child that is the wrapped module."""
_HOOKS = tuple(name for name, value in nn.Module().__dict__.items() if "hook" in name and isinstance(value, dict))


def unwrap(module: nn.Module) -> nn.Module:
    """The module below all wrappers that stand right here (not those further down)."""
    while True:
        key = next((key for cls, key in _WRAPPERS.items() if isinstance(module, cls)), None)
        if key is None:
            return module
        module = cast(nn.Module, module._modules[key])


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(clean name, live module without its wrappers) of every module, in the model's order; shared modules once per name.

    Raises `ModelError` naming a module of the model's own that is called what wrappers call theirs: it has no clean name.
    """
    inner = unwrap(module)
    yield prefix, inner
    taken = next((name for name in inner._modules if not clean_name(name)), None)
    if taken is not None:
        raise ModelError(
            f"{prefix or 'the model'} ({type(inner).__name__}) has a child called {taken!r}, and is no wrapper of torch's: names "
            "with and without wrappers cannot be told apart; rename the child"
        )
    for name, child in inner._modules.items():
        if child is not None:
            yield from walk(child, f"{prefix}.{name}" if prefix else name)


def skeleton(module: nn.Module, found: Mapping[Slot, nn.Parameter]) -> nn.Module:
    """A plain meta copy of `module`. Not collective; reads no values.

    `found` gives, for slots whose live object does not show the whole tensor (shards, FSDP1's flat parameters), a meta
    parameter of the whole shape; slots that share one are tied. All other parameters are taken as they hang in the model.
    """
    return _Copier(found).module(module)


class _Copier:
    """Copies each module and each parameter once, so that what was shared stays shared."""

    def __init__(self, found: Mapping[Slot, nn.Parameter]):
        self._found: dict[int, dict[str, nn.Parameter]] = {}
        for (owner, attr), param in found.items():
            self._found.setdefault(owner, {})[attr] = param
        self._modules: dict[int, nn.Module] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def module(self, wrapped: nn.Module) -> nn.Module:
        live = unwrap(wrapped)
        if id(live) in self._modules:
            return self._modules[id(live)]
        copy = cast(nn.Module, object.__new__(_plain_class(type(live))))
        self._modules[id(live)] = copy
        found = self._found.get(id(live), {})
        for name, value in live.__dict__.items():
            if name in _HOOKS:
                copy.__dict__[name] = OrderedDict()
            elif name not in ("_parameters", "_buffers", "_modules") and name not in found:
                copy.__dict__[name] = self._value(value)
        copy.__dict__["_compiled_call_impl"] = None
        # FSDP1 with use_orig_params=False takes parameters off their modules; they come back, after those that stayed.
        parameters = {name: value for name, value in live._parameters.items() if name != "_flat_param"} | found
        copy.__dict__["_parameters"] = {name: self._meta(value) for name, value in parameters.items()}
        copy.__dict__["_buffers"] = {name: self._meta(value) for name, value in live._buffers.items()}
        copy.__dict__["_modules"] = {
            name: None if child is None else self.module(child) for name, child in live._modules.items()
        }
        return copy

    def _meta(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._tensors:
            empty = tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            self._tensors[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return self._tensors[id(tensor)]

    def _value(self, value: Any) -> Any:
        """Plain containers are copied, modules in them replaced by their copies; everything else is shared (read only)."""
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, torch.Tensor):
            return self._meta(value)
        if type(value) in (list, tuple, set):
            return type(value)(self._value(item) for item in value)
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self._value(item)) for key, item in value.items())
        return value


def _plain_class(cls: type) -> type:
    """The class as it was before `fully_shard` put its own in front."""
    while issubclass(cls, FSDPModule):
        cls = next(base for base in cls.__bases__ if base is not FSDPModule)
    return cls
