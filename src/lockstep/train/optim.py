"""Trainable parameters and the train section in; AdamW steps at a scheduled learning rate out.

State is fp32 because the trainable parameters are (adapters stay fp32 whatever the base's dtype); anything else is
refused. The parameters may be DTensors: every operation is elementwise, so each rank steps its own shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.config import TrainConfig
from lockstep.errors import ModelError


def lr_at(step: int, train: TrainConfig, num_steps: int) -> float:
    """Learning rate of optimizer step `step` (0, 1, ..). Pure.

    Linear warm-up whose last step (`warmup_steps - 1`) is at the full rate, then constant, or linear or cosine decay that
    reaches 0 at `num_steps`, one after the last step.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    progress = min((step - train.warmup_steps) / max(num_steps - train.warmup_steps, 1), 1.0)
    match train.schedule:
        case "constant":
            return train.lr
        case "linear":
            return train.lr * (1 - progress)
        case "cosine":
            return train.lr * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW over named parameters, in one group and in the order given. `torch` is the plain `torch.optim.AdamW`."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], *, train: TrainConfig, num_steps: int):
        """Raises `ModelError` if there is nothing to train, or a parameter is not fp32."""
        if not parameters:
            raise ModelError("nothing to train: no parameter requires a gradient; check lora.targets")
        for name, parameter in parameters:
            if parameter.dtype != torch.float32:
                raise ModelError(
                    f"{name} is {parameter.dtype}; AdamW here needs float32 parameters, or updates below the dtype's spacing "
                    "are lost; keep the adapter in float32"
                )
        self.names = tuple(name for name, _ in parameters)
        self._parameters = [parameter for _, parameter in parameters]
        self._train = train
        self._num_steps = num_steps
        # foreach refuses a list that mixes DTensors with plain tensors; for DTensors alone it saves a dispatch per
        # parameter and operation.
        uniform = len({isinstance(parameter, DTensor) for parameter in self._parameters}) == 1
        self.torch = torch.optim.AdamW(
            self._parameters, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, foreach=uniform
        )

    def lr(self, step: int) -> float:
        return lr_at(step, self._train, self._num_steps)

    def zero_grad(self) -> None:
        self.torch.zero_grad(set_to_none=True)

    def step(self, lr: float) -> None:
        """One AdamW update at rate `lr`.

        A parameter that backward did not reach gets a zero gradient instead of none: every parameter then has state
        after the first step, and a checkpoint's keys do not depend on what a batch happened to touch.
        """
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for group in self.torch.param_groups:
            group["lr"] = lr
        self.torch.step()
