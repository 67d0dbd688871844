"""What is saved comes back bit for bit, on any number of ranks; what is damaged is named and never chosen."""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForCausalLM

from helpers_sharded import randomise_b, save_model, shard_folder
from lockstep import checkpoint
from lockstep.checkpoint import TrainState
from lockstep.config import LoraSection
from lockstep.dist import World
from lockstep.errors import CheckpointError, LockstepError
from lockstep.sharding.shard import Backend
from lockstep.testing import run_ranks, tiny_llama

LORA = LoraSection(rank=3, alpha=5.0)
IDS = torch.arange(1, 11)[None]


def make(world: World, folder: str, seed: int = 0, backend: Backend = "fsdp2") -> TrainState:
    sharded = shard_folder(world, folder, LORA, seed=seed, backend=backend)
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
    """Collective. Whole tensors, put together of every rank's elements in another way than by the files."""
    state.sharded.settle()
    every: list[Any] = [None] * state.sharded.world.size
    mine = {name: (part.start, part.elements.clone(), part.shape) for name, part in checkpoint._parts(state).items()}
    dist.all_gather_object(every, mine)
    out: dict[str, torch.Tensor] = {}
    for parts in every:  # FSDP1: a rank without elements of a parameter never steps it, and has no state
        for name, (start, elements, shape) in parts.items():
            whole = out.setdefault(name, torch.full((math.prod(shape),), math.nan))
            whole[start : start + elements.numel()] = elements
    assert not any(whole.isnan().any() for whole in out.values())
    return out


def check_resume(world: World, model: str, out: str, backend: Backend = "fsdp2") -> None:
    folder = Path(out)
    whole = make(world, model, backend=backend)
    randomise_b(whole.sharded)
    train(whole, range(3))
    checkpoint.save(folder, whole, step=3, keep=2, extra={"policy_version": 3})
    train(whole, range(3, 6))
    resumed = make(world, model, seed=7, backend=backend)
    found = checkpoint.newest(folder, world)
    assert found is not None and found.step == 3
    assert checkpoint.load(found, resumed)["policy_version"] == 3
    assert not any(
        "layers.1.self_attn.v_proj" in name for name in checkpoint._parts(resumed) if name.startswith("optimizer")
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


def check_other_world(world: World, model: str, out: str, backend: Backend) -> None:
    """What was read, to the bit; and what three more steps make of it."""
    resumed = make(world, model, seed=7, backend=backend)
    found = checkpoint.newest(Path(out), world)
    assert found is not None
    checkpoint.load(found, resumed)
    read = values(resumed)
    train(resumed, range(3))
    trained = values(resumed)
    if world.is_main:
        torch.save((read, trained), f"{out}/values-{backend}-{world.size}.pt")


def check_other_model(world: World, model: str, out: str) -> None:
    """Of another rank: named, before anything is overwritten."""
    state = make(world, model)
    sharded = shard_folder(world, model, LoraSection(rank=2))
    other = TrainState(sharded, torch.optim.AdamW([param for _, param in sharded.trainable()]))
    checkpoint.save(Path(out), state, step=1, keep=1)
    before = values(other)
    found = checkpoint.newest(Path(out), world)
    assert found is not None
    with pytest.raises(CheckpointError, match=r"another model.*lora_A.* elements there and is \[2, 32\] here"):
        checkpoint.load(found, other)
    assert all(torch.equal(value, before[name]) for name, value in values(other).items())


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


def check_every_slice_is_saved(world: World, model: str, out: str) -> None:
    """CASES B60: each rank's slice holds that rank's number; all of them must be in the file that plain PEFT loads."""
    state = make(world, model)
    for name, _ in state.sharded.trainable():
        state.sharded.write_local(name, torch.full_like(state.sharded.local_flat(name), world.rank + 1))
    path = checkpoint.save(Path(out), state, step=1, keep=1)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(path / "adapter"))
    tensors = {name: param for name, param in loaded.named_parameters() if "lora_" in name}
    assert len(tensors) == len(state.sharded.trainable())
    for name, value in tensors.items():
        rows = -(-value.shape[0] // world.size)
        wanted = torch.arange(value.shape[0]) // rows + 1
        assert torch.equal(value.detach(), wanted[:, None].expand_as(value).float()), name


def check_two(world: World, model: str, out: str) -> None:
    checks = (check_damage, check_unwritable, check_other_model, check_every_slice_is_saved)
    for part, check in enumerate(checks):
        target = Path(out) / str(part)
        target.mkdir(exist_ok=True)
        check(world, model, str(target))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(tiny_llama(vocab_size=65, tie_word_embeddings=True), tmp_path_factory.mktemp("model"))


def test_two_ranks_refuse_what_is_damaged_or_of_another_model_and_save_every_slice(model, tmp_path):
    run_ranks(2, check_two, model, str(tmp_path))


def backends(world: World) -> tuple[Backend, ...]:
    """On one rank a run takes FSDP2 whatever the recipe says: torch's FSDP1 cannot train a tied frozen weight there."""
    return ("fsdp2",) if world.size == 1 else ("fsdp2", "fsdp1")


def check_other_worlds(world: World, model: str, out: str) -> None:
    for backend in backends(world):
        for folder in sorted(Path(out).iterdir()):
            check_other_world(world, model, str(folder), backend)
    if world.size == 4:
        check_every_slice_is_saved(world, model, f"{out}-slices")


def check_save_both(world: World, model: str, out: str) -> None:
    for backend in backends(world):
        folder = Path(out) / f"{backend}-{world.size}"
        folder.mkdir(exist_ok=True)
        check_resume(world, model, str(folder), backend)


def test_resume_is_exact_and_another_number_of_ranks_and_the_other_fsdp_read_it(model, tmp_path):
    """CASES B69. Read bit for bit; three steps later, equal but for the order of sums."""
    runs = tmp_path / "runs"
    runs.mkdir()
    for size in (1, 2):
        run_ranks(size, check_save_both, model, str(runs))
    for size in (1, 2, 4):
        run_ranks(size, check_other_worlds, model, str(runs))
    for folder in runs.iterdir():
        read = {path.stem: torch.load(path) for path in folder.glob("values-*.pt")}
        assert len(read) == 5
        first, first_trained = read["values-fsdp2-1"]
        for key, (values, trained) in read.items():
            assert values.keys() == first.keys(), key
            assert all(torch.equal(value, first[name]) for name, value in values.items()), key
            for name, value in trained.items():
                torch.testing.assert_close(value, first_trained[name], rtol=0, atol=1e-6, msg=f"{key} {name}")


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


def test_files_json_is_plain_json(tmp_path):
    checkpoint.save_adapter_folder(tmp_path, {f"{Q}.lora_A.weight": torch.ones(2, 4)}, {"r": 2})
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == {"r": 2}
