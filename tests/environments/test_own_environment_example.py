"""The worked example of examples/own_environment/ does what its README says, up to the model."""

from pathlib import Path

from lockstep.config import load_config
from lockstep.environments import Reply
from lockstep.environments.find import find_environment

ROOT = Path(__file__).parents[2]


def test_a_wrong_answer_gets_a_hint_and_costs_something(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config("examples/own_environment/recipe.yaml")
    hints = find_environment(config.environment).new()
    assert hints.reset({"prompt": "23 + 41", "answer": "64"}) is None

    def said(text: str, turn: int):
        return hints.step(Reply(text, (1,), "stop", turn))

    assert said("23 + 41 = 54", 0).messages[0]["content"] == "54 is too small. Try again."
    assert said("I give up", 1).messages[0]["content"] == "That is no number. What is the number?"
    right = said("64", 2)
    assert right.done and right.reward == 0.4
