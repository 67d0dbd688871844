"""What is saved comes back bit for bit, on any number of ranks; what is damaged is named and never chosen."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from helpers_sharded import randomise_b, save_model, shard_folder
from lockstep import checkpoint
from lockstep.checkpoint import TrainState
from lockstep.config import LoraSection
from lockstep.dist import World
from lockstep.errors import CheckpointError, LockstepError
from lockstep.testing import run_ranks, tiny_llama

LORA = LoraSection(rank=3, alpha=5.0)
IDS = torch.arange(1, 11)[None]


def make(world: World, folder: str, seed: int = 0) -> TrainState:
    sharded = shard_folder(world, folder, LORA, seed=seed)
    return TrainState(sharded, torch.optim.AdamW([param for _, param in sharded.trainable()], lr=1e-2, foreach=False))


def train(state: TrainState, steps: range) -> None:
    """Layer 1's value projection never gets a gradient, so it never has optimizer state (CASES B69)."""
    for step in steps:
        ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(step))
        state.sharded.module(input_ids=ids).logits.float().logsumexp(-1).mean().backward()
        for name, param in state.sharded.trainable():
            if "layers.1.self_attn.v_proj" in name:
                param.grad = None
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)


def values(state: TrainState) -> dict[str, torch.Tensor]:
    state.sharded.settle()
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in checkpoint._tensors(state).items()
    }


def check_resume(world: World, model: str, out: str) -> None:
    folder = Path(out)
    whole = make(world, model)
    randomise_b(whole.sharded)
    train(whole, range(3))
    checkpoint.save(folder, whole, step=3, keep=2, extra={"policy_version": 3})
    train(whole, range(3, 6))
    resumed = make(world, model, seed=7)
    found = checkpoint.newest(folder, world)
    assert found is not None and found.step == 3
    assert checkpoint.load(found, resumed)["policy_version"] == 3
    assert not any(
        "layers.1.self_attn.v_proj" in name for name in checkpoint._tensors(resumed) if name.startswith("optimizer")
    )
    train(resumed, range(3, 6))
    left, right = values(whole), values(resumed)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    checkpoint.save(folder, resumed, step=6, keep=2)
    checkpoint.save(folder, resumed, step=9, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000006", "step-000009"]
    logits = resumed.sharded.module(input_ids=IDS).logits
    base = AutoModelForCausalLM.from_pretrained(model)
    plain = PeftModel.from_pretrained(base, str(folder / "step-000009" / "adapter"))
    # Same fp32 arithmetic in another order of sums; issue bound 1e-5.
    assert (plain(input_ids=IDS).logits - logits).abs().max() < 1e-5


def check_other_world(world: World, model: str, out: str) -> None:
    resumed = make(world, model, seed=7)
    found = checkpoint.newest(Path(out), world)
    assert found is not None
    checkpoint.load(found, resumed)
    got = values(resumed)
    if world.is_main:
        torch.save(got, f"{out}/values-{world.size}.pt")


def check_damage(world: World, model: str, out: str) -> None:
    folder = Path(out)
    state = make(world, model)
    for step in (1, 2, 3, 4, 5):
        checkpoint.save(folder, state, step=step, keep=9)
    if world.is_main:
        (folder / "step-000005" / "files.json").unlink()
        blob = bytearray((folder / "step-000004" / "adapter" / "adapter_model.safetensors").read_bytes())
        blob[-1] ^= 1
        (folder / "step-000004" / "adapter" / "adapter_model.safetensors").write_bytes(blob)
        state_file = next((folder / "step-000003" / "state").glob("*.distcp"))
        os.truncate(state_file, state_file.stat().st_size // 2)
        next((folder / "step-000002" / "state").glob("*.distcp")).unlink()
        (folder / ".tmp-step-000006").mkdir()
        (folder / "step-latest").mkdir()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep.checkpoint").addHandler(handler)
    found = checkpoint.newest(folder, world)
    assert found is not None and found.step == 1
    if world.is_main:
        text = "\n".join(records)
        assert "step-000005: it is incomplete: its files.json" in text
        assert "step-000004: it is damaged: the bytes of adapter/adapter_model.safetensors" in text
        assert "step-000003: it is damaged" in text and "step-000002: it is incomplete: state/" in text
    assert checkpoint.newest(folder / "nothing", world) is None
    assert not world.is_main or "holds no checkpoint yet: the run starts from its first step" in records[-1]
    # Damaged later ones take no sound one's place when old ones go.
    checkpoint.save(folder, state, step=2, keep=1)
    found = checkpoint.newest(folder, world)
    assert found is not None and found.step == 2
    assert not (folder / "step-000001").exists()
    if world.is_main:
        (folder / "step-000002" / "files.json").write_text('{"files": {"a": 1}}')
    with pytest.raises(LockstepError, match=r"no checkpoint in .* can be resumed: step-000005: .*; step-000002: it is"):
        checkpoint.newest(folder, world)


def check_unwritable(world: World, model: str, out: str) -> None:
    folder = Path(out) / "blocked"
    if world.is_main:
        folder.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError if world.is_main else LockstepError, match="blocked"):
        checkpoint.save(folder, make(world, model), step=1, keep=1)


def check_two(world: World, model: str, out: str) -> None:
    for part, check in enumerate((check_resume, check_damage, check_unwritable)):
        target = Path(out) / str(part)
        target.mkdir(exist_ok=True)
        check(world, model, str(target))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(tiny_llama(vocab_size=65, tie_word_embeddings=True), tmp_path_factory.mktemp("model"))


def test_two_ranks_save_resume_refuse_damage(model, tmp_path):
    run_ranks(2, check_two, model, str(tmp_path))


def test_one_rank_saves_and_other_world_sizes_read_it(model, tmp_path):
    run_ranks(1, check_resume, model, str(tmp_path))
    read = {}
    for size in (1, 2, 4):
        run_ranks(size, check_other_world, model, str(tmp_path))
        read[size] = torch.load(tmp_path / f"values-{size}.pt")
    for size in (2, 4):
        assert read[size].keys() == read[1].keys()
        assert all(torch.equal(read[size][name], read[1][name]) for name in read[1])


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (f"{Q}.lora_A.weight", torch.empty(0, 4), "not a whole LoRA matrix"),
        (f"{Q}.lora_B.weight", torch.ones(4), "not a whole LoRA matrix"),
        (f"_orig_mod.{Q}.lora_A.weight", torch.ones(2, 4), "would load and do nothing"),
        (
            Q.replace("layers.0", "layers.0._checkpoint_wrapped_module") + ".lora_A.weight",
            torch.ones(2, 4),
            "do nothing",
        ),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(2, 4), "would load and do nothing"),
    ],
)
def test_an_adapter_that_would_do_nothing_is_not_written(tmp_path, name, value, said):
    """CASES B60 and B61: such files load, with a warning at most, and leave the base model as it is."""
    with pytest.raises(CheckpointError, match=said):
        checkpoint.save_adapter_folder(tmp_path, {name: value}, {})
    assert not list(tmp_path.iterdir())


def check_every_slice_is_saved(world: World, model: str, out: str) -> None:
    """CASES B60: each rank's slice holds that rank's number; all of them must be in the file that plain PEFT loads."""
    state = make(world, model)
    with torch.no_grad():
        for _, param in state.sharded.trainable():
            param.to_local().fill_(world.rank + 1)
    path = checkpoint.save(Path(out), state, step=1, keep=1)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(path / "adapter"))
    tensors = {name: param for name, param in loaded.named_parameters() if "lora_" in name}
    assert len(tensors) == len(state.sharded.trainable())
    for name, value in tensors.items():
        rows = -(-value.shape[0] // world.size)
        wanted = torch.arange(value.shape[0]) // rows + 1
        assert torch.equal(value.detach(), wanted[:, None].expand_as(value).float()), name


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_ranks_slice_is_in_the_adapter_file(model, tmp_path, num_ranks):
    run_ranks(num_ranks, check_every_slice_is_saved, model, str(tmp_path))


def test_files_json_is_plain_json(tmp_path):
    checkpoint.save_adapter_folder(tmp_path, {f"{Q}.lora_A.weight": torch.ones(2, 4)}, {"r": 2})
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == {"r": 2}
