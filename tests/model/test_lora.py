"""The adapter is real, equal for equal seeds, complete in its saved configuration, and can be switched to what training started from."""

import json

import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from safetensors.torch import load_file, save_file

from helpers_sharded import save_model
from lockstep.checkpoint import save_adapter_folder
from lockstep.config import LoraSection
from lockstep.errors import ModelError
from lockstep.model.load import build_empty, find_model
from lockstep.model.lora import (
    ADAPTER,
    REFERENCE,
    adapter_config_json,
    dropout_of,
    inject_lora,
    reference_policy,
    scaling_of,
)
from lockstep.model.peft_tree import adapter_names
from lockstep.testing import tiny_llama


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return find_model(save_model(tiny_llama(), tmp_path_factory.mktemp("model")))


def empty(files):
    return build_empty(files, dtype=torch.bfloat16, attention="sdpa")


def adapter_values(model) -> dict[str, torch.Tensor]:
    return {name: param for name, param in model.named_parameters() if "lora_" in name}


def test_the_adapter_is_real_fp32_and_a_function_of_the_seed(files):
    before = torch.get_rng_state()
    first, again, other = (
        adapter_values(inject_lora(empty(files), LoraSection(rank=4), seed=seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)  # the global stream is left alone
    assert all(value.dtype == torch.float32 and not value.is_meta and value.requires_grad for value in first.values())
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert all((value == 0).all() for name, value in first.items() if "lora_B" in name)
    assert any(not torch.equal(value, other[name]) for name, value in first.items())


def test_all_linear_leaves_the_head_alone(files):
    names = adapter_values(inject_lora(empty(files), LoraSection(), seed=0))
    assert len(names) == 2 * 7 * 2
    assert not [name for name in names if "lm_head" in name]


def test_saved_configuration_is_the_live_one(tmp_path):
    """CASES B62: alpha, rsLoRA, patterns, exclusions, task type: nothing is lost, sets become sorted lists."""
    config = LoraConfig(
        r=8,
        lora_alpha=12,
        use_rslora=True,
        target_modules=["v_proj", "q_proj"],
        rank_pattern={"q_proj": 4},
        alpha_pattern={"v_proj": 64},
        exclude_modules=["layers.1.self_attn.v_proj"],
        task_type="CAUSAL_LM",
        bias="none",
    )
    model = get_peft_model(tiny_llama(), config)
    text = json.dumps(adapter_config_json(model))
    assert json.loads(text)["target_modules"] == ["q_proj", "v_proj"]
    assert json.loads(text)["lora_alpha"] == 12 and json.loads(text)["use_rslora"] is True
    save_adapter_folder(tmp_path, {"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, json.loads(text))
    read = PeftConfig.from_pretrained(str(tmp_path))
    live = model.peft_config[ADAPTER]
    different = {key for key, value in live.to_dict().items() if read.to_dict()[key] != value}
    assert different <= {"inference_mode"}
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert scaling_of(layer) == 12 / 4**0.5  # the layer's own: rank 4, rsLoRA (CASES B16, B17)


def test_training_from_an_adapter_keeps_a_frozen_copy_as_reference(files, tmp_path):
    """CASES B83: with the adapter off, the model is not what training started from."""
    start = inject_lora(empty(files), LoraSection(rank=4, alpha=12), seed=5)
    names = adapter_names(start, ADAPTER)
    values = {names[name]: torch.randn(param.shape) for name, param in adapter_values(start).items()}
    save_adapter_folder(tmp_path, values, adapter_config_json(start))
    model = inject_lora(empty(files), LoraSection(rank=16, init_from=str(tmp_path)), seed=9)
    live = {
        adapter_names(model, ADAPTER)[name]: param
        for name, param in adapter_values(model).items()
        if f".{ADAPTER}" in name
    }
    assert all(torch.equal(param, values[name]) for name, param in live.items())
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert (layer.r[ADAPTER], layer.scaling[ADAPTER], layer.active_adapters) == (4, 3.0, [ADAPTER])
    with reference_policy(model):
        assert layer.active_adapters == [REFERENCE]
    assert layer.active_adapters == [ADAPTER]
    trainable = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trainable and all(f".{ADAPTER}" in name for name in trainable)


def test_an_adapter_of_another_model_is_refused(files, tmp_path):
    start = inject_lora(empty(files), LoraSection(rank=4), seed=5)
    names = adapter_names(start, ADAPTER)
    values = {names[name]: param.detach() for name, param in adapter_values(start).items()}
    values.pop(next(iter(values)))
    save_adapter_folder(tmp_path, values, adapter_config_json(start))
    with pytest.raises(ModelError, match="does not fit the model: 1 tensors are missing or unknown"):
        inject_lora(empty(files), LoraSection(init_from=str(tmp_path)), seed=0)


def test_a_trained_bias_of_the_base_has_no_reference(tmp_path):
    model = get_peft_model(tiny_llama(attention_bias=True), LoraConfig(target_modules=["q_proj"], bias="lora_only"))
    with pytest.raises(ModelError, match="biases"), reference_policy(model):
        pass


def peft_folder(path, **options) -> str:
    """What PEFT itself saves of a LoRA with these options on the module's model."""
    values = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options}
    get_peft_model(tiny_llama(), LoraConfig(**values)).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"modules_to_save": ["lm_head"]},
            r"adds 'base_model\.model\.lm_head\.original_module\.weight'.*modules_to_save",
        ),
        ({"trainable_token_indices": [3, 4]}, r"adds .*token_adapter.*trainable_token_indices"),
        ({"bias": "lora_only"}, "biases"),
        ({"init_lora_weights": "pissa"}, "changes the base.*pissa"),
        ({"init_lora_weights": "olora"}, "changes the base.*olora"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "changes the base.*layer_replication"),
        ({"use_dora": True}, "lora_magnitude_vector"),
    ],
)
def test_an_adapter_that_is_more_than_lora_is_refused_by_name(files, tmp_path, options, said):
    folder = peft_folder(tmp_path, **options)
    with pytest.raises(ModelError, match=said):
        inject_lora(empty(files), LoraSection(init_from=folder), seed=0, files=files)


def test_the_dropout_of_an_adapter_that_training_starts_from_is_its_own(files, tmp_path):
    model = inject_lora(empty(files), LoraSection(init_from=peft_folder(tmp_path, lora_dropout=0.25)), seed=0)
    assert dropout_of(model) == 0.25


def test_copies_of_base_weights_in_an_adapter_must_be_the_checkpoints(files, tmp_path):
    """CASES B23: PEFT saves the whole embedding beside its LoRA."""
    with pytest.warns(UserWarning, match="save_embedding_layers"):
        lora = LoraSection(init_from=peft_folder(tmp_path, target_modules=["embed_tokens", "q_proj"]))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    copy = "base_model.model.model.embed_tokens.base_layer.weight"
    assert copy in tensors
    model = inject_lora(empty(files), lora, seed=0, files=files)
    assert adapter_names(model, ADAPTER).keys() & adapter_values(model).keys()
    save_file({**tensors, copy: tensors[copy] + 1}, file)
    with pytest.raises(ModelError, match="not the checkpoint's"):
        inject_lora(empty(files), lora, seed=0, files=files)
