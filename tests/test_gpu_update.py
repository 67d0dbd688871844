"""On one CUDA device: float16, host memory for state and activations, and flex attention. `python -m pytest -m gpu`.

Where a bound is looser than on the CPU, the reason stands beside it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers_loop import make_model_folder, recipe
from helpers_train import Unsharded, adapt, largest_gap, make_actor, make_items
from lockstep.config import build_config
from lockstep.dist import World
from lockstep.loop import run_training
from lockstep.testing import tiny_llama
from lockstep.train import offload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

CUDA = torch.device("cuda", 0)


def on_device(**options: object) -> Unsharded:
    model = adapt(tiny_llama(hidden_size=64, **options))  # heads of 16: flex attention takes no smaller ones on CUDA
    return Unsharded(model.to(CUDA))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_run_with_everything_in_host_memory_trains(tmp_path, dtype):
    model = make_model_folder(tmp_path / "model")
    train = {"offload_optimizer": True, "offload_activations": True, "schedule": "constant"}
    tree = recipe(model, tmp_path / "run", train=train, model={"dtype": dtype}, lora={"dropout": 0.0})
    run_training(build_config({**tree, "run": {**tree["run"], "device": "cuda", "num_steps": 3}}), resume=False)
    lines = [json.loads(line) for line in (Path(tree["run"]["dir"]) / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(line["grad_norm"] > 0 for line in lines)
    assert all(line.get("loss_scale", 0) == (2.0**16 if dtype == "float16" else 0) for line in lines)


def test_host_memory_changes_nothing_and_is_pinned(monkeypatch):
    monkeypatch.setattr(offload, "SMALL_BYTES", 0)
    sides = []
    for kept in (False, True):
        sharded = on_device()
        actor = make_actor(sharded, World(device=CUDA), offload_optimizer=kept, offload_activations=kept)
        for step in range(3):
            actor.update(make_items(3, 3, seed=step), step=step)
        sides.append(dict(sharded.trainable()))
        state = actor.optimizer.torch.state[next(iter(sides[-1].values()))]["exp_avg"]
        assert state.is_pinned() == kept and state.is_cuda != kept
    # Only copies differ; backward of the embedding and of sdpa sum with atomics on CUDA, so not bit for bit.
    assert largest_gap(*({name: param.detach() for name, param in side.items()} for side in sides)) < 1e-5


@pytest.mark.parametrize("packing", ["padded", "packed", "shared_prefix"])
def test_flex_attention_trains_like_sdpa(packing):
    gradients = []
    for attention in ("sdpa", "flex_attention"):
        sharded = on_device()
        sharded.module.get_base_model().set_attn_implementation(attention)
        make_actor(sharded, World(device=CUDA), packing=packing).update(make_items(3, 3), step=0)
        gradients.append(sharded.clipped)
    # Another kernel: fp32 (perhaps tf32) products in another order.
    assert largest_gap(*gradients) < 1e-3
    assert max(float(grad.abs().max()) for grad in gradients[0].values()) > 0.01
