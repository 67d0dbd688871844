"""Mixed dtypes are found by name, and what is decided about them is what FSDP1 and FSDP2 really take and refuse."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from lockstep.errors import ModelError
from lockstep.model import dtype
from lockstep.model.dtype import Cast, DtypePlan, apply_dtypes, find_mixed_dtypes, keep_in_fp32, plan_dtypes
from lockstep.sharding.plan import LayerClasses, Modules, plan_sharding, split_units
from lockstep.testing import run_ranks, tiny_llama

ROOT = "base_model.model.model.layers"
BF16, FP32 = torch.bfloat16, torch.float32


def lora_model(*, adapter=FP32, norms=BF16, **config):
    """A bf16 base, frozen."""
    values = {"r": 2, "target_modules": ["q_proj"], **config}
    model = get_peft_model(tiny_llama().bfloat16(), LoraConfig(**values))
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.to(adapter)
        if "layernorm" in name:
            param.data = param.data.to(norms)
    return model


class Block(nn.Module):
    """A trainable layer and a norm, perhaps of another dtype, and a packed payload."""

    def __init__(self, *, norm=BF16, with_payload=False):
        super().__init__()
        self.up = nn.Linear(8, 8).to(BF16)
        self.norm = nn.LayerNorm(8).to(norm)
        if with_payload:
            self.payload = nn.Parameter(torch.arange(24, dtype=torch.uint8).reshape(6, 4), requires_grad=False)

    def forward(self, x):
        return self.norm(self.up(x.to(BF16)).to(self.norm.weight.dtype))


def blocks(**kinds):
    return nn.Sequential(Block(**kinds), Block(**kinds))


def plan_blocks(model):
    return plan_sharding(model, LayerClasses(("Block",)))


def test_one_dtype_has_no_findings_and_needs_nothing():
    for backend in ("fsdp1", "fsdp2"):
        for rule in (None, "align", "split", "refuse"):
            plan = plan_sharding(lora_model(adapter=BF16))
            assert find_mixed_dtypes(plan) == () and plan_dtypes(plan, backend=backend, rule=rule) == DtypePlan()


def test_findings_name_the_odd_parameters_with_dtype_and_use():
    findings = find_mixed_dtypes(plan_sharding(lora_model(norms=FP32)))
    assert [finding.unit for finding in findings] == [f"{ROOT}.0", f"{ROOT}.1"]
    assert findings[0].majority == BF16
    odd = {each.name.removeprefix(f"{ROOT}.0."): (each.dtype, each.is_trainable) for each in findings[0].odd}
    assert odd == {
        "self_attn.q_proj.lora_A.default.weight": (FP32, True),
        "self_attn.q_proj.lora_B.default.weight": (FP32, True),
        "input_layernorm.weight": (FP32, False),
        "post_attention_layernorm.weight": (FP32, False),
    }
    assert (
        f"{ROOT}.0 is torch.bfloat16, but for" in findings[0].line() and "(torch.float32, frozen)" in findings[0].line()
    )


def test_the_majority_is_the_bases_also_where_an_adapter_or_the_first_tensor_outweighs_it():
    """V17: the dtype of the first frozen parameter is no guide."""
    model = lora_model(r=200)
    assert {finding.majority for finding in find_mixed_dtypes(plan_sharding(model))} == {BF16}
    model = lora_model()
    first = next(iter(model.base_model.model.model.layers[0].parameters()))
    first.data = first.data.float()
    assert find_mixed_dtypes(plan_sharding(model))[0].majority == BF16


def test_fsdp1_casts_adapters_splits_frozen_floats_and_warns(caplog):
    caplog.set_level(logging.WARNING)
    model = lora_model(norms=FP32)
    plan = plan_sharding(model)
    decided = plan_dtypes(plan, backend="fsdp1")
    q_proj = f"{ROOT}.0.self_attn.q_proj"
    assert decided.casts[:2] == tuple(Cast(f"{q_proj}.lora_{each}.default.weight", FP32, BF16) for each in "AB")
    assert decided.units == tuple(
        f"{ROOT}.{i}.{norm}" for i in range(2) for norm in ("input_layernorm", "post_attention_layernorm")
    )
    assert "4 adapter tensors" in caplog.text and "are lost" in caplog.text
    before = {name: param for name, param in model.named_parameters()}
    assert apply_dtypes(model, decided) == decided.casts
    assert apply_dtypes(model, decided) == ()
    assert all(before[name] is param for name, param in model.named_parameters())
    assert {param.dtype for name, param in model.named_parameters() if "lora_" in name} == {BF16}
    assert {param.dtype for name, param in model.named_parameters() if "layernorm" in name} == {FP32}
    assert find_mixed_dtypes(split_units(plan_sharding(model), decided.units)) == ()


def test_an_adapter_that_gains_precision_is_no_warning(caplog):
    model = lora_model(adapter=BF16)
    model.float()
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.to(BF16)
    assert {cast.after for cast in plan_dtypes(plan_sharding(model), backend="fsdp1").casts} == {FP32}
    assert "adapter" not in caplog.text


def test_fsdp1_rules():
    plan = plan_sharding(lora_model())
    split = plan_dtypes(plan, backend="fsdp1", rule="split")
    assert split.casts == () and split.units[:2] == tuple(
        f"{ROOT}.0.self_attn.q_proj.lora_{each}.default" for each in "AB"
    )
    with pytest.raises(
        ModelError, match=r"fsdp1 takes parameters of one dtype.*lora_A\.default\.weight \(torch\.float32, t"
    ):
        plan_dtypes(plan, backend="fsdp1", rule="refuse")
    with pytest.raises(ModelError, match=r"input_layernorm\.weight \(torch\.float32, frozen\).*only adapters are cast"):
        plan_dtypes(plan_sharding(lora_model(norms=FP32)), backend="fsdp1", rule="align")


def test_what_the_model_keeps_in_fp32_is_never_cast():
    model = lora_model(target_modules=["q_proj", "v_proj"])
    model.base_model.model._keep_in_fp32_modules = None
    model.base_model.model.model._keep_in_fp32_modules_strict = {"self_attn.q_proj", "wo"}
    keep = keep_in_fp32(model)
    assert set(keep) >= {"self_attn.q_proj", "wo"}
    decided = plan_dtypes(plan_sharding(model), backend="fsdp1", keep=keep)
    assert {".v_proj." in cast.name for cast in decided.casts} == {True}
    assert {".q_proj." in unit for unit in decided.units} == {True} and len(decided.units) == 4
    with pytest.raises(ModelError, match="q_proj"):
        plan_dtypes(plan_sharding(model), backend="fsdp1", rule="align", keep=keep)


def test_fsdp2_takes_frozen_floats_and_fp32_adapters_as_they_are():
    plan = plan_sharding(lora_model(norms=FP32))
    for rule in (None, "split", "refuse"):
        assert plan_dtypes(plan, backend="fsdp2", rule=rule) == DtypePlan()
    aligned = plan_dtypes(plan_sharding(lora_model()), backend="fsdp2", rule="align")
    assert len(aligned.casts) == 4 and aligned.units == ()


def test_fsdp2_splits_or_refuses_two_trainable_dtypes():
    plan = plan_blocks(blocks(norm=FP32))
    assert plan_dtypes(plan, backend="fsdp2").units == ("0.norm", "1.norm")
    for rule in ("refuse", "align"):
        with pytest.raises(ModelError, match=r"fsdp2 takes trainable parameters of one dtype.*0 is .*norm\.weight"):
            plan_dtypes(plan, backend="fsdp2", rule=rule)


def test_before_torch_2_9_fsdp2_wants_one_dtype_of_frozen_parameters_too(monkeypatch, caplog):
    monkeypatch.setattr(dtype, "FSDP2_MIXES_FROZEN", False)
    plan = plan_sharding(lora_model(norms=FP32))
    old, fsdp1_like = plan_dtypes(plan, backend="fsdp2"), plan_dtypes(plan, backend="fsdp1")
    assert old == fsdp1_like and len(old.casts) == 4 and len(old.units) == 4 and "are lost" in caplog.text
    with pytest.raises(ModelError, match="fsdp2 takes parameters of one dtype"):
        plan_dtypes(plan, backend="fsdp2", rule="refuse")
    # FSDP2 of that time cannot leave a parameter out, and this one has no module of its own.
    with pytest.raises(ModelError, match=r"'0\.payload' has no module of its own"):
        plan_dtypes(plan_blocks(blocks(with_payload=True)), backend="fsdp2")


def test_integer_payloads_stay_outside_fsdp1_and_are_fine_on_fsdp2():
    plan = plan_blocks(blocks(with_payload=True))
    assert plan_dtypes(plan, backend="fsdp1", rule="refuse").ignored == ("0.payload", "1.payload")
    assert plan_dtypes(plan, backend="fsdp2", rule="refuse") == DtypePlan()
    assert [finding.odd[0].dtype for finding in find_mixed_dtypes(plan)] == [torch.uint8] * 2


def test_what_has_no_module_of_its_own_is_refused_by_name():
    model = blocks()
    model[0].up.bias.data = model[0].up.bias.data.float()
    for backend in ("fsdp1", "fsdp2"):
        with pytest.raises(ModelError, match=r"'0\.up\.bias' has no module of its own"):
            plan_dtypes(plan_blocks(model), backend=backend)
    embedding = lora_model(target_modules=["embed_tokens"])
    assert len(plan_dtypes(plan_sharding(embedding), backend="fsdp1").casts) == 2
    with pytest.raises(ModelError, match=r"lora_embedding_A\.default' has no module of its own"):
        plan_dtypes(plan_sharding(embedding), backend="fsdp1", rule="split")


def test_meta_models_are_cast_and_another_models_plan_is_refused():
    model = lora_model().to("meta")
    decided = plan_dtypes(plan_sharding(model), backend="fsdp1")
    assert apply_dtypes(model, decided) == decided.casts
    assert {param.dtype for param in model.parameters()} == {BF16}
    with pytest.raises(ModelError, match="plan again for this model"):
        apply_dtypes(tiny_llama(), decided)


def fsdp1(model, plan, ignored=()):
    """Wrap as the plan says, deepest units first."""
    left = [param for name, param in model.named_parameters() if name in ignored]

    def wrap(module):
        return FullyShardedDataParallel(
            module, use_orig_params=True, device_id=torch.device("cpu"), ignored_states=left or None
        )

    for unit in sorted(plan.units[:-1], key=lambda unit: -unit.module.count(".")):
        parent, _, leaf = unit.module.rpartition(".")
        model.get_submodule(parent)._modules[leaf] = wrap(model.get_submodule(unit.module))
    return wrap(model)


def fsdp2(model, plan):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for unit in sorted(plan.units, key=lambda unit: -unit.module.count(".") if unit.module else 1):
        fully_shard(model.get_submodule(unit.module), mesh=mesh)
    return model


def train_a_step(model, inputs):
    output = model(inputs)
    loss = (output if isinstance(output, torch.Tensor) else output.logits).float().square().mean()
    loss.backward()
    assert torch.isfinite(loss)


def check_fsdp1(world):
    ids = torch.tensor([[3, 4, 5, 6]])
    for norms in (BF16, FP32):
        with pytest.raises(ValueError, match="uniform dtype"):
            fsdp1(lora_model(norms=norms), plan_sharding(lora_model(norms=norms)))
    for rule, norms in ((None, FP32), ("align", BF16), ("split", BF16)):
        model = lora_model(norms=norms)
        plan = plan_sharding(model)
        decided = plan_dtypes(plan, backend="fsdp1", rule=rule)
        apply_dtypes(model, decided)
        # bf16 layers after an fp32 norm need autocast, wrapped or not.
        with torch.autocast("cpu", BF16):
            train_a_step(fsdp1(model, split_units(plan_sharding(model), decided.units)), ids)
    quantised = blocks(with_payload=True)
    plan = plan_blocks(quantised)
    with pytest.raises(ValueError, match="integer dtype"):
        fsdp1(blocks(with_payload=True), plan)
    wrapped = fsdp1(quantised, plan, plan_dtypes(plan, backend="fsdp1").ignored)
    train_a_step(wrapped, torch.ones(2, 8))
    assert torch.equal(quantised[1].payload.flatten(), torch.arange(24, dtype=torch.uint8))


def check_fsdp2(world):
    frozen = lora_model(norms=FP32)
    with torch.autocast("cpu", BF16):
        train_a_step(fsdp2(frozen, plan_sharding(frozen)), torch.tensor([[3, 4, 5, 6]]))
    trainable = blocks(norm=FP32)
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        train_a_step(fsdp2(trainable, plan_blocks(trainable)), torch.ones(2, 8))
    trainable = blocks(norm=FP32)
    plan = plan_blocks(trainable)
    train_a_step(fsdp2(trainable, split_units(plan, plan_dtypes(plan, backend="fsdp2").units)), torch.ones(2, 8))
    quantised = blocks(with_payload=True)
    train_a_step(fsdp2(quantised, plan_blocks(quantised)), torch.ones(2, 8))
    assert torch.equal(quantised[1].payload.full_tensor().flatten(), torch.arange(24, dtype=torch.uint8))


def check_both(world):
    check_fsdp1(world)
    check_fsdp2(world)


def test_fsdp_takes_and_refuses_what_the_plan_says():
    run_ranks(2, check_both, timeout_s=200)


def test_a_unit_of_payloads_alone_has_their_dtype():
    model = nn.ModuleDict({"a": Block(with_payload=True)})
    plan = plan_sharding(model, Modules(("a.up", "a.norm")))
    assert find_mixed_dtypes(plan) == () and plan_dtypes(plan, backend="fsdp1").ignored == ("a.payload",)
