"""Any range of any tensor is read as the whole model holds it: stored one to one, renamed, fused, split; and what does not fit is named."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Chunk, WeightConverter

from helpers_models import tiny_gpt2, tiny_mixtral, tiny_qwen3_moe
from helpers_sharded import save_model
from lockstep.errors import ModelError
from lockstep.model import stored
from lockstep.model.elements import Reader
from lockstep.model.load import ModelFiles, find_model, find_weights
from lockstep.model.stored import Built, Unbuilt
from lockstep.testing import tiny_llama


def reader_of(folder, model, dtype: torch.dtype = torch.float32) -> Reader:
    wanted = {name: torch.empty_like(value, dtype=dtype, device="meta") for name, value in model.state_dict().items()}
    return Reader(find_weights(folder), model, wanted, attention="sdpa")


def check_ranges(reader: Reader, model) -> None:
    """Every tensor in three uneven pieces along its first dimension, and along its second where it has one."""
    for name, whole in model.state_dict().items():
        reader.check(name)
        for dim in range(min(whole.dim(), 2)):
            flat, count = whole.movedim(dim, 0).reshape(-1), whole.numel()
            for start, stop in ((0, count // 3), (count // 3, count // 3 + 5), (count // 3 + 5, count), (7, 7)):
                assert torch.equal(reader.read(name, start, stop, dim=dim), flat[start:stop]), (name, dim, start)
        assert torch.equal(reader.read_tensor(name), whole)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_mixtral, tiny_qwen3_moe])
def test_every_range_is_the_models(make, tmp_path):
    model = make(tie_word_embeddings=False)  # of tied names the files hold one; choosing it is fill's
    with reader_of(save_model(model, tmp_path), model) as reader:
        assert not reader.matched.unused and not reader.unbuilt()
        check_ranges(reader, model)


def test_values_are_cast_to_the_models_dtype(tmp_path):
    model = tiny_qwen3_moe()
    with reader_of(save_model(model, tmp_path), model, torch.bfloat16) as reader:
        for name, whole in model.state_dict().items():
            assert torch.equal(reader.read_tensor(name), whole.to(torch.bfloat16))


def test_fused_experts_are_read_expert_by_expert(tmp_path, monkeypatch):
    """What is read for two of four experts is those two's parts, one expert at a time."""
    model = tiny_qwen3_moe()
    with reader_of(save_model(model, tmp_path), model) as reader:
        name = "model.layers.0.mlp.experts.gate_up_proj"
        source = reader.matched.sources[name]
        assert isinstance(source, Built) and len(source.rows) == 4 and len(source.parts) == 8
        taken: list[str] = []
        take = reader._take
        monkeypatch.setattr(reader, "_take", lambda stored, *rest: taken.append(stored) or take(stored, *rest))
        row = 32 * 32
        reader.read(name, 2 * row, 4 * row)
        prefix = "model.layers.0.mlp.experts"
        assert taken == [f"{prefix}.{e}.{part}.weight" for e in (2, 3) for part in ("gate_proj", "up_proj")]


def split_qkv(model, folder) -> None:
    """Store q, k and v of each layer as one tensor."""
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        parts = [tensors.pop(f"{prefix}.{kind}_proj.weight") for kind in "qkv"]
        tensors[f"{prefix}.qkv.weight"] = torch.cat(parts)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def qkv_converter(_) -> list[WeightConverter]:
    return [WeightConverter("self_attn.qkv", [f"self_attn.{kind}_proj" for kind in "qkv"], [Chunk(dim=0)])]


def test_one_stored_tensor_may_make_several(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "get_model_conversion_mapping", qkv_converter)
    model = tiny_llama(num_key_value_heads=4)
    split_qkv(model, tmp_path)
    with reader_of(tmp_path, model) as reader:
        assert isinstance(reader.matched.sources["model.layers.1.self_attn.v_proj.weight"], Built)
        check_ranges(reader, model)


def test_what_a_conversion_makes_of_the_wrong_shape_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "get_model_conversion_mapping", qkv_converter)
    model = tiny_llama()  # q has twice k's rows, which equal chunks cannot give
    split_qkv(model, tmp_path)
    with (
        reader_of(tmp_path, model) as reader,
        pytest.raises(ModelError, match=r"qkv.weight', make 'model.layers.0.self_attn.q_proj.weight' \[22, 32\]"),
    ):
        reader.check("model.layers.0.self_attn.q_proj.weight")


def test_a_conversion_that_fails_leaves_a_whole_load(tmp_path, monkeypatch):
    """Never a guess: values come from transformers' own loading then, and are the same."""

    def fail(*_, **__):
        raise ValueError("no such operation")

    model = tiny_qwen3_moe()
    folder = save_model(model, tmp_path)
    monkeypatch.setattr(stored, "_run", fail)
    wanted = {name: torch.empty_like(value, device="meta") for name, value in model.state_dict().items()}
    with Reader(find_model(folder), model, wanted, attention="sdpa") as reader:
        assert len(reader.unbuilt()) == 4
        assert all(isinstance(each, Unbuilt) and "no such" in each.reason for each in reader.unbuilt().values())
        check_ranges(reader, model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("lm_head.weight"), "'lm_head.weight' is not in"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(64, 31)}),
            r"stored as \[64, 31\]; the model has \[64, 32\]",
        ),
        (lambda t: t.update({"lm_head.weight": torch.zeros(64, 32, dtype=torch.uint8)}), "stored as U8; .*Quantised"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(64, 32).to(torch.float8_e4m3fn)}), "stored as F8_E4M3"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, said):
    model = tiny_llama()
    tensors = load_file(f"{save_model(model, tmp_path)}/model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with reader_of(tmp_path, model) as reader, pytest.raises(ModelError, match=said):
        reader.check("lm_head.weight")


def test_unused_and_damaged_files(tmp_path):
    model = tiny_llama(num_hidden_layers=3)
    folder = save_model(model, tmp_path)
    with reader_of(folder, tiny_llama()) as reader:
        assert len(reader.matched.unused) == 9 and all(".layers.2." in name for name in reader.matched.unused)
    with pytest.raises(ModelError, match="'/nowhere' is not a folder"):
        find_weights("/nowhere")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(ModelError, match="is damaged"):
        find_weights(folder)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        Reader(ModelFiles(tmp_path, None, {"a": tmp_path / "model.safetensors"}), model, {}, attention="sdpa")
