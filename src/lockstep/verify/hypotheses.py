"""What can go wrong between trainer and engine, as assumptions that the trainer can score a probe under: one per explanation.

Each is collective where the model is sharded, reads the model only, and is made of public facts: a scale per layer, a kept
adapter, a rounding, another sampling, a prefix computed earlier. `canary.py` picks the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.model.lora import ADAPTER, scaling_of
from lockstep.names import is_adapter_name
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.skeleton import walk
from lockstep.types import Sampling
from lockstep.verify.scoring import Scorer
from lockstep.verify.swaps import (
    KeptAdapter,
    adapted_layers,
    adapter_as,
    adapter_rounded,
    base_rounded,
    scaling_as,
    tied_to,
)

ROUNDED_TO = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
GROUPS = {
    "attention": {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn", "query", "key", "value", "out_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "c_fc", "fc1", "fc2"},
}
"""Kinds of modules that engines pack or load together."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One explanation."""

    name: str
    """Short and stable, e.g. "adapter off"."""
    says: str
    """What it would mean and where to look."""
    score: Callable[[], Tensor]
    """Collective. [N]: the probe's log-probabilities if it were so."""
    is_drawn: bool = False
    """The engine would also have drawn its tokens from what it reports."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What hypotheses are about."""

    sharded: ShardedModel
    scorer: Scorer
    sampling: Sampling
    kept: Sequence[KeptAdapter]
    """Earlier versions of the adapter, the newest first."""
    prefix: int
    """Leading prompt tokens that an engine can keep in its cache; 0: none."""
    filler: tuple[int, ...]
    """One of the probe's prompts."""

    def under(self, assuming: Any) -> Tensor:
        return self.scorer.trainer(self.sampling, assuming)


def watched(subject: Subject) -> Iterator[Hypothesis]:
    """Those that are looked at in every check, since they hide in the noise while updates are small: lost updates."""
    if subject.kept:
        newest = subject.kept[0]
        if newest.shards:
            yield previous(subject, newest)
    if has_adapter(subject.sharded):
        yield adapter_off(subject)


def every(subject: Subject) -> Iterator[Hypothesis]:
    """All explanations, the plainest first: among equals the first one counts."""
    if has_adapter(subject.sharded):
        yield adapter_off(subject)
    for kept in subject.kept:
        if kept.shards:
            yield previous(subject, kept)
    yield from samplings(subject)
    if has_adapter(subject.sharded):
        yield from scalings(subject)
        yield from unbound(subject)
        yield from tied(subject)
    if subject.prefix:
        for kept in subject.kept[:1]:
            if kept.shards:
                yield stale_prefix(subject, kept)
    yield from other_dtypes(subject)


def has_adapter(sharded: ShardedModel) -> bool:
    return any(True for _ in adapted_layers(sharded))


def adapter_off(subject: Subject) -> Hypothesis:
    return Hypothesis(
        "adapter off",
        "the engine serves the base model: no adapter was delivered, it binds to no module, requests do not name it, or a merged "
        "export was read after the merge was undone",
        lambda: subject.under(scaling_as(subject.sharded, lambda name, layer: 0.0)),
    )


def previous(subject: Subject, kept: KeptAdapter) -> Hypothesis:
    return Hypothesis(
        f"version {kept.version}",
        f"the engine serves the weights of version {kept.version}: the update was announced and not put in place",
        lambda: subject.under(adapter_as(subject.sharded, kept)),
    )


def samplings(subject: Subject) -> Iterator[Hypothesis]:
    """Other distributions that the engine's log-probabilities may be of."""
    ours = subject.sampling
    raw = replace(ours, temperature=1.0, top_p=1.0, top_k=0)
    temperature = ours.temperature or 1.0

    def scored(sampling: Sampling) -> Callable[[], Tensor]:
        return lambda: subject.scorer.trainer(sampling)

    if replace(raw, temperature=temperature) != replace(ours, temperature=temperature) or temperature != 1:
        yield Hypothesis(
            "raw logprobs",
            "the engine draws as asked and reports log-probabilities of the raw distribution, before temperature, top-k and top-p "
            "(vLLM: --logprobs-mode processed_logprobs)",
            scored(raw),
        )
    if temperature == 1:
        return
    yield Hypothesis(
        "temperature ignored",
        f"the engine draws at temperature 1 instead of {temperature:g}",
        scored(replace(ours, temperature=1.0)),
        is_drawn=True,
    )
    yield Hypothesis(
        "temperature applied twice",
        f"the engine divides logits by {temperature:g} twice",
        scored(replace(ours, temperature=temperature**2)),
        is_drawn=True,
    )
    if ours.top_p < 1 or ours.top_k > 0:
        yield Hypothesis(
            "top-k and top-p ignored",
            "the engine's distribution is over the whole vocabulary",
            scored(replace(ours, top_p=1.0, top_k=0)),
            is_drawn=True,
        )


def scalings(subject: Subject) -> Iterator[Hypothesis]:
    """Other scales of the adapter's update. s = alpha / r, with rsLoRA alpha / sqrt(r)."""

    def scaled(scale: Callable[[str, Any], float]) -> Callable[[], Tensor]:
        return lambda: subject.under(scaling_as(subject.sharded, scale))

    yield Hypothesis(
        "scaling alpha/sqrt(r) against alpha/r",
        "one side uses rsLoRA's scale and the other the plain one: use_rslora does not arrive with the adapter",
        scaled(_other_kind),
    )
    yield Hypothesis(
        "alpha lost",
        "the engine adds B A with scale 1: lora_alpha does not arrive (it takes alpha = r)",
        scaled(lambda name, layer: 1.0),
    )
    yield Hypothesis(
        "scaling applied twice",
        "the adapter's tensors arrive scaled already and the engine scales them again",
        scaled(lambda name, layer: _scale(layer) ** 2),
    )


def unbound(subject: Subject) -> Iterator[Hypothesis]:
    """The adapter is on, but not on every module: by kind (the last part of the module's name), or a group of kinds."""
    layers = dict(adapted_layers(subject.sharded))
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    lost = {kind: {kind} for kind in kinds}
    for group, members in GROUPS.items():
        present = members.intersection(kinds)
        if 1 < len(present) < len(kinds):
            lost[f"{group} ({', '.join(sorted(present))})"] = present
    if len(kinds) == 1:
        lost = {}
    heads = {name.rpartition(".")[2] for name, layer in layers.items() if is_head(subject.sharded, layer)}
    for kind, members in lost.items():
        if members <= heads:
            yield Hypothesis(
                "head stale",
                f"the engine's head ({kind}) is the base's: with tied weights it serves the embedding in the head's place",
                _without(subject, members),
            )
            continue
        yield Hypothesis(
            f"not bound: {kind}",
            f"the adapter acts everywhere but on {kind}: compare the engine's module names with the adapter's",
            _without(subject, members),
        )


def _without(subject: Subject, kinds: set[str]) -> Callable[[], Tensor]:
    def scale(name: str, layer: Any) -> float:
        return 0.0 if name.rpartition(".")[2] in kinds else _scale(layer)

    return lambda: subject.under(scaling_as(subject.sharded, scale))


def stale_prefix(subject: Subject, kept: KeptAdapter) -> Hypothesis:
    return Hypothesis(
        "stale KV cache",
        f"prompts begin with keys and values of version {kept.version}: the engine's prefix cache outlived the update (give the "
        "adapter a new name or reset the prefix cache)",
        lambda: subject.scorer.behind_stale_prefix(
            subject.sampling,
            prefix=subject.prefix,
            before=adapter_as(subject.sharded, kept),
            filler=subject.filler,
        ),
    )


def other_dtypes(subject: Subject) -> Iterator[Hypothesis]:
    """The base, or the adapter, in a dtype that holds less than the trainer's."""
    sharded = subject.sharded
    parts = {
        "base": (base_rounded, False, "base weights are rounded to {}: it loaded the checkpoint in another dtype"),
        "adapter": (adapter_rounded, True, "adapter is rounded to {}: its LoRA dtype is not the one that is sent"),
    }
    for part, (rounded, is_adapter, says) in parts.items():
        held = {
            tensor.dtype
            for tensor in sharded.plan.parameters
            if tensor.dtype.is_floating_point and is_adapter_name(tensor.name) == is_adapter
        }
        finest = min((torch.finfo(dtype).eps for dtype in held), default=1.0)
        for dtype in ROUNDED_TO:
            is_kept = not is_adapter or torch.finfo(dtype).bits > 8  # no engine holds adapters in 8 bits
            if is_kept and torch.finfo(dtype).eps > finest:
                short = str(dtype).removeprefix("torch.")
                yield Hypothesis(
                    f"{part} in {short}", f"the engine's {says.format(short)}", _under_rounded(subject, rounded, dtype)
                )


def _under_rounded(subject: Subject, rounded: Callable[..., Any], dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: subject.under(rounded(subject.sharded, dtype))


def tied(subject: Subject) -> Iterator[Hypothesis]:
    """An adapter on one side of a weight that embedding and head share; PEFT's forward applies it on that side only."""
    model: Any = subject.sharded.module
    live = dict(walk(subject.sharded.module))
    sides = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    plain = {side: getattr(module, "base_layer", module) for side, module in sides.items()}
    names = {
        side: next((f"{name}.weight" for name, each in live.items() if each is module), "")
        for side, module in plain.items()
    }
    shared = any(set(names.values()) <= {tensor.name, *tensor.aliases} for tensor in subject.sharded.plan.parameters)
    adapted = {id(layer): name for name, layer in adapted_layers(subject.sharded)}
    for side, other in (("embedding", "head"), ("head", "embedding")):
        layer = next((name for ident, name in adapted.items() if live[name] is sides[side]), None)
        if shared and layer is not None and id(sides[other]) not in adapted:
            yield Hypothesis(
                f"{other} tied to the adapted {side}",
                f"the engine has one weight for embedding and head, and serves the {side}'s update in the {other} too: export both "
                "apart (MergedExport(untie=True)) to an engine that does not tie them",
                _tied_score(subject, layer, plain[other]),
            )


def _tied_score(subject: Subject, layer: str, other: Any) -> Callable[[], Tensor]:
    return lambda: subject.under(tied_to(subject.sharded, layer, other))


def is_head(sharded: ShardedModel, layer: Any) -> bool:
    head = sharded.module.get_output_embeddings()  # type: ignore[operator]
    return head is layer or head is getattr(layer, "base_layer", None)


def _scale(layer: Any) -> float:
    return scaling_of(layer)


def _other_kind(name: str, layer: Any) -> float:
    """The scale under the other of the two conventions, whichever the layer has."""
    alpha, rank = float(layer.lora_alpha[ADAPTER]), int(layer.r[ADAPTER])
    plain, root = alpha / rank, alpha / math.sqrt(rank)
    return plain if math.isclose(_scale(layer), root) and rank > 1 else root
