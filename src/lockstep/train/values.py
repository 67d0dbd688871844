"""A value model (or a policy and a value head) and a micro-batch in; the value of the state before each completion token out.

The state before a token is what predicts it: the same positions whose logits give the policy's log-probability. So values
are as independent of the layout (padded, packed, shared prefixes) as log-probabilities are. Temperature changes how tokens are
drawn, not what they are worth: it has no place here (CASES B74).
Shape suffixes: N completion tokens, D hidden size.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.data.packing import MicroBatch
from lockstep.data.room import positions_of
from lockstep.errors import ModelError
from lockstep.model.value_model import ValueHead
from lockstep.sharding.base import ShardedModel
from lockstep.train.logprobs import forward_with_head, head_of


class Valuer(Protocol):
    """What gives values, and has parameters that learn to."""

    sharded: ShardedModel
    """What is trained."""

    @property
    def max_len(self) -> int | None:
        """Positions of the model that reads the tokens; None: any number."""
        ...

    def features(self, batch: MicroBatch) -> Tensor | None:
        """Collective. [N, D] that no training of the critic changes, worth keeping for the step; None: there are none."""
        ...

    def values(self, batch: MicroBatch, features_ND: Tensor | None) -> Tensor:
        """Collective. [N] fp32, differentiable."""
        ...


class ModelValuer:
    """A value model of its own (`model.value_model`), sharded."""

    def __init__(self, sharded: ShardedModel):
        self.sharded = sharded

    @property
    def max_len(self) -> int | None:
        return positions_of(cast(Any, self.sharded.module).config)

    def features(self, batch: MicroBatch) -> None:
        return None

    def values(self, batch: MicroBatch, features_ND: Tensor | None) -> Tensor:
        model = self.sharded.module
        heads = [each for each in model.modules() if isinstance(each, ValueHead)]
        if len(heads) != 1:
            raise ModelError(
                f"{type(model).__name__} has {len(heads)} value heads; expected one (build_empty_value_model)"
            )
        return forward_with_head(cast(PreTrainedModel, model), heads[0], batch, heads[0].forward)[:, 0]


class HeadValuer:
    """A head of its own on the policy's last hidden states. They get no gradient: the policy does not know of it."""

    def __init__(self, policy: ShardedModel, sharded: ShardedModel):
        """`sharded`: a `ValueHead`."""
        self._policy = policy
        self.sharded = sharded

    @property
    def max_len(self) -> int | None:
        return positions_of(cast(Any, self._policy.module).config)

    def features(self, batch: MicroBatch) -> Tensor:
        model = cast(PreTrainedModel, self._policy.module)
        model.eval()
        with torch.no_grad():
            return forward_with_head(model, head_of(model), batch, lambda rows_ND: rows_ND, may_change=True)

    def values(self, batch: MicroBatch, features_ND: Tensor | None) -> Tensor:
        assert features_ND is not None
        # What was kept of no token at all has no width of its own.
        width = cast(ValueHead, self.sharded.skeleton).in_features
        return self.sharded.module(features_ND.reshape(batch.num_tokens, width))[:, 0]
