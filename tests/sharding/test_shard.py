"""`shard`: the plan's units, both backends, every layout, values equal to the unsharded model's; refusals before any wrapping."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import lockstep
from helpers_models import tiny_gemma3, tiny_gpt2
from helpers_sharded import check_holds, whole_of
from lockstep.dist import World
from lockstep.errors import ModelError, RankMissing, RanksDisagree
from lockstep.names import clean_name
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.plan import LayerClasses, Modules, ShardingPlan, plan_sharding
from lockstep.sharding.precision import Precision
from lockstep.sharding.shard import shard
from lockstep.testing import run_ranks, tiny_llama

IDS = torch.arange(1, 9)[None]


def lora(model: nn.Module, **options: Any) -> PeftModel:
    torch.manual_seed(1)
    values = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**values))


def bf16_with_fp32_adapter() -> PeftModel:
    model = lora(tiny_llama().bfloat16())
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.float()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: lora(tiny_llama(), use_dora=True),
    "tied llama": lambda: lora(tiny_llama(tie_word_embeddings=True)),
    "lora on the embedding": lambda: lora(tiny_llama(), target_modules=["embed_tokens", "q_proj"]),
    "modules_to_save": lambda: lora(tiny_llama(), modules_to_save=["lm_head"]),
    "bf16": lambda: tiny_llama().bfloat16(),
    "gpt2": lambda: lora(tiny_gpt2(), target_modules=["c_attn"], fan_in_fan_out=True),
    "gemma3": lambda: lora(tiny_gemma3()),
}


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits.float().square().mean()


def check_values(make: Callable[[], nn.Module], world: World, **options: Any) -> None:
    """Held, computed and reduced as the unsharded model's."""
    plain = make()
    whole, buffers = whole_of(plain), dict(plain.named_buffers(remove_duplicate=False))
    sharded = shard(make(), **options)
    check_holds(sharded, whole, buffers)
    with torch.no_grad():
        before = loss_of(sharded.module)
    check_holds(sharded, whole, buffers)
    loss = loss_of(sharded.module)
    check_holds(sharded, whole, buffers)  # between forward and backward
    loss.backward()
    assert torch.equal(loss, before)
    expected = loss_of(plain)
    expected.backward()
    rel = 1e-5 if loss.dtype == next(plain.parameters()).dtype else 5e-2
    assert float(loss) == pytest.approx(float(expected), rel=rel)
    norm = nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None])
    assert sharded.clip_grad_norm(1e9) == pytest.approx(float(norm), rel=max(rel, 1e-4))
    assert {name for name, _ in sharded.trainable()} <= set(whole)
    if (
        world.size > 1 or options["backend"] == "fsdp2"
    ):  # torch's FSDP1 on one rank fails at a second forward of tied frozen weights
        check_accumulation(sharded, whole, buffers, norm=float(norm), rel=max(rel, 1e-4))
    sharded.settle()
    assert sharded.is_current()


def check_accumulation(
    sharded: ShardedModel, whole: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], *, norm: float, rel: float
) -> None:
    """Four equal micro-batches, reduced with the last one, have four times one's gradient; the model is read in between, too."""
    for _, param in sharded.trainable():
        param.grad = None
    for micro_batch in range(4):
        sharded.set_gradient_sync(micro_batch == 3)
        loss_of(sharded.module).backward()
        if micro_batch == 0:
            check_holds(sharded, whole, buffers)  # the other three follow each other
    assert sharded.clip_grad_norm(1e9) == pytest.approx(4 * norm, rel=rel)


def check_backends(world: World) -> None:
    backends: list[dict[str, Any]] = [
        {"backend": "fsdp2"},
        {"backend": "fsdp1"},
        {"backend": "fsdp1", "use_orig_params": False},
    ]
    layouts: list[dict[str, Any]] = [{"reshard_after_forward": False}, {"cpu_offload": True}]
    if world.size == 4:
        layouts.append({"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))})
    for name, make in MODELS.items():
        for options in backends:
            run_case(name, make, world, options)
    for layout in layouts:
        for options in backends:
            # FSDP1 pins offloaded memory, which a machine without an accelerator cannot.
            if options["backend"] == "fsdp1" and "cpu_offload" in layout:
                continue
            run_case("llama", MODELS["llama"], world, options | layout)


def run_case(name: str, make: Callable[[], nn.Module], world: World, options: dict[str, Any]) -> None:
    try:
        check_values(make, world, **options)
    except Exception as error:
        raise AssertionError(f"{name}, {options}: {type(error).__name__}: {error}") from error


def units_of(module: nn.Module, kind: type) -> set[str]:
    return {clean_name(name) for name, each in module.named_modules() if isinstance(each, kind)}


def check_units(world: World) -> None:
    plan = plan_sharding(MODELS["llama"]())
    planned = {unit.module for unit in plan.units}
    assert units_of(shard(MODELS["llama"](), plan).module, FSDPModule) == planned
    first = shard(MODELS["llama"](), plan, backend="fsdp1")
    assert units_of(first.module, FullyShardedDataParallel) == planned
    assert [unit.module for unit in first.plan.units] == [unit.module for unit in plan.units]
    assert list(first.plan.buffers) == list(plan.buffers)
    assert not any(tensor.is_persistent for tensor in first.plan.buffers)  # rotary tables
    leaves = shard(MODELS["llama"](), plan, backend="fsdp1", use_orig_params=False)
    for unit in leaves.plan.units:
        assert len({tensor.is_trainable for tensor in unit.parameters}) <= 1, unit.module
    nested = plan_sharding(tiny_llama(), Modules(("model.layers.*.mlp", "model.layers.0")))
    for backend in ("fsdp1", "fsdp2"):
        sharded = shard(tiny_llama(), nested, backend=backend)
        assert {unit.module for unit in sharded.plan.units} == {
            "model.layers.0",
            "model.layers.0.mlp",
            "model.layers.1.mlp",
            "",
        }
        check_holds(sharded, whole_of(tiny_llama()), dict(tiny_llama().named_buffers()))


def check_mixed_dtypes(world: World) -> None:
    plain = bf16_with_fp32_adapter()
    whole, buffers = whole_of(plain), dict(plain.named_buffers())
    check_holds(shard(bf16_with_fp32_adapter()), whole, buffers)
    check_holds(shard(bf16_with_fp32_adapter(), backend="fsdp1", mixed_dtypes="split"), whole, buffers)
    aligned = {name: value.bfloat16() for name, value in whole.items()}
    check_holds(shard(bf16_with_fp32_adapter(), backend="fsdp1", mixed_dtypes="align"), aligned, buffers)
    with pytest.raises(ModelError, match="lora_A"):
        shard(bf16_with_fp32_adapter(), backend="fsdp1", mixed_dtypes="refuse")


def check_precision(world: World) -> None:
    low = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for backend in ("fsdp1", "fsdp2"):
        sharded = shard(tiny_llama(), backend=backend, precision=low)
        logits = sharded.module(input_ids=IDS).logits
        assert logits.dtype == torch.bfloat16
        check_holds(sharded, whole_of(tiny_llama()), dict(tiny_llama().named_buffers()))
        logits.sum().backward()
        assert {param.grad.dtype for _, param in sharded.trainable() if param.grad is not None} == {torch.float32}
    with pytest.raises(ModelError, match="output_dtype exists on FSDP2 only"):
        shard(tiny_llama(), backend="fsdp1", precision=Precision(output_dtype=torch.float32))
    with pytest.raises(ModelError, match="buffer_dtype exists on FSDP1 only"):
        shard(tiny_llama(), precision=Precision(buffer_dtype=torch.bfloat16))


def check_meta(world: World) -> None:
    """Real on rank 0 and empty elsewhere: rank 0's values reach every part, replicas too."""
    meshes: list[dict[str, Any]] = [{}]
    if world.size == 4:
        meshes.append({"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))})
    for layout in meshes:
        for backend in ("fsdp1", "fsdp2"):
            model = MODELS["tied llama"]()
            plain = MODELS["tied llama"]()
            if not world.is_main:
                buffers = dict(model.named_buffers())
                model.to("meta")
                for name, buffer in buffers.items():
                    path, _, leaf = name.rpartition(".")
                    model.get_submodule(path)._buffers[leaf] = buffer
                model.tie_weights()
            sharded = shard(model, backend=backend, **layout)
            check_holds(sharded, whole_of(plain), dict(plain.named_buffers()))
            # What replicas hold is seen by computing with it.
            assert float(loss_of(sharded.module)) == pytest.approx(float(loss_of(plain)), rel=1e-5)


def check_refusals(world: World) -> None:
    """By name, on every rank, and with the model as it was."""
    odd = tiny_llama()
    odd.lm_head.weight = nn.Parameter(odd.lm_head.weight.detach().t().contiguous().t())
    cases: list[tuple[nn.Module, dict[str, Any], str]] = [
        (odd, {}, r"lm_head\.weight is not contiguous"),
        (tied_embedding_lora(), {"backend": "fsdp1", "use_orig_params": False}, "lora_embedding_A"),
        (shard(tiny_llama()).module, {"plan": plan_sharding(tiny_llama())}, "sharded already; use attach"),
        (shard(tiny_llama(), backend="fsdp1").module, {"plan": plan_sharding(tiny_llama())}, "sharded already; use attach"),
        (lora(tiny_llama()), {"plan": plan_sharding(tiny_llama())}, "the plan and the model differ in"),
        (tiny_llama(), {"backend": "fsdp1", "mesh": init_device_mesh("cpu", (4, 1))}, "replicas would drift apart"),
        (tiny_llama(), {"backend": "fsdp1", "cpu_offload": True}, "cpu_offload: FSDP1 pins the memory"),
        (tiny_llama(tie_word_embeddings=True), {"plan": across_units()}, r"model\.embed_tokens\.weight of unit .* is tied to lm_head"),
    ]  # fmt: skip
    for model, options, message in cases:
        before = [type(each) for each in model.modules()]
        with pytest.raises(ModelError, match=message):
            shard(model, **options)
        assert before == [type(each) for each in model.modules()]
    if not world.is_main:
        with pytest.raises(RanksDisagree, match="refused here: lm_head"):
            shard(tiny_llama())
    else:
        with pytest.raises(ModelError, match=r"lm_head\.weight is not contiguous"):
            shard(odd)


def tied_embedding_lora() -> PeftModel:
    return lora(tiny_llama(tie_word_embeddings=True), target_modules=["embed_tokens"])


def across_units() -> ShardingPlan:
    """A plan that makes the embedding of a tied model a unit without its head."""
    untied = plan_sharding(tiny_llama(), Modules(("model.embed_tokens",)))
    inner, root = untied.units
    tied = dataclasses.replace(inner.parameters[0], aliases=("lm_head.weight",))
    rest = tuple(tensor for tensor in root.parameters if tensor.name != "lm_head.weight")
    return ShardingPlan((dataclasses.replace(inner, parameters=(tied,)), dataclasses.replace(root, parameters=rest)))


def check_sub_mesh(world: World) -> None:
    """Two models side by side, each on half of the ranks."""
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "mine"))["mine"]
    for backend in ("fsdp2", "fsdp1"):
        seed = world.rank // 2
        sharded = shard(tiny_llama(seed=seed), mesh=half, backend=backend)
        assert (sharded.world.rank, sharded.world.size) == (world.rank % 2, 2)
        check_holds(sharded, whole_of(tiny_llama(seed=seed)), dict(tiny_llama().named_buffers()))
        loss_of(sharded.module).backward()
        assert sharded.clip_grad_norm(1e9) > 0


def check_everything(world: World) -> None:
    checks = [check_backends]
    if world.size == 4:
        checks += [check_units, check_mixed_dtypes, check_precision, check_meta, check_refusals, check_sub_mesh]
    for check in checks:
        check(world)


@pytest.mark.parametrize("size", [1, 4])
def test_the_model_is_the_unsharded_one_in_parts(size: int):
    run_ranks(size, check_everything, timeout_s=400)


DIFFERENCES = {
    "rank": r"\[4, 32\].*\[8, 32\]",
    "scale": r"7\.0",
    "units": r"unit base_model\.model\.model\.layers\.0'.*layers\.0\.mlp'",
    "options": "reshard_after_forward=True.*reshard_after_forward=False",
}


def check_differences(world: World) -> None:
    """Both ranks raise the same before anything is wrapped, and go on together afterwards."""
    is_odd = world.rank == 1
    for what, expected in DIFFERENCES.items():
        model = lora(tiny_llama(), r=8 if is_odd and what == "rank" else 4)
        if is_odd and what == "scale":
            model.get_submodule("base_model.model.model.layers.0.mlp.up_proj").scaling["default"] = 7.0
        policy = LayerClasses(("LlamaMLP",)) if is_odd and what == "units" else None
        with pytest.raises(RanksDisagree) as caught:
            shard(model, plan_sharding(model, policy), reshard_after_forward=not is_odd or what != "options")
        assert re.search(expected, str(caught.value), re.DOTALL), (what, str(caught.value))
        assert not units_of(model, FSDPModule)
    check_values(MODELS["llama"], world, backend="fsdp1")
    if world.is_main:
        with pytest.raises(RankMissing, match="rank 1"):
            shard(tiny_llama(), timeout_s=3)


def test_ranks_that_differ_all_raise_before_wrapping():
    run_ranks(2, check_differences, timeout_s=120)


def test_misspelt_words_and_wrong_things_are_told():
    """None of them may stand for the last of several branches."""
    with pytest.raises(ValueError, match=r"backend must be one of .*'fsdp3'"):
        lockstep.shard(tiny_llama(), backend="fsdp3")
    with pytest.raises(ValueError, match=r"mixed_dtypes must be one of .*'aligned'"):
        lockstep.shard(tiny_llama(), mixed_dtypes="aligned")
    with pytest.raises(TypeError, match="NoneType"):
        lockstep.shard(None)
    with pytest.raises(TypeError, match="NoneType"):
        lockstep.attach(None)
    with pytest.raises(TypeError, match="'layers'"):
        lockstep.plan_sharding(tiny_llama(), "layers")
    with pytest.raises(TypeError, match=r"LlamaForCausalLM"):
        lockstep.fill(tiny_llama(), "anywhere")


@pytest.mark.parametrize("reshards", [True, False])
def test_micro_batches_share_one_gather_where_units_are_kept_whole(reshards):
    """Each micro-batch gathered the frozen base again: on gloo, a seventh of the update's time."""
    ids = torch.arange(8)[None] + 3
    model, plain = tiny_llama(), tiny_llama()
    sharded = shard(model, plan_sharding(model), reshard_after_forward=reshards)
    for is_last in (False, False, True):
        sharded.set_gradient_sync(is_last)
        sharded.module(input_ids=ids).logits.float().square().mean().backward()
        plain(input_ids=ids).logits.float().square().mean().backward()
        is_sharded = all(isinstance(param, DTensor) for param in model.parameters())
        assert is_sharded == (reshards or is_last)
    grads = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    assert grads
    for name, param in sharded.trainable():
        assert param.grad is not None
        torch.testing.assert_close(whole_grad(param.grad), grads[name])


def whole_grad(grad: torch.Tensor) -> torch.Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad
