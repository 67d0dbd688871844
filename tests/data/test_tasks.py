"""Named tasks: right answers, no repeats, seeded; and held-out questions that training never sees."""

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import DataSource
from lockstep.data.tasks import make_rows, split_rows
from lockstep.errors import ConfigError, DataError


def sums(*, num_rows=None, seed=0, **args):
    return make_rows(DataSource(task="sums", task_args=args, num_rows=num_rows, seed=seed), origin="data.train")


def gym(name, **options):
    return make_rows(DataSource(task=f"reasoning-gym:{name}", **options), origin="data.train")


@given(
    low=st.integers(-20, 20),
    width=st.integers(0, 30),
    terms=st.integers(2, 4),
    operators=st.lists(st.sampled_from("+-*"), min_size=1, max_size=3),
    seed=st.integers(0, 9),
)
def test_sums_are_right_unique_and_within_bounds(low, width, terms, operators, seed):
    num_rows = min(20, (width + 1) ** terms)
    rows = sums(low=low, high=low + width, terms=terms, operators=operators, num_rows=num_rows, seed=seed)
    assert len({row["prompt"] for row in rows}) == num_rows
    for row in rows:
        assert str(eval(row["prompt"], {"__builtins__": {}})) == row["answer"]
        words = row["prompt"].split()
        assert all(low <= int(word.strip("()")) <= low + width for word in words[::2])
        assert len(words) == 2 * terms - 1
        assert set(words[1::2]) <= set(operators)


def test_all_problems_there_are_come_once():
    rows = sums(low=0, high=3, operators=["+", "-"], num_rows=32)
    expected = {f"{a} {op} {b}" for a, b in itertools.product(range(4), repeat=2) for op in "+-"}
    assert {row["prompt"] for row in rows} == expected


def test_a_row_reads_as_the_readme_says():
    row = sums(low=23, high=23, num_rows=1)[0]
    assert (row["prompt"], row["answer"]) == ("23 + 23", "46")


def test_the_seed_decides_the_rows():
    first = sums(low=1, high=60, num_rows=50, seed=1)
    assert first == sums(low=1, high=60, num_rows=50, seed=1)
    assert first != sums(low=1, high=60, num_rows=50, seed=2)


def test_without_num_rows_there_are_1024_or_all():
    assert len(sums(low=1, high=60)) == 1024
    assert len(sums(low=1, high=3)) == 9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"low": 1, "high": 3, "num_rows": 10}, "10 rows are asked for, but .* make only 9 different problems"),
        ({"low": 3, "high": 1}, "low must not be above high; low 3, high 1 came"),
        ({"low": 1}, "'high' is required and missing"),
        ({"low": 1, "high": 3, "hihg": 3}, "unknown argument 'hihg'; sums takes low, high, terms, operators"),
        ({"low": "1", "high": 3}, "low: input should be a valid integer; '1' came"),
        ({"low": 1, "high": 3, "terms": 1}, "terms: input should be greater than or equal to 2; 1 came"),
        ({"low": 1, "high": 3, "operators": ["/"]}, r"operators\.0: input should be '\+', '-' or '\*'; '/' came"),
        ({"low": 0, "high": 10**9, "terms": 3}, r"1\.00e\+27 different problems are too many"),
    ],
)
def test_wrong_arguments_of_sums(options, said):
    with pytest.raises(DataError, match=rf"data\.train\.(task_args|num_rows): .*{said}"):
        sums(**options)


@pytest.mark.parametrize(
    ("task", "said"),
    [("sum", r"unknown task 'sum'; did you mean 'sums'\?"), ("x", "known are sums and reasoning-gym:NAME")],
)
def test_an_unknown_task_names_the_near_ones(task, said):
    with pytest.raises(DataError, match=said):
        make_rows(DataSource(task=task), origin="data.train")


def test_reasoning_gym_rows_keep_their_entry():
    rows = gym("basic_arithmetic", num_rows=3, task_args={"min_terms": 2, "max_terms": 2})
    assert len(rows) == 3
    assert all(row["prompt"] == row["entry"]["question"] for row in rows)
    assert all(row["answer"] == row["entry"]["answer"] for row in rows)
    assert all(row["entry"]["metadata"]["num_terms"] == 2 for row in rows)


def test_neighbouring_seeds_of_reasoning_gym_share_no_rows():
    """It seeds row i with seed + i: seed 1 would be seed 0, one row on."""
    first, second = (gym("basic_arithmetic", num_rows=10, seed=seed) for seed in (0, 1))
    assert {row["prompt"] for row in first}.isdisjoint(row["prompt"] for row in second)
    assert first == gym("basic_arithmetic", num_rows=10, seed=0)


def test_a_gym_task_without_one_right_answer_has_an_empty_one():
    assert gym("graph_color", num_rows=1)[0]["answer"] == ""


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("basic_arithmetics", {}, "no data set 'basic_arithmetics'; the nearest are basic_arithmetic,"),
        ("basic_arithmetic", {"task_args": {"min_term": 2}}, "does not take min_term; it takes .*min_terms"),
        ("basic_arithmetic", {"task_args": {"size": 2}}, r"does not take size; .*\(size is num_rows, seed is seed\)"),
        (
            "basic_arithmetic",
            {"task_args": {"min_terms": 9, "max_terms": 2}},
            "refuses {'min_terms': 9, 'max_terms': 2}",
        ),
    ],
)
def test_wrong_arguments_of_reasoning_gym(name, options, said):
    with pytest.raises(DataError, match=said):
        gym(name, **options)


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning_gym.*pip install lockstep-rl\[demo\]"):
        gym("basic_arithmetic")


def operands(row):
    return sorted(map(int, row["prompt"].split(" + ")))


def test_train_is_what_the_held_out_rows_leave_in_either_order_of_the_terms(caplog):
    everything, held_out = sums(low=1, high=20, num_rows=400, seed=0), sums(low=1, high=20, num_rows=50, seed=9)
    with caplog.at_level("INFO", logger="lockstep"):
        train = split_rows(everything, held_out, "prompt")
    unseen = [operands(row) for row in held_out]
    assert train == [row for row in everything if operands(row) not in unseen]
    assert f"{400 - len(train)} of 400 training rows removed" in caplog.text
    assert 50 < 400 - len(train) <= 100


def test_order_matters_where_it_changes_the_problem():
    train = [{"prompt": "4 - 3"}, {"prompt": "3 + 4"}]
    made = sums(low=3, high=4, operators=["-"], num_rows=4)
    by_prompt = {row["prompt"]: row for row in made}
    assert split_rows([by_prompt["4 - 3"]], [by_prompt["3 - 4"]], "prompt") == [by_prompt["4 - 3"]]
    assert split_rows(train, [by_prompt["4 - 3"]], "prompt") == [train[1]]


def test_questions_are_compared_as_text_whatever_the_column_or_form():
    train = [{"q": "What is\n 1 + 2?"}, {"q": [{"role": "user", "content": "2 + 2?"}]}, {"q": "3 + 3?"}]
    held_out = [{"question": "What is 1 + 2?"}, {"question": "2 + 2?"}]
    assert split_rows(train, held_out, "q", eval_column="question") == train[2:]


def test_nothing_held_out_keeps_everything():
    assert split_rows([{"prompt": "1"}], [], "prompt") == [{"prompt": "1"}]


def test_nothing_left_to_train_on_is_an_error():
    with pytest.raises(DataError, match="all 1 training rows are also in the held-out data"):
        split_rows([{"prompt": "1"}], [{"prompt": "1"}], "prompt")
