"""FSDP1, whoever wrapped the model: every rank's elements are the whole tensor's, at every moment, and nothing is gathered."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from helpers_models import tiny_gemma3, tiny_gpt2
from helpers_sharded import check_holds, whole_of
from lockstep.dist import World
from lockstep.errors import ModelError
from lockstep.sharding.fsdp1 import FSDP1Model, local_part
from lockstep.testing import run_ranks, tiny_llama

CPU = torch.device("cpu")
IDS = torch.arange(1, 9)[None]


def lora(model: nn.Module, **options: Any) -> PeftModel:
    torch.manual_seed(1)
    made = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **options))
    return made


def by_layer(model: nn.Module) -> ModuleWrapPolicy:
    names = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    return ModuleWrapPolicy({type(module) for module in model.modules() if type(module).__name__ in names})


def leaves(model: nn.Module) -> CustomPolicy:
    """Trainable leaves are units, so that a unit is trainable or frozen as a whole."""
    layers = by_layer(model)._module_classes

    def choose(module: nn.Module) -> bool:
        own = list(module.parameters())
        is_leaf = bool(own) and not list(module.children()) and all(param.requires_grad for param in own)
        return is_leaf or type(module) in layers

    return CustomPolicy(choose)


def wrap(model: nn.Module, **options: Any) -> FSDP1Model:
    policy = by_layer(model) if options.get("use_orig_params", True) else leaves(model)
    wrapped = FSDP(model, auto_wrap_policy=policy, **{"use_orig_params": True, "device_id": CPU} | options)
    return FSDP1Model(wrapped, World(dist.get_rank(), dist.get_world_size()))


def flats(sharded: FSDP1Model) -> list[Any]:
    return [each._handle.flat_param for each in FSDP.fsdp_modules(sharded.module) if each._handle is not None]


class Ragged(nn.Module):
    """Sizes that no world divides, some smaller than it, an integer buffer, a nested unit, and a unit that never runs."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.spare = Block(7, 3), Block(3, 5), Block(2, 1)
        self.head = nn.Linear(5, 1)
        self.register_buffer("count", torch.tensor([3, 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(x)))


class Block(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, out)
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def ragged() -> Ragged:
    torch.manual_seed(0)
    return Ragged()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: lora(tiny_llama()),
    "tied llama": lambda: lora(tiny_llama(tie_word_embeddings=True), use_dora=True),
    "bf16": lambda: tiny_llama().bfloat16(),
    "gpt2": lambda: lora(tiny_gpt2(), fan_in_fan_out=True),
    "gemma3": lambda: lora(tiny_gemma3()),
    "ragged": ragged,
}


def ids_for(model: nn.Module) -> torch.Tensor:
    return torch.arange(14.0).reshape(2, 7) if isinstance(model, Ragged) else IDS


def output(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out = model(ids)
    return (out if isinstance(out, torch.Tensor) else out.logits).float().square().mean()


def check_moments(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """Read before the first forward, after one without backward, between forward and backward, and after an update."""
    plain = make()
    whole, buffers, ids = whole_of(plain), dict(plain.named_buffers(remove_duplicate=False)), ids_for(plain)
    sharded = wrap(make(), **options)
    assert all(not hasattr(flat, "_local_shard") for flat in flats(sharded))
    check_holds(sharded, whole, buffers)
    with torch.no_grad():
        output(sharded.module, ids)
    check_holds(sharded, whole, buffers)
    check_holds(FSDP1Model(sharded.module, sharded.world), whole, buffers)
    optimizer = torch.optim.SGD([param for _, param in sharded.trainable()], lr=0.1)
    loss = output(sharded.module, ids)
    check_holds(sharded, whole, buffers)
    check_holds(FSDP1Model(sharded.module, sharded.world), whole, buffers)
    loss.backward()
    check_holds(sharded, whole, buffers)
    assert sharded.is_current()
    reference = output(plain, ids)
    reference.backward()
    # Reduced over ranks in another order, and in bf16 where asked: not to the bit, but far from any missing part.
    rel = 5e-2 if "mixed_precision" in options or local_part(flats(sharded)[0]).dtype == torch.bfloat16 else 1e-5
    assert float(loss) == pytest.approx(float(reference), rel=rel)
    expected = nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None])
    assert sharded.clip_grad_norm(1e9) == pytest.approx(float(expected), rel=rel)
    optimizer.step()
    torch.optim.SGD([param for param in plain.parameters() if param.requires_grad], lr=0.1).step()
    for tensor in sharded.plan.parameters:
        start, stop = sharded.ranges(tensor.name)[sharded.world.rank]
        after = dict(plain.named_parameters(remove_duplicate=False))[tensor.name].detach().reshape(-1)[start:stop]
        assert torch.allclose(sharded.local_flat(tensor.name).float(), after.float(), atol=1e-2), tensor.name


def check_strategies(world: World) -> None:
    """Every model and strategy in one start of the ranks."""
    # With one rank to shard over, torch turns HYBRID_SHARD into NO_SHARD (and forgets the replicas): only 2 x 2 is tested.
    hybrid = {"device_mesh": init_device_mesh("cpu", (2, 2))} if world.size == 4 else {}
    for name, make in MODELS.items():
        for keep in (True, False):
            check_named(name, make, {"use_orig_params": keep})
    for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD):
        for keep in (True, False):
            options: dict[str, Any] = {"use_orig_params": keep, "sharding_strategy": strategy}
            if strategy is ShardingStrategy.HYBRID_SHARD:
                if not hybrid:
                    continue
                options |= hybrid
            check_named("ragged", MODELS["ragged"], options)
            check_named("llama", MODELS["llama"], options)
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check_named("ragged", MODELS["ragged"], {"mixed_precision": low})


def check_named(name: str, make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    try:
        with warnings.catch_warnings():
            # torch recommends other units for frozen and trainable parameters, and says that one rank is not sharded.
            warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")
            warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
            warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
            check_moments(make, options)
    except Exception as error:
        raise AssertionError(f"{name} {options}: {error}") from error


def check_ignored(world: World) -> None:
    """What FSDP1 is told to leave alone is whole on every rank; it belongs to the first one."""
    plain = ragged()
    model = ragged()
    sharded = wrap(model, ignored_states=[model.a.scale, model.head.weight])
    check_holds(sharded, whole_of(plain), dict(plain.named_buffers()))
    assert sharded.ranges("head.weight") == ((0, 5), *[(5, 5)] * (world.size - 1))
    assert [unit.module for unit in sharded.plan.units] == ["a", "b", "spare", ""]


def check_reading_gathers_nothing(world: World) -> None:
    """Reading and overwriting are not collective: rank 0 does both alone."""
    sharded = wrap(lora(tiny_llama()))
    if world.is_main:
        for tensor in sharded.plan.parameters:
            start, stop = sharded.ranges(tensor.name)[0]
            sharded.write_local(tensor.name, torch.full((stop - start,), 2.0))
            assert sharded.local_flat(tensor.name).eq(2.0).all()
    assert all(flat.numel() == flat._sharded_size.numel() for flat in flats(sharded))


def check_other_models_are_noticed(world: World) -> None:
    sharded = wrap(lora(tiny_llama()))
    assert sharded.is_current()
    sharded.module.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
    assert not sharded.is_current()
    odd = tiny_llama()
    odd.lm_head.weight = nn.Parameter(odd.lm_head.weight.detach().t().contiguous().t())
    with pytest.raises(ModelError, match=r"lm_head\.weight is not contiguous"):
        wrap(odd)


def check_gradient_sync(world: World) -> None:
    """Two micro-batches with one reduction are one batch of both."""
    norms = []
    for accumulate in (True, False):
        sharded = wrap(lora(tiny_llama()))
        sharded.set_gradient_sync(not accumulate)
        output(sharded.module, IDS).backward()
        sharded.set_gradient_sync(True)
        output(sharded.module, IDS + 3).backward()
        norms.append(sharded.clip_grad_norm(1e9))
        assert norms[-1] == sharded.clip_grad_norm(norms[-1] / 2)
        assert sharded.clip_grad_norm(1e9) == pytest.approx(norms[-1] / 2, rel=1e-4)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def check_adapter_off(world: World) -> None:
    """The reference policy is the base model, before the first forward and later; training goes on as if it had not been asked."""
    plain = tiny_llama()(input_ids=IDS).logits
    for keep in (True, False):
        norms = []
        for asks in (False, True):
            sharded = wrap(lora(tiny_llama()), use_orig_params=keep)
            for _ in range(2):
                if asks:
                    with torch.no_grad(), sharded.adapter_off():
                        assert torch.equal(sharded.module(input_ids=IDS).logits, plain)
                output(sharded.module, IDS).backward()
            norms.append(sharded.clip_grad_norm(1e9))
        assert norms[0] == norms[1] > 0


def check_the_rest(world: World) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")
        for check in (
            check_ignored,
            check_reading_gathers_nothing,
            check_other_models_are_noticed,
            check_gradient_sync,
        ):
            check(world)


def check_everything(world: World) -> None:
    check_strategies(world)
    if world.size > 1:
        check_the_rest(world)


@pytest.mark.parametrize("size", [1, 4])
def test_every_rank_reads_its_elements_at_every_moment(size: int):
    run_ranks(size, check_everything, timeout_s=300)
