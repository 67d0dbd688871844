"""Quantised bases: adapters come out and payloads stay byte for byte, merging needs dequantising; an adapter trained with QAT is
refused, with the reason, by whatever would shard or export it (CASES B46)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.ao.quantization import FakeQuantize

import lockstep
from helpers_foreign import known_warnings
from helpers_matrix import collect, difference
from lockstep.dist import World
from lockstep.errors import IncompleteExport, ModelError
from lockstep.export.stream import export_weights
from lockstep.sharding.attach import attach
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.shard import shard
from lockstep.testing import run_ranks

X = torch.linspace(-1, 1, 48).reshape(4, 12)


class Packed(nn.Linear):
    """A linear layer whose weight is bytes: value = (byte - 128) * scale of its row."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((self.weight.detach() / scale + 128).round().to(torch.uint8), requires_grad=False)
        self.register_buffer("scale", scale)

    def dequantize(self) -> torch.Tensor:
        weight: Any = self.weight
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        return (whole.float() - 128) * self.get_buffer("scale")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.dequantize())


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.plain = Packed(12, 10), Packed(10, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.second(self.first(x)))


def toy() -> PeftModel:
    base = Toy()
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["first", "plain"], init_lora_weights=False)
    return get_peft_model(base, config)  # type: ignore[arg-type, return-value]


def step(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    model(X).square().mean().backward()
    optimizer.step()


def check_packed(backend: Any) -> None:
    plain, live = toy(), toy()
    sharded = shard(live, lockstep.plan_sharding(live, lockstep.Modules(("**.first", "**.second"))), backend=backend)
    for model in (plain, sharded.module):
        step(model, [param for param in model.parameters() if param.requires_grad])
    came, wanted = collect(sharded, lockstep.AdapterExport()), get_peft_model_state_dict(plain)
    assert came.keys() == wanted.keys()
    for name, value in came.items():
        torch.testing.assert_close(value, wanted[name])  # fp32 sums in another order
    # The payload is in the full export, byte for byte, after a step.
    assert not difference(collect(sharded, lockstep.FullExport()), Toy().state_dict())
    with pytest.raises(IncompleteExport, match=r"first: its base is quantised .*MergedExport\(dequantize=True\)"):
        export_weights(sharded, lockstep.MergedExport())
    check_dequantised(sharded, plain)


def check_dequantised(sharded: ShardedModel, plain: PeftModel) -> None:
    came, base = collect(sharded, lockstep.MergedExport(dequantize=True)), Toy()
    assert sorted(came) == ["first.weight", "plain.bias", "plain.weight", "second.weight"]
    assert torch.equal(came["second.weight"], base.second.dequantize())
    where: Any = plain.base_model.model.first
    delta = where.get_delta_weight("default").detach()
    torch.testing.assert_close(came["first.weight"], base.first.dequantize() + delta)


def qat() -> PeftModel:
    model: Any = toy()
    model.base_model.model.plain.base_layer.weight_fake_quant = FakeQuantize()
    return model


WHY = "plain.* fake-quantises weights .*quantisation-aware training.* adapter on the plain base is what was trained"


def check_qat(backend: Any) -> None:
    with pytest.raises(ModelError, match=WHY):
        shard(qat(), backend=backend)
    foreign = attach(qat())
    for what in (lockstep.AdapterExport(), lockstep.MergedExport(), lockstep.FullExport()):
        with pytest.raises(IncompleteExport, match=WHY):
            export_weights(foreign, what)
    without = Toy()
    without.plain.weight_fake_quant = FakeQuantize()  # QAT alone is fine
    assert "plain.weight" in collect(attach(without), lockstep.FullExport())


def check_all(world: World) -> None:
    with known_warnings():
        for backend in ("fsdp2", "fsdp1"):
            try:
                check_packed(backend)
                check_qat(backend)
            except Exception as error:
                raise AssertionError(f"{backend}: {error}") from error


def test_quantised_bases_and_quantisation_aware_training():
    run_ranks(2, check_all, timeout_s=120)
