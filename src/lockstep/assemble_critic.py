"""A config, the policy and its checkpoint in; the critic that the recipe asks for, sharded and filled as the policy is, out."""

from __future__ import annotations

from typing import Any, cast

from lockstep.config import Config, CriticConfig
from lockstep.data.packing import Packing, check_packing_supported
from lockstep.dist import World, all_or_none
from lockstep.engines import DTYPES
from lockstep.errors import ConfigError, ModelError
from lockstep.model.load import ModelFiles, find_model
from lockstep.model.lora import inject_value_lora
from lockstep.model.value_model import ValueHead, build_empty_value_model
from lockstep.shard_model import shard_and_fill
from lockstep.sharding.base import ShardedModel
from lockstep.sharding.plan import MinParams, plan_sharding
from lockstep.sharding.shard import shard
from lockstep.train.critic import Critic, critic_train
from lockstep.train.optim import Optimizer
from lockstep.train.values import HeadValuer, ModelValuer, Valuer


def make_critic(config: Config, files: ModelFiles, policy: ShardedModel, *, pad_id: int) -> Critic | None:
    """Collective. None where the recipe has no critic. `files`: the policy's; `config.train` is decided (`train.choices`).

    Raises `ConfigError` or `ModelError` for a checkpoint that is not fit.
    """
    critic, train, world = config.critic, config.train, policy.world
    if critic is None:
        return None
    if critic.kind == "head":
        valuer: Valuer = HeadValuer(policy, make_value_head(config, policy))
    else:
        valuer = ModelValuer(make_value_model(config, critic, files, world=world))
    optimizer = Optimizer(valuer.sharded.trainable(), train=critic_train(critic, train), num_steps=config.run.num_steps)
    return Critic(valuer, optimizer, critic=critic, train=train, world=world, pad_id=pad_id, seed=config.run.seed)


def make_value_head(config: Config, policy: ShardedModel) -> ShardedModel:
    """Collective. A head for the policy's last hidden states; one unit."""
    output = cast(Any, policy.skeleton).get_output_embeddings()
    if output is None:
        raise ModelError(
            "critic.kind: head needs a causal language model with an output embedding; use critic.kind: model"
        )
    own = ValueHead(getattr(output, "base_layer", output).weight.shape[1])
    return shard(
        own,
        plan_sharding(own, MinParams()),
        backend=config.sharding.backend if policy.world.size > 1 else "fsdp2",
        timeout_s=config.dist.agree_timeout_s,
    )


def make_value_model(config: Config, critic: CriticConfig, files: ModelFiles, *, world: World) -> ShardedModel:
    """Collective. As the policy is made: empty, with LoRA, sharded, filled; no rank holds the whole base."""
    with all_or_none(world, "reading the critic's model"):
        own = find_model(critic.path) if critic.path else files
        if own.config.get_text_config().vocab_size < files.config.get_text_config().vocab_size:
            raise ConfigError(
                f"critic.path {critic.path!r} has a vocabulary of {own.config.get_text_config().vocab_size} tokens and the policy one of "
                f"{files.config.get_text_config().vocab_size}: it must read the policy's tokens; give a checkpoint with that tokenizer"
            )
        empty = build_empty_value_model(own, dtype=DTYPES[config.model.dtype], attention=config.model.attention)
        check_packing_supported(empty.model.config, cast(Packing, config.train.packing))
        model = inject_value_lora(empty.model, critic.lora, head=empty.head, seed=config.run.seed)
    return shard_and_fill(model, own, config, world, keep=empty.new)
