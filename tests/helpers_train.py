"""Items, adapters and an unsharded `ShardedModel` for the tests of packing and training."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.config import TrainConfig
from lockstep.dist import World
from lockstep.known_warnings import while_injecting
from lockstep.model.lora import reference_policy
from lockstep.train.optim import Optimizer
from lockstep.train.step import Actor
from lockstep.train.teacher import Teacher
from lockstep.types import Sampling, TrainItem

PLAIN = Sampling(max_new_tokens=16)


def make_items(
    num_groups: int, group_size: int, *, seed: int = 0, vocab: int = 64, longest: int = 9
) -> list[TrainItem]:
    """Ragged groups: prompts of 2 to 12 tokens, completions of 1 to `longest`, advantages of both signs."""
    draw = random.Random(seed)
    items = []
    for group in range(num_groups):
        prompt = tuple(draw.randrange(vocab) for _ in range(draw.randint(2, 12)))
        for _ in range(group_size):
            ids = tuple(draw.randrange(vocab) for _ in range(draw.randint(1, longest)))
            logprobs = tuple(-draw.uniform(2, 6) for _ in ids)
            items.append(TrainItem(prompt, ids, logprobs, draw.uniform(-1, 1), group))
    return items


def item(prompt: Sequence[int], ids: Sequence[int], *, group: int = 0, advantage: float = 1.0) -> TrainItem:
    return TrainItem(tuple(prompt), tuple(ids), (-1.0,) * len(ids), advantage, group)


@contextmanager
def known_peft_warnings() -> Iterator[None]:
    with while_injecting():
        # peft on tied embeddings: about merging and saving, which nothing here does.
        warnings.filterwarnings("ignore", "Model (with|has) `tie_word_embeddings=True`", UserWarning)
        yield


def adapt(model: Any, *, seed: int = 3, zero_b: bool = False, **options: Any) -> PeftModel:
    """LoRA on all linear layers; B is random unless asked, so that A has a gradient too."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    with known_peft_warnings():
        adapted = cast(PeftModel, get_peft_model(model, LoraConfig(**{**values, **options})))
    if not zero_b:
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                nn.init.normal_(parameter, std=0.1)
    return adapted


class Unsharded:
    """The `ShardedModel` protocol's training half over a plain module on one rank; keeps the gradients it clipped."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.clipped: dict[str, Tensor] = {}

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def set_gradient_sync(self, on: bool) -> None:
        pass

    def clip_grad_norm(self, max_norm: float) -> float:
        self.clipped = whole_gradients(self)
        return float(nn.utils.clip_grad_norm_([parameter for _, parameter in self.trainable()], max_norm))

    def compute_dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(parameter.dtype for parameter in self.module.parameters())

    def adapter_off(self) -> AbstractContextManager[None]:
        return reference_policy(cast(PeftModel, self.module))

    def gathered(self, part: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self) -> None:
        pass


def whole_gradients(sharded: Any) -> dict[str, Tensor]:
    """Collective. Full gradient of every trainable parameter, copied; zeros where there is none."""
    out = {}
    for name, parameter in sharded.trainable():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        out[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()
    return out


def make_actor(
    sharded: Any,
    world: World | None = None,
    *,
    sampling: Sampling = PLAIN,
    teacher: Teacher | None = None,
    **train: Any,
) -> Actor:
    config = TrainConfig(**{"lr": 1e-2, "packing": "padded", **train})
    return Actor(
        sharded,
        Optimizer(sharded.trainable(), train=config, num_steps=10),
        train=config,
        sampling=sampling,
        world=world or World(),
        pad_id=0,
        max_new_tokens=16,
        teacher=teacher,
    )


def largest_gap(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)
