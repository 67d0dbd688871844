"""`attach`: models that somebody else wrapped, with whatever else stands around and between; ranks that do not fit together."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from helpers_sharded import check_holds, whole_of
from lockstep.dist import World
from lockstep.errors import ModelError, RankMissing, RanksDisagree
from lockstep.sharding.attach import attach
from lockstep.sharding.base import ShardedModel
from lockstep.testing import run_ranks, tiny_llama
from lockstep.worlds import current_world

CPU = torch.device("cpu")
IDS = torch.arange(1, 9)[None]
CONFIG = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def lora(**options: Any) -> nn.Module:
    model = tiny_llama(**options)
    torch.manual_seed(1)
    return get_peft_model(model, CONFIG)


def lora_inside() -> nn.Module:
    """Adapters in a model that is no PeftModel."""
    model = tiny_llama()
    torch.manual_seed(1)
    return inject_adapter_in_model(CONFIG, model)


def added_adapter() -> nn.Module:
    """What transformers' `model.add_adapter` leaves behind (its 5.24 asks for a newer peft than the newest release)."""
    model: Any = tiny_llama()
    torch.manual_seed(1)
    inject_adapter_in_model(CONFIG, model, "mine")
    model.peft_config, model._hf_peft_config_loaded = {"mine": CONFIG}, True
    return model


def layers(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, LlamaDecoderLayer)]


def by_hand(model: nn.Module, **options: Any) -> nn.Module:
    for each in layers(model):
        fully_shard(each, **options)
    return fully_shard(model, **options)


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, LlamaDecoderLayer))
    return model


def by_hand_checkpointed_first(model: nn.Module) -> nn.Module:
    checkpointed(model)
    for each in list(model.modules()):
        if hasattr(each, "_checkpoint_wrapped_module"):
            fully_shard(each)
    return fully_shard(model)


def compiled_in_place(model: nn.Module) -> nn.Module:
    for each in layers(model):
        each.compile(backend="eager")
    return model


def compiled_layers(model: nn.Module) -> nn.Module:
    """Each layer in torch.compile's own module."""
    for each in model.modules():
        if isinstance(each, nn.ModuleList) and isinstance(each[0], LlamaDecoderLayer):
            for index, layer in enumerate(each):
                each[index] = torch.compile(layer, backend="eager")
    return model


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    values = {"use_orig_params": True, "device_id": CPU, "auto_wrap_policy": ModuleWrapPolicy({LlamaDecoderLayer})}
    return FSDP(model, **values | options)


def peft_outside_fsdp() -> nn.Module:
    """The base is sharded inside; the PeftModel around it is not."""
    model: Any = lora()
    model.base_model.model = by_hand(model.base_model.model)
    return model


def peft_outside_fsdp1() -> nn.Module:
    model: Any = lora()
    model.base_model.model = fsdp1(model.base_model.model)
    return model


def by_dimension(param: nn.Parameter) -> Shard:
    """The last dimension, where it can be cut evenly."""
    dim = param.ndim - 1
    return Shard(dim if param.shape[dim] % dist.get_world_size() == 0 else 0)


def prepared(version: int, **options: Any) -> nn.Module:
    """accelerate's own `prepare`, with an optimizer, as its users call it.

    accelerate wraps in FSDP on accelerators only; on the CPU its state is told by hand what it finds on those.
    """
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
    state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin, device=CPU)
    accelerator.state.__dict__.update(state)
    try:
        model = lora()
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
        return accelerator.prepare(model, optimizer)[0]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "fully_shard": (lambda: by_hand(lora()), lora),
    "fully_shard, layers only": (lambda: layers_only(lora()), lora),
    "fully_shard by other dimensions": (lambda: by_hand(lora(), shard_placement_fn=by_dimension), lora),
    "fully_shard, offloaded": (
        lambda: by_hand(lora(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
        lora,
    ),
    "fully_shard, a parameter left out": (lambda: with_ignored(lora()), lora),
    "fully_shard, tied": (
        lambda: by_hand(lora(tie_word_embeddings=True)),
        lambda: lora(tie_word_embeddings=True),
    ),
    "fully_shard over checkpointing": (lambda: by_hand_checkpointed_first(lora()), lora),
    "checkpointing over fully_shard": (lambda: checkpointed(by_hand(lora())), lora),
    "fully_shard over compile in place": (lambda: by_hand(compiled_in_place(lora())), lora),
    "fully_shard over compiled layers": (lambda: by_hand(compiled_layers(lora())), lora),
    "compile over fully_shard": (lambda: compile_root(by_hand(lora())), lora),
    "PeftModel outside": (peft_outside_fsdp, lora),
    "add_adapter": (lambda: by_hand(added_adapter()), added_adapter),
    "inject_adapter_in_model": (lambda: by_hand(lora_inside()), lora_inside),
    "FSDP1": (lambda: fsdp1(lora()), lora),
    "FSDP1, originals replaced": (lambda: fsdp1(tiny_llama(), use_orig_params=False), tiny_llama),
    "FSDP1 over checkpointing": (
        lambda: fsdp1(
            checkpointed(lora()), auto_wrap_policy=ModuleWrapPolicy({type_of_checkpointed(), LlamaDecoderLayer})
        ),
        lora,
    ),
    "checkpointing over FSDP1": (lambda: checkpointed(fsdp1(lora())), lora),
    "FSDP1, PeftModel outside": (peft_outside_fsdp1, lora),
    "compile over FSDP1": (lambda: compile_root(fsdp1(lora())), lora),
    "FSDP1 over an added adapter": (lambda: fsdp1(added_adapter()), added_adapter),
    "DDP": (lambda: DistributedDataParallel(lora()), lora),
    "not wrapped": (lora, lora),
    "accelerate, FSDP2": (lambda: prepared(2), lora),
    "accelerate, FSDP2, checkpointing": (lambda: prepared(2, activation_checkpointing=True), lora),
    "accelerate, FSDP1": (lambda: prepared(1, use_orig_params=True), lora),
    "accelerate, FSDP1, checkpointing": (
        lambda: prepared(1, use_orig_params=True, activation_checkpointing=True),
        lora,
    ),
}


def layers_only(model: nn.Module) -> nn.Module:
    for each in layers(model):
        fully_shard(each)
    return model


def with_ignored(model: nn.Module) -> nn.Module:
    return by_hand(model, ignored_params={model.get_parameter("base_model.model.model.norm.weight")})


def compile_root(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def type_of_checkpointed() -> type[nn.Module]:
    return type(
        next(each for each in checkpointed(tiny_llama()).modules() if hasattr(each, "_checkpoint_wrapped_module"))
    )


def run_model(sharded: ShardedModel) -> None:
    """A forward without backward, which can leave things gathered, and a step."""
    with torch.no_grad():
        sharded.module(input_ids=IDS)
    sharded.module(input_ids=IDS).logits.float().square().mean().backward()
    assert sharded.clip_grad_norm(1.0) > 0


@contextmanager
def known_warnings():
    with warnings.catch_warnings():
        # torch's advice on units, and on one rank; accelerate's on the same.
        warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        warnings.filterwarnings("ignore", message=".*FSDP upcast of low precision parameters")
        yield


def check_case(name: str) -> None:
    make, plain = CASES[name]
    reference = plain()
    whole, buffers = whole_of(reference), dict(reference.named_buffers(remove_duplicate=False))
    live = make()
    sharded = attach(live, timeout_s=20)
    assert sharded.module is live
    check_holds(sharded, whole, buffers)
    named = {name: param.requires_grad for name, param in reference.named_parameters(remove_duplicate=False)}
    assert {tensor.name: tensor.is_trainable for tensor in sharded.plan.parameters}.items() <= named.items()
    if "compile" not in name or "in place" in name:
        run_model(sharded)
        check_holds(sharded, whole, buffers)
        check_holds(attach(live, timeout_s=20), whole, buffers)
    has_layers = any(unit.module.endswith("layers.1") for unit in sharded.plan.units)
    assert has_layers == (name not in ("DDP", "not wrapped")), [unit.module for unit in sharded.plan.units]
    assert {type(each).__name__ for each in sharded.skeleton.modules()} == {
        type(each).__name__ for each in reference.modules()
    }


def check_cases(world: World) -> None:
    with known_warnings():
        for name in CASES:
            try:
                check_case(name)
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error


def check_odd(world: World) -> None:
    """What is refused, by name; and the world that is found."""
    assert attach(by_hand(lora())).world is current_world() is world
    both = lora()
    fully_shard(layers(both)[0])
    with pytest.raises(ModelError, match="FSDP1 and of FSDP2"), known_warnings():
        attach(fsdp1(both, auto_wrap_policy=None, ignored_states=list(layers(both)[0].parameters())))
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
    split = tiny_llama()
    split.lm_head.weight = nn.Parameter(distribute_tensor(split.lm_head.weight.detach(), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(ModelError, match=r"lm_head\.weight: placements"):
        attach(split)


def check_hybrid(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with known_warnings():
        for make in (lambda: by_hand(lora(), mesh=mesh), lambda: prepared_hybrid(mesh)):
            sharded = attach(make())
            check_holds(sharded, whole_of(lora()), dict(lora().named_buffers()))
            assert all(
                start == stop for tensor in sharded.plan.parameters for start, stop in sharded.ranges(tensor.name)[2:]
            )
            run_model(sharded)
        with pytest.raises(ModelError, match="replicas would drift apart"):
            attach(prepared_hybrid(init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))))
    halves = mesh["shard"]
    sharded = attach(by_hand(lora(), mesh=halves))
    assert (sharded.world.rank, sharded.world.size) == (world.rank % 2, 2)
    check_holds(sharded, whole_of(lora()), dict(lora().named_buffers()))


def prepared_hybrid(mesh: Any) -> nn.Module:
    return fsdp1(lora(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def check_many(world: World) -> None:
    check_cases(world)
    if world.size == 4:
        check_odd(world)
        check_hybrid(world)


@pytest.mark.parametrize("size", [1, 4])
def test_whoever_wrapped_it(size: int):
    run_ranks(size, check_many, timeout_s=400)


def check_between(world: World) -> None:
    """Attaching, settling and reading between forward and backward changes no number."""
    for make in (lambda: by_hand(lora()), lambda: fsdp1(lora())):
        outcomes = []
        for reads in (False, True):
            with known_warnings():
                model = make()
                sharded = attach(model)
            loss = model(input_ids=IDS).logits.square().mean()
            if reads:
                for each in (attach(model), sharded):
                    each.settle()
                    assert each.is_current()
                    for tensor in each.plan.parameters:
                        each.local_flat(tensor.name)
            loss.backward()
            grads = [param.grad for _, param in sharded.trainable() if param.grad is not None]
            outcomes.append([loss, *(getattr(grad, "to_local", lambda grad=grad: grad)() for grad in grads)])
        assert len(outcomes[0]) > 1
        for without, with_reads in zip(*outcomes, strict=True):
            assert torch.equal(without, with_reads)


def check_currency(world: World) -> None:
    model: Any = by_hand(lora())
    sharded = attach(model)
    with torch.no_grad():
        model(input_ids=IDS)  # the root stays gathered: other objects hang in its slots
    assert sharded.is_current()
    checkpointed(model)
    assert not sharded.is_current()
    again = attach(model)
    assert again.is_current()
    model.get_submodule("base_model.model.lm_head").weight = nn.Parameter(torch.zeros(64, 32))
    assert not again.is_current()


def odd_model(what: str, *, is_odd: bool) -> nn.Module:
    """Sharded by hand; on the odd rank with one difference."""
    model: Any = lora()
    inner = model.base_model.model
    if is_odd and what == "LoRA rank":
        model = get_peft_model(tiny_llama(), LoraConfig(r=8, target_modules="all-linear"))
    elif is_odd and what == "dtype":
        inner.model.norm.to(torch.bfloat16)
    elif is_odd and what == "buffer":
        del inner.model.rotary_emb.original_inv_freq
    elif is_odd and what == "order":
        inner._modules["model"] = inner._modules.pop("model")
    elif is_odd and what == "scale":
        inner.model.layers[0].mlp.up_proj.scaling["default"] = 9.0
    elif is_odd and what == "adapter":
        model.add_adapter("second", CONFIG)
    elif is_odd and what == "frozen":
        inner.lm_head.requires_grad_(True)
    elif is_odd and what == "unsharded":
        return model
    for each in layers(model)[1 if is_odd and what == "unit" else 0 :]:
        fully_shard(each)
    return fully_shard(model)


DIFFERENCES = {
    "LoRA rank": r"lora_A\.default\.weight torch\.float32 \[4, 32\].*rank 1 has .*\[8, 32\]",
    "dtype": r"model\.norm\.weight torch\.float32.*rank 1 has .*torch\.bfloat16",
    "buffer": r"original_inv_freq.*rank 1 has",
    "order": r"rank 0 has .*embed_tokens.*rank 1 has .*lm_head",
    "scale": r"up_proj: scaling .*9\.0",
    "adapter": r"rank 1 has .*second",
    "frozen": r"lm_head.*rank 1 has .*lm_head\.weight.* trainable",
    "unit": r"unit base_model\.model\.model\.layers\.0.*rank 1 has 'unit base_model\.model\.model\.layers\.1",
    "unsharded": r"sharded by FSDP2.*rank 1 has 'the model is not sharded",
}


def check_differences(world: World) -> None:
    """Both ranks raise the same, at once; the ranks go on together afterwards."""
    for what, expected in DIFFERENCES.items():
        model = odd_model(what, is_odd=world.rank == 1)
        began = time.monotonic()
        with pytest.raises(RanksDisagree) as caught:
            attach(model)
        assert time.monotonic() - began < 10, what
        assert re.search(expected, str(caught.value), re.DOTALL), (what, str(caught.value))
    attach(odd_model("none", is_odd=False))
    if world.rank == 0:
        with pytest.raises(RankMissing, match="rank 1"):
            attach(odd_model("none", is_odd=False), timeout_s=3)


def check_on_two_ranks(world: World) -> None:
    check_between(world)
    check_currency(world)
    check_differences(world)


def test_reading_between_forward_and_backward_changes_that_are_noticed_and_ranks_that_differ():
    run_ranks(2, check_on_two_ranks, timeout_s=200)
