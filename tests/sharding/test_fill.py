"""Ranks that read their own rows hold, together, the checkpoint: parameters, buffers, ties; and what does not fit is refused everywhere."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from helpers_sharded import save_model, shard_folder
from lockstep.config import LoraSection
from lockstep.dist import World
from lockstep.errors import LockstepError, ModelError
from lockstep.model.load import find_model, load_whole
from lockstep.testing import run_ranks, tiny_llama

IDS = torch.arange(1, 12)[None]


def check_equals_the_checkpoint(world: World, folder: str) -> None:
    sharded = shard_folder(world, folder, LoraSection(rank=2, targets="all-linear"))
    plain = load_whole(find_model(folder), dtype=torch.float32, attention="sdpa", device=torch.device("cpu"))
    sharded.module.eval()
    assert torch.equal(sharded.module(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    sharded.settle()
    for tensor in sharded.plan.parameters:
        for alias in tensor.aliases:
            assert sharded.module.get_parameter(alias) is sharded.module.get_parameter(tensor.name)
        start, stop = sharded.ranges(tensor.name)[world.rank]
        assert sharded.local_flat(tensor.name).numel() == stop - start
    wanted = dict(plain.named_buffers())
    mine = {name.removeprefix("base_model.model."): value for name, value in sharded.module.named_buffers()}
    assert mine.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in mine.items())


def check_tied_step(world: World, folder: str) -> None:
    """After a step on a tied model, head and embedding are still one tensor (CASES B56)."""
    sharded = shard_folder(world, folder, LoraSection(rank=2))
    sharded.module(input_ids=IDS).logits.sum().backward()
    torch.optim.SGD([param for _, param in sharded.trainable()], lr=1.0).step()
    base = "base_model.model."
    assert sharded.module.get_parameter(f"{base}lm_head.weight") is sharded.module.get_parameter(
        f"{base}model.embed_tokens.weight"
    )


def check_all(world: World, folders: list[str], spoilt: list[tuple[str, str]]) -> None:
    for folder in folders:
        check_equals_the_checkpoint(world, folder)
    check_tied_step(world, folders[1])
    for folder, said in spoilt:
        with pytest.raises(ModelError, match=said):
            shard_folder(world, folder, LoraSection(rank=2))


def check_one_rank_cannot_read(world: World, good: str, bad: str) -> None:
    """One rank's file system is broken; every rank ends with the reason."""
    with pytest.raises(ModelError if world.rank == 1 else LockstepError, match=r"stored as \[65, 16\]"):
        shard_folder(world, bad if world.rank == 1 else good, LoraSection(rank=2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    models = [tiny_llama(vocab_size=65, num_hidden_layers=3), tiny_llama(tie_word_embeddings=True, attention_bias=True)]
    return [save_model(model, tmp_path_factory.mktemp("model")) for model in models]


def spoil(folder: str, target, name: str, value: torch.Tensor) -> str:
    files = find_model(folder)
    tensors = {**load_file(next(iter(files.weights.values()))), name: value}
    files.config.save_pretrained(target)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return str(target)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_hold_the_checkpoint_together(folders, tmp_path, num_ranks):
    wrong = spoil(folders[0], tmp_path, "model.embed_tokens.weight", torch.zeros(65, 16))
    run_ranks(
        num_ranks,
        check_all,
        folders,
        [(wrong, r"'model.embed_tokens.weight' is stored as \[65, 16\]; the model has \[65, 32\]")],
    )


def test_one_ranks_fault_is_every_ranks_error(folders, tmp_path):
    wrong = spoil(folders[0], tmp_path, "model.embed_tokens.weight", torch.zeros(65, 16))
    run_ranks(2, check_one_rank_cannot_read, folders[0], wrong)


def check_renamed(world: World, folder: str) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep.sharding.fill").addHandler(handler)
    sharded = shard_folder(world, folder, LoraSection(rank=2, targets=("c_attn",)))
    plain = load_whole(find_model(folder), dtype=torch.float32, attention="sdpa", device=torch.device("cpu"))
    assert torch.equal(sharded.module(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert not records


def test_a_checkpoint_without_the_models_prefix_is_read_by_its_rows(tmp_path):
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    )
    model.transformer.save_pretrained(tmp_path)  # names without the "transformer." prefix, as the hub's GPT-2 has them
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    run_ranks(2, check_renamed, str(tmp_path))
