"""`is_current`: every change of the live model that makes an old plan wrong is seen; names that wrappers use are not mistaken."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lockstep.dist import World
from lockstep.errors import ModelError
from lockstep.sharding.attach import attach
from lockstep.sharding.skeleton import unwrap, walk
from lockstep.testing import run_ranks, tiny_llama

IDS = torch.arange(1, 9)[None]


def other_shape(model: Any) -> None:
    model.lm_head.weight.data = torch.zeros(70, 32)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "other dtype": lambda model: model.bfloat16(),
    "other shape": other_shape,
    "parameter added": lambda model: model.model.register_parameter("extra", nn.Parameter(torch.ones(3))),
    "module added": lambda model: setattr(model, "score", nn.Linear(32, 1)),
    "buffer added": lambda model: model.model.register_buffer("extra", torch.ones(3)),
    "buffer set to None": lambda model: setattr(model.model, "kept", None),
    "module removed": lambda model: model.model.layers.pop(1),
    "bias given": lambda model: setattr(model.lm_head, "bias", nn.Parameter(torch.zeros(64))),
    "tied": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
}
SEEN_IN_SHARDS = ("other dtype", "parameter added", "module added", "buffer added")


def in_fsdp2(model: Any) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def in_fsdp1(model: Any) -> nn.Module:
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FSDP(model, use_orig_params=True, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def check_changes(wrap: Callable[[Any], nn.Module], names: tuple[str, ...]) -> None:
    for name in names:
        model = tiny_llama()
        model.model.register_buffer("kept", torch.ones(2))
        wrapped = wrap(model)
        sharded = attach(wrapped)
        with torch.no_grad():
            wrapped(input_ids=IDS)
        model.model.register_buffer("cache", torch.ones(3), persistent=False)
        assert sharded.is_current(), name
        CHANGES[name](model)
        assert not sharded.is_current(), (wrap, name)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(4, 4)


class Shared(nn.Module):
    """One weight in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.layers[1].p.weight = self.layers[0].p.weight  # type: ignore[union-attr]


def check_shared_by_two_units() -> None:
    policy = ModuleWrapPolicy({Block})
    model = FSDP(Shared(), use_orig_params=True, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    with pytest.raises(ModelError, match=r"layers\.1\.p\.weight is shared by modules of two FSDP1 units"):
        attach(model)


def check_it_is_cheap() -> None:
    sharded = attach(tiny_llama(num_hidden_layers=30))
    took = []
    for _ in range(20):
        began = time.perf_counter()
        assert sharded.is_current()
        took.append(time.perf_counter() - began)
    assert min(took) < 0.002, took


def check_on_two_ranks(world: World) -> None:
    check_changes(lambda model: model, tuple(CHANGES))
    check_changes(in_fsdp2, SEEN_IN_SHARDS)
    check_changes(in_fsdp1, SEEN_IN_SHARDS)
    check_shared_by_two_units()
    check_it_is_cheap()


def test_changes_are_seen():
    run_ranks(2, check_on_two_ranks, timeout_s=200)


class Odd(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.add_module(name, nn.Linear(4, 4))
        self.other = nn.Linear(4, 4)


@pytest.mark.parametrize("name", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_a_users_child_with_a_wrappers_name_is_refused(name: str):
    model = nn.Sequential(Odd(name))
    assert unwrap(model[0]) is model[0]
    with pytest.raises(ModelError, match=rf"0 \(Odd\) has a child called '{name}'.*rename"):
        list(walk(model))


def test_wrappers_are_looked_through():
    model = nn.Sequential(checkpoint_wrapper(Odd("module")), torch.compile(Odd("inner"), backend="eager"))
    names = ["", "0", "0.module", "0.other", "1", "1.inner", "1.other"]
    assert [name for name, _ in walk(model)] == names
