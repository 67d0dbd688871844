"""The built-in calculator: what counts as a call, what it can compute, what it pays."""

import pytest

from lockstep.environments import Reply
from lockstep.environments.calculator import Calculator, compute


def reply(text: str, turn: int = 0) -> Reply:
    return Reply(text, (1,), "stop", turn)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1234 + 5678", "6912"),
        (" 2*(3-10) ", "-14"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 4", "2.5"),
        ("2 / 3", "0.666667"),
        ("-3", "-3"),
        ("1 / 0", None),
        ("1e308 * 1e308 / 3", None),
        ("1e999", None),
        ("2 ** 9", None),
        ("__import__('os')", None),
        ("True + 1", None),
        ("1234 +", None),
        ("", None),
        ("1+" * 60 + "1", None),
        ("what", None),
        ("6039 (9) + 1843 (1)", None),
        ("3if 1 else 2", None),
    ],
)
def test_sums_are_computed_and_nothing_else(expression, value):
    assert compute(expression) == value


def test_whatever_a_policy_writes_is_no_error():
    """The longest expressions of each operator and of large numbers: an exception would end the run."""
    for operator in "+-*/":
        for number in ("9" * 20, "1e308", "1e-308", "-1e308", "(" * 30, "0x" + "f" * 12, "1_0", "9" * 79):
            for end in ("", operator + "3", ")" * 30):
                said = compute(operator.join([number] * 9)[: 80 - len(end)] + end)
                assert said is None or said


def test_a_call_is_answered_and_anything_else_ends_the_episode():
    calculator = Calculator(call_reward=0.2)
    assert calculator.reset({"prompt": "1 + 2"}) is None
    first = calculator.step(reply("I count.\ncalc: 1 + 2"))
    assert (first.messages, first.reward, first.done) == ([{"role": "tool", "content": "3"}], 0.2, False)
    again = calculator.step(reply("calc: 1 + 3", 1))
    assert (again.messages[0]["content"], again.reward) == ("4", 0.0)
    assert Calculator().step(reply("calc: 1 + 2 = 12\nso")).messages[0]["content"] == "3"
    broken = Calculator(call_reward=0.2, role="user").step(reply("calc: one and two"))
    assert (broken.messages, broken.reward) == ([{"role": "user", "content": "cannot compute this"}], 0.0)
    assert calculator.step(reply("1 + 2 = 3", 2)).done


def test_worked_conversations_come_before_the_question():
    calculator = Calculator(shots=2, instruction="Add: {prompt}", role="user")
    opening = calculator.reset({"prompt": "11 + 22"})
    assert [message["role"] for message in opening] == ["user", "assistant", "user", "assistant"] * 2 + ["user"]
    assert opening[-1]["content"] == "Add: 11 + 22"
    for shot in (opening[:4], opening[4:8]):
        assert compute(shot[1]["content"].removeprefix("calc: ")) == shot[2]["content"]
        assert shot[3]["content"].endswith(f"= {shot[2]['content']}")
    with pytest.raises(ValueError, match="shots: expected 0 to 3; 4 came"):
        Calculator(shots=4)
