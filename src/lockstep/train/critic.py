"""Scored samples in, advantages from a critic's values out; then those samples and their returns in, a better critic out.

A step of PPO with a critic: `estimate` (values before any update, GAE), `update` (the critic's optimizer steps), then the actor's.
As the actor's, the loss is a sum over tokens divided by their number over all ranks: how samples are dealt to ranks, cut into
micro-batches and laid out does not change the gradient (CASES B89).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import record_function

from lockstep.config import CriticConfig, TrainConfig
from lockstep.data.estimates import Estimates, estimate
from lockstep.data.masks import sampled
from lockstep.data.packing import MicroBatch
from lockstep.dist import World, data_phase, sum_stats
from lockstep.errors import LockstepError
from lockstep.train.mini_batches import ByItem, MiniBatch, Planner
from lockstep.train.objective import sequences_of
from lockstep.train.offload import activations_on_host
from lockstep.train.optim import Optimizer, clip_and_step
from lockstep.train.value_loss import explained_variance, value_loss
from lockstep.train.values import Valuer
from lockstep.types import ScoredSample, Stat, TrainItem

LR_OF_THE_ACTORS = 10.0
"""verl's: 1e-5 for the critic, 1e-6 for the actor."""


def critic_train(critic: CriticConfig, train: TrainConfig) -> TrainConfig:
    """The train section as the critic sees it: its own rate, decay, epochs and mini-batches; packing and the rest are the actor's."""
    return train.model_copy(
        update={
            "lr": LR_OF_THE_ACTORS * train.lr if critic.lr is None else critic.lr,
            "weight_decay": critic.weight_decay,
            "schedule": critic.schedule,
            "warmup_steps": 0,
            "epochs": critic.epochs or train.epochs,
            "mini_batches": critic.mini_batches or train.mini_batches,
            "max_grad_norm": critic.max_grad_norm,
        }
    )


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """The critic at a step's samples, before it learns from them; by a sample's place among them."""

    estimates: Estimates
    values: ByItem
    """[sampled tokens] fp32; samples without any are not there."""
    features: ByItem | None
    """[sampled tokens, hidden size]: what a head has read (`Valuer.features`)."""


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """The same on every rank."""

    stats: dict[str, Stat] = field(default_factory=dict)
    """Over all ranks and mini-batches: those of `value_loss`. Empty where there was nothing to train on."""
    grad_norm: float = 0.0
    """Mean over optimizer steps of the global L2 norm before clipping."""
    lr: float = 0.0

    def metrics(self) -> dict[str, float]:
        """What `docs/metrics.md` says. The explained variance is of the values that the advantages were made with."""
        if not self.stats:
            return {"critic/lr": self.lr}
        names = {"loss": "value_loss", "clip_fraction": "value_clip", "values_mean": "value", "returns_mean": "return"}
        out = {f"critic/{ours}": self.stats[name].mean for ours, name in names.items()}
        explained = explained_variance(self.stats)
        if not math.isnan(explained):
            out["critic/explained_variance"] = explained
        return out | {"critic/grad_norm": self.grad_norm, "critic/lr": self.lr}


class Critic:
    """Holds no state of its own beyond the model and the optimizer."""

    def __init__(
        self,
        valuer: Valuer,
        optimizer: Optimizer,
        *,
        critic: CriticConfig,
        train: TrainConfig,
        world: World,
        pad_id: int,
        seed: int = 0,
    ):
        """`train`: the actor's section. `optimizer`: over `valuer.sharded`, made with `critic_train`. `seed`: of mini-batches."""
        self.valuer = valuer
        self.optimizer = optimizer
        self.world = world
        self._config = critic
        self._offloads = train.offload_activations
        self._seed = seed
        self._planner = Planner(
            critic_train(critic, train), _num_tokens, world=world, pad_id=pad_id, max_len=valuer.max_len
        )

    def trains_alone(self, step: int) -> bool:
        """Is the policy left as it is in this train step (0, 1, ..)?"""
        return step < self._config.warmup_steps

    def estimate(
        self, scored: Sequence[ScoredSample], *, token_rewards: Sequence[Sequence[float]] | None = None
    ) -> Look:
        """Collective. Values of this rank's samples without gradient and dropout, and the advantages made of them.

        `token_rewards`: one per id of each sample (`Actor.kl_rewards`).
        """
        items = [_item(each) for each in scored]
        (mini,) = self._planner.pack([[list(range(len(items)))]], items)
        values, features = self._look(mini)
        estimates = estimate(
            scored,
            [values[place].tolist() if place in values else () for place in range(len(items))],
            self.world,
            gamma=self._config.gamma,
            lam=self._config.lam,
            token_rewards=token_rewards,
        )
        return Look(estimates, values, features)

    def update(self, items: Sequence[TrainItem], places: Sequence[int], look: Look, *, step: int) -> CriticUpdate:
        """Collective. `epochs * mini_batches` optimizer steps on the items of all ranks; `places[i]` is where item i stands in `look`.

        A rank may bring none; if none brings a token, no step is taken. Leaves the model in eval mode. Raises, on every rank and
        without (another) step, `LockstepError` if the gradient is not finite.
        """
        plan = self._planner.pack(self._planner.deal(items, seed=f"{self._seed} {step}"), items)
        lr = self.optimizer.lr(step)
        plan = [mini for mini in plan if mini.num_tokens]
        if not plan:
            return CriticUpdate(lr=lr)
        kept = _Kept.of(items, places, look, device=self.world.device)
        stats: dict[str, Stat] = defaultdict(lambda: Stat(0.0, 0.0))
        norms = []
        for mini in plan:
            with data_phase(self.world, f"critic {step}"):
                self.optimizer.zero_grad()
                mine = self._accumulate(mini, kept)
                norms.append(self._clip_and_step(lr, step=step))
            for name, stat in sum_stats(mine, self.world).items():
                stats[name] += stat
        return CriticUpdate(dict(stats), math.fsum(norms) / len(norms), lr)

    def _look(self, mini: MiniBatch) -> tuple[ByItem, ByItem | None]:
        """Collective."""
        self.valuer.sharded.module.eval()
        values: ByItem = {}
        features: ByItem | None = None
        with data_phase(self.world, "values"), record_function("train::values"), torch.no_grad():
            for batch in mini.batches:
                features_ND = self.valuer.features(batch)
                values |= mini.split(self.valuer.values(batch, features_ND), batch)
                if features_ND is not None:
                    features = (features or {}) | mini.split(features_ND, batch)
        return values, features

    def _accumulate(self, mini: MiniBatch, kept: _Kept) -> dict[str, Stat]:
        """Collective. As `Actor._accumulate`: gradients of the scaled loss in the parameters; this rank's stats."""
        sharded = self.valuer.sharded
        sharded.module.train()
        scale = self.world.size / mini.denominator
        stats: dict[str, Stat] = defaultdict(lambda: Stat(0.0, 0.0))
        host = activations_on_host if self._offloads else nullcontext
        for number, batch in enumerate(mini.batches, start=1):
            sharded.set_gradient_sync(number == len(mini.batches))
            with record_function("train::values forward"), host():
                values_N = self.valuer.values(batch, mini.join(kept.features, batch))
                sums = value_loss(
                    values_N,
                    _joined(mini, kept.values, batch),
                    _joined(mini, kept.returns, batch),
                    sequences_of(batch, mini.items),
                    clip=self._config.value_clip or None,
                )
            with record_function("train::values backward"):
                (sums.loss_sum * scale).backward()
            for name, stat in sums.stats.items():
                stats[name] += stat
        sharded.module.eval()
        return dict(stats)

    def _clip_and_step(self, lr: float, *, step: int) -> float:
        """Collective. All ranks step or all raise."""
        grad_norm = clip_and_step(self.valuer.sharded, self.optimizer, max_norm=self._config.max_grad_norm, lr=lr)
        if not math.isfinite(grad_norm):
            raise LockstepError(
                f"step {step}: the gradient norm of the critic is {grad_norm}, expected a finite number; no optimizer step was taken. "
                "Look for non-finite rewards, or lower critic.lr"
            )
        return grad_norm


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What the update needs of a `Look`, by the item's place in the update."""

    values: ByItem
    returns: ByItem
    features: ByItem | None

    @classmethod
    def of(cls, items: Sequence[TrainItem], places: Sequence[int], look: Look, *, device: torch.device) -> _Kept:
        used = {i: place for i, place in enumerate(places) if items[i].num_sampled}
        values = {i: look.values[place] for i, place in used.items()}
        returns = {
            i: torch.tensor(sampled(look.estimates.returns[place], items[i].loss_mask), device=device)
            for i, place in used.items()
        }
        features = None if look.features is None else {i: look.features[place] for i, place in used.items()}
        return cls(values, returns, features)


def _num_tokens(*, num_tokens: float, num_sequences: float) -> float:
    """What the sum of losses is divided by: a mean over tokens, whatever the actor's aggregation (verl's critic likewise)."""
    return max(num_tokens, 1.0)


def _item(scored: ScoredSample) -> TrainItem:
    sample = scored.sample
    return TrainItem(sample.prompt.ids, sample.ids, sample.logprobs, 0.0, sample.slot, loss_mask=sample.loss_mask)


def _joined(mini: MiniBatch, values: ByItem, batch: MicroBatch) -> Tensor:
    joined = mini.join(values, batch)
    assert joined is not None
    return joined
