"""Whole runs with an environment: trainer and engine agree on every turn, resuming is exact, people can read the samples."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers_data import sample_of
from helpers_environments import HERE, Session
from helpers_loop import TIMES, make_model_folder, recipe
from lockstep.assemble import assemble
from lockstep.config import RewardConfig, build_config
from lockstep.data.rewards import RewardSet
from lockstep.dist import World
from lockstep.errors import ConfigError, EpisodeError, RewardError
from lockstep.loop import run_eval, run_training, train_in
from lockstep.testing import run_ranks
from lockstep.types import Episode


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make_tree(model: str, run_dir: Path | str, *, steps: int, **sections: Any) -> dict[str, Any]:
    """Half of the numbers end a reply, so that the episodes of a random model have several turns."""
    tree = recipe(
        model,
        run_dir,
        lora={"rank": 4, "alpha": 8, "dropout": 0.0},
        environment={"name": f"{HERE}:Counting", "max_turns": 3},
        rollout={"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6, "stop_token_ids": list(range(8, 58))},
        train={"lr": 1e-2, "schedule": "constant", "warmup_steps": 0, "kl_coef": 0.05},
        eval={"max_new_tokens": 6, "correct": "environment"},
        observe={"tensorboard": False, "samples_per_step": 16},
        checkpoint={"every_steps": 2, "keep": 3},
    )
    tree["reward"] = [{"name": "environment"}, {"name": "helpers_loop:even_numbers", "weight": 0.5, "sees": "reply"}]
    tree["run"] = {**tree["run"], "num_steps": steps}
    return {**tree, **sections}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [
        {name: x for name, x in line.items() if not name.startswith(TIMES)} for line in lines(run / "metrics.jsonl")
    ]


def adapter(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "adapter" / "adapter_model.safetensors")


def train_twice(world: World, model: str, out: str) -> None:
    """Three steps; and two, then one more after a resume."""
    train_in(world, build_config(make_tree(model, f"{out}/whole", steps=3)), resume=False)
    for steps in (2, 3):
        tree = make_tree(model, f"{out}/halves", steps=steps)
        tree["eval"] = {**tree["eval"], "before": False, "after": False}
        train_in(world, build_config(tree), resume=steps == 3)


@pytest.fixture(scope="module")
def out(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(2, train_twice, model, str(folder), timeout_s=110)
    return folder


def test_trainer_and_engine_agree_on_every_turn(out):
    """One forward over the concatenated ids, shared prefixes and all, gives what the engine said turn by turn."""
    steps = metrics(out / "whole")
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["episode/turns"] > 1.5 and line["episode/observation_tokens"] > 4
        assert line["rollout_probs_diff_max"] < 1e-4 and line["rollout_kl_k3"] < 1e-7
        assert line["loss_tokens"] <= line["completion_tokens_total"]
        assert line["episode/done"] + line["episode/cut"] == pytest.approx(1) and line["episode/room"] == 0
        assert line["reward"] == pytest.approx(
            line["reward.environment"] + 0.5 * line["reward.helpers_loop:even_numbers"]
        )
    assert any(value.abs().max() > 0 for name, value in adapter(out / "whole", 3).items() if "lora_B" in name)


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(out):
    assert metrics(out / "halves") == metrics(out / "whole")
    left, right = adapter(out / "halves", 3), adapter(out / "whole", 3)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    for step in range(1, 4):
        name = f"samples/step-{step:06d}.jsonl"
        assert (out / "halves" / name).read_text() == (out / "whole" / name).read_text()


def test_two_ranks_sample_what_one_samples(model, out, tmp_path):
    run_training(build_config(make_tree(model, tmp_path / "one", steps=1)), resume=False)
    one, two = (lines(run / "samples" / "step-000001.jsonl") for run in (tmp_path / "one", out / "whole"))
    assert len(one) == 16 and len(two) == 8  # rank 0's half
    for left, right in zip(one, two, strict=False):
        assert left["ids"] == right["ids"] and left["turns"] == right["turns"] and left["reward"] == right["reward"]
        assert left["logprobs"] == pytest.approx(right["logprobs"], abs=1e-5)
    left, right = metrics(tmp_path / "one")[0], metrics(out / "whole")[0]
    for name in ("reward", "loss", "grad_norm", "episode/turns", "completion_tokens", "frac_reward_zero_std"):
        assert left[name] == pytest.approx(right[name], abs=1e-5), name


def test_samples_can_be_read_turn_by_turn(out):
    entries = lines(out / "whole" / "samples" / "step-000002.jsonl")
    entry = next(each for each in entries if len(each["turn_rewards"]) == 3)
    assert [turn["role"] for turn in entry["turns"]] == ["assistant", "user"] * 2 + ["assistant"]
    assert entry["ended"] in ("done", "cut") and len(entry["info"]) == 3 and "numbers" in entry["info"][0]
    assert len(entry["sampled"]) == len(entry["ids"]) == len(entry["logprobs"])
    assert entry["rewards"]["environment"] == pytest.approx(sum(entry["turn_rewards"]))
    shown = [value for value, own in zip(entry["logprobs"], entry["sampled"], strict=True) if not own]
    assert shown and set(shown) == {0.0}


def test_evaluation_plays_episodes(model, out, capsys):
    names = [line["name"] for line in lines(out / "whole" / "eval.jsonl")]
    assert names == ["before", "after"]
    before = lines(out / "whole" / "eval.jsonl")[0]
    run_eval(build_config(make_tree(model, out / "eval", steps=1)), adapter=None, templates=("{prompt} = ?",))
    assert f"{100 * before['accuracy']:.1f} %" in capsys.readouterr().out


def test_a_failing_environment_ends_the_run_and_shows_the_episode(model, tmp_path):
    broken = {"name": f"{HERE}:Broken", "args": {"how": "raise"}}
    tree = make_tree(model, tmp_path / "run", steps=1, environment=broken, eval={"before": False, "after": False})
    with pytest.raises(EpisodeError, match=r"Broken.*ZeroDivisionError: the tool broke(.|\n)*assistant:"):
        run_training(build_config(tree), resume=False)


def test_the_longest_sample_is_what_the_model_can_take(model, tmp_path):
    """An environment that never ends: the model's 256 positions do."""
    endless = {"name": f"{HERE}:Counting", "args": {"turns": 1000}, "max_turns": 1000}
    tree = make_tree(model, tmp_path / "run", steps=1, environment=endless, eval={"before": False, "after": False})
    tree["rollout"] = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6, "stop_token_ids": list(range(138))}
    run_training(build_config(tree), resume=False)
    (line,) = metrics(tmp_path / "run")
    assert line["episode/room"] == 1.0 == line["truncated"]
    entries = lines(tmp_path / "run" / "samples" / "step-000001.jsonl")
    assert all(240 < len(entry["ids"]) + 9 <= 256 for entry in entries)
    assert line["rollout_probs_diff_max"] < 1e-4


def test_a_run_lets_go_of_the_loop_that_its_environments_shared(model, tmp_path):
    Session.ended = 0
    session = {"name": f"{HERE}:Session", "max_turns": 3}
    tree = make_tree(model, tmp_path / "run", steps=1, environment=session, eval={"before": False, "after": False})
    run_training(build_config(tree), resume=False)
    assert Session.ended == 16
    assert not any(thread.name == "lockstep-call-loop" for thread in threading.enumerate())


@pytest.mark.parametrize(("limit", "key"), [(10, "rollout.max_new_tokens 6"), (40, "eval.max_new_tokens 100")])
def test_a_run_without_room_for_a_second_reply_is_refused_before_the_model_is_loaded(model, tmp_path, limit, key):
    tree = make_tree(model, tmp_path / "run", steps=1, environment={"name": f"{HERE}:Counting", "max_tokens": limit})
    tree["eval"] = {**tree["eval"], "max_new_tokens": 100}
    with pytest.raises(
        ConfigError, match=rf"environment.max_tokens is {limit}, .* an observation and a reply \({key}\)"
    ):
        run_training(build_config(tree), resume=False)


def test_a_first_reply_needs_positions_behind_the_rows_prompt(model, tmp_path):
    tree = make_tree(model, tmp_path / "run", steps=1, environment={"name": f"{HERE}:Bare"})
    tree["rollout"] = {**tree["rollout"], "max_new_tokens": 300}
    with pytest.raises(
        ConfigError, match=r"the model of model\.path has 256 positions; lower rollout\.max_new_tokens$"
    ):
        run_training(build_config(tree), resume=False)


def test_the_constant_length_is_that_of_all_turns(model, tmp_path):
    tree = make_tree(model, tmp_path / "run", steps=1)
    parts = assemble(build_config(tree), World())
    assert parts.actor.objective.max_tokens == 3 * 6
    assert parts.generate is parts.episodes


def test_rewards_see_all_of_a_sample_or_the_last_reply():
    episode = Episode(
        ({"role": "assistant", "content": "calc: 1 + 2"}, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "I see"}),
        (0.25, 0.5), "done",
    )  # fmt: skip
    sample = replace(sample_of("calc: 1 + 2 tool 3 assistant I see", "3"), episode=episode)
    configs = [
        RewardConfig(name="last_number"),
        RewardConfig(name="last_number", sees="reply"),
        RewardConfig(name="environment"),
    ]
    (scored,) = RewardSet(configs).score([sample])
    assert list(scored.parts.values()) == [1.0, 0.0, 0.75]
    with pytest.raises(RewardError, match="needs samples that an environment answered; these have none"):
        RewardSet([RewardConfig(name="environment")]).score([sample_of("3", "3")])
    plain = RewardSet([RewardConfig(name="last_number", sees="reply")]).score([sample_of("3", "3")])
    assert plain[0].reward == 1.0
