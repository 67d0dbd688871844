"""Environments of a recipe: found, checked, and refused with a reason before any model is loaded."""

import pytest

from helpers_environments import HERE, Bare, Counting, Opens
from lockstep.config import EnvironmentConfig, build_config
from lockstep.environments.calculator import Calculator
from lockstep.environments.find import find_environment
from lockstep.errors import ConfigError


def find(name: str, **args):
    return find_environment(EnvironmentConfig(name=name, args=args))


def test_found_by_name_module_or_file(tmp_path):
    assert isinstance(find("calculator", shots=1).new(), Calculator)
    counting = find(f"{HERE}:Counting", turns=2)
    assert isinstance(counting.new(), Counting) and counting.new().turns == 2 and counting.takes_seed
    assert find(f"{HERE}:Opens").takes_seed and isinstance(find(f"{HERE}:Opens").new(), Opens)
    assert isinstance(find(f"{HERE}:Bare").new(), Bare) and not find(f"{HERE}:Bare").takes_seed
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    def step(self, reply):\n        ...\n")
    assert type(find(f"{path}:Mine").new()).__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("calculater", {}, r"environment.name: unknown 'calculater'; did you mean 'calculator'\?"),
        ("zzz", {}, "known is calculator. One of your own is module:Class"),
        ("no_such_module_here:E", {}, "environment 'no_such_module_here:E': no module"),
        (f"{HERE}:Countin", {}, "has no class 'Countin'; the nearest is 'Counting'"),
        (f"{HERE}:HERE", {}, "HERE is a str, not a class"),
        (f"{HERE}:factory", {}, "expected a class, one instance of which is made per sample"),
        (f"{HERE}:NoStep", {}, r"NoStep has no method step; expected step\(self, reply\) -> Turn"),
        (f"{HERE}:Abstract", {}, "Abstract is abstract; expected a class that has its own step"),
        (f"{HERE}:OddStep", {}, r"expected step\(self, reply\); it is step\(self\)"),
        (f"{HERE}:Counting", {"trns": 1}, r"cannot be made with args \['trns'\].*trns"),
        (f"{HERE}:Broken", {}, "missing a required argument: 'how'"),
    ],
)
def test_what_cannot_be_played_is_refused(name, args, said):
    with pytest.raises(ConfigError, match=said):
        find(name, **args)


def tree(**sections):
    return {
        "model": {"path": "x"},
        "data": {"train": {"task": "sums"}},
        "reward": [{"name": "last_number"}],
        **sections,
    }


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"reward": [{"name": "environment"}]}, r"reward.0.name is environment.*give the section environment"),
        ({"eval": {"correct": "environment"}}, r"eval.correct.name is environment"),
        (
            {
                "environment": {"name": "calculator"},
                "data": {"train": {"task": "sums"}, "prompt": {"format": "text"}},
            },
            "data.prompt.format must be chat; it is text",
        ),
        ({"environment": {"name": "calculator", "max_truns": 2}}, r"did you mean 'environment.max_turns'"),
        ({"environment": {"max_turns": 2}}, "environment.name"),
        (
            {"environment": {"name": "calculator", "timeout_s": 601}},
            r"environment.timeout_s is 601, and ranks wait for one another dist.timeout_s 600 seconds",
        ),
        ({"environment": {"name": "calculator", "max_turns": 0}}, "environment.max_turns"),
        ({"reward": [{"name": "last_number", "sees": "last"}]}, "sees"),
    ],
)
def test_the_section_is_checked_with_the_others(sections, said):
    with pytest.raises(ConfigError, match=said):
        build_config(tree(**sections))


def test_a_recipe_without_the_section_has_none():
    assert build_config(tree()).environment is None
    both = tree(environment={"name": "calculator"}, reward=[{"name": "environment"}], eval={"correct": "environment"})
    assert build_config(both).environment.max_turns == 4
