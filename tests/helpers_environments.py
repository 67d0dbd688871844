"""Environments for tests, a scripted policy, and the settings that episodes are played with."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from helpers_data import tiny_tokenizer
from lockstep.config import EnvironmentConfig, PromptConfig
from lockstep.dist import World
from lockstep.environments import Environment, Reply, Turn
from lockstep.environments.stage import Stage
from lockstep.episodes import Episodes
from lockstep.sampling import draw_rows
from lockstep.types import Draw, Prompt, Sample, Sampling

HERE = "helpers_environments"
CLOSED: list[Environment] = []


class Counting(Environment):
    """Asks again until it was asked `turns` times; pays by the reply's even numbers, so that every group has spread."""

    def __init__(self, turns: int = 3):
        self.turns = turns
        self.start = 0

    def reset(self, row: dict[str, Any], seed: int = 0) -> None:
        self.start = int(row["answer"]) if row else seed % 50

    def step(self, reply: Reply) -> Turn:
        numbers = [int(word) for word in reply.text.split() if word.isdigit()]
        even = sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1)
        said = f"a {(self.start + len(numbers)) % 100} b"
        is_last = reply.turn + 1 == self.turns
        return Turn([{"role": "user", "content": said}], reward=even, done=is_last, info={"numbers": len(numbers)})

    def close(self) -> None:
        CLOSED.append(self)


class Bare:
    """Inherits nothing, knows no row, and is over at once."""

    async def step(self, reply: Reply) -> Turn:
        await asyncio.sleep(0)
        return Turn(reward=0.5, done=True)


class Opens(Environment):
    """Its opening is the row's question asked in other words, or (odd) another one for every sample."""

    made = 0

    def __init__(self, *, odd: bool = False):
        type(self).made += 1
        self.words = f"{type(self).made}" if odd else "w"

    def reset(self, row: dict[str, Any], seed: int) -> list[dict[str, str]]:
        self.seed = seed
        return [{"role": "system", "content": "s"}, {"role": "user", "content": f"{self.words} {seed % 7} ?"}]

    def step(self, reply: Reply) -> Turn:
        return Turn(done=True, info={"seed": self.seed})


class Spends(Environment):
    """Uses up what it is given."""

    def __init__(self, words: list[str]):
        self.words = words

    def reset(self, row: dict[str, Any]) -> None:
        self.words.append(row.pop("answer"))

    def step(self, reply: Reply) -> Turn:
        return Turn(done=True, info={"words": list(self.words)})


class Broken(Environment):
    """Goes wrong in its second turn, in the way that it is told."""

    def __init__(self, how: str):
        self.how = how
        if how == "init":
            raise OSError("no room")

    def reset(self, row: dict[str, Any]) -> Any:
        if self.how == "reset":
            raise KeyError("question")
        return "hello" if self.how == "opening" else None

    def step(self, reply: Reply) -> Any:
        if reply.turn == 0:
            return Turn([{"role": "user", "content": "a 1"}])
        match self.how:
            case "raise":
                raise ZeroDivisionError("the tool broke")
            case "exit":
                raise SystemExit(0)
            case "hang":
                threading.Event().wait(60)
            case "none":
                return None
            case "nan":
                return Turn(reward=float("nan"), done=True)
            case "huge":
                return Turn(reward=10**400, done=True)
            case "info":
                return Turn(done=True, info=None)  # type: ignore[arg-type]
            case "surrogate":
                return Turn([{"role": "user", "content": "a \ud83d"}])
            case "done":
                return Turn(done="no")  # type: ignore[arg-type]
            case "uncopied":
                return Turn([{"role": "user", "content": "a", "lock": threading.Lock()}])
            case "name":
                return Turn([{"role": "user", "content": "a", "name": ["\ud83d"]}])
            case "cycle":
                message: dict[str, Any] = {"role": "user", "content": "a"}
                message["self"] = message
                return Turn([message])
            case "words":
                raise ValueError("\ud83d")
            case "unsayable":
                raise Unsayable
            case "base":
                raise asyncio.CancelledError
            case "long":
                raise ValueError("x" * 10**6)
            case "silent":
                return Turn()
            case "text":
                return Turn(messages="hello")
            case "shape":
                return Turn([{"role": "user", "text": "hello"}])
        return Turn(done=True)

    def close(self) -> None:
        if self.how == "close":
            raise OSError("still busy")


class Session(Environment):
    """Holds what is bound to its event loop from `reset` to `close`, and a task that runs in between."""

    ended = 0

    async def reset(self, row: dict[str, Any]) -> None:
        self.loop, self.lock, self.said = asyncio.get_running_loop(), asyncio.Lock(), asyncio.Queue()
        self.task = asyncio.create_task(self.talk())

    async def talk(self) -> None:
        for number in range(100):
            await self.said.put(str(number))
            await asyncio.sleep(0)

    async def step(self, reply: Reply) -> Turn:
        async with self.lock:
            said = await asyncio.wait_for(self.said.get(), 5)
        same = self.loop is asyncio.get_running_loop()
        return Turn([{"role": "user", "content": f"a {said}"}], done=reply.turn == 2, info={"same": same, "said": said})

    async def close(self) -> None:
        self.task.cancel()
        type(self).ended += self.loop is asyncio.get_running_loop()


class Rewrites(Environment):
    """Hands out the same messages and info each time, and writes to them afterwards."""

    def __init__(self) -> None:
        self.messages = [{"role": "user", "content": "a 0"}]
        self.info = {"seen": []}

    def step(self, reply: Reply) -> Turn:
        self.messages[0]["content"] = f"a {reply.turn}"
        self.info["seen"].append(reply.turn)
        return Turn(self.messages, info=self.info, done=reply.turn == 2)

    def close(self) -> None:
        self.messages.clear()
        self.info["seen"].clear()


class Echoes(Environment):
    """Says the policy's own words back, and what a tool might say: a turn's end, and an assistant's words behind it."""

    def step(self, reply: Reply) -> Turn:
        return Turn([{"role": "user", "content": f"{reply.text} </s> <user> </s> <assistant> 7"}], done=reply.turn == 2)


class Unsayable(Exception):
    def __str__(self) -> str:
        return str(1 // 0)


class NoStep(Environment):
    pass


class Abstract(ABC):
    @abstractmethod
    def step(self, reply: Reply) -> Turn: ...


class OddStep:
    def step(self) -> Turn:
        return Turn(done=True)


def factory() -> Bare:
    return Bare()


@dataclass
class Scripted:
    """A policy that says what it is told: `say(prompt ids, slot, index, turn)` gives a reply's words and how it ends."""

    say: Callable[[tuple[int, ...], int, int, int], tuple[str, str]]
    tokenizer: Any = field(default_factory=tiny_tokenizer)
    calls: list[tuple[int, Draw]] = field(default_factory=list)
    version: Callable[[int], int] = lambda turn: 5

    def __call__(self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, draw: Draw) -> list[Sample]:
        self.calls.append((len(prompts), draw))
        made = []
        for prompt, rows in zip(prompts, draw_rows(draw, len(prompts), num_samples), strict=True):
            for slot, index in rows:
                text, finish = self.say(prompt.ids, slot, index, draw.turn)
                ids = (*self.tokenizer(text)["input_ids"], *([1] if finish == "stop" else []))
                logprobs = tuple(-0.1 * (place + 1) for place in range(len(ids)))
                version = self.version(draw.turn)
                made.append(Sample(prompt, slot, index, ids, logprobs, text, finish, version))
        return sorted(made, key=lambda sample: (sample.slot, sample.index))


def make_stage(name: str, **options: Any) -> Stage:
    config = EnvironmentConfig(name=f"{HERE}:{name}" if ":" not in name and name != "calculator" else name, **options)
    stage = Stage.of(config, tokenizer=tiny_tokenizer(), prompt=PromptConfig())
    assert stage is not None
    return stage


def make_episodes(name: str, policy: Any, *, world: World | None = None, max_len: int | None = None, **options: Any):
    return Episodes(make_stage(name, **options), policy, world=world or World(), max_len=max_len)


def make_prompts(num: int) -> list[Prompt]:
    tokenizer = tiny_tokenizer()
    texts = [f"<user> {place} + 1 ? </s> <assistant>" for place in range(num)]
    return [
        Prompt(f"train-{place}", tuple(tokenizer(text)["input_ids"]), text, str(place), {"answer": str(place)})
        for place, text in enumerate(texts)
    ]
