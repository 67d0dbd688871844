"""A plain model with an adapter in, the same model wrapped as other people's trainers wrap it out: who wraps it, what else stands
around and between its modules, and how the adapter got there. None of it uses lockstep."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

Wrap = Callable[[nn.Module], nn.Module]


def layers(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, LlamaDecoderLayer)]


def by_fully_shard(model: nn.Module) -> nn.Module:
    for each in layers(model):
        fully_shard(each)
    return fully_shard(model)


def as_verl_fsdp2(model: nn.Module) -> nn.Module:
    """Layers and untied embeddings, found by their types, then the root."""
    is_tied = next(each.config for each in model.modules() if hasattr(each, "config")).tie_word_embeddings
    kinds = (LlamaDecoderLayer,) if is_tied else (LlamaDecoderLayer, nn.Embedding)
    for each in [each for each in model.modules() if isinstance(each, kinds)]:
        fully_shard(each)
    return fully_shard(model)


def nested_fsdp2(model: nn.Module) -> nn.Module:
    for each in layers(model):
        fully_shard(each.mlp)
    return by_fully_shard(model)


def by_fsdp1(
    model: nn.Module, *, leaves: bool = False, also: tuple[type, ...] = (), use_orig_params: bool = True
) -> nn.Module:
    """Layers; with `leaves` also every leaf module with a trainable weight, as verl and PEFT's own policy make units for LoRA."""
    policies = [functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer, *also})]
    if leaves:
        policies.append(functools.partial(lambda_auto_wrap_policy, lambda_fn=_is_trainable_leaf))
    policy = functools.partial(_or_policy, policies=policies)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )


def nested_fsdp1(model: nn.Module) -> nn.Module:
    return by_fsdp1(model, also=(type(layers(model)[0].mlp),))


def _is_trainable_leaf(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return not list(module.children()) and weight is not None and weight.requires_grad


def by_accelerate(model: nn.Module, *, version: int, **options: Any) -> nn.Module:
    """Its `prepare`, with an optimizer. It wraps on accelerators only: on the CPU its state is told what it finds on those."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        **options,
    )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    accelerator = Accelerator(cpu=True)
    state = AcceleratorState._shared_state
    state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin, device=torch.device("cpu"))
    accelerator.state.__dict__.update(state)
    try:
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
        return accelerator.prepare(model, optimizer)[0]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


WRAPS: dict[str, Wrap] = {
    "fully_shard": by_fully_shard,
    "FSDP1": by_fsdp1,
    "FSDP1, leaves": functools.partial(by_fsdp1, leaves=True),
    "FSDP1 flat, leaves": functools.partial(by_fsdp1, leaves=True, use_orig_params=False),
    "verl's FSDP2": as_verl_fsdp2,
    "accelerate FSDP1": functools.partial(by_accelerate, version=1, use_orig_params=True),
    "accelerate FSDP2": functools.partial(by_accelerate, version=2),
}


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, LlamaDecoderLayer))
    return model


def compiled_in_place(model: nn.Module) -> nn.Module:
    for each in layers(model):
        each.compile(backend="eager")
    return model


def compiled_layers(model: nn.Module) -> nn.Module:
    """Each layer in torch.compile's own module."""
    for each in list(model.modules()):
        if isinstance(each, nn.ModuleList) and isinstance(each[0], LlamaDecoderLayer):
            for index, layer in enumerate(each):
                each[index] = torch.compile(layer, backend="eager")
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def as_it_is(model: nn.Module) -> nn.Module:
    return model


BETWEEN: dict[str, tuple[Wrap, Wrap]] = {
    "nothing": (as_it_is, as_it_is),
    "checkpointing inside": (checkpointed, as_it_is),
    "checkpointing afterwards": (as_it_is, checkpointed),
    "compiled in place": (compiled_in_place, as_it_is),
    "compiled layers": (compiled_layers, as_it_is),
    "compiled root": (as_it_is, compiled),
}
"""(before wrapping, after it)"""


def with_peft(base: nn.Module, config: LoraConfig, adapter: str = "default") -> nn.Module:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of ties
        return get_peft_model(base, config, adapter_name=adapter)  # type: ignore[arg-type]


def injected(base: nn.Module, config: LoraConfig, adapter: str = "default") -> nn.Module:
    torch.manual_seed(1)
    return inject_adapter_in_model(config, base, adapter)


def wrapped_inside(model: Any, wrap: Wrap) -> nn.Module:
    """The PeftModel stays outside of what is wrapped."""
    model.base_model.model = wrap(model.base_model.model)
    return model


PEFT: dict[str, tuple[Callable[[nn.Module, LoraConfig], nn.Module], Callable[[Any, Wrap], nn.Module]]] = {
    "get_peft_model": (with_peft, lambda model, wrap: wrap(model)),
    "inject_adapter_in_model": (injected, lambda model, wrap: wrap(model)),
    "PeftModel outside": (with_peft, wrapped_inside),
}


def wrap_as(wrap: Wrap, between: str) -> Wrap:
    before, after = BETWEEN[between]
    return lambda model: after(wrap(before(model)))


@contextmanager
def known_warnings() -> Iterator[None]:
    """torch's advice on units and on one rank; accelerate's on the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        warnings.filterwarnings("ignore", message=".*FSDP upcast of low precision parameters")
        yield
