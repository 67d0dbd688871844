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


def test_an_item_may_end_at_the_last_position():
    items = [item([1, 2], [3]), item([1, 2], [3, 4, 5])]
    check_fits(items, 5)
    check_fits(items, None)
    with pytest.raises(
        ValueError, match="item 1: its prompt of 2 and completion of 3 tokens are more than the 4 positions"
    ):
        check_fits(items, 4)
