"""A critic learns what can be learnt, is deaf to the temperature, and refuses what is not finite."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
from transformers import AutoModelForSequenceClassification

from helpers_critic import config_of, critic_of, fill_trained, scored_samples
from lockstep.config import CriticConfig, TrainConfig
from lockstep.data.items import make_items
from lockstep.dist import World
from lockstep.errors import ConfigError, LockstepError
from lockstep.testing import run_ranks, tiny_llama
from lockstep.train.critic import Critic, critic_train
from lockstep.types import ScoredSample


def learnable() -> list[ScoredSample]:
    """What a completion earns is said by its prompt's last token, which the state before every token can attend to."""
    samples = scored_samples(8, 2)
    return [dataclasses.replace(each, reward=(each.sample.prompt.ids[-1] % 3) - 1.0) for each in samples]


def train(critic: Critic, scored: list[ScoredSample], step: int) -> dict[str, float]:
    look = critic.estimate(scored)
    batch = make_items(scored, TrainConfig(algorithm="gae"), critic.world, token_advantages=look.estimates.advantages)
    return critic.update(batch.items, batch.places, look, step=step).metrics()


def explained(world: World, folder: str, kind: str) -> list[float]:
    options = {"kind": kind, "lr": 1e-2, "epochs": 4, "mini_batches": 2, "value_clip": 0, "gamma": 1, "lam": 1}
    critic = critic_of(world, config_of(folder, options))
    return [train(critic, learnable(), step)["critic/explained_variance"] for step in range(10)]


def values_by_temperature(world: World, folder: str, kind: str) -> list[Any]:
    out = []
    for temperature in (0.5, 1, 1.3):
        critic = critic_of(world, config_of(folder, {"kind": kind}, rollout={"temperature": temperature}))
        fill_trained(critic.valuer.sharded)
        out.append({place: value.tolist() for place, value in critic.estimate(scored_samples(2, 2)).values.items()})
    return out


def refusals(world: World, folder: str) -> list[Any]:
    critic = critic_of(world, config_of(folder, {"kind": "head", "lr": 1e-2}))
    bad = [dataclasses.replace(each, reward=float("inf")) for each in scored_samples(2, 2)]
    with pytest.raises(LockstepError, match=r"step 3: the gradient norm of the critic is (nan|inf)") as caught:
        look = critic.estimate(bad)
        items = make_items(bad[:0], TrainConfig(algorithm="gae"), world, token_advantages=[]).items
        assert critic.update(items, [], look, step=3).metrics() == {"critic/lr": 1e-2}  # nothing to train on
        good = scored_samples(2, 2)
        batch = make_items(
            good, TrainConfig(algorithm="gae"), world, token_advantages=critic.estimate(good).estimates.advantages
        )
        critic.update(batch.items, batch.places, look, step=3)
    return [str(caught.value), train(critic, scored_samples(2, 2), 4)["critic/grad_norm"]]


def too_long(world: World, folder: str, kind: str) -> str:
    critic = critic_of(world, config_of(folder, {"kind": kind}))
    (scored,) = scored_samples(1, 2)[1:]
    sample = dataclasses.replace(scored.sample, ids=(5,) * 256, logprobs=(-1.0,) * 256)
    with pytest.raises(ValueError, match="item 1: its prompt of") as caught:
        critic.estimate([scored, dataclasses.replace(scored, sample=sample)])
    return str(caught.value)


def from_a_reward_model(world: World, folder: str, other: str, small: str) -> list[Any]:
    """Its head, as it came; then what a checkpoint of fewer tokens is told."""
    sharded = critic_of(world, config_of(folder, {"path": other})).valuer.sharded
    head = {name: sharded.local_flat(name).tolist() for name, _ in sharded.trainable() if ".score." in name}
    with pytest.raises(ConfigError) as caught:
        critic_of(world, config_of(folder, {"path": small}))
    return [head, str(caught.value)]


def run_all(world: World, folder: str, other: str, small: str) -> dict[str, Any]:
    return {
        "reward model": from_a_reward_model(world, folder, other, small),
        "explained": {kind: explained(world, folder, kind) for kind in ("model", "head")},
        "temperatures": {kind: values_by_temperature(world, folder, kind) for kind in ("model", "head")},
        "refusals": refusals(world, folder),
        "too long": {kind: too_long(world, folder, kind) for kind in ("model", "head")},
    }


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("models")
    tiny_llama().save_pretrained(root / "policy")
    tiny_llama(vocab_size=50).save_pretrained(root / "small")
    reward_model = AutoModelForSequenceClassification.from_pretrained(root / "policy", num_labels=1)
    reward_model.save_pretrained(root / "reward")
    folders = [str(root / name) for name in ("policy", "reward", "small")]
    (result,) = run_ranks(1, run_all, *folders, timeout_s=180)
    return result | {"its head": cast(Any, reward_model).score.weight[0].tolist()}


def test_a_reward_models_head_is_where_its_critic_starts(said):
    head, refused = said["reward model"]
    assert head == {"base_model.model.score.weight": said["its head"], "base_model.model.score.bias": [0.0]}
    assert "has a vocabulary of 50 tokens and the policy one of 64" in refused


@pytest.mark.parametrize("kind", ["model", "head"])
def test_the_explained_variance_rises_on_what_can_be_learnt(said, kind):
    first, *_, last = said["explained"][kind]
    assert first == pytest.approx(0, abs=1e-6)  # a new head says 0 of everything
    assert last > (0.95 if kind == "model" else 0.5)  # a head alone reads what a random model's states happen to say


@pytest.mark.parametrize("kind", ["model", "head"])
def test_values_do_not_know_the_temperature(said, kind):  # B74
    cold, one, hot = said["temperatures"][kind]
    assert cold == one == hot
    assert any(value for values in one.values() for value in values)


def test_what_is_not_finite_is_refused_and_nothing_is_stepped(said):
    text, afterwards = said["refusals"]
    assert "lower critic.lr" in text
    assert 0 < afterwards < 100


@pytest.mark.parametrize("kind", ["model", "head"])
def test_what_is_longer_than_its_positions_is_refused(said, kind):
    assert "completion of 256 tokens are more than the 256 positions" in said["too long"][kind]


def test_the_critics_rate_is_ten_times_the_actors_unless_said():
    actor = TrainConfig(algorithm="gae", lr=1e-4, epochs=2, mini_batches=3, warmup_steps=5, schedule="linear")
    own = critic_train(CriticConfig(), actor)
    assert own.lr == pytest.approx(1e-3)
    assert (own.epochs, own.mini_batches, own.warmup_steps, own.schedule) == (2, 3, 0, "constant")
    own = critic_train(CriticConfig(lr=5e-4, epochs=1, mini_batches=1, weight_decay=0.1, schedule="cosine"), actor)
    assert (own.lr, own.epochs, own.mini_batches, own.weight_decay, own.schedule) == (5e-4, 1, 1, 0.1, "cosine")
    assert own.packing == actor.packing
