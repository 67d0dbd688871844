"""What a recipe may say of a critic, and what each mistake is called."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config import build_config, dump_config, load_config
from lockstep.errors import ConfigError

GAE = {"algorithm": "gae"}


def tree(**sections: Any) -> dict[str, Any]:
    data, reward = {"train": {"task": "sums"}}, [{"name": "last_number"}]
    return {"model": {"path": "somewhere"}, "data": data, "reward": reward, **sections}


def test_a_critic_round_trips_and_a_group_of_one_is_enough(tmp_path):
    config = build_config(
        tree(train=GAE, critic={"kind": "head", "warmup_steps": 3}, rollout={"group_size": 1}, run={"dir": "here"})
    )
    (tmp_path / "recipe.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "recipe.yaml") == config
    assert load_config(tmp_path / "recipe.yaml", ["critic.lam=0.9"]).critic.lam == 0.9  # type: ignore[union-attr]
    assert build_config(tree()).critic is None


def test_defaults_are_verls():
    critic = build_config(tree(train=GAE, critic={})).critic
    assert critic is not None
    assert (critic.kind, critic.gamma, critic.lam, critic.value_clip, critic.max_grad_norm) == ("model", 1, 1, 0.5, 1)
    assert critic.lr is None and critic.warmup_steps == 0


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": GAE}, "train.algorithm: gae needs a critic; give the section critic"),
        ({"critic": {}}, "train.algorithm: grpo has no use for one; use gae, or leave the section critic out"),
        ({"train": GAE, "critic": {"kind": "head", "path": "x"}}, "path='x' belongs to kind: model"),
        ({"train": GAE, "critic": {"kind": "head", "lora": {"rank": 2}}}, "lora belongs to kind: model"),
        ({"train": GAE, "critic": {"lora": {"init_from": "x"}}}, "a critic's adapter starts anew"),
        ({"train": GAE, "critic": {"warmup_steps": 100}}, "critic.warmup_steps=100 leaves none of run.num_steps=100"),
        (
            {"train": GAE, "critic": {"mini_batches": 9}},
            "critic.mini_batches=9 cannot share rollout.prompts_per_step=8",
        ),
        ({"train": GAE, "critic": {"lam": 1.5}}, "critic.lam"),
        ({"train": GAE, "critic": {"gamma": 0}}, "critic.gamma"),
        ({"train": GAE, "critic": {"clip": 0.5}}, "unknown key 'critic.clip'"),
        ({"train": GAE, "critic": {}, "model": {"path": "x", "dtype": "float16"}}, "critic.kind: model over float16"),
        ({"train": {"algorithm": "grpo"}, "rollout": {"group_size": 1}}, "compares the samples of a group"),
    ],
)
def test_mistakes(sections, said):
    with pytest.raises(ConfigError) as caught:
        build_config(tree(**sections))
    assert said in str(caught.value)


def test_a_head_over_float16_is_fine():
    build_config(tree(train=GAE, critic={"kind": "head"}, model={"path": "x", "dtype": "float16"}))
