"""Parts of a run put together: what the sections mean for each other."""

import pytest

from helpers_data import tiny_tokenizer
from helpers_loop import recipe
from lockstep.assemble import assemble, load_data
from lockstep.config import build_config
from lockstep.data.rewards import RewardSet
from lockstep.data.source import load_rows
from lockstep.data.tasks import SAME_PROBLEM
from lockstep.dist import World
from lockstep.errors import ConfigError


def test_a_run_does_not_train_on_what_it_is_scored_on(tmp_path):
    config = build_config(recipe("unused", tmp_path / "run"))
    assert config.data.eval is not None
    rewards = (RewardSet(config.reward), RewardSet([config.eval.correct]), None)
    data = load_data(config, tiny_tokenizer(), rewards)

    held_out = {prompt.row[SAME_PROBLEM] for prompts in data.held_out.values() for prompt in prompts}
    given = [row[SAME_PROBLEM] for row in load_rows(config.data.train, origin="data.train")]
    assert held_out & set(given)  # the recipe's own rows overlap: there is something to remove
    assert [prompt.row[SAME_PROBLEM] for prompt in data.train] == [name for name in given if name not in held_out]
    assert data.order.num_prompts == len(data.train)


def test_flex_attention_is_refused_where_it_cannot_train(tmp_path):
    config = build_config(recipe("unused", tmp_path / "run", model={"attention": "flex_attention"}))
    with pytest.raises(ConfigError, match="flex_attention has no backward; use sdpa"):
        assemble(config, World())
