"""Weights as they travel to an engine over HTTP, models that hold them, and the distance of samples from those."""

import copy
import json
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from helpers_rollout import make_engine, make_prompts, plain_logprobs, push
from lockstep.testing import tiny_llama
from lockstep.types import Draw, Sample, Sampling

SAMPLING = Sampling(temperature=0.7, max_new_tokens=6)
DRAW = Draw(seed=5, step=3, first_slot=8)
LONG = list(range(3, 43))  # two and a half blocks of the fakes' prefix cache
TOLERANCE = 2e-5  # fp32, cached against uncached attention


def sharp(**overrides: Any) -> Any:
    """The base of every fake server: a tiny Llama that is far from uniform."""
    model = tiny_llama(**overrides)
    model.lm_head.weight.data.mul_(12)
    return model


def lora(seed: int = 1, **overrides: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A random adapter of `sharp`: tensors under PEFT's names, and the configuration."""
    torch.manual_seed(seed)
    values = {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj", "down_proj"], **overrides}
    peft = get_peft_model(copy.deepcopy(sharp()), LoraConfig(**values))
    tensors = {name: torch.randn_like(value) * 0.3 for name, value in get_peft_model_state_dict(peft).items()}
    return tensors, json.loads(json.dumps(peft.peft_config["default"].to_dict(), default=sorted))


def changed(seed: int = 1, *, scale: float = 0.05, **overrides: Any) -> dict[str, torch.Tensor]:
    """Other base weights, under checkpoint names; a tied head travels as the embedding."""
    model = sharp(**overrides)
    torch.manual_seed(seed)
    weights = {name: value + scale * torch.randn_like(value) for name, value in model.state_dict().items()}
    return weights if not overrides else {name: value for name, value in weights.items() if name != "lm_head.weight"}


def send(engine: Any, kind: str, version: int = 1, seed: int = 1) -> None:
    """A whole update."""
    if kind == "adapter":
        tensors, config = lora(seed)
        push(engine, tensors, kind, version=version, config=config)
    else:
        push(engine, changed(seed), kind, version=version)


def reference(kind: str, seed: int = 1) -> Any:
    """A model that holds what `send` sends."""
    model = sharp()
    if kind == "adapter":
        tensors, config = lora(seed)
        engine = make_engine(model)
        push(engine, tensors, kind, config=config)
        return engine._model
    model.load_state_dict(changed(seed))
    return model


def distance(samples: Sequence[Sample], model: Any, sampling: Sampling = SAMPLING) -> float:
    """Largest difference of a sample's logprobs from the model's, computed without any cache."""
    pairs = [(torch.tensor(sample.logprobs), plain_logprobs(model, sample, sampling)) for sample in samples]
    return max(float((ours - plain).abs().max()) for ours, plain in pairs)


def run(engine: Any, prompts: Any = None, sampling: Sampling = SAMPLING, num_samples: int = 2) -> list[Sample]:
    """Samples of a long and a short prompt."""
    prompts = make_prompts(LONG, [5, 6, 7]) if prompts is None else prompts
    return engine.generate(prompts, sampling, num_samples=num_samples, draw=DRAW)
