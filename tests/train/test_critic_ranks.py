"""A critic on 1, 2 and 4 ranks, by FSDP1 and FSDP2, in every layout, against a plain model that knows nothing of ranks."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from helpers_critic import (
    GAMMA,
    LAM,
    PlainCritic,
    config_of,
    critic_of,
    fill_trained,
    plain_gae,
    scored_samples,
    spy_on_gradients,
)
from lockstep import checkpoint
from lockstep.data.items import make_items
from lockstep.dist import World
from lockstep.testing import run_ranks, tiny_llama
from lockstep.train.critic import Critic, Look
from lockstep.types import ScoredSample

# Sums over tokens in another order, in fp32: values are of order 1, gradients of order 0.01 to 1.
REORDERED = 2e-6
SCORED = scored_samples(3, 2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"packing": "padded"},
    "packed, several passes": {"packing": "packed", "micro_batch_tokens": 24},
    "shared prefixes": {"packing": "shared_prefix"},
}


def share_of(world: World) -> list[int]:
    """Groups are split over two ranks; of four ranks the last has nothing."""
    if world.size == 1:
        return list(range(len(SCORED)))
    dealt = {2: [[0, 1, 2], [3, 4, 5]], 4: [[0, 1, 2], [3], [4, 5], []]}[world.size]
    return dealt[world.rank]


def shifted(look: Look, places: list[int]) -> Look:
    """As if the values had been others before the update, so that the clip stops some of them."""
    moved = {i: value + (0.3 if places[i] % 2 else -0.3) for i, value in look.values.items()}
    return dataclasses.replace(look, values=moved)


def one_update(critic: Critic, scored: list[ScoredSample], places: list[int], config: Any) -> dict[str, Any]:
    look = critic.estimate(scored)
    advantages = look.estimates.advantages
    batch = make_items(scored, config.train, critic.world, token_advantages=advantages)
    seen = spy_on_gradients(critic.valuer.sharded)
    result = critic.update(batch.items, batch.places, shifted(look, places), step=0)
    return {
        "values": {places[i]: value.tolist() for i, value in look.values.items()},
        "returns": {places[i]: each for i, each in enumerate(look.estimates.returns)},
        "advantages": {places[i]: each for i, each in enumerate(advantages)},
        "gradients": seen[0],
        "metrics": result.metrics(),
        "steps": len(seen),
    }


def run_cases(
    world: World, folder: str, backends: tuple[str, ...], kinds: tuple[str, ...], saved: str
) -> dict[str, Any]:
    """Each case from the same trained tensors: a rate of 1e-12 leaves them where they are. Each critic is saved once."""
    places = share_of(world)
    out = {}
    for backend in backends:
        for kind in kinds:
            for layout, train in LAYOUTS.items():
                config = config_of(
                    folder,
                    {"kind": kind, "lr": 1e-12},
                    train=train,
                    sharding={"backend": backend},
                )
                critic = critic_of(world, config)
                fill_trained(critic.valuer.sharded)
                if layout == "padded":
                    checkpoint._save_critic(Path(saved) / f"{world.size} {backend} {kind}", critic.valuer.sharded)
                out[backend, kind, layout] = one_update(critic, [SCORED[i] for i in places], places, config)
    return out


def run_bf16(world: World, folder: str) -> dict[str, Any]:
    """Over a bf16 base, with activations computed again: FSDP1 gives the fp32 adapters and the head units of their own."""
    places, out = share_of(world), {}
    for backend in ("fsdp2", "fsdp1"):
        low = {"path": folder, "dtype": "bfloat16", "gradient_checkpointing": True}
        config = config_of(folder, {"kind": "model", "lr": 1e-12}, sharding={"backend": backend}, model=low)
        critic = critic_of(world, config)
        fill_trained(critic.valuer.sharded)
        assert {param.dtype for _, param in critic.valuer.sharded.trainable()} == {torch.float32}
        out[backend] = one_update(critic, [SCORED[i] for i in places], places, config)
    return out


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as root:
        tiny_llama().save_pretrained(root)
        yield root


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request, folder, saved) -> list[dict[str, Any]]:
    backends = ("fsdp2",) if request.param == 1 else ("fsdp2", "fsdp1")
    return run_ranks(request.param, run_cases, folder, backends, ("model", "head"), str(saved), timeout_s=180)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("critics")


@pytest.fixture(scope="module")
def plain(folder) -> dict[str, dict[str, Any]]:
    out = {}
    for kind in ("model", "head"):
        critic = PlainCritic(folder, kind)
        samples = [each.sample for each in SCORED]
        values = [critic.values(sample).detach() for sample in samples]
        advantages = [plain_gae(each.reward, v.tolist()) for each, v in zip(SCORED, values, strict=True)]
        returns = [torch.tensor(a) + v for a, v in zip(advantages, values, strict=True)]
        old = [value + (0.3 if i % 2 else -0.3) for i, value in enumerate(values)]
        gradients = critic.gradients(samples, returns, old)
        out[kind] = {"values": values, "advantages": advantages, "returns": returns, "gradients": gradients, "old": old}
    return out


def put_together(parts: list[dict[str, tuple[int, np.ndarray]]], like: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {name: torch.full((tensor.numel(),), float("nan")) for name, tensor in like.items()}
    for part in parts:
        assert part.keys() == out.keys()
        for name, (start, elements) in part.items():
            out[name][start : start + len(elements)] = torch.from_numpy(elements)
    return {name: tensor.reshape(like[name].shape) for name, tensor in out.items()}


def test_values_returns_and_gradients_are_a_plain_models(ranks, plain):
    for case in ranks[0]:
        said, (_, kind, _) = [rank[case] for rank in ranks], case
        expected = plain[kind]
        for i, sample in enumerate(SCORED):
            (values,) = [rank["values"][i] for rank in said if i in rank["values"]] or [[]]
            (returns,) = [rank["returns"][i] for rank in said if i in rank["returns"]]
            assert values == pytest.approx(expected["values"][i].tolist(), abs=REORDERED), case
            assert returns == pytest.approx(expected["returns"][i].tolist(), abs=REORDERED), case
            assert len(returns) == len(sample.sample.ids)
        gradients = put_together([rank["gradients"] for rank in said], expected["gradients"])
        for name, tensor in expected["gradients"].items():
            torch.testing.assert_close(gradients[name], tensor, atol=REORDERED, rtol=1e-5, msg=f"{case} {name}")
        largest = max(float(tensor.abs().max()) for tensor in expected["gradients"].values())
        assert largest > 0.05


def test_advantages_are_whitened_over_all_ranks_tokens(ranks, plain):
    for case in ranks[0]:
        said, expected = [rank[case] for rank in ranks], plain[case[1]]["advantages"]
        flat = torch.tensor([value for each in expected for value in each], dtype=torch.float64)
        white = ((flat - flat.mean()) / (flat.var() + 1e-8).sqrt()).split([len(each) for each in expected])
        for i, values in enumerate(white):
            (mine,) = [rank["advantages"][i] for rank in said if i in rank["advantages"]]
            assert mine == pytest.approx(values.tolist(), abs=1e-5), case


def test_metrics_are_of_all_ranks(ranks, plain):
    for case in ranks[0]:
        expected = plain[case[1]]
        returns, old, values = (torch.cat(expected[name]) for name in ("returns", "old", "values"))
        explained = 1 - (returns - old).var(correction=0) / returns.var(correction=0)
        for rank in ranks:
            metrics = rank[case]["metrics"]
            assert metrics == ranks[0][case]["metrics"]
            assert rank[case]["steps"] == 1
            assert metrics["critic/explained_variance"] == pytest.approx(float(explained), abs=1e-5)
            assert metrics["critic/values_mean"] == pytest.approx(float(values.mean()), abs=1e-5)
            assert metrics["critic/returns_mean"] == pytest.approx(float(returns.mean()), abs=1e-5)
            assert 0 < metrics["critic/clip_fraction"] < 1
            squares = sum(float(tensor.square().sum()) for tensor in expected["gradients"].values())
            assert metrics["critic/grad_norm"] == pytest.approx(squares**0.5, rel=1e-4)
            assert metrics["critic/lr"] == 1e-12
    assert (GAMMA, LAM) == (0.9, 0.8)  # neither of which hides a discount that is left out


def test_what_is_saved_is_loaded_without_lockstep_and_has_the_same_values(ranks, plain, saved, folder):  # B14
    for folder_of in saved.iterdir():
        if folder_of.name.endswith("head"):
            tensors = load_file(folder_of / "value_head.safetensors")
            head = torch.nn.Linear(32, 1)
            head.load_state_dict(tensors)
            body = AutoModelForCausalLM.from_pretrained(folder).base_model
        else:
            base = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
            loaded = PeftModel.from_pretrained(base, folder_of)
            body, head = base.model, base.score
            assert all("score" not in name for name, _ in loaded.named_parameters() if "lora_" in name)
        for i, each in enumerate(SCORED):
            ids = torch.tensor([[*each.sample.prompt.ids, *each.sample.ids]])
            with torch.no_grad():
                values = head(body(input_ids=ids).last_hidden_state[0])[len(each.sample.prompt.ids) - 1 : -1, 0]
            expected = plain[folder_of.name.split()[-1]]["values"][i]
            torch.testing.assert_close(values, expected, atol=REORDERED, rtol=0, msg=folder_of.name)


def test_a_bf16_base_gives_the_same_by_either_fsdp(folder, plain):
    two = run_ranks(2, run_bf16, folder)
    expected = plain["model"]
    for backend in ("fsdp2", "fsdp1"):
        for i in range(len(SCORED)):
            (values,) = [rank[backend]["values"][i] for rank in two if i in rank[backend]["values"]] or [[]]
            # bf16 has 8 bits: states of order 1 are off by up to 0.01 each, and 32 of them with weights of 0.1 make a value.
            assert values == pytest.approx(expected["values"][i].tolist(), abs=0.05)
    left, right = (
        put_together([rank[b]["gradients"] for rank in two], expected["gradients"]) for b in ("fsdp2", "fsdp1")
    )
    for name, tensor in left.items():
        # The same roundings in another order of additions over ranks; relative to the largest gradient of the tensor.
        assert float((tensor - right[name]).abs().max()) <= 0.02 * float(tensor.abs().max()) + 1e-6, name
