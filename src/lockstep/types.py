"""The frozen values that cross layers. Nothing here computes; nothing here imports another lockstep module.

Glossary: *slot* a prompt's place in the step's global batch (0 .. prompts_per_step - 1), the same for any world size ·
*group* the samples of one slot · *sample* prompt + completion + logprobs + version · *policy version* the number of
train steps behind the weights (each of one or more optimizer steps, and one sync).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, ready to be sampled from."""

    uid: str
    """Stable name of the row it came from, e.g. "train-17"."""
    ids: tuple[int, ...]
    """Token ids with the chat template applied; generation starts right after the last one."""
    text: str
    """The text that `ids` encodes, for people and for the sample log."""
    answer: str
    """The reference answer, as text; empty where the data has none."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The data set's row, all columns, for reward functions that need more than the answer."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling distribution, complete: nothing is back-filled from a checkpoint's generation_config."""

    temperature: float = 1.0
    """Logits are divided by it. 0 means greedy; logprobs are then those at temperature 1."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    max_new_tokens: int = 64
    """Upper bound on the completion's length in tokens, the EOS token included."""
    eos_ids: tuple[int, ...] = ()
    """A completion ends with (and includes) the first of these."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Names the random numbers of one `generate` call: row (slot, sample index) of `step` and turn always draws the same."""

    seed: int
    step: int
    first_slot: int = 0
    """Slot of the call's first prompt; prompt i has slot `first_slot + i`."""
    turn: int = 0
    """Which of its samples' turns is drawn: the numbers of a sample's turns have nothing to do with each other."""
    rows: tuple[tuple[int, int], ...] = ()
    """(slot, sample index) of the one sample wanted of each prompt, where only some samples go on; empty: `first_slot` says."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What a sample of several turns is, besides its tokens."""

    messages: tuple[Mapping[str, Any], ...]
    """What was said after the prompt, by the policy (role "assistant") and by the environment."""
    rewards: tuple[float, ...]
    """The environment's, one per turn of the policy."""
    ended: Literal["done", "max_turns", "cut", "room"]
    """By whom: the environment; the recipe's limit of turns; a reply cut at max_new_tokens; no room for one more turn."""
    info: tuple[Mapping[str, Any], ...] = ()
    """What the environment noted, one per turn."""

    @property
    def reply(self) -> str:
        """The policy's last."""
        return str(self.messages[-1]["content"])


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion, exactly as it was sampled: a reply, or (see `episode`) the turns of an episode behind each other."""

    prompt: Prompt
    slot: int
    """The prompt's place in the step's global batch; samples of one slot are one group."""
    index: int
    """Which of the group's samples this is, 0 .. group_size - 1."""
    ids: tuple[int, ...]
    """Completion token ids as sampled (never re-tokenised), EOS included where one was drawn."""
    logprobs: tuple[float, ...]
    """One per id: log-probability of that token under the sampling distribution (temperature, top-k, top-p)."""
    text: str
    """`ids` decoded without special tokens."""
    finish: Literal["stop", "length"]
    """"stop": an EOS token ended it; "length": cut at max_new_tokens, or an episode that had no room to go on."""
    policy_version: int
    """Version of the weights that sampled it."""
    loss_mask: tuple[bool, ...] | None = None
    """One per id: did the policy sample it, or is it an observation that was put behind a turn? None: all sampled.
    What `logprobs` holds for an observation means nothing."""
    episode: Episode | None = None
    """Where an environment answered; None: the sample is one reply."""

    @property
    def num_sampled(self) -> int:
        """Ids that the policy sampled."""
        return len(self.ids) if self.loss_mask is None else sum(self.loss_mask)


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample and what the reward functions said of it."""

    sample: Sample
    reward: float
    """Weighted sum of `parts`."""
    parts: Mapping[str, float]
    """Unweighted value of each reward function, by name."""


@dataclass(frozen=True, slots=True)
class TrainItem:
    """What the actor update needs of one sample."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    advantage: float
    group: int
    """Items of one group share `prompt_ids`."""
    token_advantages: tuple[float, ...] | None = None
    """One per id, where tokens of a sample differ; None: each has `advantage`."""
    loss_mask: tuple[bool, ...] | None = None
    """One per id: is it trained on? The others (observations) are read by the model and count nowhere, whatever the
    tuples above hold for them. None: all are trained on."""

    @property
    def num_sampled(self) -> int:
        """Ids that are trained on."""
        return len(self.ids) if self.loss_mask is None else sum(self.loss_mask)


@dataclass(frozen=True, slots=True)
class Stat:
    """A metric as sum and count, so that it can be added over micro-batches and ranks before the division."""

    total: float
    count: float

    def __add__(self, other: Stat) -> Stat:
        return Stat(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one tensor on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize


WeightKind = Literal["adapter", "merged", "full"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an update is going to carry: sent with `begin`, checked by the receiver at `commit`."""

    version: int
    """Policy version of the weights."""
    kind: WeightKind
    specs: tuple[TensorSpec, ...]
    adapter_config: Mapping[str, Any] | None = None
    """PEFT's own configuration as a JSON-able mapping, for kind "adapter"."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A few whole tensors under their checkpoint names. They own their memory: nothing in it changes later."""

    tensors: tuple[tuple[str, torch.Tensor], ...]

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)
