"""The name and arguments of a task in, rows with a question and its answer out; and the split that keeps them apart.

`sums` makes arithmetic problems; `reasoning-gym:NAME` is any data set of the reasoning_gym package
(https://github.com/open-thought/reasoning-gym). All rows have the columns "prompt" and "answer".
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, ValidationError

from lockstep.config import DataSource, Section
from lockstep.data.extras import import_extra
from lockstep.errors import DataError

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

DEFAULT_NUM_ROWS = 1024
REASONING_GYM = "reasoning-gym:"
SAME_PROBLEM = "same_problem"
"""Column that two rows share when they ask the same in other words, such as 3 + 4 and 4 + 3."""
_GYM_SEED_STRIDE = 1_000_000


class SumsArgs(Section):
    """`task_args` of the task `sums`."""

    low: StrictInt = Field(description="smallest number in a problem")
    high: StrictInt = Field(description="largest number in a problem")
    terms: Annotated[StrictInt, Field(ge=2)] = Field(default=2, description="how many numbers a problem has")
    operators: Annotated[tuple[Literal["+", "-", "*"], ...], Field(min_length=1)] = Field(
        default=("+",), description="what may stand between two numbers; * binds tighter than + and -"
    )


def make_rows(source: DataSource, *, origin: str) -> list[Row]:
    """Rows of a named task: the same for the same name, arguments, `num_rows` and seed.

    Raises `DataError` for an unknown task or argument, and where more problems are asked for than exist; `ConfigError`
    where the task's package is not installed.
    """
    if source.task == "sums":
        return _sums(_sums_args(source, origin), source, origin)
    if source.task.startswith(REASONING_GYM):
        return _reasoning_gym(source, origin)
    known = ["sums", f"{REASONING_GYM}NAME"]
    near = difflib.get_close_matches(source.task, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {' and '.join(known)}"
    raise DataError(f"{origin}.task: unknown task {source.task!r}; {hint}")


def split_rows(
    train_rows: Sequence[Row], eval_rows: Sequence[Row], prompt_column: str, *, eval_column: str | None = None
) -> list[Row]:
    """The training rows without any whose question is also in the held-out rows, in order; says how many left.

    Questions are compared as text, without regard to white space; rows of `sums` also as problems, so that 4 + 3 is not
    trained on where 3 + 4 is held out. `eval_column` is the held-out data's prompt column where it has another name.
    Raises `DataError` where no row is left.
    """
    held_out: set[str] = set()
    for row in eval_rows:
        held_out |= _identities(row, eval_column or prompt_column)
    kept = [row for row in train_rows if held_out.isdisjoint(_identities(row, prompt_column))]
    if not kept:
        raise DataError(
            f"all {len(train_rows)} training rows are also in the held-out data; nothing is left to train on. Give data.train "
            "and data.eval different rows"
        )
    if len(kept) < len(train_rows):
        removed = len(train_rows) - len(kept)
        logger.info("%d of %d training rows removed: they are also in the held-out data", removed, len(train_rows))
    return kept


def _identities(row: Row, prompt_column: str) -> set[str]:
    question = row[prompt_column]
    if isinstance(question, list):
        question = "\n".join(str(message["content"]) for message in question if message["role"] != "system")
    identities = {" ".join(str(question).split())}
    return identities | {row[SAME_PROBLEM]} if SAME_PROBLEM in row else identities


def _sums_args(source: DataSource, origin: str) -> SumsArgs:
    try:
        args = SumsArgs.model_validate(source.task_args)
    except ValidationError as error:
        raise DataError(f"{origin}.task_args: " + "; ".join(_say(item) for item in error.errors())) from error
    if args.low > args.high:
        raise DataError(f"{origin}.task_args: low must not be above high; low {args.low}, high {args.high} came")
    return args


def _say(item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return f"{name!r} is required and missing"
    if item["type"] == "extra_forbidden":
        return f"unknown argument {name!r}; sums takes {', '.join(SumsArgs.model_fields)}"
    return f"{name}: {item['msg'][0].lower()}{item['msg'][1:]}; {item['input']!r} came"


def _sums(args: SumsArgs, source: DataSource, origin: str) -> list[Row]:
    operators = tuple(dict.fromkeys(args.operators))
    num_problems = (args.high - args.low + 1) ** args.terms * len(operators) ** (args.terms - 1)
    if num_problems > sys.maxsize:
        raise DataError(f"{origin}.task_args: {num_problems:.2e} different problems are too many; narrow low and high")
    num_rows = min(DEFAULT_NUM_ROWS, num_problems) if source.num_rows is None else source.num_rows
    if num_rows > num_problems:
        raise DataError(
            f"{origin}.num_rows: {num_rows} rows are asked for, but sums of {args.terms} numbers from {args.low} to "
            f"{args.high} with {' '.join(operators)} make only {num_problems} different problems; "
            "lower num_rows or widen low and high"
        )
    numbers = random.Random(source.seed).sample(range(num_problems), num_rows)
    return [_sum_row(number, args, operators) for number in numbers]


def _sum_row(number: int, args: SumsArgs, operators: Sequence[str]) -> Row:
    """The problem with this number: its operands and operators are the number's digits in a mixed base."""
    operands, between = [], []
    for place in range(args.terms):
        number, digit = divmod(number, args.high - args.low + 1)
        operands.append(args.low + digit)
        if place:
            number, digit = divmod(number, len(operators))
            between.append(operators[digit])
    words = [_written(operands[0])]
    for operator, operand in zip(between, operands[1:], strict=True):
        words += [operator, _written(operand)]
    products = _products(operands, between)
    answer = sum(sign * math.prod(factors) for sign, factors in products)
    return {"prompt": " ".join(words), "answer": str(answer), SAME_PROBLEM: f"sums {sorted(products)}"}


def _written(operand: int) -> str:
    return str(operand) if operand >= 0 else f"({operand})"


def _products(operands: Sequence[int], between: Sequence[str]) -> list[tuple[int, list[int]]]:
    """The problem as a sum of signed products, factors sorted: 2 - 4 * 3 is [(1, [2]), (-1, [3, 4])]."""
    products = [(1, [operands[0]])]
    for operator, operand in zip(between, operands[1:], strict=True):
        if operator == "*":
            products[-1][1].append(operand)
        else:
            products.append((1 if operator == "+" else -1, [operand]))
    return [(sign, sorted(factors)) for sign, factors in products]


def _reasoning_gym(source: DataSource, origin: str) -> list[Row]:
    """Rows {"prompt", "answer", "entry"}; the reward `reasoning_gym` scores with the whole entry.

    reasoning_gym seeds row i with seed + i, so neighbouring seeds would share rows: ours are spread a million apart.
    """
    name = source.task.removeprefix(REASONING_GYM)
    factory = import_extra("reasoning_gym", needed_by=f"{origin}.task {source.task!r}").factory
    if name not in factory.DATASETS:
        near = difflib.get_close_matches(name, factory.DATASETS, n=3, cutoff=0.4) or sorted(factory.DATASETS)
        raise DataError(f"{origin}.task: reasoning_gym has no data set {name!r}; the nearest are {', '.join(near)}")
    options = {field.name for field in dataclasses.fields(factory.DATASETS[name][1])} - {"seed", "size"}
    unknown = sorted(set(source.task_args) - options)
    if unknown:
        raise DataError(
            f"{origin}.task_args: {source.task} does not take {', '.join(unknown)}; it takes {', '.join(sorted(options))} "
            "(size is num_rows, seed is seed)"
        )
    size = source.num_rows or DEFAULT_NUM_ROWS
    try:
        entries = factory.create_dataset(name, size=size, seed=source.seed * _GYM_SEED_STRIDE, **source.task_args)
        return [_gym_row(entries[index]) for index in range(size)]
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"{origin}.task_args: {source.task} refuses {dict(source.task_args)}: {error}") from error


def _gym_row(entry: Mapping[str, Any]) -> Row:
    answer = entry["answer"]
    return {"prompt": entry["question"], "answer": "" if answer is None else str(answer), "entry": entry}
