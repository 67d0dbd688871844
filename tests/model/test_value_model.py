"""A value model is a causal model's checkpoint with a head that is trained whole, and never adapted."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from lockstep.config import LoraSection
from lockstep.errors import ModelError
from lockstep.model.load import find_model
from lockstep.model.lora import inject_value_lora
from lockstep.model.value_model import ValueHead, build_empty_value_model
from lockstep.names import is_adapter_name
from lockstep.testing import tiny_llama

LORA = LoraSection(rank=2, alpha=4)


def build(folder, dtype: torch.dtype = torch.float32):
    return build_empty_value_model(find_model(str(folder)), dtype=dtype, attention="sdpa")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj"), r".*\.(q_proj|down_proj)"])
def test_all_linear_is_all_but_the_head_which_is_trained_whole(llama, targets):  # B14
    built = build(llama, torch.bfloat16)
    model = inject_value_lora(built.model, LORA.model_copy(update={"targets": targets}), head=built.head, seed=0)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    heads = [name for name in trained if not is_adapter_name(name)]
    assert heads == ["base_model.model.score.weight", "base_model.model.score.bias"]
    assert all(param.dtype == torch.float32 and not param.is_meta for param in trained.values())
    adapted = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in trained if is_adapter_name(name)}
    all_linear = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert adapted == (all_linear if targets == "all-linear" else {"q_proj", "down_proj"})
    assert not any("score" in name for name in trained if is_adapter_name(name))
    assert built.new == ("score.weight", "score.bias")


def test_a_head_in_the_targets_is_refused(llama):
    built = build(llama)
    lora = LORA.model_copy(update={"targets": ("q_proj", "score")})
    with pytest.raises(ModelError, match="match the value head 'score', which is trained whole"):
        inject_value_lora(built.model, lora, head=built.head, seed=0)


def test_the_head_computes_in_fp32_and_nothing_drops_out(llama):
    built = build(llama, torch.bfloat16)
    head = getattr(built.model, built.head)
    assert isinstance(head, ValueHead) and head(torch.ones(2, 32, dtype=torch.bfloat16)).dtype == torch.float32
    assert all(each.p == 0 for each in built.model.modules() if isinstance(each, torch.nn.Dropout))


def test_the_head_of_a_reward_model_is_kept(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1).save_pretrained(tmp_path / "rm")
    assert build(tmp_path / "rm").new == ("score.bias",)  # a reward model has none


def test_architectures(tmp_path):
    tiny = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**tiny, bos_token_id=1, eos_token_id=2)).save_pretrained(tmp_path / "gpt2")
    built = build(tmp_path / "gpt2")
    assert built.head == "classifier"
    model = inject_value_lora(built.model, LORA, head=built.head, seed=0)
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    assert any("c_attn.lora_A" in name for name in names) and names[-1] == "base_model.model.classifier.bias"

    opt = OPTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, vocab_size=32, word_embed_proj_dim=16
    )
    OPTForCausalLM(opt).save_pretrained(tmp_path / "opt")
    with pytest.raises(ModelError, match=r"no value model .* for opt; use critic.kind: head"):
        build(tmp_path / "opt")
