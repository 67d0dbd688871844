"""An environment to copy from: a sum, and for a wrong answer a hint and another try.

lockstep makes one instance per sample with the recipe's `args`, calls `reset` with the row of the data, then `step` with every
reply of the policy, and `close` if there is one. Each of them may be `async def`.
"""

import re

from lockstep.environments import Environment, Reply, Turn


class Hints(Environment):
    """Pays 1 for the right number at once, less for every hint that it took."""

    def __init__(self, price: float = 0.3):
        self.price = price

    def reset(self, row):
        self.answer = int(row["answer"])

    def step(self, reply: Reply) -> Turn:
        numbers = re.findall(r"\d+", reply.text)
        guess = int(numbers[-1]) if numbers else None
        if guess == self.answer:
            return Turn(reward=max(1 - self.price * reply.turn, 0), done=True, info={"guess": guess})
        if guess is None:
            hint = "That is no number. What is the number?"
        else:
            hint = f"{guess} is too {'small' if guess < self.answer else 'large'}. Try again."
        return Turn([{"role": "user", "content": hint}], info={"guess": guess})
