"""The rewards that a recipe can name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_data import sample_of
from lockstep.config import DataSource, RewardConfig
from lockstep.data.reward_functions import exact_match, format_number, last_number, math_verify
from lockstep.data.rewards import RewardSet
from lockstep.data.source import load_rows
from lockstep.errors import RewardError


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("64", "64", 1),
        ("The answer is 64.", "64", 1),
        ("23 + 41 = 64\n", "64", 1),
        ("64.0", "64", 1),
        ("064", "64", 1),
        ("12.", "12", 1),
        ("= 12\n", "12", 1),
        ("1,234", "1234", 1),
        ("so 1,234,567.50 in all", "1234567.5", 1),
        ("1,23", "123", 0),
        ("1,2345", "12345", 0),
        ("-5", "-5", 1),
        ("2 - 7 = -5", "-5", 1),
        ("2 - 7 = \N{MINUS SIGN}5", "-5", 1),
        ("10-12", "12", 1),
        ("(3)-12", "12", 1),
        ("5", "-5", 0),
        ("\\boxed{64}", "64", 1),
        ("$64$", "64", 1),
        ("1e3", "1000", 1),
        ("64 or 65", "64", 0),
        ("9007199254740993", "9007199254740992", 0),
        ("no idea", "64", 0),
        ("", "64", 0),
        ("72", "She sold 48 + 24 = 72 clips.\n#### 72", 1),
    ],
)
def test_last_number(completion, answer, expected):
    assert last_number(completion, answer) == expected


@given(number=st.integers(-(10**12), 10**12), words=st.text(alphabet="abc =:\n", max_size=10))
def test_last_number_reads_every_way_to_write_it(number, words):
    assert last_number(f"{words} {number:,}.", str(number)) == 1
    assert last_number(f"{words} {number}", f"{number:,}") == 1
    assert last_number(f"{words} {number + 1}", str(number)) == 0


def test_last_number_needs_a_number_in_the_answer():
    with pytest.raises(ValueError, match="'Paris' came"):
        last_number("64", "Paris")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("64", 1), (" 64\n", 1), ("-5", 1), ("1,234.5", 1), ("64.", 0), ("= 64", 0), ("64 65", 0), ("", 0), ("sixty", 0)],
)
def test_format_number(completion, expected):
    assert format_number(completion, "1") == expected


def test_exact_match():
    assert exact_match(" 64\n", "64") == 1
    assert exact_match("64.", "64") == 0


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so it is $\\frac{1}{2}$", "0.5", 1),
        ("so it is $\\frac{1}{2}$", "\\frac{2}{4}", 1),
        ("The answer is 64", "64", 1),
        ("The answer is 65", "64", 0),
        ("no idea", "64", 0),
    ],
)
def test_math_verify(completion, answer, expected):
    assert math_verify(completion, answer) == expected


def test_math_verify_gives_up_on_one_completion_and_goes_on():
    """9^9^9 takes minutes and holds the interpreter's lock meanwhile."""
    samples = [sample_of("$9^{9^{9}}$"), sample_of("$64$")]
    rewards = RewardSet([RewardConfig(name="math_verify", args={"limit_s": 1})])
    assert [scored.reward for scored in rewards.score(samples)] == [0, 1]


def test_math_verify_needs_an_answer_that_it_can_read():
    rewards = RewardSet([RewardConfig(name="math_verify")])
    with pytest.raises(RewardError, match=r"math_verify needs a reference answer[\s\S]*answer: 'Paris'"):
        rewards.score([sample_of("64", "Paris")])


def gym_sample(text, task):
    row = load_rows(DataSource(task=f"reasoning-gym:{task}", num_rows=1), origin="data.train")[0]
    return sample_of(text if text is not None else row["answer"], row["answer"], row=row)


def test_reasoning_gym_scores_with_the_tasks_own_scorer():
    right = gym_sample(None, "basic_arithmetic")
    tagged = sample_of(f"I think <answer> {right.text} </answer>, no?", row=right.prompt.row)
    wrong = sample_of("none", row=right.prompt.row)
    rewards = RewardSet([RewardConfig(name="reasoning_gym")])
    assert [scored.reward for scored in rewards.score([right, tagged, wrong])] == [1, 1, 0]


def test_reasoning_gym_answers_that_its_scorer_fails_on_are_wrong_answers():
    """Its prime_factorization scorer raises ValueError on words (0.1.25)."""
    rewards = RewardSet([RewardConfig(name="reasoning_gym")])
    assert rewards.score([gym_sample("I do not know", "prime_factorization")])[0].reward == 0


def test_reasoning_gym_needs_its_own_rows():
    rewards = RewardSet([RewardConfig(name="reasoning_gym")])
    with pytest.raises(RewardError, match="this prompt's row has no entry"):
        rewards.score([sample_of("64")])
