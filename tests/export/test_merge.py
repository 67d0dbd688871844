"""Merged values, by element ranges and on scratch copies, equal PEFT's own merge in one process to the bit."""

import copy
import itertools
import random
import warnings

import pytest
import torch
from peft import IA3Config, LoraConfig, OFTConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.ao.quantization import FakeQuantize
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lockstep.errors import IncompleteExport
from lockstep.export.hub import hub_plan
from lockstep.export.merge import RowsMerge, merge_elements, merge_scratch, merge_window
from lockstep.export.merge_plan import plan_merges
from lockstep.model.fake_quant import fake_quantizers
from lockstep.sharding.skeleton import skeleton

SIZES = {
    "vocab_size": 67, "hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MOE = {**SIZES, "hidden_size": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LINEAR = ["q_proj", "k_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "ragged": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "hidden_size": 12, "intermediate_size": 7, "vocab_size": 33}, head_dim=3)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=67, n_embd=24, n_layer=2, n_head=4, n_positions=32)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**MOE, num_local_experts=3)),
    "qwen3moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE, num_experts=5, head_dim=8)),
}
CASES = {
    "lora": ("llama", {"target_modules": LINEAR}),
    "ragged": ("ragged", {"target_modules": LINEAR}),
    "rank 1": ("llama", {"target_modules": LINEAR, "r": 1}),
    "rslora": ("llama", {"target_modules": LINEAR, "use_rslora": True}),
    "patterns": ("llama", {"target_modules": LINEAR, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 64}}),
    "dora": ("llama", {"target_modules": LINEAR, "use_dora": True}),
    "lora_bias": ("qwen2", {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "dora embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
    "modules_to_save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 1, 60]}}),
    "tied tokens": ("tied", {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 1, 60]}}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gpt2 dora": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    "mixtral experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "qwen3moe experts": ("qwen3moe", {"target_modules": [], "target_parameters": EXPERTS}),
}
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16+fp32": (torch.bfloat16, torch.float32),
    "fp32+bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
}


def peft_model(case: str, *, base=torch.float32, lora=torch.float32, adapter="default", more=()) -> PeftModel:
    """Every tensor that an adapter adds is random, so that whatever is left out shows."""
    name, options = CASES[case]
    torch.manual_seed(0)
    plain = MODELS[name]().to(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(**{"r": 4, "lora_alpha": 6, **options})
        model = get_peft_model(plain, config, adapter_name=adapter, autocast_adapter_dtype=False)
        for other in more:
            model.add_adapter(other, LoraConfig(**{"r": 3, "lora_alpha": 5, **options}))
    for name, param in model.named_parameters():
        if name.removeprefix("base_model.model.") not in dict(plain.named_parameters()) or param.requires_grad:
            randomise(name, param, base=base, lora=lora)
    return model


def randomise(name: str, param: nn.Parameter, *, base: torch.dtype, lora: torch.dtype) -> None:
    if (".base_layer." in name and "lora_" not in name) or "original_module" in name:
        return
    own = base if "modules_to_save" in name or "token_adapter" in name else lora
    param.data = (torch.randn(param.shape) * 0.1 + ("magnitude" in name)).to(own)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in found.items()}


def merged_by_peft(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    model.set_adapter(adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(model.merge_and_unload(adapter_names=[adapter]).state_dict())


def plain_name(live: str) -> str:
    parts = [part for part in live.split(".") if part not in ("base_layer", "token_adapter")]
    return ".".join(parts[2:])


def cuts(numel: int, ranks: int, rng: random.Random) -> list[int]:
    """Shard borders as FSDP2 makes them (rows) or FSDP1 does (anywhere)."""
    inner = sorted(rng.randrange(numel + 1) for _ in range(ranks - 1))
    return [0, *inner, numel]


def by_ranges(merge: RowsMerge, live: dict[str, torch.Tensor], borders: list[int]) -> torch.Tensor:
    whole, pieces = live[merge.base].reshape(-1), []
    for start, stop in itertools.pairwise(borders):
        first, last = merge_window(merge, start=start, stop=stop)
        b = live[merge.b][first:last] if merge.kind == "linear" else live[merge.b]
        first = first if merge.kind == "linear" else 0
        pieces.append(merge_elements(merge, whole[start:stop], start=start, a=live[merge.a], b=b, first_row=first))
    return torch.cat(pieces).reshape(merge.shape)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_merged_values_are_pefts_own(case, dtypes):
    base, lora = DTYPES[dtypes]
    model = peft_model(case, base=base, lora=lora)
    wanted, live = merged_by_peft(model, "default"), tensors(model)
    before = {name: tensor.clone() for name, tensor in live.items()}
    shape = skeleton(model, {})
    merges = plan_merges(shape, "default")
    assert merges.rows or merges.scratch
    rng = random.Random(case)
    for merge in merges.rows.values():
        assert (merge.base_dtype, merge.lora_dtype) == (base, lora)
        numel = live[merge.base].numel()
        for ranks in (1, 2, 3, 4, 5):
            got = by_ranges(merge, live, cuts(numel, ranks, rng))
            assert got.dtype == base
            assert torch.equal(got, wanted[plain_name(merge.base)]), (merge, ranks)
    for merge in merges.scratch:
        got = merge_scratch(shape, merge, {name: live[name].clone() for name in merge.inputs})
        assert list(got) == list(merge.outputs)
        for name, value in got.items():
            assert torch.equal(value, wanted[plain_name(name)]), (merge.module, name)
    changed = {plain_name(name) for name in merges.rows} | {
        plain_name(name) for merge in merges.scratch for name in merge.outputs
    }
    plain = {plain_name(name): tensor for name, tensor in live.items()}
    differs = {name for name, value in wanted.items() if name in plain and not torch.equal(value, plain[name])}
    assert differs <= changed
    assert differs
    assert all(torch.equal(before[name], tensor) for name, tensor in live.items())


def test_the_scale_is_the_layers_own():
    """B16, B17: rank and alpha patterns and rank-stabilised LoRA, whatever a configuration's alpha / r says."""
    options = {"target_modules": ["q_proj", "k_proj"], "r": 16, "lora_alpha": 16}
    options |= {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"k_proj": 64}}
    for is_stable, wanted in ((False, {"q": 4.0, "k": 4.0}), (True, {"q": 8.0, "k": 16.0})):
        config = LoraConfig(**options, use_rslora=is_stable)
        rows = plan_merges(skeleton(get_peft_model(MODELS["llama"](), config), {}), "default").rows
        scales = {name.split(".")[-3][0]: merge.scaling for name, merge in rows.items()}
        assert scales == wanted


def test_a_merge_rounds_once():
    """B32: an fp32 adapter in a bf16 base gives round(W + s * B A), not a sum of rounded parts."""
    model = peft_model("lora", base=torch.bfloat16)
    live = tensors(model)
    merge = next(iter(plan_merges(skeleton(model, {}), "default").rows.values()))
    base, a, b = (live[name] for name in (merge.base, merge.a, merge.b))
    got = merge_elements(merge, base.reshape(-1), start=0, a=a, b=b).reshape(merge.shape)
    delta = (b @ a) * merge.scaling
    assert torch.equal(got, (base.float() + delta).to(torch.bfloat16))
    assert not torch.equal(got, base + delta.to(torch.bfloat16))


@pytest.mark.parametrize("adapter", ["default", "night-owl_2"])
def test_adapters_are_merged_each_for_itself(adapter):
    for case in ("lora", "dora", "embeddings", "gpt2"):
        model = peft_model(case, adapter="default", more=("night-owl_2",))
        for name, param in model.named_parameters():
            if "night-owl_2" in name:
                randomise(name, param, base=torch.float32, lora=torch.float32)
        wanted, live, shape = merged_by_peft(model, adapter), tensors(model), skeleton(model, {})
        merges = plan_merges(shape, adapter)
        for merge in merges.rows.values():
            assert torch.equal(by_ranges(merge, live, [0, live[merge.base].numel()]), wanted[plain_name(merge.base)])
        for merge in merges.scratch:
            other = "default" if adapter == "night-owl_2" else "night-owl_2"
            assert not any(f".{other}." in f"{name}." for name in merge.inputs)
            for name, value in merge_scratch(shape, merge, {name: live[name].clone() for name in merge.inputs}).items():
                assert torch.equal(value, wanted[plain_name(name)])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(576, 192, 16), (1536, 576, 16), (49, 1000, 8), (1000, 49, 64), (17, 17, 1)])
def test_larger_matrices_round_alike_in_slices(shape, threads):
    """The matrix product's kernels change with the size and the number of threads; a slice must not show."""
    out, width, rank = shape
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for kind, dtype in itertools.product(("linear", "conv1d", "embedding"), (torch.float32, torch.bfloat16)):
            base = torch.randn((out, width), generator=generator).to(dtype)
            a = torch.randn((rank, width if kind == "linear" else out), generator=generator).to(dtype)
            b = torch.randn((out if kind == "linear" else width, rank), generator=generator).to(dtype)
            merge = RowsMerge(
                "w", "a", "b", kind=kind, scaling=0.7, shape=(out, width), rank=rank, base_dtype=dtype, lora_dtype=dtype
            )
            delta = ((b.float() @ a.float()) * 0.7).to(dtype)
            wanted = base + (delta if kind == "linear" else delta.T)
            live = {"w": base, "a": a, "b": b}
            for ranks in (1, 2, 3, 5, 8) if threads == 1 else (2, 5):
                assert torch.equal(by_ranges(merge, live, cuts(base.numel(), ranks, rng)), wanted), (kind, dtype, ranks)
            rows = [width * row for row in (0, 1, 2, out // 2, out - 1, out)]
            assert torch.equal(by_ranges(merge, live, rows), wanted), (kind, dtype)
    finally:
        torch.set_num_threads(before)


def test_rows_of_b_that_do_not_cover_the_window_are_refused():
    model = peft_model("lora")
    live = tensors(model)
    merge = next(iter(plan_merges(skeleton(model, {}), "default").rows.values()))
    width = merge.shape[1]
    assert merge_window(merge, start=3 * width, stop=4 * width) == (3, 19)
    assert merge_window(merge, start=23 * width, stop=24 * width) == (8, 24)
    assert merge_window(merge, start=5, stop=5) == (0, 0)
    base = live[merge.base].reshape(-1)[3 * width : 4 * width]
    with pytest.raises(ValueError, match=r"need rows 3 to 19 of .*lora_B.*rows 3 to 4 came"):
        merge_elements(merge, base, start=3 * width, a=live[merge.a], b=live[merge.b][3:4], first_row=3)


class Mixed(nn.Module):
    """Layers that no language model of the tests has."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.wave = nn.Conv1d(3, 6, 3)
        self.attend = nn.MultiheadAttention(8, 2)
        self.up = nn.Linear(8, 6)

    def forward(self, x):
        return self.up(x)


def test_whatever_else_peft_can_merge_is_merged_on_a_scratch_copy():
    for config in (
        LoraConfig(r=2, target_modules=["conv", "wave", "up"]),
        LoraConfig(r=2, target_modules=["attend"]),
        LoraConfig(r=2, target_modules=["conv", "up"], use_dora=True),
        IA3Config(target_modules=["up"], feedforward_modules=[]),
        OFTConfig(target_modules=["up"], oft_block_size=2, r=0),
    ):
        torch.manual_seed(0)
        model = get_peft_model(Mixed(), config)
        for param in model.parameters():
            if param.requires_grad:
                param.data = torch.randn(param.shape) * 0.1 + param.data
        wanted, live, shape = merged_by_peft(model, "default"), tensors(model), skeleton(model, {})
        merges, got = plan_merges(shape, "default"), {}
        assert merges.scratch
        for merge in merges.rows.values():
            got[merge.base] = by_ranges(merge, live, [0, live[merge.base].numel()])
        for merge in merges.scratch:
            got |= merge_scratch(shape, merge, {name: live[name].clone() for name in merge.inputs})
        plain = {plain_name(name): tensor for name, tensor in live.items()} | {
            plain_name(name): tensor for name, tensor in got.items()
        }
        assert any(not torch.equal(value, live[name]) for name, value in got.items())
        for name, value in wanted.items():
            assert torch.equal(plain[name], value), (type(config), name)


def refusal(model: nn.Module) -> str:
    with pytest.raises(IncompleteExport) as caught:
        plan_merges(skeleton(model, {}), "default")
    return str(caught.value)


def small(**options) -> PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(Mixed(), LoraConfig(**{"r": 2, "target_modules": ["up"], **options}))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_quantised_bases_are_refused(dtype):
    model = small()
    base = model.base_model.model.up.base_layer
    base.weight = nn.Parameter(base.weight.detach().to(dtype), requires_grad=False)
    assert "up: its base is quantised (weight is torch." in refusal(model)


def test_layers_that_peft_made_for_quantised_bases_are_refused():
    model = small()
    model.base_model.model.up.__class__ = type("Linear4bit", (LoraLinear,), {"__module__": "peft.tuners.lora.bnb"})
    assert "PEFT wraps it in peft.tuners.lora.bnb.Linear4bit" in refusal(model)


def test_fake_quantised_models_are_refused_with_the_reason():
    model = small()
    model.base_model.model.up.base_layer.weight_fake_quant = FakeQuantize()
    assert fake_quantizers(model) == [
        "base_model.model.up.base_layer",
        "base_model.model.up.base_layer.weight_fake_quant",
    ]
    text = refusal(model)
    assert "quantisation-aware training" in text
    assert "a merged weight" in text and "lora_A.default.weight is an adapter" in text


def test_a_lora_bias_over_no_bias_is_refused():
    plain = Mixed()
    plain.up = nn.Linear(8, 6, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(plain, LoraConfig(r=2, target_modules=["up"], lora_bias=True))
    assert "up: the adapter has a LoRA bias and the layer has no bias" in refusal(model)


def test_an_adapter_that_is_merged_already_is_refused():
    """B31: the base holds the delta, and would get it twice."""
    model = peft_model("lora")
    model.merge_adapter()
    assert "are merged into the live model's weights" in refusal(model)


def test_what_peft_itself_cannot_merge_is_refused_before_anything_is_gathered():
    model = get_peft_model(
        MODELS["llama"](),
        LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"),
    )
    assert "PEFT cannot merge this" in refusal(model)


def test_scratch_values_must_all_come_in_their_shapes():
    model = peft_model("dora")
    live, shape = tensors(model), skeleton(model, {})
    merge = plan_merges(shape, "default").scratch[0]
    values = {name: live[name].clone() for name in merge.inputs}
    missing = merge.inputs[-1]
    with pytest.raises(IncompleteExport, match="did not come"):
        merge_scratch(shape, merge, {name: value for name, value in values.items() if name != missing})
    with pytest.raises(IncompleteExport, match="what came is"):
        merge_scratch(shape, merge, {**values, missing: torch.zeros(1, 2, 3)})


class Packed(nn.Module):
    """A linear layer over int8 rows with a scale each."""

    def __init__(self, plain: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((plain.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.bias = plain.bias
        self.register_buffer("scale", scale)

    def dequantize(self) -> torch.Tensor:
        return self.weight.float() * self.scale

    def forward(self, x):
        return nn.functional.linear(x, self.dequantize(), self.bias)


def test_quantised_bases_are_merged_when_dequantising_was_asked_for():
    model = small()
    where, plain = model.base_model.model.up, Mixed()
    where.base_layer, model.base_model.model.attend.out_proj = Packed(plain.up), Packed(plain.attend.out_proj)
    where.lora_B["default"].weight.data.normal_()
    assert "MergedExport(dequantize=True)" in refusal(model)
    shape, live = skeleton(model, {}), tensors(model)
    merges = plan_merges(shape, "default", dequantize=True)
    got = {}
    for merge in merges.scratch:
        got |= merge_scratch(shape, merge, {name: live[name].clone() for name in merge.inputs})
    delta = where.lora_B["default"].weight @ where.lora_A["default"].weight * where.scaling["default"]
    prefix = "base_model.model."
    assert torch.equal(got[f"{prefix}up.base_layer.weight"], where.base_layer.dequantize() + delta)
    out = model.base_model.model.attend.out_proj
    assert torch.equal(got[f"{prefix}attend.out_proj.weight"], out.dequantize())
    specs = {
        tensor.outputs[0].name: tensor.outputs[0]
        for tensor in hub_plan(shape, adapter="default", merges=merges).tensors
    }
    assert set(specs) == {name for name, _ in plain.named_parameters()}
    assert specs["up.weight"].dtype == torch.float32
    assert {name for merge in merges.scratch for name in merge.dropped} == {
        f"{prefix}up.base_layer.scale",
        f"{prefix}attend.out_proj.scale",
    }
    del Packed.dequantize
    with pytest.raises(IncompleteExport, match="cannot dequantise itself"):
        plan_merges(shape, "default", dequantize=True)
