"""Two reward functions to copy from: one is called for each sample, the other with the whole batch.

lockstep tells them apart by their parameters: `completion` means per sample, `completions` means batched. Either may be
`async def` too, for example to ask a judge over the network.
"""

import re


def close(completion: str, answer: str) -> float:
    """1 for the right number, less the further the completion's first number is off, 0 where there is none."""
    numbers = re.findall(r"\d+", completion.replace(",", ""))
    if not numbers:
        return 0.0
    expected = float(answer)
    return max(0.0, 1.0 - abs(float(numbers[0]) - expected) / expected)


def brief(completions: list[str], *, max_words: int) -> list[float]:
    """1 for each completion of at most `max_words` words; the recipe sets `max_words` under `args`."""
    return [float(0 < len(text.split()) <= max_words) for text in completions]
