"""A completion and its reference answer in, a number out: the rewards that a recipe can name.

Each is an ordinary per-sample reward function, called as a user's own would be (see reward_calls.py).
"""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from lockstep.data.extras import import_extra
from lockstep.types import Sample

logger = logging.getLogger(__name__)

# A sign belongs to the number unless a digit or a bracket stands before it: "10-12" ends with 12, "= -12" with -12.
_NUMBER = re.compile(
    r"(?:(?<![0-9).\]])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)


def exact_match(completion: str, answer: str) -> float:
    """1 if completion and answer are the same text, white space at the ends aside."""
    return float(completion.strip() == answer.strip())


def last_number(completion: str, answer: str) -> float:
    """1 if the completion's last number equals the answer's last number: 64, 64.0 and "... #### 64" are the same.

    Thousands separators ("1,234") and exponents ("1e3") are read; "1/2" is two numbers. Raises `ValueError` where the
    answer has no number.
    """
    expected = _last_number(answer)
    if expected is None:
        raise ValueError(f"last_number needs a reference answer with a number in it; {answer!r} came")
    return float(_last_number(completion) == expected)


def format_number(completion: str, answer: str) -> float:
    """1 if the completion is one number and nothing else, white space at the ends aside; right or wrong."""
    return float(_NUMBER.fullmatch(_plain_minus(completion).strip()) is not None)


def format_regex(completion: str, *, pattern: str) -> float:
    """1 if the whole completion, white space at the ends aside, matches the regular expression `pattern`; right or wrong."""
    return float(re.fullmatch(pattern, completion.strip()) is not None)


def math_verify(completion: str, answer: str, *, limit_s: int = 2) -> float:
    """1 if the completion's last expression is mathematically equal to the answer (https://github.com/huggingface/Math-Verify).

    The answer may be plain ("1/2") or LaTeX. Reading or comparing that takes longer than `limit_s` whole seconds counts
    as 0; that limit is a signal, so it holds on the main thread only. Raises `ValueError` where the answer is no expression.
    """
    package = import_extra("math_verify", needed_by="reward 'math_verify'")
    seconds = limit_s if threading.current_thread() is threading.main_thread() else None
    expected = package.parse(answer, parsing_timeout=seconds)
    if not expected:
        raise ValueError(f"math_verify needs a reference answer that it can read as mathematics; {answer!r} came")
    given = package.parse(completion, parsing_timeout=seconds)
    return float(package.verify(expected, given, timeout_seconds=seconds))


def reasoning_gym(completion: str, sample: Sample, *, answer_tag: str = "answer") -> float:
    """The score, 0 to 1, that reasoning_gym gives the text between the last <answer> tags, or else the whole completion.

    An answer that the package's own scorer fails on scores 0. Raises `ValueError` where the prompt did not come from a reasoning-gym task.
    """
    package = import_extra("reasoning_gym", needed_by="reward 'reasoning_gym'")
    entry = sample.prompt.row.get("entry")
    if entry is None:
        raise ValueError("reasoning_gym scores rows of a task reasoning-gym:NAME; this prompt's row has no entry")
    score = _gym_score(entry["metadata"]["source_dataset"])
    tagged = package.utils.extract_answer(completion, tag_name=answer_tag)
    try:
        return float(score(completion.strip() if tagged is None else tagged, entry))
    except Exception as error:
        # Some scorers of reasoning_gym 0.1.25 (prime_factorization, game_of_life, boxnet) raise on an answer that they
        # cannot read. It is a wrong answer, and no reason to stop the run.
        logger.debug("reasoning_gym could not read %r for %s: %s", completion, sample.prompt.uid, error)
        return 0.0


def environment(completion: str, sample: Sample) -> float:
    """What the environment gave for the sample's turns, summed."""
    if sample.episode is None:
        raise ValueError("the reward environment needs samples that an environment answered; these have none")
    return math.fsum(sample.episode.rewards)


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward that a recipe can name."""

    function: Callable[..., Any]
    package: str = ""
    """Optional package that it needs; empty if none."""


NAMED_REWARDS = {
    "exact_match": NamedReward(exact_match),
    "last_number": NamedReward(last_number),
    "format_number": NamedReward(format_number),
    "format_regex": NamedReward(format_regex),
    "math_verify": NamedReward(math_verify, package="math_verify"),
    "reasoning_gym": NamedReward(reasoning_gym, package="reasoning_gym"),
    "environment": NamedReward(environment),
}


@functools.cache  # making the function builds the data set, which reads word lists
def _gym_score(dataset: str) -> Callable[[str, Any], float]:
    return import_extra("reasoning_gym", needed_by="reward 'reasoning_gym'").get_score_answer_fn(dataset)


def _plain_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(_plain_minus(text))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
