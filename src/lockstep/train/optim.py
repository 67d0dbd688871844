"""Trainable parameters and the train section in; AdamW steps at a scheduled learning rate out.

State is fp32 whatever the parameters are. Adapters that lockstep makes are fp32 themselves, over any base; of bf16 ones the
optimizer keeps fp32 copies and steps those (CASES B50: bf16 has 8 bits, and an update of 1e-6 on a weight of 1 is lost).
The parameters may be DTensors: every operation is elementwise, so each rank steps its own shard.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.profiler import record_function

from lockstep.config import TrainConfig
from lockstep.errors import ModelError
from lockstep.sharding.base import ShardedModel
from lockstep.train.offload import COUNTERS, HostState, local_of


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
    """AdamW over named parameters, in one group and in the order given. `torch` is the plain `torch.optim.AdamW`, or, where a
    parameter is bf16, a `MasterAdamW`. With `train.offload_optimizer` its state lies in host memory between steps."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], *, train: TrainConfig, num_steps: int):
        """Raises `ModelError` if there is nothing to train, or a parameter is neither fp32 nor bf16."""
        if not parameters:
            raise ModelError("nothing to train: no parameter requires a gradient; check lora.targets")
        for name, parameter in parameters:
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                raise ModelError(
                    f"{name} is {parameter.dtype}; AdamW here takes float32 or bfloat16 parameters (float16 ones "
                    "would lose most updates); keep the adapter in float32, over a float16 base too"
                )
        self.names = tuple(name for name, _ in parameters)
        self._parameters = [parameter for _, parameter in parameters]
        self._train = train
        self._num_steps = num_steps
        # foreach refuses a list that mixes DTensors with plain tensors; for DTensors alone it saves a dispatch per
        # parameter and operation.
        uniform = len({isinstance(parameter, DTensor) for parameter in self._parameters}) == 1
        kind = torch.optim.AdamW if all(p.dtype == torch.float32 for p in self._parameters) else MasterAdamW
        self.torch: torch.optim.Optimizer = kind(
            self._parameters, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, foreach=uniform
        )
        self._host = HostState(self.torch) if train.offload_optimizer else None

    def lr(self, step: int) -> float:
        return lr_at(step, self._train, self._num_steps)

    def zero_grad(self) -> None:
        self.torch.zero_grad(set_to_none=True)

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient in place."""
        grads = [local_of(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

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
        (self._host or self.torch).step()


def clip_and_step(sharded: ShardedModel, optimizer: Optimizer, *, max_norm: float, lr: float) -> float:
    """Collective. The global L2 norm of the gradients before clipping. It is the same on every rank, so all ranks step, or, where it
    is not finite, none does. The gradients are gone either way."""
    with record_function("train::clip and step"):
        grad_norm = sharded.clip_grad_norm(max_norm)
        if math.isfinite(grad_norm):
            optimizer.step(lr)
        optimizer.zero_grad()
    return grad_norm


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What an `Optimizer` keeps between steps."""

    per_element: int
    """For each element of a rank's part: moments, fp32 copies. In host memory with `train.offload_optimizer`."""
    per_parameter: int
    """For each parameter: counters, always on the CPU."""


def state_bytes(dtypes: Collection[torch.dtype], *, train: TrainConfig) -> dict[torch.dtype, StateBytes]:
    """By dtype of a parameter, when those of all trained parameters are `dtypes`. Found by stepping such an optimizer, of one element
    each. Not collective. Raises `ModelError` as `Optimizer`."""
    params = {dtype: nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in dtypes}
    train = train.model_copy(update={"offload_optimizer": False})  # that moves state, and changes none
    optimizer = Optimizer([(str(dtype), param) for dtype, param in params.items()], train=train, num_steps=1)
    optimizer.step(train.lr)
    out = {}
    for dtype, param in params.items():
        slots = optimizer.torch.state[param].items()
        counters = sum(slot.nbytes for name, slot in slots if name in COUNTERS)
        out[dtype] = StateBytes(sum(slot.nbytes for _, slot in slots) - counters, counters)
    return out


class MasterAdamW(torch.optim.Optimizer):
    """torch's AdamW on fp32 copies ("master weights", arXiv 1710.03740) of its parameters, which hold them rounded.

    A copy is state like the moments: `state[parameter]["master"]`. Somebody who overwrites a parameter between steps must
    drop its state, or the next step brings the old value back.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float = 1e-8,
        foreach: bool = False,
    ):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._foreach = foreach

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Parameters without a gradient are left alone, as by torch."""
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in params]
            slots = {name: [state[name] for state in states] for name in ("master", "exp_avg", "exp_avg_sq", "step")}
            adamw(
                slots["master"],
                [parameter.grad.float() for parameter in params],
                slots["exp_avg"],
                slots["exp_avg_sq"],
                [],
                slots["step"],
                foreach=self._foreach,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for parameter, master in zip(params, slots["master"], strict=True):
                parameter.copy_(master)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch would round the state to the parameters' dtype."""
        super().load_state_dict(state_dict)
        params = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, slots in state_dict["state"].items():
            self.state[params[index]] = {name: tensor.detach().clone() for name, tensor in slots.items()}

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        if "master" not in state:
            state["master"] = parameter.detach().to(torch.float32, copy=True)
        if "step" not in state:
            state |= {"step": torch.tensor(0.0)}
            state |= {name: torch.zeros_like(state["master"]) for name in ("exp_avg", "exp_avg_sq")}
        return state
