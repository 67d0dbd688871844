"""The worked example of examples/own_data/ does what its README says, up to the model."""

from pathlib import Path

import pytest

from helpers_data import tiny_tokenizer
from lockstep.config import load_config
from lockstep.data.prompts import encode_prompts
from lockstep.data.rewards import RewardSet
from lockstep.data.source import load_rows
from lockstep.data.tasks import split_rows
from lockstep.types import Sample

ROOT = Path(__file__).parents[2]


def answered(prompt, text):
    return Sample(
        prompt=prompt, slot=0, index=0, ids=(1,), logprobs=(-1.0,), text=text, finish="stop", policy_version=0
    )


def test_rows_become_prompts_and_answers_become_rewards(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config("examples/own_data/recipe.yaml")
    assert config.data.eval is not None
    rows = load_rows(config.data.train, origin="data.train")
    held_out = load_rows(config.data.eval, origin="data.eval")
    assert len(split_rows(rows, held_out, "question")) == len(rows) == 48

    encoded = encode_prompts(
        rows, source=config.data.train, prompt=config.data.prompt, tokenizer=tiny_tokenizer(), name="train"
    )
    prompt = next(prompt for prompt in encoded.prompts if prompt.row["question"] == "How many minutes are 5 hours?")
    assert prompt.answer == "300"
    assert "How many minutes are 5 hours? Answer with only the number." in prompt.text

    texts = ["300", "There are 150 minutes in that", "I do not know that", ""]
    scored = RewardSet(config.reward).score([answered(prompt, text) for text in texts])
    assert [one.reward for one in scored] == pytest.approx([1.2, 0.5, 0, 0])
