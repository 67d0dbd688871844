"""The schedule as numbers; AdamW that never depends on which parameters a batch happened to touch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from lockstep.config import TrainConfig
from lockstep.errors import ModelError
from lockstep.train.optim import Optimizer, lr_at


def schedule(name: str, *, warmup: int = 0, steps: int = 10) -> list[float]:
    train = TrainConfig(lr=1.0, schedule=name, warmup_steps=warmup)
    return [lr_at(step, train, steps) for step in range(steps + 2)]


def test_constant():
    assert schedule("constant") == [1.0] * 12
    assert schedule("constant", warmup=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_goes_from_the_full_rate_to_zero_after_the_last_step():
    # abs: float64 rounding of tenths
    assert schedule("linear") == pytest.approx([1 - step / 10 for step in range(11)] + [0.0], abs=1e-12)
    assert schedule("linear", warmup=2)[:4] == [0.5, 1.0, 1.0, 1 - 1 / 8]


def test_cosine():
    rates = schedule("cosine")
    assert rates[0] == 1.0
    assert rates[5] == pytest.approx(0.5)
    assert rates[9] == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)))
    assert rates[10:] == [0.0, 0.0]


def test_warm_up_longer_than_the_run_never_decays():
    assert schedule("linear", warmup=20, steps=10)[:10] == [(step + 1) / 20 for step in range(10)]


def parameters() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"p{i}", nn.Parameter(torch.randn(3, 2, generator=generator))) for i in range(3)]


def make(named: list[tuple[str, nn.Parameter]], **train: object) -> Optimizer:
    return Optimizer(named, train=TrainConfig(**{"lr": 0.1, **train}), num_steps=10)


def backward(named: list[tuple[str, nn.Parameter]], step: int, *, without: str = "") -> None:
    for index, (name, parameter) in enumerate(named):
        parameter.grad = None if name == without else torch.full_like(parameter, (index + 1.0) * (step + 1))


def test_a_parameter_that_never_had_a_gradient_has_state_and_resumes_bit_for_bit():  # B69
    straight = parameters()
    optimizer = make(straight)
    for step in range(6):
        if step == 3:
            saved, values = copy.deepcopy(optimizer.torch.state_dict()), [p.detach().clone() for _, p in straight]
        backward(straight, step, without="p1")
        optimizer.step(0.1)
    assert set(saved["state"]) == {0, 1, 2}
    assert torch.equal(straight[1][1], parameters()[1][1])

    resumed = [(name, nn.Parameter(value)) for (name, _), value in zip(straight, values, strict=True)]
    optimizer = make(resumed)
    optimizer.torch.load_state_dict(saved)
    for step in range(3, 6):
        backward(resumed, step, without="p1")
        optimizer.step(0.1)
    assert all(torch.equal(left, right) for (_, left), (_, right) in zip(straight, resumed, strict=True))


def test_a_step_is_adamws_with_the_given_rate_and_settings():
    named, plain = parameters(), parameters()
    optimizer = make(named, betas=(0.8, 0.95), weight_decay=0.1)
    expected = torch.optim.AdamW([p for _, p in plain], lr=0.03, betas=(0.8, 0.95), weight_decay=0.1)
    for step in range(3):
        backward(named, step)
        backward(plain, step)
        optimizer.step(0.03)
        expected.step()
    # AdamW for many tensors at once rounds like AdamW for one, up to the order of two fp32 products.
    for (_, left), (_, right) in zip(named, plain, strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)
    assert optimizer.names == ("p0", "p1", "p2")


def test_state_is_fp32_and_other_parameters_are_refused():
    named = parameters()
    optimizer = make(named)
    backward(named, 0)
    optimizer.step(0.1)
    assert {t.dtype for state in optimizer.torch.state.values() for t in state.values()} == {torch.float32}
    with pytest.raises(ModelError, match=r"p is torch.float16; .* float32"):
        make([("p", nn.Parameter(torch.zeros(2, dtype=torch.float16)))])


def test_nothing_to_train_is_an_error():
    with pytest.raises(ModelError, match="nothing to train"):
        make([])
