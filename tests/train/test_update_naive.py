"""Several optimizer steps on one rollout against a loop that knows neither packing nor sums: one sample and one token at a time."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from helpers_train import PLAIN, Unsharded, adapt, make_actor, make_items
from lockstep.testing import tiny_llama
from lockstep.train.mini_batches import deal
from lockstep.types import Sampling, TrainItem

RATE, DECAY = 1e-2, 0.1
CLIPS = {"ppo": (0.1, 0.15), "gspo": (0.03, 0.05), "cispo": (0.2, 0.2)}


def observed(items: list[TrainItem]) -> list[TrainItem]:
    """Every third sample is nothing but observations, of others some tokens are; what stands there is NaN."""
    draw, out = random.Random(0), []
    for number, item in enumerate(items):
        mask = tuple(draw.random() < 0.6 and number % 3 > 0 for _ in item.ids)
        said = tuple(value if own else math.nan for value, own in zip(item.rollout_logprobs, mask, strict=True))
        out.append(TrainItem(item.prompt_ids, item.ids, said, item.advantage, item.group, loss_mask=mask))
    return out


def own(values: Any, item: TrainItem) -> list[Any]:
    return [value for place, value in enumerate(values) if item.loss_mask is None or item.loss_mask[place]]


def score(model: PeftModel, item: TrainItem, sampling: Sampling) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities of the sampled tokens, and entropies."""
    rows = model(input_ids=torch.tensor([[*item.prompt_ids, *item.ids]])).logits[0].float() / sampling.temperature
    logprobs, entropies = [], []
    for place, token in enumerate(item.ids):
        row = rows[len(item.prompt_ids) + place - 1]
        if sampling.top_k:
            is_kept = row >= row.topk(sampling.top_k).values[-1]
            is_kept[token] = True
            row = row.masked_fill(~is_kept, -1e30)
        row = torch.log_softmax(row, -1)
        logprobs.append(row[token])
        entropies.append(-(row.exp() * row.clamp_min(-1e4)).sum())
    return own(logprobs, item), own(entropies, item)


def token_loss(
    p: Tensor, old: Tensor, ratio: Tensor, item: TrainItem, said: float, *, options: dict[str, Any]
) -> Tensor:
    low, high = CLIPS[options["loss"]]
    if options["loss"] == "cispo":
        loss = -ratio.detach().clamp(1 - low, 1 + high) * item.advantage * p
    else:
        loss = torch.max(-ratio * item.advantage, -ratio.clamp(1 - low, 1 + high) * item.advantage)
    return loss * min(math.exp(old - said), 2.0) if options.get("correction") == "token_tis" else loss


def sample_loss(
    model: PeftModel, item: TrainItem, kept: tuple[Any, Any], *, options: dict[str, Any], sampling: Sampling
):
    (olds, refs), (ps, entropies) = kept, score(model, item, sampling)
    mean = torch.stack([p - old for p, old in zip(ps, olds, strict=True)]).mean()
    total = torch.zeros(())
    for p, old, ref, said, entropy in zip(ps, olds, refs, own(item.rollout_logprobs, item), entropies, strict=True):
        ratio = torch.exp(mean if options["loss"] == "gspo" else p - old)
        k3 = torch.exp(ref - p) - (ref - p) - 1
        term = options.get("kl_coef", 0.0) * k3 - options.get("entropy_coef", 0.0) * entropy
        total = total + token_loss(p, old, ratio, item, said, options=options) + term
    return total / len(ps) if options["loss"] == "gspo" else total


def naive(model: PeftModel, items: list[TrainItem], options: dict[str, Any], sampling: Sampling) -> dict[str, Tensor]:
    live = [item for item in items if item.num_sampled]
    with torch.no_grad():
        olds = [[float(p) for p in score(model, item, sampling)[0]] for item in live]
        with model.disable_adapter():
            refs = [score(model, item, sampling)[0] for item in live]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, betas=(0.9, 0.999), weight_decay=DECAY)
    for epoch in deal([item.group for item in live], epochs=2, mini_batches=2, seed="0 7"):
        for groups in epoch:
            mine = [(item, kept) for item, *kept in zip(live, olds, refs, strict=True) if item.group in groups]
            losses = [sample_loss(model, item, tuple(kept), options=options, sampling=sampling) for item, kept in mine]
            count = len(mine) if options["loss"] == "gspo" else sum(item.num_sampled for item, _ in mine)
            optimizer.zero_grad()
            (torch.stack(losses).sum() / count).backward()
            torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
            optimizer.step()
    return trained


@pytest.mark.parametrize(
    ("options", "packing", "sampling"),
    [
        (
            {"loss": "ppo", "kl_coef": 0.3, "entropy_coef": 0.05},
            "shared_prefix",
            Sampling(temperature=0.7, top_k=9, max_new_tokens=16),
        ),
        ({"loss": "gspo"}, "padded", PLAIN),
        ({"loss": "cispo", "correction": "token_tis"}, "packed", Sampling(temperature=1.3, max_new_tokens=16)),
    ],
)
def test_four_steps_are_those_of_a_naive_loop(options, packing, sampling):
    items = observed(make_items(3, 3, seed=2, longest=4))
    module = adapt(tiny_llama(), seed=3)
    plain = copy.deepcopy(module)
    low, high = CLIPS[options["loss"]]
    steps = {"epochs": 2, "mini_batches": 2, "lr": RATE, "weight_decay": DECAY, "clip_low": low, "clip_high": high}
    sharded = Unsharded(module)
    result = make_actor(sharded, sampling=sampling, packing=packing, **steps, **options).update(items, step=7)
    assert result.num_optimizer_steps == 4
    expected = naive(plain, items, options, sampling)
    for name, parameter in sharded.trainable():
        # AdamW moves an element by about the rate whatever its gradient: where that is near rounding, by a share of it.
        torch.testing.assert_close(
            parameter, expected[name], atol=RATE * 5e-3, rtol=0, msg=lambda said, name=name: f"{name}: {said}"
        )
