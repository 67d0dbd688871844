"""Prompts and items against the positions that models have."""

import pytest
from transformers import GPT2Config, LlamaConfig, MambaConfig

from helpers_train import item
from lockstep.data.room import check_fits, check_room, least, positions_of
from lockstep.errors import ConfigError
from lockstep.types import Prompt

PROMPTS = [Prompt("a", (1,) * 5, "", ""), Prompt("b", (1,) * 9, "", "")]


def test_positions_are_read_off_any_config():
    assert positions_of(GPT2Config(n_positions=77)) == 77
    assert positions_of(LlamaConfig(max_position_embeddings=88)) == 88
    assert positions_of(MambaConfig()) is None  # a recurrent model has none
    for told, original in ((128, 64), (40, 32), (512, 64)):
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original, "rope_theta": 1e4}
        config = LlamaConfig(max_position_embeddings=told, rope_parameters=yarn)
        assert positions_of(config) == max(told, 4 * original)
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}  # published configs count the factor in
    assert positions_of(LlamaConfig(max_position_embeddings=88, rope_parameters=linear)) == 88
    assert least([None, 9, 7]) == 7
    assert least([None]) is None


def test_a_prompt_without_room_names_the_model_and_what_to_set():
    check_room(PROMPTS, key="rollout.max_new_tokens", max_new_tokens=3, limits={"model.path": 12, "critic.path": None})
    with pytest.raises(ConfigError) as caught:
        check_room(
            PROMPTS, key="rollout.max_new_tokens", max_new_tokens=4, limits={"model.path": 13, "critic.path": 12}
        )
    for said in ("'b' has 9 tokens", "4 new ones (rollout.max_new_tokens)", "critic.path has 12", "max_tokens to 8"):
        assert said in str(caught.value)


def test_no_limit_of_prompts_helps_where_a_completion_alone_is_too_long():
    with pytest.raises(ConfigError, match=r"has 12 positions; lower rollout\.max_new_tokens$"):
        check_room(PROMPTS, key="rollout.max_new_tokens", max_new_tokens=12, limits={"model.path": 12})


def test_an_item_may_end_at_the_last_position():
    items = [item([1, 2], [3]), item([1, 2], [3, 4, 5])]
    check_fits(items, 5)
    check_fits(items, None)
    with pytest.raises(
        ValueError, match="item 1: its prompt of 2 and completion of 3 tokens are more than the 4 positions"
    ):
        check_fits(items, 4)
