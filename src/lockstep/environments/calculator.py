"""A line `calc: 1234 + 5678` in a reply in, the result as a tool's message out; any other reply ends the episode.

The environment `calculator` of a recipe, and the example of how little one needs: what a tool does, and when it is over.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from lockstep.environments.base import Environment, Message, Reply, Turn

_CALL = re.compile(r"^\s*calc:([^=\n]*)", re.MULTILINE)
"""What is to be computed ends with the line, or with the answer that a model has made up itself behind a =."""
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_LONGEST = 80
"""Characters of an expression: long enough for a few numbers, too short to keep the machine busy."""
_EXAMPLES = (("2031 + 4510", "6541"), ("783 + 1648", "2431"), ("5207 + 3966", "9173"))


class Calculator(Environment):
    """Counts what the policy asks it to, as often as the recipe's `max_turns` allows.

    `call_reward`: for an episode's first call that can be computed; right or useful, that is for the recipe's rewards to say.
    `shots`: so many worked conversations, up to three, are put before the row's question, for a model that has never seen a
    calculator. `instruction` comes before each question, `role` is whose message a result is.
    """

    def __init__(
        self,
        call_reward: float = 0.0,
        shots: int = 0,
        instruction: str = "What is {prompt}?",
        role: str = "tool",
        column: str = "prompt",
    ):
        if not 0 <= shots <= len(_EXAMPLES):
            raise ValueError(f"shots: expected 0 to {len(_EXAMPLES)}; {shots} came")
        self._call_reward, self._shots, self._role = call_reward, shots, role
        self._instruction, self._column = instruction, column
        self._has_called = False

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        if not self._shots:
            return None
        opening = [message for example in _EXAMPLES[: self._shots] for message in self._worked(*example)]
        return [*opening, self._question(str(row[self._column]))]

    def step(self, reply: Reply) -> Turn:
        calls = _CALL.findall(reply.text)
        if not calls:
            return Turn(done=True)
        result = compute(calls[-1])
        is_first = result is not None and not self._has_called
        self._has_called = self._has_called or is_first
        said = "cannot compute this" if result is None else result
        return Turn([{"role": self._role, "content": said}], reward=self._call_reward * is_first)

    def _question(self, problem: str) -> Message:
        return {"role": "user", "content": self._instruction.replace("{prompt}", problem)}

    def _worked(self, problem: str, result: str) -> list[Message]:
        return [
            self._question(problem),
            {"role": "assistant", "content": f"calc: {problem}"},
            {"role": self._role, "content": result},
            {"role": "assistant", "content": f"{problem} = {result}"},
        ]


def compute(expression: str) -> str | None:
    """The value of + - * / and brackets over numbers; None for anything else, and for fractions beyond what a float holds. Exact,
    but for a last rounding of fractions."""
    if len(expression) > _LONGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's remarks on what a policy writes, such as 3if
            value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"
    except (
        SyntaxError,
        ValueError,
        ArithmeticError,
        RecursionError,
    ):  # a policy writes what it likes, and its run goes on
        return None


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("not a sum of numbers")
