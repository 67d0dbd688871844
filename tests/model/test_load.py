"""A checkpoint folder is found and opened, or the error says what is missing; the empty model has real buffers and no weights."""

import json
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from helpers_rollout import tiny_gpt2
from helpers_sharded import save_model
from lockstep.errors import ModelError
from lockstep.model import load
from lockstep.model.load import build_empty, find_model, load_tokenizer, load_whole
from lockstep.testing import tiny_llama


@pytest.fixture
def folder(tmp_path):
    return save_model(tiny_llama(tie_word_embeddings=True), tmp_path / "model")


def test_parameters_are_on_meta_and_buffers_are_real(folder):
    empty = build_empty(find_model(folder), dtype=torch.bfloat16, attention="sdpa")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert all(param.is_meta and param.dtype == torch.bfloat16 for param in empty.parameters())
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    wanted = dict(plain.named_buffers())
    assert wanted and all(torch.equal(value, wanted[name]) for name, value in empty.named_buffers())


def test_the_base_has_no_noise_of_its_own(tmp_path):
    """GPT-2 comes with dropout 0.1, which would have the trainer score samples with other probabilities than the engine's."""
    files = find_model(save_model(tiny_gpt2(attn_pdrop=0.1, resid_pdrop=0.2), tmp_path))
    dropouts = [
        m for m in build_empty(files, dtype=torch.float32, attention="sdpa").modules() if isinstance(m, nn.Dropout)
    ]
    assert dropouts and all(dropout.p == 0 for dropout in dropouts)
    assert files.config.resid_pdrop == 0.2


def test_the_index_of_a_sharded_checkpoint(tmp_path):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    files = find_model(str(tmp_path))
    assert len(set(files.weights.values())) > 1
    assert set(files.weights) == set(tiny_llama().state_dict())
    gone = next(iter(files.weights.values()))
    gone.unlink()
    with pytest.raises(ModelError, match=rf"names '{gone.name}', which is not there \(1 files missing\)"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: (path / "config.json").unlink(), "holds no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "not a configuration that transformers knows"),
        (lambda path: (path / "config.json").write_text(json.dumps({"model_type": "nothing"})), "not a configuration"),
        (lambda path: (path / "model.safetensors").unlink(), r"holds no model\.safetensors"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\0" * 9), r"model\.safetensors is damaged"),
        (lambda path: [file.unlink() for file in path.iterdir()], "found nothing"),
    ],
)
def test_a_spoilt_folder_is_named(folder, tmp_path, spoil, said):
    spoil(tmp_path / "model")
    with pytest.raises(ModelError, match=said):
        find_model(folder)


def test_no_folder_no_package_no_tokenizer(folder, tmp_path, monkeypatch):
    with pytest.raises(ModelError, match=r"is not a folder.*does not download"):
        find_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    with pytest.raises(ModelError, match="no package 'not_there' is installed"):
        find_model("package:not-there")
    (tmp_path / "carries_none").mkdir()
    (tmp_path / "carries_none" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match=r"must carry one \.gguf file; it has 0"):
        find_model("package:carries-none")
    sys.modules.pop("carries_none", None)
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(find_model(folder))


def test_whole_model_in_the_dtype_asked_for(folder):
    model = load_whole(find_model(folder), dtype=torch.bfloat16, attention="eager", device=torch.device("cpu"))
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert not model.training


def test_a_conversion_is_whole_or_not_there(tmp_path, monkeypatch):
    """Killed half-way, a conversion leaves no folder that looks finished; the next one finishes it."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "carries_one"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tiny.gguf").write_bytes(b"stands in")
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = []

    def convert(gguf, target):
        calls.append(gguf.name)
        if len(calls) == 1:
            raise KeyboardInterrupt
        save_model(tiny_llama(), target)

    monkeypatch.setattr(load, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        find_model("package:carries-one")
    assert set(find_model("package:carries-one").weights) == set(find_model("package:carries-one").weights)
    assert calls == ["tiny.gguf", "tiny.gguf"]
