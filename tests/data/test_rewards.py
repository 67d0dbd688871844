"""Reward functions of one's own: how they are found and called, and what each way of going wrong is told as."""

import asyncio
import functools
import math
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch

from helpers_data import sample_of
from lockstep.config import RewardConfig
from lockstep.data.reward_calls import resolve_reward
from lockstep.data.rewards import RewardSet
from lockstep.errors import ConfigError, RewardError
from lockstep.types import ScoredSample

SAMPLES = [sample_of(text, index=index) for index, text in enumerate(["64", "no", "12"])]
HERE = "test_rewards"  # this file, as a module that pytest has imported


def score(function, samples=SAMPLES, **options):
    return RewardSet([RewardConfig(name=f"{HERE}:{function}", **options)]).score(samples)


def parts(function, **options):
    return [next(iter(scored.parts.values())) for scored in score(function, **options)]


# Ways to write one


def per_sample(completion, answer):
    return len(completion) / len(answer)


async def per_sample_async(completion, answer):
    await asyncio.sleep(0.2)
    return float(completion == answer)


def batched(completions, answers, prompts, samples):
    assert prompts == ["23 + 41"] * 3
    return [s.index + (c == a) for c, a, s in zip(completions, answers, samples, strict=True)]


async def batched_async(completions):
    await asyncio.sleep(0)
    return [len(text) for text in completions]


def takes_everything(completion, **everything):
    return sorted(everything) == ["answer", "prompt", "sample"]


def with_args(completion, *, low, high=3):
    return low <= len(completion) <= high


def as_array(completions):
    return numpy.arange(len(completions), dtype=numpy.float32)


def as_tensor(completions):
    return torch.arange(len(completions), dtype=torch.bfloat16)


def as_scalar(completion):
    return torch.tensor(2.0) if completion == "64" else numpy.float32(3.0)


def calls_asyncio_itself(completion):
    return asyncio.run(per_sample_async(completion, "64"))


class Judge:
    async def __call__(self, completion, answer):
        return 0.5


judge = Judge()
partial = functools.partial(with_args, low=2)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("per_sample", [1, 1, 1]),
        ("per_sample_async", [1, 0, 0]),
        ("batched", [1, 1, 2]),
        ("batched_async", [2, 2, 2]),
        ("takes_everything", [1, 1, 1]),
        ("as_array", [0, 1, 2]),
        ("as_tensor", [0, 1, 2]),
        ("as_scalar", [2, 3, 3]),
        ("calls_asyncio_itself", [1, 0, 0]),
        ("judge", [0.5, 0.5, 0.5]),
        ("partial", [1, 1, 1]),
    ],
)
def test_every_way_to_write_a_reward(function, expected):
    values = parts(function)
    assert values == expected
    assert all(type(value) is float for value in values)


def test_args_reach_the_function():
    assert parts("with_args", args={"low": 3}) == [0, 0, 0]


def test_async_rewards_wait_at_the_same_time():
    begin = time.monotonic()
    parts("per_sample_async")
    assert time.monotonic() - begin < 0.5  # one after the other: 0.6


def test_several_rewards_are_weighted_and_kept_apart():
    configs = [
        RewardConfig(name="exact_match", weight=2),
        RewardConfig(name="format_number", weight=-0.5),
        RewardConfig(name="exact_match", weight=1),
    ]
    rewards = RewardSet(configs)
    assert rewards.labels == ("exact_match", "format_number", "exact_match#2")
    first = rewards.score(SAMPLES)[0]
    assert first == ScoredSample(SAMPLES[0], 2.5, {"exact_match": 1, "format_number": 1, "exact_match#2": 1})
    assert [scored.reward for scored in rewards.score(SAMPLES)] == [2.5, 0, -0.5]


def test_a_reward_that_changes_the_folder_does_not_move_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parts("goes_elsewhere") == [1, 1, 1]
    (tmp_path / "my_rewards_3.py").write_text("import os\nos.chdir('/')\ndef one(completion):\n    return 1.0\n")
    RewardSet([RewardConfig(name="my_rewards_3.py:one")])
    assert Path.cwd() == tmp_path


def test_a_sum_that_overflows_shows_the_sample():
    rewards = RewardSet(
        [RewardConfig(name="exact_match", weight=1e308), RewardConfig(name="exact_match", weight=1e308)]
    )
    with pytest.raises(RewardError, match=r"(?s)weighted sum of the rewards is inf.*completion 0: '64'"):
        rewards.score(SAMPLES)


def test_no_samples_is_no_call():
    assert score("raises", samples=[]) == []


# Ways to go wrong


def raises(completion):
    return 1 / (completion != "no")


async def raises_async(completion):
    if completion == "no":
        raise KeyError("judge")
    await asyncio.sleep(1000)


def raises_batched(completions):
    raise OSError("disk")


def ends_the_process(completion):
    sys.exit(0)


async def ends_the_process_async(completion):
    sys.exit(0)


def goes_elsewhere(completion):
    os.chdir("/")
    return 1.0


@pytest.mark.parametrize(
    ("function", "said", "completion"),
    [
        ("raises", "raised ZeroDivisionError: division by zero", "no"),
        ("raises_async", "raised KeyError: 'judge'", "no"),
        ("raises_batched", "raised OSError: disk; in a batch of 3 samples", "64"),
        ("ends_the_process", "raised SystemExit: 0", "64"),
        ("ends_the_process_async", "raised SystemExit: 0", "64"),
    ],
)
def test_a_reward_that_raises_shows_the_sample_and_where_it_raised(function, said, completion):
    with pytest.raises(RewardError) as caught:
        score(function)
    assert said in str(caught.value)
    assert f"reward '{HERE}:{function}'" in str(caught.value)
    assert f"prompt train-7: '23 + 41'\n  completion {0 if completion == '64' else 1}: '{completion}'" in str(
        caught.value
    )
    assert "answer: '64'" in str(caught.value)
    names = [entry.name for entry in _traceback(caught.value.__cause__)]
    assert function in names


def _traceback(error):
    return pytest.ExceptionInfo.from_exception(error).traceback


def returns(what):
    return lambda completion: what if completion == "no" else 1.0


returns_none, returns_nan, returns_inf = returns(None), returns(math.nan), returns(-math.inf)
returns_text, returns_complex, returns_huge = returns("1.0"), returns(1j), returns(10**400)
returns_list = returns([1.0])


@pytest.mark.parametrize(
    ("function", "came"),
    [
        ("returns_none", r"None \(NoneType\) came"),
        ("returns_nan", r"nan \(float\) came"),
        ("returns_inf", r"-inf \(float\) came"),
        ("returns_text", r"'1.0' \(str\) came"),
        ("returns_complex", r"1j \(complex\) came"),
        ("returns_huge", r"10{100}"),
        ("returns_list", r"\[1.0\] \(list\) came"),
    ],
)
def test_what_is_no_finite_number_is_refused_and_shows_the_sample(function, came):
    with pytest.raises(RewardError, match=rf"expected one finite number; {came}[\s\S]*completion 1: 'no'"):
        score(function)


def too_few(completions):
    return [1.0] * (len(completions) - 1)


def no_list(completions):
    return None


def one_number(completions):
    return torch.tensor(1.5)


def one_is_none(completions):
    return [1.0, None, 1.0]


def generator(completions):
    return (1.0 for _ in completions)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("too_few", r"expected 3 numbers, one per completion; 2 came[\s\S]*completion 0: '64'"),
        ("no_list", r"expected a list of 3 numbers, one per completion; None came[\s\S]*completion 0: '64'"),
        ("one_number", r"expected a list of 3 numbers, one per completion; 1.5 came"),
        ("generator", r"a generator came"),
        ("one_is_none", r"expected one finite number; None[\s\S]*completion 1: 'no'"),
    ],
)
def test_a_batch_needs_one_number_for_each_sample(function, said):
    with pytest.raises(RewardError, match=said):
        score(function)


def hangs_asleep(completion):
    if completion == "no":
        time.sleep(1000)
    return 1.0


def hangs_busy(completion):
    while completion == "no":
        try:
            math.sqrt(2)
        except Exception:
            continue
    return 1.0


def hangs_in_a_regular_expression(completion):
    return completion != "no" or re.match(r"(a|aa)+$", "a" * 70 + "b")


async def hangs_async(completion):
    await asyncio.sleep(1000 if completion == "no" else 0)
    return 1.0


async def hangs_async_and_blocks(completion):
    return hangs_asleep(completion)


def hangs_batched(completions):
    threading.Event().wait()


async def hangs_async_on_cancel(completion):
    """One call fails while another refuses to be cancelled: the failure must not wait for it."""
    if completion == "no":
        raise KeyError("judge")
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize(
    ("function", "completion"),
    [
        ("hangs_asleep", "no"),
        ("hangs_busy", "no"),
        ("hangs_in_a_regular_expression", "no"),
        ("hangs_async", "no"),
        ("hangs_async_and_blocks", "no"),
        ("hangs_batched", "64"),
    ],
)
def test_a_reward_that_hangs_is_left_and_shows_the_sample(function, completion):
    begin = time.monotonic()
    with pytest.raises(RewardError) as caught:
        score(function, timeout_s=0.3)
    assert time.monotonic() - begin < 2
    assert f"reward '{HERE}:{function}' took longer than its limit of 0.3 s for 3 samples" in str(caught.value)
    assert f"completion {0 if completion == '64' else 1}: '{completion}'" in str(caught.value)


@pytest.mark.parametrize("function", ["hangs_asleep", "hangs_async"])
def test_the_limit_holds_off_the_main_thread(function):
    caught = []

    def work():
        try:
            score(function, timeout_s=0.3)
        except RewardError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert "completion 1: 'no'" in caught[0]


def test_rewards_work_off_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.extend(parts("batched") + parts("per_sample_async")))
    thread.start()
    thread.join(timeout=5)
    assert results == [1, 1, 2, 1, 0, 0]


def test_the_limit_is_for_the_whole_batch():
    with pytest.raises(RewardError, match="completion 2: '12'"):
        score("slow", timeout_s=0.5)


def slow(completion):
    time.sleep(0.2)
    return 1.0


def test_a_failure_does_not_wait_for_what_cannot_be_cancelled():
    with pytest.raises(RewardError, match="raised KeyError"):
        score("hangs_async_on_cancel", timeout_s=5)


def test_the_alarm_that_was_set_before_is_set_again():
    fired = []
    old_handler = signal.signal(signal.SIGALRM, lambda *_: fired.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 50.0)
        with pytest.raises(RewardError):
            score("hangs_asleep", timeout_s=0.1)
        parts("per_sample")
        remaining_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        assert 40 < remaining_s <= 50
        signal.raise_signal(signal.SIGALRM)
        assert fired == [True]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)


def test_an_alarm_inside_a_reward_does_not_lift_the_limit():
    """The second call hangs after switching its own alarm off; the third would hang too. The limit is set anew for each."""
    old_handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(RewardError, match="took longer"):
        score("alarms_then_hangs", timeout_s=0.5)
    assert signal.getsignal(signal.SIGALRM) == old_handler


def alarms_then_hangs(completion):
    if completion == "64":
        signal.alarm(0)
        return 1.0
    return hangs_asleep("no")


def test_long_texts_are_cut_in_messages():
    with pytest.raises(RewardError, match=r"a\.\.\. \(4402 more characters\)"):
        score("raises_batched", samples=[sample_of("a" * 5000)])


# Ways not to be found


def not_a_reward(text):
    return 1.0


def both(completion, completions):
    return 1.0


def needs_more(completion, judge_url):
    return 1.0


NUMBER = 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "exact_mach"}, r"unknown name 'exact_mach'; did you mean 'exact_match'\?"),
        ({"name": "zzz"}, "known are exact_match, last_number"),
        ({"name": "no_such_module_here:f"}, "no module 'no_such_module_here', neither installed nor in"),
        ({"name": "json.no_such_part:f"}, r"no module 'json\.no_such_part'"),
        ({"name": "no/such/file.py:f"}, "the file 'no/such/file.py' does not exist"),
        ({"name": f"{HERE}:per_sampel"}, "has no function 'per_sampel'; the nearest is 'per_sample'"),
        ({"name": f"{HERE}:NUMBER"}, "NUMBER is a int, not a function"),
        ({"name": f"{HERE}:not_a_reward"}, r"expected a function with a parameter `completion`.*not_a_reward\(text\)"),
        ({"name": f"{HERE}:both"}, "expected a function with a parameter `completion`"),
        ({"name": f"{HERE}:needs_more"}, "missing a required argument: 'judge_url'; set `args`"),
        (
            {"name": f"{HERE}:with_args", "args": {"low": 1, "hihg": 2}},
            "unknown args key 'hihg'; the nearest is 'high'",
        ),
        ({"name": "exact_match", "args": {"strict": 1}}, "unknown args key 'strict'; it takes none"),
        ({"name": "exact_match", "args": {"answer": "1"}}, "args must not hold 'answer'"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_when_the_set_is_made(options, said):
    with pytest.raises(ConfigError, match=said):
        RewardSet([RewardConfig(**options)])


def test_a_file_is_found_by_its_path_and_a_module_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_1.py").write_text("def short(completion):\n    return 1 / (1 + len(completion))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nonexistent", *filter(None, sys.path)])
    for name in ("my_rewards_1.py:short", str(tmp_path / "my_rewards_1.py:short"), "my_rewards_1:short"):
        scored = RewardSet([RewardConfig(name=name)]).score(SAMPLES[:1])
        assert scored[0].parts == {name: pytest.approx(1 / 3)}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_package_here\n", "No module named 'no_such_package_here'"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def broken(:\n", "SyntaxError"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    ],
)
def test_a_file_that_does_not_import_says_why(tmp_path, monkeypatch, code, said):
    (tmp_path / "my_rewards_2.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{tmp_path}/my_rewards_2.py:f", "my_rewards_2:f"):
        with pytest.raises(ConfigError, match=r"(?s)my_rewards_2.*failed.*" + re.escape(said)):
            resolve_reward(RewardConfig(name=name))


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"reward 'math_verify' needs the package math_verify.*lockstep-rl\[demo\]"):
        RewardSet([RewardConfig(name="math_verify")])
