"""A causal language model's (or a reward model's) checkpoint in; an empty value model out: that backbone with a head of one number.

The class is transformers' own for token classification with one label, so that what is trained can be loaded without lockstep.
The backbone is on meta. The head is real and fp32 over any backbone: returns are regressed on, and a bf16 value has three digits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedModel

from lockstep.errors import ModelError
from lockstep.model.load import ModelFiles, build_of, read_tensor, without_noise

HEADS = ("score", "classifier")
"""What transformers calls the head, and PEFT (task type TOKEN_CLS) trains and saves with the adapter."""


class ValueHead(nn.Linear):
    """Hidden states of any dtype in, one fp32 number each out. Starts at 0: the first advantages are then the rewards to come."""

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input.float(), self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class ValueModel:
    """An empty value model."""

    model: PreTrainedModel
    head: str
    """Name of its head."""
    new: tuple[str, ...]
    """Names of the head's parameters that the checkpoint does not have: they keep the zeros that they start with."""


def build_empty_value_model(files: ModelFiles, *, dtype: torch.dtype, attention: str) -> ValueModel:
    """Not collective. Raises `ModelError` where transformers has no such class for the checkpoint's architecture."""
    config = without_noise(copy.deepcopy(files.config))
    if type(config) not in AutoModelForTokenClassification._model_mapping:  # type: ignore[attr-defined]
        raise ModelError(
            f"{files.path}: transformers has no value model (token classification) for {config.model_type}; use critic.kind: head"
        )
    # Of one label; and without the dropout of 0.1 that these classes add when the configuration says nothing.
    config.num_labels, config.classifier_dropout = 1, 0.0
    model = build_of(AutoModelForTokenClassification, config, files, dtype=dtype, attention=attention)
    head = next((name for name in HEADS if isinstance(getattr(model, name, None), nn.Linear)), None)
    if head is None:
        raise ModelError(
            f"{type(model).__name__} has none of the heads {list(HEADS)}; expected one of them; use critic.kind: head"
        )
    _check_stored_head(files, f"{head}.weight")
    setattr(model, head, ValueHead(cast(nn.Linear, getattr(model, head)).in_features))
    # The language model's own head is part of no value model; no word about it on every start.
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    model._keys_to_ignore_on_load_unexpected = [*ignored, r"^lm_head\."]  # type: ignore[assignment]
    names = (f"{head}.weight", f"{head}.bias")
    return ValueModel(model, head, tuple(name for name in names if name not in files.weights))


def _check_stored_head(files: ModelFiles, name: str) -> None:
    """A reward model's head has one label; a classifier's has several, none of which is a value."""
    num = read_tensor(files, name).shape[0] if name in files.weights else 1
    if num != 1:
        raise ModelError(
            f"{files.path}: its head {name!r} has {num} labels, and a value model has one; give a reward model with one label, or a "
            "checkpoint without a head"
        )
