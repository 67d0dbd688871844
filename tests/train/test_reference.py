"""The reference policy of a run that starts from an adapter: that adapter, frozen, also after a resume; never in an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers_train import adapt, make_actor, make_items
from lockstep import checkpoint
from lockstep.checkpoint import TrainState
from lockstep.config import LoraSection
from lockstep.dist import World
from lockstep.export.stream import export_weights
from lockstep.export.what import AdapterExport
from lockstep.model.load import build_empty, find_model
from lockstep.model.lora import inject_lora, is_reference_name
from lockstep.sharding.fill import fill
from lockstep.sharding.shard import shard
from lockstep.testing import run_ranks, tiny_llama

WAYS: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2"},
    "fsdp1": {"backend": "fsdp1"},
    "fsdp2, kept": {"backend": "fsdp2", "reshard_after_forward": False},
    "fsdp1, kept": {"backend": "fsdp1", "reshard_after_forward": False},
}


def make(world: World, root: str, start: str, *, reference: Any = "start", **how: Any) -> Any:
    """Collective. A run from the adapter in `root/start`."""
    files = find_model(f"{root}/model")
    lora = LoraSection(init_from=f"{root}/{start}")
    model = inject_lora(build_empty(files, dtype=torch.float32, attention="sdpa"), lora, seed=0, reference=reference)
    sharded = shard(model, **how)
    fill(sharded, files)
    return sharded


def share(world: World) -> list[Any]:
    return [each for each in make_items(4, 3) if each.group % world.size == world.rank]


def kls(actor: Any, world: World, steps: range) -> list[float]:
    return [actor.update(share(world), step=step).stats["kl_ref"].mean for step in steps]


def exported(sharded: Any) -> dict[str, torch.Tensor]:
    with export_weights(sharded, AdapterExport()) as stream:
        return {name: tensor.clone() for bucket in stream for name, tensor in bucket.items()}


def run_way(world: World, root: str, way: str) -> dict[str, Any]:
    """Three updates in one go; and the third after a resume, over an adapter folder that has other values by then."""
    sharded = make(world, root, "start", **WAYS[way])
    at_start = exported(sharded)
    actor = make_actor(sharded, world, kl_coef=0.1, packing="shared_prefix")
    out: dict[str, Any] = {"first": kls(actor, world, range(2))}
    state = TrainState(sharded, actor.optimizer.torch)
    folder = Path(root) / f"checkpoints {way} {world.size}"
    checkpoint.save(folder, state, step=2, keep=1)
    out["third"] = kls(actor, world, range(2, 3))
    trained = exported(sharded)
    out["names"] = sorted(trained)
    start = load_file(f"{root}/start/adapter_model.safetensors")
    assert all(torch.equal(at_start[name], value) for name, value in start.items())
    assert not any(torch.equal(trained[name], value) for name, value in start.items())
    held = [name for name, _ in sharded.trainable()]
    assert held and not any(is_reference_name(name) for name in held)

    resumed = make(world, root, "changed", **WAYS[way])
    actor = make_actor(resumed, world, kl_coef=0.1, packing="shared_prefix")
    found = checkpoint.newest(folder, world)
    assert found is not None
    checkpoint.load(found, TrainState(resumed, actor.optimizer.torch))
    out["resumed"] = kls(actor, world, range(2, 3))
    out["as trained"] = all(torch.equal(value, trained[name]) for name, value in exported(resumed).items())
    return out


def run_base(world: World, root: str) -> float:
    """The bare model as the reference."""
    sharded = make(world, root, "start", reference="base")
    assert not any(is_reference_name(tensor.name) for tensor in sharded.plan.parameters)
    return kls(make_actor(sharded, world, kl_coef=0.1), world, range(1))[0]


def run_all(world: World, root: str) -> dict[str, Any]:
    return {way: run_way(world, root, way) for way in WAYS} | {"base": run_base(world, root)}


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, tmp_path_factory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("models")
    tiny_llama().save_pretrained(root / "model")
    adapt(tiny_llama()).save_pretrained(root / "start")
    adapt(tiny_llama(), seed=8).save_pretrained(root / "changed")
    return run_ranks(request.param, run_all, str(root))


def test_kl_is_0_until_something_was_learned_and_a_resume_keeps_its_reference(ranks):  # B83; TRL #1340, #3194
    for rank in ranks:
        for way in WAYS:
            found = rank[way]
            assert found["first"][0] == 0.0, way
            assert found["first"][1] > 1e-5, way
            assert found["third"][0] > found["first"][1], way
            assert found["resumed"] == found["third"], way
            assert found["as trained"], way
            for part in ("first", "third"):
                assert found[part] == pytest.approx(rank["fsdp2"][part], rel=1e-3), way  # fp32 sums in another order


def test_the_reference_is_in_no_export(ranks):
    for rank in ranks:
        for way in WAYS:
            assert rank[way]["names"] == rank["fsdp2"]["names"]
            assert not any(is_reference_name(name) or "reference" in name for name in rank[way]["names"])


def test_the_base_can_be_the_reference(ranks):
    assert ranks[0]["base"] > 1e-3


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.reference.weight", True),
        ("base_model.model.model.embed_tokens.lora_embedding_B.reference", True),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", False),
        ("base_model.model.reference.q_proj.lora_A.default.weight", False),
        ("base_model.model.reference.weight", False),
    ],
)
def test_its_names_are_told_by_their_place(name, is_one):
    assert is_reference_name(name) == is_one
