"""Tiny models, engines around them, and the plain computation that their samples are compared with."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lockstep.rollout.hf import HFEngine
from lockstep.sampling import sampling_logprobs
from lockstep.testing import tiny_llama
from lockstep.transport.base import digest_of, tensor_line
from lockstep.types import Bucket, Draw, Manifest, Prompt, Sample, Sampling, TensorSpec


class NumberTokenizer:
    """Token 7 is the text "7"; 0, 1 and 2 are special."""

    eos_token_id = 2

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(str(token) for token in token_ids if token > 2 or not skip_special_tokens)


def tiny_gpt2(**overrides: Any) -> GPT2LMHeadModel:
    """Absolute positions, tied head, Conv1D."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(
        GPT2Config(**{**sizes, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **overrides})
    )
    # GPT-2's own initial positions are too small to matter: a wrong position must show.
    model.transformer.wpe.weight.data.mul_(20)
    return model.eval()


def sharp_llama(**overrides: Any) -> Any:
    """A tiny Llama whose next token is far from uniform, so that greedy choices do not hang on the last bit."""
    model = tiny_llama(**overrides)
    model.lm_head.weight.data.mul_(12)
    return model


def make_engine(model: Any = None, *, eos_ids: Sequence[int] = (2,), cache_tokens: int = 4096, **more: Any) -> HFEngine:
    model = sharp_llama() if model is None else model
    own = copy.deepcopy(model)
    return HFEngine(own, tokenizer=NumberTokenizer(), eos_ids=eos_ids, device="cpu", cache_tokens=cache_tokens, **more)


def make_prompts(*ids: Sequence[int]) -> list[Prompt]:
    return [Prompt(uid=f"p{place}", ids=tuple(each), text="", answer="") for place, each in enumerate(ids)]


def random_prompts(lengths: Sequence[int], *, prefix: Sequence[int] = (), seed: int = 0) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    tails = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]
    return make_prompts(*([*prefix, *tail] for tail in tails))


def ids_of(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    return [sample.ids for sample in samples]


@torch.no_grad()
def plain_logprobs(model: Any, sample: Sample, sampling: Sampling) -> torch.Tensor:
    """The sample's tokens scored by one unpadded forward pass over prompt + completion."""
    ids = torch.tensor([sample.prompt.ids + sample.ids])
    start = len(sample.prompt.ids) - 1
    logprobs = sampling_logprobs(model(input_ids=ids, use_cache=False).logits[0, start:-1], sampling)
    return logprobs.gather(1, ids[0, start + 1 :, None]).squeeze(1)


def max_difference(model: Any, samples: Sequence[Sample], sampling: Sampling) -> float:
    """Largest difference of a sample's logprobs from the plain ones, over all samples' tokens."""
    pairs = [(torch.tensor(sample.logprobs), plain_logprobs(model, sample, sampling)) for sample in samples]
    return max(float((ours - plain).abs().max()) for ours, plain in pairs)


@torch.no_grad()
def plain_greedy(model: Any, prompt: Prompt, count: int, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """`model.generate` on one unpadded prompt, up to the first EOS."""
    ids = torch.tensor([prompt.ids])
    options = {"max_new_tokens": count, "eos_token_id": list(eos_ids) or None, "pad_token_id": 0}
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return tuple(output[0, len(prompt.ids) :].tolist())


def greedy(engine: HFEngine, prompts: Sequence[Prompt], count: int = 8) -> list[tuple[int, ...]]:
    sampling = Sampling(temperature=0, max_new_tokens=count)
    return ids_of(engine.generate(prompts, sampling, num_samples=1, draw=Draw(0, 0)))


def manifest_of(tensors: dict[str, torch.Tensor], kind: Any, *, version: int = 1, config: Any = None) -> Manifest:
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    return Manifest(version=version, kind=kind, specs=specs, adapter_config=config)


def digest_for(tensors: dict[str, torch.Tensor]) -> str:
    return digest_of(tensor_line(name, tensor) for name, tensor in tensors.items())


def push(
    engine: HFEngine, tensors: dict[str, torch.Tensor], kind: Any, *, version: int = 1, config: Any = None
) -> None:
    """A whole update, a bucket per tensor."""
    engine.begin(manifest_of(tensors, kind, version=version, config=config))
    for item in tensors.items():
        engine.receive(Bucket((item,)))
    engine.commit(digest_for(tensors))
