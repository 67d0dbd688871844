"""bf16 parameters under fp32 copies: nothing is lost to rounding, and what is saved resumes to the last bit (CASES B50)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lockstep.config import TrainConfig
from lockstep.train.optim import MasterAdamW, Optimizer


def bf16(values: torch.Tensor) -> list[tuple[str, nn.Parameter]]:
    return [("p", nn.Parameter(values.to(torch.bfloat16)))]


def start() -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).float()


def gradient(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16).to(dtype)


def run(named: list[tuple[str, nn.Parameter]], optimizer: Optimizer, steps: range, *, lr: float) -> None:
    for step in steps:
        for _, parameter in named:
            parameter.grad = gradient(step, parameter.dtype)
        optimizer.step(lr)


def make(named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    return Optimizer(named, train=TrainConfig(weight_decay=0.1), num_steps=10)


def test_updates_of_a_millionth_are_not_lost():  # B50
    """A weight of 1 and updates of 1e-6: bf16's spacing there is 2^-8, so a step on bf16 itself is always rounded away."""
    ours, plain = bf16(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = Optimizer(ours, train=TrainConfig(), num_steps=10)
    lost = torch.optim.AdamW([plain], lr=1e-6, weight_decay=0.0)
    for _ in range(3000):
        ours[0][1].grad, plain.grad = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)
        optimizer.step(1e-6)
        lost.step()
    assert torch.equal(plain, torch.ones(3, dtype=torch.bfloat16))
    master = optimizer.torch.state[ours[0][1]]["master"]
    # 3000 roundings to fp32 (2^-24 relative, half of it on average one way) around 1.
    assert master.tolist() == pytest.approx([1 - 3e-3] * 3, abs=2e-4)
    assert float(ours[0][1].detach()[0]) == 1 - 2**-8


def test_the_copies_are_what_fp32_parameters_would_be_and_the_parameters_are_them_rounded():
    ours, exact = bf16(start()), [("p", nn.Parameter(start()))]
    optimizers = make(ours), make(exact)
    for named, optimizer in zip((ours, exact), optimizers, strict=True):
        run(named, optimizer, range(8), lr=1e-3)
    assert isinstance(optimizers[0].torch, MasterAdamW) and type(optimizers[1].torch) is torch.optim.AdamW
    state = optimizers[0].torch.state[ours[0][1]]
    assert torch.equal(state["master"], exact[0][1])
    assert torch.equal(ours[0][1], exact[0][1].to(torch.bfloat16))
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_saved_state_resumes_to_the_last_bit():
    straight = bf16(start())
    first = make(straight)
    run(straight, first, range(3), lr=1e-3)
    saved, values = copy.deepcopy(first.torch.state_dict()), straight[0][1].detach().clone()
    run(straight, first, range(3, 6), lr=1e-3)
    resumed = [("p", nn.Parameter(values))]
    optimizer = make(resumed)
    optimizer.torch.load_state_dict(saved)
    run(resumed, optimizer, range(3, 6), lr=1e-3)
    assert torch.equal(resumed[0][1], straight[0][1])
    masters = [each.torch.state[named[0][1]]["master"] for each, named in ((optimizer, resumed), (first, straight))]
    assert torch.equal(*masters)
