"""Scored samples, critics made as a run makes them, and what a plain model without any of lockstep says, for tests of critics."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from lockstep.assemble import make_sharded
from lockstep.assemble_critic import build_critic, make_critic
from lockstep.config import Config, build_config
from lockstep.dist import World
from lockstep.model.load import find_model
from lockstep.names import is_adapter_name
from lockstep.sharding.base import ShardedModel
from lockstep.train.critic import Critic
from lockstep.types import Prompt, Sample, ScoredSample

GAMMA, LAM, CLIP = 0.9, 0.8, 0.1


def scored_samples(num_groups: int, group_size: int, *, seed: int = 0, longest: int = 7) -> list[ScoredSample]:
    """Ragged; one completion is empty."""
    draw = random.Random(seed)
    out = []
    for slot in range(num_groups):
        prompt = Prompt(f"p{slot}", tuple(draw.randrange(3, 60) for _ in range(draw.randint(2, 9))), "", "")
        for index in range(group_size):
            ids = tuple(draw.randrange(3, 60) for _ in range(draw.randint(1, longest) if slot + index else 0))
            sample = Sample(prompt, slot, index, ids, (-1.0,) * len(ids), "", "stop", 0)
            out.append(ScoredSample(sample, draw.uniform(-1, 1), {}))
    return out


def config_of(model: str, critic: dict[str, Any], /, **sections: dict[str, Any]) -> Config:
    tree = {
        "model": {"path": model},
        "lora": {"rank": 3, "alpha": 6},
        "data": {"train": {"task": "sums"}},
        "reward": [{"name": "last_number"}],
        "train": {"algorithm": "gae", "packing": "padded", **sections.pop("train", {})},
        "critic": {"lora": {"rank": 3, "alpha": 6}, "gamma": GAMMA, "lam": LAM, "value_clip": CLIP, **critic}
        if critic.get("kind") != "head"
        else {"gamma": GAMMA, "lam": LAM, "value_clip": CLIP, **critic},
    }
    return build_config({**tree, **sections})


def critic_of(world: World, config: Config) -> Critic:
    """Collective."""
    files = find_model(config.model.path)
    policy = make_sharded(config, files, world)
    critic = make_critic(config, build_critic(config, files), policy, pad_id=0)
    assert critic is not None
    return critic


def filled(name: str, shape: Sequence[int]) -> Tensor:
    """What a trained tensor of this name is set to: the same for any number of ranks, and in the plain model."""
    seed = sum(ord(letter) * (place + 1) for place, letter in enumerate(name))
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * 0.1


def fill_trained(sharded: ShardedModel) -> None:
    sharded.settle()
    shapes = {tensor.name: tensor.shape for tensor in sharded.plan.parameters}
    for name, _ in sharded.trainable():
        start, stop = sharded.ranges(name)[sharded.world.rank]
        sharded.write_local(name, filled(name, shapes[name]).reshape(-1)[start:stop])


def local_gradients(sharded: ShardedModel) -> dict[str, tuple[int, Any]]:
    """(where they begin, this rank's elements) of every gradient, as arrays that outlive the process."""
    out = {}
    for name, param in sharded.trainable():
        start, stop = sharded.ranges(name)[sharded.world.rank]
        grad = param.grad
        local = torch.zeros(stop - start) if grad is None else getattr(grad, "to_local", lambda grad=grad: grad)()
        out[name] = (start, local.detach().reshape(-1)[: stop - start].clone().numpy())
    return out


def spy_on_gradients(sharded: Any) -> list[dict[str, tuple[int, Any]]]:
    """One entry per optimizer step, of before clipping."""
    clip, seen = sharded.clip_grad_norm, []

    def clip_and_keep(max_norm: float) -> float:
        seen.append(local_gradients(sharded))
        return clip(max_norm)

    sharded.clip_grad_norm = clip_and_keep
    return seen


class PlainCritic:
    """A value model by transformers and PEFT alone, one unpadded sample at a time; or a linear layer on a causal model's states."""

    def __init__(self, folder: str, kind: str):
        if kind == "head":
            causal = AutoModelForCausalLM.from_pretrained(folder)
            self.body = causal.base_model.requires_grad_(False)
            self.head = torch.nn.Linear(causal.config.hidden_size, 1)
            self.trained = {"weight": self.head.weight, "bias": self.head.bias}
        else:
            model = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
            names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "score"]
            peft = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=names))
            self.body, self.head = model.model, model.score
            self.head.requires_grad_(True)
            self.trained = {n: p for n, p in peft.named_parameters() if is_adapter_name(n) or ".score." in n}
        for name, param in self.trained.items():
            param.data.copy_(filled(name, param.shape))

    def values(self, sample: Sample) -> Tensor:
        """Of the state before each completion token."""
        ids = torch.tensor([[*sample.prompt.ids, *sample.ids]])
        hidden = self.body(input_ids=ids).last_hidden_state[0]
        return self.head(hidden)[len(sample.prompt.ids) - 1 : -1, 0]

    def gradients(
        self, samples: Sequence[Sample], returns: Sequence[Tensor], old: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Of the clipped squared error, a mean over all tokens."""
        losses = []
        for sample, target, before in zip(samples, returns, old, strict=True):
            values = self.values(sample)
            near = before + (values - before).clamp(-CLIP, CLIP)
            losses.append(0.5 * torch.maximum((values - target) ** 2, (near - target) ** 2))
        torch.cat(losses).mean().backward()
        found = {name: param.grad.clone() for name, param in self.trained.items() if param.grad is not None}
        for param in self.trained.values():
            param.grad = None
        return found


def plain_gae(rewards: float, values: Sequence[float]) -> list[float]:
    """Advantages of one sample whose reward is its last token's, by the recursion."""
    out, running, following = [], 0.0, 0.0
    for place in reversed(range(len(values))):
        delta = (rewards if place == len(values) - 1 else 0.0) + GAMMA * following - values[place]
        running = delta + GAMMA * LAM * running
        following = values[place]
        out.append(running)
    return out[::-1]
