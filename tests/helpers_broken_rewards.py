"""Reward functions that do what they should not."""

import os


def raises(completion: str, answer: str) -> float:
    raise ZeroDivisionError("41 bananas")


def returns_nan(completion: str, answer: str) -> float:
    return float("nan")


def raises_on_rank_one(completion: str, answer: str) -> float:
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("41 bananas")
    return 0.0
